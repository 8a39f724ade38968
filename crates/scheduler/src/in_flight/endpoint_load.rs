//! The load of one endpoint.

use crate::slo::Slo;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EndpointLoad {
    /// The number of requests that were sent to the endpoint and have not ended.
    pub requests: u32,
    /// The uncached prompt tokens of requests without a first token. If configured, the expected
    /// output of all requests is added.
    pub prefill_tokens: u64,
    /// The tokens of requests that decode: the prompts of these requests, and their output after
    /// the first token.
    pub decode_tokens: u64,
    /// The sums over the prompts of requests without a first token.
    pub prefills: PendingPrefills,
    /// The lowest TTFT SLO of requests without a first token, in µs; `None` if no such request has
    /// a TTFT SLO.
    pub ttft_slo_us: Option<u32>,
    /// The lowest TPOT SLO of all requests, even of those without a first token, in µs per token;
    /// `None` if no request has a TPOT SLO.
    pub tpot_slo_us: Option<u32>,
}

/// Sums over the prompts whose prefill waits or runs. A linear step model computes the time of
/// these prefills from the sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PendingPrefills {
    /// The number of prompts with uncached tokens.
    pub prompts: u32,
    /// The number of tokens of all prompts with uncached tokens, including their cached tokens.
    pub prompt_tokens: u64,
    /// The estimated number of uncached tokens of these prompts.
    pub uncached_tokens: u64,
    /// The attention of these prompts, in units of [`ATTENTION_UNIT`]. A prompt of n tokens, of
    /// which u are uncached, has the attention n^2 - (n - u)^2.
    pub attention: u64,
}

/// The number of pairs of tokens in one unit of [`PendingPrefills::attention`]. One unit is the
/// attention of a prompt of 256 tokens, which takes a fraction of a millisecond. In this unit,
/// thousands of the longest prompts fit into 32 bits on the wire.
pub const ATTENTION_UNIT: u64 = 65_536;

pub(super) const NOTHING: EndpointLoad = EndpointLoad {
    requests: 0,
    prefill_tokens: 0,
    decode_tokens: 0,
    prefills: NO_PREFILLS,
    ttft_slo_us: None,
    tpot_slo_us: None,
};

pub(super) const NO_PREFILLS: PendingPrefills = PendingPrefills {
    prompts: 0,
    prompt_tokens: 0,
    uncached_tokens: 0,
    attention: 0,
};

// === impl EndpointLoad ===

impl EndpointLoad {
    /// Returns the lowest SLOs of the requests.
    #[must_use]
    pub fn slo(&self) -> Slo {
        Slo {
            ttft_us: self.ttft_slo_us,
            tpot_us: self.tpot_slo_us,
        }
    }

    pub(super) fn set_slo(&mut self, slo: Slo) {
        self.ttft_slo_us = slo.ttft_us;
        self.tpot_slo_us = slo.tpot_us;
    }
}

// === impl PendingPrefills ===

impl PendingPrefills {
    /// Returns the sums for one prompt. `uncached_tokens` above `prompt_tokens` counts as
    /// `prompt_tokens`.
    #[must_use]
    pub fn from_tokens(prompt_tokens: u32, uncached_tokens: u32) -> Self {
        let prompt = u64::from(prompt_tokens);
        let uncached = u64::from(uncached_tokens.min(prompt_tokens));
        let attention = prompt.pow(2) - (prompt - uncached).pow(2);
        Self {
            prompts: u32::from(uncached > 0),
            prompt_tokens: prompt,
            uncached_tokens: uncached,
            attention: attention.div_ceil(ATTENTION_UNIT),
        }
    }

    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self {
            prompts: self.prompts.saturating_add(other.prompts),
            prompt_tokens: self.prompt_tokens.saturating_add(other.prompt_tokens),
            uncached_tokens: self.uncached_tokens.saturating_add(other.uncached_tokens),
            attention: self.attention.saturating_add(other.attention),
        }
    }

    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self {
            prompts: self.prompts.saturating_sub(other.prompts),
            prompt_tokens: self.prompt_tokens.saturating_sub(other.prompt_tokens),
            uncached_tokens: self.uncached_tokens.saturating_sub(other.uncached_tokens),
            attention: self.attention.saturating_sub(other.attention),
        }
    }

    #[must_use]
    pub fn times(self, count: u32) -> Self {
        Self {
            prompts: self.prompts.saturating_mul(count),
            prompt_tokens: self.prompt_tokens.saturating_mul(u64::from(count)),
            uncached_tokens: self.uncached_tokens.saturating_mul(u64::from(count)),
            attention: self.attention.saturating_mul(u64::from(count)),
        }
    }
}

// === impl EndpointLoad ===

impl EndpointLoad {
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        let lowest = |one: Option<u32>, two: Option<u32>| one.into_iter().chain(two).min();
        Self {
            requests: self.requests.saturating_add(other.requests),
            prefill_tokens: self.prefill_tokens.saturating_add(other.prefill_tokens),
            decode_tokens: self.decode_tokens.saturating_add(other.decode_tokens),
            prefills: self.prefills.with(other.prefills),
            ttft_slo_us: lowest(self.ttft_slo_us, other.ttft_slo_us),
            tpot_slo_us: lowest(self.tpot_slo_us, other.tpot_slo_us),
        }
    }

    /// Returns `count` times this load, with the same SLOs.
    #[must_use]
    pub fn times(self, count: u32) -> Self {
        Self {
            requests: self.requests.saturating_mul(count),
            prefill_tokens: self.prefill_tokens.saturating_mul(u64::from(count)),
            decode_tokens: self.decode_tokens.saturating_mul(u64::from(count)),
            prefills: self.prefills.times(count),
            ..self
        }
    }
}
