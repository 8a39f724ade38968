//! The result of each cell, small enough to be committed: `docs/data/race.json`.
//!
//! Each cell is judged separately, so that a race of two hours can run in parts. Each result names
//! the versions of the routers that ran.

use std::collections::BTreeMap;
use std::path::Path;

use race_cells::Cell;
use serde::{Deserialize, Serialize};
use testbed::Result;

use crate::campaign::RouterGroup;
use crate::judge::{CachePhase, RaceFigure, RaceVerdict, RouterRatio};
use crate::record::RunRecord;

/// The name of Switchpoint as a router.
pub const OURS: &str = "ours";
/// The name of Switchpoint's second run.
pub const AGAIN: &str = "ours-again";

/// The results of the routers that ran side by side in one cell. A result is computed from the
/// requests of all seeds together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CellResult {
    pub cell: String,
    pub group: String,
    /// The seeds for which every router has a run.
    pub seeds: Vec<u64>,
    /// The length of the arrivals, in s.
    pub arrivals_s: f64,
    /// The results of the routers. The first router is Switchpoint.
    pub routers: Vec<RouterResult>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RouterResult {
    pub router: String,
    /// The version of the router. If the runs have several versions, all of them in the order of
    /// the seeds.
    pub version: String,
    pub requests: usize,
    pub failures: usize,
    /// The share of the prompt tokens that engines had cached: by their counts, or by the replies
    /// if the engines do not count.
    pub hit_rate: f64,
    /// The requests of the busiest engine divided by the mean over all engines. The value is the
    /// mean over the seeds.
    pub busiest: f64,
    /// The figures of the first sessions, which arrived when caches were empty, in ms.
    pub cold: Vec<FigureResult>,
    /// The figures of all other sessions, in ms.
    pub warm: Vec<FigureResult>,
}

/// One figure of one router, and Switchpoint's ratio to it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FigureResult {
    pub ms: f64,
    /// The ratio of Switchpoint's figure to this router's figure, and the ends of the ratio's
    /// interval: ratio, low, high. `None` for Switchpoint itself.
    pub ours_over: Option<[f64; 3]>,
    /// `faster`, `equal` or `slower`: Switchpoint compared with this router. `None` for Switchpoint
    /// itself.
    pub verdict: Option<String>,
}

/// The results of all cells, in the order of the cells.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RaceResults {
    /// One result for each cell and group of routers.
    pub cells: Vec<CellResult>,
}

// === impl RaceResults ===

impl RaceResults {
    /// Reads the results. Returns empty results if the file does not exist.
    ///
    /// # Errors
    /// Fails if the file has another form.
    pub fn read(path: &Path) -> Result<Self> {
        match std::fs::read_to_string(path) {
            Ok(text) => Ok(serde_json::from_str(&text)
                .map_err(|error| format!("{}: {error}", path.display()))?),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the results as JSON, with one line for each cell.
    ///
    /// # Errors
    /// Fails if a result cannot be written as JSON.
    pub fn to_lines(&self) -> Result<String> {
        let cells: Vec<String> = self
            .cells
            .iter()
            .map(serde_json::to_string)
            .collect::<std::result::Result<_, _>>()?;
        Ok(format!("{{\"cells\":[\n{}\n]}}\n", cells.join(",\n")))
    }

    /// Adds the result of a cell, in place of an earlier result of the same cell and group.
    pub fn put(&mut self, result: CellResult) {
        self.cells
            .retain(|other| (&other.cell, &other.group) != (&result.cell, &result.group));
        self.cells.push(result);
        let order: Vec<&str> = Cell::all().map(|cell| cell.name).collect();
        self.cells.sort_by_key(|result| {
            (
                order.iter().position(|name| *name == result.cell),
                result.group.clone(),
            )
        });
    }

    pub fn of_group<'a>(&'a self, group: &'a str) -> impl Iterator<Item = &'a CellResult> {
        self.cells
            .iter()
            .filter(move |result| result.group == group)
    }
}

// === impl CellResult ===

impl CellResult {
    /// Judges the runs of a cell below `folder`. Returns `None` if no seed has a run of Switchpoint
    /// and of all other routers that have runs.
    ///
    /// # Errors
    /// Fails if a run cannot be read.
    pub fn of_runs(folder: &Path, cell: &Cell, group: &RouterGroup) -> Result<Option<Self>> {
        let mut by_router: BTreeMap<&str, Vec<RunRecord>> = BTreeMap::new();
        let in_cell = folder.join(group.name).join(cell.name);
        for seed in seeds_in(&in_cell) {
            for router in &group.routers {
                let run = RunRecord::read(&RunRecord::path(
                    &folder.join(group.name),
                    cell.name,
                    seed,
                    router,
                ))?;
                by_router.entry(router).or_default().extend(run);
            }
        }
        by_router.retain(|_, runs| !runs.is_empty());
        let Some(ours) = by_router.get(OURS).filter(|_| by_router.len() > 1) else {
            return Ok(None);
        };
        let seeds: Vec<u64> = ours
            .iter()
            .map(|run| run.seed)
            .filter(|seed| {
                by_router
                    .values()
                    .all(|runs| runs.iter().any(|run| run.seed == *seed))
            })
            .collect();
        let chosen = |router: &str| -> Vec<&RunRecord> {
            by_router
                .get(router)
                .into_iter()
                .flatten()
                .filter(|run| seeds.contains(&run.seed))
                .collect()
        };
        if seeds.is_empty() {
            return Ok(None);
        }
        let ours = chosen(OURS);
        let again = chosen(AGAIN);
        let present = group
            .routers
            .iter()
            .filter(|router| by_router.contains_key(router.as_str()));
        let routers = present
            .map(|router| RouterResult::judge(&chosen(router), &ours, &again))
            .collect();
        let arrivals_s = ours.first().map_or(0.0, |run| run.arrivals_s);
        Ok(Some(Self {
            cell: cell.name.to_owned(),
            group: group.name.to_owned(),
            seeds: seeds.clone(),
            arrivals_s,
            routers,
        }))
    }
}

// === impl RouterResult ===

impl RouterResult {
    fn judge(runs: &[&RunRecord], ours: &[&RunRecord], again: &[&RunRecord]) -> Self {
        let first = runs.first();
        let is_ours = first.is_none_or(|run| run.router == OURS);
        let busiest = |run: &&RunRecord| {
            let most = run
                .engines
                .iter()
                .map(|engine| engine.requests)
                .max()
                .unwrap_or(0) as f64;
            most * run.engines.len() as f64
                / run
                    .engines
                    .iter()
                    .map(|engine| engine.requests)
                    .sum::<u64>()
                    .max(1) as f64
        };
        let figures = |row: CachePhase| {
            RaceFigure::ALL.map(|figure| {
                let ratio = if is_ours {
                    None
                } else {
                    figure.ratio(row, ours, runs)
                };
                let same = figure.ratio(row, ours, again);
                FigureResult::compare(
                    figure.compute(runs.iter().flat_map(|run| row.requests(run))),
                    ratio,
                    same,
                )
            })
        };
        Self {
            router: first.map_or_else(String::new, |run| run.router.clone()),
            version: versions(runs),
            requests: runs.iter().map(|run| run.requests.len()).sum(),
            failures: runs.iter().map(|run| run.failures()).sum(),
            hit_rate: round(
                runs.iter().map(|run| run.hit_rate()).sum::<f64>() / runs.len().max(1) as f64,
            ),
            busiest: round(runs.iter().map(busiest).sum::<f64>() / runs.len().max(1) as f64),
            cold: figures(CachePhase::Cold).into(),
            warm: figures(CachePhase::Warm).into(),
        }
    }
}

// === impl FigureResult ===

impl FigureResult {
    fn compare(ms: f64, ratio: Option<RouterRatio>, same: Option<RouterRatio>) -> Self {
        let verdict = ratio
            .map(|ratio| ratio.verdict(same))
            .map(|verdict| match verdict {
                RaceVerdict::Faster => "faster".to_owned(),
                RaceVerdict::Equal => "equal".to_owned(),
                RaceVerdict::Slower => "slower".to_owned(),
            });
        let ms = if ms.is_finite() {
            (ms * 10.0).round() / 10.0
        } else {
            0.0
        };
        Self {
            ms,
            ours_over: ratio.map(|ratio| [ratio.ratio, ratio.low, ratio.high].map(round)),
            verdict,
        }
    }
}

fn round(value: f64) -> f64 {
    if value.is_finite() {
        (value * 1e3).round() / 1e3
    } else {
        0.0
    }
}

/// Returns the versions of these runs, without repetitions.
fn versions(runs: &[&RunRecord]) -> String {
    let mut versions: Vec<&str> = Vec::new();
    for run in runs {
        if !versions.contains(&run.version.as_str()) {
            versions.push(&run.version);
        }
    }
    versions.join(" ")
}

/// Returns the seeds for which the folder of a cell has runs, in order.
fn seeds_in(folder: &Path) -> Vec<u64> {
    let names = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name());
    let mut seeds: Vec<u64> = names
        .filter_map(|name| name.to_str().and_then(|name| name.parse().ok()))
        .collect();
    seeds.sort_unstable();
    seeds
}
