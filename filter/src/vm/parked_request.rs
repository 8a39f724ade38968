//! A request that waits, or that the VM watches, as the VM sees it.

use exchange::Timestamp;

/// A request that waits for the first state of its pool, or for room at its endpoint.
pub trait ParkedRequest {
    /// Whether the request still waits.
    fn waits(&self) -> bool;
    /// Decides again, or releases the held piece, because state arrived, the deadline passed, or
    /// the pool named the request.
    fn retry(&self);
    /// Looks at a reply that may not go on. False if the stream has ended, or must not be watched
    /// any more.
    fn check_reply(&self, now: Timestamp) -> bool;
    /// Refuses the request, if its body is not yet whole: there is no room for it.
    fn refuse_body(&self);
}
