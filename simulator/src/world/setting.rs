//! What a run is, beside its workload and policy.

use crate::engine::{EngineSimulator, SimulatedEngine, SimulatedEngineSpec};

/// A pool and the proxies before it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PoolSetting {
    pub(crate) engine: SimulatedEngineSpec,
    pub(crate) model: EngineModel,
    pub(crate) replicas: usize,
    /// So many of them, the first, work through prompts for the others, which decode; 0: all do both.
    pub(crate) prefillers: usize,
    /// Every other engine takes so many times as long.
    pub(crate) odd_slowdown: f64,
    pub(crate) proxies: usize,
    pub(crate) sharing: SharingMode,
    /// Metrics are this old at most, ms; 0: never old.
    pub(crate) scrape_ms: f64,
    pub(crate) change: Option<PoolChange>,
    /// Share of the requests that come before the change.
    pub(crate) change_after: f64,
}

/// Whose simulation of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EngineModel {
    Own,
    /// NVIDIA's: in the binary of `simulator/aisimulate` alone.
    Aisimulate,
}

/// What proxies know of one another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum SharingMode {
    /// Nothing.
    Private,
    /// Everything, so many ms later.
    After(f64),
}

/// What happens to the pool.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum PoolChange {
    /// The first engine becomes so many times as slow.
    Degrades(f64),
    /// The first engine takes no more requests, and comes back half a minute later with an empty cache.
    Restarts,
    /// The last two engines join; before, they were not there.
    Grows,
}

// === impl EngineModel ===

impl EngineModel {
    /// Is it part of this binary?
    pub(crate) fn is_there(self) -> bool {
        self == Self::Own || cfg!(feature = "aisimulate")
    }

    /// # Errors
    /// When it is no part of this binary, or refuses what is asked of it.
    pub(super) fn engine<'w>(self, spec: SimulatedEngineSpec) -> Result<Box<dyn EngineSimulator<'w> + 'w>, String> {
        match self {
            Self::Own => Ok(Box::new(SimulatedEngine::new(spec))),
            #[cfg(feature = "aisimulate")]
            Self::Aisimulate => Ok(Box::new(crate::engine::AisimulateEngine::new(spec)?)),
            #[cfg(not(feature = "aisimulate"))]
            Self::Aisimulate => Err("this binary has no second engine: build simulator/aisimulate".to_owned()),
        }
    }
}

// === impl PoolSetting ===

impl PoolSetting {
    /// Eight engines alike behind one proxy, metrics 50 ms old at most.
    pub(crate) fn plain(engine: SimulatedEngineSpec) -> Self {
        Self {
            engine,
            model: EngineModel::Own,
            replicas: 8,
            prefillers: 0,
            odd_slowdown: 1.0,
            proxies: 1,
            sharing: SharingMode::Private,
            scrape_ms: 50.0,
            change: None,
            change_after: 1.0 / 3.0,
        }
    }

    /// The pool as the change leaves it, from the start.
    pub(crate) fn changed(&self) -> Self {
        let change = self.change.filter(|change| *change != PoolChange::Restarts);
        Self { change, change_after: 0.0, ..*self }
    }

    /// Which of so many requests comes with the change.
    pub(crate) fn change_at(&self, requests: usize) -> Option<usize> {
        self.change.map(|_| (requests as f64 * self.change_after) as usize)
    }

    pub(super) fn specs(&self) -> impl Iterator<Item = SimulatedEngineSpec> + '_ {
        (0..self.replicas).map(|at| {
            let mut spec = self.engine;
            spec.times.slowdown *= if at % 2 == 1 { self.odd_slowdown } else { 1.0 };
            spec
        })
    }
}
