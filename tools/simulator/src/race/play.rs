//! Plays cells of the race with routers.

use std::io::Write;
use std::path::Path;

use race_cells::Cell;
use serde_json::{Value, json};

use super::row::{RaceRow, split};
use super::{cell_setting, policy_of};
use crate::parallel::parallel;
use crate::results;
use crate::workload::{Workload, mix};
use crate::world::{self, RequestOutcome};

/// The routers to simulate by default. The race has two routers with round robin, and only one of
/// the two is simulated.
pub(super) const ROUTERS: [&str; 6] = [
    "ours",
    "smg",
    "vllm-cache-aware",
    "envoy-round-robin",
    "llm-d-default",
    "llm-d-recommended",
];

/// The cells, routers and seeds to simulate.
pub(super) struct RacePlan<'a> {
    /// The names of the cells. An empty list means all judged cells.
    pub(super) cells: &'a [String],
    pub(super) routers: &'a [String],
    pub(super) seeds: &'a [u64],
    /// The number of runs with each seed. Later runs have the same sessions a little later, and
    /// other random numbers in the routers.
    pub(super) repeats: u64,
    /// The length of the arrivals, in s.
    pub(super) seconds: f64,
}

/// The delay of the sessions of each run, compared with the run before, in ms.
const LATER_MS: f64 = 37.0;

/// The outcomes of a run's requests. The first list is of cold sessions, which arrive while caches
/// are empty, and the second list is of warm sessions.
type SplitOutcomes = [Vec<RequestOutcome>; 2];

/// Plays the plan, prints its figures and writes them to the file.
///
/// # Errors
/// Fails when no cell or router has a given name, a run fails, or the file cannot be written.
pub(super) fn run(plan: &RacePlan<'_>, threads: usize, file: &Path) -> Result<(), String> {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(
        out,
        "{:<15}{:<32}{:<5}{}",
        "cell",
        "router",
        "row",
        RaceRow::head()
    );
    let mut rows: Vec<Value> = Vec::new();
    for cell in plan.cells()? {
        let numbers: Vec<(u64, u64)> = plan
            .seeds
            .iter()
            .flat_map(|seed| (0..plan.repeats).map(move |run| (*seed, run)))
            .collect();
        let workloads = parallel(threads, &numbers, |(seed, run)| {
            Ok(plan.workload(&cell, *seed, *run))
        })?;
        let played: Vec<(u64, &Workload)> = numbers
            .iter()
            .map(|(seed, run)| mix(*seed, *run))
            .zip(&workloads)
            .collect();
        let jobs: Vec<(&String, (u64, &Workload))> = plan
            .routers
            .iter()
            .flat_map(|router| played.iter().map(move |of_run| (router, *of_run)))
            .collect();
        let outcomes = parallel(threads, &jobs, |(router, (seed, workload))| {
            plan.outcomes(&cell, router, workload, *seed)
        })?;
        for (router, runs) in plan
            .routers
            .iter()
            .zip(outcomes.chunks(played.len().max(1)))
        {
            let parts: [(&str, Vec<Vec<RequestOutcome>>); 3] = [
                ("cold", runs.iter().map(|[cold, _]| cold.clone()).collect()),
                ("warm", runs.iter().map(|[_, warm]| warm.clone()).collect()),
                ("all", runs.iter().map(|run| run.concat()).collect()),
            ];
            for (name, runs) in parts {
                let row = RaceRow::from_runs(&runs, cell_setting(&cell, router, 0.0).replicas);
                let _ = writeln!(out, "{:<15}{router:<32}{name:<5}{}", cell.name, row.line());
                rows.push(json!({ "cell": cell.name, "router": router, "row": name, "figures": row.json() }));
            }
        }
    }
    results::write(
        file,
        &json!({ "seeds": plan.seeds, "repeats": plan.repeats, "arrivals_s": plan.seconds, "rows": rows }),
    )
}

// === impl RacePlan ===

impl RacePlan<'_> {
    fn cells(&self) -> Result<Vec<Cell>, String> {
        if self.cells.is_empty() {
            return Ok(Cell::judged().collect());
        }
        self.cells
            .iter()
            .map(|name| Cell::find(name).ok_or_else(|| format!("there is no cell `{name}`")))
            .collect()
    }

    /// Returns the sessions of a run. The sessions of later runs arrive a little later, so that
    /// scrapes and steps coincide with other requests.
    fn workload(&self, cell: &Cell, seed: u64, run: u64) -> Workload {
        let mut sessions = cell.sessions(seed, self.seconds);
        sessions
            .iter_mut()
            .for_each(|session| session.start_ms += LATER_MS * run as f64);
        Workload::of_sessions(&sessions)
    }

    fn outcomes(
        &self,
        cell: &Cell,
        router: &str,
        workload: &Workload,
        seed: u64,
    ) -> Result<SplitOutcomes, String> {
        let arrivals_ms = self.seconds * 1e3;
        let setting = cell_setting(cell, router, arrivals_ms);
        let outcomes = world::run(workload, &policy_of(router)?, &setting, seed)?;
        Ok(split(workload, &outcomes, arrivals_ms))
    }
}
