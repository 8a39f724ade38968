//! One run of the load generator, and what it and Envoy's CPU clock say of it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use e2e::{Result, root};
use serde_json::Value;
use tokio::process::Command;

/// The core everything is pinned to when there is one connection.
const CORE: &str = "0";

/// A closed loop on one target.
#[derive(Clone, Debug)]
pub(crate) struct Load {
    pub(crate) target: SocketAddr,
    pub(crate) bodies: PathBuf,
    pub(crate) connections: usize,
    pub(crate) seconds: u32,
    pub(crate) envoy: u32,
}

/// What one run gave.
#[derive(Clone, Debug, Default)]
pub(crate) struct Measured {
    pub(crate) requests: u64,
    pub(crate) errors: u64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) rps: f64,
    /// Envoy's CPU time for each request.
    pub(crate) cpu_us: f64,
}

// === impl Load ===

impl Load {
    /// Runs `oha`, pinned with Envoy to one core when there is one connection.
    ///
    /// # Errors
    /// If `oha` is missing or fails.
    pub(crate) async fn run(&self, folder: &Path) -> Result<Measured> {
        let cores = if self.connections == 1 { CORE.to_owned() } else { all_cores() };
        pin(self.envoy, &cores).await?;
        let file = folder.join("oha.json");
        let before = cpu_ns(self.envoy)?;
        let mut command = Command::new("taskset");
        command.args(["-c", &cores]).arg(root().join(".tools/bin/oha"));
        command.args(["--no-tui", "--output-format", "json", "-m", "POST", "-T", "application/json", "-o"]).arg(&file);
        command.args(["-c", &self.connections.to_string(), "-z", &format!("{}s", self.seconds), "-w", "-Z"]).arg(&self.bodies);
        let output = command.arg(format!("http://{}/v1/chat/completions", self.target)).output().await?;
        let after = cpu_ns(self.envoy)?;
        if !output.status.success() {
            return Err(format!("oha failed: {}", String::from_utf8_lossy(&output.stderr)).into());
        }
        Measured::read(&std::fs::read(&file)?, after.saturating_sub(before))
    }
}

// === impl Measured ===

impl Measured {
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
            rps: number("/summary/requestsPerSec")?,
            cpu_us: cpu_ns as f64 / 1e3 / ok as f64,
        })
    }

    /// The median of each figure on its own.
    pub(crate) fn median(runs: &[Self]) -> Self {
        let of = |figure: fn(&Self) -> f64| quantile(runs, figure, 0.5);
        Self { requests: 0, errors: 0, p50_us: of(|r| r.p50_us), p99_us: of(|r| r.p99_us), rps: of(|r| r.rps), cpu_us: of(|r| r.cpu_us) }
    }

    /// Spread of the medians between rounds: how much to trust a difference.
    pub(crate) fn iqr(runs: &[Self]) -> f64 {
        quantile(runs, |r| r.p50_us, 0.75) - quantile(runs, |r| r.p50_us, 0.25)
    }
}

fn quantile(runs: &[Measured], figure: fn(&Measured) -> f64, share: f64) -> f64 {
    let mut values: Vec<f64> = runs.iter().map(figure).collect();
    values.sort_by(f64::total_cmp);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "an index into the values")]
    let index = ((values.len().saturating_sub(1)) as f64 * share).round() as usize;
    values.get(index).copied().unwrap_or(f64::NAN)
}

/// CPU time of all threads of a process, from the scheduler's own clock.
pub(crate) fn cpu_ns(pid: u32) -> Result<u64> {
    let mut total = 0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = std::fs::read_to_string(task?.path().join("schedstat")).unwrap_or_default();
        total += text.split(' ').next().and_then(|ns| ns.parse::<u64>().ok()).unwrap_or(0);
    }
    Ok(total)
}

async fn pin(pid: u32, cores: &str) -> Result<()> {
    Command::new("taskset").args(["-a", "-p", "-c", cores, &pid.to_string()]).output().await?;
    Ok(())
}

fn all_cores() -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    format!("0-{}", cores - 1)
}
