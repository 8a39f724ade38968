//! Runs Dynamo's mockers: simulated engines that we did not write, with their own scheduler, KV
//! cache and speed.
//!
//! A mocker understands only Dynamo's request plane, and not HTTP. So for other routers, each
//! mocker gets a Dynamo frontend, and the pair is an OpenAI server. For Dynamo's own router, all
//! mockers belong to one component, and a single frontend in front of them is the router.
//!
//! All sockets of a run are in its network namespace, so addresses and ports are constants.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;
use testbed::process::ChildProcess;
use testbed::{Result, client, root};

use crate::record::EngineRecord;
use crate::serving::{MODEL, THREADS, answers};

/// The folder of Dynamo's virtual environment in `.tools/race`.
pub const TOOL: &str = "ai-dynamo";
/// The port on which the frontend of one mocker receives requests.
const HTTP_PORT: u16 = 8000;
/// The port of a mocker's metrics page.
pub const METRICS_PORT: u16 = 9100;
/// The options of a mocker. The mocker keeps its default speed, and runs as many sequences at the
/// same time as most of our engines. A mocker's blocks hold 262,144 tokens (670 KB of text); the
/// blocks of our engines hold a megabyte of text. Both are enough for the contexts of a dozen
/// agents.
const MOCKER_OPTIONS: [&str; 6] = [
    "--max-num-seqs",
    "24",
    "--block-size",
    "32",
    "--num-gpu-blocks-override",
    "8192",
];
/// The metric on a mocker's metrics page that counts finished requests: the count of a histogram.
const FINISHED: &str = "vllm:e2e_request_latency_seconds_count{";
/// The pause before the metrics page is read, because a mocker counts a reply only some time after
/// its end.
const SETTLE: Duration = Duration::from_secs(1);

/// The path of requests to the mockers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MockerFront {
    /// Each mocker has its own frontend.
    OneEach,
    /// All mockers share one frontend, which is the router that the race measures.
    Shared,
}

/// Running mockers, and their frontends if each has one.
#[derive(Debug)]
pub struct MockerEngines {
    hosts: Vec<Ipv4Addr>,
    processes: Vec<ChildProcess>,
    folder: TempDir,
}

// === impl MockerEngines ===

impl MockerEngines {
    /// Whether Dynamo and the model are installed.
    #[must_use]
    pub fn is_installed() -> bool {
        python().is_file() && model().join("config.json").is_file()
    }

    /// Starts `count` mockers.
    ///
    /// # Errors
    /// Fails if a mocker does not start, or does not answer.
    pub async fn start(count: usize, front: MockerFront) -> Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("switchpoint-dynamo-")
            .tempdir()?;
        std::fs::create_dir(folder.path().join(DISCOVERY))?;
        let hosts = (11..)
            .take(count)
            .map(|last| Ipv4Addr::new(127, 0, 0, last))
            .collect();
        let mut engines = Self {
            hosts,
            processes: Vec::new(),
            folder,
        };
        for (index, host) in engines.hosts.clone().into_iter().enumerate() {
            let namespace = if front == MockerFront::OneEach {
                format!("engine{index}")
            } else {
                SHARED.to_owned()
            };
            engines.spawn(&format!("mocker-{index}"), mocker(host, &namespace))?;
            if front == MockerFront::OneEach {
                engines.spawn(
                    &format!("frontend-{index}"),
                    frontend(
                        &namespace,
                        "round-robin",
                        SocketAddr::from((host, HTTP_PORT)),
                    ),
                )?;
            }
        }
        if front == MockerFront::OneEach {
            for address in engines.addresses() {
                // A mocker's metrics appear only with its first request.
                let answered = answers(address).await;
                answered.map_err(|error| format!("{error}\n{}", engines.log_tail()))?;
            }
        }
        Ok(engines)
    }

    /// Starts the frontend that routes to all mockers. The frontend answers once it has found all
    /// mockers.
    ///
    /// # Errors
    /// Fails if the program cannot be run.
    pub fn start_router(
        &self,
        mode: &str,
        address: SocketAddr,
        folder: &Path,
    ) -> Result<ChildProcess> {
        let mut command = frontend(SHARED, mode, address);
        command.args([
            "--router-min-initial-workers",
            &self.hosts.len().to_string(),
        ]);
        command.env("DYN_RUNTIME_NUM_WORKER_THREADS", THREADS.to_string());
        ChildProcess::spawn("dynamo", &mut self.in_discovery(command), folder)
    }

    /// Returns the addresses of the mockers' frontends, if each mocker has one.
    #[must_use]
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.hosts
            .iter()
            .map(|host| SocketAddr::from((*host, HTTP_PORT)))
            .collect()
    }

    /// Waits until the metrics pages are current, and returns how many requests each engine has
    /// finished. The counts of prompt tokens are missing, because only the replies have them.
    ///
    /// # Errors
    /// Fails if a page cannot be read.
    pub async fn count(&self) -> Result<Vec<EngineRecord>> {
        tokio::time::sleep(SETTLE).await;
        let mut counts = Vec::new();
        for host in &self.hosts {
            let page = client::get(SocketAddr::from((*host, METRICS_PORT)), "/metrics")
                .await?
                .text();
            counts.push(EngineRecord {
                requests: finished(&page),
                ..EngineRecord::default()
            });
        }
        Ok(counts)
    }

    /// Checks that all processes run.
    ///
    /// # Errors
    /// Fails if a process has ended.
    pub fn check_running(&mut self) -> Result<()> {
        self.processes
            .iter_mut()
            .try_for_each(ChildProcess::check_running)
    }

    fn spawn(&mut self, name: &str, command: Command) -> Result<()> {
        let own = self.folder.path().join(name);
        std::fs::create_dir(&own)?;
        self.processes.push(ChildProcess::spawn(
            "dynamo",
            &mut self.in_discovery(command),
            &own,
        )?);
        Ok(())
    }

    /// Makes the process find the others by files, and keep its traffic on the loopback interface.
    fn in_discovery(&self, mut command: Command) -> Command {
        command.env("HF_HUB_OFFLINE", "1");
        command
            .env("DYN_DISCOVERY_BACKEND", "file")
            .env("DYN_FILE_KV", self.folder.path().join(DISCOVERY));
        for variable in [
            "DYN_TCP_RPC_HOST",
            "DYN_TCP_RESPONSE_STREAM_HOST",
            "DYN_EVENT_PLANE_HOST",
        ] {
            command.env(variable, Ipv4Addr::LOCALHOST.to_string());
        }
        command
    }

    fn log_tail(&self) -> String {
        self.processes
            .iter()
            .map(|process| process.log_tail(10))
            .collect()
    }
}

/// The name of the folder with the files by which Dynamo's processes find each other.
const DISCOVERY: &str = "discovery";
/// The Dynamo namespace of mockers that share one frontend.
const SHARED: &str = "pool";

fn python() -> PathBuf {
    root().join(".tools/race").join(TOOL).join("bin/python")
}

/// Returns the folder of a model without weights (a tokenizer and a configuration), which
/// `tools/race/vllm/install.py` makes.
fn model() -> PathBuf {
    root().join(".tools/race/models/words")
}

fn mocker(host: Ipv4Addr, namespace: &str) -> Command {
    let mut command = Command::new(python());
    command
        .args(["-m", "dynamo.mocker", "--model-name", MODEL, "--model-path"])
        .arg(model());
    command
        .args(["--endpoint", &format!("dyn://{namespace}.backend.generate")])
        .args(MOCKER_OPTIONS);
    command.env("DYN_NAMESPACE", namespace);
    command
        .env("DYN_SYSTEM_HOST", host.to_string())
        .env("DYN_SYSTEM_PORT", METRICS_PORT.to_string());
    command
}

fn frontend(namespace: &str, mode: &str, address: SocketAddr) -> Command {
    let mut command = Command::new(python());
    command.args([
        "-m",
        "dynamo.frontend",
        "--router-mode",
        mode,
        "--namespace",
        namespace,
    ]);
    command.args([
        "--http-host",
        &address.ip().to_string(),
        "--http-port",
        &address.port().to_string(),
    ]);
    command
}

/// Returns the number of finished requests on a mocker's metrics page, which is 0 before the first
/// request.
fn finished(page: &str) -> u64 {
    let values = page
        .lines()
        .filter(|line| line.starts_with(FINISHED))
        .filter_map(|line| line.rsplit(' ').next());
    values
        .filter_map(|value| value.parse::<f64>().ok())
        .sum::<f64>() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finished_requests_are_those_of_the_histogram_of_request_times() {
        let page = concat!(
            "vllm:e2e_request_latency_seconds_bucket{engine=\"0\",le=\"+Inf\"} 67\n",
            "vllm:e2e_request_latency_seconds_sum{engine=\"0\"} 362.5\n",
            "vllm:e2e_request_latency_seconds_count{engine=\"0\",model_name=\"demo\"} 67\n",
        );
        assert_eq!(
            (finished(page), finished("dynamo_uptime_seconds 4\n")),
            (67, 0)
        );
    }
}
