//! Producers: plugins that only set how request data and the in-flight ledger are computed.
//!
//! In llm-d, a declared producer creates its state. In Switchpoint, a proxy always has a prefix
//! index and a ledger, and a declared producer only changes their settings.

pub(crate) mod agent_identity;
pub(crate) mod approx_prefix_cache;
pub(crate) mod inflight_load;
pub(crate) mod predicted_latency;
pub(crate) mod token;

use crate::plugin::{InvalidParameter, Parameters};
use crate::plugin_type::PluginType;
use crate::settings::{
    IdentitySettings, LatencySettings, LoadSettings, PrefixSettings, ProducerSettings,
    TokenSettings,
};

// === impl ProducerSettings ===

impl ProducerSettings {
    pub(crate) fn with_defaults() -> Result<Self, InvalidParameter> {
        fn defaults<T>(
            of: &PluginType,
            read: impl Fn(&Parameters<'_>) -> Result<T, InvalidParameter>,
        ) -> Result<T, InvalidParameter> {
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
