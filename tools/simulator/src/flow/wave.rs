//! The picture of batch waves: how long chat waits for its first token, with and without flow
//! control.

use plotters::prelude::*;
use serde_json::{Value, json};

use super::scenario::{WAVE_ON_S, WAVE_S};
use super::{FlowRun, NONE, SHARING_MS};
use crate::grid::parallel;
use crate::measure::{quantile, sorted};
use crate::report::figures::COLOURS;

/// What is drawn: chat beside waves of long prompts, that ask for 1.3 of the capacity together.
const RUN: FlowRun<'_> = FlowRun {
    scenario: "prompts",
    policy: NONE,
    load: 1.3,
    seed: 1,
    seconds: 120.0,
    proxies: 1,
    sharing_ms: SHARING_MS,
    alone: false,
};
const POLICIES: [(&str, &str); 2] = [
    (NONE, "without flow control"),
    ("ours", "with flow control"),
];

const SIZE: (u32, u32) = (900, 380);

/// The TTFTs that are shown, ms.
const TTFT_MS: (f64, f64) = (10.0, 100_000.0);

/// The 95th percentile of chat's TTFT in each second, by policy.
///
/// # Errors
/// When a run fails.
pub(super) fn run(threads: usize) -> Result<Value, String> {
    let runs = POLICIES.map(|(policy, _)| FlowRun { policy, ..RUN });
    let rows = parallel(threads, &runs, |run| {
        let (workload, _, outcomes) = run.outcomes()?;
        let chat = |(number, _): &(u32, _)| workload.class(*number).name == "critical";
        let chat: Vec<_> = (0_u32..)
            .zip(&outcomes)
            .filter(chat)
            .map(|(_, outcome)| outcome)
            .collect();
        let second = |at: u32| {
            let from = f64::from(at) * 1e3;
            let ttft = sorted(
                chat.iter()
                    .filter(|o| (from..from + 1e3).contains(&o.at))
                    .map(|o| o.ttft),
            );
            (!ttft.is_empty()).then(|| json!({"policy": run.policy, "second": at, "ttft_p95_ms": quantile(&ttft, 0.95).round()}))
        };
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "some minutes"
        )]
        Ok((0..run.seconds as u32)
            .filter_map(second)
            .collect::<Vec<_>>())
    })?;
    Ok(json!({"scenario": RUN.scenario, "load": RUN.load, "seed": RUN.seed, "rows": rows.concat()}))
}

/// These results as SVG.
///
/// # Errors
/// When the drawing fails.
pub(super) fn svg(results: &Value) -> Result<String, String> {
    let mut text = String::new();
    draw(results, &mut text).map_err(|error| format!("the figure: {error}"))?;
    Ok(text)
}

fn draw(results: &Value, text: &mut String) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::with_string(text, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .margin(8)
        .x_label_area_size(36)
        .y_label_area_size(70)
        .build_cartesian_2d(0.0..RUN.seconds, (TTFT_MS.0..TTFT_MS.1).log_scale())?;
    let waves = (0..)
        .map(|wave| f64::from(wave) * WAVE_S)
        .take_while(|begin| *begin < RUN.seconds);
    chart.draw_series(waves.map(|begin| {
        Rectangle::new(
            [(begin, TTFT_MS.0), (begin + WAVE_ON_S, TTFT_MS.1)],
            BLACK.mix(0.07).filled(),
        )
    }))?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_desc("seconds; batch requests arrive in the grey parts")
        .y_desc("TTFT of chat, p95 of each second, ms")
        .x_label_formatter(&|second| format!("{second:.0}"))
        .y_label_formatter(&|ms| format!("{ms:.0}"))
        .draw()?;
    for ((policy, name), colour) in POLICIES.into_iter().zip([COLOURS[4], COLOURS[0]]) {
        let rows = results["rows"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(|row| row["policy"] == policy);
        let points = rows.filter_map(|row| {
            Some((
                row["second"].as_f64()?,
                row["ttft_p95_ms"].as_f64()?.clamp(TTFT_MS.0, TTFT_MS.1),
            ))
        });
        let line = chart.draw_series(LineSeries::new(points, colour.stroke_width(2)))?;
        line.label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 14, y)], colour.stroke_width(2)));
    }
    let labels = &mut chart.configure_series_labels();
    labels
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.9))
        .draw()?;
    root.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figure_has_the_published_results_and_chat_passes_each_wave() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let read = |file: &str| std::fs::read_to_string(root.join(file)).unwrap();
        let results: Value = serde_json::from_str(&read(super::super::WAVE_DATA)).unwrap();
        assert!(
            svg(&results).unwrap() == read(super::super::WAVE_FIGURE),
            "simulator flow-wave draws the figure"
        );
        let worst = |policy: &str| {
            let rows = results["rows"]
                .as_array()
                .unwrap()
                .iter()
                .filter(|row| row["policy"] == policy);
            rows.map(|row| row["ttft_p95_ms"].as_f64().unwrap())
                .fold(0.0, f64::max)
        };
        assert!(
            worst("ours") < 500.0 && worst(NONE) > 5_000.0,
            "{} and {} ms",
            worst("ours"),
            worst(NONE)
        );
    }
}
