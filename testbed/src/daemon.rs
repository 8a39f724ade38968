//! `switchpointd`, as users start it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::ports::ReservedPort;
use crate::process::ChildProcess;
use crate::{Result, client, root};

/// The variable that names another binary than the one built beside the tests.
const BINARY: &str = "SWITCHPOINT_DAEMON";

/// A running daemon, and all it needs to be started again as it was.
#[derive(Debug)]
pub struct DaemonProcess {
    process: ChildProcess,
    settings: DaemonSettings,
}

/// How to run the daemon.
#[derive(Debug)]
pub struct DaemonSettings {
    /// Pool state and EDS.
    pub state: ReservedPort,
    /// Metrics and admin.
    pub admin: ReservedPort,
    /// Gateways without the filter.
    pub ext_proc: ReservedPort,
    /// The health of that.
    pub health: ReservedPort,
    /// Where its files are: `endpoints.yaml`, `snapshot`, its logs.
    pub folder: PathBuf,
    /// Further arguments of `serve`.
    pub arguments: Vec<String>,
    /// Threads that serve; as many as there are cores unless said.
    pub threads: Option<u32>,
    /// Further variables of its environment.
    pub environment: Vec<(String, String)>,
}

// === impl DaemonSettings ===

impl DaemonSettings {
    /// Leased ports, files in `folder`.
    ///
    /// # Errors
    /// If no port is free.
    pub fn new(folder: &Path) -> Result<Self> {
        let [state, admin, ext_proc, health] =
            [ReservedPort::lease()?, ReservedPort::lease()?, ReservedPort::lease()?, ReservedPort::lease()?];
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

    /// Writes the endpoints file by rename, as an editor or a ConfigMap does: a reader never sees half of it.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub fn write_endpoints(&self, endpoints: &[(String, SocketAddr)]) -> Result<()> {
        let entry = |(name, address): &(String, SocketAddr)| json!({"name": name, "address": address.ip().to_string(), "port": address.port().to_string()});
        let file = json!({"endpoints": endpoints.iter().map(entry).collect::<Vec<_>>()}); // JSON is YAML
        self.write_endpoints_file(&file.to_string())
    }

    /// The same with any text, also a broken one.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub fn write_endpoints_file(&self, text: &str) -> Result<()> {
        let draft = self.folder.join("endpoints.draft");
        std::fs::write(&draft, text)?;
        Ok(std::fs::rename(draft, self.folder.join("endpoints.yaml"))?)
    }

    fn command(&self) -> Result<Command> {
        let mut command = Command::new(binary()?);
        command.arg("serve");
        // A file of pools says itself where each has its endpoints.
        if !self.arguments.iter().any(|argument| argument == "--pools") {
            command.arg("--endpoints-file").arg(self.folder.join("endpoints.yaml"));
        }
        command.arg("--snapshot-file").arg(self.folder.join("snapshot"));
        command.arg("--listen-state").arg(self.state.address().to_string());
        command.arg("--listen-admin").arg(self.admin.address().to_string());
        command.arg("--listen-ext-proc").arg(self.ext_proc.address().to_string());
        command.arg("--listen-health").arg(self.health.address().to_string());
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
    /// Starts the daemon on an endpoints file written before.
    ///
    /// # Errors
    /// If it cannot be run.
    pub fn start(settings: DaemonSettings) -> Result<Self> {
        let process = ChildProcess::spawn("switchpointd", &mut settings.command()?, &settings.folder)?;
        Ok(Self { process, settings })
    }

    /// Starts it again, with the same ports and files, after it was stopped or killed.
    ///
    /// # Errors
    /// If it cannot be run.
    pub fn start_again(&mut self) -> Result<()> {
        self.process = ChildProcess::spawn("switchpointd", &mut self.settings.command()?, &self.settings.folder)?;
        Ok(())
    }

    /// How it was started.
    pub fn settings(&self) -> &DaemonSettings {
        &self.settings
    }

    /// The process.
    pub fn process(&mut self) -> &mut ChildProcess {
        &mut self.process
    }

    /// A reply of the admin listener.
    ///
    /// # Errors
    /// If it does not answer at all.
    pub async fn admin(&self, path: &str) -> Result<client::ClientReply> {
        client::get(self.settings.admin.address(), path).await
    }

    /// `/debug/endpoints`.
    ///
    /// # Errors
    /// If it does not answer with JSON.
    pub async fn endpoints(&self) -> Result<Vec<Value>> {
        let page = self.admin("/debug/endpoints").await?.json()?;
        Ok(page["endpoints"].as_array().cloned().unwrap_or_default())
    }
}

/// The binary built with the tests: `target/debug/switchpointd` for `target/debug/deps/e2e-…`.
///
/// # Errors
/// If it is not built.
pub fn binary() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os(BINARY) {
        return Ok(root().join(path));
    }
    let us = std::env::current_exe()?;
    let folder = us.ancestors().skip(1).find(|folder| folder.join("switchpointd").is_file());
    Ok(folder.ok_or("switchpointd is not built: run `make e2e`, or `cargo build --workspace --bins` first")?.join("switchpointd"))
}
