//! From what requests saw to a [`LatencyModel`](super::LatencyModel).

use super::Conditions;
use super::step::{FirstToken, Gap};
use crate::snapshot::EndpointRef;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// With its last token.
    Done,
    /// The client left before that: how long it would have taken is not known, so it is not learned from.
    Aborted,
    /// The endpoint failed it: no measure of its speed either.
    Failed,
}

/// What one request saw.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Observation {
    /// Who served it.
    pub endpoint: EndpointRef,
    /// What was true of that endpoint and this request at the pick.
    pub conditions: Conditions,
    /// How it ended.
    pub ended: Ended,
    /// From sending it to its first token, ms; `None` when it was not streamed.
    pub ttft_ms: Option<f32>,
    /// Time for each token after the first, by tokens, ms; `None` when it was not streamed, or had but one.
    pub tpot_ms: Option<f32>,
    /// Tokens it put out.
    pub output_tokens: Option<u32>,
    /// Its first token as a measure of a prefill, when it was one.
    pub first_token: Option<FirstToken>,
    /// A gap of its stream as a measure of a decode step, when there was one.
    pub gap: Option<Gap>,
}
