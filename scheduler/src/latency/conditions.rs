//! What is true of an endpoint and a request at the moment of a pick.

/// The largest number a condition may be: beyond it, it is no count of requests or tokens but an error. Fits an `f32` exactly.
const CONDITION_MAX: f32 = 16_777_216.0;

/// What is true of one endpoint and one request at the moment of a pick. Counts are what is known there and then, this request not among them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Conditions {
    /// Requests that wait in the engine, as scraped; `None` is unknown.
    pub queued: Option<f32>,
    /// Requests that the engine runs, as scraped; `None` is unknown.
    pub running: Option<f32>,
    /// Requests under way at the endpoint: the scrape corrected by what changed since, or the ledger alone.
    pub requests: f32,
    /// Uncached prompt tokens of requests that have no first token yet, by the ledger.
    pub prefill_tokens: f32,
    /// Tokens of context of requests past their first token, by the ledger.
    pub context_tokens: f32,
    /// Share of KV-cache blocks in use, 0 to 1, as scraped; `None` is unknown.
    pub kv_utilization: Option<f32>,
    /// Tokens of this request's prompt.
    pub prompt_tokens: f32,
    /// Those of them that the endpoint is not believed to hold, at most all.
    pub uncached_tokens: f32,
}

// === impl Conditions ===

impl Conditions {
    /// The same where every number is one that can be: finite, not negative, shares at most 1, no more uncached than there is; `None` where one is
    /// not, for which the sender is to blame.
    #[must_use]
    pub fn checked(self) -> Option<Self> {
        let Self { queued, running, requests, prefill_tokens, context_tokens, kv_utilization, prompt_tokens, uncached_tokens } = self;
        let counts = [queued.unwrap_or(0.0), running.unwrap_or(0.0), requests, prefill_tokens, context_tokens, prompt_tokens];
        let sane = counts.iter().all(|count| (0.0..=CONDITION_MAX).contains(count))
            && kv_utilization.is_none_or(|share| (0.0..=1.0).contains(&share))
            && (0.0..=prompt_tokens).contains(&uncached_tokens);
        sane.then_some(self)
    }
}
