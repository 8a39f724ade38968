//! One run of the load generator, and what it and the CPU clocks say of it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde_json::Value;
use testbed::{Result, root};
use tokio::process::Command;

/// The core everything is pinned to when there is one connection.
const CORE: &str = "0";

/// Load on one target.
#[derive(Clone, Debug)]
pub(crate) struct LoadRun {
    pub(crate) target: SocketAddr,
    pub(crate) bodies: PathBuf,
    pub(crate) connections: usize,
    pub(crate) seconds: u32,
    /// Requests/s that come whether the ones before are answered or not; without, each connection asks when it has its answer.
    pub(crate) rate: Option<u32>,
    /// Whose CPU is counted.
    pub(crate) processes: [u32; 2],
    /// Further headers, `name: value`.
    pub(crate) headers: &'static [&'static str],
}

/// What one run gave.
#[derive(Clone, Debug, Default)]
pub(crate) struct LoadFigures {
    pub(crate) requests: u64,
    pub(crate) errors: u64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) p999_us: f64,
    pub(crate) rps: f64,
    /// CPU time of the processes for each request.
    pub(crate) cpu_us: f64,
}

// === impl LoadRun ===

impl LoadRun {
    /// Runs `oha`, pinned with the processes to one core when there is one connection: unpinned, wake-ups across cores move the median by more than what is
    /// looked for.
    ///
    /// # Errors
    /// If `oha` is missing or fails.
    pub(crate) async fn run(&self, folder: &Path) -> Result<LoadFigures> {
        let cores = if self.connections == 1 && self.rate.is_none() { CORE.to_owned() } else { all_cores() };
        for process in self.processes {
            pin(process, &cores).await?;
        }
        let file = folder.join("oha.json");
        let before = self.cpu_ns()?;
        let mut command = Command::new("taskset");
        command.args(["-c", &cores]).arg(root().join(".tools/bin/oha"));
        command.args(["--no-tui", "--output-format", "json", "-m", "POST", "-T", "application/json", "-o"]).arg(&file);
        command.args(["-c", &self.connections.to_string(), "-z", &format!("{}s", self.seconds), "-w", "-Z"]).arg(&self.bodies);
        command.args(self.headers.iter().flat_map(|header| ["-H", header]));
        if let Some(rate) = self.rate {
            command.args(["-q", &rate.to_string(), "--latency-correction"]);
        }
        let output = command.arg(format!("http://{}/v1/chat/completions", self.target)).output().await?;
        let after = self.cpu_ns()?;
        if !output.status.success() {
            return Err(format!("oha failed: {}", String::from_utf8_lossy(&output.stderr)).into());
        }
        LoadFigures::read(&std::fs::read(&file)?, after.saturating_sub(before))
    }

    fn cpu_ns(&self) -> Result<u64> {
        self.processes.iter().map(|process| cpu_ns(*process)).sum()
    }
}

// === impl LoadFigures ===

impl LoadFigures {
    #[expect(clippy::cast_precision_loss, reason = "counts of one run")]
    fn read(report: &[u8], cpu_ns: u64) -> Result<Self> {
        let report: Value = serde_json::from_slice(report)?;
        let number = |pointer: &str| report.pointer(pointer).and_then(Value::as_f64).ok_or(format!("oha's report has no {pointer}"));
        let count = |pointer: &str| {
            let by_kind = report.pointer(pointer).and_then(Value::as_object);
            by_kind.map_or(0, |kinds| kinds.values().filter_map(Value::as_u64).sum::<u64>())
        };
        let ok = report.pointer("/statusCodeDistribution/200").and_then(Value::as_u64).unwrap_or(0);
        let errors = count("/statusCodeDistribution") - ok + count("/errorDistribution");
        if ok == 0 {
            return Err(format!("no request succeeded: {report}").into());
        }
        Ok(Self {
            requests: ok + errors,
            errors,
            p50_us: 1e6 * number("/latencyPercentiles/p50")?,
            p99_us: 1e6 * number("/latencyPercentiles/p99")?,
            p999_us: 1e6 * number("/latencyPercentiles/p99.9")?,
            rps: number("/summary/requestsPerSec")?,
            cpu_us: cpu_ns as f64 / 1e3 / ok as f64,
        })
    }
}

/// CPU time of all threads of a process, from the scheduler's own clock.
///
/// # Errors
/// If there is no such process.
pub(crate) fn cpu_ns(pid: u32) -> Result<u64> {
    cpu_ns_of(pid, |_| true)
}

/// The same of the threads whose names are such.
///
/// # Errors
/// If there is no such process.
pub(crate) fn cpu_ns_of(pid: u32, such: impl Fn(&str) -> bool) -> Result<u64> {
    let mut total = 0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let task = task?.path();
        // A thread that ends meanwhile has no name and no time.
        if such(&std::fs::read_to_string(task.join("comm")).unwrap_or_default()) {
            let text = std::fs::read_to_string(task.join("schedstat")).unwrap_or_default();
            total += text.split(' ').next().and_then(|ns| ns.parse::<u64>().ok()).unwrap_or(0);
        }
    }
    Ok(total)
}

/// Lets a process run on these cores only.
pub(crate) async fn pin(pid: u32, cores: &str) -> Result<()> {
    Command::new("taskset").args(["-a", "-p", "-c", cores, &pid.to_string()]).output().await?;
    Ok(())
}

pub(crate) fn all_cores() -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    format!("0-{}", cores - 1)
}
