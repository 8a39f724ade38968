//! One version of a pool for its readers.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use scheduler::objects::ObjectsSpec;
use scheduler::{EndpointMetrics, Generation, PipelineSpec};

use super::member::{Absentee, PoolMember};
use crate::config::ConfigStatus;

/// The set of hosts that Envoy may connect to: members and departing endpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EdsSet {
    /// A number that grows with each change of the set, and is never 0.
    pub revision: u64,
    /// The hosts, sorted.
    pub addresses: Arc<[SocketAddr]>,
}

/// One version of a pool. Views with equal `revision` have equal members, pipeline, objects and
/// `staleness_max`.
#[derive(Clone, Debug)]
pub struct PoolView {
    pub name: Arc<str>,
    /// A number that grows with each change of members, pipeline or objects, and is never 0.
    pub revision: u64,
    /// The endpoints that may be picked, by slot.
    pub members: Arc<[PoolMember]>,
    /// The metrics of `members`, in the same order.
    pub metrics: Arc<[EndpointMetrics]>,
    /// A number that grows with each change of `metrics`.
    pub metrics_revision: u64,
    pub pipeline: Arc<PipelineSpec>,
    /// The models, rewrites and objectives of the pool.
    pub objects: Arc<ObjectsSpec>,
    /// The age above which metrics are unknown.
    pub staleness_max: Duration,
    pub eds: EdsSet,
    /// Known endpoints that must not be picked.
    pub absent: Arc<[Absentee]>,
    /// The next generation. A later start of the daemon must begin at this generation or above.
    pub generation_next: u32,
    pub sources: SourceStatus,
}

/// The status of the sources of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceStatus {
    /// Whether the pool has had a complete set of endpoints, from discovery or from the snapshot
    /// file. Until then the pool is not served, because proxies would treat it as an empty pool.
    pub complete: bool,
    /// Whether discovery has sent a complete set since the start.
    pub synced: bool,
    /// The reason why discovery cannot read its source now. The last set stays in force. The value
    /// is `None` if discovery can read the source.
    pub discovery_error: Option<String>,
    pub config: ConfigStatus,
    pub objects: ConfigStatus,
    /// The number of objects whose pool this daemon does not serve, by the name of that pool.
    pub objects_without_pool: Arc<BTreeMap<String, usize>>,
    /// The number of errors of discovery, configuration or objects.
    pub errors: u64,
}

// === impl PoolView ===

impl PoolView {
    /// Returns the next generation, which is used once.
    pub(super) fn next_generation(&mut self) -> Generation {
        let next = self.generation_next;
        self.generation_next = next.wrapping_add(1);
        Generation(next)
    }
}
