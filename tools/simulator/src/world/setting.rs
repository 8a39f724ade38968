//! The setting of a run: everything but its workload and its policy.

use crate::engine::{EngineSimulator, SimulatedEngine, SimulatedEngineSpec};

/// A pool and the proxies in front of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PoolSetting {
    pub(crate) engine: SimulatedEngineSpec,
    pub(crate) model: EngineModel,
    pub(crate) replicas: usize,
    /// The first engines, this many, compute prompts for the others, which decode. With 0 every
    /// engine does both.
    pub(crate) prefillers: usize,
    /// Every other engine takes this many times as long.
    pub(crate) odd_slowdown: f64,
    /// Each engine of the second half takes this many times as long.
    pub(crate) half_slowdown: f64,
    pub(crate) proxies: usize,
    pub(crate) sharing: SharingMode,
    /// The time between two scrapes, ms; with 0 every pick has new metrics.
    pub(crate) scrape_ms: f64,
    /// The time between two scrapes of an engine without work, ms, if that is longer.
    pub(crate) idle_scrape_ms: f64,
    pub(crate) change: Option<SettingChange>,
    /// The share of the requests that arrive before the change.
    pub(crate) change_after: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EngineModel {
    /// The one of this crate.
    Own,
    /// NVIDIA's. Only the binary of `tools/simulator/aisimulate` has it.
    Aisimulate,
}

/// How proxies share state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum SharingMode {
    /// Proxies share nothing.
    Private,
    /// Proxies share everything, this many ms later.
    After(f64),
}

/// A change of the pool during a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum SettingChange {
    /// The steps of the first engine take this many times as long.
    Degrades(f64),
    /// The first engine gets no more requests, and comes back half a minute later with an empty
    /// cache.
    Restarts,
    /// The last two engines, which were not ready before, become ready.
    Grows,
    /// While requests arrive for this many ms: after a quarter of it the first engine dies for
    /// good, after half of it the last one, which was not ready before, becomes ready, and after
    /// three quarters of it the second one restarts.
    KillAddRestart {
        arrivals_ms: f64,
        failover: Failover,
    },
}

/// What proxies do when an engine dies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Failover {
    /// The pause before a request without a first token is sent to another engine, ms.
    pub(crate) retry_ms: f64,
    /// Whether an engine that has restarted gets requests again during the run.
    pub(crate) readmits: bool,
}

// === impl EngineModel ===

impl EngineModel {
    /// Whether this binary has the model.
    pub(crate) fn is_there(self) -> bool {
        self == Self::Own || cfg!(feature = "aisimulate")
    }

    /// # Errors
    /// When this binary does not have it, or it does not support the spec.
    pub(super) fn engine<'w>(
        self,
        spec: SimulatedEngineSpec,
    ) -> Result<Box<dyn EngineSimulator<'w> + 'w>, String> {
        match self {
            Self::Own => Ok(Box::new(SimulatedEngine::new(spec))),
            #[cfg(feature = "aisimulate")]
            Self::Aisimulate => Ok(Box::new(crate::engine::AisimulateEngine::new(spec)?)),
            #[cfg(not(feature = "aisimulate"))]
            Self::Aisimulate => {
                Err("this binary has no second engine: build tools/simulator/aisimulate".to_owned())
            }
        }
    }
}

// === impl PoolSetting ===

impl PoolSetting {
    /// Eight equal engines behind one proxy, with metrics at most 50 ms old.
    pub(crate) fn plain(engine: SimulatedEngineSpec) -> Self {
        Self {
            engine,
            model: EngineModel::Own,
            replicas: 8,
            prefillers: 0,
            odd_slowdown: 1.0,
            half_slowdown: 1.0,
            proxies: 1,
            sharing: SharingMode::Private,
            scrape_ms: 50.0,
            idle_scrape_ms: 0.0,
            change: None,
            change_after: 1.0 / 3.0,
        }
    }

    /// The setting with the changed pool from the start.
    pub(crate) fn changed(&self) -> Self {
        let change = self
            .change
            .filter(|change| *change != SettingChange::Restarts);
        Self {
            change,
            change_after: 0.0,
            ..*self
        }
    }

    /// The request at whose arrival the pool changes, in a run of this many requests.
    pub(crate) fn change_at(&self, requests: usize) -> Option<usize> {
        let at_arrival = self
            .change
            .filter(|change| !matches!(change, SettingChange::KillAddRestart { .. }));
        at_arrival.map(|_| (requests as f64 * self.change_after) as usize)
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
