//! An `InferencePool` as a source: the pods that its selector matches, at its target ports.
//!
//! Two API groups are supported, `inference.networking.k8s.io/v1` and the older
//! `inference.networking.x-k8s.io/v1alpha2`. The namespace is the Kubernetes namespace, and the
//! component is the name of the pool. After a change of the pool its pods are listed again. Until
//! then the old set stays in use. A deleted pool has no pods.
//!
//! [`BackendEvent::Requirements`] carries the pool's `endpointPickerRef` (`extensionRef` in the
//! older API group) and `appProtocol`.

use std::sync::Arc;

use futures::stream::BoxStream;
use k8s_openapi::api::core::v1::Pod;
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use kube::{Api, Client, ResourceExt};
use serde_json::Value;
use tokio::sync::Notify;

use super::listing::{ObjectWatch, ObjectWatchEvent, next_of};
use super::pods::PodIndex;
use crate::backend::{
    AppProtocol, Backend, BackendEvent, Component, ComponentFollower, PickerFailureMode,
    PickerService, PoolRequirements, stream,
};
use crate::event::MetadataPolicy;
use crate::watch::Discovery;

/// The maximum number of target ports of one pool. The API has the same limit.
const TARGET_PORTS_MAX: usize = 8;

/// The API group of an InferencePool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PoolGroup {
    /// `inference.networking.k8s.io/v1`.
    #[default]
    V1,
    /// `inference.networking.x-k8s.io/v1alpha2`.
    V1Alpha2,
}

/// The InferencePools of a cluster as a discovery backend.
#[derive(Clone)]
pub struct InferencePools {
    client: Client,
    group: PoolGroup,
}

/// The fields of a pool that select its instances.
#[derive(Clone, Debug, PartialEq, Eq)]
struct InferencePoolSpec {
    selector: String,
    ports: Vec<u16>,
}

struct PoolFollower {
    pool: ObjectWatch<DynamicObject>,
    spec: Option<InferencePoolSpec>,
    kube_namespace: Arc<str>,
    requirements: Option<PoolRequirements>,
    published: bool,
    pods: Api<Pod>,
    listing: Option<ObjectWatch<Pod>>,
    index: PodIndex,
    relist: Arc<Notify>,
}

// === impl InferencePools ===

impl InferencePools {
    /// Creates a backend for the pools of this group.
    #[must_use]
    pub fn new(client: Client, group: PoolGroup) -> Self {
        Self { client, group }
    }

    /// Creates discovery with this backend.
    #[must_use]
    pub fn discovery(self, policy: MetadataPolicy) -> Discovery<Self> {
        Discovery::new(self, policy)
    }
}

impl std::fmt::Debug for InferencePools {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InferencePools")
            .field("group", &self.group)
            .finish_non_exhaustive()
    }
}

impl Backend for InferencePools {
    fn follow(
        &self,
        component: &Component,
        relist: Arc<Notify>,
    ) -> BoxStream<'static, BackendEvent> {
        let kind = ApiResource::from_gvk_with_plural(&self.group.kind(), "inferencepools");
        let pools = Api::namespaced_with(self.client.clone(), component.namespace(), &kind);
        let follow = PoolFollower {
            pool: ObjectWatch::of_one(pools, component.name()),
            spec: None,
            kube_namespace: component.namespace().into(),
            requirements: None,
            published: false,
            pods: Api::namespaced(self.client.clone(), component.namespace()),
            listing: None,
            index: PodIndex::new(Vec::new()),
            relist,
        };
        stream(follow)
    }
}

// === impl PoolFollower ===

impl ComponentFollower for PoolFollower {
    async fn next(&mut self) -> Option<Vec<BackendEvent>> {
        Some(tokio::select! {
            event = self.pool.next() => self.pool(event),
            event = next_of(&mut self.listing) => match event {
                ObjectWatchEvent::All(pods) => vec![BackendEvent::Reset(self.index.reset(&pods))],
                ObjectWatchEvent::Applied(pod) => self.index.apply(&pod),
                ObjectWatchEvent::Deleted(pod) => self.index.delete(&pod.name_any()),
                ObjectWatchEvent::Failed(why) => vec![BackendEvent::Failed(why)],
            },
            () = self.relist.notified() => {
                if let Some(listing) = &mut self.listing {
                    listing.restart();
                }
                Vec::new()
            }
        })
    }
}

impl PoolFollower {
    fn pool(&mut self, event: ObjectWatchEvent<DynamicObject>) -> Vec<BackendEvent> {
        let pool = match event {
            ObjectWatchEvent::All(pools) => pools.into_iter().next(),
            ObjectWatchEvent::Applied(pool) => Some(pool),
            ObjectWatchEvent::Deleted(_) => None,
            ObjectWatchEvent::Failed(why) => return vec![BackendEvent::Failed(why)],
        };
        let asked = pool
            .as_ref()
            .map(|pool| requirements(&pool.data, &self.kube_namespace));
        let changed = self.requirements != asked;
        self.requirements.clone_from(&asked);
        let mut events = Vec::from_iter(changed.then_some(BackendEvent::Requirements(asked)));
        events.extend(self.pods_of(pool.as_ref()));
        events
    }

    /// Lists the pods again if the selector or the ports changed.
    fn pods_of(&mut self, pool: Option<&DynamicObject>) -> Option<BackendEvent> {
        let spec = match pool
            .map(|pool| InferencePoolSpec::parse(&pool.data))
            .transpose()
        {
            Ok(spec) => spec,
            Err(why) => return Some(BackendEvent::Failed(format!("InferencePool: {why}"))),
        };
        let first = !std::mem::replace(&mut self.published, true);
        if spec == self.spec && !first {
            return spec.is_none().then_some(BackendEvent::Alive);
        }
        self.spec = spec;
        let Some(InferencePoolSpec { selector, ports }) = &self.spec else {
            self.listing = None;
            return Some(BackendEvent::Reset(Vec::new()));
        };
        self.index = PodIndex::new(ports.clone());
        self.listing = Some(ObjectWatch::new(self.pods.clone(), selector));
        None
    }
}

/// Reads the settings for gateways. The default of the failure mode is `FailClose`, as in the API.
fn requirements(object: &Value, kube_namespace: &Arc<str>) -> PoolRequirements {
    let picker = ["endpointPickerRef", "extensionRef"]
        .into_iter()
        .find_map(|name| object.get("spec")?.get(name));
    let text = |key: &str| {
        picker
            .and_then(|picker| picker.get(key))
            .and_then(Value::as_str)
    };
    let failure_mode = match text("failureMode") {
        Some("FailOpen") => PickerFailureMode::Open,
        _ => PickerFailureMode::Close,
    };
    let port = picker.and_then(|picker| {
        picker
            .pointer("/port/number")
            .or_else(|| picker.get("portNumber"))
    });
    let port = port
        .and_then(Value::as_u64)
        .and_then(|port| u16::try_from(port).ok());
    let is_service = text("kind").is_none_or(|kind| kind == "Service")
        && text("group").is_none_or(str::is_empty);
    let service = text("name").filter(|_| is_service);
    let picker = service.map(|name| PickerService {
        namespace: Arc::clone(kube_namespace),
        name: name.into(),
        port,
    });
    PoolRequirements {
        failure_mode,
        protocol: protocol(object),
        picker,
    }
}

/// Reads `appProtocol`, which only the newer group has. The default is HTTP/1.1, as in the API.
fn protocol(object: &Value) -> AppProtocol {
    match object
        .get("spec")
        .and_then(|spec| spec.get("appProtocol"))
        .and_then(Value::as_str)
    {
        Some("kubernetes.io/h2c") => AppProtocol::H2c,
        _ => AppProtocol::Http,
    }
}

// === impl InferencePoolSpec ===

impl InferencePoolSpec {
    /// Reads a pool of either group.
    fn parse(object: &Value) -> Result<Self, String> {
        let spec = object.get("spec").ok_or("it has no spec")?;
        let selector = spec.get("selector").ok_or("it has no selector")?;
        // v1 has `matchLabels`; the older group has the labels directly.
        let labels = selector
            .get("matchLabels")
            .unwrap_or(selector)
            .as_object()
            .ok_or("its selector is not an object")?;
        let labels: Option<Vec<String>> = labels
            .iter()
            .map(|(key, value)| Some(format!("{key}={}", value.as_str()?)))
            .collect();
        let selector = labels
            .ok_or("a label of its selector is not text")?
            .join(",");
        if selector.is_empty() {
            return Err("its selector is empty: it would match every pod".to_owned());
        }
        let number = |value: &Value| {
            value
                .as_u64()
                .and_then(|port| u16::try_from(port).ok())
                .filter(|&port| port > 0)
        };
        let ports: Option<Vec<u16>> = match (spec.get("targetPorts"), spec.get("targetPortNumber"))
        {
            (Some(Value::Array(ports)), _) => ports
                .iter()
                .map(|port| port.get("number").and_then(number))
                .collect(),
            (_, Some(port)) => number(port).map(|port| vec![port]),
            _ => None,
        };
        let ports = ports
            .filter(|ports| !ports.is_empty())
            .ok_or("it has no target port in 1 to 65535")?;
        if ports.len() > TARGET_PORTS_MAX {
            return Err(format!(
                "{} target ports; at most {TARGET_PORTS_MAX} are allowed",
                ports.len()
            ));
        }
        Ok(Self { selector, ports })
    }
}

impl PoolGroup {
    fn kind(self) -> GroupVersionKind {
        match self {
            Self::V1 => GroupVersionKind::gvk("inference.networking.k8s.io", "v1", "InferencePool"),
            Self::V1Alpha2 => {
                GroupVersionKind::gvk("inference.networking.x-k8s.io", "v1alpha2", "InferencePool")
            }
        }
    }
}
