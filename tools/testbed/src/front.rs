//! Runs what a user runs: the daemon and Envoy, on their documented ports. Uses the daemon and the
//! module that cargo built with the calling program, by the same profile.

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;

use crate::envoy::{EnvoyConfig, EnvoyProcess};
use crate::process::ChildProcess;
use crate::{Result, client, daemon, root, wait_for};

/// The port to which clients connect.
pub const LISTENER: u16 = 8080;
/// Envoy's admin port.
pub const ENVOY_ADMIN: u16 = 9901;
/// The daemon's port of admin pages and metrics.
pub const DAEMON_ADMIN: u16 = 9090;
/// The daemon's port of the state stream and EDS.
pub const STATE: u16 = 9004;
/// The ports of the daemon's ext_proc server and of that server's health service.
pub const EXT_PROC: [u16; 2] = [9002, 9003];

/// Time limit from start until the picker has state. Envoy compiles the filter first, which takes
/// seconds on a small machine.
const START_LIMIT: Duration = Duration::from_secs(60);

/// Time limit for each process to stop.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// The number of lines of each log that are shown when a process fails.
const LINES_SHOWN: usize = 30;

#[derive(Debug)]
pub struct DaemonAndEnvoy {
    daemon: ChildProcess,
    envoy: ChildProcess,
    _folder: TempDir,
}

/// Further arguments of both processes.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExtraArgs<'a> {
    /// Arguments of `switchpointd serve`.
    pub daemon: &'a [String],
    pub envoy: &'a [&'a str],
}

// === impl DaemonAndEnvoy ===

impl DaemonAndEnvoy {
    /// Starts the daemon and Envoy in front of `endpoints` (`host:port` each), with the shipped
    /// `standalone.yaml` changed by `edit`.
    ///
    /// # Errors
    /// Fails if a port is taken, a binary is missing, or the picker gets no state in time. The
    /// error has the last lines of the logs.
    pub async fn start(
        endpoints: &[String],
        more: ExtraArgs<'_>,
        edit: impl FnOnce(&mut EnvoyConfig) -> Result<()>,
    ) -> Result<Self> {
        for port in [LISTENER, ENVOY_ADMIN, DAEMON_ADMIN, STATE]
            .into_iter()
            .chain(EXT_PROC)
        {
            check_free(port)?;
        }
        let folder = tempfile::Builder::new().prefix("switchpoint-").tempdir()?;
        let mut config = EnvoyConfig::shipped("standalone.yaml")?;
        config.set_module(&module()?)?;
        edit(&mut config)?;
        let config_file = folder.path().join("envoy.json");
        std::fs::write(&config_file, config.value().to_string())?;

        let mut command = Command::new(daemon::binary()?);
        command
            .arg("serve")
            .args(endpoints.iter().flat_map(|e| ["--endpoint", e]))
            .args(more.daemon);
        command
            .arg("--snapshot-file")
            .arg(folder.path().join("snapshot.json"));
        let daemon = ChildProcess::spawn("switchpointd", &mut command, folder.path())?;

        let mut command = envoy_command();
        command.arg("-c").arg(&config_file).args(more.envoy);
        let envoy = ChildProcess::spawn("envoy", &mut command, folder.path())?;

        let mut front = Self {
            daemon,
            envoy,
            _folder: folder,
        };
        match front.wait_until_ready().await {
            Ok(()) => Ok(front),
            Err(error) => {
                let logs = [
                    front.daemon.log_tail(LINES_SHOWN),
                    front.envoy.log_tail(LINES_SHOWN),
                ]
                .join("\n");
                Err(format!("{error}\n{logs}").into())
            }
        }
    }

    #[must_use]
    pub fn address() -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], LISTENER))
    }

    /// Checks that both processes run.
    ///
    /// # Errors
    /// Fails if a process has ended. The error has the status of the process and the end of the
    /// log.
    pub fn check_running(&mut self) -> Result<()> {
        self.daemon.check_running()?;
        self.envoy.check_running()
    }

    pub fn daemon(&mut self) -> &mut ChildProcess {
        &mut self.daemon
    }

    pub fn envoy(&mut self) -> &mut ChildProcess {
        &mut self.envoy
    }

    /// Stops Envoy and then the daemon, so that Envoy never calls a daemon that has stopped.
    ///
    /// # Errors
    /// Fails if a process does not stop in time. The process is then killed.
    pub async fn stop(mut self) -> Result<()> {
        self.envoy.stop(STOP_LIMIT).await?;
        self.daemon.stop(STOP_LIMIT).await?;
        Ok(())
    }

    async fn wait_until_ready(&mut self) -> Result<()> {
        let ready = wait_for(START_LIMIT, "a picker that has state", || {
            let running = self.check_running();
            async move {
                match running {
                    Err(error) => Some(Err(error)),
                    Ok(()) => match client::get(Self::address(), "/switchpoint/ready").await {
                        Ok(reply) if reply.status == 200 => Some(Ok(())),
                        _ => None,
                    },
                }
            }
        });
        ready.await?
    }
}

/// An Envoy without the picker, for comparison. This Envoy has the shipped config, but spreads the
/// requests over the servers by round robin.
#[derive(Debug)]
pub struct RoundRobinEnvoy {
    envoy: ChildProcess,
    port: u16,
    _folder: TempDir,
}

// === impl RoundRobinEnvoy ===

impl RoundRobinEnvoy {
    /// Starts the Envoy on `port`, in front of `servers` (`ADDRESS:PORT` each).
    ///
    /// # Errors
    /// Fails if the port is taken, Envoy is missing, or Envoy does not serve in time.
    pub async fn start(port: u16, servers: &[String]) -> Result<Self> {
        check_free(port)?;
        let folder = tempfile::Builder::new().prefix("switchpoint-").tempdir()?;
        let mut config = EnvoyConfig::shipped("standalone.yaml")?;
        config.replace_port(LISTENER, port)?;
        config.make_round_robin(servers)?;
        let config_file = folder.path().join("envoy.json");
        std::fs::write(&config_file, config.value().to_string())?;
        let mut command = envoy_command();
        command.arg("-c").arg(&config_file);
        let mut this = Self {
            envoy: ChildProcess::spawn("envoy", &mut command, folder.path())?,
            port,
            _folder: folder,
        };
        let address = this.address();
        let serves = || {
            let running = this.envoy.check_running();
            async move {
                let answers = || async {
                    client::get(address, "/health")
                        .await
                        .is_ok_and(|reply| reply.status == 200)
                };
                if running.is_err() || answers().await {
                    Some(running)
                } else {
                    None
                }
            }
        };
        wait_for(START_LIMIT, "Envoy without the picker", serves).await??;
        Ok(this)
    }

    #[must_use]
    pub fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.port))
    }

    pub fn process(&mut self) -> &mut ChildProcess {
        &mut self.envoy
    }

    /// Stops the Envoy.
    ///
    /// # Errors
    /// Fails if Envoy does not stop in time. Envoy is then killed.
    pub async fn stop(mut self) -> Result<()> {
        self.envoy.stop(STOP_LIMIT).await.map(drop)
    }
}

fn check_free(port: u16) -> Result<()> {
    TcpListener::bind(("127.0.0.1", port))
        .map_err(|error| format!("port {port} is needed and not free: {error}"))?;
    Ok(())
}

/// Returns a command that runs Envoy from the root of the repository, to which the config's paths
/// are relative.
fn envoy_command() -> Command {
    let mut command = Command::new(EnvoyProcess::binary());
    command
        .current_dir(root())
        .args(["--disable-hot-restart", "--log-level", "warn"]);
    command
}

/// Returns the path of the wasm module built with the calling program. For `target/demo/run`, the
/// path is `target/wasm32-wasip1/demo/switchpoint.wasm`.
///
/// # Errors
/// Fails if the module was not built.
fn module() -> Result<PathBuf> {
    let us = std::env::current_exe()?;
    let (profile, target) = us
        .parent()
        .and_then(|folder| Some((folder.file_name()?, folder.parent()?)))
        .ok_or("this program has no folder")?;
    let module = target
        .join("wasm32-wasip1")
        .join(profile)
        .join("switchpoint.wasm");
    if module.is_file() {
        Ok(module)
    } else {
        Err(format!(
            "{} is not built: run this program by `make`",
            module.display()
        )
        .into())
    }
}
