//! How far a request and its body are, and what becomes of the bytes of a callback.

/// What becomes of the callback's headers or bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FilterAction {
    /// They go on.
    Go,
    /// The proxy holds them.
    Hold,
}

/// How far the request is.
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

/// How the body comes. Where a filter held a piece and the proxy was told to go on before the last, Envoy up to 1.39 drops the piece after, unless the
/// filter holds that too and lets it go together with yet another, or at a tick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyDelivery {
    /// None was shown.
    None,
    /// Held, or gone on, as their callbacks said.
    InStep,
    /// Gone on at a tick: the next is to be held.
    Ahead,
    /// One is held, for the next callback or tick.
    HoldNext,
}
