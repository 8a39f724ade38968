//! Pools whose engines differ or change: what it costs to learn their speeds, and how long policies
//! take to recover.

use std::fmt::Write;

use super::ratios::SettingRuns;
use super::{shown, text};
use crate::measure::{LESS_IS_BETTER, Measure};
use crate::policy::{EXACT, OURS};
use crate::recovery::{Recovery, RecoveryResult};
use crate::store::ResultStore;
use crate::workload::WorkloadKind;

/// The settings that have runs of both policies.
const SETTINGS: [&str; 4] = ["mixed-speeds", "one-slows-3x", "one-restarts", "two-join"];

/// Mean TTFT, p99 TTFT, mean E2E.
const MEASURES: [Measure; 3] = [LESS_IS_BETTER[0], LESS_IS_BETTER[3], LESS_IS_BETTER[4]];

/// The figures of recoveries: setting and title.
pub(super) const FIGURES: [(&str, &str); 3] = [
    (
        "one-slows-3x",
        "One engine of eight becomes three times as slow",
    ),
    (
        "one-restarts",
        "One engine of eight leaves for 30 s and comes back with an empty cache",
    ),
    ("two-join", "Two engines join six"),
];

pub(super) fn section(store: &ResultStore) -> String {
    let mut out = text::CHANGES.to_owned();
    let kinds: Vec<&str> = WorkloadKind::MAIN.iter().map(|kind| kind.name()).collect();
    let _ = writeln!(
        out,
        "| setting | measure | {} | all |\n|---|---|{}---|",
        kinds.join(" | "),
        "---|".repeat(kinds.len())
    );
    for setting in SETTINGS {
        let runs = SettingRuns::of(store, setting);
        for measure in MEASURES {
            let of = |kind: &&str| {
                shown(
                    runs.against_best(kind, measure, OURS, &[EXACT])
                        .map(|(ratio, _)| ratio),
                )
            };
            let cells: Vec<String> = kinds.iter().map(of).collect();
            let all = shown(runs.all_workloads(measure, OURS, &[EXACT]));
            let _ = writeln!(
                out,
                "| {setting} | {} | {} | {all} |",
                measure.0,
                cells.join(" | ")
            );
        }
    }
    out.push_str(text::RECOVERY);
    let changing = crate::campaign::all()
        .into_iter()
        .filter(|grid| grid.setting.change.is_some());
    for grid in changing {
        let _ = writeln!(
            out,
            "\n| {} | {} |\n|---|{}",
            grid.name,
            kinds.join(" | "),
            "---|".repeat(kinds.len())
        );
        for policy in &grid.policies {
            let of = |kind: &&str| {
                recovered(store, (&grid.name, kind, policy)).map_or("-".to_owned(), cell)
            };
            let _ = writeln!(
                out,
                "| {policy} | {} |",
                kinds.iter().map(of).collect::<Vec<_>>().join(" | ")
            );
        }
    }
    out
}

/// The goals for these settings, as rows of the table of goals.
pub(super) fn aims(store: &ResultStore) -> String {
    let mut out = String::new();
    for setting in ["mixed-speeds", "one-slows-3x"] {
        let runs = SettingRuns::of(store, setting);
        let [ttft, _, e2e] = MEASURES.map(|measure| runs.all_workloads(measure, OURS, &[EXACT]));
        if let (Some(ttft), Some(e2e)) = (ttft, e2e) {
            let _ = writeln!(
                out,
                "| {setting}: relative to known speeds, mean TTFT and mean E2E, all workloads | {ttft}, {e2e} |"
            );
        }
    }
    for setting in ["one-slows-3x", "one-restarts"] {
        let each: Vec<String> = WorkloadKind::MAIN
            .iter()
            .filter_map(|kind| {
                Some(format!(
                    "{} {}",
                    kind.name(),
                    seconds(&recovered(store, (setting, kind.name(), OURS))?.all)
                ))
            })
            .collect();
        if !each.is_empty() {
            let _ = writeln!(out, "| {setting}: recovery time, s | {} |", each.join(", "));
        }
    }
    out
}

fn recovered<'s>(store: &'s ResultStore, of: (&str, &str, &str)) -> Option<&'s RecoveryResult> {
    store
        .recoveries
        .iter()
        .find(|row| (&*row.setting, &*row.workload, &*row.policy) == of)
}

fn seconds(recovery: &Recovery) -> String {
    recovery
        .seconds
        .map_or("never".to_owned(), |seconds| seconds.to_string())
}

/// The recovery time of all seeds together, the shortest and the longest of a seed, and the worst
/// window.
fn cell(row: &RecoveryResult) -> String {
    let never = |recovery: &&Recovery| recovery.seconds.unwrap_or(u64::MAX);
    let range = [
        row.by_seed.iter().min_by_key(never),
        row.by_seed.iter().max_by_key(never),
    ]
    .map(|one| one.map_or(String::new(), seconds));
    format!(
        "{} [{}] {:.2}x",
        seconds(&row.all),
        range.join(", "),
        row.all.worst
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_that_never_recovers_counts_as_the_longest() {
        let of = |seconds| Recovery {
            seconds,
            worst: 1.5,
        };
        let row = |by_seed| RecoveryResult {
            setting: String::new(),
            workload: String::new(),
            policy: String::new(),
            all: of(Some(31)),
            by_seed,
            curve: Vec::new(),
        };
        assert_eq!(
            cell(&row(vec![of(Some(40)), of(None), of(Some(7))])),
            "31 [7, never] 1.50x"
        );
    }
}
