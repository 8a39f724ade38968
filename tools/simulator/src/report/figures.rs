//! The figures of the page: a row for each workload, a dot for each policy, better to the left.

use std::path::Path;

use plotters::coord::CoordTranslate;
use plotters::prelude::*;

use super::ratios::SettingRuns;
use crate::measure::Measure;
use crate::policy::OURS;
use crate::recovery::{CURVE_S, RecoveryResult};
use crate::workload::WorkloadKind;

const SIZE: (u32, u32) = (900, 380);

/// Colours that colour-blind readers can distinguish (Okabe and Ito), and shades of grey for
/// policies that are far off.
pub(crate) const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(213, 94, 0),
    RGBColor(86, 180, 233),
];

/// The policies shown: those of llm-d, LMetric's, those that proxies have themselves, and the
/// oracle.
const SHOWN: [&str; 6] = [
    "2/2/3/2",
    "affinity+token-load",
    "lmetric",
    "least-request",
    "round-robin",
    "oracle",
];

/// Draws the ratio of each policy to ours, as the geometric mean over loads and seeds.
pub(super) fn ratios(
    runs: &SettingRuns<'_>,
    path: &Path,
    title: &str,
    measure: Measure,
) -> Result<(), String> {
    draw(runs, path, title, measure).map_err(|error| format!("{}: {error}", path.display()))
}

fn draw(
    runs: &SettingRuns<'_>,
    path: &Path,
    title: &str,
    measure: Measure,
) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let kinds: Vec<&str> = WorkloadKind::MAIN.iter().map(|kind| kind.name()).collect();
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
                kinds
                    .get(row as usize)
                    .map_or(String::new(), |kind| (*kind).to_owned())
            } else {
                String::new()
            }
        })
        .x_label_formatter(&|ratio| format!("{ratio}x"))
        .x_desc("times ours; left of 1 is better than ours")
        .draw()?;
    chart.draw_series(LineSeries::new(
        [(1.0, 0.0), (1.0, rows)],
        BLACK.stroke_width(2),
    ))?;
    for (policy, colour) in SHOWN
        .iter()
        .zip(COLOURS)
        .filter(|(policy, _)| !runs.loads(policy).is_empty())
    {
        let dots = kinds.iter().enumerate().filter_map(|(row, kind)| {
            let (ratio, _) = runs.against_best(kind, measure, policy, &[OURS])?;
            Some(Circle::new(
                (ratio.mean.clamp(0.5, 32.0), rows - row as f64 - 0.5),
                6,
                colour.filled(),
            ))
        });
        chart
            .draw_series(dots)?
            .label(*policy)
            .legend(move |(x, y)| Circle::new((x + 8, y), 6, colour.filled()));
    }
    legend(&mut chart)?;
    root.present()?;
    Ok(())
}

/// The policies whose recovery is shown.
const BACK: [&str; 6] = [
    OURS,
    "2/2/3/2",
    "2/2/3+active",
    "affinity+token-load",
    "lmetric",
    "least-request",
];

/// Draws each policy's ratio over time from the change of the pool on, as the geometric mean over
/// workloads.
pub(super) fn recovery(
    rows: &[RecoveryResult],
    setting: &str,
    path: &Path,
    title: &str,
) -> Result<(), String> {
    let of = |policy: &str| {
        let rows = rows
            .iter()
            .filter(|row| row.setting == setting && row.policy == policy);
        let curves: Vec<&Vec<f64>> = rows.map(|row| &row.curve).collect();
        let length = curves.iter().map(|curve| curve.len()).min().unwrap_or(0);
        let log = |at: usize| {
            curves
                .iter()
                .filter_map(|curve| curve.get(at))
                .map(|ratio| ratio.ln())
                .sum::<f64>()
        };
        (0..length)
            .map(|at| ((at * CURVE_S) as f64, (log(at) / curves.len() as f64).exp()))
            .collect()
    };
    draw_recovery(&BACK.map(of), path, title)
        .map_err(|error| format!("{}: {error}", path.display()))
}

fn draw_recovery(
    curves: &[Vec<(f64, f64)>],
    path: &Path,
    title: &str,
) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let end = curves
        .iter()
        .filter_map(|curve| curve.last())
        .map(|(at, _)| *at)
        .fold(1.0, f64::max);
    let highest = curves
        .iter()
        .flatten()
        .map(|(_, ratio)| *ratio)
        .fold(1.5, f64::max);
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(60)
        .build_cartesian_2d(0.0..end, (0.8..highest * 1.1).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("seconds after the change")
        .y_desc("mean TTFT, times that of a pool that was so before")
        .y_label_formatter(&|ratio| format!("{ratio:.1}x"))
        .draw()?;
    chart.draw_series(LineSeries::new([(0.0, 1.0), (end, 1.0)], BLACK))?;
    for ((policy, curve), colour) in BACK.iter().zip(curves).zip(COLOURS) {
        let line = LineSeries::new(
            curve.iter().map(|&(at, ratio)| (at, ratio.max(0.8))),
            colour.stroke_width(2),
        );
        chart
            .draw_series(line)?
            .label(*policy)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
    }
    legend(&mut chart)?;
    root.present()?;
    Ok(())
}

fn legend<'a, B: DrawingBackend + 'a, C: CoordTranslate>(
    chart: &mut ChartContext<'a, B, C>,
) -> Result<(), DrawingAreaErrorKind<B::ErrorType>> {
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.9))
        .border_style(BLACK.mix(0.4))
        .label_font(("sans-serif", 13))
        .draw()
}
