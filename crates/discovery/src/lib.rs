//! Registry and discovery of model servers.
//!
//! A process registers itself with a [`ServiceRegistry`]; a client lists and watches with a
//! [`ServiceDiscovery`]. The backend behind both is chosen once, where they are created.
//!
//! ```ignore
//! // The worker publishes its address, its models and, once it can serve, its readiness.
//! let registry = DirectoryRegistry::new(folder, SocketAddr::from(([10, 0, 0, 1], 8000)));
//! let worker = registry.register_instance("dynamo", "decode").await?;
//! let metadata = json!({"model": {"name": "Qwen3-32B"}});
//! worker.set_metadata(metadata.as_object().cloned().unwrap_or_default())?;
//! worker.set_ready(InstanceStatus::Ready);
//!
//! // The frontend gets all current instances first, then every change, without a gap.
//! let discovery = DirectoryBackend::new(folder).discovery();
//! let mut events = discovery.watch("dynamo", "decode")?;
//! let Some(InstanceEvent::Added(instance)) = events.next().await else {
//!     panic!("the first event is an instance");
//! };
//! assert_eq!(instance.name, worker.instance_id());
//! assert_eq!(instance.metadata().models()[0].name, "Qwen3-32B");
//!
//! drop(worker);
//! let Some(InstanceEvent::Removed(id)) = events.next().await else {
//!     panic!("an instance that ends is removed");
//! };
//! assert_eq!(*id, *instance.name);
//! ```
//!
//! ```text
//!  worker ── ServiceRegistry ──▶ Kubernetes │ directory │ ... ── Backend ──▶ Discovery ── list, watch ──▶ frontend
//!  /metadata, /health  ◀──────────────────── conditional GET ──────────────────┘
//! ```
//! Each event has the whole value of an instance. A backend may send its whole set again at any
//! time. An error never empties a set. A subscriber that is too slow gets the current state instead
//! of a queue of old events.
//!
//! The daemon uses [`SetChanges`]: each item is the complete set. [`file`] (an endpoints file) and
//! [`fixed`] (a fixed list) return it directly. [`Discovery::changes`] returns it for any backend.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

use futures::stream::{BoxStream, StreamExt};

pub mod instance;
pub mod metadata;

pub mod registry;
pub mod serve;

pub mod backend;
mod document;
pub mod event;
mod fetch;
pub mod table;
mod wait;
pub mod watch;
pub mod whole_file;

pub mod directory;
#[cfg(feature = "etcd")]
pub mod etcd;
pub mod file;
pub mod file_watcher;
#[cfg(feature = "kubernetes")]
pub mod kubernetes;
#[cfg(any(feature = "kubernetes", feature = "etcd"))]
pub mod lease;
pub mod merge;

pub use event::{InstanceEvent, InstanceState, InstanceSummary, MetadataPolicy};
pub use instance::{
    INSTANCES_MAX, Instance, InstanceMetricsLocation, LABEL_BYTES_MAX, LABELS_MAX, LocalAddresses,
    MetricsScheme, NAME_BYTES_MAX, NAMESPACE_DEFAULT, RECORDS_MAX, validate,
};
pub use metadata::Metadata;
pub use registry::{InstanceHandle, InstanceStatus, RegisterError, Registrant, ServiceRegistry};
pub use watch::{
    BackendStatus, Discovery, DiscoveryError, InstanceEvents, ServiceDiscovery, WatchedComponent,
};

/// A change of the set. A [`SetChange::Reset`] is the first item of a stream, except for any
/// [`SetChange::Unreadable`] before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SetChange {
    /// The whole set of instances. This set replaces everything reported before.
    Reset(Vec<Instance>),
    /// The source cannot be read or is invalid, for this reason. The last set stays in use.
    Unreadable(String),
}

/// A stream of changes that ends only with its backend.
pub type SetChanges = BoxStream<'static, SetChange>;

/// Returns a set that never changes.
#[must_use]
pub fn fixed(instances: Vec<Instance>) -> SetChanges {
    futures::stream::iter([SetChange::Reset(instances)])
        .chain(futures::stream::pending())
        .boxed()
}
