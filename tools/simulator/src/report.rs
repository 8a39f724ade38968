//! Writes `docs/reference/routing-quality.md` and its figures, from the results of runs alone.

mod changes;
pub(crate) mod figures;
mod ratios;
mod real;
mod text;
mod wrap;

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;

use crate::campaign::{MAIN_TABLE, SECOND_ENGINE};
use crate::grid::ExperimentGrid;
use crate::measure::{LESS_IS_BETTER, Measure, mean_ci};
use crate::policy::{EXACT, GOODPUT, LLM_D, LMETRIC, MAIN, OURS};
use crate::slo::{CLASSES, ClassOutcome, SloAttainment, share};
use crate::store::ResultStore;
use crate::validate::ValidationRow;
use crate::workload::WorkloadKind;
use ratios::{RatioInterval, SettingRuns};

/// The folder of the page's figures, beside the page.
const FIGURES: &str = "routing-quality";

/// Writes the page into `docs`. `real` is the file with the results in real time, if it exists.
pub(crate) fn write(
    store: &ResultStore,
    validation: &[ValidationRow],
    real: &Path,
    docs: &Path,
) -> Result<(), String> {
    let folder = docs.join(FIGURES);
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let main = SettingRuns::of(store, MAIN_TABLE);
    figures::ratios(
        &main,
        &folder.join("ttft.svg"),
        "Mean TTFT against ours (log scale)",
        LESS_IS_BETTER[0],
    )?;
    figures::ratios(
        &main,
        &folder.join("ttft-p99.svg"),
        "p99 TTFT against ours (log scale)",
        LESS_IS_BETTER[3],
    )?;
    figures::ratios(
        &main,
        &folder.join("e2e.svg"),
        "Mean end-to-end time against ours (log scale)",
        LESS_IS_BETTER[4],
    )?;
    for (setting, title) in changes::FIGURES {
        figures::recovery(
            &store.recoveries,
            setting,
            &folder.join(format!("{setting}.svg")),
            title,
        )?;
    }
    let path = docs.join("routing-quality.md");
    std::fs::write(&path, wrap::wrap(&page(store, validation, real)))
        .map_err(|error| format!("{}: {error}", path.display()))
}

// Writing to a String cannot fail.
fn page(store: &ResultStore, validation: &[ValidationRow], real: &Path) -> String {
    let main = SettingRuns::of(store, MAIN_TABLE);
    let mut page = text::HEAD.to_owned();
    page.push_str(&aims(store, &main));
    let loads: Vec<String> = main.loads(OURS).iter().map(f64::to_string).collect();
    let _ = writeln!(
        page,
        "\n## Eight engines alike\n\n{}",
        text::MAIN.replace("LOADS", &loads.join(", "))
    );
    let absent: Vec<&str> = MAIN
        .into_iter()
        .filter(|policy| main.loads(policy).is_empty())
        .collect();
    if !absent.is_empty() {
        let _ = writeln!(page, "Not run for this edition: {}.", absent.join(", "));
    }
    page.push_str(&against(&main, "the best of llm-d's policies", &LLM_D));
    page.push_str(&against(&main, "the better of LMetric's forms", &LMETRIC));
    page.push_str(&singles(&main));
    page.push_str(&absolute(&main));
    page.push_str(text::LOSSES);
    page.push_str(&rates(store));
    page.push_str(&settings(store));
    page.push_str(&agreement(&main, &SettingRuns::of(store, SECOND_ENGINE)));
    page.push_str(&changes::section(store));
    page.push_str(&classes(store));
    page.push_str(&validated(validation));
    page.push_str(&real::section(&main, real));
    page.push_str(text::LIMITS);
    page
}

/// The policies that ours is compared with: all except ours and the oracle.
fn rivals() -> Vec<&'static str> {
    MAIN.into_iter()
        .filter(|name| ![OURS, GOODPUT, "oracle", "2/2/3+active"].contains(name))
        .collect()
}

fn aims(store: &ResultStore, main: &SettingRuns<'_>) -> String {
    let mut out = "\n## Goals\n\n| goal | result |\n|---|---|\n".to_owned();
    let envelope: Vec<&str> = LLM_D
        .into_iter()
        .chain(LMETRIC)
        .filter(|name| !main.loads(name).is_empty())
        .collect();
    for measure in [LESS_IS_BETTER[0], LESS_IS_BETTER[4]] {
        if let Some(all) = main.all_workloads(measure, OURS, &envelope) {
            let _ = writeln!(
                out,
                "| {} relative to the envelope of llm-d's and LMetric's best, all workloads: at most 0.85 | {all} |",
                measure.0
            );
        }
    }
    let over = losses(main, &WorkloadKind::MAIN, &LESS_IS_BETTER, &rivals());
    let over = if over.is_empty() {
        "none".to_owned()
    } else {
        over
    };
    let _ = writeln!(
        out,
        "| no workload and measure worse than 1.03 of the best single rival | {over} |"
    );
    for (kind, aim) in [
        (WorkloadKind::Conversation, 0.6),
        (WorkloadKind::PrefixHeavy, 0.15),
    ] {
        let ours = SettingRuns::of(store, "4-proxies-10ms");
        let theirs = SettingRuns::of(store, "4-proxies-private");
        let kind = kind.name();
        let mean_ttft = LESS_IS_BETTER[0];
        let ratios = ["2/2/3/2", "affinity+token-load", "lmetric"]
            .into_iter()
            .filter_map(|rival| ours.against_elsewhere((kind, mean_ttft), OURS, (&theirs, rival)));
        // The greatest ratio is the one to the best rival.
        if let Some(ratio) = ratios.max_by(|a, b| a.mean.total_cmp(&b.mean)) {
            let _ = writeln!(
                out,
                "| 4 proxies, ours sharing within 10 ms relative to the best rival without sharing, mean TTFT, {kind}: at most {aim} | {ratio} |"
            );
        }
    }
    let rate =
        |kind: WorkloadKind, policy: &str| Some(mean_ci(&rate_values(store, kind, policy)?).0);
    let rates: Vec<String> = WorkloadKind::MAIN
        .iter()
        .filter_map(|&kind| {
            Some(format!(
                "{} {:.2}",
                kind.name(),
                rate(kind, GOODPUT)? / rate(kind, "oracle")?
            ))
        })
        .collect();
    if !rates.is_empty() {
        let _ = writeln!(
            out,
            "| highest rate with nine of ten in SLO, goodput setting, relative to the greedy oracle: at least 1 | {} |",
            rates.join(", ")
        );
    }
    out.push_str(&changes::aims(store));
    out.push_str(text::SCORER);
    out
}

/// The cells where ours is worse than the best of these by more than 3 %, the worst first.
fn losses(
    runs: &SettingRuns<'_>,
    kinds: &[WorkloadKind],
    measures: &[Measure],
    rivals: &[&str],
) -> String {
    let each = kinds
        .iter()
        .flat_map(|kind| measures.iter().map(move |&measure| (kind.name(), measure)));
    let mut over: Vec<(f64, String)> = each
        .filter_map(|(kind, measure)| {
            let (ratio, rival) = runs.against_best(kind, measure, OURS, rivals)?;
            (ratio.mean > 1.03).then(|| {
                (
                    ratio.mean,
                    format!("{kind} {} {ratio} ({rival})", measure.0),
                )
            })
        })
        .collect();
    over.sort_by(|a, b| b.0.total_cmp(&a.0));
    over.into_iter()
        .map(|(_, what)| what)
        .collect::<Vec<_>>()
        .join("; ")
}

fn against(runs: &SettingRuns<'_>, rivals_name: &str, rivals: &[&str]) -> String {
    let rivals: Vec<&str> = rivals
        .iter()
        .copied()
        .filter(|name| !runs.loads(name).is_empty())
        .collect();
    let mut out = format!(
        "\nOurs relative to {rivals_name} ({}), the best of each cell:\n\n",
        rivals.join(", ")
    );
    let heads: Vec<&str> = LESS_IS_BETTER.iter().map(|(name, _)| *name).collect();
    let _ = writeln!(
        out,
        "| workload | {} | in SLO |\n|---|{}---|",
        heads.join(" | "),
        "---|".repeat(heads.len())
    );
    for kind in WorkloadKind::MAIN {
        let cells: Vec<String> = LESS_IS_BETTER
            .iter()
            .map(|&measure| {
                shown(
                    runs.against_best(kind.name(), measure, OURS, &rivals)
                        .map(|(ratio, _)| ratio),
                )
            })
            .collect();
        let slo = runs
            .slo_points(kind.name(), OURS, &rivals)
            .map_or("-".to_owned(), |points| format!("{points:+.1}"));
        let _ = writeln!(out, "| {} | {} | {slo} |", kind.name(), cells.join(" | "));
    }
    let all: Vec<String> = LESS_IS_BETTER
        .iter()
        .map(|&measure| shown(runs.all_workloads(measure, OURS, &rivals)))
        .collect();
    let _ = writeln!(out, "| **all** | {} | |", all.join(" | "));
    out
}

fn shown(ratio: Option<RatioInterval>) -> String {
    ratio.map_or("-".to_owned(), |ratio| {
        if ratio.mean > 1.03 {
            format!("**{ratio}**")
        } else {
            ratio.to_string()
        }
    })
}

/// Ours relative to each other policy, over all workloads.
fn singles(runs: &SettingRuns<'_>) -> String {
    let heads: Vec<&str> = LESS_IS_BETTER.iter().map(|(name, _)| *name).collect();
    let mut out = format!(
        "\nOurs relative to each, all workloads and loads:\n\n| against | {} |\n|---|{}\n",
        heads.join(" | "),
        "---|".repeat(heads.len())
    );
    for rival in MAIN
        .into_iter()
        .filter(|name| *name != OURS && !runs.loads(name).is_empty())
    {
        let cells: Vec<String> = LESS_IS_BETTER
            .iter()
            .map(|&measure| shown(runs.all_workloads(measure, OURS, &[rival])))
            .collect();
        let _ = writeln!(out, "| {rival} | {} |", cells.join(" | "));
    }
    out
}

fn absolute(runs: &SettingRuns<'_>) -> String {
    let mut out = String::new();
    for (name, of, digits) in [
        ("Mean TTFT, ms", LESS_IS_BETTER[0].1, 0_usize),
        ("p99 TTFT, ms", LESS_IS_BETTER[3].1, 0),
        (
            "Requests in SLO, %",
            |m: &crate::measure::RunMeasures| m.slo * 100.0,
            1,
        ),
    ] {
        let kinds: Vec<&str> = WorkloadKind::MAIN.iter().map(|kind| kind.name()).collect();
        let _ = writeln!(
            out,
            "\n{name}, at load 0.7:\n\n| policy | {} |\n|---|{}",
            kinds.join(" | "),
            "---|".repeat(kinds.len())
        );
        for policy in MAIN.into_iter().filter(|name| !runs.loads(name).is_empty()) {
            let cell = |kind: &&str| {
                let (mean, half) = mean_ci(&runs.values(kind, 0.7, of, policy));
                if half.is_nan() {
                    "-".to_owned()
                } else {
                    format!("{mean:.digits$} ± {half:.digits$}")
                }
            };
            let _ = writeln!(
                out,
                "| {policy} | {} |",
                kinds.iter().map(cell).collect::<Vec<_>>().join(" | ")
            );
        }
    }
    out
}

fn rates(store: &ResultStore) -> String {
    let mut out = text::RATES.to_owned();
    if store.rates.is_empty() {
        out.push_str("Not run for this edition.\n");
        return out;
    }
    let kinds: Vec<&str> = WorkloadKind::MAIN.iter().map(|kind| kind.name()).collect();
    let _ = writeln!(
        out,
        "| policy | {} |\n|---|{}",
        kinds.join(" | "),
        "---|".repeat(kinds.len())
    );
    for policy in MAIN
        .into_iter()
        .filter(|name| store.rates.iter().any(|rate| rate.policy == *name))
    {
        let cell = |kind: &WorkloadKind| {
            rate_values(store, *kind, policy).map_or("-".to_owned(), |values| {
                let (mean, half) = mean_ci(&values);
                format!("{mean:.1} ± {half:.1}")
            })
        };
        let _ = writeln!(
            out,
            "| {policy} | {} |",
            WorkloadKind::MAIN
                .iter()
                .map(cell)
                .collect::<Vec<_>>()
                .join(" | ")
        );
    }
    out
}

/// The highest rates of a policy, one for each seed.
fn rate_values(store: &ResultStore, kind: WorkloadKind, policy: &str) -> Option<Vec<f64>> {
    let of = store
        .rates
        .iter()
        .filter(|rate| rate.workload == kind.name() && rate.policy == policy);
    let values: Vec<f64> = of.map(|rate| rate.requests_per_s).collect();
    (!values.is_empty()).then_some(values)
}

/// The tables of each further setting.
fn settings(store: &ResultStore) -> String {
    let mut out = text::SETTINGS.to_owned();
    for grid in crate::campaign::all()
        .iter()
        .filter(|grid| grid.name != MAIN_TABLE)
    {
        let _ = writeln!(out, "\n### {}\n\n{}", grid.name, text::setting(&grid.name));
        let runs = SettingRuns::of(store, &grid.name);
        out.push_str(&if runs.is_empty() {
            "Not run for this edition.\n".to_owned()
        } else {
            further(grid, &runs)
        });
    }
    out
}

/// Mean and p99 TTFT and mean E2E of each policy in a setting, and where ours loses.
fn further(grid: &ExperimentGrid, runs: &SettingRuns<'_>) -> String {
    let [ttft, _, _, p99, e2e, _] = LESS_IS_BETTER;
    let kinds: Vec<&str> = grid.kinds.iter().map(|kind| kind.name()).collect();
    let loads: Vec<String> = runs.loads(OURS).iter().map(f64::to_string).collect();
    let seeds: Vec<String> = runs.seeds().iter().map(u64::to_string).collect();
    let mut out = format!(
        "Loads {}; seeds {}:\n\n",
        loads.join(", "),
        seeds.join(", ")
    );
    let _ = writeln!(
        out,
        "| policy | {} |\n|---|{}",
        kinds.join(" | "),
        "---|".repeat(kinds.len())
    );
    let run: Vec<&str> = grid
        .policies
        .iter()
        .map(String::as_str)
        .filter(|name| !runs.loads(name).is_empty())
        .collect();
    for policy in &run {
        let cell = |kind: &&str| {
            let [ttft, p99, e2e] =
                [ttft, p99, e2e].map(|measure| runs.mean_ci(kind, measure, policy));
            let (Some((ttft, _)), Some((p99, _)), Some((e2e, _))) = (ttft, p99, e2e) else {
                return "-".to_owned();
            };
            format!("{ttft:.0} ({p99:.0}; {:.2})", e2e / 1e3)
        };
        let _ = writeln!(
            out,
            "| {policy} | {} |",
            kinds.iter().map(cell).collect::<Vec<_>>().join(" | ")
        );
    }
    let rivals: Vec<&str> = run
        .into_iter()
        .filter(|name| ![OURS, EXACT].contains(name))
        .collect();
    let over = losses(runs, &grid.kinds, &[ttft, p99, e2e], &rivals);
    let over = if over.is_empty() {
        "none".to_owned()
    } else {
        over
    };
    let _ = writeln!(out, "\nLosses: {over}.");
    out
}

/// The share of each SLO class that meets its SLO, and the share that is shed.
fn classes(store: &ResultStore) -> String {
    let mut out = text::CLASSES.to_owned();
    if store.slo.is_empty() {
        out.push_str("\nNot run for this edition.\n");
        return out;
    }
    let names = CLASSES.map(|class| class.name);
    let _ = writeln!(
        out,
        "\n| by | load | {} |\n|---|---|{}",
        names.join(" | "),
        "---|".repeat(names.len())
    );
    let runs: BTreeSet<(&str, u64)> = store
        .slo
        .iter()
        .map(|row| (&*row.by, (row.load * 100.0).round() as u64))
        .collect();
    for (by, hundredths) in runs {
        let load = hundredths as f64 / 100.0;
        let cell = |class: &&str| {
            let there = |row: &&SloAttainment| {
                row.by == by && row.class == **class && (row.load - load).abs() < 1e-9
            };
            let of: Vec<ClassOutcome> = store
                .slo
                .iter()
                .filter(there)
                .map(|row| row.outcome)
                .collect();
            let (mean, half) = mean_ci(
                &of.iter()
                    .map(|outcome| 100.0 * outcome.attainment())
                    .collect::<Vec<_>>(),
            );
            format!(
                "{mean:.1} ± {half:.1}, shed {:.1}",
                100.0 * share(&of, |outcome| outcome.shed)
            )
        };
        let _ = writeln!(
            out,
            "| {by} | {load} | {} |",
            names.iter().map(cell).collect::<Vec<_>>().join(" | ")
        );
    }
    out
}

/// How often two engine models agree which policy is better.
fn agreement(own: &SettingRuns<'_>, second: &SettingRuns<'_>) -> String {
    let policies: Vec<&str> = MAIN
        .into_iter()
        .filter(|policy| !second.loads(policy).is_empty())
        .collect();
    let mut same = 0;
    let mut all = 0;
    for (kind, at) in WorkloadKind::MAIN
        .into_iter()
        .flat_map(|kind| [0, 3, 4].map(|at| (kind, at)))
    {
        let Some((_, of)) = LESS_IS_BETTER.get(at) else {
            continue;
        };
        let mean = |runs: &SettingRuns<'_>, policy: &str| {
            mean_ci(&runs.values(kind.name(), 0.7, *of, policy)).0
        };
        let pairs = policies
            .iter()
            .enumerate()
            .flat_map(|(one, a)| policies.iter().skip(one + 1).map(move |b| (a, b)));
        for (a, b) in pairs {
            let [own, second] = [own, second].map(|runs| (mean(runs, a) / mean(runs, b)).ln());
            if own.abs() > 1.03_f64.ln() && second.is_finite() {
                all += 1;
                same += usize::from(own * second > 0.0);
            }
        }
    }
    if all == 0 {
        String::new()
    } else {
        text::AGREEMENT
            .replace("SAME", &same.to_string())
            .replace("ALL", &all.to_string())
    }
}

fn validated(rows: &[ValidationRow]) -> String {
    let mut out = text::VALIDATION.to_owned();
    for ValidationRow {
        run,
        measure,
        real,
        simulated,
    } in rows
    {
        let _ = writeln!(
            out,
            "| {run} | {measure} | {real:.1} | {simulated:.1} | {:+.1} % |",
            (simulated / real - 1.0) * 100.0
        );
    }
    out
}
