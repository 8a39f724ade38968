//! gRPC health, as the protocol and Kubernetes' probes ask for it.

use std::sync::Arc;

use tonic_health::ServingStatus;
use tonic_health::pb::health_server::HealthServer;
use tonic_health::server::{HealthReporter, HealthService, health_reporter};

use crate::shutdown::Shutdown;
use crate::state::shared::DaemonState;

/// The process lives, whether it leads or stands by. Also the answer for no service at all (``).
pub const LIVENESS: &str = "liveness";

/// This daemon leads: it serves state, though perhaps it does not know every pool yet.
pub const LEADING: &str = "leading";

/// It leads, and every pool has state, so requests can be decided.
pub const READINESS: &str = "readiness";

/// The same of the service that decides; never where no ext_proc is served.
pub const EXT_PROC: &str = "envoy.service.ext_proc.v3.ExternalProcessor";

/// What the charts of upstream's picker probe where there is one replica: that it lives.
pub const INFERENCE_EXTENSION: &str = "inference-extension";

/// Says what can be had of this daemon.
#[derive(Clone, Debug)]
pub struct HealthChecks(HealthReporter);

// === impl HealthChecks ===

impl HealthChecks {
    /// It lives, and no more.
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

    /// The gRPC service that answers.
    #[must_use]
    pub fn service(&self) -> HealthServer<HealthService> {
        HealthServer::new(HealthService::from_health_reporter(self.0.clone()))
    }

    /// State is served from now on.
    pub async fn leads(&self) {
        self.0.set_service_status(LEADING, ServingStatus::Serving).await;
    }

    /// From now on requests can be decided by ext_proc, or not.
    pub async fn ready(&self, ready: bool) {
        self.set(READINESS, ready).await;
        self.set(EXT_PROC, ready).await;
    }

    /// Follows the pools until `shutdown`, where no ext_proc front does.
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
