//! Kubernetes as a registry. An instance is ready when its pod is ready. The pod's readiness probe
//! decides this, and EndpointSlices report it.
//!
//! ```text
//!  Services ── whose selector has both labels ──▶ their names ──▶ EndpointSlices of these names ──▶ SliceIndex ──▶ records
//! ```
//! | EndpointSlice | event |
//! |---|---|
//! | endpoint added with `ready: true` (nil is true) | Added |
//! | its condition becomes true | Added |
//! | its condition becomes false because its node is lost | Added, unconfirmed |
//! | its condition becomes false otherwise, or it is terminating or no longer serving | Removed |
//! | endpoint gone from its last slice, slice deleted, or absent from a new list | Removed |
//!
//! A Service is found by the labels [`NAMESPACE_LABEL`] and [`COMPONENT_LABEL`] in its
//! `spec.selector`, not by its name, because two namespaces may have a component with the same
//! name. The slices of a Service are found by `kubernetes.io/service-name`, because the slice
//! controller copies the labels of the Service to the slices, not the labels of the pods. Labels of
//! pods are read from the pods ([`labels`]).
//!
//! [`InferencePools`] is the alternative: an `InferencePool` names its pods by selector.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::BoxStream;
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::ListParams;
use kube::{Api, Client, Config, ResourceExt};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::backend::{Backend, BackendEvent, Component, ComponentFollower, stream};
use crate::event::MetadataPolicy;
use crate::registry::{InstanceHandle, RegisterError, Registration, ServiceRegistry};
use crate::wait::sleep_until;
use crate::watch::Discovery;

mod labels;
mod lease;
mod listing;
mod objects;
mod pods;
mod pool;
mod secrets;
mod slices;

use labels::PodLabels;
pub use lease::KubernetesLease;
use listing::{ObjectWatch, ObjectWatchEvent, next_of};
pub use objects::{CustomKind, follow_objects};
pub use pool::{InferencePools, PoolGroup};
pub use secrets::{KubernetesSecrets, SecretName, StoredSecret};
pub use slices::{PortRule, SliceIndex};

/// The label with the namespace in the serving system, on a pod and in the selector of its Service.
pub const NAMESPACE_LABEL: &str = "nvidia.com/dynamo-namespace";

/// The label with the name of the component, on a pod and in the selector of its Service.
pub const COMPONENT_LABEL: &str = "nvidia.com/dynamo-component";

/// The label of a slice with the name of its Service.
const SERVICE_NAME_LABEL: &str = "kubernetes.io/service-name";

/// The maximum number of Services that may select one component. The names of the Services go into
/// a label selector, which is part of a URL.
const SERVICES_MAX: usize = 32;

/// The maximum time that connecting to the API server may take. A running API server answers much
/// faster.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);

/// The maximum time that the first set waits for the labels of the pods. An API server that has
/// just sent the slices sends pods as quickly, unless the daemon may not read pods.
const LABELS_WAIT: Duration = Duration::from_secs(3);

/// A Kubernetes cluster as a discovery backend.
#[derive(Clone)]
pub struct Kubernetes {
    client: Client,
    kube_namespace: String,
    ports: PortRule,
}

/// Registers the pod that this process runs in.
#[derive(Clone)]
pub struct KubernetesRegistry {
    client: Client,
    kube_namespace: String,
    pod: String,
}

/// Connects to the cluster that this process runs in. Outside of a cluster, connects to the cluster
/// of the kubeconfig.
///
/// # Errors
/// Fails if there is no valid configuration. An unreachable cluster is not an error here.
pub async fn connect() -> Result<Client, String> {
    client(
        Config::infer()
            .await
            .map_err(|e| format!("no Kubernetes configuration: {e}"))?,
    )
}

/// Connects with this configuration and the timeouts that discovery needs.
///
/// # Errors
/// Fails if the configuration is invalid, for example its certificates.
pub fn client(mut config: Config) -> Result<Client, String> {
    config.default_retry = false; // this crate retries itself, so that it can report an outage
    config.connect_timeout = Some(CONNECT_DEADLINE);
    Client::try_from(config).map_err(|e| format!("Kubernetes configuration: {e}"))
}

// === impl Kubernetes ===

impl Kubernetes {
    /// Creates a backend for one Kubernetes namespace of a cluster.
    #[must_use]
    pub fn new(client: Client, kube_namespace: impl Into<String>) -> Self {
        Self {
            client,
            kube_namespace: kube_namespace.into(),
            ports: PortRule::default(),
        }
    }

    /// Returns the backend with this rule for ports.
    #[must_use]
    pub fn with_ports(self, ports: PortRule) -> Self {
        Self { ports, ..self }
    }

    /// Creates discovery with this backend.
    #[must_use]
    pub fn discovery(self, policy: MetadataPolicy) -> Discovery<Self> {
        Discovery::new(self, policy)
    }
}

impl std::fmt::Debug for Kubernetes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kubernetes")
            .field("kube_namespace", &self.kube_namespace)
            .field("ports", &self.ports)
            .finish_non_exhaustive()
    }
}

impl Backend for Kubernetes {
    fn follow(
        &self,
        component: &Component,
        relist: Arc<Notify>,
    ) -> BoxStream<'static, BackendEvent> {
        let services = ObjectWatch::new(
            Api::<Service>::namespaced(self.client.clone(), &self.kube_namespace),
            "",
        );
        let slices = Api::namespaced(self.client.clone(), &self.kube_namespace);
        let selector = format!(
            "{NAMESPACE_LABEL}={},{COMPONENT_LABEL}={}",
            component.namespace(),
            component.name()
        );
        let pods = ObjectWatch::new(
            Api::namespaced(self.client.clone(), &self.kube_namespace),
            &selector,
        );
        stream(KubernetesFollower {
            component: component.clone(),
            services,
            names: BTreeSet::new(),
            listed: false,
            slices,
            listing: None,
            index: SliceIndex::new(self.ports.clone()),
            pods,
            labels: PodLabels::default(),
            labelled: false,
            withheld: None,
            relist,
        })
    }
}

/// Follows one component.
struct KubernetesFollower {
    component: Component,
    services: ObjectWatch<Service>,
    names: BTreeSet<String>,
    listed: bool,
    slices: Api<EndpointSlice>,
    /// The slices of the Services in `names`, if there are any.
    listing: Option<ObjectWatch<EndpointSlice>>,
    index: SliceIndex,
    pods: ObjectWatch<Pod>,
    labels: PodLabels,
    /// Whether the labels of the pods are known, or are known to be unreadable.
    labelled: bool,
    /// The time until which the first set waits for the labels, because readers would treat a set
    /// without labels as complete.
    withheld: Option<Instant>,
    relist: Arc<Notify>,
}

// === impl KubernetesFollower ===

impl ComponentFollower for KubernetesFollower {
    async fn next(&mut self) -> Option<Vec<BackendEvent>> {
        Some(tokio::select! {
            event = self.services.next() => self.service(event),
            event = next_of(&mut self.listing) => self.slice(event),
            event = self.pods.next() => self.pod(event),
            () = sleep_until(self.withheld) => self.labelled(),
            () = self.relist.notified() => {
                self.services.restart();
                self.pods.restart();
                if let Some(listing) = &mut self.listing {
                    listing.restart();
                }
                Vec::new()
            }
        })
    }
}

impl KubernetesFollower {
    /// Updates the Services that select the component. When these Services change, the slices are
    /// listed again. Until then the old set stays in use.
    fn service(&mut self, event: ObjectWatchEvent<Service>) -> Vec<BackendEvent> {
        let selects = |service: &Service| selects(service, &self.component);
        let mut names = self.names.clone();
        match event {
            ObjectWatchEvent::All(services) => {
                names = services
                    .iter()
                    .filter(|s| selects(s))
                    .map(ResourceExt::name_any)
                    .collect();
            }
            ObjectWatchEvent::Applied(service) if selects(&service) => {
                names.insert(service.name_any());
            }
            ObjectWatchEvent::Applied(service) | ObjectWatchEvent::Deleted(service) => {
                names.remove(&service.name_any());
            }
            ObjectWatchEvent::Failed(why) => return vec![BackendEvent::Failed(why)],
        }
        let first = !std::mem::replace(&mut self.listed, true);
        if names == self.names && !first {
            // Without a Service there are no slice events, so this event is the only sign that the
            // backend works.
            return if self.names.is_empty() {
                vec![BackendEvent::Alive]
            } else {
                Vec::new()
            };
        }
        if names.len() > SERVICES_MAX {
            return vec![BackendEvent::Failed(format!(
                "{} Services select the component; at most {SERVICES_MAX} may",
                names.len()
            ))];
        }
        self.names = names;
        if self.names.is_empty() {
            self.listing = None;
            return vec![BackendEvent::Reset(self.index.reset(&[]))];
        }
        let names: Vec<&str> = self.names.iter().map(String::as_str).collect();
        self.listing = Some(ObjectWatch::new(
            self.slices.clone(),
            &format!("{SERVICE_NAME_LABEL} in ({})", names.join(",")),
        ));
        Vec::new()
    }

    fn slice(&mut self, event: ObjectWatchEvent<EndpointSlice>) -> Vec<BackendEvent> {
        let events = match event {
            ObjectWatchEvent::All(slices) => {
                self.index.reset(&slices);
                if !self.labelled {
                    self.withheld
                        .get_or_insert_with(|| Instant::now() + LABELS_WAIT);
                    return Vec::new();
                }
                return vec![self.all()];
            }
            ObjectWatchEvent::Applied(slice) => self.index.apply(&slice),
            ObjectWatchEvent::Deleted(slice) => self.index.delete(&slice.name_any()),
            ObjectWatchEvent::Failed(why) => return vec![BackendEvent::Failed(why)],
        };
        // While the first set is held back, no change is reported, because the set will contain the
        // change.
        if self.withheld.is_some() {
            Vec::new()
        } else {
            events
                .into_iter()
                .map(|event| self.labels.join_event(event))
                .collect()
        }
    }

    fn pod(&mut self, event: ObjectWatchEvent<Pod>) -> Vec<BackendEvent> {
        match event {
            ObjectWatchEvent::All(pods) => {
                let changed = self.labels.reset(&pods);
                let mut events = vec![BackendEvent::Warns(None)];
                // The events are not a reset, because a reset would mean that the slices have been
                // read.
                events.extend(changed.iter().filter_map(|pod| self.relabelled(pod)));
                events.extend(self.labelled());
                events
            }
            ObjectWatchEvent::Applied(pod) if self.labels.apply(&pod) => {
                Vec::from_iter(self.relabelled(&pod.name_any()))
            }
            ObjectWatchEvent::Applied(_) => Vec::new(),
            ObjectWatchEvent::Deleted(pod) => {
                self.labels.delete(&pod.name_any());
                Vec::new()
            }
            ObjectWatchEvent::Failed(why) => {
                let mut events = vec![BackendEvent::Warns(Some(format!(
                    "labels of pods cannot be read: {why}"
                )))];
                events.extend(self.labelled());
                events
            }
        }
    }

    /// Returns the new record of a pod in the slices, with its current labels.
    fn relabelled(&self, pod: &str) -> Option<BackendEvent> {
        let record = self.index.get(pod).filter(|_| self.withheld.is_none())?;
        Some(BackendEvent::Apply(self.labels.join(&record)))
    }

    /// Ends the wait for labels. Returns the set that waited, if there is one.
    fn labelled(&mut self) -> Vec<BackendEvent> {
        self.labelled = true;
        Vec::from_iter(self.withheld.take().map(|_| self.all()))
    }

    fn all(&self) -> BackendEvent {
        BackendEvent::Reset(
            self.index
                .all()
                .into_iter()
                .map(|record| self.labels.join(&record))
                .collect(),
        )
    }
}

/// Returns whether the Service selects exactly the pods of that component.
fn selects(service: &Service, component: &Component) -> bool {
    let selector = service.spec.as_ref().and_then(|s| s.selector.as_ref());
    selector.is_some_and(|selector| has_labels(selector, component))
}

fn has_labels(labels: &BTreeMap<String, String>, component: &Component) -> bool {
    let has = |key: &str, value: &str| labels.get(key).is_some_and(|v| v == value);
    has(NAMESPACE_LABEL, component.namespace()) && has(COMPONENT_LABEL, component.name())
}

// === impl KubernetesRegistry ===

impl KubernetesRegistry {
    /// Registers the pod with this name. A pod gets its own name and namespace by the downward API.
    #[must_use]
    pub fn new(client: Client, kube_namespace: impl Into<String>, pod: impl Into<String>) -> Self {
        Self {
            client,
            kube_namespace: kube_namespace.into(),
            pod: pod.into(),
        }
    }

    /// Checks that other processes can find the pod: the pod must have both labels, and a Service
    /// must select it by these labels. After that, the registration lasts as long as the pod, and
    /// the readiness probe reads the readiness from [`crate::serve`].
    async fn register(
        &self,
        namespace: &str,
        component: &str,
    ) -> Result<InstanceHandle, RegisterError> {
        let component = Component::try_new(namespace, component)?;
        let unavailable = |what: &str, e: &kube::Error| match e {
            kube::Error::Api(status) if status.code == 404 || status.code == 403 => {
                RegisterError::Refused(format!("{what}: {status}"))
            }
            other => RegisterError::Unavailable(format!("{what}: {other}")),
        };
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.kube_namespace);
        let pod = pods
            .get(&self.pod)
            .await
            .map_err(|e| unavailable("reading the pod", &e))?;
        if !has_labels(pod.labels(), &component) {
            let namespace = component.namespace();
            let name = component.name();
            return Err(RegisterError::Refused(format!(
                "pod {:?} must have the labels {NAMESPACE_LABEL}={namespace} and {COMPONENT_LABEL}={name}",
                self.pod
            )));
        }
        let services: Api<Service> = Api::namespaced(self.client.clone(), &self.kube_namespace);
        let services = services
            .list(&ListParams::default())
            .await
            .map_err(|e| unavailable("listing Services", &e))?;
        let selected = services
            .iter()
            .filter(|service| selects(service, &component))
            .any(|service| {
                let selector = service.spec.as_ref().and_then(|s| s.selector.as_ref());
                selector.is_some_and(|s| {
                    s.iter()
                        .all(|(key, value)| pod.labels().get(key) == Some(value))
                })
            });
        if !selected {
            return Err(RegisterError::Refused(format!(
                "no Service of namespace {:?} selects pod {:?} by {NAMESPACE_LABEL} and {COMPONENT_LABEL}: no client would find it",
                self.kube_namespace, self.pod
            )));
        }
        let generation = pod.uid().unwrap_or_default().into();
        Ok(InstanceHandle::new(
            self.pod.as_str().into(),
            generation,
            |_| Registration {
                task: None,
                withdraw: None,
            },
        ))
    }
}

impl std::fmt::Debug for KubernetesRegistry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KubernetesRegistry")
            .field("kube_namespace", &self.kube_namespace)
            .field("pod", &self.pod)
            .finish_non_exhaustive()
    }
}

impl ServiceRegistry for KubernetesRegistry {
    fn register_instance<'a>(
        &'a self,
        namespace: &'a str,
        component: &'a str,
    ) -> BoxFuture<'a, Result<InstanceHandle, RegisterError>> {
        Box::pin(self.register(namespace, component))
    }
}
