//! The setting of a run: everything except its workload and its policy.

use crate::engine::SimulatedEngineSpec;

/// A pool and the proxies in front of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PoolSetting {
    pub(crate) engine: SimulatedEngineSpec,
    pub(crate) replicas: usize,
    /// The number of engines that only prefill for the other engines, which decode. They are the
    /// first engines of the pool. With 0, every engine prefills and decodes.
    pub(crate) prefillers: usize,
    /// The factor by which a step takes longer on every second engine.
    pub(crate) odd_slowdown: f64,
    /// The factor by which a step takes longer on each engine of the second half.
    pub(crate) half_slowdown: f64,
    pub(crate) proxies: usize,
    pub(crate) sharing: SharingMode,
    /// The time between two scrapes, in ms. With 0, each pick has new metrics.
    pub(crate) scrape_ms: f64,
    /// The time between two scrapes of an engine without work, in ms, if this time is longer than
    /// `scrape_ms`.
    pub(crate) idle_scrape_ms: f64,
    pub(crate) change: Option<SettingChange>,
}

/// The way in which proxies share their state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum SharingMode {
    Private,
    /// Proxies share all their state. The other proxies receive a change after this many ms.
    After(f64),
}

/// Changes of the pool during the arrivals. After a quarter of the arrivals, the first engine dies
/// and does not return. After half, the last engine, which was not ready before, becomes ready.
/// After three quarters, the second engine dies, and returns if the proxies readmit engines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SettingChange {
    /// The length of the arrivals, in ms.
    pub(crate) arrivals_ms: f64,
    pub(crate) failover: Failover,
}

/// The reaction of proxies when an engine dies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Failover {
    /// The pause before a proxy sends a request that has no first token to another engine, in ms.
    pub(crate) retry_ms: f64,
    /// Whether an engine that has restarted gets requests again during the run.
    pub(crate) readmits: bool,
}

// === impl PoolSetting ===

impl PoolSetting {
    /// Returns a setting with eight equal engines behind one proxy, with metrics that are at most
    /// 50 ms old.
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
