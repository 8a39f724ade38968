//! Runs the load generator `oha` once. Reads its figures and the CPU time of the processes under
//! test.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde_json::Value;
use testbed::{Result, root};
use tokio::process::Command;

/// The core to which all processes are pinned in runs with one connection.
const CORE: &str = "0";

/// The load to send to one address.
#[derive(Clone, Debug)]
pub(crate) struct LoadRun {
    pub(crate) target: SocketAddr,
    pub(crate) bodies: PathBuf,
    pub(crate) connections: usize,
    pub(crate) seconds: u32,
    /// The requests/s of an open loop, in which a client sends requests independently of earlier
    /// answers. `None` means a closed loop, in which each connection sends its next request after
    /// the answer to its last request.
    pub(crate) rate: Option<u32>,
    /// Whether to use HTTP/2 without TLS instead of HTTP/1.1.
    pub(crate) http2: bool,
    /// The query of the path, with its `?`. The servers answer as the query says.
    pub(crate) query: &'static str,
    /// The processes whose CPU time is counted: Envoy and the daemon.
    pub(crate) processes: [u32; 2],
    /// Additional headers of each request, as `name: value`.
    pub(crate) headers: &'static [&'static str],
}

#[derive(Clone, Debug, Default)]
pub(crate) struct LoadFigures {
    pub(crate) requests: u64,
    pub(crate) errors: u64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) rps: f64,
    /// The CPU time of Envoy per request, in µs.
    pub(crate) cpu_us: f64,
    /// The CPU time of the daemon per request, in µs.
    pub(crate) daemon_us: f64,
}

// === impl LoadRun ===

impl LoadRun {
    /// Returns a load in which each of `connections` connections uses HTTP/1.1, and sends its next
    /// request after the answer to its last request.
    pub(crate) fn closed_loop(
        target: SocketAddr,
        bodies: PathBuf,
        connections: usize,
        seconds: u32,
        processes: [u32; 2],
    ) -> Self {
        Self {
            target,
            bodies,
            connections,
            seconds,
            rate: None,
            http2: false,
            query: "",
            processes,
            headers: &[],
        }
    }

    /// Runs `oha`. With one connection, `oha` and the processes are pinned to one core. Otherwise
    /// wake-ups across cores would change the median by more than the differences that the bench
    /// measures.
    ///
    /// # Errors
    /// Fails if `oha` is missing or fails.
    pub(crate) async fn run(&self, folder: &Path) -> Result<LoadFigures> {
        let cores = if self.connections == 1 && self.rate.is_none() {
            CORE.to_owned()
        } else {
            all_cores()
        };
        for process in self.processes {
            pin(process, &cores).await?;
        }
        let file = folder.join("oha.json");
        let before = self.cpu()?;
        let mut command = Command::new("taskset");
        command
            .args(["-c", &cores])
            .arg(root().join(".tools/bin/oha"));
        command
            .args([
                "--no-tui",
                "--output-format",
                "json",
                "-m",
                "POST",
                "-T",
                "application/json",
                "-o",
            ])
            .arg(&file);
        command
            .args([
                "-c",
                &self.connections.to_string(),
                "-z",
                &format!("{}s", self.seconds),
                "-w",
                "-Z",
            ])
            .arg(&self.bodies);
        command.args(self.headers.iter().flat_map(|header| ["-H", header]));
        if let Some(rate) = self.rate {
            command.args(["-q", &rate.to_string(), "--latency-correction"]);
        }
        if self.http2 {
            command.arg("--http2");
        }
        let output = command
            .arg(format!(
                "http://{}/v1/chat/completions{}",
                self.target, self.query
            ))
            .output()
            .await?;
        let after = self.cpu()?;
        if !output.status.success() {
            return Err(format!("oha failed: {}", String::from_utf8_lossy(&output.stderr)).into());
        }
        LoadFigures::read(
            &std::fs::read(&file)?,
            [0, 1].map(|process| after[process].saturating_sub(before[process])),
        )
    }

    fn cpu(&self) -> Result<[u64; 2]> {
        Ok([cpu_ns(self.processes[0])?, cpu_ns(self.processes[1])?])
    }
}

// === impl LoadFigures ===

impl LoadFigures {
    #[expect(clippy::cast_precision_loss, reason = "counts of one run")]
    fn read(report: &[u8], [envoy_ns, daemon_ns]: [u64; 2]) -> Result<Self> {
        let report: Value = serde_json::from_slice(report)?;
        let number = |pointer: &str| {
            report
                .pointer(pointer)
                .and_then(Value::as_f64)
                .ok_or(format!("oha's report has no {pointer}"))
        };
        let count = |pointer: &str| {
            let by_kind = report.pointer(pointer).and_then(Value::as_object);
            by_kind.map_or(0, |kinds| {
                kinds.values().filter_map(Value::as_u64).sum::<u64>()
            })
        };
        let ok = report
            .pointer("/statusCodeDistribution/200")
            .and_then(Value::as_u64)
            .unwrap_or(0);
        let errors = count("/statusCodeDistribution") - ok + count("/errorDistribution");
        if ok == 0 {
            return Err(format!("no request succeeded: {report}").into());
        }
        Ok(Self {
            requests: ok + errors,
            errors,
            p50_us: 1e6 * number("/latencyPercentiles/p50")?,
            p99_us: 1e6 * number("/latencyPercentiles/p99")?,
            rps: number("/summary/requestsPerSec")?,
            cpu_us: envoy_ns as f64 / 1e3 / ok as f64,
            daemon_us: daemon_ns as f64 / 1e3 / ok as f64,
        })
    }
}

/// Returns the CPU time of all threads of a process, from the kernel scheduler's clock
/// (`schedstat`), in ns.
///
/// # Errors
/// Fails if no process has this id.
pub(crate) fn cpu_ns(pid: u32) -> Result<u64> {
    cpu_ns_of(pid, |_| true)
}

/// Returns the CPU time of the process's threads whose name satisfies `such`, in ns.
///
/// # Errors
/// Fails if no process has this id.
pub(crate) fn cpu_ns_of(pid: u32, such: impl Fn(&str) -> bool) -> Result<u64> {
    let mut total = 0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let task = task?.path();
        // A thread that has ended since `read_dir` has no name and no time.
        if such(&std::fs::read_to_string(task.join("comm")).unwrap_or_default()) {
            let text = std::fs::read_to_string(task.join("schedstat")).unwrap_or_default();
            total += text
                .split(' ')
                .next()
                .and_then(|ns| ns.parse::<u64>().ok())
                .unwrap_or(0);
        }
    }
    Ok(total)
}

/// Makes all threads of a process run only on these cores.
pub(crate) async fn pin(pid: u32, cores: &str) -> Result<()> {
    Command::new("taskset")
        .args(["-a", "-p", "-c", cores, &pid.to_string()])
        .output()
        .await?;
    Ok(())
}

pub(crate) fn all_cores() -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    format!("0-{}", cores - 1)
}
