//! Runs one Envoy for the stacks (see [`crate::stack`]) of many tests.
//!
//! Each Envoy needs three seconds of CPU time to compile the filter. A stack that shares an Envoy
//! adds its listener and its clusters by files that Envoy watches (LDS and CDS), and removes them
//! at the end. Each stack has its own `vm_id`, so its VMs share no state with other VMs. Tests that
//! only send requests share one Envoy at the same time. Tests that read statistics use an Envoy one
//! after another, and its counters are reset in between. Tests that read Envoy's log or send it
//! signals need a separate Envoy.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};

use crate::envoy::{EnvoyConfig, EnvoyProcess};
use crate::ports::ReservedPort;
use crate::process::ChildProcess;
use crate::{Result, client, root, wait_for};

/// Time limit until Envoy has the clusters of a stack. The limit is long, because the machine may
/// compile at the same time.
const LIMIT: Duration = Duration::from_secs(60);

/// Seconds for which Envoy keeps the connections of a listener that was removed.
const DRAIN_S: &str = "1";

/// The cluster of the daemon. Envoy accepts only clusters of its bootstrap as EDS servers, so the
/// bootstrap has one cluster of this kind for each stack.
const STATE: &str = "switchpoint-state";

/// The maximum number of stacks that one Envoy serves. The next stack starts a new Envoy.
const STACKS_MAX: usize = 64;

/// A shell script that runs the arguments after `$1` as a command until standard input is closed,
/// and then removes the folder `$1`. The kernel closes the input when the test program ends, even
/// if the test program is killed.
const UNTIL_CLOSED: &str =
    r#"folder=$1; shift; "$@" & read -r _; kill "$!"; wait "$!"; rm -rf "$folder""#;

static SHARED: Mutex<BTreeMap<EnvoyKind, Vec<SharedEnvoy>>> = Mutex::new(BTreeMap::new());

/// How the stacks of a test program use an Envoy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EnvoySharing {
    /// Only one stack uses the Envoy, and the Envoy ends with the stack.
    Own,
    /// All stacks use the Envoy at the same time.
    Together,
    /// The stacks use the Envoy one after another.
    InTurn,
}

/// The number of workers of an Envoy, and how its stacks use it.
type EnvoyKind = (u32, EnvoySharing);

/// An Envoy that stacks of this test program share.
#[derive(Debug)]
struct SharedEnvoy {
    process: ChildProcess,
    admin: ReservedPort,
    folder: PathBuf,
    /// The state ports for the daemons of further stacks. The next stack gets the last port in the
    /// list.
    state_ports: Vec<ReservedPort>,
    stacks: BTreeMap<usize, StackResources>,
    /// The number of stacks that use this Envoy now.
    places: usize,
    /// The number of times that the files were written so far. Each file has this number as its
    /// version.
    changes: u64,
}

/// The listeners and clusters of one stack.
#[derive(Debug, Default)]
struct StackResources {
    listeners: Vec<Value>,
    clusters: Vec<Value>,
}

/// A stack's part of a shared Envoy. Dropping this value removes what the stack added.
#[derive(Debug)]
pub struct EnvoyShare {
    kind: EnvoyKind,
    /// The index of the Envoy among the Envoys of this kind.
    envoy: usize,
    number: usize,
    state_port: u16,
    admin: SocketAddr,
    log: PathBuf,
    /// The names of the clusters in the config of the stack.
    clusters: Vec<String>,
}

// === impl EnvoyShare ===

impl EnvoyShare {
    /// Reserves room for a stack in an Envoy with this number of workers. Starts an Envoy if none
    /// has room. Also returns the port on which the daemon of the stack must serve state.
    ///
    /// # Errors
    /// Fails if Envoy cannot be run.
    pub fn reserve(workers: u32, sharing: EnvoySharing) -> Result<(Self, ReservedPort)> {
        let mut shared = lock();
        let kind = (workers, sharing);
        let envoys = shared.entry(kind).or_default();
        let has_place = |envoy: &mut SharedEnvoy| {
            !envoy.state_ports.is_empty()
                && (sharing == EnvoySharing::Together || envoy.places == 0)
                && envoy.process.check_running().is_ok()
        };
        let index = match envoys.iter_mut().position(has_place) {
            Some(index) => index,
            None => {
                envoys.push(SharedEnvoy::start(workers)?);
                envoys.len() - 1
            }
        };
        let envoy = envoys.get_mut(index).ok_or("no shared Envoy")?;
        envoy.places += 1;
        let number = envoy.state_ports.len();
        let port = envoy.state_ports.pop().ok_or("no place")?;
        let share = Self {
            kind,
            number,
            state_port: port.number(),
            admin: envoy.admin.address(),
            log: envoy.folder.join("envoy.err"),
            envoy: index,
            clusters: Vec::new(),
        };
        Ok((share, port))
    }

    /// Adds the listeners and clusters of `config`. The access log goes to `access_log`.
    ///
    /// # Errors
    /// Fails if anything else in `config` differs from the shipped file, or if Envoy does not
    /// accept `config`.
    pub async fn add(&mut self, config: &EnvoyConfig, access_log: &Path) -> Result<()> {
        if self.has_turn() {
            self.wait_for_turn().await?;
        }
        let mut bootstrap = config.clone();
        let statics = bootstrap.value()["static_resources"].take();
        let mut shared = shared_bootstrap()?;
        shared["admin"] = bootstrap.value()["admin"].clone();
        if *bootstrap.value() != shared {
            return Err("this config needs an Envoy of its own: it changes the bootstrap".into());
        }
        let resources = StackResources::new(&statics, self, access_log)?;
        let name = |cluster: &Value| cluster["name"].as_str().unwrap_or_default().to_owned();
        let clusters: Vec<String> = resources.clusters.iter().map(name).collect();
        self.clusters = names(&statics["clusters"]);
        self.with_envoy(|envoy| {
            envoy.stacks.insert(self.number, resources);
            envoy.write_clusters()
        })?;
        // Envoy accepts a listener only if it has all clusters that the listener names.
        let known = || async {
            let page = client::get(self.admin, "/clusters").await.ok()?.text();
            let is_known = |name: &String| page.contains(&format!("{name}::"));
            clusters.iter().all(is_known).then_some(())
        };
        wait_for(LIMIT, "the shared Envoy to have the clusters", known).await?;
        self.with_envoy(SharedEnvoy::write_listeners)
    }

    /// Returns the address of the admin port, which all stacks share.
    pub fn admin(&self) -> SocketAddr {
        self.admin
    }

    /// Whether the stack has the Envoy for itself until the stack ends.
    pub fn has_turn(&self) -> bool {
        self.kind.1 == EnvoySharing::InTurn
    }

    /// Waits until the previous stack's listeners are gone, and resets all counters.
    async fn wait_for_turn(&self) -> Result<()> {
        let page = "/stats?filter=^listener_manager.total_listeners_(active|draining|warming)$";
        let is_empty = || async {
            let page = client::get(self.admin, page).await.ok()?.text();
            let rows = page.lines().filter(|line| line.ends_with(": 0")).count();
            (rows == 3).then_some(())
        };
        wait_for(LIMIT, "the last stack to leave the shared Envoy", is_empty).await?;
        client::post(self.admin, "/reset_counters", Vec::new()).await?;
        Ok(())
    }

    /// Replaces the stack's names of clusters by their names in the shared Envoy.
    pub fn shared_names(&self, text: &str) -> String {
        let number = self.number;
        let clusters = self.clusters.iter();
        clusters.fold(text.to_owned(), |text, name| {
            text.replace(name, &format!("{name}-{number}"))
        })
    }

    /// Replaces the names of clusters in the shared Envoy by the stack's names.
    pub fn own_names(&self, text: &str) -> String {
        let number = self.number;
        let clusters = self.clusters.iter();
        clusters.fold(text.to_owned(), |text, name| {
            text.replace(&format!("{name}-{number}"), name)
        })
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Checks that the shared Envoy runs.
    ///
    /// # Errors
    /// Fails if Envoy has ended.
    pub fn check_running(&self) -> Result<()> {
        self.with_envoy(|envoy| envoy.process.check_running())
    }

    fn with_envoy(&self, act: impl FnOnce(&mut SharedEnvoy) -> Result<()>) -> Result<()> {
        let mut shared = lock();
        let envoys = shared.get_mut(&self.kind);
        act(envoys
            .and_then(|envoys| envoys.get_mut(self.envoy))
            .ok_or("no shared Envoy")?)
    }
}

impl Drop for EnvoyShare {
    fn drop(&mut self) {
        // If this fails, what the stack added stays until the program ends.
        let _ = self.with_envoy(|envoy| {
            envoy.places -= 1;
            envoy.stacks.remove(&self.number);
            envoy.write_listeners()?;
            envoy.write_clusters()
        });
    }
}

// === impl SharedEnvoy ===

impl SharedEnvoy {
    fn start(workers: u32) -> Result<Self> {
        let admin = ReservedPort::lease()?;
        let state_ports = (0..STACKS_MAX)
            .map(|_| ReservedPort::lease())
            .collect::<Result<Vec<_>>>()?;
        let folder = tempfile::Builder::new()
            .prefix("switchpoint-e2e-shared-")
            .tempdir()?
            .keep();
        let source = |file: &str| json!({"resource_api_version": "V3", "path_config_source": {"path": folder.join(file)}});
        let mut bootstrap = shared_bootstrap()?;
        let states = state_ports.iter().zip(1..);
        let states = states.map(|(port, number)| state_cluster(port.number(), number));
        bootstrap["admin"] = json!({"address": {"socket_address": {"address": "127.0.0.1", "port_value": admin.number()}}});
        bootstrap["static_resources"] = json!({"clusters": states.collect::<Result<Vec<_>>>()?});
        bootstrap["dynamic_resources"] =
            json!({"cds_config": source("cds.json"), "lds_config": source("lds.json")});
        let file = folder.join("envoy.json");
        std::fs::write(&file, bootstrap.to_string())?;
        let mut command = Command::new("sh");
        command
            .current_dir(root())
            .args(["-c", UNTIL_CLOSED, "sh"])
            .arg(&folder)
            .arg(EnvoyProcess::binary())
            .args(["--disable-hot-restart", "--concurrency"])
            .arg(workers.to_string())
            .args(["--log-level", "info", "--file-flush-interval-msec", "20"])
            .args(["--drain-time-s", DRAIN_S, "--drain-strategy", "immediate"])
            .arg("-c")
            .arg(&file)
            .stdin(Stdio::piped());
        let mut envoy = Self {
            process: ChildProcess::spawn_with_stdin("envoy", &mut command, &folder)?,
            admin,
            folder,
            state_ports,
            stacks: BTreeMap::new(),
            places: 0,
            changes: 0,
        };
        envoy.write_clusters()?;
        envoy.write_listeners()?;
        Ok(envoy)
    }

    fn write_clusters(&mut self) -> Result<()> {
        let clusters = self.stacks.values().flat_map(|stack| &stack.clusters);
        let all = resources(
            "type.googleapis.com/envoy.config.cluster.v3.Cluster",
            clusters,
        );
        self.write("cds.json", &all)
    }

    fn write_listeners(&mut self) -> Result<()> {
        let listeners = self.stacks.values().flat_map(|stack| &stack.listeners);
        let all = resources(
            "type.googleapis.com/envoy.config.listener.v3.Listener",
            listeners,
        );
        self.write("lds.json", &all)
    }

    /// Replaces a file by a rename, so that Envoy never reads half a file.
    fn write(&mut self, name: &str, resources: &[Value]) -> Result<()> {
        self.changes += 1;
        let text = json!({"version_info": self.changes.to_string(), "resources": resources});
        let new = self.folder.join("new");
        std::fs::write(&new, text.to_string())?;
        Ok(std::fs::rename(new, self.folder.join(name))?)
    }
}

fn lock() -> MutexGuard<'static, BTreeMap<EnvoyKind, Vec<SharedEnvoy>>> {
    SHARED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the shipped Envoy configuration without its listeners and clusters.
fn shared_bootstrap() -> Result<Value> {
    let mut shipped = EnvoyConfig::shipped("standalone.yaml")?;
    let shipped = shipped.value();
    shipped["static_resources"] = Value::Null;
    Ok(shipped.take())
}

/// Returns the shipped cluster of the daemon, changed for the daemon of one stack.
fn state_cluster(port: u16, number: usize) -> Result<Value> {
    let mut shipped = EnvoyConfig::shipped("standalone.yaml")?;
    shipped.replace_port(9004, port)?;
    let clusters = shipped.value()["static_resources"]["clusters"].as_array();
    let mut clusters = clusters.into_iter().flatten();
    let mut state = clusters
        .find(|cluster| cluster["name"] == STATE)
        .ok_or("no cluster of the daemon")?
        .clone();
    state["name"] = format!("{STATE}-{number}").into();
    Ok(state)
}

fn names(resources: &Value) -> Vec<String> {
    let resources = resources.as_array().into_iter().flatten();
    let names = resources.filter_map(|resource| resource["name"].as_str());
    names.map(str::to_owned).collect()
}

fn resources<'a>(kind: &str, of: impl Iterator<Item = &'a Value>) -> Vec<Value> {
    let typed = |resource: &Value| {
        let mut resource = resource.clone();
        resource["@type"] = kind.into();
        resource
    };
    of.map(typed).collect()
}

// === impl StackResources ===

impl StackResources {
    /// Returns the resources of a stack, with names that no other stack has.
    fn new(statics: &Value, share: &EnvoyShare, access_log: &Path) -> Result<Self> {
        let number = share.number;
        let list = |name: &str| statics[name].as_array().cloned().unwrap_or_default();
        let mut listeners = list("listeners");
        let mut clusters = list("clusters");
        let names = names(&statics["clusters"]);
        let mut daemon = state_cluster(share.state_port, number)?;
        daemon["name"] = STATE.into();
        clusters.retain(|cluster| *cluster != daemon);
        if clusters.iter().any(|cluster| cluster["name"] == STATE) {
            return Err("this config needs an Envoy of its own: it reaches the daemon by other means than the shipped file".into());
        }
        for cluster in &mut clusters {
            let name = cluster["name"].clone();
            if let Some(eds) = cluster.get_mut("eds_cluster_config")
                && eds.get("service_name").is_none()
            {
                eds["service_name"] = name;
            }
        }
        for resource in listeners.iter_mut().chain(&mut clusters) {
            rename(resource, &names, number);
        }
        for cluster in &mut clusters {
            add_number_to_name(cluster, &names, number);
        }
        for listener in &mut listeners {
            let name = listener["name"].as_str().unwrap_or_default();
            listener["name"] = format!("{name}-{number}").into();
            let connections = listener
                .pointer_mut("/filter_chains/0/filters/0/typed_config")
                .ok_or("a listener without a connection manager")?;
            let log = &mut connections["access_log"][0];
            log["name"] = "envoy.access_loggers.file".into();
            log["typed_config"]["@type"] =
                "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog".into();
            log["typed_config"]["path"] = json!(access_log);
            let filters = connections["http_filters"].as_array_mut();
            for filter in filters.into_iter().flatten() {
                let vm = filter.pointer_mut("/typed_config/config/vm_config/vm_id");
                if let Some(vm) = vm {
                    *vm = format!("switchpoint-{number}").into();
                }
            }
        }
        Ok(Self {
            listeners,
            clusters,
        })
    }
}

/// Appends the number to each cluster name in `value`, also in the picker's configuration, which is
/// JSON in a string.
fn rename(value: &mut Value, clusters: &[String], number: usize) {
    match value {
        Value::String(text) if text.trim_start().starts_with('{') => {
            if let Ok(mut inner) = serde_json::from_str::<Value>(text) {
                rename(&mut inner, clusters, number);
                *text = inner.to_string();
            }
        }
        Value::Array(values) => {
            for value in values {
                rename(value, clusters, number);
            }
        }
        Value::Object(fields) => {
            for (key, value) in fields {
                match (key.as_str(), value) {
                    ("cluster" | "cluster_name", Value::String(name)) => {
                        add_number(name, clusters, number);
                    }
                    ("clusters", Value::Array(names)) => {
                        for name in names {
                            match name {
                                Value::String(name) => add_number(name, clusters, number),
                                weighted => add_number_to_name(weighted, clusters, number),
                            }
                        }
                    }
                    (_, value) => rename(value, clusters, number),
                }
            }
        }
        _ => {}
    }
}

fn add_number_to_name(resource: &mut Value, clusters: &[String], number: usize) {
    if let Some(Value::String(name)) = resource.get_mut("name") {
        add_number(name, clusters, number);
    }
}

fn add_number(name: &mut String, clusters: &[String], number: usize) {
    if clusters.contains(name) {
        *name = format!("{name}-{number}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_stacks_have_no_name_in_common() {
        let mut shipped = EnvoyConfig::shipped("standalone.yaml").expect("the shipped file");
        let statics = &shipped.value()["static_resources"];
        let stacks = [7, 8].map(|number| {
            let share = EnvoyShare {
                kind: (1, EnvoySharing::Together),
                envoy: 0,
                number,
                state_port: 9004,
                admin: ([127, 0, 0, 1], 1).into(),
                log: PathBuf::new(),
                clusters: Vec::new(),
            };
            let log = Path::new("/access.log");
            StackResources::new(statics, &share, log).expect("a shipped structure")
        });
        let text = |stack: &StackResources| format!("{:?}{:?}", stack.listeners, stack.clusters);
        for (stack, number) in stacks.iter().zip([7, 8]) {
            let cluster = stack.clusters[0].clone();
            assert_eq!(cluster["name"], format!("inference-pool-{number}"));
            assert_eq!(cluster["eds_cluster_config"]["service_name"], "default");
            assert!(text(stack).contains(&format!("switchpoint-state-{number}")));
        }
        let other = text(&stacks[1]).replace("-8", "-7");
        assert_eq!(text(&stacks[0]), other, "they differ in nothing else");
        assert!(!text(&stacks[0]).contains("\"inference-pool\""));
    }
}
