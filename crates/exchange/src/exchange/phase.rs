//! How far a request is: the one enum of phases, below every host.

use pool_state::queues::QueuedTicket;

use super::queued_request::QueuedRequest;
use super::routed_request::RoutedRequest;

/// How far a request is. The diagram is in [`crate::driver`].
#[derive(Debug)]
pub(crate) enum ExchangePhase {
    /// The request headers have not come.
    Started,
    /// Held until the last body byte.
    Buffering,
    /// Held until the pool has its first state, or the deadline.
    Parked,
    /// Held by flow control until its endpoint has room; the pool's queues count it until then.
    Queued(QueuedTicket, Box<QueuedRequest>),
    /// Sent to a picked endpoint; the in-flight ledger counts it until the end.
    Routed(Box<RoutedRequest>),
    /// Goes on without a pick.
    Passed,
    /// Got a local reply.
    Answered {
        /// The drop reason that no pool has counted yet: the request was refused before its pool
        /// was known.
        uncounted: Option<&'static str>,
    },
    /// The stream has ended; the pool holds nothing for it.
    Ended,
}
