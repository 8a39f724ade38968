//! Settings of producers: prompt blocks, load, token counting and predictions.

use crate::latency::Prediction;

/// The number of bytes of prompt text that count as one token: llm-d's estimate.
pub const BYTES_PER_TOKEN: usize = 4;

#[derive(Clone, Debug, PartialEq)]
pub enum ProducerSetting {
    Prefix(PrefixSettings),
    Load(LoadSettings),
    Token(TokenSettings),
    Identity(IdentitySettings),
    Latency(LatencySettings),
    /// The producer has no settings, because the state that it produces always exists.
    Tracker,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ProducerSettings {
    pub prefix: PrefixSettings,
    pub load: LoadSettings,
    pub token: TokenSettings,
    pub identity: IdentitySettings,
    pub latency: LatencySettings,
}

/// The settings of prompt blocks: their size, and how many blocks are remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixSettings {
    /// The number of tokens in one block, at least 64.
    pub block_tokens: u32,
    /// The maximum number of blocks of a prompt that are hashed and looked up.
    pub blocks_max: usize,
    /// The number of blocks that are remembered for an endpoint whose KV cache size is unknown, or
    /// if `auto_tune` is false.
    pub blocks_per_endpoint: u32,
    /// Whether to use the size of an endpoint's KV cache if it is known.
    pub auto_tune: bool,
}

/// The settings of the load that a request counts for while it is in flight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoadSettings {
    /// The number of expected output tokens for each prompt token; 0 if output does not count.
    pub(crate) output_ratio: f64,
    /// The maximum expected output of a request, in tokens.
    pub(crate) output_tokens_max: u32,
}

/// The settings of counting tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenSettings {
    /// The number of tokens that an image, a video or an audio clip counts for.
    pub media_tokens: u32,
}

/// The setting that says which headers identify the sessions of an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentitySettings {
    /// The names of the headers in order of preference, lower-case.
    pub headers: Box<[Box<str>]>,
}

/// The value of a prediction that is compared with an SLO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PredictionPercentile {
    Mean,
    P90,
}

/// The settings that say how predictions are used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatencySettings {
    /// The share of a TPOT SLO that a prediction may use up.
    pub slo_buffer_factor: f32,
    pub predict: bool,
    pub(crate) percentile: PredictionPercentile,
}

// === impl ProducerSettings ===

impl ProducerSettings {
    pub(crate) fn set(&mut self, producer: ProducerSetting) {
        match producer {
            ProducerSetting::Prefix(prefix) => self.prefix = prefix,
            ProducerSetting::Load(load) => self.load = load,
            ProducerSetting::Token(token) => self.token = token,
            ProducerSetting::Identity(identity) => self.identity = identity,
            ProducerSetting::Latency(latency) => self.latency = latency,
            ProducerSetting::Tracker => {}
        }
    }
}

// === impl PrefixSettings ===

impl PrefixSettings {
    pub fn block_bytes(&self) -> usize {
        usize::try_from(self.block_tokens)
            .unwrap_or(usize::MAX)
            .saturating_mul(BYTES_PER_TOKEN)
    }
}

// === impl LoadSettings ===

impl LoadSettings {
    /// Returns the number of output tokens that a request counts for from its pick to its end, in
    /// addition to its prompt.
    pub fn output_tokens(&self, prompt_tokens: u32, max_tokens: Option<u32>) -> u32 {
        // The cast is safe: the number is not negative, and for a large number the cast saturates.
        let expected = (f64::from(prompt_tokens) * self.output_ratio) as u32;
        expected
            .min(self.output_tokens_max)
            .min(max_tokens.unwrap_or(u32::MAX))
    }
}

// === impl LatencySettings ===

impl LatencySettings {
    /// Returns the TTFT and TPOT of a prediction that are compared with SLOs, in ms.
    pub(crate) fn counted(self, prediction: &Prediction) -> (f32, f32) {
        match self.percentile {
            PredictionPercentile::Mean => (prediction.ttft_ms, prediction.tpot_ms),
            PredictionPercentile::P90 => (prediction.ttft_p90_ms, prediction.tpot_p90_ms),
        }
    }
}
