//! The setting of a run: everything except its workload and its policy.

use crate::engine::SimulatedEngineSpec;

/// A pool and the proxies in front of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PoolSetting {
    pub(crate) engine: SimulatedEngineSpec,
    pub(crate) replicas: usize,
    /// The number of engines, the first ones, that compute prompts for the others, which decode.
    /// With 0 every engine does both.
    pub(crate) prefillers: usize,
    /// Every second engine takes this many times as long for a step.
    pub(crate) odd_slowdown: f64,
    /// Each engine of the second half takes this many times as long for a step.
    pub(crate) half_slowdown: f64,
    pub(crate) proxies: usize,
    pub(crate) sharing: SharingMode,
    /// The time between two scrapes, ms; with 0 every pick has new metrics.
    pub(crate) scrape_ms: f64,
    /// The time between two scrapes of an engine without work, ms, if that is longer.
    pub(crate) idle_scrape_ms: f64,
    pub(crate) change: Option<SettingChange>,
}

/// How proxies share state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum SharingMode {
    Private,
    /// Proxies share everything, this many ms later.
    After(f64),
}

/// Changes of the pool while requests arrive. After a quarter of the time the first engine dies and
/// does not return. After half of the time the last engine, which was not ready before, becomes
/// ready. After three quarters the second engine restarts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SettingChange {
    /// How long requests arrive, ms.
    pub(crate) arrivals_ms: f64,
    pub(crate) failover: Failover,
}

/// What proxies do when an engine dies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Failover {
    /// The pause before a request without a first token is sent to another engine, ms.
    pub(crate) retry_ms: f64,
    /// Whether an engine that has restarted gets requests again during the run.
    pub(crate) readmits: bool,
}

// === impl PoolSetting ===

impl PoolSetting {
    /// Eight equal engines behind one proxy, with metrics at most 50 ms old.
    pub(crate) fn plain(engine: SimulatedEngineSpec) -> Self {
        Self {
            engine,
            replicas: 8,
            prefillers: 0,
            odd_slowdown: 1.0,
            half_slowdown: 1.0,
            proxies: 1,
            sharing: SharingMode::Private,
            scrape_ms: 50.0,
            idle_scrape_ms: 0.0,
            change: None,
        }
    }

    pub(super) fn specs(&self) -> impl Iterator<Item = SimulatedEngineSpec> + '_ {
        (0..self.replicas).map(|at| {
            let mut spec = self.engine;
            spec.times.slowdown *= if at % 2 == 1 { self.odd_slowdown } else { 1.0 };
            spec.times.slowdown *= if at * 2 >= self.replicas {
                self.half_slowdown
            } else {
                1.0
            };
            spec
        })
    }
}
