//! The conditions of an endpoint and a request at the moment of a pick.

/// The largest valid condition. A larger number cannot be a count of requests or tokens. An `f32`
/// is exact up to this number.
const CONDITION_MAX: f32 = 16_777_216.0;

/// The conditions of one endpoint and one request at the moment of a pick, as the proxy knew them.
/// Counts do not include this request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Conditions {
    /// Requests waiting in the engine, as scraped; `None` if unknown.
    pub queued: Option<f32>,
    /// Requests running in the engine, as scraped; `None` if unknown.
    pub running: Option<f32>,
    /// Requests in flight at the endpoint: the last scrape plus changes since then, or the
    /// in-flight ledger alone.
    pub requests: f32,
    /// Uncached prompt tokens of requests without a first token yet, from the ledger.
    pub prefill_tokens: f32,
    /// Context tokens of requests past their first token, from the ledger.
    pub context_tokens: f32,
    /// Share of KV-cache blocks in use, 0 to 1, as scraped; `None` if unknown.
    pub kv_utilization: Option<f32>,
    /// Prompt tokens of this request.
    pub prompt_tokens: f32,
    /// Prompt tokens estimated not to be cached at the endpoint; at most `prompt_tokens`.
    pub uncached_tokens: f32,
}

// === impl Conditions ===

impl Conditions {
    /// Returns the conditions if every number is possible: finite and not negative, with shares of
    /// at most 1, and no more uncached tokens than prompt tokens. Otherwise the sender is at fault,
    /// and the result is `None`.
    #[must_use]
    pub fn checked(self) -> Option<Self> {
        let Self {
            queued,
            running,
            requests,
            prefill_tokens,
            context_tokens,
            kv_utilization,
            prompt_tokens,
            uncached_tokens,
        } = self;
        let counts = [
            queued.unwrap_or(0.0),
            running.unwrap_or(0.0),
            requests,
            prefill_tokens,
            context_tokens,
            prompt_tokens,
        ];
        let sane = counts
            .iter()
            .all(|count| (0.0..=CONDITION_MAX).contains(count))
            && kv_utilization.is_none_or(|share| (0.0..=1.0).contains(&share))
            && (0.0..=prompt_tokens).contains(&uncached_tokens);
        sane.then_some(self)
    }
}
