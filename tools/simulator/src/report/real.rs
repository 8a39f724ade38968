//! The results of the short run in real time. Part `quality` of `make bench` writes them beside the
//! results of the simulator.

use std::fmt::Write;
use std::path::Path;

use serde_json::Value;

use super::ratios::SettingRuns;
use super::text;
use crate::measure::LESS_IS_BETTER;
use crate::workload::WorkloadKind;

/// The policies of the run, the best by the simulator first, and their names on the page.
const POLICIES: [(&str, &str); 3] = [
    ("ours", "ours"),
    ("2/2/3", "2/2/3"),
    ("round robin", "round-robin"),
];

/// The section of the page; without results if the file is missing or invalid.
pub(super) fn section(main: &SettingRuns<'_>, file: &Path) -> String {
    let found = std::fs::read_to_string(file)
        .ok()
        .and_then(|text| serde_json::from_str::<Value>(&text).ok());
    let table = found.as_ref().and_then(|found| table(main, found));
    format!(
        "{}{}",
        text::REAL,
        table.unwrap_or_else(|| "Not run for this edition.\n".to_owned())
    )
}

fn table(main: &SettingRuns<'_>, found: &Value) -> Option<String> {
    let rows = found.get("rows")?.as_array()?;
    let mean = |policy: &str, measure: &str| {
        let of: Vec<f64> = rows
            .iter()
            .filter(|row| row["policy"] == policy)
            .filter_map(|row| row.get(measure)?.as_f64())
            .collect();
        (!of.is_empty()).then(|| of.iter().sum::<f64>() / of.len() as f64)
    };
    let mut out =
        "| policy | requests | failed | TTFT mean, ms | p50 | p99 | E2E mean, s | cached, % | simulated: TTFT mean, ms |\n".to_owned();
    out.push_str("|---|---|---|---|---|---|---|---|---|\n");
    let mut ttft = Vec::new();
    for (policy, simulated) in POLICIES {
        let of = |measure: &str| mean(policy, measure);
        ttft.push(of("ttft_mean_ms")?);
        let _ = writeln!(
            out,
            "| {policy} | {:.0} | {:.0} | {:.0} | {:.0} | {:.0} | {:.2} | {:.1} | {} |",
            of("requests")?,
            of("failed")?,
            of("ttft_mean_ms")?,
            of("ttft_p50_ms")?,
            of("ttft_p99_ms")?,
            of("e2e_mean_ms")? / 1e3,
            of("hits")? * 100.0,
            main.at_load(
                WorkloadKind::Conversation.name(),
                0.7,
                LESS_IS_BETTER[0].1,
                simulated
            )
            .map_or("-".to_owned(), |ms| format!("{ms:.0}")),
        );
    }
    let holds = if ttft.is_sorted() {
        "holds"
    } else {
        "does not hold"
    };
    let load = found.get("load_average")?.as_f64()?;
    let _ = writeln!(
        out,
        "\nThe simulator's ranking {holds}. Load average of the two cores at the end: {load:.1}."
    );
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::ResultStore;
    use serde_json::json;

    #[test]
    fn the_page_says_that_a_ranking_does_not_hold() {
        let (store, row) = (
            ResultStore::default(),
            |policy: &str, ms: f64| json!({"policy": policy, "requests": 9, "failed": 0, "ttft_mean_ms": ms, "ttft_p50_ms": 1.0, "ttft_p99_ms": 2.0, "e2e_mean_ms": 3.0, "hits": 0.5}),
        );
        let shown = |ours, round_robin| {
            let rows = [
                row("ours", ours),
                row("2/2/3", 20.0),
                row("round robin", round_robin),
                row("ours", ours),
            ];
            table(
                &SettingRuns::of(&store, "main"),
                &json!({"load_average": 1.25, "rows": rows}),
            )
        };
        assert!(
            shown(10.0, 30.0).unwrap().contains("| ours | 9 | 0 | 10 |")
                && shown(10.0, 30.0).unwrap().contains("ranking holds")
        );
        assert!(
            shown(21.0, 30.0).unwrap().contains("does not hold")
                && shown(10.0, 15.0).unwrap().contains("does not hold")
        );
        assert_eq!(
            table(&SettingRuns::of(&store, "main"), &json!({"rows": []})),
            None
        );
    }
}
