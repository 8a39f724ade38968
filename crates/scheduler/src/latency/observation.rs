//! The measurements of a finished request, from which the daemon learns.

use super::Conditions;
use crate::endpoint::EndpointRef;

/// The way in which a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestEnd {
    /// The request ended with its last token.
    Done,
    /// The client disconnected before the last token. The full latency is unknown, so the daemon
    /// does not learn from the request.
    Aborted,
    /// The endpoint failed the request. A failure says nothing about the speed of the endpoint.
    Failed,
}

/// The measured times of one finished request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Observation {
    pub endpoint: EndpointRef,
    /// The load of the endpoint and the size of the request at the pick.
    pub conditions: Conditions,
    pub ended: RequestEnd,
    /// The time from sending the request to its first token, in ms; `None` if the response was not
    /// streamed.
    pub ttft_ms: Option<f32>,
    /// The mean time per output token after the first token, in ms; `None` if the response was not
    /// streamed or had only one token.
    pub tpot_ms: Option<f32>,
    /// The number of output tokens; `None` if it is unknown.
    pub output_tokens: Option<u32>,
    /// The first token as a sample of a prefill, if it can serve as a sample.
    pub first_token: Option<FirstToken>,
    /// A gap of the token stream as a sample of a decode step, if the stream had a gap that can
    /// serve as a sample.
    pub gap: Option<TokenGap>,
}

/// The difference, in ms, between the TTFT of a request and its service time above which the
/// request waited for prefills of other requests.
const QUEUED_MS: f32 = 0.5;

impl Observation {
    /// Whether the request waited for prefills of other requests: its endpoint sent first tokens of
    /// other requests between the pick and this request's first token. For a request that was not
    /// streamed, returns whether prompts waited for prefill at the endpoint at the pick.
    pub fn queued(&self) -> bool {
        match (self.ttft_ms, self.first_token) {
            (Some(ttft_ms), Some(first)) => ttft_ms > first.service_ms + QUEUED_MS,
            _ => self.conditions.prefill_tokens > 0.0,
        }
    }
}

/// A first token as a sample of a prefill, from the request that had waited longest at its
/// endpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FirstToken {
    /// The number of prompt tokens that the endpoint computed.
    pub uncached_tokens: f32,
    pub prompt_tokens: f32,
    /// The time from the pick, or from the endpoint's previous first token if that was later, to
    /// this first token, in ms.
    pub service_ms: f32,
}

/// A gap between two tokens of one stream, while no request at its endpoint waited for a first
/// token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenGap {
    /// The number of requests that decode at the endpoint.
    pub batch: f32,
    pub context_tokens: f32,
    /// The length of the gap, in ms per token.
    pub gap_ms: f32,
}
