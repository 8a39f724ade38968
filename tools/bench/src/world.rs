//! Starts four paths to the same servers. One path is through a minimal Envoy. Three paths are
//! through an Envoy with the shipped configuration: without a picker, with the filter, and with
//! ext_proc.
//!
//! The last three paths are in one Envoy process and use the shipped listeners, so that only the
//! path differs. The listener without a picker balances by round robin, and Envoy's `buffer` filter
//! holds the body, as a picker does. The ext_proc listener uses a daemon that serves only this
//! listener. The reason is that the proxies of one daemon share state, and that in production a
//! proxy has either the filter or ext_proc.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::{Map, Value, json};
use tempfile::TempDir;
use testbed::envoy::EnvoyConfig;
use testbed::front::{DAEMON_ADMIN, DaemonAndEnvoy, ExtraArgs};
use testbed::ports::ReservedPort;
use testbed::process::ChildProcess;
use testbed::{Result, client, root, wait_for};

use crate::minimal::MinimalEnvoy;
use crate::sink;

/// The maximum time until a daemon has the state of its pool, and until a daemon ends.
const LIMIT: Duration = Duration::from_secs(20);

/// The maximum body that the listener without a picker holds, in bytes: the body limit of the
/// shipped configuration.
const HELD_BYTES_MAX: u32 = 32 << 20;

/// The path of a request to the servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum RequestPath {
    /// An Envoy with one route, no access log and default buffers.
    Minimal,
    /// The shipped configuration, with Envoy's `buffer` filter instead of the picker.
    Shipped,
    Filter,
    ExtProc,
}

/// All processes of the bench, and their ports.
#[derive(Debug)]
pub(crate) struct BenchStack {
    pub(crate) front: DaemonAndEnvoy,
    pub(crate) folder: TempDir,
    ext_proc_daemon: ExtProcDaemon,
    minimal: MinimalEnvoy,
    shipped: ReservedPort,
    ext_proc: ReservedPort,
    _servers: ReservedPort,
    _sink: ChildProcess,
}

/// A daemon that serves only ext_proc listeners.
#[derive(Debug)]
pub(crate) struct ExtProcDaemon {
    daemon: ChildProcess,
    ports: [ReservedPort; 4],
}

// === impl RequestPath ===

impl RequestPath {
    pub(crate) const ALL: [Self; 4] = [Self::Minimal, Self::Shipped, Self::Filter, Self::ExtProc];
    /// The paths through the shipped configuration. The first is the path without a picker.
    pub(crate) const SHIPPED: [Self; 3] = [Self::Shipped, Self::Filter, Self::ExtProc];
    /// The paths without a picker, with which the pickers are compared.
    pub(crate) const BASES: [Self; 2] = [Self::Minimal, Self::Shipped];
    pub(crate) const PICKERS: [Self; 2] = [Self::Filter, Self::ExtProc];

    /// Returns the name of the path in the field `base` of result files.
    pub(crate) fn base_name(self) -> &'static str {
        if self == Self::Minimal {
            "minimal"
        } else {
            "shipped"
        }
    }

    /// Returns the name of the path in the field `front` of result files.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Minimal | Self::Shipped => "plain",
            Self::Filter => "filter",
            Self::ExtProc => "ext_proc",
        }
    }
}

// === impl BenchStack ===

impl BenchStack {
    /// Starts all processes, with this many endpoints and Envoy workers. `daemon` has additional
    /// arguments for the daemons.
    ///
    /// # Errors
    /// Fails if a part does not start.
    pub(crate) async fn start(endpoints: usize, workers: u32, daemon: &[String]) -> Result<Self> {
        let servers = ReservedPort::lease()?;
        let listed = addresses(endpoints, servers.number());
        Self::start_at(servers, &listed, endpoints, workers, daemon).await
    }

    /// Starts all processes, with servers at port `servers`. The daemons' command lines name the
    /// endpoints `listed`.
    ///
    /// # Errors
    /// Fails if a part does not start.
    pub(crate) async fn start_at(
        servers: ReservedPort,
        listed: &[String],
        endpoints: usize,
        workers: u32,
        daemon: &[String],
    ) -> Result<Self> {
        let shipped = ReservedPort::lease()?;
        let ext_proc = ReservedPort::lease()?;
        let folder = tempfile::tempdir()?;
        // One socket serves all endpoints, because every address in 127.0.0.0/8 is this machine.
        let sink = sink::start(&[format!("0.0.0.0:{}", servers.number())], folder.path())?;
        let addresses = addresses(endpoints, servers.number());
        let asked = ExtProcDaemon::start(listed, daemon, folder.path())?;
        let concurrency = workers.to_string();
        let more = ExtraArgs {
            daemon,
            envoy: &["--concurrency", &concurrency],
        };
        let front = DaemonAndEnvoy::start(listed, more, |config| {
            // The proxy must trust the SLOs that requests state in [`crate::predicting::HEADERS`].
            let trusted = ("slo_headers".to_owned(), "trust".into());
            config.set_picker(&Map::from_iter([trusted]))?;
            add_ext_proc(config, "ext_proc", ext_proc.address(), asked.port())?;
            add_shipped(config, shipped.address(), &addresses, true)
        });
        let front = front.await?;
        wait_until_asked(ext_proc.address()).await?;
        let minimal = MinimalEnvoy::start(&addresses, workers, folder.path()).await?;
        Ok(Self {
            front,
            folder,
            ext_proc_daemon: asked,
            minimal,
            shipped,
            ext_proc,
            _servers: servers,
            _sink: sink,
        })
    }

    pub(crate) fn address(&self, way: RequestPath) -> SocketAddr {
        match way {
            RequestPath::Minimal => self.minimal.address(),
            RequestPath::Shipped => self.shipped.address(),
            RequestPath::Filter => DaemonAndEnvoy::address(),
            RequestPath::ExtProc => self.ext_proc.address(),
        }
    }

    /// Returns the listeners of the filter and of ext_proc. Each has the admin address of its
    /// daemon.
    pub(crate) fn pickers(&self) -> [(SocketAddr, SocketAddr); 2] {
        let filter = SocketAddr::from((Ipv4Addr::LOCALHOST, DAEMON_ADMIN));
        [
            (self.address(RequestPath::Filter), filter),
            (
                self.address(RequestPath::ExtProc),
                self.ext_proc_daemon.ports[3].address(),
            ),
        ]
    }

    /// Returns the ids of the processes whose CPU the bench counts for a path: its Envoy, and the
    /// daemon of ext_proc or of the filter.
    pub(crate) fn processes(&mut self, way: RequestPath) -> [u32; 2] {
        let daemon = if way == RequestPath::ExtProc {
            self.ext_proc_daemon.id()
        } else {
            self.front.daemon().id()
        };
        let envoy = if way == RequestPath::Minimal {
            self.minimal.id()
        } else {
            self.front.envoy().id()
        };
        [envoy, daemon]
    }

    /// Ends both Envoys and both daemons.
    ///
    /// # Errors
    /// Fails if a process does not end after a signal.
    pub(crate) async fn stop(self) -> Result<()> {
        self.minimal.stop().await?;
        self.front.stop().await?;
        self.ext_proc_daemon.stop().await
    }
}

// === impl ExtProcDaemon ===

impl ExtProcDaemon {
    /// Starts the daemon with these endpoints and additional arguments.
    ///
    /// # Errors
    /// Fails if `switchpointd` has no release build.
    pub(crate) fn start(endpoints: &[String], arguments: &[String], folder: &Path) -> Result<Self> {
        let ports = [
            ReservedPort::lease()?,
            ReservedPort::lease()?,
            ReservedPort::lease()?,
            ReservedPort::lease()?,
        ];
        let mut command = Command::new(root().join("target/release/switchpointd"));
        command
            .arg("serve")
            .args(
                endpoints
                    .iter()
                    .flat_map(|endpoint| ["--endpoint", endpoint]),
            )
            .args(arguments)
            .arg("--ext-proc-plaintext");
        for (name, port) in ["ext-proc", "health", "state", "admin"]
            .into_iter()
            .zip(&ports)
        {
            command.args([format!("--listen-{name}"), port.address().to_string()]);
        }
        Ok(Self {
            daemon: ChildProcess::spawn("asked", &mut command, folder)?,
            ports,
        })
    }

    /// Returns the port of the daemon's ext_proc server.
    pub(crate) fn port(&self) -> u16 {
        self.ports[0].number()
    }

    pub(crate) fn id(&self) -> u32 {
        self.daemon.id()
    }

    /// Ends the daemon.
    ///
    /// # Errors
    /// Fails if the daemon does not end after a signal.
    pub(crate) async fn stop(mut self) -> Result<()> {
        self.daemon.stop(LIMIT).await.map(drop)
    }
}

/// Waits until a listener's picker has the pool's state. For ext_proc, the picker is the server
/// that the listener calls.
///
/// # Errors
/// Fails if the picker has no state within [`LIMIT`].
pub(crate) async fn wait_until_asked(listener: SocketAddr) -> Result<()> {
    let ready = || async {
        (client::get(listener, "/switchpoint/ready")
            .await
            .ok()?
            .status
            == 200)
            .then_some(())
    };
    wait_for(LIMIT, "the picker of a listener to be ready", ready).await
}

/// Returns the addresses of `count` endpoints that share one port.
pub(crate) fn addresses(count: usize, port: u16) -> Vec<String> {
    let address = |n: usize| {
        Ipv4Addr::new(
            127,
            1,
            u8::try_from(n / 250).unwrap_or(u8::MAX),
            u8::try_from(n % 250).unwrap_or_default() + 1,
        )
    };
    (0..count)
        .map(|n| format!("{}:{port}", address(n)))
        .collect()
}

fn clusters(config: &mut EnvoyConfig) -> Result<&mut Vec<Value>> {
    Ok(config
        .value()
        .pointer_mut("/static_resources/clusters")
        .and_then(Value::as_array_mut)
        .ok_or("the config has no clusters")?)
}

pub(crate) fn listeners(config: &mut EnvoyConfig) -> Result<&mut Vec<Value>> {
    Ok(config
        .value()
        .pointer_mut("/static_resources/listeners")
        .and_then(Value::as_array_mut)
        .ok_or("the config has no listeners")?)
}

/// Adds the listener of `ext_proc.yaml`, and a cluster for the ext_proc server at port `asked`. The
/// cluster has no TLS, as in the measurements of llm-d's picker with which this listener is
/// compared.
pub(crate) fn add_ext_proc(
    config: &mut EnvoyConfig,
    name: &str,
    address: SocketAddr,
    asked: u16,
) -> Result<()> {
    const SHIPPED: &str = "switchpoint-ext-proc";
    let mut other = EnvoyConfig::shipped("ext_proc.yaml")?;
    let mut listener = listeners(&mut other)?
        .first()
        .cloned()
        .ok_or("ext_proc.yaml has no listener")?;
    listener["name"] = name.into();
    listener["address"]["socket_address"]["port_value"] = address.port().into();
    let filters = listener
        .pointer_mut("/filter_chains/0/filters/0/typed_config/http_filters")
        .and_then(Value::as_array_mut);
    let filter = filters
        .ok_or("no HTTP filters")?
        .iter_mut()
        .find(|filter| filter["name"] == "switchpoint")
        .ok_or("no picker")?;
    *filter
        .pointer_mut("/typed_config/grpc_service/envoy_grpc/cluster_name")
        .ok_or("the ext_proc filter names no cluster")? = name.into();
    let mut cluster = clusters(&mut other)?
        .iter()
        .find(|cluster| cluster["name"] == SHIPPED)
        .cloned()
        .ok_or("ext_proc.yaml has no cluster for the ext_proc server")?;
    cluster["name"] = name.into();
    cluster["load_assignment"] = json!({"cluster_name": name, "endpoints": [{"lb_endpoints": [
        {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": asked}}}}
    ]}]});
    cluster
        .as_object_mut()
        .ok_or("a cluster is an object")?
        .remove("transport_socket");
    listeners(config)?.push(listener);
    clusters(config)?.push(cluster);
    Ok(())
}

/// Returns the endpoints of a static cluster.
pub(crate) fn hosts(endpoints: &[String]) -> Vec<Value> {
    let host = |endpoint: &String| {
        let (host, port) = endpoint.split_once(':')?;
        Some(
            json!({"endpoint": {"address": {"socket_address": {"address": host, "port_value": port.parse::<u16>().ok()?}}}}),
        )
    };
    endpoints.iter().filter_map(host).collect()
}

/// Adds the shipped listener without its picker. The listener spreads requests over the same
/// endpoints by round robin. If `held` is set, Envoy waits for the whole body, as a picker does.
pub(crate) fn add_shipped(
    config: &mut EnvoyConfig,
    address: SocketAddr,
    endpoints: &[String],
    held: bool,
) -> Result<()> {
    let hosts = hosts(endpoints);
    let clusters = clusters(config)?;
    let mut cluster = clusters
        .first()
        .cloned()
        .ok_or("the config has no cluster")?;
    let fields = cluster.as_object_mut().ok_or("a cluster is an object")?;
    fields.retain(|key, _| {
        !["type", "eds_cluster_config", "load_balancing_policy"].contains(&key.as_str())
    });
    fields.insert("name".into(), "plain".into());
    fields.insert("type".into(), "STATIC".into());
    fields.insert(
        "load_assignment".into(),
        json!({"cluster_name": "plain", "endpoints": [{"lb_endpoints": hosts}]}),
    );
    clusters.push(cluster);
    let mut listener = listeners(config)?
        .first()
        .cloned()
        .ok_or("the config has no listener")?;
    listener["name"] = "plain".into();
    listener["address"]["socket_address"]["port_value"] = address.port().into();
    let hcm = listener
        .pointer_mut("/filter_chains/0/filters/0/typed_config")
        .ok_or("the listener has no HTTP filter chain")?;
    let routes = hcm["route_config"]["virtual_hosts"][0]["routes"]
        .as_array_mut()
        .ok_or("no routes")?;
    // Drops the routes that turn the picker off, because this listener has no picker.
    routes.retain(|route| route["route"].is_object());
    routes
        .iter_mut()
        .for_each(|route| route["route"]["cluster"] = "plain".into());
    let filters = hcm["http_filters"]
        .as_array_mut()
        .ok_or("no HTTP filters")?;
    filters
        .retain(|filter| filter["name"] != "switchpoint" && filter["name"] != "header_to_metadata");
    if held {
        let buffer = json!({"name": "buffer", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.buffer.v3.Buffer",
            "max_request_bytes": HELD_BYTES_MAX,
        }});
        filters.insert(filters.len().saturating_sub(1), buffer);
    }
    listeners(config)?.push(listener);
    Ok(())
}
