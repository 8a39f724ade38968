//! An endpoint in the pool, and a known endpoint outside of it.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use discovery::Instance;
use scheduler::{Endpoint, EndpointRef, Readiness};
use tokio::time::Instant;

use super::clock::WallAndMonotonic;
use super::instance_metadata::InstanceMetadata;

/// The minimum time between two restarts of an endpoint's engine that change its generation. Each
/// change costs all proxies a pool update. Engines take longer than this to start.
const RESTART_INTERVAL_MIN: Duration = Duration::from_secs(10);

/// An endpoint in the pool.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolMember {
    /// The slot and the generation.
    pub id: EndpointRef,
    /// The instance that discovery reports.
    pub instance: Arc<Instance>,
    /// The metadata that picking uses.
    pub metadata: InstanceMetadata,
    /// The adapters that the engine is known to have, sorted.
    pub adapters: Arc<[Box<str>]>,
    /// Whether proxies get the names of the adapters.
    pub adapters_fit: bool,
    /// The time when the endpoint joined the pool.
    pub joined: Instant,
    /// The first EDS revision with the endpoint's address. For an endpoint that is no host in EDS,
    /// this is any revision that proxies already have.
    pub eds_since: u64,
    pub metrics: MetricsStatus,
    /// The time when the variant of [`Self::metrics`] last changed.
    pub since: SystemTime,
    pub(super) observed_at: Option<Instant>,
    /// The prompt tokens that the engine has computed since it started, as last scraped.
    pub computed_tokens: Option<u64>,
    pub(super) restarts: EngineRestarts,
}

/// The restarts of an endpoint's engine. A cleared cache counts as a restart.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct EngineRestarts {
    /// The time when the last restart changed the generation.
    changed_at: Option<Instant>,
    /// Whether the engine has restarted since `changed_at`.
    pub(super) is_due: bool,
}

/// Whether an endpoint's metrics are known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsStatus {
    /// The endpoint has not been scraped yet.
    Awaited,
    /// The metrics are known and fresh.
    Fresh,
    /// The metrics are known, but the last scrape failed for this reason.
    Failing(String),
    /// The metrics are unknown for this reason: the last scrape is too old, or no scrape succeeded.
    Unknown(String),
}

/// An endpoint that discovery reports but that is not in the pool update.
#[derive(Clone, Debug, PartialEq)]
pub struct Absentee {
    /// The last instance that discovery reported.
    pub instance: Arc<Instance>,
    /// The reason why the endpoint is not in the pool update.
    pub absence: Absence,
    /// The time since when the endpoint has been absent.
    pub since: SystemTime,
}

/// The reason why an endpoint is not in the pool update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Absence {
    /// The endpoint left discovery or the pool update. The slot of the endpoint stays reserved
    /// until the proxies have acknowledged the removal.
    Departing(EndpointRef),
    /// All slots are taken. The endpoint joins when a slot becomes free.
    NoFreeSlot,
    /// The names of the endpoint's models exceed the limit of the pool.
    TooManyModels,
    /// Discovery does not confirm that the endpoint is ready, and the endpoint does not answer its
    /// scrapes or has been unconfirmed for too long.
    Unconfirmed,
}

// === impl PoolMember ===

impl PoolMember {
    /// Returns the endpoint as the scheduler's type.
    #[must_use]
    pub fn endpoint(&self, now: Instant) -> Endpoint {
        let age = now.saturating_duration_since(self.joined);
        Endpoint {
            id: self.id,
            name: self.instance.name.as_str().into(),
            address: self.instance.address.to_string().into(),
            readiness: Readiness::Ready,
            labels: self
                .instance
                .labels
                .iter()
                .map(|(k, v)| (k.as_str().into(), v.as_str().into()))
                .collect(),
            models: self.models(),
            age_ms: u64::try_from(age.as_millis()).unwrap_or(u64::MAX),
        }
    }

    /// Returns the models that the endpoint serves: the models of its metadata, and its adapters.
    /// The list is empty if the metadata names no model, which means that the endpoint serves any
    /// model.
    #[must_use]
    pub fn models(&self) -> Arc<[Box<str>]> {
        if self.adapters_fit {
            self.metadata.served(&self.adapters)
        } else {
            Arc::clone(&self.metadata.models)
        }
    }

    /// Sets the status and returns whether it changed. [`Self::since`] changes only with the
    /// variant.
    pub(super) fn set_status(&mut self, status: MetricsStatus, wall: SystemTime) -> bool {
        if self.metrics == status {
            return false;
        }
        if std::mem::discriminant(&self.metrics) != std::mem::discriminant(&status) {
            self.since = wall;
        }
        self.metrics = status;
        true
    }
}

// === impl EngineRestarts ===

impl EngineRestarts {
    /// Returns whether a restart changes the generation now. If the restart comes too soon after
    /// the last change, a change is due later.
    pub(super) fn may_change(&mut self, endpoint: &str, now: Instant) -> bool {
        let is_too_soon = self
            .changed_at
            .is_some_and(|at| now.saturating_duration_since(at) < RESTART_INTERVAL_MIN);
        if !is_too_soon {
            tracing::info!(endpoint, "engine restarted, or cleared its cache");
            self.changed_at = Some(now);
        } else if !self.is_due {
            tracing::warn!(
                endpoint,
                "engine seems to restart, or to clear its cache, all the time"
            );
        }
        self.is_due = is_too_soon;
        !is_too_soon
    }
}

/// Creates a member that joins now.
pub(super) fn member(
    id: EndpointRef,
    instance: Arc<Instance>,
    eds_since: u64,
    now: WallAndMonotonic,
) -> PoolMember {
    let said = InstanceMetadata::from_instance(&instance);
    PoolMember {
        id,
        instance,
        metadata: said,
        adapters: Arc::default(),
        adapters_fit: true,
        joined: now.instant,
        eds_since,
        metrics: MetricsStatus::Awaited,
        since: now.wall,
        observed_at: None,
        computed_tokens: None,
        restarts: EngineRestarts::default(),
    }
}
