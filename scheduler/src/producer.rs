//! Producers: settings of the facts that a request comes with, and of the ledger.
//!
//! The reference makes a producer's state when the producer is declared. Here a proxy always has a prefix index and a ledger: a declared
//! producer only sets them, and without one its defaults hold.

pub(crate) mod agent_identity;
pub(crate) mod approx_prefix_cache;
pub(crate) mod inflight_load;
pub(crate) mod predicted_latency;
pub(crate) mod token;

pub use agent_identity::IdentitySettings;
pub use approx_prefix_cache::PrefixSettings;
pub use inflight_load::LoadSettings;
pub use predicted_latency::LatencySettings;
pub use token::{BYTES_PER_TOKEN, TokenSettings};

use crate::plugin::{InvalidParameter, Parameters, PluginType};

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

// === impl Production ===

impl Production {
    /// What holds when nothing is declared: each producer's own defaults.
    pub(crate) fn with_defaults() -> Result<Self, InvalidParameter> {
        fn defaults<T>(of: &PluginType, read: impl Fn(&Parameters<'_>) -> Result<T, InvalidParameter>) -> Result<T, InvalidParameter> {
            read(&Parameters::check(of.parameters, &[])?)
        }
        Ok(Self {
            prefix: defaults(&approx_prefix_cache::PLUGIN, PrefixSettings::read)?,
            load: defaults(&inflight_load::PLUGIN, LoadSettings::read)?,
            token: defaults(&token::PLUGIN, TokenSettings::read)?,
            identity: defaults(&agent_identity::PLUGIN, IdentitySettings::read)?,
            latency: defaults(&predicted_latency::PLUGIN, LatencySettings::read)?,
        })
    }

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
