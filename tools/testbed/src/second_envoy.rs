//! Runs a further proxy for a stack's daemon, beside the stack's own proxy.

use std::net::SocketAddr;
use std::time::Duration;

use tempfile::TempDir;

use crate::envoy::{EnvoyConfig, EnvoyOptions, EnvoyProcess};
use crate::ports::ReservedPort;
use crate::stack::{PickerMode, Stack};
use crate::{Result, client, wait_for};

/// The time limit from the start until the picker has state. The limit is long, because the machine
/// may compile at the same time.
const LIMIT: Duration = Duration::from_secs(30);

/// A further Envoy with the config of the first Envoy, but with other ports.
#[derive(Debug)]
pub struct SecondEnvoy {
    pub envoy: EnvoyProcess,
    _ports: [ReservedPort; 2],
    _folder: TempDir,
}

// === impl SecondEnvoy ===

impl SecondEnvoy {
    /// Starts a proxy with this node id and number of workers. Returns when its picker has state.
    ///
    /// # Errors
    /// Fails if the proxy does not start.
    pub async fn start(first: &Stack, node: &str, workers: u32) -> Result<Self> {
        let ports = [first.envoy.listener().port(), first.envoy.admin().port()];
        Self::run(
            EnvoyConfig::read(&first.folder().join("envoy.json"))?,
            ports,
            node,
            workers,
        )
        .await
    }

    /// Starts a proxy with the config of another picker mode and the daemon of the stack `first`.
    ///
    /// # Errors
    /// Fails if the proxy does not start.
    pub async fn start_as(front: PickerMode, first: &Stack, node: &str) -> Result<Self> {
        let daemon = first.daemon.as_ref().ok_or("no daemon")?.settings();
        let mut config = front.config()?;
        config.replace_port(9004, daemon.state.number())?;
        if front == PickerMode::ExtProc {
            config.replace_port(9002, daemon.ext_proc.number())?;
        }
        Self::run(config, [8080, 9901], node, 1).await
    }

    /// Starts the proxy. `of_file` has the listener port and the admin port in the config.
    async fn run(
        mut config: EnvoyConfig,
        of_file: [u16; 2],
        node: &str,
        workers: u32,
    ) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let ports = [ReservedPort::lease()?, ReservedPort::lease()?];
        for (from, to) in of_file.into_iter().zip(&ports) {
            config.replace_port(from, to.number())?;
        }
        let options = EnvoyOptions {
            concurrency: workers,
            arguments: vec!["--service-node".into(), node.into()],
            ..EnvoyOptions::default()
        };
        let envoy = EnvoyProcess::start(
            &config,
            ports[0].address(),
            ports[1].address(),
            &options,
            folder.path(),
        )?;
        let ready = |address: SocketAddr| async move {
            (client::get(address, "/switchpoint/ready")
                .await
                .ok()?
                .status
                == 200)
                .then_some(())
        };
        wait_for(LIMIT, "the second proxy", || ready(ports[0].address())).await?;
        Ok(Self {
            envoy,
            _ports: ports,
            _folder: folder,
        })
    }
}
