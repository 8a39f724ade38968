//! A running Switchpoint: simulated model servers, the daemon (`switchpointd`), and Envoy with the
//! picker as a filter.
//!
//! ```text
//!   client ──▶ Envoy + picker ──▶ model servers (in this process)
//!                  ▲   ▲              ▲
//!            state │   │ EDS          │ /metrics
//!                  └── switchpointd ──┘
//! ```
//! Each stack has its own ports and files, so tests run side by side. Dropping a stack kills its
//! processes and prints the last lines of their logs.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use http::Request;
use serde_json::Value;
use tempfile::TempDir;

mod builder;
pub use builder::{PickerMode, StackBuilder};

use crate::client::{self, Body, ClientReply};
use crate::daemon::{DaemonProcess, DaemonSettings};
use crate::envoy::EnvoyProcess;
use crate::model_server::ModelServer;
use crate::ports::ReservedPort;
use crate::{Result, wait_for};

/// Time limit from start until the picker has state. The limit is long, because the machine may
/// compile at the same time.
const START_LIMIT: Duration = Duration::from_secs(90);

/// The number of lines of each log that a failed test shows.
const LINES_SHOWN: usize = 60;

#[derive(Debug)]
pub struct Stack {
    /// The model servers, in order; their endpoints are named `server-0`, `server-1`, …
    pub servers: Vec<ModelServer>,
    pub envoy: EnvoyProcess,
    /// The daemon, unless the stack was built without one.
    pub daemon: Option<DaemonProcess>,
    /// The settings with which the daemon can be started later, if the stack was built without one.
    absent: Option<DaemonSettings>,
    _ports: Vec<ReservedPort>,
    folder: TempDir,
    quiet: bool,
}

fn endpoints(servers: &[ModelServer]) -> Vec<(String, SocketAddr)> {
    servers
        .iter()
        .enumerate()
        .map(|(index, server)| (format!("server-{index}"), server.addr()))
        .collect()
}

// === impl Stack ===

impl Stack {
    /// Describes a stack with one model server, one worker, and the shipped config.
    pub fn builder() -> StackBuilder {
        StackBuilder::new().servers(1)
    }

    /// Starts a stack with `servers` model servers and the shipped config.
    ///
    /// # Errors
    /// Fails if a part does not start.
    pub async fn start(servers: usize) -> Result<Self> {
        Self::builder().servers(servers).start().await
    }

    /// Like [`Self::start`], but uses the Envoy that the tests of this program share.
    ///
    /// # Errors
    /// Fails if a part does not start.
    pub async fn start_shared(servers: usize) -> Result<Self> {
        let builder = Self::builder().servers(servers);
        builder.shared_envoy().start().await
    }

    pub fn address(&self) -> SocketAddr {
        self.envoy.listener()
    }

    /// Requests `path` through Envoy.
    ///
    /// # Errors
    /// Fails if there is no complete reply.
    pub async fn get(&self, path: &str) -> Result<ClientReply> {
        client::get(self.address(), path).await
    }

    /// Sends `POST path` with JSON through Envoy.
    ///
    /// # Errors
    /// Fails if there is no complete reply.
    pub async fn post(&self, path: &str, body: &Value) -> Result<ClientReply> {
        client::post(self.address(), path, body.to_string()).await
    }

    /// Sends any request through Envoy, by HTTP/1.1.
    ///
    /// # Errors
    /// Fails if there is no complete reply.
    pub async fn send(&self, request: Request<Body>) -> Result<ClientReply> {
        client::send(self.address(), request).await
    }

    /// Returns the index of the server that answered.
    ///
    /// # Errors
    /// Fails if none of the stack's servers answered.
    pub fn server_of(&self, reply: &ClientReply) -> Result<usize> {
        let by = reply.header("x-served-by");
        let index = self
            .servers
            .iter()
            .position(|server| server.addr().to_string() == by);
        index.ok_or_else(|| {
            format!(
                "none of the stack's servers answered: {} {:?} {}",
                reply.status,
                by,
                reply.text()
            )
            .into()
        })
    }

    /// Returns the daemon.
    ///
    /// # Errors
    /// Fails if the stack was built without one.
    pub fn daemon(&mut self) -> Result<&mut DaemonProcess> {
        Ok(self.daemon.as_mut().ok_or("this stack has no daemon")?)
    }

    /// Starts the daemon of a stack that was built without one.
    ///
    /// # Errors
    /// Fails if the daemon cannot be run, or runs already.
    pub fn start_daemon(&mut self) -> Result<()> {
        let settings = self
            .absent
            .take()
            .ok_or("this stack has a daemon already")?;
        self.daemon = Some(DaemonProcess::start(settings)?);
        Ok(())
    }

    /// Makes these servers, by index, the endpoints of the pool.
    ///
    /// # Errors
    /// Fails if the stack has no daemon, or no server with one of these indices.
    pub fn set_pool(&mut self, indices: &[usize]) -> Result<()> {
        let all = endpoints(&self.servers);
        let chosen = indices
            .iter()
            .map(|index| all.get(*index).cloned().ok_or("no such server"))
            .collect::<Result<Vec<_>, _>>()?;
        self.daemon()?.settings().write_endpoints(&chosen)
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the last lines of every log.
    pub fn logs(&mut self) -> String {
        let daemon = self
            .daemon
            .as_mut()
            .map(|daemon| daemon.process().log_tail(LINES_SHOWN))
            .unwrap_or_default();
        daemon + &self.envoy.log_tail(LINES_SHOWN)
    }

    /// Waits until the picker has state.
    ///
    /// # Errors
    /// Fails if the picker has no state within the time limit, or if a process has ended.
    pub async fn wait_until_ready(&mut self) -> Result<()> {
        self.wait_until_up(true).await
    }

    async fn wait_until_up(&mut self, ready: bool) -> Result<()> {
        let listener = self.envoy.listener();
        let admin = self.envoy.admin();
        let up = || async move {
            // Envoy answers `LIVE` once its workers serve. The picker is ready once it has state.
            let live = client::get(admin, "/ready")
                .await
                .is_ok_and(|reply| reply.status == 200);
            let has_state = || async {
                client::get(listener, "/switchpoint/ready")
                    .await
                    .is_ok_and(|reply| reply.status == 200)
            };
            (live && (!ready || has_state().await)).then_some(())
        };
        tokio::select! {
            up = wait_for(START_LIMIT, "the picker's state", up) => up,
            ended = Self::an_end(&mut self.envoy, self.daemon.as_mut()) => Err(ended),
        }
    }

    /// Returns when one of the processes ends.
    async fn an_end(
        envoy: &mut EnvoyProcess,
        mut daemon: Option<&mut DaemonProcess>,
    ) -> crate::Error {
        loop {
            let daemon_runs = daemon
                .as_mut()
                .map_or(Ok(()), |daemon| daemon.process().check_running());
            if let Err(ended) = envoy.check_running().and(daemon_runs) {
                return ended;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        if !self.quiet {
            let logs = self.logs();
            #[allow(
                clippy::print_stdout,
                reason = "a test that fails, by panic or by error, shows what the processes said"
            )]
            {
                println!("{logs}");
            }
        }
    }
}
