//! What the steps of an engine cost, and how that is learned from first tokens and from gaps between tokens.
//!
//! A prefill of `u` uncached of `n` prompt tokens takes `c0 + c1 u + c2 (n² - (n-u)²)` ms: a constant, the work of each token, and its attention
//! to all before it. A decode step of a batch of `B` with `K` tokens of context takes `e0 + e1 B + e2 K` ms. Both times a speed of the endpoint.

use crate::snapshot::{EndpointRef, Incarnation};

/// What the steps of a pool's engines cost, in ms. The default is deliberately rough: the learner corrects it within some tens of requests.
#[derive(Clone, Debug, PartialEq)]
pub struct StepModel {
    /// `c0`, `c1`, `c2` of a prefill.
    prefill: [f32; 3],
    /// `e0`, `e1`, `e2` of a decode step.
    decode: [f32; 3],
    /// Tokens that a request puts out, on average.
    output_tokens: f32,
    /// By slot.
    speeds: Box<[Speed]>,
}

/// How much longer than the pool's model one endpoint takes.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Speed {
    incarnation: Incarnation,
    prefill: f32,
    decode: f32,
}

const PREFILL_PRIOR: [f32; 3] = [10.0, 0.05, 1e-6];
const DECODE_PRIOR: [f32; 3] = [11.0, 0.025, 8e-5];
const OUTPUT_TOKENS_PRIOR: f32 = 200.0;

const AVERAGE: Speed = Speed { incarnation: Incarnation(0), prefill: 1.0, decode: 1.0 };

/// A first token, as the step learner wants it: of the request that had waited longest at its endpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FirstToken {
    /// Prompt tokens worked through.
    pub uncached_tokens: f32,
    /// All prompt tokens.
    pub prompt_tokens: f32,
    /// From the pick, or from the endpoint's previous first token if that was later, to this first token, ms.
    pub service_ms: f32,
}

/// A gap between two tokens of one stream, while nobody at its endpoint waited for a first token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gap {
    /// Requests decoding at the endpoint.
    pub batch: f32,
    /// Tokens of context of all of them.
    pub context_tokens: f32,
    /// The gap, ms a token.
    pub gap_ms: f32,
}

// === impl StepModel ===

impl Default for StepModel {
    fn default() -> Self {
        Self { prefill: PREFILL_PRIOR, decode: DECODE_PRIOR, output_tokens: OUTPUT_TOKENS_PRIOR, speeds: Box::default() }
    }
}

impl StepModel {
    /// A model of these coefficients, in ms, all endpoints alike. What is negative or no number counts as 0.
    #[must_use]
    pub fn of(prefill: [f32; 3], decode: [f32; 3], output_tokens: f32) -> Self {
        let sane = |coefficients: [f32; 3]| coefficients.map(|c| if c.is_finite() { c.max(0.0) } else { 0.0 });
        let output_tokens = if output_tokens.is_finite() { output_tokens.max(1.0) } else { OUTPUT_TOKENS_PRIOR };
        Self { prefill: sane(prefill), decode: sane(decode), output_tokens, speeds: Box::default() }
    }

    /// The same where this endpoint takes so many times as long as the others. Below 1 is faster.
    #[must_use]
    pub fn with_speed(self, endpoint: EndpointRef, prefill: f32, decode: f32) -> Self {
        let slot = usize::from(endpoint.slot.0);
        let mut speeds = self.speeds.into_vec();
        if speeds.len() <= slot {
            speeds.resize(slot + 1, AVERAGE);
        }
        if let Some(speed) = speeds.get_mut(slot) {
            *speed = Speed { incarnation: endpoint.incarnation, prefill, decode };
        }
        Self { speeds: speeds.into(), ..self }
    }

    /// A prefill of `uncached` of `prompt` tokens at an average endpoint, ms.
    #[must_use]
    pub fn prefill_ms(&self, uncached: f32, prompt: f32) -> f32 {
        let [c0, c1, c2] = self.prefill;
        c0 + uncached * (c1 + c2 * (prompt + prompt - uncached))
    }

    /// A decode step of `batch` requests with `context_tokens` in all, at an average endpoint, ms.
    #[must_use]
    pub fn decode_ms(&self, batch: f32, context_tokens: f32) -> f32 {
        let [e0, e1, e2] = self.decode;
        e0 + e1 * batch + e2 * context_tokens
    }

    /// `c0`, `c1`, `c2`.
    #[must_use]
    pub fn prefill(&self) -> [f32; 3] {
        self.prefill
    }

    /// `e0`, `e1`, `e2`.
    #[must_use]
    pub fn decode(&self) -> [f32; 3] {
        self.decode
    }

    /// Tokens that a request puts out, on average.
    #[must_use]
    pub fn output_tokens(&self) -> f32 {
        self.output_tokens
    }

    /// How many times as long as an average endpoint this one takes: for a prefill, and for a decode step. 1 where nothing is known of this
    /// incarnation.
    #[must_use]
    pub fn speed(&self, endpoint: EndpointRef) -> (f32, f32) {
        let speed = self.speeds.get(usize::from(endpoint.slot.0)).filter(|speed| speed.incarnation == endpoint.incarnation);
        speed.map_or((1.0, 1.0), |speed| (speed.prefill, speed.decode))
    }
}
