//! Settings of producers: prompt blocks, load, token counting and predictions.

use crate::latency::Prediction;

/// Bytes of prompt text counted as one token: llm-d's estimate.
pub const BYTES_PER_TOKEN: usize = 4;

#[derive(Clone, Debug, PartialEq)]
pub enum ProducerSetting {
    /// How prompts are cut into blocks, and how many blocks are remembered.
    Prefix(PrefixSettings),
    /// The load with which a request is counted while it is in flight.
    Load(LoadSettings),
    /// How tokens are counted.
    Token(TokenSettings),
    /// Which headers identify the sessions of an agent.
    Identity(IdentitySettings),
    /// How latency is predicted.
    Latency(LatencySettings),
    /// No setting: the state that the plugin names always exists.
    Tracker,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ProducerSettings {
    /// How prompts are cut into blocks, and how many blocks are remembered.
    pub prefix: PrefixSettings,
    /// The load with which a request is counted while it is in flight.
    pub load: LoadSettings,
    /// How tokens are counted.
    pub token: TokenSettings,
    /// Which headers identify the sessions of an agent.
    pub identity: IdentitySettings,
    /// How latency is predicted.
    pub latency: LatencySettings,
}

/// How prompts are cut into blocks, and how many blocks are remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixSettings {
    /// Tokens in one block, at least 64.
    pub block_tokens: u32,
    /// Blocks of a prompt that are hashed and looked up.
    pub blocks_max: usize,
    /// Blocks remembered for an endpoint whose KV cache size is unknown or not used.
    pub blocks_per_endpoint: u32,
    /// Whether to use the size of an endpoint's KV cache where it is known.
    pub auto_tune: bool,
}

/// The load with which a request is counted while it is in flight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoadSettings {
    /// Expected output tokens for each prompt token; 0 if output does not count.
    pub(crate) output_ratio: f64,
    /// The maximum expected output of a request, in tokens.
    pub(crate) output_tokens_max: u32,
}

/// How tokens are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenSettings {
    /// Tokens for an image, a video or an audio clip.
    pub media_tokens: u32,
}

/// Which headers identify the sessions of an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentitySettings {
    /// The names of the headers in order of preference, lower-case.
    pub headers: Box<[Box<str>]>,
}

/// The part of a prediction that is compared with an SLO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PredictionPercentile {
    Mean,
    P90,
}

/// How predictions are used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatencySettings {
    /// The share of a TPOT SLO that may be used.
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
    /// Bytes in one block.
    pub fn block_bytes(&self) -> usize {
        usize::try_from(self.block_tokens)
            .unwrap_or(usize::MAX)
            .saturating_mul(BYTES_PER_TOKEN)
    }
}

// === impl LoadSettings ===

impl LoadSettings {
    /// The output tokens with which a request is counted from its pick to its end, in addition to
    /// its prompt.
    pub fn output_tokens(&self, prompt_tokens: u32, max_tokens: Option<u32>) -> u32 {
        // The number is not negative. For a large number the cast saturates.
        let expected = (f64::from(prompt_tokens) * self.output_ratio) as u32;
        expected
            .min(self.output_tokens_max)
            .min(max_tokens.unwrap_or(u32::MAX))
    }
}

// === impl LatencySettings ===

impl LatencySettings {
    /// TTFT and TPOT of a prediction to compare with SLOs, ms.
    pub(crate) fn counted(self, prediction: &Prediction) -> (f32, f32) {
        match self.percentile {
            PredictionPercentile::Mean => (prediction.ttft_ms, prediction.tpot_ms),
            PredictionPercentile::P90 => (prediction.ttft_p90_ms, prediction.tpot_p90_ms),
        }
    }
}
