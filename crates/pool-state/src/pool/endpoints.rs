//! The endpoints of a pool: the state and the latency models from the daemon, and the failures of
//! endpoints.

use std::sync::Arc;

use scheduler::latency::LatencyModel;
use scheduler::latency::step::StepModel;
use scheduler::{ENDPOINTS_MAX, EndpointIndex, EndpointMetrics, EndpointRef, Snapshot, Timestamp};

use super::accepted_kinds::AcceptedKinds;
use super::crash_correlation::CrashCorrelator;
use super::ejection::Ejections;
use super::health::EndpointHealthTable;

/// The endpoints of a pool.
#[derive(Debug)]
pub(super) struct Endpoints {
    /// The state from the daemon; `None` before it arrives.
    pub(super) state: Option<PublishedState>,
    pub(super) failures: EndpointFailures,
    /// The models from the daemon; `None` until they arrive. Before that, no request is observed.
    pub(super) models: Option<LatencyModels>,
    /// A number that grows with every change of the snapshot.
    version: u64,
}

/// The failures of endpoints, and the ejections that follow from them.
#[derive(Debug, Default)]
pub(super) struct EndpointFailures {
    pub(super) ejections: Ejections,
    pub(super) health: EndpointHealthTable,
    pub(super) accepted: AcceptedKinds,
    pub(super) crashing: CrashCorrelator,
}

/// The models that the daemon learned.
#[derive(Clone, Debug)]
pub(super) struct LatencyModels {
    pub(super) step: Arc<StepModel>,
    pub(super) latency: Option<Arc<LatencyModel>>,
    /// Whether the models were learned from few requests or from none.
    pub(super) provisional: bool,
}

/// The state that the daemon published.
#[derive(Debug)]
pub(super) struct PublishedState {
    pub(super) snapshot: Snapshot,
    pub(super) refs: Vec<EndpointRef>,
    pub(super) hash_secret: u128,
    pub(super) staleness_max_ms: u64,
    pub(super) metrics_at: Option<Timestamp>,
}

// === impl Endpoints ===

impl Endpoints {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            state: None,
            failures: EndpointFailures {
                ejections: Ejections::with_stagger(seed),
                ..EndpointFailures::default()
            },
            models: None,
            version: 0,
        }
    }

    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// The snapshot in force. `None` before the first snapshot.
    pub(super) fn snapshot(&self) -> Option<&Snapshot> {
        self.state.as_ref().map(|state| &state.snapshot)
    }

    /// The endpoints of the snapshot, by position.
    pub(super) fn refs(&self) -> &[EndpointRef] {
        self.state.as_ref().map_or(&[], |state| &state.refs)
    }

    pub(super) fn knows(&self, endpoint: EndpointRef) -> bool {
        self.refs().contains(&endpoint)
    }

    /// The position of the endpoint in the snapshot.
    #[inline(never)] // several callers, and the wasm module should be small
    pub(super) fn index(&self, endpoint: EndpointRef) -> Option<EndpointIndex> {
        let state = self.state.as_ref()?;
        let mut known = state.snapshot.table().indices().zip(&state.refs);
        known
            .find(|(_, known)| **known == endpoint)
            .map(|(index, _)| index)
    }

    /// The last metrics of an endpoint of the pool.
    pub(super) fn metrics_of(&self, endpoint: EndpointRef) -> Option<&EndpointMetrics> {
        let at = self.index(endpoint)?;
        self.snapshot()?.metrics().get(at.get())
    }

    /// Replaces the daemon's state. Endpoints that stay keep their failures. Returns the metrics of
    /// the endpoints that had some, and their time.
    pub(super) fn install(
        &mut self,
        snapshot: Snapshot,
        refs: Vec<EndpointRef>,
        hash_secret: u128,
        staleness_max_ms: u32,
    ) -> Option<(Timestamp, Snapshot)> {
        let removed = self.refs().iter().filter(|id| !refs.contains(id));
        for endpoint in removed.copied().collect::<Vec<_>>() {
            self.failures.ejections.forget(endpoint);
            self.failures.health.forget(endpoint);
        }
        let snapshot = match &self.models {
            Some(models) => models.applied_to(snapshot),
            None => snapshot,
        };
        let measured = self
            .state
            .as_ref()
            .and_then(|old| old.metrics_at.zip(keep_metrics(&old.snapshot, &snapshot)));
        self.state = Some(PublishedState {
            snapshot,
            refs,
            hash_secret,
            staleness_max_ms: u64::from(staleness_max_ms),
            metrics_at: None,
        });
        self.version += 1;
        measured
    }

    /// Takes newer metrics. Returns false if there is no state.
    pub(super) fn refresh(&mut self, snapshot: Snapshot, at: Timestamp) -> bool {
        let Some(state) = &mut self.state else {
            return false;
        };
        state.snapshot = snapshot;
        state.metrics_at = Some(at);
        self.version += 1;
        true
    }

    pub(super) fn put_models(
        &mut self,
        step: StepModel,
        latency: Option<LatencyModel>,
        provisional: bool,
    ) {
        let models = LatencyModels {
            step: Arc::new(step),
            latency: latency.map(Arc::new),
            provisional,
        };
        self.state = self.state.take().map(|state| PublishedState {
            snapshot: models.applied_to(state.snapshot),
            ..state
        });
        self.models = Some(models);
        self.version += 1;
    }

    /// Applies the load that an engine reported with a reply, which is newer than any scrape.
    pub(super) fn observe(
        &mut self,
        endpoint: EndpointRef,
        update: impl FnOnce(&mut EndpointMetrics),
    ) {
        if let Some(state) = &mut self.state {
            state.snapshot.observe(endpoint, update);
            self.version += 1;
        }
    }
}

// === impl LatencyModels ===

impl LatencyModels {
    fn applied_to(&self, snapshot: Snapshot) -> Snapshot {
        snapshot
            .with_step(Arc::clone(&self.step))
            .with_latency(self.latency.clone())
    }
}

// === impl PublishedState ===

impl PublishedState {
    pub(super) fn metrics_stale(&self, now: Timestamp) -> bool {
        self.metrics_at
            .is_none_or(|at| now.ms_since(at) > self.staleness_max_ms)
    }

    /// Returns how many tokens of a prompt are work for the endpoint at this position.
    pub(super) fn work_tokens(&self, at: EndpointIndex, prompt_tokens: u32) -> u32 {
        let metrics = self.snapshot.metrics().get(at.get());
        metrics.map_or(prompt_tokens, |metrics| metrics.work_tokens(prompt_tokens))
    }
}

/// Returns `new` with the metrics of the endpoints that are also in `old`; `None` if there are
/// none.
fn keep_metrics(old: &Snapshot, new: &Snapshot) -> Option<Snapshot> {
    let mut by_slot: Vec<Option<(EndpointRef, &EndpointMetrics)>> = vec![None; ENDPOINTS_MAX];
    for (id, metrics) in old.endpoints().iter().map(|e| e.id).zip(old.metrics()) {
        if let Some(row) = by_slot.get_mut(usize::from(id.slot.0)) {
            *row = Some((id, metrics));
        }
    }
    let kept = |id: EndpointRef| match by_slot.get(usize::from(id.slot.0)) {
        Some(Some((known, metrics))) if *known == id => (*metrics).clone(),
        _ => EndpointMetrics::default(),
    };
    let metrics: Vec<EndpointMetrics> = new.endpoints().iter().map(|e| kept(e.id)).collect();
    new.with_metrics(new.version(), metrics).ok()
}
