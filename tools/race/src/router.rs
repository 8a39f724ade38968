//! The routers of the race, each as its users start it, in front of engines that run already.
//!
//! Every router has two threads: two workers of Envoy, two threads of a rival's runtime.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use testbed::envoy::{EnvoyConfig, EnvoyOptions, EnvoyProcess};
use testbed::ports::ReservedPort;
use testbed::process::ChildProcess;
use testbed::second_envoy::SecondEnvoy;
use testbed::stack::Stack;
use testbed::{Result, client, root, wait_for};

use crate::mocker::{self, MockerEngines};

/// Threads of each router process: the cores of the machine that the race is made for.
pub const THREADS: u32 = 2;
/// Longest start of a router, while others start on the same machine.
const START_LIMIT: Duration = Duration::from_secs(90);
/// Parameters of llm-d's recommended policy: its default, and the tokens that an engine
/// `qwen3-32b-h200` computes in a second in steps of 8,192 ([`testbed::model_server`]'s profile).
const TTFT_PENALTY_MS: u32 = 14_000;
const PREFILL_TOKENS_PER_S: u32 = 11_800;
/// The model that the engines serve.
pub const MODEL: &str = "demo";

/// A router of the race.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RouterKind {
    /// Ours, as shipped.
    Ours,
    /// Ours once more, to see how much two equal routers differ.
    OursAgain,
    /// Ours with other parameters of `marginal-cost-scorer`: `ours:ttftWeight=3`.
    OursWith(String),
    /// Our pipeline with scorers and weights that llm-d ships.
    LlmD(LlmDProfile),
    /// SGLang's model gateway, policy `cache_aware`.
    Smg,
    /// vLLM's router, with one of its policies.
    VllmRouter(VllmRouterPolicy),
    /// Envoy without a picker, round robin.
    EnvoyRoundRobin(EnvoyFault),
    /// Dynamo's own frontend, only in front of Dynamo's engines.
    Dynamo(DynamoMode),
}

/// Modes of Dynamo's frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DynamoMode {
    /// By the KV events of the engines and their load.
    Kv,
    /// One engine after the other: its capacity is what loads are shares of.
    RoundRobin,
}

/// The engines behind a router.
#[derive(Clone, Copy, Debug)]
pub struct RouterEngines<'a> {
    /// Where the engines listen.
    pub addresses: &'a [SocketAddr],
    /// The engines themselves, if they are Dynamo's.
    pub mockers: Option<&'a MockerEngines>,
}

/// Configurations of llm-d.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LlmDProfile {
    /// Queue 2, KV cache 2, prefix 3: the default.
    Default,
    /// `prefix-cache-affinity-filter` and `token-load-scorer`: recommended since August 2026.
    Recommended,
}

/// Policies of vLLM's router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VllmRouterPolicy {
    /// An approximate prefix tree for each engine.
    CacheAware,
    /// One engine after the other.
    RoundRobin,
}

/// What Envoy's own fault filter does: the race must see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EnvoyFault {
    /// Nothing.
    None,
    /// Each request waits for 20 ms.
    Delay,
    /// Two of a hundred requests get 503.
    Drop,
}

#[derive(Debug)]
pub struct RunningRouter {
    /// Where clients connect: one address for each process.
    pub addresses: Vec<SocketAddr>,
    parts: RouterParts,
    _ports: Vec<ReservedPort>,
    _folder: TempDir,
}

#[derive(Debug)]
enum RouterParts {
    Ours {
        stack: Box<Stack>,
        _second: Option<SecondEnvoy>,
    },
    Rival {
        processes: Vec<ChildProcess>,
        adds_by: Option<AddWorker>,
    },
    Envoy(Vec<EnvoyProcess>),
}

/// How a rival learns of a new engine.
#[derive(Clone, Copy, Debug)]
enum AddWorker {
    /// `POST /workers` with a JSON body.
    Workers,
    /// `POST /add_worker?url=`.
    AddWorkerUrl,
}

// === impl RouterKind ===

impl RouterKind {
    /// The router of this name.
    ///
    /// # Errors
    /// If there is none.
    pub fn named(name: &str) -> Result<Self> {
        Ok(match name {
            "ours" => Self::Ours,
            "ours-again" => Self::OursAgain,
            "smg" => Self::Smg,
            "vllm-cache-aware" => Self::VllmRouter(VllmRouterPolicy::CacheAware),
            "vllm-round-robin" => Self::VllmRouter(VllmRouterPolicy::RoundRobin),
            "llm-d-default" => Self::LlmD(LlmDProfile::Default),
            "llm-d-recommended" => Self::LlmD(LlmDProfile::Recommended),
            "envoy-round-robin" => Self::EnvoyRoundRobin(EnvoyFault::None),
            "envoy-delay" => Self::EnvoyRoundRobin(EnvoyFault::Delay),
            "envoy-drop" => Self::EnvoyRoundRobin(EnvoyFault::Drop),
            "dynamo-kv" => Self::Dynamo(DynamoMode::Kv),
            "dynamo-round-robin" => Self::Dynamo(DynamoMode::RoundRobin),
            other => match other.strip_prefix("ours:") {
                Some(parameters) => Self::OursWith(parameters.to_owned()),
                None => return Err(format!("there is no router `{name}`").into()),
            },
        })
    }

    /// The folder of `.tools/race` with the rival's virtual environment; `None` for routers that
    /// need none.
    #[must_use]
    pub const fn tool(&self) -> Option<&'static str> {
        match self {
            Self::Smg => Some("smg"),
            Self::VllmRouter(_) => Some("vllm-router"),
            Self::Dynamo(_) => Some(mocker::TOOL),
            _ => None,
        }
    }

    /// The program of a rival.
    fn program(&self) -> Option<PathBuf> {
        self.tool()
            .map(|tool| root().join(".tools/race").join(tool).join("bin").join(tool))
    }

    /// Whether it can run here: a rival's package may not be installed.
    #[must_use]
    pub fn is_installed(&self) -> bool {
        match self {
            Self::Dynamo(_) => MockerEngines::is_installed(),
            _ => self.program().is_none_or(|program| program.is_file()),
        }
    }

    /// The version of a rival's package, or the commit of this checkout.
    #[must_use]
    pub fn version(&self) -> String {
        let Some(tool) = self.tool() else {
            let head = Command::new("git")
                .args(["describe", "--always", "--dirty"])
                .current_dir(root())
                .output();
            return head.map_or_else(
                |_| "unknown".to_owned(),
                |head| String::from_utf8_lossy(&head.stdout).trim().to_owned(),
            );
        };
        let python = root().join(".tools/race").join(tool).join("bin/python");
        let script =
            "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))";
        let printed = Command::new(python).args(["-c", script, tool]).output();
        printed.map_or_else(
            |_| "unknown".to_owned(),
            |printed| String::from_utf8_lossy(&printed.stdout).trim().to_owned(),
        )
    }

    /// Starts `gateways` processes in front of the engines.
    ///
    /// # Errors
    /// If the router does not start.
    pub async fn start(
        &self,
        RouterEngines {
            addresses: engines,
            mockers,
        }: RouterEngines<'_>,
        gateways: usize,
    ) -> Result<RunningRouter> {
        let folder = tempfile::Builder::new()
            .prefix("switchpoint-race-")
            .tempdir()?;
        let urls: Vec<String> = engines
            .iter()
            .map(|engine| format!("http://{engine}"))
            .collect();
        let port = mockers.map(|_| mocker::METRICS_PORT);
        match self {
            Self::Ours | Self::OursAgain => {
                start_ours(
                    engines,
                    gateways,
                    write_plugins(&[], port, folder.path())?,
                    folder,
                )
                .await
            }
            Self::OursWith(parameters) => {
                let config = write_plugins(
                    &[("marginal-cost-scorer", 1, parameters_of(parameters)?)],
                    port,
                    folder.path(),
                )?;
                start_ours(engines, gateways, config, folder).await
            }
            Self::LlmD(profile) => {
                let config = write_plugins(&profile.plugins(), port, folder.path())?;
                start_ours(engines, gateways, config, folder).await
            }
            Self::Smg => {
                self.start_rival(
                    &["launch", "--policy", "cache_aware"],
                    &urls,
                    gateways,
                    AddWorker::Workers,
                    folder,
                )
                .await
            }
            Self::VllmRouter(policy) => {
                let policy = if *policy == VllmRouterPolicy::CacheAware {
                    "cache_aware"
                } else {
                    "round_robin"
                };
                self.start_rival(
                    &["--policy", policy],
                    &urls,
                    gateways,
                    AddWorker::AddWorkerUrl,
                    folder,
                )
                .await
            }
            Self::EnvoyRoundRobin(fault) => start_envoy(engines, gateways, *fault, folder).await,
            Self::Dynamo(mode) => {
                start_dynamo(
                    mockers.ok_or("Dynamo's router needs Dynamo's engines")?,
                    *mode,
                    folder,
                )
                .await
            }
        }
    }

    async fn start_rival(
        &self,
        arguments: &[&str],
        urls: &[String],
        gateways: usize,
        adds_by: AddWorker,
        folder: TempDir,
    ) -> Result<RunningRouter> {
        let program = self.program().ok_or("this router is no rival")?;
        let mut ports = Vec::new();
        let mut addresses = Vec::new();
        let mut processes = Vec::new();
        for gateway in 0..gateways {
            let [port, metrics] = [ReservedPort::lease()?, ReservedPort::lease()?];
            let own = folder.path().join(gateway.to_string());
            std::fs::create_dir(&own)?;
            let mut command = Command::new(&program);
            command.args(arguments).args([
                "--host",
                "127.0.0.1",
                "--port",
                &port.number().to_string(),
            ]);
            command
                .args([
                    "--prometheus-port",
                    &metrics.number().to_string(),
                    "--worker-urls",
                ])
                .args(urls);
            command.env("TOKIO_WORKER_THREADS", THREADS.to_string());
            processes.push(ChildProcess::spawn("rival", &mut command, &own)?);
            addresses.push(port.address());
            ports.extend([port, metrics]);
        }
        for (address, process) in addresses.iter().zip(&mut processes) {
            if let Err(error) = answers(*address).await {
                return Err(format!("{error}\n{}", process.log_tail(20)).into());
            }
        }
        Ok(RunningRouter {
            addresses,
            parts: RouterParts::Rival {
                processes,
                adds_by: Some(adds_by),
            },
            _ports: ports,
            _folder: folder,
        })
    }
}

// === impl LlmDProfile ===

impl LlmDProfile {
    /// The plugins with weights and parameters; the filter has a weight too, which counts for
    /// nothing.
    fn plugins(self) -> Vec<(&'static str, u32, Value)> {
        match self {
            Self::Default => {
                let scorers = [
                    ("queue-scorer", 2),
                    ("kv-cache-utilization-scorer", 2),
                    ("prefix-cache-scorer", 3),
                ];
                scorers
                    .into_iter()
                    .map(|(scorer, weight)| (scorer, weight, json!({})))
                    .collect()
            }
            Self::Recommended => {
                let affinity = json!({"maxTTFTPenaltyMs": TTFT_PENALTY_MS, "peakPrefillThroughput": PREFILL_TOKENS_PER_S});
                vec![
                    ("prefix-cache-affinity-filter", 1, affinity),
                    ("token-load-scorer", 1, json!({})),
                ]
            }
        }
    }
}

// === impl RunningRouter ===

impl RunningRouter {
    /// Makes `engines` the engines of the pool; `added` is the one that is new.
    ///
    /// # Errors
    /// If the router refuses the engine, or cannot learn of engines while it runs.
    pub async fn add(&self, engines: &[SocketAddr], added: SocketAddr) -> Result<()> {
        match &self.parts {
            RouterParts::Ours { stack, .. } => {
                let settings = stack
                    .daemon
                    .as_ref()
                    .ok_or("there is no daemon")?
                    .settings();
                settings.write_endpoints(&named(engines))
            }
            RouterParts::Rival { adds_by, .. } => {
                for gateway in &self.addresses {
                    let reply = match adds_by.ok_or("it cannot add engines")? {
                        AddWorker::Workers => {
                            client::post(
                                *gateway,
                                "/workers",
                                json!({"url": format!("http://{added}")}).to_string(),
                            )
                            .await?
                        }
                        AddWorker::AddWorkerUrl => {
                            client::post(
                                *gateway,
                                &format!("/add_worker?url=http://{added}"),
                                Vec::new(),
                            )
                            .await?
                        }
                    };
                    if !(200..300).contains(&reply.status) {
                        return Err(format!(
                            "the engine was not added: {} {}",
                            reply.status,
                            reply.text()
                        )
                        .into());
                    }
                }
                Ok(())
            }
            RouterParts::Envoy(_) => Err("a static list of engines does not change".into()),
        }
    }

    /// Checks that all its processes run.
    ///
    /// # Errors
    /// If one has ended.
    pub fn check_running(&mut self) -> Result<()> {
        match &mut self.parts {
            RouterParts::Ours { stack, .. } => {
                stack.envoy.process().check_running()?;
                stack.daemon()?.process().check_running()
            }
            RouterParts::Rival { processes, .. } => processes
                .iter_mut()
                .try_for_each(ChildProcess::check_running),
            RouterParts::Envoy(processes) => processes
                .iter_mut()
                .try_for_each(|envoy| envoy.process().check_running()),
        }
    }
}

async fn start_ours(
    engines: &[SocketAddr],
    gateways: usize,
    config: Option<String>,
    folder: TempDir,
) -> Result<RunningRouter> {
    let arguments: Vec<&str> = config.iter().flat_map(|path| ["--config", path]).collect();
    let builder = Stack::builder()
        .servers(0)
        .concurrency(THREADS)
        .daemon_threads(THREADS)
        .daemon_arguments(&arguments)
        .quiet();
    let stack = engines
        .iter()
        .fold(builder, |builder, engine| builder.stranger(*engine))
        .start()
        .await?;
    let second = if gateways > 1 {
        Some(SecondEnvoy::start(&stack, "second", THREADS).await?)
    } else {
        None
    };
    let addresses = std::iter::once(stack.address())
        .chain(second.as_ref().map(|second| second.envoy.listener()))
        .collect();
    let parts = RouterParts::Ours {
        stack: Box::new(stack),
        _second: second,
    };
    Ok(RunningRouter {
        addresses,
        parts,
        _ports: Vec::new(),
        _folder: folder,
    })
}

async fn start_envoy(
    engines: &[SocketAddr],
    gateways: usize,
    fault: EnvoyFault,
    folder: TempDir,
) -> Result<RunningRouter> {
    let mut ports = Vec::new();
    let mut addresses = Vec::new();
    let mut processes = Vec::new();
    for gateway in 0..gateways {
        let port = ReservedPort::lease()?;
        let own = folder.path().join(gateway.to_string());
        std::fs::create_dir(&own)?;
        let mut config = EnvoyConfig::shipped("standalone.yaml")?;
        if let Some(filter) = fault.filter() {
            config.insert_before_picker(filter)?;
        }
        config.make_round_robin(&engines.iter().map(ToString::to_string).collect::<Vec<_>>())?;
        config.replace_port(8080, port.number())?;
        let options = EnvoyOptions {
            concurrency: THREADS,
            ..EnvoyOptions::default()
        };
        processes.push(EnvoyProcess::start(
            &config,
            port.address(),
            port.address(),
            &options,
            &own,
        )?);
        addresses.push(port.address());
        ports.push(port);
    }
    for address in &addresses {
        answers(*address).await?;
    }
    Ok(RunningRouter {
        addresses,
        parts: RouterParts::Envoy(processes),
        _ports: ports,
        _folder: folder,
    })
}

async fn start_dynamo(
    engines: &MockerEngines,
    mode: DynamoMode,
    folder: TempDir,
) -> Result<RunningRouter> {
    let port = ReservedPort::lease()?;
    let mode = if mode == DynamoMode::Kv {
        "kv"
    } else {
        "round-robin"
    };
    let mut process = engines.start_router(mode, port.address(), folder.path())?;
    if let Err(error) = answers(port.address()).await {
        return Err(format!("{error}\n{}", process.log_tail(20)).into());
    }
    process.check_running()?;
    let parts = RouterParts::Rival {
        processes: vec![process],
        adds_by: None,
    };
    Ok(RunningRouter {
        addresses: vec![port.address()],
        parts,
        _ports: vec![port],
        _folder: folder,
    })
}

// === impl EnvoyFault ===

impl EnvoyFault {
    /// Envoy's fault filter with this fault.
    fn filter(self) -> Option<Value> {
        let share = |percent: u32| json!({"numerator": percent, "denominator": "HUNDRED"});
        let mut fault = match self {
            Self::None => return None,
            Self::Delay => json!({"delay": {"fixed_delay": "0.020s", "percentage": share(100)}}),
            Self::Drop => json!({"abort": {"http_status": 503, "percentage": share(2)}}),
        };
        fault["@type"] =
            json!("type.googleapis.com/envoy.extensions.filters.http.fault.v3.HTTPFault");
        Some(json!({"name": "fault", "typed_config": fault}))
    }
}

/// Waits until a chat request is answered.
///
/// # Errors
/// If none is in time.
pub async fn answers(address: SocketAddr) -> Result<()> {
    let body = json!({"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]}).to_string();
    let served = || async {
        client::post(address, "/v1/chat/completions", body.clone())
            .await
            .is_ok_and(|reply| reply.status == 200)
            .then_some(())
    };
    wait_for(START_LIMIT, "the first answer", served).await
}

/// The engines as entries of an endpoints file, named as a stack names them.
fn named(engines: &[SocketAddr]) -> Vec<(String, SocketAddr)> {
    engines
        .iter()
        .enumerate()
        .map(|(index, engine)| (format!("stranger-{index}"), *engine))
        .collect()
}

/// The parameters of `key=number,key=number`.
fn parameters_of(text: &str) -> Result<Value> {
    let pair = |pair: &str| {
        let (key, number) = pair
            .split_once('=')
            .ok_or_else(|| format!("`{pair}` is no key=number"))?;
        Ok::<_, testbed::Error>((key.to_owned(), json!(number.parse::<f64>()?)))
    };
    Ok(Value::Object(
        text.split(',')
            .filter(|text| !text.is_empty())
            .map(pair)
            .collect::<Result<_>>()?,
    ))
}

/// Writes a picker configuration of one profile with these plugins, weights and parameters, or of
/// the default policy if there are none, for engines whose metrics are at `metrics_port`. Returns
/// its path; `None` if there is nothing to configure.
fn write_plugins(
    plugins: &[(&str, u32, Value)],
    metrics_port: Option<u16>,
    folder: &Path,
) -> Result<Option<String>> {
    let source = metrics_port
        .map(|port| json!({"type": "metrics-data-source", "parameters": {"port": port}}));
    let declared = plugins
        .iter()
        .map(|(plugin, _, parameters)| json!({"type": plugin, "parameters": parameters}))
        .chain(source);
    let declared: Vec<Value> = declared.collect();
    if declared.is_empty() {
        return Ok(None);
    }
    let weighed: Vec<Value> = plugins
        .iter()
        .map(|(plugin, weight, _)| json!({"pluginRef": plugin, "weight": weight}))
        .collect();
    let mut config = json!({"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig", "plugins": declared});
    if !weighed.is_empty() {
        config["schedulingProfiles"] = json!([{"name": "default", "plugins": weighed}]);
    }
    let path = folder.join("picker.yaml");
    std::fs::write(&path, config.to_string())?; // JSON is YAML
    Ok(Some(path.display().to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routers_are_found_by_name() {
        assert_eq!(RouterKind::named("smg").expect("a router"), RouterKind::Smg);
        assert_eq!(
            RouterKind::named("ours:ttftWeight=3").expect("a router"),
            RouterKind::OursWith("ttftWeight=3".into())
        );
        assert!(RouterKind::named("nginx").is_err());
    }

    #[test]
    fn the_default_policy_is_kept_where_metrics_have_a_port_of_their_own() {
        let folder = tempfile::tempdir().expect("a folder");
        assert_eq!(
            write_plugins(&[], None, folder.path()).expect("nothing to write"),
            None
        );
        let path = write_plugins(&[], Some(9100), folder.path())
            .expect("a file")
            .expect("a path");
        let config: Value =
            serde_json::from_str(&std::fs::read_to_string(path).expect("the file")).expect("JSON");
        assert_eq!(
            config["plugins"],
            json!([{"type": "metrics-data-source", "parameters": {"port": 9100}}])
        );
        assert_eq!(config["schedulingProfiles"], Value::Null);
    }

    #[test]
    fn parameters_are_numbers_by_name() {
        assert_eq!(
            parameters_of("a=1,b=2.5").expect("parameters"),
            json!({"a": 1.0, "b": 2.5})
        );
        assert!(parameters_of("a").is_err() && parameters_of("a=x").is_err());
    }
}
