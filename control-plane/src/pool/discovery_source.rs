//! Pools with discovered endpoints: their keys in the pools file, and the discovery sources for
//! them.
//!
//! ```yaml
//! kubernetes: {namespace: dynamo, components: [{name: decode, role: decode}, {name: prefill, role: prefill}], kubeNamespace: prod, portName: http}
//! inferencePool: {name: llama, kubeNamespace: prod}
//! etcd: {endpoints: ["https://etcd-0:2379"], namespace: dynamo, components: [{name: decode}], access: {user: u, passwordFile: f, caFile: ca.pem}}
//! directory: {path: /run/switchpoint, namespace: dynamo, components: [{name: decode}]}
//! ```
//! The key `metadata` has three values: `preferred` (metadata is fetched, but an instance without
//! metadata gets requests too), `required`, and `ignored`. The default for an InferencePool is
//! `ignored`, because its pods are plain model servers. A component's `role` becomes the label that
//! the disaggregation plugins read.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use discovery::backend::{AppProtocol, Backend, PickerFailureMode, PickerService};
use discovery::directory::DirectoryBackend;
use discovery::etcd::Etcd;
use discovery::kubernetes::{self, InferencePools, Kubernetes, PoolGroup, PortRule};
use discovery::merge::{MergeSource, merge};
use discovery::{
    BackendStatus, Discovery, InstanceState, LocalAddresses, MetadataPolicy, SetChanges,
    WatchedComponent,
};
use serde::Deserialize;
use tokio::sync::watch;

use crate::cli::etcd_access::EtcdAccess;
use crate::error::error_text;
use crate::pool::objects::PoolName;

/// The label that names the stages an endpoint serves, as in llm-d.
const ROLE_LABEL: &str = "llm-d.ai/role";

/// The default Kubernetes namespace.
const KUBE_NAMESPACE_DEFAULT: &str = "default";

/// The maximum number of components of one pool: encode, prefill, decode and their variants.
const COMPONENTS_MAX: usize = 16;

/// The discovery source of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiscoverySource {
    /// The EndpointSlices of Services.
    Kubernetes(KubernetesSource),
    /// The pods that an InferencePool selects.
    InferencePool(InferencePoolSource),
    Directory(DirectorySource),
    Etcd(EtcdSource),
}

/// The discovery settings of the operator.
#[derive(Debug, Default)]
pub struct DiscoverySetup {
    /// The protocol of Envoy's clusters towards model servers, from the command line.
    pub cluster_protocol: AppProtocol,
    /// The discovered components, by pool.
    pub components: BTreeMap<Arc<str>, WatchedComponents>,
}

/// The EndpointSlices of Services that select components.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct KubernetesSource {
    kube_namespace: Option<String>,
    namespace: String,
    components: Vec<ComponentRow>,
    port_name: Option<String>,
    port: Option<u16>,
    metadata: Option<MetadataMode>,
}

/// The pods that an InferencePool selects.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct InferencePoolSource {
    // The key `namespace` is an alias of `kubeNamespace`, because an InferencePool has only a
    // Kubernetes namespace.
    #[serde(alias = "namespace")]
    kube_namespace: Option<String>,
    name: String,
    api_version: Option<ApiVersion>,
    metadata: Option<MetadataMode>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct DirectorySource {
    path: PathBuf,
    namespace: String,
    components: Vec<ComponentRow>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct EtcdSource {
    endpoints: Vec<String>,
    access: Option<EtcdAccess>,
    namespace: String,
    components: Vec<ComponentRow>,
}

/// The endpoints of a pool, with the channel of their changes.
pub struct FollowedEndpoints {
    /// Complete sets of instances, one for each change.
    pub changes: SetChanges,
    /// The discovered components; empty for a file or a fixed list.
    pub components: WatchedComponents,
}

/// The components of a pool, by name.
pub type WatchedComponents = Vec<(String, WatchedComponent)>;

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct ComponentRow {
    name: String,
    role: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
enum MetadataMode {
    Preferred,
    Required,
    Ignored,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
enum ApiVersion {
    #[serde(rename = "inference.networking.k8s.io/v1")]
    V1,
    #[serde(rename = "inference.networking.x-k8s.io/v1alpha2")]
    V1Alpha2,
}

/// Opens a discovery source without waiting for its backend. The caller must run in a Tokio
/// runtime.
///
/// # Errors
/// Fails if a setting is invalid, or if the client configuration for Kubernetes is missing.
pub async fn open(
    source: DiscoverySource,
    local: LocalAddresses,
) -> Result<FollowedEndpoints, String> {
    let kube_namespace = source.kube_namespace().unwrap_or_default().to_owned();
    match source {
        DiscoverySource::Kubernetes(source) => {
            let backend = Kubernetes::new(kubernetes::connect().await?, kube_namespace);
            let backend = backend.with_ports(PortRule {
                name: source.port_name,
                fallback: source.port,
            });
            let policy = policy(source.metadata, MetadataPolicy::Preferred);
            follow(
                &backend.discovery(policy).with_local_addresses(local),
                &source.namespace,
                source.components,
            )
        }
        DiscoverySource::InferencePool(source) => {
            let group = match source.api_version {
                None | Some(ApiVersion::V1) => PoolGroup::V1,
                Some(ApiVersion::V1Alpha2) => PoolGroup::V1Alpha2,
            };
            let backend = InferencePools::new(kubernetes::connect().await?, group);
            let policy = policy(source.metadata, MetadataPolicy::Ignored);
            let discovery = backend.discovery(policy).with_local_addresses(local);
            let pool = ComponentRow {
                name: source.name,
                role: None,
            };
            let endpoints = follow(&discovery, &kube_namespace, vec![pool])?;
            for (name, followed) in &endpoints.components {
                log_failure_mode(name.clone(), followed.status());
            }
            Ok(endpoints)
        }
        DiscoverySource::Directory(source) => follow(
            &DirectoryBackend::new(source.path)
                .discovery()
                .with_local_addresses(local),
            &source.namespace,
            source.components,
        ),
        DiscoverySource::Etcd(source) => {
            let access = source.access.unwrap_or_default();
            let config = access.config(source.endpoints).await?;
            follow(
                &Etcd::new(config)?.discovery().with_local_addresses(local),
                &source.namespace,
                source.components,
            )
        }
    }
}

// === impl DiscoverySource ===

impl DiscoverySource {
    /// Returns the Kubernetes namespace of a source in Kubernetes.
    #[must_use]
    pub fn kube_namespace(&self) -> Option<&str> {
        let (Self::Kubernetes(KubernetesSource { kube_namespace, .. })
        | Self::InferencePool(InferencePoolSource { kube_namespace, .. })) = self
        else {
            return None;
        };
        Some(kube_namespace.as_deref().unwrap_or(KUBE_NAMESPACE_DEFAULT))
    }

    /// Returns the name of the InferencePool, if the source is one. Objects name the pool by this
    /// name.
    #[must_use]
    pub fn inference_pool(&self) -> Option<PoolName> {
        let Self::InferencePool(InferencePoolSource { name, .. }) = self else {
            return None;
        };
        Some(PoolName {
            name: name.as_str().into(),
            namespace: self.kube_namespace().map(Into::into),
        })
    }
}

fn follow<B: Backend>(
    discovery: &Discovery<B>,
    namespace: &str,
    components: Vec<ComponentRow>,
) -> Result<FollowedEndpoints, String> {
    if components.is_empty() || components.len() > COMPONENTS_MAX {
        return Err(format!(
            "{} components; 1 to {COMPONENTS_MAX} are allowed",
            components.len()
        ));
    }
    let mut parts = Vec::new();
    let mut followed = Vec::new();
    for ComponentRow { name, role } in components {
        let changes = discovery.changes(namespace, &name).map_err(error_text)?;
        parts.push(MergeSource {
            changes,
            labels: role
                .into_iter()
                .map(|role| (ROLE_LABEL.to_owned(), role))
                .collect(),
        });
        let follows = discovery.follow(namespace, &name).map_err(error_text)?;
        let component = name.clone();
        tokio::spawn(each_change(
            follows.status(),
            |status| status.warning.clone(),
            move |warning| {
                if let Some(why) = warning {
                    tracing::warn!(component, why, "discovery continues without some data");
                }
            },
        ));
        followed.push((name, follows));
    }
    Ok(FollowedEndpoints {
        changes: merge(parts),
        components: followed,
    })
}

fn policy(given: Option<MetadataMode>, default: MetadataPolicy) -> MetadataPolicy {
    match given {
        None => default,
        Some(MetadataMode::Preferred) => MetadataPolicy::Preferred,
        Some(MetadataMode::Required) => MetadataPolicy::Required,
        Some(MetadataMode::Ignored) => MetadataPolicy::Ignored,
    }
}

/// Logs the failure mode that an InferencePool sets for its gateway, at each change.
fn log_failure_mode(inference_pool: String, status: watch::Receiver<BackendStatus>) {
    let mode = |status: &BackendStatus| Some(status.requirements.as_ref()?.failure_mode);
    tokio::spawn(each_change(status, mode, move |mode| {
        let failure_mode = mode.map(failure_mode);
        match mode {
            Some(PickerFailureMode::Open) => tracing::warn!(
                inference_pool,
                failure_mode,
                "the InferencePool wants FailOpen; configure it at the gateway: with the filter, `failure_mode` \"open\"; with ext_proc, the gateway's own setting and --ext-proc-failure-mode"
            ),
            _ => tracing::info!(
                inference_pool,
                failure_mode,
                "the gateway refuses requests without a pick, unless it is configured otherwise"
            ),
        }
    }));
}

/// Starts to warn about each InferencePool whose `appProtocol` differs from the protocol of Envoy's
/// clusters. The clusters belong to the gateway, so only the operator knows their protocol.
pub fn compare_protocols(setup: &DiscoverySetup) {
    let cluster = setup.cluster_protocol;
    let protocol = |status: &BackendStatus| Some(status.requirements.as_ref()?.protocol);
    for (pool, components) in &setup.components {
        for (name, followed) in components {
            let pool = Arc::clone(pool);
            let inference_pool = name.clone();
            tokio::spawn(each_change(followed.status(), protocol, move |protocol| {
                if let Some(protocol) = protocol.filter(|protocol| *protocol != cluster) {
                    tracing::warn!(
                        pool = &*pool,
                        inference_pool,
                        app_protocol = app_protocol(protocol),
                        cluster = app_protocol(cluster),
                        "the InferencePool's servers use another protocol than its cluster: see h2c.yaml and --model-servers-speak"
                    );
                }
            }));
        }
    }
}

/// Calls `log` whenever the selected part of a source's status changes. Returns when the source
/// ends.
async fn each_change<T: Clone + PartialEq>(
    mut status: watch::Receiver<BackendStatus>,
    part: impl Fn(&BackendStatus) -> Option<T>,
    log: impl Fn(Option<T>),
) {
    let mut last = None;
    while let Ok(next) = status
        .wait_for(|status| part(status) != last)
        .await
        .map(|status| part(&status))
    {
        log(next.clone());
        last = next;
    }
}

/// Returns the protocol as an InferencePool spells it.
#[must_use]
pub fn app_protocol(protocol: AppProtocol) -> &'static str {
    match protocol {
        AppProtocol::Http => "http",
        AppProtocol::H2c => "kubernetes.io/h2c",
    }
}

/// Formats the service as `NAMESPACE/NAME:PORT`.
#[must_use]
pub fn picker(service: &PickerService) -> String {
    let PickerService {
        namespace,
        name,
        port,
    } = service;
    port.map_or_else(
        || format!("{namespace}/{name}"),
        |port| format!("{namespace}/{name}:{port}"),
    )
}

/// Returns the failure mode as an InferencePool spells it.
#[must_use]
pub fn failure_mode(mode: PickerFailureMode) -> &'static str {
    match mode {
        PickerFailureMode::Close => "FailClose",
        PickerFailureMode::Open => "FailOpen",
    }
}

/// Returns the state as one word, and the reason for it.
#[must_use]
pub fn state_and_reason(state: &InstanceState) -> (&'static str, &str) {
    match state {
        InstanceState::Ready => ("ready", ""),
        InstanceState::Stale(why) => ("ready", why),
        InstanceState::RemovalHeld => (
            "held",
            "missing from its source after an outage; kept for a while",
        ),
        InstanceState::Unconfirmed(why) => ("unconfirmed", why),
        InstanceState::NotReady(why) => ("not_ready", why),
        InstanceState::Pending(why) => ("pending", why),
        InstanceState::Refused(why) => ("refused", why),
        InstanceState::Removed => ("gone", "removed from its source"),
    }
}
