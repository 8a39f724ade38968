//! Endpoints: their identity, address, labels and readiness.

use std::sync::Arc;

/// The most endpoints one snapshot may hold: slots are 16 bits wide on the wire, but the ledger and the prefix index size their fixed
/// tables by this, in every worker's VM.
pub const ENDPOINTS_MAX: usize = 1024;

/// The label that says which stages of a request an endpoint is there for.
pub const ROLE_LABEL: &str = "llm-d.ai/role";

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
    /// As an index of the columns that run parallel to [`EndpointTable::endpoints`](crate::EndpointTable::endpoints).
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

// === impl Endpoint ===

impl Endpoint {
    /// Does its metadata name this model?
    pub(crate) fn names(&self, model: &str) -> bool {
        self.models.binary_search_by(|named| (**named).cmp(model)).is_ok()
    }

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
