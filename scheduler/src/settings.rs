//! What producers set: how prompts are cut, what a request counts for, how tokens are counted and
//! predictions used.

use crate::latency::Prediction;

/// Bytes of prompt text taken for one token: the reference's estimate.
pub const BYTES_PER_TOKEN: usize = 4;

/// What a declared producer sets.
#[derive(Clone, Debug, PartialEq)]
pub enum Producer {
    /// How prompts are cut into blocks, and how many are remembered.
    Prefix(PrefixSettings),
    /// What a request counts for while it is in flight.
    Load(LoadSettings),
    /// How tokens are counted.
    Token(TokenSettings),
    /// Which headers tell an agent's sessions apart.
    Identity(IdentitySettings),
    /// How latency is predicted.
    Latency(LatencySettings),
    /// Nothing: what it stands for is always there.
    Tracker,
}

/// All that producers set.
#[derive(Clone, Debug, PartialEq)]
pub struct Production {
    /// How prompts are cut into blocks, and how many are remembered.
    pub prefix: PrefixSettings,
    /// What a request counts for while it is in flight.
    pub load: LoadSettings,
    /// How tokens are counted.
    pub token: TokenSettings,
    /// Which headers tell an agent's sessions apart.
    pub identity: IdentitySettings,
    /// How latency is predicted.
    pub latency: LatencySettings,
}

/// How prompts are cut into blocks, and how many are remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixSettings {
    /// Tokens of a block, at least 64.
    pub block_tokens: u32,
    /// Blocks of a prompt that are hashed and looked up.
    pub blocks_max: usize,
    /// Blocks remembered of an endpoint whose KV cache is not known, or does not count.
    pub blocks_per_endpoint: u32,
    /// Does the size of an endpoint's KV cache count, where it is known?
    pub auto_tune: bool,
}

/// What a request counts for while it is in flight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoadSettings {
    /// Output tokens expected for each prompt token; 0 where output does not count.
    pub(crate) output_ratio: f64,
    /// The most output expected of a request.
    pub(crate) output_tokens_max: u32,
}

/// How tokens are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenSettings {
    /// Tokens of an image, a video or an audio clip.
    pub media_tokens: u32,
}

/// Which headers tell an agent's sessions apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentitySettings {
    /// In order; lower-case.
    pub headers: Box<[Box<str>]>,
}

/// What of a prediction must be within an SLO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Percentile {
    Mean,
    P90,
}

/// How predictions are used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatencySettings {
    /// How much of a TPOT SLO may be used up.
    pub slo_buffer_factor: f32,
    /// Is anything predicted?
    pub predict: bool,
    pub(crate) percentile: Percentile,
}

// === impl Production ===

impl Production {
    pub(crate) fn set(&mut self, producer: Producer) {
        match producer {
            Producer::Prefix(prefix) => self.prefix = prefix,
            Producer::Load(load) => self.load = load,
            Producer::Token(token) => self.token = token,
            Producer::Identity(identity) => self.identity = identity,
            Producer::Latency(latency) => self.latency = latency,
            Producer::Tracker => {}
        }
    }
}

// === impl PrefixSettings ===

impl PrefixSettings {
    /// Bytes of a block.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        usize::try_from(self.block_tokens).unwrap_or(usize::MAX).saturating_mul(BYTES_PER_TOKEN)
    }
}

// === impl LoadSettings ===

impl LoadSettings {
    /// Output tokens that a request counts for from its pick to its end, beside its prompt.
    #[must_use]
    pub fn output_tokens(&self, prompt_tokens: u32, max_tokens: Option<u32>) -> u32 {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "not negative, and saturating above")]
        let expected = (f64::from(prompt_tokens) * self.output_ratio) as u32;
        expected.min(self.output_tokens_max).min(max_tokens.unwrap_or(u32::MAX))
    }
}

// === impl LatencySettings ===

impl LatencySettings {
    /// TTFT and TPOT of a prediction, as they are held against SLOs, ms.
    pub(crate) fn counted(self, prediction: &Prediction) -> (f32, f32) {
        match self.percentile {
            Percentile::Mean => (prediction.ttft_ms, prediction.tpot_ms),
            Percentile::P90 => (prediction.ttft_p90_ms, prediction.tpot_p90_ms),
        }
    }
}
