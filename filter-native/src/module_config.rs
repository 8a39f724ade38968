//! One filter configuration of Envoy, as the module knows it.

use std::sync::{Arc, PoisonError, RwLock};

use front::config::{FilterConfig, StateTransport};

use crate::metrics::MetricIds;
use crate::pool::NativePool;

pub(crate) struct ModuleConfig {
    /// The number of the configuration among all of this process.
    pub(crate) number: u64,
    pub(crate) config: FilterConfig,
    pub(crate) metrics: MetricIds,
    /// The pools in the order of the configuration. They change only when damaged pools are made
    /// again.
    pools: RwLock<Vec<Arc<NativePool>>>,
}

/// Reads the configuration of the filter, which is that of the wasm filter.
///
/// # Errors
/// Returns a text for the log if the configuration is wrong, or needs what Envoy does not give to a
/// native module.
pub(crate) fn parse(json: &[u8]) -> Result<FilterConfig, String> {
    let config = FilterConfig::parse(json).map_err(|error| error.to_string())?;
    let flow = &config.settings.flow;
    if !config.hold_headers {
        Err("`hold_headers` must be true: the native module always holds them".to_owned())
    } else if config.state.transport == StateTransport::Http {
        Err("`state.transport` must be \"grpc\": the native module makes no HTTP calls".to_owned())
    } else if !flow.namespace.is_empty() && flow.key.contains('/') {
        Err("`fairness_key` must be one key: the native module reads no nested metadata".to_owned())
    } else {
        Ok(config)
    }
}

// === impl ModuleConfig ===

impl ModuleConfig {
    pub(crate) fn new(
        number: u64,
        config: FilterConfig,
        metrics: MetricIds,
        pools: Vec<Arc<NativePool>>,
    ) -> Self {
        Self {
            number,
            config,
            metrics,
            pools: RwLock::new(pools),
        }
    }

    /// Returns the pool at this position of the configuration.
    pub(crate) fn pool(&self, position: usize) -> Option<Arc<NativePool>> {
        let pools = self.pools.read().unwrap_or_else(PoisonError::into_inner);
        pools.get(position).cloned()
    }

    /// Whether every pool has state.
    pub(crate) fn is_ready(&self) -> bool {
        let pools = self.pools.read().unwrap_or_else(PoisonError::into_inner);
        pools.iter().all(|pool| pool.has_state())
    }

    pub(crate) fn set_pools(&self, pools: Vec<Arc<NativePool>>) {
        *self.pools.write().unwrap_or_else(PoisonError::into_inner) = pools;
    }

    /// The names of the pools.
    pub(crate) fn names(&self) -> Vec<String> {
        let pools = &self.config.pools;
        pools.iter().map(|pool| pool.name.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_native_module_cannot_do_is_refused() {
        let of = |rest: &str| {
            let json = format!(r#"{{"pools": [{{"name": "p"}}]{rest}}}"#);
            parse(json.as_bytes()).err().unwrap_or_default()
        };
        assert_eq!(of(""), "");
        assert_eq!(
            of(r#", "fairness_namespace": "a", "fairness_key": "b""#),
            ""
        );
        assert!(of(r#", "hold_headers": false"#).starts_with("`hold_headers`"));
        assert!(of(r#", "state": {"transport": "http"}"#).starts_with("`state.transport`"));
        let nested = r#", "fairness_namespace": "a", "fairness_key": "b/c""#;
        assert!(of(nested).starts_with("`fairness_key`"));
        assert!(of(r#", "unknown": 1"#).starts_with("`unknown`"));
    }
}
