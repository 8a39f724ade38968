//! All cells in one table: ours over smg, by the present policy and by the one before.

use std::path::Path;

use race_cells::{Cell, CellSource};
use testbed::Result;

use super::{MarkdownTable, percent};
use crate::campaign::RouterGroup;
use crate::results::{CellResult, EarlierResult, RaceResults};

const HEAD: &str = "## At a glance

Ours over smg, warm rows, all seeds; in brackets by the default policy before this one, in a race of its own. The last
row is the geometric mean over the cells from half load on.

";

/// Cells with this load or more count in the mean, in per cent.
const HALF_LOAD: u32 = 50;

/// The columns: their names and the positions of their figures.
const COLUMNS: [(&str, usize); 4] = [
    ("end to end", 0),
    ("TTFT mean", 1),
    ("TTFT p99", 2),
    ("TPOT p99", 4),
];

/// The results of the earlier policy, from the runs in `folder`.
///
/// # Errors
/// If a run cannot be read.
pub(super) fn earlier(folder: &Path) -> Result<Vec<EarlierResult>> {
    let mut earlier = Vec::new();
    for cell in Cell::all() {
        let result = CellResult::of_runs(folder, &cell, &RouterGroup::core())?;
        earlier.extend(result.as_ref().and_then(compared));
    }
    Ok(earlier)
}

/// The comparison of ours with smg in a cell; `None` without runs of smg.
fn compared(result: &CellResult) -> Option<EarlierResult> {
    let router = |name: &str| result.routers.iter().find(|router| router.router == name);
    let ours = router(crate::results::OURS)?;
    let smg = router("smg")?;
    let ratios = smg
        .warm
        .iter()
        .map(|figure| Some(figure.ours_over?[0]))
        .collect::<Option<Vec<f64>>>()?;
    Some(EarlierResult {
        cell: result.cell.clone(),
        version: ours.version.clone(),
        ratios,
        hit_rates: [ours.hit_rate, smg.hit_rate],
    })
}

/// The table; empty without a comparison.
pub(super) fn section(results: &RaceResults) -> String {
    let counts = |cell: &str| Cell::find(cell).is_some_and(|cell| cell.workload().is_some());
    let now: Vec<EarlierResult> = results
        .of_group("core")
        .filter(|result| counts(&result.cell))
        .filter_map(compared)
        .collect();
    if now.is_empty() {
        return String::new();
    }
    let header: Vec<&str> = std::iter::once("cell")
        .chain(COLUMNS.iter().map(|(name, _)| *name))
        .chain(["hits", "smg's"])
        .collect();
    let mut table = MarkdownTable::with_header(&header);
    for result in &now {
        let before = results
            .before
            .iter()
            .find(|before| before.cell == result.cell);
        let figures = COLUMNS.iter().map(|&(_, at)| {
            pair(
                ratio_at(result, at),
                before.map(|before| ratio_at(before, at)),
            )
        });
        let hits = result.hit_rates.map(percent);
        table.row(
            std::iter::once(result.cell.clone())
                .chain(figures)
                .chain(hits),
        );
    }
    let before: Vec<EarlierResult> = results
        .before
        .iter()
        .filter(|before| now.iter().any(|result| result.cell == before.cell))
        .cloned()
        .collect();
    let means = COLUMNS.iter().map(|&(_, at)| {
        pair(
            mean(&now, at),
            (!before.is_empty()).then(|| mean(&before, at)),
        )
    });
    table.row(
        std::iter::once("**mean**".to_owned())
            .chain(means)
            .chain([String::new(), String::new()]),
    );
    format!("{HEAD}{}\n", table.0)
}

fn ratio_at(result: &EarlierResult, at: usize) -> f64 {
    result.ratios.get(at).copied().unwrap_or(f64::NAN)
}

/// The geometric mean over the cells from half load on.
fn mean(results: &[EarlierResult], at: usize) -> f64 {
    let is_loaded = |result: &&EarlierResult| {
        let source = Cell::find(&result.cell).map(|cell| cell.source);
        matches!(source, Some(CellSource::Random { load_percent, .. }) if load_percent >= HALF_LOAD)
    };
    let logs: Vec<f64> = results
        .iter()
        .filter(is_loaded)
        .map(|result| ratio_at(result, at).ln())
        .collect();
    (logs.iter().sum::<f64>() / logs.len().max(1) as f64).exp()
}

fn pair(now: f64, before: Option<f64>) -> String {
    let digits = |ratio: f64| {
        if ratio < 0.095 {
            format!("{ratio:.3}")
        } else {
            format!("{ratio:.2}")
        }
    };
    before.map_or_else(
        || digits(now),
        |before| format!("{} ({})", digits(now), digits(before)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(cell: &str, ratio: f64) -> EarlierResult {
        EarlierResult {
            cell: cell.into(),
            version: "1".into(),
            ratios: vec![ratio; 5],
            hit_rates: [0.5, 0.4],
        }
    }

    #[test]
    fn the_mean_is_geometric_and_leaves_out_low_load() {
        let results = [
            result("agents-50", 0.5),
            result("agents-85", 2.0),
            result("tenants-10", 9.0),
        ];
        assert!((mean(&results, 0) - 1.0).abs() < 1e-9);
        assert_eq!(
            (pair(0.95, Some(1.0)), pair(0.0123, None)),
            ("0.95 (1.00)".to_owned(), "0.012".to_owned())
        );
    }
}
