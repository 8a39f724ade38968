//! A request that waits, as the VM sees it.

/// A request that waits for the first state of its pool, or for room at its endpoint.
pub trait ParkedRequest {
    /// Whether the request still waits.
    fn waits(&self) -> bool;
    /// Decides again, or releases the held piece, because state arrived, the deadline passed, or
    /// the pool named the request.
    fn retry(&self);
}
