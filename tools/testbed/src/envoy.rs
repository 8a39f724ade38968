//! Runs a real Envoy with a shipped config.
//!
//! The file in `envoy-config/` is parsed and edited: ports become leased ports, and a test may set
//! keys of the picker's configuration or insert a filter before the picker. All other settings are
//! as shipped. Envoy runs from the repository root, so the relative paths in the file work, as the
//! header of the file says.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

mod config;
pub use config::{EnvoyConfig, subset_hint_filter};

use crate::process::ChildProcess;
use crate::shared_envoy::EnvoyShare;
pub use crate::shared_envoy::EnvoySharing;
use crate::{Result, client, root};

/// The environment variable that names an Envoy binary, and the path of the default binary,
/// relative to the repository root. The long test suite sets the variable to run another version.
const BINARY: (&str, &str) = ("SWITCHPOINT_ENVOY", ".venv/bin/envoy");

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnvoyOptions {
    pub concurrency: u32,
    pub arguments: Vec<String>,
    /// The drain time, in s, if Envoy runs by the shipped `start.sh`. The process then stops
    /// gracefully on SIGTERM.
    pub start_script: Option<u32>,
    /// Whether hot restart is enabled. `arguments` must then have a base id that no other Envoy on
    /// this machine uses.
    pub hot_restart: bool,
    /// Whether and how the stacks of the test program share the Envoy.
    pub sharing: EnvoySharing,
    /// The folder with native modules, if the configuration names one.
    pub modules: Option<PathBuf>,
}

#[derive(Debug)]
pub struct EnvoyProcess {
    run: EnvoyRun,
    listener: SocketAddr,
    admin: SocketAddr,
    access_log: PathBuf,
}

#[derive(Debug)]
enum EnvoyRun {
    Own(ChildProcess),
    Shared(EnvoyShare),
}

// === impl EnvoyOptions ===

impl Default for EnvoyOptions {
    fn default() -> Self {
        Self {
            concurrency: 1,
            arguments: Vec::new(),
            start_script: None,
            hot_restart: false,
            sharing: EnvoySharing::Own,
            modules: None,
        }
    }
}

// === impl EnvoyProcess ===

impl EnvoyProcess {
    /// Returns the binary that `make setup` installs.
    pub fn binary() -> PathBuf {
        root().join(std::env::var_os(BINARY.0).map_or_else(|| BINARY.1.into(), PathBuf::from))
    }

    /// Starts Envoy with `config`, which listens on `listener` and `admin`. The files of this Envoy
    /// go to `folder`.
    ///
    /// # Errors
    /// Fails if the binary cannot be run.
    pub fn start(
        config: &EnvoyConfig,
        listener: SocketAddr,
        admin: SocketAddr,
        options: &EnvoyOptions,
        folder: &Path,
    ) -> Result<Self> {
        let file = folder.join("envoy.json");
        std::fs::write(&file, config.text())?;
        let mut command = match options.start_script {
            None => {
                let mut command = Command::new(Self::binary());
                if !options.hot_restart {
                    command.arg("--disable-hot-restart"); // several Envoys run at the same time, and none restarts another
                }
                command
            }
            Some(drain_s) => {
                let mut command = Command::new(root().join("envoy-config/start.sh"));
                command
                    .env("ENVOY", Self::binary())
                    .env("ENVOY_ADMIN", admin.to_string());
                command.env("DRAIN_SECONDS", drain_s.to_string());
                command.arg("--use-dynamic-base-id"); // with hot restart, Envoy ends when the script is killed
                command
            }
        };
        command
            .current_dir(root())
            .arg("-c")
            .arg(&file)
            .arg("--concurrency")
            .arg(options.concurrency.to_string());
        // Tests read the access log while Envoy runs.
        command.args(["--log-level", "info", "--file-flush-interval-msec", "20"]);
        command.args(&options.arguments);
        if let Some(folder) = &options.modules {
            command.env("ENVOY_DYNAMIC_MODULES_SEARCH_PATH", folder);
        }
        Ok(Self {
            run: EnvoyRun::Own(ChildProcess::spawn("envoy", &mut command, folder)?),
            listener,
            admin,
            access_log: folder.join("envoy.out"),
        })
    }

    /// Adds `config` to an Envoy that the tests of this program share.
    ///
    /// # Errors
    /// Fails if `config` changes more than listeners and clusters, if `options` change more than
    /// the number of workers, or if Envoy does not accept the config.
    pub async fn share(
        mut share: EnvoyShare,
        config: &EnvoyConfig,
        listener: SocketAddr,
        options: &EnvoyOptions,
        folder: &Path,
    ) -> Result<Self> {
        let concurrency = options.concurrency;
        let shareable = EnvoyOptions {
            concurrency,
            sharing: options.sharing,
            ..EnvoyOptions::default()
        };
        if *options != shareable {
            return Err("these options need an Envoy of its own".into());
        }
        let access_log = folder.join("access.log");
        share.add(config, &access_log).await?;
        Ok(Self {
            admin: share.admin(),
            run: EnvoyRun::Shared(share),
            listener,
            access_log,
        })
    }

    pub fn listener(&self) -> SocketAddr {
        self.listener
    }

    pub fn admin(&self) -> SocketAddr {
        self.admin
    }

    /// Returns the process of an Envoy that only this stack uses.
    ///
    /// # Panics
    /// Panics if the Envoy is shared, because another test needs it.
    #[allow(clippy::panic, reason = "the test asks for what it must not have")]
    pub fn process(&mut self) -> &mut ChildProcess {
        match &mut self.run {
            EnvoyRun::Own(process) => process,
            EnvoyRun::Shared(_) => panic!("this test needs an Envoy of its own"),
        }
    }

    /// Checks that Envoy runs.
    ///
    /// # Errors
    /// Fails if Envoy has ended.
    pub fn check_running(&mut self) -> Result<()> {
        match &mut self.run {
            EnvoyRun::Own(process) => process.check_running(),
            EnvoyRun::Shared(share) => share.check_running(),
        }
    }

    /// Returns the last `lines` lines of Envoy's logs, for display.
    pub fn log_tail(&self, lines: usize) -> String {
        match &self.run {
            EnvoyRun::Own(process) => process.log_tail(lines),
            EnvoyRun::Shared(share) => {
                let log = share.log();
                let skip = log.lines().count().saturating_sub(lines);
                let shown = log.lines().skip(skip);
                shown
                    .map(|line| format!("  shared envoy | {line}\n"))
                    .collect()
            }
        }
    }

    /// Returns the body of a page of the admin port.
    ///
    /// # Errors
    /// Fails if the status is not 200, or if other stacks may use the Envoy now.
    pub async fn admin_page(&self, path: &str) -> Result<String> {
        self.check_is_own()?;
        let reply = client::get(self.admin, path).await?;
        if reply.status == 200 {
            Ok(reply.text())
        } else {
            Err(format!("admin {path}: {}", reply.status).into())
        }
    }

    /// Returns the addresses of the hosts in a cluster of the config.
    ///
    /// # Errors
    /// Fails if the status is not 200.
    pub async fn hosts(&self, cluster: &str) -> Result<BTreeSet<String>> {
        let cluster = match &self.run {
            EnvoyRun::Own(_) => cluster.to_owned(),
            EnvoyRun::Shared(share) => share.shared_names(cluster),
        };
        let page = client::get(self.admin, "/clusters").await?.text();
        let of_cluster = page
            .lines()
            .filter_map(|line| line.strip_prefix(&format!("{cluster}::")));
        Ok(of_cluster
            .filter_map(|line| line.split_once("::"))
            .filter(|(address, _)| address.contains(':'))
            .map(|(address, _)| address.to_owned())
            .collect())
    }

    /// Fails if other stacks may use the Envoy now, because their requests would change the
    /// statistics.
    fn check_is_own(&self) -> Result<()> {
        match &self.run {
            EnvoyRun::Shared(share) if !share.has_turn() => {
                Err("other tests use this Envoy now, and change its statistics".into())
            }
            _ => Ok(()),
        }
    }

    /// Returns all counters and gauges whose names match `pattern`, a regular expression. An empty
    /// `pattern` matches all names.
    ///
    /// # Errors
    /// Fails if the admin port does not answer.
    pub async fn stats(&self, pattern: &str) -> Result<BTreeMap<String, i64>> {
        let pattern = match &self.run {
            EnvoyRun::Own(_) => pattern.to_owned(),
            EnvoyRun::Shared(share) => share.shared_names(pattern),
        };
        let page = self
            .admin_page(&format!(
                "/stats?format=json&filter={}",
                client::percent_encode(&pattern)
            ))
            .await?;
        let page: Value = match &self.run {
            EnvoyRun::Own(_) => serde_json::from_str(&page)?,
            EnvoyRun::Shared(share) => serde_json::from_str(&share.own_names(&page))?,
        };
        let stats = page["stats"].as_array().into_iter().flatten();
        Ok(stats
            .filter_map(|stat| Some((stat["name"].as_str()?.to_owned(), stat["value"].as_i64()?)))
            .collect())
    }

    /// Returns the value of one counter or gauge. Returns 0 if Envoy has no statistic with this
    /// name, because Envoy creates most statistics at their first use.
    ///
    /// # Errors
    /// Fails if the admin port does not answer.
    pub async fn stat(&self, name: &str) -> Result<i64> {
        let pattern = format!("^{}$", name.replace('.', "\\."));
        Ok(self.stats(&pattern).await?.get(name).copied().unwrap_or(0))
    }

    /// Returns a statistic of the picker, by its name in `/stats/prometheus`.
    ///
    /// # Errors
    /// Fails if the admin port does not answer.
    pub async fn picker_stat(&self, name: &str) -> Result<i64> {
        let pattern = format!("^(wasmcustom|dynamicmodulescustom)\\.{name}$");
        Ok(self.stats(&pattern).await?.values().sum())
    }

    /// Waits until a statistic of the picker satisfies `wanted`.
    ///
    /// # Errors
    /// Fails if the statistic does not satisfy `wanted` within `limit`. The error has the last
    /// value.
    pub async fn picker_stat_until(
        &self,
        name: &str,
        wanted: impl Fn(i64) -> bool,
        limit: Duration,
    ) -> Result<i64> {
        let look = || async {
            self.picker_stat(name)
                .await
                .ok()
                .filter(|value| wanted(*value))
        };
        let waited = crate::wait_for(limit, name, look).await;
        match waited {
            Ok(value) => Ok(value),
            Err(error) => Err(format!("{error}; it is {:?}", self.picker_stat(name).await).into()),
        }
    }

    /// Returns the page of `/stats/prometheus`.
    ///
    /// # Errors
    /// Fails if the admin port does not answer.
    pub async fn prometheus(&self) -> Result<String> {
        self.admin_page("/stats/prometheus").await
    }

    /// Returns the access log so far: one JSON object per request, in the order in which requests
    /// ended.
    pub fn access_log(&self) -> Vec<Value> {
        std::fs::read_to_string(&self.access_log)
            .unwrap_or_default()
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect()
    }

    /// Returns the access log line of the request with this `x-request-id`, as soon as Envoy has
    /// written the line.
    ///
    /// # Errors
    /// Fails if the line is not written within `limit`.
    pub async fn access_log_of(&self, request_id: &str, limit: Duration) -> Result<Value> {
        let line = || async {
            self.access_log()
                .into_iter()
                .find(|line| line["request_id"] == request_id)
        };
        crate::wait_for(
            limit,
            &format!("the access log of request {request_id}"),
            line,
        )
        .await
    }
}
