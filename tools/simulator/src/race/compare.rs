//! Compares the race in virtual time with the race in real time: the ratio of ours to each other
//! router, and the order of routers. p99 is shown and not judged. Only warm requests count, except
//! in hit rates, which the race has for all requests only.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use race_cells::Cell;
use serde_json::Value;

use crate::policy::OURS;

/// Ours once more, which shows how far two runs of the race differ.
const AGAIN: &str = "ours-again";

/// The largest difference of two ratios that agree.
const AGREED: f64 = 0.1;

/// The largest difference of two routers that are equally fast.
const EQUAL: f64 = 0.03;

/// Figures of a row of [`super::play`].
#[derive(Clone, Copy, Debug)]
pub(super) struct PlayedFigures<'a>(&'a Value);

/// Ours beside another router in the race.
#[derive(Clone, Debug, PartialEq)]
struct RaceRatios {
    router: String,
    /// Ours over the other one: ratio, low, high.
    e2e: [f64; 3],
    ttft: [f64; 3],
    /// The same of TTFT p99; not a number if the race has none.
    ttft_p99: f64,
    /// The hit rates: ours, the other one's.
    hits: [f64; 2],
    /// Whether the race has a single run.
    is_one_run: bool,
}

/// A ratio of the simulator beside that of the race.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RatioVerdict {
    Agrees,
    /// The difference is larger, but the ratio is within the race's interval of 95 %.
    WithinInterval,
    /// Neither, but the race had a single run, which is like one here, or between two. Its interval
    /// follows from the requests of that run, and says nothing about other runs.
    WithinRuns,
    Differs,
}

/// A line of the table.
struct ComparedLine {
    text: String,
    /// Ours over the other router in E2E here.
    e2e: f64,
    /// Whether that agrees with the race.
    verdict: RatioVerdict,
}

/// The cell, the router and the part of each row, in order.
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
    /// The figures of this cell, router and part.
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

    /// Not a number if there is none.
    pub(super) fn number(self, key: &str) -> f64 {
        self.0.get(key).and_then(Value::as_f64).unwrap_or(f64::NAN)
    }

    /// The means of each run: of E2E at 0, of TTFT at 1.
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
    /// The ratios of a cell, in the order of the file.
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
    /// `runs` are the ratios of single runs that one run of the race may be compared with.
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

    fn name(self) -> &'static str {
        match self {
            Self::Agrees => "yes",
            Self::WithinInterval => "in interval",
            Self::WithinRuns => "in runs",
            Self::Differs => "**no**",
        }
    }
}

/// The router of the simulator that stands for one of the race.
fn played_as(router: &str) -> &str {
    match router {
        "vllm-round-robin" => "envoy-round-robin",
        other => other,
    }
}

/// The routers from the fastest to the slowest by their times, ours being 1. Neighbours that are
/// nearly equal are joined by "=".
fn order(times: &BTreeMap<&str, f64>) -> String {
    let mut sorted: Vec<(&str, f64)> = times
        .iter()
        .map(|(router, time)| (*router, *time))
        .collect();
    sorted.sort_by(|a, b| a.1.total_cmp(&b.1));
    let mut text = String::new();
    let mut before = None;
    for (router, time) in sorted {
        let sign = before.map_or("", |before: f64| {
            if time <= before * (1.0 + EQUAL) {
                " = "
            } else {
                " < "
            }
        });
        let _ = write!(text, "{sign}{router}");
        before = Some(time);
    }
    text
}

/// Whether no two routers are clearly in one order here and clearly in the other order there.
fn is_same_order(one: &BTreeMap<&str, f64>, other: &BTreeMap<&str, f64>) -> bool {
    let is_before =
        |times: &BTreeMap<&str, f64>, a: &str, b: &str| match (times.get(a), times.get(b)) {
            (Some(first), Some(second)) => first * (1.0 + EQUAL) < *second,
            _ => false,
        };
    one.keys().all(|a| {
        one.keys()
            .all(|b| !(is_before(one, a, b) && is_before(other, b, a)))
    })
}

/// `None` where one of both was not played.
fn line(cell: &str, race: &RaceRatios, played: &Value) -> Option<ComparedLine> {
    let figures = |router: &str, row: &str| {
        PlayedFigures::from_results(played, [cell, played_as(router), row])
    };
    let ([ours, other], [ours_all, other_all]) = (
        [figures(OURS, "warm")?, figures(&race.router, "warm")?],
        [figures(OURS, "all")?, figures(&race.router, "all")?].map(|all| all.number("hit_rate")),
    );
    let ratio = |key: &str| ours.number(key) / other.number(key);
    let verdict = |simulated: f64, race_ratio: [f64; 3], at: usize| {
        let runs = ours
            .means_by_run(at)
            .into_iter()
            .zip(other.means_by_run(at))
            .map(|(ours, other)| ours / other);
        RatioVerdict::judge(
            simulated,
            race_ratio,
            &runs.filter(|_| race.is_one_run).collect::<Vec<_>>(),
        )
    };
    let e2e = ratio("e2e_mean_ms");
    let ttft = ratio("ttft_mean_ms");
    let of_e2e = verdict(e2e, race.e2e, 0);
    let of_ttft = verdict(ttft, race.ttft, 1);
    let [ours_hits, other_hits] = race.hits;
    let both = |race: f64, simulated: f64| format!("{} | {}", shown(race), shown(simulated));
    let text = format!(
        "| {cell} | {} | {} | {} | {} | {} | {} | {:+.1} | {:+.1} | {} |",
        race.router,
        both(race.e2e[0], e2e),
        of_e2e.name(),
        both(race.ttft[0], ttft),
        of_ttft.name(),
        both(race.ttft_p99, ratio("ttft_p99_ms")),
        100.0 * (ours_hits - other_hits),
        100.0 * (ours_all - other_all),
        RatioVerdict::judge(ours_all / other_all, [ours_hits / other_hits; 3], &[]).name(),
    );
    Some(ComparedLine {
        text,
        e2e,
        verdict: of_e2e,
    })
}

/// Whether the orders are the same, or would be without the routers in `one_run`. They have runs so
/// different that one run of the race has no order.
fn order_verdict(
    race: &BTreeMap<&str, f64>,
    played: &BTreeMap<&str, f64>,
    one_run: &BTreeSet<&str>,
) -> &'static str {
    let others = || {
        played
            .iter()
            .filter(|(router, _)| !one_run.contains(*router))
            .map(|(router, time)| (*router, *time))
            .collect()
    };
    match is_same_order(race, played) {
        true => "yes",
        false if is_same_order(race, &others()) => "in runs",
        false => "**no**",
    }
}

/// A ratio, with more digits if it is small.
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

/// A line for each cell and router that both have, and one for the order in each cell.
///
/// # Errors
/// When a file has another form.
pub(super) fn text(race: &Value, played: &Value) -> Result<String, String> {
    rows(played)?;
    let mut orders = String::from(
        "\n| cell | order by E2E in the race | in the simulator | same |\n|---|---|---|---|\n",
    );
    let in_race = race
        .get("cells")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .flat_map(seeds)
        .collect::<BTreeSet<_>>();
    let listed = |seeds: BTreeSet<u64>| {
        seeds
            .iter()
            .map(u64::to_string)
            .collect::<Vec<_>>()
            .join(", ")
    };
    let mut out = format!(
        "Seeds of the race: {}; of the simulator: {}.\n\n",
        listed(in_race),
        listed(seeds(played))
    );
    let head = "| cell | router | E2E race | sim | agrees | TTFT race | sim | agrees | TTFT p99 race | sim | hits, points: race | sim | agrees |";
    let _ = writeln!(
        out,
        "{head}\n|{}",
        "---|".repeat(head.matches('|').count() - 1)
    );
    for cell in Cell::all().map(|cell| cell.name) {
        let ratios = RaceRatios::from_race(race, cell);
        let mut in_race = BTreeMap::from([(OURS, 1.0)]);
        let mut in_play = BTreeMap::from([(OURS, 1.0)]);
        let mut one_run: BTreeSet<&str> = BTreeSet::new();
        for ratios in &ratios {
            let Some(line) = line(cell, ratios, played) else {
                continue;
            };
            let _ = writeln!(out, "{}", line.text);
            in_race.insert(&ratios.router, 1.0 / ratios.e2e[0]);
            in_play.insert(&ratios.router, 1.0 / line.e2e);
            one_run.extend(
                (line.verdict == RatioVerdict::WithinRuns).then_some(ratios.router.as_str()),
            );
        }
        if in_race.len() > 1 {
            let same = order_verdict(&in_race, &in_play, &one_run);
            let _ = writeln!(
                orders,
                "| {cell} | {} | {} | {same} |",
                order(&in_race),
                order(&in_play)
            );
        }
    }
    Ok(out + &orders)
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
    fn two_orders_are_the_same_unless_they_clearly_contradict() {
        let race = BTreeMap::from([("ours", 1.0), ("smg", 1.02), ("slow", 1.5)]);
        assert_eq!(order(&race), "ours = smg < slow");
        assert!(
            is_same_order(
                &race,
                &BTreeMap::from([("ours", 1.0), ("smg", 0.9), ("slow", 1.1)])
            ),
            "ours and smg are equal in one"
        );
        let other = BTreeMap::from([("ours", 1.0), ("smg", 1.2), ("slow", 0.9)]);
        assert!(!is_same_order(&race, &other));
        let verdict = |one_run: &[&'static str]| {
            order_verdict(&race, &other, &one_run.iter().copied().collect())
        };
        assert_eq!(
            [verdict(&[]), verdict(&["smg"]), verdict(&["slow"])],
            ["**no**", "**no**", "in runs"]
        );
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
