//! What the daemon knows of a pool, as one immutable value at one version.

use crate::sort::sort_by;
use std::cmp::Ordering;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use crate::latency::LatencyModel;
use crate::latency::step::StepModel;
use crate::objects::Objects;
use crate::pipeline::Pipeline;
use crate::session;

/// The most endpoints one snapshot may hold: slots are 16 bits wide on the wire, but the ledger and the prefix index size their fixed
/// tables by this, in every worker's VM.
pub const ENDPOINTS_MAX: usize = 1024;

/// The most attributes an endpoint may have: each is a metric that an operator named in a configuration file, and travels with every
/// refresh of every endpoint.
pub const ATTRIBUTES_MAX: usize = 32;

/// The attribute that says how many requests an engine runs at once at most, where its metadata says so: what is beyond that queues.
pub const SEQUENCES_MAX_ATTRIBUTE: &str = "max_num_seqs";

/// The label that says which stages of a request an endpoint is there for.
pub const ROLE_LABEL: &str = "llm-d.ai/role";

/// State version: a newer `term` (one life of the daemon) forces a full snapshot; within a term `sequence` only grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Which life of the daemon wrote it.
    pub term: u64,
    /// Position within that life.
    pub sequence: u64,
}

/// A small integer the daemon lends to an endpoint for as long as it is in the pool: ledger rows and prefix entries are kept by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u16);

/// Which life of the endpoint behind a slot: state learned of another life says nothing about this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Incarnation(pub u32);

/// An endpoint that stays meaningful after its snapshot is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointRef {
    /// Where its state is kept.
    pub slot: Slot,
    /// Which life that state belongs to.
    pub incarnation: Incarnation,
}

/// Position of an endpoint in one snapshot. Meaningless in any other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointIndex(pub(crate) u16);

impl EndpointIndex {
    /// As an index of the columns that run parallel to [`Snapshot::endpoints`].
    #[must_use]
    pub fn get(self) -> usize {
        usize::from(self.0)
    }
}

/// Whether an endpoint may be picked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// May serve.
    Ready,
    /// Known, but not to be picked (starting, failing its probe, draining).
    NotReady,
}

/// A model server address with its metadata.
#[derive(Clone, Debug, PartialEq)]
pub struct Endpoint {
    /// Identity that outlives the snapshot.
    pub id: EndpointRef,
    /// Name people know it by (pod name; in file mode the name in the file).
    pub name: Box<str>,
    /// `ip:port`, IPv6 in brackets: the very bytes Envoy is given.
    pub address: Box<str>,
    /// May it be picked?
    pub readiness: Readiness,
    /// Labels, sorted by key.
    pub labels: Box<[(Box<str>, Box<str>)]>,
    /// Models it says it serves, sorted; with none it says nothing, and may serve any. Shared by the endpoints that say the same.
    pub models: Arc<[Box<str>]>,
    /// How long it has been in the pool when the snapshot was made, in ms: ranked lists end with a settled one.
    pub age_ms: u64,
}

/// What a model server last said of itself. `None` is unknown, which is neither idle nor full.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EndpointMetrics {
    /// Requests waiting to be scheduled by the engine.
    pub queue_depth: Option<f32>,
    /// Requests the engine is running.
    pub running_requests: Option<f32>,
    /// Share of KV-cache blocks in use, 0 to 1.
    pub kv_cache_utilization: Option<f32>,
    /// Tokens a KV-cache block holds.
    pub kv_block_tokens: Option<u32>,
    /// KV-cache blocks the engine has.
    pub kv_blocks: Option<u32>,
    /// LoRA adapters, when the engine serves any.
    pub lora: Option<LoraMetrics>,
    /// Numbers read besides, by the keys that configuration gave them (`customMetrics`), sorted by key.
    pub attributes: Box<[(Box<str>, f32)]>,
}

/// The newest `lora_requests_info` series of an engine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoraMetrics {
    /// Adapters loaded and in use.
    pub running: Box<[Box<str>]>,
    /// Adapters with requests waiting for a place.
    pub waiting: Box<[Box<str>]>,
    /// Adapters that fit at once.
    pub max: u32,
}

// === impl Endpoint ===

impl Endpoint {
    /// Does its metadata name this model?
    fn names(&self, model: &str) -> bool {
        self.models.binary_search_by(|named| (**named).cmp(model)).is_ok()
    }
}

/// The state of a pool at one version. Immutable: a new version is a new value.
#[derive(Debug)]
pub struct Snapshot {
    version: Version,
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
    pipeline: Arc<Pipeline>,
    objects: Arc<Objects>,
    step: Arc<StepModel>,
    latency: Option<Arc<LatencyModel>>,
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

// === impl Endpoint ===

impl Endpoint {
    /// The value of a label.
    #[must_use]
    pub fn label(&self, key: &str) -> Option<&str> {
        let at = self.labels.binary_search_by(|(label, _)| (**label).cmp(key)).ok()?;
        self.labels.get(at).map(|(_, value)| &**value)
    }

    /// May it be sent whole requests? Not when the label [`ROLE_LABEL`] says that it is there for an earlier stage alone.
    #[must_use]
    pub fn decodes(&self) -> bool {
        decodes(self.label(ROLE_LABEL))
    }
}

/// Does this value of [`ROLE_LABEL`] let an endpoint answer requests? All do but those that name earlier stages alone; `None` is no label.
#[must_use]
pub fn decodes(role: Option<&str>) -> bool {
    !matches!(role, Some("prefill" | "encode" | "encode-prefill"))
}

// === impl EndpointMetrics ===

impl EndpointMetrics {
    /// The attribute of that key.
    #[must_use]
    pub fn attribute(&self, key: &str) -> Option<f32> {
        let at = self.attributes.binary_search_by(|(attribute, _)| (**attribute).cmp(key)).ok()?;
        self.attributes.get(at).map(|(_, value)| *value)
    }
}

// === impl LoraMetrics ===

impl LoraMetrics {
    fn reports(&self, adapter: &str) -> bool {
        self.running.iter().chain(&self.waiting).any(|reported| **reported == *adapter)
    }
}

// === impl Snapshot ===

impl Snapshot {
    /// Checks and seals a snapshot.
    ///
    /// # Errors
    /// [`InvalidSnapshot`] when a rule that readers rely on does not hold; nothing of it may then be used.
    pub fn try_new(
        version: Version,
        endpoints: Vec<Endpoint>,
        metrics: Vec<EndpointMetrics>,
        pipeline: Pipeline,
    ) -> Result<Self, InvalidSnapshot> {
        Self::seal(version, endpoints, metrics, Arc::new(pipeline), Arc::default())
    }

    /// Other endpoints under the same pipeline and objects.
    ///
    /// # Errors
    /// As of [`Self::try_new`].
    pub fn with_endpoints(
        &self,
        version: Version,
        endpoints: Vec<Endpoint>,
        metrics: Vec<EndpointMetrics>,
    ) -> Result<Self, InvalidSnapshot> {
        let sealed = Self::seal(version, endpoints, metrics, Arc::clone(&self.pipeline), Arc::clone(&self.objects))?;
        Ok(Self { step: Arc::clone(&self.step), latency: self.latency.clone(), ..sealed })
    }

    fn seal(
        version: Version,
        endpoints: Vec<Endpoint>,
        metrics: Vec<EndpointMetrics>,
        pipeline: Arc<Pipeline>,
        objects: Arc<Objects>,
    ) -> Result<Self, InvalidSnapshot> {
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
        let name_hashes = endpoints.iter().map(|e| session::name_hash(&e.name)).collect();
        let ids = endpoints.iter().map(|e| e.id).collect();
        let all_ready = endpoints.iter().all(|e| e.readiness == Readiness::Ready);
        let names_models = endpoints.iter().any(|e| !e.models.is_empty());
        let (endpoints, metrics, step) = (endpoints.into(), metrics.into(), Arc::default());
        Ok(Self { version, endpoints, metrics, ids, all_ready, names_models, sockets, name_hashes, pipeline, objects, step, latency: None })
    }

    /// The same with the objects of its pool; without any, every request passes as it is.
    #[must_use]
    pub fn with_objects(self, objects: Objects) -> Self {
        Self { objects: Arc::new(objects), ..self }
    }

    /// The same with what is known of its engines' steps; without, what [`StepModel::default`] says.
    #[must_use]
    pub fn with_step(self, step: Arc<StepModel>) -> Self {
        Self { step, ..self }
    }

    /// The same with a latency model, or without any.
    #[must_use]
    pub fn with_latency(self, latency: Option<Arc<LatencyModel>>) -> Self {
        Self { latency, ..self }
    }

    /// The same endpoints, pipeline and objects with newer metrics, at a newer version; nothing but the metrics is copied.
    ///
    /// # Errors
    /// [`InvalidSnapshot::MetricsLength`] when the column does not run parallel to the endpoints.
    pub fn with_metrics(&self, version: Version, metrics: Vec<EndpointMetrics>) -> Result<Self, InvalidSnapshot> {
        if metrics.len() != self.endpoints.len() {
            return Err(InvalidSnapshot::MetricsLength(metrics.len()));
        }
        Ok(Self {
            version,
            endpoints: Arc::clone(&self.endpoints),
            metrics: metrics.into(),
            ids: Arc::clone(&self.ids),
            all_ready: self.all_ready,
            names_models: self.names_models,
            sockets: Arc::clone(&self.sockets),
            name_hashes: Arc::clone(&self.name_hashes),
            pipeline: Arc::clone(&self.pipeline),
            objects: Arc::clone(&self.objects),
            step: Arc::clone(&self.step),
            latency: self.latency.clone(),
        })
    }

    /// The version it was made at.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
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

    /// How requests of this pool are scheduled.
    #[must_use]
    pub fn pipeline(&self) -> &Pipeline {
        &self.pipeline
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

    /// Updates the metrics of one endpoint in place, where a reply of its engine told them; a no-op when it is not in this snapshot.
    pub fn observe(&mut self, endpoint: EndpointRef, update: impl FnOnce(&mut EndpointMetrics)) {
        let position = self.endpoints.iter().position(|e| e.id == endpoint);
        if let Some(metrics) = position.and_then(|i| self.metrics.get_mut(i)) {
            update(metrics);
        }
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
