//! The routers that the race compares. The race starts each router as its users start it, in front
//! of running engines.
//!
//! Every router has two threads: two workers of Envoy, or two threads of a rival's runtime.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;

use serde_json::json;
use tempfile::TempDir;
use testbed::envoy::EnvoyProcess;
use testbed::ports::ReservedPort;
use testbed::process::ChildProcess;
use testbed::second_envoy::SecondEnvoy;
use testbed::stack::Stack;
use testbed::{Result, client, root};

mod picker_config;
mod start;

use picker_config::{parameters_of, write_plugins};
use start::{start_dynamo, start_envoy, start_ours};

use crate::mocker::{self, MockerEngines};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RouterKind {
    /// Switchpoint with its default configuration.
    Ours,
    /// A second run of Switchpoint, which shows how much two equal routers differ.
    OursAgain,
    /// Switchpoint with other parameters of `marginal-cost-scorer`, such as `ours:ttftWeight=3`.
    OursWith(String),
    /// Switchpoint with scorers and weights that llm-d ships.
    LlmD(LlmDProfile),
    /// SGLang's model gateway, with its policy `cache_aware`.
    Smg,
    /// vLLM's router, with one of its policies.
    VllmRouter(VllmRouterPolicy),
    /// Envoy without a picker, which balances by round robin and may inject a fault.
    EnvoyRoundRobin(EnvoyFault),
    /// Dynamo's own frontend, which works only with Dynamo's engines.
    Dynamo(DynamoMode),
}

/// Modes of Dynamo's frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DynamoMode {
    /// Dynamo picks an engine by the KV events of the engines and by their load.
    Kv,
    /// Dynamo uses one engine after another. A cell's load is a share of the capacity of Dynamo's
    /// engines, which was measured in this mode.
    RoundRobin,
}

#[derive(Clone, Copy, Debug)]
pub struct RouterEngines<'a> {
    pub addresses: &'a [SocketAddr],
    /// The engines as processes, if they are Dynamo's mockers.
    pub mockers: Option<&'a MockerEngines>,
}

/// The configurations of llm-d that Switchpoint runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LlmDProfile {
    /// llm-d's default: queue scorer with weight 2, KV cache scorer with weight 2, prefix scorer
    /// with weight 3.
    Default,
    /// `prefix-cache-affinity-filter` and `token-load-scorer`, which llm-d has recommended since
    /// August 2026.
    Recommended,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VllmRouterPolicy {
    /// The policy with an approximate prefix tree for each engine.
    CacheAware,
    /// The policy that uses one engine after another.
    RoundRobin,
}

/// A fault that the race adds with Envoy's fault filter, and that the results must show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EnvoyFault {
    None,
    /// Each request waits for 20 ms before Envoy sends it to an engine.
    Delay,
    /// Envoy answers two of a hundred requests with 503.
    Drop,
}

#[derive(Debug)]
pub struct RunningRouter {
    /// The address of each gateway process, to which clients connect.
    pub addresses: Vec<SocketAddr>,
    parts: RouterParts,
    _ports: Vec<ReservedPort>,
    _folder: TempDir,
}

#[derive(Debug)]
enum RouterParts {
    Ours {
        stack: Box<Stack>,
        _second: Option<Box<SecondEnvoy>>,
    },
    Rival {
        processes: Vec<ChildProcess>,
        adds_by: Option<AddWorker>,
    },
    Envoy(Vec<EnvoyProcess>),
}

/// The call by which the race adds a new engine to a rival.
#[derive(Clone, Copy, Debug)]
enum AddWorker {
    /// `POST /workers` with a JSON body.
    Workers,
    /// `POST /add_worker?url=`.
    AddWorkerUrl,
}

// === impl RouterKind ===

impl RouterKind {
    /// Returns the router with this name.
    ///
    /// # Errors
    /// Fails if no router has this name.
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

    /// Returns the name of the folder below `.tools/race` with the rival's virtual environment, or
    /// `None` for routers that need no virtual environment.
    #[must_use]
    pub const fn tool(&self) -> Option<&'static str> {
        match self {
            Self::Smg => Some("smg"),
            Self::VllmRouter(_) => Some("vllm-router"),
            Self::Dynamo(_) => Some(mocker::TOOL),
            _ => None,
        }
    }

    fn program(&self) -> Option<PathBuf> {
        self.tool()
            .map(|tool| root().join(".tools/race").join(tool).join("bin").join(tool))
    }

    /// Whether the router can run: a rival cannot run if its package is not installed.
    #[must_use]
    pub fn is_installed(&self) -> bool {
        match self {
            Self::Dynamo(_) => MockerEngines::is_installed(),
            _ => self.program().is_none_or(|program| program.is_file()),
        }
    }

    /// Returns the version of the rival's package, or the commit of this checkout if the router is
    /// not a rival from a package.
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

    /// Starts `gateways` processes of the router in front of the engines.
    ///
    /// # Errors
    /// Fails if the router does not start.
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
}

// === impl RunningRouter ===

impl RunningRouter {
    /// Adds the engine `added` to the router's pool, which then has the engines `engines`.
    ///
    /// # Errors
    /// Fails if the router refuses the engine, or cannot add engines while it runs.
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

    /// Checks that all processes of the router run.
    ///
    /// # Errors
    /// Fails if a process has ended.
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

/// Returns the engines as entries of an endpoints file, with the names that a [`Stack`] gives such
/// engines.
fn named(engines: &[SocketAddr]) -> Vec<(String, SocketAddr)> {
    engines
        .iter()
        .enumerate()
        .map(|(index, engine)| (format!("stranger-{index}"), *engine))
        .collect()
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
}
