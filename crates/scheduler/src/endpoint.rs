//! Endpoints, with their identity, address, labels and readiness.

use std::sync::Arc;

/// The maximum number of endpoints in one snapshot. The number is far below what the 16 bits of a
/// slot on the wire allow, because the ledger and the prefix index of every worker's VM have tables
/// of this size.
pub const ENDPOINTS_MAX: usize = 1024;

/// The label that names the stages (such as prefill and decode) that an endpoint serves.
pub const ROLE_LABEL: &str = "llm-d.ai/role";

/// A small integer that the daemon gives to an endpoint for as long as the endpoint is in the pool.
/// The in-flight ledger and the prefix index use the slot as an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u16);

/// The generation of the endpoint behind a slot. The generation changes when another process takes
/// over the address. State that was learned about one generation does not apply to another
/// generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation(pub u32);

/// An endpoint reference that stays valid after its snapshot is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointRef {
    pub slot: Slot,
    pub generation: Generation,
}

/// The position of an endpoint in one snapshot. The position has no meaning in another snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointIndex(pub(crate) u16);

impl EndpointIndex {
    /// Returns the index into lists that have the order of
    /// [`EndpointTable::endpoints`](crate::EndpointTable::endpoints).
    #[must_use]
    pub fn get(self) -> usize {
        usize::from(self.0)
    }
}

/// Whether an endpoint may be picked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    Ready,
    /// The endpoint is known but must not be picked: it is starting, failing its probe, or
    /// draining.
    NotReady,
}

/// A model server address with its metadata.
#[derive(Clone, Debug, PartialEq)]
pub struct Endpoint {
    /// The identity of the endpoint, which stays valid after the snapshot is gone.
    pub id: EndpointRef,
    /// The name of the endpoint in logs and pages: the pod name, or the name in the endpoints file.
    pub name: Box<str>,
    /// The address in the form that Envoy gets: `ip:port`, IPv6 in brackets.
    pub address: Box<str>,
    pub readiness: Readiness,
    /// The labels of the endpoint, sorted by key.
    pub labels: Box<[(Box<str>, Box<str>)]>,
    /// The names of the models that the endpoint serves, sorted. An empty list means that the
    /// endpoint may serve every model. Endpoints with equal lists share one list in memory.
    pub models: Arc<[Box<str>]>,
    /// How long the endpoint had been in the pool when the snapshot was made, in ms. The number
    /// stays the same until the next pool update. The age is used because the last endpoint of a
    /// ranked list must have been in the pool for [`crate::SETTLED_MS`].
    pub age_ms: u64,
}

// === impl Endpoint ===

impl Endpoint {
    /// Whether the metadata of the endpoint names this model.
    pub(crate) fn names(&self, model: &str) -> bool {
        self.models
            .binary_search_by(|named| (**named).cmp(model))
            .is_ok()
    }

    pub fn label(&self, key: &str) -> Option<&str> {
        let at = self
            .labels
            .binary_search_by(|(label, _)| (**label).cmp(key))
            .ok()?;
        self.labels.get(at).map(|(_, value)| &**value)
    }

    /// Whether the endpoint can serve the decode stage, and so can answer requests. An endpoint
    /// whose [`ROLE_LABEL`] names only earlier stages cannot.
    pub fn decodes(&self) -> bool {
        decodes(self.label(ROLE_LABEL))
    }
}

/// Whether an endpoint with this value of [`ROLE_LABEL`] answers requests. An endpoint answers
/// requests unless the value names only earlier stages. `None` stands for an endpoint without the
/// label.
#[must_use]
pub fn decodes(role: Option<&str>) -> bool {
    !matches!(role, Some("prefill" | "encode" | "encode-prefill"))
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Endpoint {
        /// Returns a ready endpoint of the first generation, for tests.
        pub(crate) fn ready(slot: u16, labels: &[(&str, &str)]) -> Self {
            Self {
                id: EndpointRef {
                    slot: Slot(slot),
                    generation: Generation(1),
                },
                name: format!("pod-{slot}").into(),
                address: format!("10.0.0.{}:8000", slot + 1).into(),
                readiness: Readiness::Ready,
                labels: labels
                    .iter()
                    .map(|(key, value)| ((*key).into(), (*value).into()))
                    .collect(),
                models: std::sync::Arc::default(),
                age_ms: 0,
            }
        }
    }
}
