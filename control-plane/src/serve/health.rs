//! gRPC health, in the form that the protocol and Kubernetes' probes define.

use std::sync::Arc;

use tonic_health::ServingStatus;
use tonic_health::pb::health_server::HealthServer;
use tonic_health::server::{HealthReporter, HealthService, health_reporter};

use crate::shutdown::Shutdown;
use crate::state::shared::DaemonState;

/// The process is alive, as leader or standby. The empty service name has the same answer.
pub const LIVENESS: &str = "liveness";

/// This daemon leads and serves state, though perhaps not yet for every pool.
pub const LEADING: &str = "leading";

/// This daemon leads, and every pool has state, so requests can be decided.
pub const READINESS: &str = "readiness";

/// Like [`READINESS`], for the ext_proc service. Never serving if there is no ext_proc listener.
pub const EXT_PROC: &str = "envoy.service.ext_proc.v3.ExternalProcessor";

/// The service that the charts of the upstream picker probe with one replica. It means liveness.
pub const INFERENCE_EXTENSION: &str = "inference-extension";

/// Reports which services of this daemon work.
#[derive(Clone, Debug)]
pub struct HealthChecks(HealthReporter);

// === impl HealthChecks ===

impl HealthChecks {
    /// Creates the report of a process that is alive but does not lead.
    pub async fn new() -> Self {
        let health = Self(health_reporter().0);
        for service in [LIVENESS, INFERENCE_EXTENSION] {
            health.0.set_service_status(service, ServingStatus::Serving).await;
        }
        for service in [LEADING, READINESS, EXT_PROC] {
            health.0.set_service_status(service, ServingStatus::NotServing).await;
        }
        health
    }

    /// The gRPC service that answers probes.
    #[must_use]
    pub fn service(&self) -> HealthServer<HealthService> {
        HealthServer::new(HealthService::from_health_reporter(self.0.clone()))
    }

    /// Reports that this daemon leads.
    pub async fn leads(&self) {
        self.0.set_service_status(LEADING, ServingStatus::Serving).await;
    }

    /// Reports whether ext_proc can decide requests.
    pub async fn ready(&self, ready: bool) {
        self.set(READINESS, ready).await;
        self.set(EXT_PROC, ready).await;
    }

    /// Reports readiness from the state of the pools until `shutdown`. Used when there is no
    /// ext_proc server, which reports readiness itself.
    pub async fn follow(self, shared: Arc<DaemonState>, mut shutdown: Shutdown) {
        let mut pools = shared.pools.subscribe();
        loop {
            let ready = {
                let views = pools.borrow_and_update();
                shared.pool_names.iter().all(|name| views.get(name).is_some())
            };
            self.set(READINESS, ready).await;
            tokio::select! {
                changed = pools.changed() => if changed.is_err() { return },
                () = shutdown.begun() => return,
            }
        }
    }

    async fn set(&self, service: &str, serving: bool) {
        self.0.set_service_status(service, if serving { ServingStatus::Serving } else { ServingStatus::NotServing }).await;
    }
}
