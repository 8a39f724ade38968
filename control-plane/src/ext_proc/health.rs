//! gRPC health, as the protocol and Kubernetes' probes ask for it.

use tonic_health::ServingStatus;
use tonic_health::pb::health_server::{Health as Answers, HealthServer};
use tonic_health::server::{HealthReporter, health_reporter};

/// Services asked about besides the process itself (``): it lives; it can decide; the same under the name of the service that decides.
pub const SERVICES: [&str; 3] = ["liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"];

/// Says whether requests can be decided.
#[derive(Clone, Debug)]
pub struct Health(HealthReporter);

/// The gRPC service, and what tells it.
pub async fn health() -> (Health, HealthServer<impl Answers>) {
    let (reporter, service) = health_reporter();
    let health = Health(reporter);
    let [liveness, ..] = SERVICES;
    health.0.set_service_status(liveness, ServingStatus::Serving).await;
    health.ready(false).await;
    (health, service)
}

// === impl Health ===

impl Health {
    /// From now on requests can be decided, or not.
    pub async fn ready(&self, ready: bool) {
        let status = if ready { ServingStatus::Serving } else { ServingStatus::NotServing };
        let [_, readiness, service] = SERVICES;
        self.0.set_service_status(readiness, status).await;
        self.0.set_service_status(service, status).await;
    }
}
