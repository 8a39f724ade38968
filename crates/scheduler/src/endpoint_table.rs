//! The endpoints of a pool with all data that plugins read about these endpoints, as one immutable
//! value.

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

/// The endpoints of a pool, their metrics, their configuration, and the data that was learned about
/// the endpoints.
#[derive(Debug)]
pub struct EndpointTable {
    endpoints: Arc<[Endpoint]>,
    metrics: Box<[EndpointMetrics]>,
    /// The identities of the endpoints in one array, because every pick reads all of them.
    ids: Arc<[EndpointRef]>,
    all_ready: bool,
    /// Whether at least one endpoint names the models that it serves.
    names_models: bool,
    /// The parsed addresses. They are parsed once, and not for every request with a subset hint.
    /// `None` means that an address is not `ip:port`.
    sockets: Arc<[Option<SocketAddr>]>,
    /// The hashes of the endpoints' names, for session affinity, computed once instead of in every
    /// request.
    name_hashes: Arc<[u64]>,
    pub(crate) objects: Arc<Objects>,
    pub(crate) step: Arc<StepModel>,
    pub(crate) latency: Option<Arc<LatencyModel>>,
}

/// The reason why a snapshot was refused as a whole. The same snapshot is refused again until the
/// sender changes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InvalidSnapshot {
    /// The snapshot has more than [`ENDPOINTS_MAX`] endpoints.
    TooManyEndpoints(usize),
    /// The number of metrics is not the number of endpoints.
    MetricsLength(usize),
    DuplicateSlot(Slot),
    DuplicateAddress(Box<str>),
    /// An endpoint has a slot at or above [`ENDPOINTS_MAX`].
    SlotOutOfRange(Slot),
}

// === impl EndpointTable ===

impl EndpointTable {
    pub(crate) fn seal(
        endpoints: Vec<Endpoint>,
        metrics: Vec<EndpointMetrics>,
        objects: Arc<Objects>,
    ) -> Result<Self, InvalidSnapshot> {
        if endpoints.len() > ENDPOINTS_MAX {
            return Err(InvalidSnapshot::TooManyEndpoints(endpoints.len()));
        }
        if metrics.len() != endpoints.len() {
            return Err(InvalidSnapshot::MetricsLength(metrics.len()));
        }
        if let Some(e) = endpoints
            .iter()
            .find(|e| usize::from(e.id.slot.0) >= ENDPOINTS_MAX)
        {
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
        let endpoints = endpoints.into();
        let metrics = metrics.into();
        let step = Arc::default();
        Ok(Self {
            endpoints,
            metrics,
            ids,
            all_ready,
            names_models,
            sockets,
            name_hashes,
            objects,
            step,
            latency: None,
        })
    }

    pub(crate) fn with_metrics(
        &self,
        metrics: Vec<EndpointMetrics>,
    ) -> Result<Self, InvalidSnapshot> {
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

    pub(crate) fn observe(
        &mut self,
        endpoint: EndpointRef,
        update: impl FnOnce(&mut EndpointMetrics),
    ) {
        let position = self.endpoints.iter().position(|e| e.id == endpoint);
        if let Some(metrics) = position.and_then(|i| self.metrics.get_mut(i)) {
            update(metrics);
        }
    }

    /// Returns all endpoints, ready or not.
    pub fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    /// Returns the metrics, in the order of [`Self::endpoints`].
    pub fn metrics(&self) -> &[EndpointMetrics] {
        &self.metrics
    }

    /// Returns the objects (models, rewrites, objectives) of this pool.
    pub fn objects(&self) -> &Arc<Objects> {
        &self.objects
    }

    pub fn step(&self) -> &StepModel {
        &self.step
    }

    /// Returns the latency model. Returns `None` if no model was learned, or if prediction is off.
    pub fn latency(&self) -> Option<&LatencyModel> {
        self.latency.as_deref()
    }

    /// Returns the endpoint at a position. Returns `None` for a position of a larger snapshot.
    pub fn endpoint(&self, index: EndpointIndex) -> Option<&Endpoint> {
        self.endpoints.get(index.get())
    }

    pub fn id(&self, index: EndpointIndex) -> Option<EndpointRef> {
        self.ids.get(index.get()).copied()
    }

    pub fn metrics_of(&self, index: EndpointIndex) -> Option<&EndpointMetrics> {
        self.metrics.get(index.get())
    }

    /// Returns the parsed address of an endpoint. Returns `None` if the address is not `ip:port`;
    /// then no subset hint can name the endpoint.
    pub fn socket(&self, index: EndpointIndex) -> Option<SocketAddr> {
        self.sockets.get(index.get()).copied().flatten()
    }

    /// Returns a hash of the endpoint's name. The hash of a name is equal in every snapshot and on
    /// every host.
    pub fn name_hash(&self, index: EndpointIndex) -> u64 {
        self.name_hashes.get(index.get()).copied().unwrap_or(0)
    }

    pub fn indices(&self) -> impl Iterator<Item = EndpointIndex> + use<> {
        (0..u16::try_from(self.endpoints.len()).unwrap_or(u16::MAX)).map(EndpointIndex)
    }

    pub fn has_ready(&self) -> bool {
        self.endpoints
            .iter()
            .any(|endpoint| endpoint.readiness == Readiness::Ready)
    }

    pub fn all_ready(&self) -> bool {
        self.all_ready
    }

    /// Whether every endpoint may serve this model. An empty name (of an opaque body) may be served
    /// anywhere, and so may the target model of an object if no endpoint's metadata names this
    /// model.
    #[inline(never)]
    pub fn serves_anywhere(&self, model: &str) -> bool {
        model.is_empty() || (self.objects.targets(model) && !self.is_named(model))
    }

    /// Whether an object, an endpoint's metadata or an engine lists this model.
    #[cold]
    pub fn lists(&self, model: &str) -> bool {
        let by_engine = |index| {
            let lora = self
                .metrics_of(index)
                .and_then(|metrics| metrics.lora.as_ref());
            lora.is_some_and(|lora| {
                lora.reports(model) || lora.base_models.iter().any(|base| **base == *model)
            })
        };
        self.objects.names(model)
            || self.objects.targets(model)
            || self.is_named(model)
            || self.indices().any(by_engine)
    }

    /// Whether the metadata of at least one endpoint names this model.
    pub fn is_named(&self, model: &str) -> bool {
        self.endpoints.iter().any(|endpoint| endpoint.names(model))
    }

    /// Whether this endpoint may serve this model: its metadata names the model or no model at all,
    /// or its engine reports the model as an adapter.
    #[inline(never)]
    pub fn serves(&self, index: EndpointIndex, model: &str) -> bool {
        let lora = || {
            self.metrics_of(index)
                .and_then(|metrics| metrics.lora.as_ref())
        };
        self.endpoint(index)
            .is_some_and(|e| e.models.is_empty() || e.names(model))
            || lora().is_some_and(|lora| lora.reports(model))
    }

    /// Returns how many adapters fit into the engine's memory at the same time, if this model is an
    /// adapter. Returns `None` if the engine serves no adapters, or if the engine or the endpoint's
    /// metadata names the model as a base model. An endpoint's list of models contains adapters
    /// too. So this list decides only if the engine names no base model, and not for names that the
    /// engine reports as adapters.
    pub fn adapter_places(&self, index: EndpointIndex, model: &str) -> Option<u32> {
        let lora = self.metrics_of(index)?.lora.as_ref()?;
        let is_named =
            || self.endpoint(index).is_some_and(|e| e.names(model)) && !lora.reports(model);
        let is_base = lora.base_models.iter().any(|base| **base == *model)
            || (lora.base_models.is_empty() && is_named());
        (!is_base).then_some(lora.max)
    }

    pub fn names_models(&self) -> bool {
        self.names_models
    }
}

/// Returns the first endpoint that equals another endpoint by `order`. `order` is a reference, so
/// that the sort is compiled once.
fn first_duplicate<'e>(
    endpoints: &'e [Endpoint],
    order: &dyn Fn(&Endpoint, &Endpoint) -> Ordering,
) -> Option<&'e Endpoint> {
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
            Self::TooManyEndpoints(count) => {
                write!(f, "{count} endpoints, at most {ENDPOINTS_MAX} are allowed")
            }
            Self::MetricsLength(length) => write!(
                f,
                "{length} rows of metrics, one for each endpoint is needed"
            ),
            Self::DuplicateSlot(slot) => write!(f, "slot {} is claimed by two endpoints", slot.0),
            Self::DuplicateAddress(address) => {
                write!(f, "address `{address}` is claimed by two endpoints")
            }
            Self::SlotOutOfRange(slot) => write!(
                f,
                "slot {} is out of range, slots are below {ENDPOINTS_MAX}",
                slot.0
            ),
        }
    }
}

impl std::error::Error for InvalidSnapshot {}
