//! An arriving request, and how it is queued.

use scheduler::flow::{FlowControl, FlowCost, QueuedFacts};
use scheduler::{EndpointRef, Timestamp, name_hash};

use super::band::QueuedEntry;
use super::pass::LOOK_AHEAD;
use super::{FlowOutcome, FlowQueues, QueueRefusal, QueuedTicket};

/// The maximum number of bytes kept of a request's id. Operators use the id to find the request in
/// logs. Most proxies make UUIDs of 36 bytes.
const REQUEST_ID_BYTES_MAX: usize = 64;

/// The fairness id of requests without one and without a known client, as in llm-d.
pub const DEFAULT_FLOW: &str = "default-flow";

/// An arriving request.
#[derive(Clone, Copy, Debug)]
pub struct FlowArrival<'a> {
    /// The fairness id; empty if there is none.
    pub flow: &'a str,
    /// A hash of the client, which is the flow of a request without a fairness id; 0 if the client
    /// is unknown.
    pub client: u64,
    /// The id by which operators find the request while it waits.
    pub request_id: &'a str,
    /// The bytes of its body, and the memory that the proxy keeps for it.
    pub bytes: u64,
    /// The time when its headers arrived.
    pub arrived: Timestamp,
    /// How long it may wait, in ms, if that is less than its band allows.
    pub ttl_ms: Option<u64>,
}

/// A request that will be queued.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting {
    pub(crate) priority: i32,
    pub(crate) ttft_slo_us: Option<u32>,
    pub(crate) cost: FlowCost,
    /// The endpoint that had no room for it.
    pub(crate) full_at: Option<EndpointRef>,
}

/// The part of a request's id that is kept.
pub(crate) fn short_id(id: &str) -> &str {
    if id.len() > REQUEST_ID_BYTES_MAX {
        id.get(..REQUEST_ID_BYTES_MAX).unwrap_or_default()
    } else {
        id
    }
}

// === impl FlowArrival ===

impl FlowArrival<'_> {
    /// The flow of the request: the hash of its fairness id, or its client if it has no fairness
    /// id.
    pub(crate) fn flow_id(&self) -> u64 {
        match (self.flow, self.client) {
            ("", 0) => name_hash(DEFAULT_FLOW),
            ("", client) => client,
            (fairness_id, _) => name_hash(fairness_id),
        }
    }
}

// === impl FlowQueues ===

impl FlowQueues {
    /// Queues a request. Returns the ticket, and whether the request is so near to the head of its
    /// band that it is tried at once.
    ///
    /// # Errors
    /// Refuses the request if it has no room within the limits, even after other requests are
    /// refused, or if no band has its priority.
    pub(crate) fn hold(
        &mut self,
        control: &FlowControl,
        arrival: &FlowArrival<'_>,
        waiting: Waiting,
        now: Timestamp,
    ) -> Result<(QueuedTicket, bool), QueueRefusal> {
        let priority = waiting.priority;
        let Some(rules) = control.band(priority) else {
            return Err(self.refusal(FlowOutcome::RejectedOther, priority));
        };
        let band = self.band_mut(priority);
        band.seen = now;
        let own = band.priority;
        if !self.find_room(control, arrival, own, now) {
            let counters = &mut self.band_mut(own).counters;
            counters.count(FlowOutcome::RejectedCapacity, 0);
            return Err(self.refusal(FlowOutcome::RejectedCapacity, own));
        }
        self.last += 1;
        let number = self.last;
        let arrived = arrival.arrived;
        let ttl_ms = |of_band: u64| arrival.ttl_ms.map_or(of_band, |ttl| ttl.min(of_band));
        let expires = arrived.plus_ms(ttl_ms(rules.ttl_ms));
        let entry = QueuedEntry {
            key: rules.ordering.key(&QueuedFacts {
                arrived,
                expires,
                ttft_slo_us: waiting.ttft_slo_us,
            }),
            number,
            since: now,
            expires,
            gives_up: arrived.plus_ms(ttl_ms(control.no_endpoint_ttl_ms())),
            bytes: arrival.bytes,
            owner: arrival.flow_id(),
            cost: waiting.cost,
            full_at: waiting.full_at,
            nowhere: false,
            asked: None,
            to_check: false,
            request_id: short_id(arrival.request_id).into(),
        };
        let key = entry.key;
        // While a pass is due, the requests before this one are tried first.
        let is_due = self.pass.is_due();
        let band = self.band_mut(own);
        let is_first = band.queued == 0;
        let flow = band.flow_ref(arrival.flow_id());
        band.push(flow.at, rules.fairness, entry);
        Ok((
            QueuedTicket {
                number,
                flow,
                key,
                is_first,
            },
            !is_due && band.queued <= LOOK_AHEAD,
        ))
    }
}
