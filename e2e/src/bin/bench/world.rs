//! Three ways to the same servers through one Envoy: plain, with the filter, asking by ext_proc.
//!
//! One process, so that what differs is the way and nothing else; listeners as shipped, but that the plain one has no picker and balances by
//! round robin.

use std::net::{Ipv4Addr, SocketAddr};

use e2e::Result;
use e2e::envoy::Config;
use e2e::front::{EXT_PROC, Front, More};
use e2e::ports::Port;
use e2e::process::Process;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::sink;

/// The way a request takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Way {
    Plain,
    Filter,
    ExtProc,
}

/// Everything that runs.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) front: Front,
    pub(crate) folder: TempDir,
    plain: Port,
    ext_proc: Port,
    _servers: Port,
    _sink: Process,
}

// === impl Way ===

impl Way {
    pub(crate) const ALL: [Self; 3] = [Self::Plain, Self::Filter, Self::ExtProc];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Filter => "filter",
            Self::ExtProc => "ext_proc",
        }
    }
}

// === impl World ===

impl World {
    /// Starts it all in front of so many endpoints, with these further arguments of the daemon and workers of Envoy.
    ///
    /// # Errors
    /// If a part does not come up.
    pub(crate) async fn start(endpoints: usize, workers: u32, daemon: &[String]) -> Result<Self> {
        let servers = Port::lease()?;
        let told = addresses(endpoints, servers.number());
        Self::start_at(servers, &told, endpoints, workers, daemon).await
    }

    /// The same with servers at this port, of which the daemon is told `told` by its command line.
    ///
    /// # Errors
    /// If a part does not come up.
    pub(crate) async fn start_at(servers: Port, told: &[String], endpoints: usize, workers: u32, daemon: &[String]) -> Result<Self> {
        let (plain, ext_proc) = (Port::lease()?, Port::lease()?);
        let folder = tempfile::tempdir()?;
        // One socket for all: every address of 127.0.0.0/8 is this machine.
        let sink = sink::start(&[format!("0.0.0.0:{}", servers.number())], folder.path())?;
        let addresses = addresses(endpoints, servers.number());
        let concurrency = workers.to_string();
        let daemon: Vec<String> = daemon.iter().cloned().chain(["--ext-proc-plaintext".to_owned()]).collect();
        let more = More { daemon: &daemon, envoy: &["--concurrency", &concurrency] };
        let front = Front::start(told, more, |config| {
            add_ext_proc(config, ext_proc.address())?;
            add_plain(config, plain.address(), &addresses)
        });
        Ok(Self { front: front.await?, folder, plain, ext_proc, _servers: servers, _sink: sink })
    }

    pub(crate) fn address(&self, way: Way) -> SocketAddr {
        match way {
            Way::Plain => self.plain.address(),
            Way::Filter => Front::address(),
            Way::ExtProc => self.ext_proc.address(),
        }
    }

    /// Whose CPU a request costs: Envoy's, and the daemon's.
    pub(crate) fn processes(&mut self) -> [u32; 2] {
        [self.front.envoy().id(), self.front.daemon().id()]
    }
}

/// So many endpoints behind one port.
pub(crate) fn addresses(count: usize, port: u16) -> Vec<String> {
    let address = |n: usize| Ipv4Addr::new(127, 1, u8::try_from(n / 250).unwrap_or(u8::MAX), u8::try_from(n % 250).unwrap_or_default() + 1);
    (0..count).map(|n| format!("{}:{port}", address(n))).collect()
}

fn clusters(config: &mut Config) -> Result<&mut Vec<Value>> {
    Ok(config.value().pointer_mut("/static_resources/clusters").and_then(Value::as_array_mut).ok_or("the config has no clusters")?)
}

pub(crate) fn listeners(config: &mut Config) -> Result<&mut Vec<Value>> {
    Ok(config.value().pointer_mut("/static_resources/listeners").and_then(Value::as_array_mut).ok_or("the config has no listeners")?)
}

/// The listener of `ext_proc.yaml`, and the cluster of the daemon that it asks. Without TLS: that is the reference's cost, and not the picker's.
fn add_ext_proc(config: &mut Config, address: SocketAddr) -> Result<()> {
    let mut other = Config::shipped("ext_proc.yaml")?;
    let mut listener = listeners(&mut other)?.first().cloned().ok_or("ext_proc.yaml has no listener")?;
    listener["name"] = "ext_proc".into();
    listener["address"]["socket_address"]["port_value"] = address.port().into();
    let asked = clusters(&mut other)?.iter().find(|cluster| cluster["name"] == "switchpoint-ext-proc").cloned();
    let mut asked = asked.ok_or("ext_proc.yaml asks nobody")?;
    asked.as_object_mut().ok_or("a cluster is an object")?.remove("transport_socket");
    debug_assert!(asked.to_string().contains(&EXT_PROC[0].to_string()));
    listeners(config)?.push(listener);
    clusters(config)?.push(asked);
    Ok(())
}

/// A listener as shipped but for the picker, over the same endpoints by round robin.
pub(crate) fn add_plain(config: &mut Config, address: SocketAddr, endpoints: &[String]) -> Result<()> {
    let hosts: Vec<Value> = endpoints
        .iter()
        .filter_map(|endpoint| {
            let (host, port) = endpoint.split_once(':')?;
            Some(json!({"endpoint": {"address": {"socket_address": {"address": host, "port_value": port.parse::<u16>().ok()?}}}}))
        })
        .collect();
    let clusters = clusters(config)?;
    let mut cluster = clusters.first().cloned().ok_or("the config has no cluster")?;
    let fields = cluster.as_object_mut().ok_or("a cluster is an object")?;
    fields.retain(|key, _| !["type", "eds_cluster_config", "load_balancing_policy"].contains(&key.as_str()));
    fields.insert("name".into(), "plain".into());
    fields.insert("type".into(), "STATIC".into());
    fields.insert("load_assignment".into(), json!({"cluster_name": "plain", "endpoints": [{"lb_endpoints": hosts}]}));
    clusters.push(cluster);
    let mut listener = listeners(config)?.first().cloned().ok_or("the config has no listener")?;
    listener["name"] = "plain".into();
    listener["address"]["socket_address"]["port_value"] = address.port().into();
    let hcm = listener.pointer_mut("/filter_chains/0/filters/0/typed_config").ok_or("the listener has no HTTP filter chain")?;
    hcm["route_config"]["virtual_hosts"][0]["routes"][0]["route"]["cluster"] = "plain".into();
    let filters = hcm["http_filters"].as_array_mut().ok_or("no HTTP filters")?;
    filters.retain(|filter| filter["name"] != "switchpoint" && filter["name"] != "header_to_metadata");
    listeners(config)?.push(listener);
    Ok(())
}
