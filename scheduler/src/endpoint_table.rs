//! The endpoints of a pool with all that is known of them, as plugins see it: one immutable value.

use std::cmp::Ordering;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use crate::endpoint::{ENDPOINTS_MAX, Endpoint, EndpointIndex, EndpointRef, Readiness, Slot};
use crate::latency::LatencyModel;
use crate::latency::step::StepModel;
use crate::metrics::EndpointMetrics;
use crate::objects::Objects;
use crate::session::name_hash;
use crate::sort::sort_by;

/// The endpoints of a pool, their metrics, and what was configured and learned about them.
#[derive(Debug)]
pub struct EndpointTable {
    endpoints: Arc<[Endpoint]>,
    metrics: Box<[EndpointMetrics]>,
    /// Identities of the endpoints, side by side: every pick looks at all of them.
    ids: Arc<[EndpointRef]>,
    /// Are all of them ready?
    all_ready: bool,
    /// Does any of them say which models it serves?
    names_models: bool,
    /// The addresses, parsed once here rather than by every request with a subset hint; `None` where one is no `ip:port`.
    sockets: Arc<[Option<SocketAddr>]>,
    /// Hashes of the names, for the same reason: sessions are mapped by them.
    name_hashes: Arc<[u64]>,
    pub(crate) objects: Arc<Objects>,
    pub(crate) step: Arc<StepModel>,
    pub(crate) latency: Option<Arc<LatencyModel>>,
}

/// Why a snapshot was refused whole. The sender is at fault; sending the same again will fail the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InvalidSnapshot {
    /// More endpoints than [`ENDPOINTS_MAX`].
    TooManyEndpoints(usize),
    /// The metrics column is not as long as the endpoints.
    MetricsLength(usize),
    /// Two endpoints claim one slot.
    DuplicateSlot(Slot),
    /// Two endpoints claim one address.
    DuplicateAddress(Box<str>),
    /// A slot at or above [`ENDPOINTS_MAX`].
    SlotOutOfRange(Slot),
}

// === impl EndpointTable ===

impl EndpointTable {
    /// Checks the endpoints and their metrics.
    pub(crate) fn seal(endpoints: Vec<Endpoint>, metrics: Vec<EndpointMetrics>, objects: Arc<Objects>) -> Result<Self, InvalidSnapshot> {
        if endpoints.len() > ENDPOINTS_MAX {
            return Err(InvalidSnapshot::TooManyEndpoints(endpoints.len()));
        }
        if metrics.len() != endpoints.len() {
            return Err(InvalidSnapshot::MetricsLength(metrics.len()));
        }
        if let Some(e) = endpoints.iter().find(|e| usize::from(e.id.slot.0) >= ENDPOINTS_MAX) {
            return Err(InvalidSnapshot::SlotOutOfRange(e.id.slot));
        }
        if let Some(e) = first_duplicate(&endpoints, &|a, b| a.id.slot.cmp(&b.id.slot)) {
            return Err(InvalidSnapshot::DuplicateSlot(e.id.slot));
        }
        if let Some(e) = first_duplicate(&endpoints, &|a, b| a.address.cmp(&b.address)) {
            return Err(InvalidSnapshot::DuplicateAddress(e.address.clone()));
        }
        let sockets = endpoints.iter().map(|e| e.address.parse().ok()).collect();
        let name_hashes = endpoints.iter().map(|e| name_hash(&e.name)).collect();
        let ids = endpoints.iter().map(|e| e.id).collect();
        let all_ready = endpoints.iter().all(|e| e.readiness == Readiness::Ready);
        let names_models = endpoints.iter().any(|e| !e.models.is_empty());
        let (endpoints, metrics, step) = (endpoints.into(), metrics.into(), Arc::default());
        Ok(Self { endpoints, metrics, ids, all_ready, names_models, sockets, name_hashes, objects, step, latency: None })
    }

    /// The same endpoints with newer metrics; nothing but the metrics is copied.
    pub(crate) fn with_metrics(&self, metrics: Vec<EndpointMetrics>) -> Result<Self, InvalidSnapshot> {
        if metrics.len() != self.endpoints.len() {
            return Err(InvalidSnapshot::MetricsLength(metrics.len()));
        }
        Ok(Self {
            endpoints: Arc::clone(&self.endpoints),
            metrics: metrics.into(),
            ids: Arc::clone(&self.ids),
            all_ready: self.all_ready,
            names_models: self.names_models,
            sockets: Arc::clone(&self.sockets),
            name_hashes: Arc::clone(&self.name_hashes),
            objects: Arc::clone(&self.objects),
            step: Arc::clone(&self.step),
            latency: self.latency.clone(),
        })
    }

    /// Updates the metrics of one endpoint in place, where a reply of its engine told them; a no-op when it is not in this snapshot.
    pub(crate) fn observe(&mut self, endpoint: EndpointRef, update: impl FnOnce(&mut EndpointMetrics)) {
        let position = self.endpoints.iter().position(|e| e.id == endpoint);
        if let Some(metrics) = position.and_then(|i| self.metrics.get_mut(i)) {
            update(metrics);
        }
    }

    /// All endpoints, ready or not.
    #[must_use]
    pub fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    /// Metrics, parallel to [`Self::endpoints`].
    #[must_use]
    pub fn metrics(&self) -> &[EndpointMetrics] {
        &self.metrics
    }

    /// What is configured about this pool's requests.
    #[must_use]
    pub fn objects(&self) -> &Arc<Objects> {
        &self.objects
    }

    /// What the steps of its engines cost.
    #[must_use]
    pub fn step(&self) -> &StepModel {
        &self.step
    }

    /// What predicts the latency of its requests; `None` where nothing was learned, or nothing is to be.
    #[must_use]
    pub fn latency(&self) -> Option<&LatencyModel> {
        self.latency.as_deref()
    }

    /// The endpoint at a position of this snapshot; `None` for a position of a larger one.
    #[must_use]
    pub fn endpoint(&self, index: EndpointIndex) -> Option<&Endpoint> {
        self.endpoints.get(index.get())
    }

    /// The identity of the endpoint at a position of this snapshot.
    #[must_use]
    pub fn id(&self, index: EndpointIndex) -> Option<EndpointRef> {
        self.ids.get(index.get()).copied()
    }

    /// The metrics at a position of this snapshot.
    #[must_use]
    pub fn metrics_of(&self, index: EndpointIndex) -> Option<&EndpointMetrics> {
        self.metrics.get(index.get())
    }

    /// The address at a position of this snapshot, parsed; `None` where it is no `ip:port`, which no subset hint can name.
    #[must_use]
    pub fn socket(&self, index: EndpointIndex) -> Option<SocketAddr> {
        self.sockets.get(index.get()).copied().flatten()
    }

    /// A hash of the endpoint's name: the same in every snapshot and on every host.
    #[must_use]
    pub fn name_hash(&self, index: EndpointIndex) -> u64 {
        self.name_hashes.get(index.get()).copied().unwrap_or(0)
    }

    /// Every position, in order.
    pub fn indices(&self) -> impl Iterator<Item = EndpointIndex> + use<> {
        (0..u16::try_from(self.endpoints.len()).unwrap_or(u16::MAX)).map(EndpointIndex)
    }

    /// Is every endpoint ready?
    #[must_use]
    pub fn all_ready(&self) -> bool {
        self.all_ready
    }

    /// May every endpoint be asked for this model? So it is where the name is empty, as of an opaque body, and where an `InferenceModel` targets it and no
    /// metadata names it.
    #[must_use]
    #[inline(never)]
    pub fn serves_anywhere(&self, model: &str) -> bool {
        model.is_empty() || (self.objects.targets(model) && !self.endpoints.iter().any(|e| e.names(model)))
    }

    /// May this endpoint be asked for this model? If its metadata names it or names none, or its engine reports it as an adapter.
    #[must_use]
    #[inline(never)]
    pub fn serves(&self, index: EndpointIndex, model: &str) -> bool {
        let lora = || self.metrics_of(index).and_then(|metrics| metrics.lora.as_ref());
        self.endpoint(index).is_some_and(|e| e.models.is_empty() || e.names(model)) || lora().is_some_and(|lora| lora.reports(model))
    }

    /// Does any endpoint say which models it serves?
    #[must_use]
    pub fn names_models(&self) -> bool {
        self.names_models
    }
}

/// An endpoint that `order` cannot tell from another. (By reference, so that the sort is compiled once.)
fn first_duplicate<'e>(endpoints: &'e [Endpoint], order: &dyn Fn(&Endpoint, &Endpoint) -> Ordering) -> Option<&'e Endpoint> {
    let mut sorted: Vec<&Endpoint> = endpoints.iter().collect();
    sort_by(&mut sorted, |a, b| order(a, b).is_lt());
    sorted.windows(2).find_map(|pair| match pair {
        [a, b] if order(a, b).is_eq() => Some(*b),
        _ => None,
    })
}

// === impl InvalidSnapshot ===

impl fmt::Display for InvalidSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooManyEndpoints(count) => write!(f, "{count} endpoints, at most {ENDPOINTS_MAX} are allowed"),
            Self::MetricsLength(length) => write!(f, "{length} rows of metrics, one for each endpoint is needed"),
            Self::DuplicateSlot(slot) => write!(f, "slot {} is claimed by two endpoints", slot.0),
            Self::DuplicateAddress(address) => write!(f, "address `{address}` is claimed by two endpoints"),
            Self::SlotOutOfRange(slot) => write!(f, "slot {} is out of range, slots are below {ENDPOINTS_MAX}", slot.0),
        }
    }
}

impl std::error::Error for InvalidSnapshot {}
