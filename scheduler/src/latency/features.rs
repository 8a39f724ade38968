//! From conditions to the numbers a model sees: the one table of features, and the one function that fills it.

use super::conditions::Conditions;
use super::step::StepModel;

/// How many features there are.
pub const FEATURES_COUNT: usize = FEATURES.len();

/// The features of one endpoint and one request, in the order of [`FEATURES`].
pub type Features = [f32; FEATURES_COUNT];

/// One number a model sees.
#[derive(Clone, Copy, Debug)]
pub struct Feature {
    /// Its name.
    pub name: &'static str,
    /// What it is, for people.
    pub doc: &'static str,
}

/// All features, in order.
pub const FEATURES: [Feature; 8] = [
    Feature { name: "service", doc: "ln(1 + ms) of this prompt's prefill and of all queued before it, by the step model" },
    Feature { name: "step", doc: "ln(1 + ms) of a decode step with this request in the batch, by the step model" },
    Feature { name: "requests", doc: "ln(1 + requests under way)" },
    Feature { name: "queued", doc: "ln(1 + requests waiting in the engine)" },
    Feature { name: "kv", doc: "share of KV-cache blocks in use" },
    Feature { name: "uncached", doc: "ln(1 + prompt tokens to be worked through)" },
    Feature { name: "prompt", doc: "ln(1 + prompt tokens)" },
    Feature { name: "prefill", doc: "ln(1 + prompt tokens outstanding before it)" },
];

/// The features under these conditions: what is unknown counts as nothing there, but for requests running, which the ledger knows too.
#[must_use]
pub fn features(conditions: &Conditions, step: &StepModel) -> Features {
    let c = conditions;
    let queued = c.queued.unwrap_or(0.0);
    let running = c.running.unwrap_or(c.requests);
    let service_ms = step.prefill_ms(c.uncached_tokens, c.prompt_tokens) + step.prefill_ms(c.prefill_tokens, c.prefill_tokens);
    let step_ms = step.decode_ms(running + 1.0, c.context_tokens + c.prompt_tokens);
    let ln = libm::log1pf;
    [
        ln(service_ms),
        ln(step_ms),
        ln(c.requests),
        ln(queued),
        c.kv_utilization.unwrap_or(0.0),
        ln(c.uncached_tokens),
        ln(c.prompt_tokens),
        ln(c.prefill_tokens),
    ]
}
