//! Draws the plots of the page: lines over the size of the body, on logarithmic axes.

use std::path::Path;

use plotters::prelude::*;
use testbed::Result;

const COLOURS: [RGBColor; 2] = [RGBColor(0, 170, 102), RGBColor(204, 68, 0)];

/// Draws two named lines, whose coordinates must all be above 0.
///
/// # Errors
/// Fails if the picture cannot be written.
pub(super) fn draw(path: &Path, title: &str, lines: &[(&str, Vec<(f64, f64)>); 2]) -> Result<()> {
    try_draw(path, title, lines).map_err(|error| format!("{}: {error}", path.display()).into())
}

fn try_draw(
    path: &Path,
    title: &str,
    lines: &[(&str, Vec<(f64, f64)>); 2],
) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let points = || lines.iter().flat_map(|(_, points)| points);
    let root = SVGBackend::new(path, (640, 360)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 15))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(56)
        .build_cartesian_2d(
            decades(points().map(|point| point.0)).log_scale(),
            decades(points().map(|point| point.1)).log_scale(),
        )?;
    chart
        .configure_mesh()
        .x_desc("body, bytes")
        .y_desc("µs")
        .draw()?;
    for ((name, points), colour) in lines.iter().zip(COLOURS) {
        chart
            .draw_series(LineSeries::new(points.clone(), colour.stroke_width(2)))?
            .label(*name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
    }
    chart.configure_series_labels().draw()?;
    root.present()?;
    Ok(())
}

/// Returns the range of the values, extended to powers of ten.
fn decades(values: impl Iterator<Item = f64>) -> std::ops::Range<f64> {
    let (low, high) = values.fold((10.0_f64, 1.0_f64), |(low, high), value| {
        (low.min(value), high.max(value))
    });
    10f64.powf(low.log10().floor())..10f64.powf(high.log10().ceil())
}
