//! The counters of the requests of a band.

use scheduler::EndpointRef;

use crate::pool::{CountHistogram, DURATION_BOUNDS_MS};

/// How a request left flow control, in llm-d's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowOutcome {
    /// Sent to an endpoint.
    Dispatched,
    /// Over the limit of requests or bytes.
    RejectedCapacity,
    /// No endpoint can serve the request.
    RejectedNoEndpoints,
    /// Refused for another reason.
    RejectedOther,
    /// Waited for too long.
    EvictedTtl,
    /// Waited for too long, and no endpoint is ready.
    EvictedNoEndpoints,
    /// The client left.
    EvictedContextCancelled,
    /// Given up for another reason.
    EvictedOther,
}

/// The names of the outcomes in metrics, by [`FlowOutcome`].
pub const FLOW_OUTCOMES: [&str; 8] = [
    "Dispatched",
    "RejectedCapacity",
    "RejectedNoEndpoints",
    "RejectedOther",
    "EvictedTTL",
    "EvictedNoEndpoints",
    "EvictedContextCancelled",
    "EvictedOther",
];

#[derive(Clone, Debug, Default, PartialEq)]
pub struct BandCounters {
    pub priority: i32,
    /// Requests queued now.
    pub queued: u64,
    /// Bytes queued now.
    pub bytes: u64,
    /// Requests by outcome.
    pub outcomes: [u64; 8],
    /// Running requests of the band that were given up for others.
    pub given_up: u64,
    /// Running requests that were given up for requests of the band.
    pub given_up_for: u64,
    /// Time in the queue of the requests that were sent, in ms.
    pub queue_ms: CountHistogram,
    /// The oldest request queued, as of the last tick.
    pub oldest: Option<QueuedReason>,
}

/// How long a request has been queued, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuedReason {
    /// How long the request has been queued, in ms.
    pub ms: u64,
    /// The priority of its band.
    pub priority: i32,
    /// The endpoint that was picked for it and had no room. `None` if no endpoint could serve it,
    /// or if it has not been tried.
    pub full_at: Option<EndpointRef>,
}

// === impl BandCounters ===

impl BandCounters {
    /// Counts a request that was queued for `ms`.
    #[expect(
        clippy::cast_precision_loss,
        reason = "milliseconds stay far below 2^52"
    )]
    pub(super) fn count(&mut self, outcome: FlowOutcome, ms: u64) {
        if let Some(count) = self.outcomes.get_mut(outcome as usize) {
            *count += 1;
        }
        if outcome == FlowOutcome::Dispatched {
            self.queue_ms.record(ms as f64, &DURATION_BOUNDS_MS);
        }
    }
}
