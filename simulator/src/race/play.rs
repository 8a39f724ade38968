//! Plays cells with policies.

use std::io::Write;
use std::path::Path;

use race_cells::{Cell, CellChange};
use serde_json::{Value, json};

use super::cell_setting;
use super::row::{RaceRow, split};
use crate::grid::parallel;
use crate::policy::RoutingPolicy;
use crate::workload::Workload;
use crate::world::{self, RequestOutcome};

/// The policies of the race.
pub(super) const POLICIES: [&str; 6] = ["ours", "smg", "vllm-router", "round-robin", "2/2/3", "2/2/3/2"];

/// What is played.
pub(super) struct RacePlan<'a> {
    /// Names; empty for all that can be played.
    pub(super) cells: &'a [String],
    pub(super) policies: &'a [String],
    pub(super) seeds: &'a [u64],
    /// Seconds of arrivals.
    pub(super) seconds: f64,
}

/// The outcomes of a run: cold and warm.
type SplitOutcomes = [Vec<RequestOutcome>; 2];

const PARTS: [&str; 2] = ["cold", "warm"];

/// Plays the plan, prints its figures and writes them to the file.
///
/// # Errors
/// When there is no such cell or policy, a run fails, or the file cannot be written.
pub(super) fn run(plan: &RacePlan<'_>, threads: usize, file: &Path) -> Result<(), String> {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{:<15}{:<32}{:<5}{}", "cell", "policy", "row", RaceRow::head());
    let mut rows: Vec<Value> = Vec::new();
    for cell in plan.cells()? {
        let workloads = parallel(threads, plan.seeds, |&seed| Ok(Workload::of_sessions(&cell.sessions(seed, plan.seconds))))?;
        let jobs: Vec<(&String, (&u64, &Workload))> =
            plan.policies.iter().flat_map(|policy| plan.seeds.iter().zip(&workloads).map(move |of_seed| (policy, of_seed))).collect();
        let outcomes = parallel(threads, &jobs, |(policy, (seed, workload))| plan.outcomes(&cell, policy, workload, **seed))?;
        for (policy, of_seeds) in plan.policies.iter().zip(outcomes.chunks(plan.seeds.len().max(1))) {
            for (part, name) in PARTS.into_iter().enumerate() {
                let all: Vec<RequestOutcome> = of_seeds.iter().filter_map(|split| split.get(part)).flatten().copied().collect();
                let row = RaceRow::of(&all, cell.engines.count);
                let _ = writeln!(out, "{:<15}{policy:<32}{name:<5}{}", cell.name, row.line());
                rows.push(json!({ "cell": cell.name, "policy": policy, "row": name, "figures": row.json() }));
            }
        }
    }
    write(file, &json!({ "seeds": plan.seeds, "arrivals_s": plan.seconds, "rows": rows }))
}

fn write(file: &Path, value: &Value) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("{}: {error}", file.display());
    file.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(failed)?;
    std::fs::write(file, format!("{value:#}\n")).map_err(failed)
}

// === impl RacePlan ===

impl RacePlan<'_> {
    fn cells(&self) -> Result<Vec<Cell>, String> {
        // A pool here cannot lose an engine with the requests on it, and has engines like ours.
        let is_played = |cell: &Cell| cell.change == CellChange::None && !cell.is_dynamo();
        if self.cells.is_empty() {
            return Ok(Cell::all().filter(is_played).collect());
        }
        let find = |name: &String| Cell::find(name).filter(is_played).ok_or_else(|| format!("no cell `{name}` can be played"));
        self.cells.iter().map(find).collect()
    }

    fn outcomes(&self, cell: &Cell, policy: &str, workload: &Workload, seed: u64) -> Result<SplitOutcomes, String> {
        let outcomes = world::run(workload, workload.rate, &RoutingPolicy::named(policy)?, &cell_setting(cell, policy), seed)?;
        Ok(split(workload, &outcomes, self.seconds * 1e3))
    }
}
