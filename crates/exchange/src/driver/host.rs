//! The interface between a driver and its host.

use std::borrow::Cow;

use pool_state::{ManagedPool, Timestamp};

use crate::{ExchangeOutcome, ExchangeSettings, LocalReply, RequestChanges, ResponseStep};

/// Whether the headers or bytes of an event go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FilterStatus {
    /// The host lets the headers or bytes go on.
    Go,
    /// The host holds the headers or bytes.
    Hold,
}

/// How much of a request body has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyProgress {
    /// More bytes or trailers may follow.
    Partial,
    /// The whole body has arrived.
    Whole,
    /// Part of the body has arrived, and the host cannot show more before the decision.
    CutOff,
}

/// The reason why the driver opens the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolUse {
    /// To see which request headers its plugins read.
    Capture,
    /// To resolve the model, at the start of a decision. A host that shares load with other hosts
    /// first reads their load reports.
    Resolve,
    /// To pick. A host that shares load with other hosts publishes its load report afterwards.
    Pick,
    /// To record the response headers.
    Respond,
    /// To record a piece of the response. Most pieces change nothing that other hosts need.
    ReadResponse,
    /// To release the resources of the pick.
    Release,
}

/// The events that a host counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestCount {
    /// The request goes to a picked endpoint.
    Picked {
        /// Time from the request's last byte to the decision, in µs.
        us: u64,
    },
    /// The request goes to any endpoint, because the pool has no state.
    FailedOpen,
    /// The route of the request has no pool.
    Passed,
    /// The request is refused because it is invalid (4xx).
    Invalid,
    /// The request is refused because of a policy (429).
    Shed,
    /// The request is refused because no endpoint can serve it (5xx).
    Unavailable,
    /// The request no longer counts at its endpoint, because its client does not send the body or
    /// does not read the reply.
    Unread,
}

/// The host could not replace the beginning of the request body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RewriteError;

/// The calls that a driver makes to its host. All calls are about one stream.
pub trait RequestHost {
    /// A handle of a pool.
    type Pool;
    /// A held request body.
    type RequestBody: AsRef<[u8]>;
    /// A piece of a response body.
    type ResponseBody: AsRef<[u8]>;

    /// Whether the host is a filter, so that the proxy itself holds the request while the host
    /// decides. If the filter resumes a request in the middle of its body, the request gets one
    /// attempt. The filter then releases the next piece only with the piece after it, or later (see
    /// [`super`]).
    const IS_FILTER: bool;

    /// The monotonic time.
    fn now(&self) -> Timestamp;

    fn settings(&self) -> &ExchangeSettings;

    /// The reply to a request on the ready path.
    fn ready_reply(&self) -> LocalReply;

    /// The pool of the request's route, if it has one.
    fn find_pool(&mut self) -> Option<Self::Pool>;

    /// Calls `act` with the pool.
    fn with_pool<R>(
        &self,
        pool: &Self::Pool,
        usage: PoolUse,
        now: Timestamp,
        act: impl FnOnce(&mut ManagedPool) -> R,
    ) -> R;

    /// The raw subset hint. A hint that cannot be read counts as empty, so it allows no endpoint.
    fn subset_hint(&self) -> Option<Cow<'_, [u8]>>;

    /// Prepares to hold the request until its last body byte. Returns false if the host cannot show
    /// the body before the decision. The driver then decides without it.
    fn wait_for_body(&mut self) -> bool {
        true
    }

    /// Whether the host will report the last byte of a body that the driver does not read.
    fn shows_body_end(&self) -> bool {
        true
    }

    /// Returns `size` bytes of the request body, starting at `start`. The host keeps them. Bytes
    /// that cannot be read are left out.
    fn body_piece(&self, start: usize, size: usize) -> Cow<'_, [u8]>;

    /// Returns the first `size` bytes of the request body, which is mostly all of it. A body that
    /// cannot be read counts as empty.
    fn take_body(&mut self, size: usize) -> Self::RequestBody;

    /// Gives a body back to the host, because the request waits. If the proxy of the host has the
    /// body, the host drops it.
    fn keep_body(&mut self, body: Self::RequestBody) {
        drop(body);
    }

    /// Applies the changes and lets the request go on. `body` is the whole body. Without it, the
    /// held part of the body goes on unread.
    ///
    /// # Errors
    /// Returns [`RewriteError`] if the beginning of the body cannot be replaced. Then nothing was
    /// changed.
    fn forward(
        &mut self,
        changes: RequestChanges,
        body: Option<Self::RequestBody>,
    ) -> Result<(), RewriteError>;

    /// Whether the proxy may keep `bytes` bytes of this client's request until the stream ends.
    /// The proxy keeps them for a retry, so without them the request gets only one attempt. The
    /// driver asks once, and only about long bodies.
    fn may_keep(&mut self, _client: u64, _bytes: usize) -> bool {
        true
    }

    /// Replies to the client, and does not let the request go on.
    fn reply(&mut self, reply: LocalReply);

    /// Calls [`resume`](super::RequestDriver::resume) when the pool has state, or at `deadline`.
    /// Returns false if too many requests wait already, or too many of this client.
    fn park(&mut self, pool: &Self::Pool, deadline: Timestamp, client: u64) -> bool;

    /// The fairness id of the request, if the proxy sets one ([`crate::FlowRequestSettings`]).
    fn flow_id(&self) -> Option<Cow<'_, [u8]>> {
        None
    }

    /// Holds the request under this number, until [`Self::release_queued`] resumes it.
    fn hold(&mut self, pool: &Self::Pool, number: u64);

    /// Called when a request was sent that may be given up before its first response byte. Until
    /// then, [`Self::release_queued`] may resume the request under this number too.
    fn watch(&mut self, _pool: &Self::Pool, _number: u64) {}

    /// Resumes held requests soon, but not during this call. The host gets numbers from
    /// [`ManagedPool::next_due`] until there is none. For each number, the host calls
    /// [`resume`](super::RequestDriver::resume) for the request held under it, or skips a number
    /// that it does not hold. A host also does so after a tick of the pool and after new state.
    fn release_queued(&mut self, pool: &Self::Pool);

    /// Claims the room of the pick that was just made for a held request. A host whose pool shares
    /// its queues with other pools ([`pool_state::queues::FlowQueues::is_shared`]) returns false if
    /// another pool claimed first. The room is then given back, and the request stays held.
    fn claim(&self, _pool: &Self::Pool, _now: Timestamp) -> bool {
        true
    }

    /// Calls [`resume`](super::RequestDriver::resume) soon after `at`. The driver needs this only
    /// from a filter ([`Self::IS_FILTER`]).
    fn resume_after(&mut self, pool: &Self::Pool, at: Timestamp);

    /// Puts the time for which a request was held, and the priority of its band, into the access
    /// log.
    fn log_hold(&mut self, _ms: u64, _priority: i32) {}

    /// Whether a trace of the request is sampled. If so, its decision is explained.
    fn is_traced<'h>(
        &mut self,
        _pairs: impl Iterator<Item = (&'h [u8], &'h [u8])> + Clone,
    ) -> bool {
        false
    }

    /// Puts the ranked endpoints with their costs, a JSON array, into the span. The array has at
    /// most [`scheduler::RANKED_MAX`] rows, with the scorers of the configuration, and no content
    /// of the request.
    fn trace_decision(&mut self, _candidates: String) {}

    /// Puts the outcome into the span at the last byte of the response, because a proxy may end its
    /// span before the stream ends. If the body of a response is not read, or breaks off, this is
    /// not called.
    fn trace_outcome(&mut self, _outcome: &ExchangeOutcome) {}

    /// Puts a decision record into the access log.
    fn log_decision(&mut self, record: &str);

    /// Counts a request, and also for its pool if the pool is known.
    fn count(&mut self, pool: Option<&Self::Pool>, count: RequestCount);

    /// Changes the response headers. They are sent, unless the body is held
    /// ([`crate::ResponseBody::Hold`]).
    fn send_response_headers(&mut self, step: ResponseStep);

    /// Calls [`check_reply`](super::RequestDriver::check_reply) about once a second from now on,
    /// until the stream has ended. A host without timers does nothing.
    fn watch_reply(&mut self) {}

    /// Returns the next `size` bytes of the response body.
    fn take_response_body(&mut self, size: usize) -> Self::ResponseBody;

    /// Lets a piece of the response body go on, or `restored` instead. With `held`, the headers go
    /// on too, and `content-length` must be the length of `restored`.
    fn send_response_body(&mut self, body: Self::ResponseBody, restored: Option<&[u8]>, held: bool);

    /// Sends bytes before the trailers of the response. A filter cannot do this, and does nothing.
    fn append_response(&mut self, bytes: &[u8]);

    /// Whether the endpoint broke off its response. The driver calls this when a stream ends before
    /// its response does.
    fn endpoint_broke_off(&mut self) -> bool;

    /// Called when a routed request has ended.
    fn ended(&mut self, outcome: &ExchangeOutcome);
}
