//! Figures people can read at a glance: a row for each workload, a dot for each policy, better to the left.

use std::path::Path;

use plotters::prelude::*;

use super::ratios::Runs;
use crate::measure::Measure;
use crate::policy::OURS;
use crate::workload::Kind;

const SIZE: (u32, u32) = (900, 380);

/// Colours that people who see few of them tell apart (Okabe and Ito), and shades of grey for those that are far off.
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(213, 94, 0),
    RGBColor(86, 180, 233),
];

/// The policies shown: llm-d's, LMetric's, what proxies do by themselves, and who sees everything.
const SHOWN: [&str; 6] = ["2/2/3/2", "affinity+token-load", "lmetric", "least-request", "round-robin", "oracle"];

/// How many times ours each policy has, geometric mean over loads and seeds.
pub(super) fn ratios(runs: &Runs<'_>, path: &Path, title: &str, measure: Measure) -> Result<(), String> {
    draw(runs, path, title, measure).map_err(|error| format!("{}: {error}", path.display()))
}

fn draw(runs: &Runs<'_>, path: &Path, title: &str, measure: Measure) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let kinds: Vec<&str> = Kind::MAIN.iter().map(|kind| kind.name()).collect();
    let rows = kinds.len() as f64;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(110)
        .build_cartesian_2d((0.5..32.0).log_scale(), 0.0..rows)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .y_labels(kinds.len() * 2 + 1)
        .y_label_formatter(&|at| {
            let row = (rows - at - 0.5).round();
            if (rows - at - 0.5 - row).abs() < 1e-6 {
                kinds.get(row as usize).map_or(String::new(), |kind| (*kind).to_owned())
            } else {
                String::new()
            }
        })
        .x_label_formatter(&|ratio| format!("{ratio}x"))
        .x_desc("times ours; left of 1 is better than ours")
        .draw()?;
    chart.draw_series(LineSeries::new([(1.0, 0.0), (1.0, rows)], BLACK.stroke_width(2)))?;
    for (policy, colour) in SHOWN.iter().zip(COLOURS).filter(|(policy, _)| !runs.loads(policy).is_empty()) {
        let dots = kinds.iter().enumerate().filter_map(|(row, kind)| {
            let (ratio, _) = runs.against_best(kind, measure, policy, &[OURS])?;
            Some(Circle::new((ratio.mean.clamp(0.5, 32.0), rows - row as f64 - 0.5), 6, colour.filled()))
        });
        chart.draw_series(dots)?.label(*policy).legend(move |(x, y)| Circle::new((x + 8, y), 6, colour.filled()));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.9))
        .border_style(BLACK.mix(0.4))
        .label_font(("sans-serif", 13))
        .draw()?;
    root.present()?;
    Ok(())
}
