//! The interface through which the VM uses a stream: a request that waits, or that the VM watches.

use std::rc::Weak;

use exchange::Timestamp;

use super::replica::SharedReplica;

/// A request that waits for the first state of its pool, or for room at its endpoint.
pub trait ParkedRequest {
    /// Whether the request still waits.
    fn waits(&self) -> bool;
    /// Decides the request again, or releases the held piece of its body, because state arrived,
    /// the deadline passed, or flow control lets the request try again.
    fn retry(&self);
    /// Checks a sent request that may make no progress.
    fn check_reply(&self, now: Timestamp);
    /// Refuses the request if its body is not complete, because there is no room for the body.
    fn refuse_body(&self);
}

pub(super) struct ParkingEntry {
    pub(super) deadline: Timestamp,
    pub(super) client: u64,
    pub(super) replica: SharedReplica,
    pub(super) request: Weak<dyn ParkedRequest>,
}
