//! The conditions at the moment of a pick: the load of an endpoint, and the size of a request.

/// The largest valid condition. A larger number cannot be a count of requests or tokens. An `f32`
/// is exact up to this number.
const CONDITION_MAX: f32 = 16_777_216.0;

/// The load of one endpoint and the size of one request at the moment of a pick, as the proxy knew
/// them. The counts do not include this request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Conditions {
    /// The number of requests that wait in the engine, as scraped; `None` if it is unknown.
    pub queued: Option<f32>,
    /// The number of requests that the engine runs, as scraped; `None` if it is unknown.
    pub running: Option<f32>,
    /// The number of requests in flight at the endpoint: the last scrape plus the changes since
    /// that scrape, or the in-flight ledger alone.
    pub requests: f32,
    /// The number of uncached prompt tokens of requests without a first token, from the ledger.
    pub prefill_tokens: f32,
    /// The number of context tokens of requests that have their first token, from the ledger.
    pub context_tokens: f32,
    /// The share of KV-cache blocks in use, 0 to 1, as scraped; `None` if it is unknown.
    pub kv_utilization: Option<f32>,
    /// The number of prompt tokens of this request.
    pub prompt_tokens: f32,
    /// The estimated number of prompt tokens that the endpoint has not cached; at most
    /// `prompt_tokens`.
    pub uncached_tokens: f32,
}

// === impl Conditions ===

impl Conditions {
    /// Returns the conditions if every number is possible: numbers are finite and not negative,
    /// shares are at most 1, and there are no more uncached tokens than prompt tokens. Otherwise
    /// returns `None`, because the sender has caused an error.
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
