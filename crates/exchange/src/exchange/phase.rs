//! The progress of a request, as the only enum of phases for every host.

use pool_state::queues::QueuedTicket;

use super::queued_request::QueuedRequest;
use super::routed_request::RoutedRequest;

/// The progress of a request. The diagram is in [`crate::driver`].
#[derive(Debug)]
pub(crate) enum ExchangePhase {
    /// The request headers have not arrived.
    Started,
    /// The request is held until its last body byte arrives.
    Buffering,
    /// The request is held until the pool has its first state, or until the deadline.
    Parked,
    /// Flow control holds the request until its endpoint has room. The pool's queues count it until
    /// then.
    Queued(QueuedTicket, Box<QueuedRequest>),
    /// The request was sent to a picked endpoint. The in-flight ledger counts it until the end.
    Routed(Box<RoutedRequest>),
    /// The request goes on without a pick.
    Passed,
    /// The request got a local reply.
    Answered {
        /// The drop reason that no pool has counted yet, because the request was refused before its
        /// pool was known.
        uncounted: Option<&'static str>,
    },
    /// The stream has ended, and the pool holds nothing for it.
    Ended,
}
