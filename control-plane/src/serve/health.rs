//! gRPC health, in the form that the protocol and Kubernetes' probes define.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tonic_health::ServingStatus;
use tonic_health::pb::health_server::HealthServer;
use tonic_health::server::{HealthReporter, HealthService, health_reporter};

use crate::shutdown::Shutdown;
use crate::state::life::DaemonLife;
use crate::state::pool_views::PoolTable;

/// The service that serves while the process is alive, as leader or standby. The empty service name
/// has the same answer.
pub const LIVENESS: &str = "liveness";

/// The service that serves while this daemon leads and sends state, though perhaps not yet for
/// every pool.
pub const LEADING: &str = "leading";

/// The service that serves while every pool has state. With an ext_proc listener, this daemon can
/// then decide requests, also as a standby. Without such a listener, the daemon must also lead.
pub const READINESS: &str = "readiness";

/// The service of ext_proc, which serves under the same conditions as [`READINESS`], but never
/// without an ext_proc listener.
pub const EXT_PROC: &str = "envoy.service.ext_proc.v3.ExternalProcessor";

/// The service that the charts of the upstream picker probe with one replica. The service means
/// liveness.
pub const INFERENCE_EXTENSION: &str = "inference-extension";

/// Reports which services of this daemon work.
#[derive(Clone, Debug)]
pub struct HealthChecks {
    reporter: HealthReporter,
    /// Whether the daemon is stopping. A daemon that is stopping is never ready again.
    stopping: Arc<AtomicBool>,
}

// === impl HealthChecks ===

impl HealthChecks {
    /// Creates the report of a process that is alive but does not lead.
    pub async fn new() -> Self {
        let health = Self {
            reporter: health_reporter().0,
            stopping: Arc::default(),
        };
        for service in [LIVENESS, INFERENCE_EXTENSION] {
            health.set(service, true).await;
        }
        for service in [LEADING, READINESS, EXT_PROC] {
            health.set(service, false).await;
        }
        health
    }

    /// Returns the gRPC service that answers probes.
    #[must_use]
    pub fn service(&self) -> HealthServer<HealthService> {
        HealthServer::new(HealthService::from_health_reporter(self.reporter.clone()))
    }

    /// Reports whether this daemon leads.
    pub async fn leads(&self, leads: bool) {
        self.set(LEADING, leads).await;
    }

    /// Reports whether ext_proc can decide requests.
    pub async fn ready(&self, ready: bool) {
        let ready = ready && !self.stopping.load(Ordering::Relaxed);
        self.set(READINESS, ready).await;
        self.set(EXT_PROC, ready).await;
    }

    /// Reports permanently that this daemon is not ready, because it stops.
    pub async fn stop_ready(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        self.ready(false).await;
    }

    /// Reports readiness from the state of the pools until `shutdown`. This function is used only
    /// without an ext_proc server, because that server reports readiness itself.
    pub async fn follow(
        self,
        life: Arc<DaemonLife>,
        table: Arc<PoolTable>,
        mut shutdown: Shutdown,
    ) {
        let mut pools = table.views.subscribe();
        let mut leadership = life.subscribe();
        loop {
            let leads = leadership.borrow_and_update().leads;
            let ready = leads && {
                let views = pools.borrow_and_update();
                table.names.iter().all(|name| views.get(name).is_some())
            };
            self.set(READINESS, ready && !self.stopping.load(Ordering::Relaxed))
                .await;
            tokio::select! {
                changed = pools.changed() => if changed.is_err() { return },
                changed = leadership.changed() => if changed.is_err() { return },
                () = shutdown.begun() => return,
            }
        }
    }

    async fn set(&self, service: &str, serving: bool) {
        self.reporter
            .set_service_status(
                service,
                if serving {
                    ServingStatus::Serving
                } else {
                    ServingStatus::NotServing
                },
            )
            .await;
    }
}
