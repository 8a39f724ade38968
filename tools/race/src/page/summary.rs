//! Two tables of all cells: one for warm and one for cold caches. The tables have Switchpoint's
//! figures, and their ratios to smg's figures.

use race_cells::{Cell, CellSource};

use super::{MarkdownTable, judged, percent};
use crate::judge::RaceFigure;
use crate::results::{CellResult, FigureResult, OURS, RaceResults, RouterResult};

const HEAD: &str = "## Beside smg

Each entry is the ratio of Switchpoint to smg, and Switchpoint's time in ms. The last row is the geometric mean over the
cells with our own workloads and a load of at least 50 %. Hits and failures are those of all sessions.

";

/// The last columns of the table for warm caches.
const COUNTS: [&str; 4] = ["hits", "smg's", "failed", "smg's"];

/// The number of figures in the table for cold caches: end to end, TTFT mean and TTFT p99.
const COLD_FIGURES: usize = 3;

/// The minimum load, in percent, of the cells that count in the mean.
const HALF_LOAD: u32 = 50;

/// A function that returns the figures of a router for cold or for warm sessions.
type FiguresOf = fn(&RouterResult) -> &[FigureResult];

/// Returns the tables, or an empty text if no cell has results of both routers.
pub(super) fn section(results: &RaceResults) -> String {
    let compared: Vec<[&RouterResult; 2]> = results.of_group("core").filter_map(pair).collect();
    if compared.is_empty() {
        return String::new();
    }
    let warm = table(
        results,
        "warm",
        |router| &router.warm,
        RaceFigure::ALL.len(),
        &COUNTS,
    );
    let cold = table(results, "cold", |router| &router.cold, COLD_FIGURES, &[]);
    format!("{HEAD}{warm}\n{cold}\n")
}

/// Returns the results of Switchpoint and of smg in a cell, or `None` if smg has no results.
fn pair(result: &CellResult) -> Option<[&RouterResult; 2]> {
    let router = |name: &str| result.routers.iter().find(|router| router.router == name);
    Some([router(OURS)?, router("smg")?])
}

fn table(
    results: &RaceResults,
    name: &str,
    figures: FiguresOf,
    shown: usize,
    counts: &[&str],
) -> String {
    let header: Vec<&str> = std::iter::once(name)
        .chain(
            RaceFigure::ALL
                .iter()
                .take(shown)
                .map(|figure| figure.name()),
        )
        .chain(counts.iter().copied())
        .collect();
    let mut table = MarkdownTable::with_header(&header);
    let mut loaded: Vec<&[FigureResult]> = Vec::new();
    for result in results.of_group("core") {
        let Some([ours, smg]) = pair(result) else {
            continue;
        };
        let entries = figures(ours)
            .iter()
            .zip(figures(smg))
            .take(shown)
            .map(|(ours, smg)| format!("{}; {:.0}", judged(smg), ours.ms));
        let hits = [ours, smg].map(|router| percent(router.hit_rate));
        let failed = [ours, smg].map(|router| router.failures.to_string());
        table.row(
            std::iter::once(result.cell.clone())
                .chain(entries)
                .chain(hits)
                .chain(failed)
                .take(header.len()),
        );
        if has_half_load(&result.cell) {
            loaded.push(figures(smg));
        }
    }
    let means = (0..shown).map(|figure| format!("**{:.2}**", mean(&loaded, figure)));
    table.row(
        std::iter::once("mean".to_owned())
            .chain(means)
            .chain(std::iter::repeat_n(String::new(), counts.len())),
    );
    table.0
}

fn has_half_load(cell: &str) -> bool {
    let source = Cell::find(cell).map(|cell| cell.source);
    matches!(source, Some(CellSource::Random { load_percent, .. }) if load_percent >= HALF_LOAD)
}

/// Returns the geometric mean of the ratios of one figure over the cells.
fn mean(cells: &[&[FigureResult]], figure: usize) -> f64 {
    let logs: Vec<f64> = cells
        .iter()
        .filter_map(|figures| figures.get(figure)?.ours_over)
        .map(|[ratio, ..]| ratio.ln())
        .collect();
    (logs.iter().sum::<f64>() / logs.len().max(1) as f64).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(ratio: f64) -> Vec<FigureResult> {
        let figure = FigureResult {
            ms: 100.0,
            ours_over: Some([ratio; 3]),
            verdict: None,
        };
        vec![figure; 5]
    }

    #[test]
    fn the_mean_is_geometric_and_leaves_out_low_load() {
        let half = figures(0.5);
        let double = figures(2.0);
        assert!((mean(&[&half, &double], 0) - 1.0).abs() < 1e-9);
        assert!(has_half_load("agents-50") && has_half_load("agents-85"));
        assert!(!has_half_load("tenants-10") && !has_half_load("mooncake"));
    }
}
