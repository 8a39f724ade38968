//! Measures the load of this machine, which must not limit the comparison.

use std::time::{Duration, Instant};

use crate::policy::DemoPolicy;

/// Ticks per second of the kernel's CPU counters (`USER_HZ`): 100 on all common systems.
const TICKS_PER_SECOND: f64 = 100.0;

/// The maximum busy share of the machine at which the measured times are valid, 0 to 1.
const BUSY_MAX: f64 = 0.9;

/// The maximum delay of a request behind its arrival time at which the measured times are valid.
const LATE_MAX: Duration = Duration::from_millis(100);

/// Measures how busy the machine is, and how much CPU the demo's own processes use. The meter needs
/// Linux, and reports nothing on other systems.
pub(crate) struct CpuMeter {
    start: Instant,
    processes: Vec<u32>,
    /// Busy and total ticks of all cores at the start.
    machine: Option<(u64, u64)>,
    /// Ticks of the demo's processes at the start.
    own: u64,
}

// === impl CpuMeter ===

impl CpuMeter {
    /// Starts to measure; `others` are the ids of the demo's other processes.
    pub(crate) fn start(others: &[u32]) -> Self {
        let processes: Vec<u32> = others.iter().copied().chain([std::process::id()]).collect();
        Self {
            start: Instant::now(),
            own: ticks(&processes),
            machine: machine(),
            processes,
        }
    }

    /// Returns the busy share of all cores since the start, 0 to 1.
    #[expect(clippy::cast_precision_loss, reason = "ticks stay far below 2^52")]
    pub(crate) fn busy_so_far(&self) -> Option<f64> {
        let ((busy, total), (busy_now, total_now)) = (self.machine?, machine()?);
        Some(busy_now.saturating_sub(busy) as f64 / total_now.saturating_sub(total).max(1) as f64)
    }

    /// Returns a line about the whole run, with a warning if the machine was too slow.
    #[expect(clippy::cast_precision_loss, reason = "ticks stay far below 2^52")]
    pub(crate) fn finish(&mut self, policies: &[DemoPolicy]) -> String {
        let late = policies
            .iter()
            .map(|policy| policy.figures().late_max)
            .max()
            .unwrap_or_default();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let own = ticks(&self.processes).saturating_sub(self.own) as f64
            / TICKS_PER_SECOND
            / self.start.elapsed().as_secs_f64().max(1e-9);
        let busy = self.busy_so_far();
        let cpu = busy.map_or_else(String::new, |busy| {
            format!("CPU: the demo used {own:.2} of {cores} cores; the whole machine was {:.0} % busy.\n", 100.0 * busy)
        });
        let warning = if busy.is_some_and(|busy| busy > BUSY_MAX) || late > LATE_MAX {
            "\nThis machine was too busy, which adds to the times above. Repeat when it is idle."
        } else {
            ""
        };
        format!(
            "{cpu}Requests were sent at most {} ms late.{warning}",
            late.as_millis()
        )
    }
}

/// Returns the busy and total ticks of all cores since boot.
fn machine() -> Option<(u64, u64)> {
    let text = std::fs::read_to_string("/proc/stat").ok()?;
    let fields: Vec<u64> = text
        .lines()
        .next()?
        .split_whitespace()
        .skip(1)
        .take(8)
        .filter_map(|field| field.parse().ok())
        .collect();
    let idle: u64 = fields.iter().skip(3).take(2).sum(); // the ticks of idle cores, and of cores that wait for I/O
    let total: u64 = fields.iter().sum();
    Some((total - idle, total))
}

/// Returns the ticks that these processes have used.
fn ticks(processes: &[u32]) -> u64 {
    let used = |id: &u32| {
        let text = std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
        // User and system time are the 12th and 13th field after the name in parentheses.
        let fields = text.rsplit_once(')')?.1.split_whitespace().skip(11).take(2);
        Some(
            fields
                .filter_map(|field| field.parse::<u64>().ok())
                .sum::<u64>(),
        )
    };
    processes.iter().filter_map(used).sum()
}
