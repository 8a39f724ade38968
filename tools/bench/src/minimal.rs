//! The smallest Envoy configuration that passes requests on: one listener, one route, one cluster.
//! The configuration has no access log, no filter except the router, and Envoy's default buffers
//! and limits.
//!
//! The minimal Envoy runs in its own process, so that no part of the shipped configuration affects
//! it.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use testbed::envoy::EnvoyProcess;
use testbed::ports::ReservedPort;
use testbed::process::ChildProcess;
use testbed::{Result, client, wait_for};

use crate::world::hosts;

/// The maximum time until Envoy answers after its start, and until it ends after a signal.
const LIMIT: Duration = Duration::from_secs(20);

/// The running process of the minimal Envoy.
#[derive(Debug)]
pub(crate) struct MinimalEnvoy {
    process: ChildProcess,
    port: ReservedPort,
}

// === impl MinimalEnvoy ===

impl MinimalEnvoy {
    /// Starts an Envoy with this many workers, which spreads requests over `endpoints` by round
    /// robin.
    ///
    /// # Errors
    /// Fails if Envoy does not start.
    pub(crate) async fn start(endpoints: &[String], workers: u32, folder: &Path) -> Result<Self> {
        let port = ReservedPort::lease()?;
        let file = folder.join("minimal-envoy.json");
        std::fs::write(&file, config(port.number(), endpoints).to_string())?;
        let mut command = Command::new(EnvoyProcess::binary());
        command
            .args([
                "--disable-hot-restart",
                "--log-level",
                "warn",
                "--concurrency",
                &workers.to_string(),
                "-c",
            ])
            .arg(&file);
        let process = ChildProcess::spawn("minimal-envoy", &mut command, folder)?;
        let answers = || async {
            (client::get(port.address(), "/health").await.ok()?.status == 200).then_some(())
        };
        wait_for(LIMIT, "the minimal Envoy", answers).await?;
        Ok(Self { process, port })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.port.address()
    }

    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }

    /// Ends the Envoy.
    ///
    /// # Errors
    /// Fails if Envoy does not end after a signal.
    pub(crate) async fn stop(mut self) -> Result<()> {
        self.process.stop(LIMIT).await.map(drop)
    }
}

fn config(port: u16, endpoints: &[String]) -> Value {
    let connection_manager = json!({
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "ingress",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [
            {"match": {"prefix": "/"}, "route": {"cluster": "servers"}},
        ]}]},
        "http_filters": [{
            "name": "envoy.filters.http.router",
            "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
        }],
    });
    json!({"static_resources": {
        "listeners": [{
            "name": "ingress",
            "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
            "filter_chains": [{"filters": [
                {"name": "envoy.filters.network.http_connection_manager", "typed_config": connection_manager},
            ]}],
        }],
        "clusters": [{
            "name": "servers", "type": "STATIC", "lb_policy": "ROUND_ROBIN",
            "load_assignment": {"cluster_name": "servers", "endpoints": [{"lb_endpoints": hosts(endpoints)}]},
        }],
    }})
}
