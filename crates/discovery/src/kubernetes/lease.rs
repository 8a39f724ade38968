//! A `Lease` of `coordination.k8s.io/v1`, written as Kubernetes' own controllers write it. So
//! `kubectl get lease` shows the leader.

use futures::future::BoxFuture;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};

use crate::lease::{LEASE_DURATION, LeaseRecord, LeaseStore};

/// A lease in Kubernetes.
#[derive(Clone)]
pub struct KubernetesLease {
    leases: Api<Lease>,
    name: String,
}

// === impl KubernetesLease ===

impl KubernetesLease {
    /// Returns the lease with this name in that namespace.
    #[must_use]
    pub fn new(client: Client, kube_namespace: &str, name: impl Into<String>) -> Self {
        Self {
            leases: Api::namespaced(client, kube_namespace),
            name: name.into(),
        }
    }

    async fn swap(
        &self,
        holder: &str,
        expected: Option<&LeaseRecord>,
    ) -> Result<Option<LeaseRecord>, kube::Error> {
        let written = match expected {
            None => {
                let lease =
                    json!({ "metadata": { "name": self.name }, "spec": spec(holder, 0, true) });
                let lease = serde_json::from_value(lease).map_err(kube::Error::SerdeError)?;
                self.leases.create(&PostParams::default(), &lease).await
            }
            Some(seen) => {
                let taken = seen.holder != holder;
                let spec = spec(
                    holder,
                    seen.transitions + u32::from(taken && !holder.is_empty()),
                    taken,
                );
                // With a resource version, the patch is refused if the lease has changed.
                let patch =
                    json!({ "metadata": { "resourceVersion": seen.version }, "spec": spec });
                self.leases
                    .patch(&self.name, &PatchParams::default(), &Patch::Merge(&patch))
                    .await
            }
        };
        match written {
            Ok(lease) => Ok(Some(seen(&lease))),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn spec(holder: &str, transitions: u32, taken: bool) -> Value {
    let now = format!("{:.6}", Timestamp::now()); // the API has microseconds
    let mut spec = json!({ "holderIdentity": holder, "leaseDurationSeconds": LEASE_DURATION.as_secs(), "leaseTransitions": transitions, "renewTime": now });
    if taken {
        spec["acquireTime"] = now.into();
    }
    spec
}

fn seen(lease: &Lease) -> LeaseRecord {
    let spec = lease.spec.as_ref();
    LeaseRecord {
        holder: spec
            .and_then(|s| s.holder_identity.clone())
            .unwrap_or_default(),
        version: lease.resource_version().unwrap_or_default(),
        transitions: spec
            .and_then(|s| s.lease_transitions)
            .and_then(|n| u32::try_from(n).ok())
            .unwrap_or(0),
    }
}

impl std::fmt::Debug for KubernetesLease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KubernetesLease")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl LeaseStore for KubernetesLease {
    fn read(&self) -> BoxFuture<'_, Result<Option<LeaseRecord>, String>> {
        Box::pin(async move {
            let lease = self
                .leases
                .get_opt(&self.name)
                .await
                .map_err(|e| format!("lease {:?}: {e}", self.name))?;
            Ok(lease.as_ref().map(seen))
        })
    }

    fn write<'a>(
        &'a self,
        holder: &'a str,
        expected: Option<&'a LeaseRecord>,
    ) -> BoxFuture<'a, Result<Option<LeaseRecord>, String>> {
        Box::pin(async move {
            self.swap(holder, expected)
                .await
                .map_err(|e| format!("lease {:?}: {e}", self.name))
        })
    }
}
