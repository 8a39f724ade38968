//! The figure of the page: the curve of each signal, for each traffic and start-up delay.

use plotters::prelude::*;

use super::page::curve;
use super::{STARTUPS_S, ScalingResult, ScalingRule, TrafficShape};
use crate::report::figures::COLOURS;

const SIZE: (u32, u32) = (1_080, 900);

/// The least share in time that is shown.
const SHARE_MIN: f64 = 0.5;

/// The curves of these results as SVG.
///
/// # Errors
/// When the drawing fails.
pub(super) fn svg(results: &[ScalingResult]) -> Result<String, String> {
    let mut text = String::new();
    draw(results, &mut text).map_err(|error| format!("the figure: {error}"))?;
    Ok(text)
}

fn draw(results: &[ScalingResult], text: &mut String) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::with_string(text, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let areas = root.split_evenly((STARTUPS_S.len(), TrafficShape::ALL.len()));
    let kinds = STARTUPS_S
        .iter()
        .flat_map(|startup_s| TrafficShape::ALL.map(|shape| (*startup_s, shape)));
    for (number, (area, (startup_s, shape))) in areas.iter().zip(kinds).enumerate() {
        let curves = ScalingRule::ALL.map(|rule| curve(results, shape, startup_s, rule));
        let hours = curves.iter().flatten().map(|point| point.0);
        let least = hours.clone().fold(f64::INFINITY, f64::min);
        let most = hours.fold(0.0, f64::max);
        if least >= most {
            continue;
        }
        let mut chart = ChartBuilder::on(area)
            .caption(
                format!("{}, start-up {startup_s} s", shape.name()),
                ("sans-serif", 15),
            )
            .margin(8)
            .x_label_area_size(32)
            .y_label_area_size(44)
            .build_cartesian_2d(least * 0.95..most * 1.02, SHARE_MIN..1.005)?;
        chart
            .configure_mesh()
            .x_labels(6)
            .y_labels(6)
            .x_desc("GPU-hours")
            .x_label_formatter(&|hours| format!("{hours:.0}"))
            .y_label_formatter(&|share| format!("{:.0} %", share * 100.0))
            .draw()?;
        // In the order of the rules; the oracle, the last one, is black.
        for ((rule, curve), colour) in ScalingRule::ALL
            .iter()
            .zip(&curves)
            .zip(COLOURS.into_iter().chain([BLACK]))
        {
            let width = if *rule == ScalingRule::Ours { 3 } else { 1 };
            let points: Vec<(f64, f64)> = curve
                .iter()
                .copied()
                .filter(|point| point.1 >= SHARE_MIN)
                .collect();
            chart.draw_series(
                points
                    .iter()
                    .map(|point| Circle::new(*point, 2 + width, colour.filled())),
            )?;
            let line = chart.draw_series(LineSeries::new(points, colour.stroke_width(width)))?;
            if number == 0 {
                line.label(rule.name()).legend(move |(x, y)| {
                    PathElement::new([(x, y), (x + 14, y)], colour.stroke_width(width))
                });
            }
        }
        if number == 0 {
            let labels = &mut chart.configure_series_labels();
            labels
                .position(SeriesLabelPosition::LowerRight)
                .background_style(WHITE.mix(0.9))
                .label_font(("sans-serif", 11))
                .draw()?;
        }
    }
    root.present()?;
    Ok(())
}
