//! Runs `switchpointd` (the daemon) as users start it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::ports::ReservedPort;
use crate::process::ChildProcess;
use crate::{Result, client, root};

/// The environment variable that names a daemon binary to use instead of the one built with the
/// tests.
const BINARY: &str = "SWITCHPOINT_DAEMON";

/// A running daemon, with its settings, so that a test can start the daemon again.
#[derive(Debug)]
pub struct DaemonProcess {
    process: ChildProcess,
    settings: DaemonSettings,
}

#[derive(Debug)]
pub struct DaemonSettings {
    pub state: ReservedPort,
    /// Port of metrics and the admin pages.
    pub admin: ReservedPort,
    pub ext_proc: ReservedPort,
    /// Port of the health service of the ext_proc server.
    pub health: ReservedPort,
    /// The folder of the daemon's files: `endpoints.yaml`, `snapshot`, logs.
    pub folder: PathBuf,
    pub arguments: Vec<String>,
    /// The number of worker threads of the daemon; by default the number of cores.
    pub threads: Option<u32>,
    pub environment: Vec<(String, String)>,
}

// === impl DaemonSettings ===

impl DaemonSettings {
    /// Creates settings with leased ports, and with files in `folder`.
    ///
    /// # Errors
    /// Fails if no port is free.
    pub fn new(folder: &Path) -> Result<Self> {
        let [state, admin, ext_proc, health] = [
            ReservedPort::lease()?,
            ReservedPort::lease()?,
            ReservedPort::lease()?,
            ReservedPort::lease()?,
        ];
        Ok(Self {
            state,
            admin,
            ext_proc,
            health,
            folder: folder.to_owned(),
            arguments: Vec::new(),
            threads: None,
            environment: Vec::new(),
        })
    }

    /// Writes the endpoints file and renames it into place, as an editor or a ConfigMap does, so
    /// that no reader sees half of it.
    ///
    /// # Errors
    /// Fails if the folder cannot be written.
    pub fn write_endpoints(&self, endpoints: &[(String, SocketAddr)]) -> Result<()> {
        let entry = |(name, address): &(String, SocketAddr)| json!({"name": name, "address": address.ip().to_string(), "port": address.port().to_string()});
        let file = json!({"endpoints": endpoints.iter().map(entry).collect::<Vec<_>>()}); // a YAML reader accepts JSON
        self.write_endpoints_file(&file.to_string())
    }

    /// Like [`Self::write_endpoints`], but writes any text, which may be invalid.
    ///
    /// # Errors
    /// Fails if the folder cannot be written.
    pub fn write_endpoints_file(&self, text: &str) -> Result<()> {
        let draft = self.folder.join("endpoints.draft");
        std::fs::write(&draft, text)?;
        Ok(std::fs::rename(draft, self.folder.join("endpoints.yaml"))?)
    }

    fn command(&self) -> Result<Command> {
        let mut command = Command::new(binary()?);
        command.arg("serve").arg("--local-endpoints");
        // Names the endpoints file only without a pools file, because a pools file names the
        // endpoints file of each pool.
        if !self.arguments.iter().any(|argument| argument == "--pools") {
            command
                .arg("--endpoints-file")
                .arg(self.folder.join("endpoints.yaml"));
        }
        command
            .arg("--snapshot-file")
            .arg(self.folder.join("snapshot"));
        command
            .arg("--listen-state")
            .arg(self.state.address().to_string());
        command
            .arg("--listen-admin")
            .arg(self.admin.address().to_string());
        command
            .arg("--listen-ext-proc")
            .arg(self.ext_proc.address().to_string());
        command
            .arg("--listen-health")
            .arg(self.health.address().to_string());
        command.args(&self.arguments);
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        if let Some(threads) = self.threads {
            command.env("TOKIO_WORKER_THREADS", threads.to_string());
        }
        Ok(command)
    }
}

// === impl DaemonProcess ===

impl DaemonProcess {
    /// Starts the daemon. The endpoints file must exist.
    ///
    /// # Errors
    /// Fails if the binary cannot be run.
    pub fn start(settings: DaemonSettings) -> Result<Self> {
        let process =
            ChildProcess::spawn("switchpointd", &mut settings.command()?, &settings.folder)?;
        Ok(Self { process, settings })
    }

    /// Starts the daemon again with the same ports and files, after it was stopped or killed.
    ///
    /// # Errors
    /// Fails if the binary cannot be run.
    pub fn start_again(&mut self) -> Result<()> {
        self.process = ChildProcess::spawn(
            "switchpointd",
            &mut self.settings.command()?,
            &self.settings.folder,
        )?;
        Ok(())
    }

    pub fn settings(&self) -> &DaemonSettings {
        &self.settings
    }

    pub fn process(&mut self) -> &mut ChildProcess {
        &mut self.process
    }

    /// Requests a page from the admin listener.
    ///
    /// # Errors
    /// Fails if there is no reply.
    pub async fn admin(&self, path: &str) -> Result<client::ClientReply> {
        client::get(self.settings.admin.address(), path).await
    }

    /// Returns the endpoints from the page `/debug/endpoints`.
    ///
    /// # Errors
    /// Fails if the reply is not JSON.
    pub async fn endpoints(&self) -> Result<Vec<Value>> {
        let page = self.admin("/debug/endpoints").await?.json()?;
        Ok(page["endpoints"].as_array().cloned().unwrap_or_default())
    }
}

/// Returns the path of the daemon built with this program: `target/debug/switchpointd` for
/// `target/debug/deps/e2e-…`, `target/demo/switchpointd` for `target/demo/run`.
///
/// # Errors
/// Fails if the binary was not built.
pub fn binary() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os(BINARY) {
        return Ok(root().join(path));
    }
    let us = std::env::current_exe()?;
    let folder = us
        .ancestors()
        .skip(1)
        .find(|folder| folder.join("switchpointd").is_file());
    Ok(folder
        .ok_or("switchpointd is not built: run this program by `make`, or `cargo build --workspace --bins` first")?
        .join("switchpointd"))
}
