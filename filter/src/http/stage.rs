//! The stages of a request and of its body, and what happens to the bytes of a callback.

/// What happens to the headers or bytes of a callback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FilterAction {
    /// They go on.
    Go,
    /// The proxy holds them.
    Hold,
}

/// The stage of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestStage {
    /// Not decided here, or gone on undecided: its body flows by.
    Passing,
    /// Waiting for its last byte.
    Buffering,
    /// Decided as far as its bytes go; waiting for state.
    Parked,
    /// Sent to a picked endpoint.
    Routed,
    /// Answered by us.
    Answered,
}

/// How the body is delivered. When a filter held a piece and the proxy was resumed before the last
/// one, Envoy up to 1.39 drops the next piece, unless the filter holds that one too and releases it
/// with another one or at a tick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyDelivery {
    /// None was shown.
    None,
    /// Held or passed as the callbacks said.
    InStep,
    /// Resumed at a tick: the next piece must be held.
    Ahead,
    /// A piece is held until the next callback or tick.
    HoldNext,
}
