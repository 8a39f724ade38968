//! An instance as a JSON document. A directory stores the document in a file, and etcd stores it
//! under a key.
//!
//! ```json
//! {"generation": "5f1c-4242", "address": "10.0.0.1:8000", "ready": true, "labels": {"llm-d.ai/role": "decode"}, "metadata": {"model": {"name": "Qwen3-32B"}}}
//! ```

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::backend::{InstanceReadiness, InstanceRecord, MetadataSource, checked_name};
use crate::instance::Instance;
use crate::metadata::{METADATA_BYTES_MAX, Metadata};
use crate::registry::{Announcement, InstanceStatus, Registrant};

/// The largest document, in bytes: metadata of the largest size, and room for the other fields.
pub const DOCUMENT_BYTES_MAX: usize = METADATA_BYTES_MAX + (1 << 16);

/// An instance as a document.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct InstanceDocument {
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) generation: String,
    pub(crate) address: SocketAddr,
    #[serde(default = "yes")]
    pub(crate) ready: bool,
    /// The interval at which the registering process touches the file, in seconds. The field is
    /// absent in files written by hand, and in registries with leases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) heartbeat_seconds: Option<u32>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) labels: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub(crate) metadata: Map<String, Value>,
}

fn yes() -> bool {
    true
}

// === impl InstanceDocument ===

impl InstanceDocument {
    /// Returns the document of an instance in its current state.
    pub(crate) fn from_announcement(said: &Announcement, registrant: &Registrant) -> Self {
        Self {
            generation: said.generation.to_string(),
            address: registrant.address,
            ready: said.status == InstanceStatus::Ready,
            heartbeat_seconds: None,
            labels: BTreeMap::new(),
            metadata: said.metadata.map().clone(),
        }
    }

    /// Reads a document.
    pub(crate) fn parse(text: &[u8]) -> Result<Self, String> {
        if text.len() > DOCUMENT_BYTES_MAX {
            return Err(format!(
                "{} bytes; at most {DOCUMENT_BYTES_MAX} are allowed",
                text.len()
            ));
        }
        serde_json::from_slice(text).map_err(|e| e.to_string())
    }

    /// Returns the record of the instance with this id.
    pub(crate) fn record(self, id: &str, freshness: u64) -> Result<InstanceRecord, String> {
        let Self {
            generation,
            address,
            ready,
            heartbeat_seconds: _,
            labels,
            metadata,
        } = self;
        let metadata = if metadata.is_empty() {
            MetadataSource::None
        } else {
            MetadataSource::Given(Arc::new(
                Metadata::try_new(metadata).map_err(|e| e.to_string())?,
            ))
        };
        let id = checked_name(id).map_err(|e| e.to_string())?;
        let instance = Instance {
            generation,
            labels: labels.into_iter().collect(),
            ..Instance::new(id, address)
        };
        let readiness = if ready {
            InstanceReadiness::Ready
        } else {
            InstanceReadiness::NotReady("it reports that it is not ready".to_owned())
        };
        Ok(InstanceRecord {
            instance,
            readiness,
            metadata,
            freshness,
        })
    }
}
