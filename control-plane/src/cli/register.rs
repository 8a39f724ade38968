//! `switchpointd register` and `switchpointd instances`: registration and discovery for processes
//! in any language.
//!
//! A process without discovery code gets a sidecar, which checks the health of the process and
//! registers it. When the sidecar ends, the registration ends.

use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use comfy_table::{Table, presets};
use discovery::directory::{DirectoryBackend, DirectoryRegistry};
use discovery::etcd::{Etcd, EtcdRegistry};
use discovery::file_watcher::FileWatcher;
use discovery::kubernetes::{self, Kubernetes, KubernetesRegistry};
use discovery::metadata::METADATA_BYTES_MAX;
use discovery::{
    Instance, InstanceEvent, InstanceHandle, InstanceStatus, LocalAddresses, MetadataPolicy,
    Registrant, ServiceDiscovery, ServiceRegistry, serve,
};
use futures::StreamExt;

use crate::cli::etcd_access::EtcdAccess;
use crate::cli::logging::LogArgs;
use crate::error::error_text;
use crate::scrape::http_client;

/// The interval at which the health of the registered process is checked.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// The maximum time that a check of the health may take.
const PROBE_DEADLINE: Duration = Duration::from_secs(2);

/// The interval at which the metadata of the registered process is read from its URL.
const METADATA_INTERVAL: Duration = Duration::from_secs(5);

/// The number of failed checks in a row after which the process is not ready. A process may miss
/// one check because of a garbage collection. The kubelet's default is three failures too.
const PROBE_FAILURES_MAX: u32 = 3;

/// The registry: exactly one of these.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct RegistryArgs {
    /// The registry is this directory.
    #[arg(long, value_name = "FOLDER")]
    pub directory: Option<PathBuf>,

    /// The registry is the etcd cluster with these members: http://host:port or https://host:port.
    #[arg(long, value_name = "URL", value_delimiter = ',')]
    pub etcd: Vec<String>,

    /// The registry is this namespace of the Kubernetes API server (in-cluster, or of the
    /// kubeconfig).
    #[arg(long, value_name = "NAMESPACE")]
    pub kubernetes: Option<String>,
}

/// A component, and the registry that has its instances.
#[derive(Debug, Args)]
pub struct ComponentArgs {
    /// The registry.
    #[command(flatten)]
    pub registry: RegistryArgs,

    /// Access to etcd.
    #[command(flatten)]
    pub access: EtcdAccess,

    /// Namespace of the serving system.
    #[arg(long, value_name = "NAME")]
    pub namespace: String,

    /// Component of that namespace to which the instances belong.
    #[arg(long, value_name = "NAME")]
    pub component: String,
}

/// Options of `instances`.
#[derive(Debug, Args)]
pub struct InstancesArgs {
    /// The component and its registry.
    #[command(flatten)]
    pub component: ComponentArgs,

    /// Keep running and print one line for each change.
    #[arg(long)]
    pub watch: bool,
}

/// Options of `register`.
#[derive(Debug, Args)]
pub struct RegisterArgs {
    /// The component and its registry.
    #[command(flatten)]
    pub component: ComponentArgs,

    /// The address where the process takes requests; in Kubernetes the EndpointSlice has this
    /// address.
    #[arg(long, value_name = "IP:PORT", required_unless_present = "kubernetes")]
    pub address: Option<SocketAddr>,

    /// The instance id of the process. If not given, it is generated; in Kubernetes it is the name
    /// of the pod.
    #[arg(long, env = "POD_NAME", value_name = "NAME", required_unless_present_any = ["directory", "etcd"])]
    pub name: Option<String>,

    /// The process is ready while this URL answers 200. If not given, the process is ready at once.
    #[arg(long, value_name = "URL")]
    pub probe: Option<String>,

    /// A file with the metadata of the process, a JSON object; read again when its content changes.
    #[arg(long, value_name = "FILE")]
    pub metadata_file: Option<PathBuf>,

    /// URL of the process that returns its metadata; read every five seconds.
    #[arg(long, value_name = "URL", conflicts_with = "metadata_file")]
    pub metadata_url: Option<String>,

    /// Serve /metadata and /health at this address, for a readiness probe in Kubernetes.
    #[arg(long, value_name = "IP:PORT", required_unless_present_any = ["directory", "etcd"])]
    pub listen: Option<SocketAddr>,

    /// Logging.
    #[command(flatten)]
    pub log: LogArgs,
}

// === instances ===

/// Lists instances. With `watch`, prints changes until the future is dropped.
///
/// # Errors
/// The error says which step failed.
pub async fn instances(args: InstancesArgs, mut out: impl Write) -> Result<(), String> {
    let ComponentArgs {
        registry,
        access,
        namespace,
        component,
    } = args.component;
    let discovery = discovery_of(registry, access).await?;
    let mut write = |text: String| writeln!(out, "{text}").map_err(error_text);
    if !args.watch {
        let all = discovery
            .list_instances(&namespace, &component)
            .await
            .map_err(error_text)?;
        return write(table(&all));
    }
    let mut events = discovery
        .watch(&namespace, &component)
        .map_err(error_text)?;
    while let Some(event) = events.next().await {
        write(match event {
            InstanceEvent::Added(instance) => format!(
                "+ {} {} {}",
                instance.name,
                instance.address,
                models(&instance)
            ),
            InstanceEvent::Removed(id) => format!("- {id}"),
        })?;
    }
    Ok(())
}

fn table(all: &[Arc<Instance>]) -> String {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_header(["NAME", "ADDRESS", "MODELS", "LABELS"]);
    for instance in all {
        let labels: Vec<String> = instance
            .labels
            .iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        table.add_row([
            instance.name.clone(),
            instance.address.to_string(),
            models(instance),
            labels.join(","),
        ]);
    }
    table.to_string()
}

fn models(instance: &Instance) -> String {
    instance
        .metadata()
        .models()
        .into_iter()
        .map(|model| model.name)
        .collect::<Vec<_>>()
        .join(",")
}

async fn discovery_of(
    registry: RegistryArgs,
    access: EtcdAccess,
) -> Result<Box<dyn ServiceDiscovery>, String> {
    // A listed instance gets no request from this program, so every address is allowed.
    let local = LocalAddresses::Allowed;
    Ok(match (registry.directory, registry.kubernetes) {
        (Some(folder), _) => Box::new(
            DirectoryBackend::new(folder)
                .discovery()
                .with_local_addresses(local),
        ),
        (_, Some(namespace)) => Box::new(
            Kubernetes::new(kubernetes::connect().await?, namespace)
                .discovery(MetadataPolicy::Preferred)
                .with_local_addresses(local),
        ),
        (None, None) => Box::new(
            Etcd::new(access.config(registry.etcd).await?)?
                .discovery()
                .with_local_addresses(local),
        ),
    })
}

// === register ===

/// Registers a process and keeps its readiness and metadata up to date until the future is dropped.
///
/// # Errors
/// The error says which step failed.
pub async fn register(args: RegisterArgs) -> Result<(), String> {
    let ComponentArgs {
        registry,
        access,
        namespace,
        component,
    } = args.component;
    let registry = registry_of(registry, access, args.address, args.name).await?;
    let handle = registry
        .register_instance(&namespace, &component)
        .await
        .map_err(error_text)?;
    tracing::info!(id = handle.instance_id(), "registered");
    let routes = async {
        match args.listen {
            Some(address) => {
                let listener = tokio::net::TcpListener::bind(address)
                    .await
                    .map_err(|e| format!("{address}: {e}"))?;
                serve::serve(listener, &handle).await.map_err(error_text)
            }
            None => std::future::pending().await,
        }
    };
    let client = probing_client()?;
    // The metadata is set first, so that no process is ready without metadata.
    let mut metadata = match (args.metadata_file, args.metadata_url) {
        (Some(file), _) => MetadataChoice::File(FileWatcher::new(file)),
        (None, Some(url)) => MetadataChoice::Url(url, client.clone()),
        (None, None) => MetadataChoice::Never,
    };
    metadata.first(&handle).await?;
    tokio::select! {
        ended = routes => ended,
        () = keep_ready(&handle, args.probe, &client) => Ok(()),
        () = metadata.keep(&handle) => Ok(()),
    }
}

/// The source of the metadata.
enum MetadataChoice {
    File(FileWatcher),
    /// The URL at which the process serves its metadata, and the client that fetches it.
    Url(String, reqwest::Client),
    Never,
}

async fn keep_ready(handle: &InstanceHandle, probe: Option<String>, client: &reqwest::Client) {
    let Some(url) = probe else {
        handle.set_ready(InstanceStatus::Ready);
        return std::future::pending().await;
    };
    let mut failures = 0;
    loop {
        let well = client
            .get(&url)
            .send()
            .await
            .is_ok_and(|answer| answer.status() == 200);
        failures = if well { 0 } else { failures + 1 };
        if well {
            handle.set_ready(InstanceStatus::Ready);
        } else if failures >= PROBE_FAILURES_MAX {
            handle.set_ready(InstanceStatus::NotReady);
        }
        tokio::time::sleep(PROBE_INTERVAL).await;
    }
}

/// Returns an HTTP client for local requests, without a proxy and without redirects.
fn probing_client() -> Result<reqwest::Client, String> {
    let described = || {
        reqwest::Client::builder()
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .timeout(PROBE_DEADLINE)
    };
    http_client::build(described).map_err(error_text)
}

impl MetadataChoice {
    /// Sets the first metadata. A file must be valid. A process may still be starting, so this
    /// function waits until the process answers.
    async fn first(&mut self, handle: &InstanceHandle) -> Result<(), String> {
        match self {
            Self::File(file) => take_metadata(handle, &file.changed().await.map_err(error_text)?),
            Self::Url(url, client) => {
                while let Err(why) = ask(handle, url, client).await {
                    tracing::info!(why, "metadata is not available yet");
                    tokio::time::sleep(PROBE_INTERVAL).await;
                }
                Ok(())
            }
            Self::Never => Ok(()),
        }
    }

    async fn keep(mut self, handle: &InstanceHandle) {
        loop {
            let taken = match &mut self {
                Self::File(file) => match file.changed().await {
                    Ok(text) => take_metadata(handle, &text),
                    Err(unreadable) => Err(unreadable.to_string()),
                },
                Self::Url(url, client) => {
                    tokio::time::sleep(METADATA_INTERVAL).await;
                    ask(handle, url, client).await
                }
                Self::Never => return std::future::pending().await,
            };
            if let Err(why) = taken {
                tracing::error!(
                    why,
                    "metadata cannot be used; the last valid metadata stays"
                );
            }
        }
    }
}

async fn ask(handle: &InstanceHandle, url: &str, client: &reqwest::Client) -> Result<(), String> {
    let answer = client
        .get(url)
        .send()
        .await
        .and_then(reqwest::Response::error_for_status)
        .map_err(error_text)?;
    let body = http_client::body(answer, METADATA_BYTES_MAX)
        .await
        .map_err(error_text)?
        .ok_or_else(|| format!("metadata of more than {METADATA_BYTES_MAX} bytes"))?;
    take_metadata(handle, &String::from_utf8(body).map_err(error_text)?)
}

fn take_metadata(handle: &InstanceHandle, text: &str) -> Result<(), String> {
    let map =
        serde_json::from_str(text).map_err(|e| format!("metadata is not a JSON object: {e}"))?;
    handle.set_metadata(map).map_err(error_text)
}

async fn registry_of(
    registry: RegistryArgs,
    access: EtcdAccess,
    address: Option<SocketAddr>,
    name: Option<String>,
) -> Result<Box<dyn ServiceRegistry>, String> {
    if let Some(namespace) = registry.kubernetes {
        let pod = name.ok_or("--name, or POD_NAME, is needed in Kubernetes")?;
        return Ok(Box::new(KubernetesRegistry::new(
            kubernetes::connect().await?,
            namespace,
            pod,
        )));
    }
    let registrant = Registrant::from(address.ok_or("--address is needed")?);
    let registrant = name.into_iter().fold(registrant, Registrant::with_name);
    Ok(match registry.directory {
        Some(folder) => Box::new(DirectoryRegistry::new(folder, registrant)),
        None => Box::new(EtcdRegistry::new(
            access.config(registry.etcd).await?,
            registrant,
        )?),
    })
}
