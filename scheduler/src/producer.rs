//! Producers: settings of the facts that a request comes with, and of the ledger.
//!
//! The reference makes a producer's state when the producer is declared. Here a proxy always has a prefix index and a ledger: a declared
//! producer only sets them, and without one its defaults hold.

pub(crate) mod agent_identity;
pub(crate) mod approx_prefix_cache;
pub(crate) mod inflight_load;
pub(crate) mod predicted_latency;
pub(crate) mod token;

use crate::plugin::{InvalidParameter, Parameters};
use crate::plugin_type::PluginType;
use crate::settings::{IdentitySettings, LatencySettings, LoadSettings, PrefixSettings, Production, TokenSettings};

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
}
