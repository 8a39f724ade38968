//! Draws the ratios of cells. For each cell and figure, the picture has a row for each other
//! router: the ratio of Switchpoint's time to the router's time, with its interval. A second run of
//! Switchpoint counts as a router. Left of 1, Switchpoint is faster.

use std::path::Path;

use plotters::prelude::*;
use testbed::Result;

use crate::results::{AGAIN, CellResult, OURS};

/// The height of two rows, and the height that all else in the picture takes, in pixels.
const ROW: u32 = 34;
const FRAME: u32 = 110;
/// The range of the axis. A ratio outside this range is drawn at the range's end.
const RATIOS: std::ops::Range<f64> = 0.25..2.0;
/// The colours: blue for a rival, grey for the second run of Switchpoint.
const RIVAL: RGBColor = RGBColor(0, 114, 178);
const SAME: RGBColor = RGBColor(140, 140, 140);

/// The figures in the picture, by their index in a result.
const FIGURES: [(usize, &str); 3] = [(0, "end to end"), (1, "TTFT mean"), (2, "TTFT p99")];

/// Draws the figures of these cells with warm caches.
///
/// # Errors
/// Fails if the picture cannot be written.
pub(super) fn draw(cells: &[&CellResult], title: &str, path: &Path) -> Result<()> {
    draw_rows(&rows(cells), title, path)
        .map_err(|error| format!("{}: {error}", path.display()).into())
}

/// A row: its label, whether the row is of the second run of Switchpoint, and the ratio with the
/// ends of its interval.
type Row = (String, bool, [f64; 3]);

fn rows(cells: &[&CellResult]) -> Vec<Row> {
    let mut rows = Vec::new();
    for cell in cells {
        for (at, figure) in FIGURES {
            for router in cell.routers.iter().filter(|router| router.router != OURS) {
                let ratio = router.warm.get(at).and_then(|found| found.ours_over);
                rows.extend(ratio.map(|ratio| {
                    (
                        format!("{}, {figure}, {}", cell.cell, router.router),
                        router.router == AGAIN,
                        ratio,
                    )
                }));
            }
        }
    }
    rows
}

fn draw_rows(
    rows: &[Row],
    title: &str,
    path: &Path,
) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let count = rows.len() as f64;
    let height = ROW * u32::try_from(rows.len())? / 2 + FRAME;
    let root = SVGBackend::new(path, (900, height)).into_drawing_area();
    root.fill(&WHITE)?;
    let caption = format!("{title}: time of ours over the other's, warm");
    let mut chart = ChartBuilder::on(&root)
        .caption(caption, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(270)
        .build_cartesian_2d(RATIOS.log_scale(), 0.0..count)?;
    let label = |at: &f64| {
        let row = count - at - 0.5;
        let near = (row - row.round()).abs() < 1e-6;
        if near {
            rows.get(row.round() as usize)
                .map_or(String::new(), |row| row.0.clone())
        } else {
            String::new()
        }
    };
    chart
        .configure_mesh()
        .disable_y_mesh()
        .y_labels(rows.len() * 2 + 1)
        .y_label_formatter(&label)
        .x_label_formatter(&|ratio| format!("{ratio:.2}"))
        .x_desc("left of 1, ours is faster")
        .draw()?;
    chart.draw_series(LineSeries::new(
        [(1.0, 0.0), (1.0, count)],
        BLACK.stroke_width(1),
    ))?;
    for (index, (_, same, ratio)) in rows.iter().enumerate() {
        let at = count - index as f64 - 0.5;
        let colour = if *same { SAME } else { RIVAL };
        let [ratio, low, high] = ratio.map(|value| value.clamp(RATIOS.start, RATIOS.end));
        chart.draw_series(LineSeries::new(
            [(low, at), (high, at)],
            colour.stroke_width(2),
        ))?;
        chart.draw_series([Circle::new((ratio, at), 4, colour.filled())])?;
    }
    root.present()?;
    Ok(())
}
