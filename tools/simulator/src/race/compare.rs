//! Compares the race in virtual time with the race in real time. The compared figures are the
//! ratios of Switchpoint's times to each other router's times. For p99 the table has no verdict.
//! The times are those of warm requests. The hit rates are those of all requests, because the race
//! has no other hit rates.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use race_cells::Cell;
use serde_json::Value;

use crate::policy::OURS;

/// The name of the second run of Switchpoint, which shows how much two runs of the race differ.
const AGAIN: &str = "ours-again";

/// The maximum relative difference between two ratios that agree.
const AGREED: f64 = 0.1;

/// The figures of one row of the file that [`super::play`] wrote.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlayedFigures<'a>(&'a Value);

/// The ratios of Switchpoint to another router in a cell of the race.
#[derive(Clone, Debug, PartialEq)]
struct RaceRatios {
    router: String,
    /// Switchpoint's time divided by the other router's: the ratio, and the ends of its interval.
    e2e: [f64; 3],
    ttft: [f64; 3],
    /// The ratio of the 99th percentiles of TTFT, or NaN if the race has no such ratio.
    ttft_p99: f64,
    /// The hit rates of Switchpoint and of the other router.
    hits: [f64; 2],
    /// Whether the race has only one run of this cell.
    is_one_run: bool,
}

/// Whether a ratio of the simulator agrees with the same ratio of the race.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RatioVerdict {
    Agrees,
    /// The ratios do not agree, but the simulator's ratio is within the interval of 95 % of the
    /// race's ratio.
    WithinInterval,
    /// The ratios do not agree, and the simulator's ratio is outside the race's interval. But the
    /// race has a single run, and its ratio agrees with a single run of the simulator, or lies
    /// between two such runs. The race's interval comes from the requests of its single run, so the
    /// interval does not cover other runs.
    WithinRuns,
    Differs,
}

/// Returns the cell, the router and the part (`cold`, `warm` or `all`) of each row, in order.
pub(super) fn rows(results: &Value) -> Result<Vec<[&str; 3]>, String> {
    let rows = results
        .get("rows")
        .and_then(Value::as_array)
        .ok_or("the results have no rows")?;
    let names = rows.iter().map(|row| {
        let name = |key: &str| {
            row.get(key)
                .and_then(Value::as_str)
                .ok_or_else(|| format!("a row has no {key}"))
        };
        Ok([name("cell")?, name("router")?, name("row")?])
    });
    names.collect()
}

// === impl PlayedFigures ===

impl<'a> PlayedFigures<'a> {
    /// Returns the figures of this cell, router and part.
    pub(super) fn from_results(results: &'a Value, names: [&str; 3]) -> Option<Self> {
        let is_it = |row: &&Value| {
            let keys = ["cell", "router", "row"].into_iter().zip(names);
            keys.into_iter()
                .all(|(key, name)| row.get(key).and_then(Value::as_str) == Some(name))
        };
        results
            .get("rows")?
            .as_array()?
            .iter()
            .find(is_it)?
            .get("figures")
            .map(Self)
    }

    /// Returns the figure `key`, or NaN if the row has no such figure.
    pub(super) fn number(self, key: &str) -> f64 {
        self.0.get(key).and_then(Value::as_f64).unwrap_or(f64::NAN)
    }

    /// Returns the mean time of each run: the mean E2E if `at` is 0, or the mean TTFT if `at` is 1.
    fn means_by_run(self, at: usize) -> Vec<f64> {
        let runs = self
            .0
            .get(super::row::MEANS_BY_RUN)
            .and_then(Value::as_array)
            .into_iter()
            .flatten();
        runs.filter_map(|means| means.get(at)?.as_f64()).collect()
    }
}

// === impl RaceRatios ===

impl RaceRatios {
    /// Returns the ratios of Switchpoint to each other router in a cell, in the order of the file.
    fn from_race(race: &Value, cell: &str) -> Vec<Self> {
        let cells = race
            .get("cells")
            .and_then(Value::as_array)
            .into_iter()
            .flatten();
        let own = cells.filter(|result| result.get("cell").and_then(Value::as_str) == Some(cell));
        own.flat_map(Self::of_group).collect()
    }

    fn of_group(group: &Value) -> Vec<Self> {
        let routers = group
            .get("routers")
            .and_then(Value::as_array)
            .map_or(&[][..], Vec::as_slice);
        let is_one_run = seeds(group).len() == 1;
        let hits = |router: &Value| router.get("hit_rate").and_then(Value::as_f64);
        let ours = routers.first().and_then(hits).unwrap_or(f64::NAN);
        let ratio = |router: &Value, figure: usize| -> Option<[f64; 3]> {
            let values = router
                .get("warm")?
                .get(figure)?
                .get("ours_over")?
                .as_array()?;
            let numbers: Vec<f64> = values.iter().filter_map(Value::as_f64).collect();
            numbers.try_into().ok()
        };
        let others = routers.iter().filter_map(|router| {
            let name = router
                .get("router")
                .and_then(Value::as_str)
                .filter(|name| *name != AGAIN)?
                .to_owned();
            Some(Self {
                router: name,
                e2e: ratio(router, 0)?,
                ttft: ratio(router, 1)?,
                ttft_p99: ratio(router, 2).map_or(f64::NAN, |[ratio, ..]| ratio),
                hits: [ours, hits(router)?],
                is_one_run,
            })
        });
        others.collect()
    }
}

// === impl RatioVerdict ===

impl RatioVerdict {
    /// Judges the simulator's ratio `simulated` by the race's ratio and its interval. `runs` has
    /// the ratios of the simulator's single runs if the race has only one run, and is empty
    /// otherwise.
    fn judge(simulated: f64, [ratio, low, high]: [f64; 3], runs: &[f64]) -> Self {
        let is_above = |run: &f64| *run >= ratio * (1.0 - AGREED);
        let is_below = |run: &f64| *run <= ratio * (1.0 + AGREED);
        match simulated {
            _ if (simulated / ratio - 1.0).abs() <= AGREED => Self::Agrees,
            _ if (low..=high).contains(&simulated) => Self::WithinInterval,
            _ if runs.iter().any(is_above) && runs.iter().any(is_below) => Self::WithinRuns,
            _ => Self::Differs,
        }
    }

    /// Returns nothing if the ratios agree.
    fn mark(self) -> &'static str {
        match self {
            Self::Agrees => "",
            Self::WithinInterval => " (in interval)",
            Self::WithinRuns => " (in runs)",
            Self::Differs => " **differs**",
        }
    }
}

/// Returns the simulator's router for a router of the race.
fn played_as(router: &str) -> &str {
    match router {
        "vllm-round-robin" => "envoy-round-robin",
        other => other,
    }
}

/// Returns a line of the table; `None` if the simulator did not play both routers.
fn line(cell: &str, race: &RaceRatios, played: &Value) -> Option<String> {
    let figures = |router: &str, row: &str| {
        PlayedFigures::from_results(played, [cell, played_as(router), row])
    };
    let ([ours, other], [ours_all, other_all]) = (
        [figures(OURS, "warm")?, figures(&race.router, "warm")?],
        [figures(OURS, "all")?, figures(&race.router, "all")?].map(|all| all.number("hit_rate")),
    );
    let ratio = |key: &str| ours.number(key) / other.number(key);
    let judged = |simulated: f64, race_ratio: [f64; 3], at: usize| {
        let runs = ours
            .means_by_run(at)
            .into_iter()
            .zip(other.means_by_run(at))
            .map(|(ours, other)| ours / other);
        let runs: Vec<f64> = runs.filter(|_| race.is_one_run).collect();
        let verdict = RatioVerdict::judge(simulated, race_ratio, &runs);
        let both = format!("{} / {}", shown(race_ratio[0]), shown(simulated));
        format!("{both}{}", verdict.mark())
    };
    let [ours_hits, other_hits] = race.hits;
    let hits = RatioVerdict::judge(ours_all / other_all, [ours_hits / other_hits; 3], &[]);
    Some(format!(
        "| {cell} | {} | {} | {} | {} / {} | {:+.1} / {:+.1}{} |",
        race.router,
        judged(ratio("e2e_mean_ms"), race.e2e, 0),
        judged(ratio("ttft_mean_ms"), race.ttft, 1),
        shown(race.ttft_p99),
        shown(ratio("ttft_p99_ms")),
        100.0 * (ours_hits - other_hits),
        100.0 * (ours_all - other_all),
        hits.mark(),
    ))
}

/// Prints a ratio, with more digits if it is small.
fn shown(ratio: f64) -> String {
    if ratio < 0.1 {
        format!("{ratio:.3}")
    } else {
        format!("{ratio:.2}")
    }
}

fn seeds(results: &Value) -> BTreeSet<u64> {
    results
        .get("seeds")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_u64)
        .collect()
}

/// Returns a table with a line for each cell and router that are in both files.
///
/// # Errors
/// Fails when a file has another form.
pub(super) fn text(race: &Value, played: &Value) -> Result<String, String> {
    rows(played)?;
    let mut out = String::from(
        "| cell | router | end to end: race / simulator | TTFT mean | TTFT p99 | hits, points |\n\
         |---|---|---|---|---|---|\n",
    );
    for cell in Cell::all().map(|cell| cell.name) {
        let lines = RaceRatios::from_race(race, cell);
        for line in lines.iter().filter_map(|race| line(cell, race, played)) {
            let _ = writeln!(out, "{line}");
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_ratio_agrees_within_a_tenth_of_it() {
        let verdict = |simulated| RatioVerdict::judge(simulated, [0.8, 0.6, 1.0], &[]);
        assert_eq!(
            [0.85, 0.95, 1.2].map(verdict),
            [
                RatioVerdict::Agrees,
                RatioVerdict::WithinInterval,
                RatioVerdict::Differs
            ]
        );
    }

    #[test]
    fn one_run_of_the_race_may_be_like_any_run_here() {
        let verdict = |runs: &[f64]| RatioVerdict::judge(0.2, [0.8, 0.6, 1.0], runs);
        for like in [&[0.1, 0.75][..], &[0.1, 0.9], &[0.85, 2.0]] {
            assert_eq!(verdict(like), RatioVerdict::WithinRuns, "{like:?}");
        }
        for unlike in [&[][..], &[0.1, 0.7], &[0.9, 2.0]] {
            assert_eq!(verdict(unlike), RatioVerdict::Differs, "{unlike:?}");
        }
    }

    #[test]
    fn the_ratios_of_a_cell_are_those_of_all_its_groups() {
        let figures = |ratio: f64| json!([{"ours_over": [ratio, ratio, ratio]}, {"ours_over": [ratio, ratio, ratio]}]);
        let group = |router: &str, ratio: f64| {
            let ours = json!({"router": "ours", "hit_rate": 0.9, "warm": [{"ours_over": null}, {"ours_over": null}]});
            json!({"cell": "chat-50", "routers": [ours, {"router": router, "hit_rate": 0.8, "warm": figures(ratio)}]})
        };
        let mut race = json!({"cells": [group("smg", 0.9), group("llm-d-default", 0.7)]});
        race["cells"][0]["seeds"] = json!([101, 102]);
        race["cells"][1]["seeds"] = json!([101]);
        let ratios = RaceRatios::from_race(&race, "chat-50");
        assert_eq!(
            ratios
                .iter()
                .map(|ratio| ratio.router.as_str())
                .collect::<Vec<_>>(),
            ["smg", "llm-d-default"]
        );
        assert_eq!((ratios[1].e2e[0], ratios[1].hits), (0.7, [0.9, 0.8]));
        assert_eq!([ratios[0].is_one_run, ratios[1].is_one_run], [false, true]);
    }
}
