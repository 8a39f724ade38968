//! The campaign `scaling`: SLO attainment against GPU-hours, by signal to scale by, with replicas
//! that take 30 s to 5 min to start. Its results are in docs/how-to/scale.md.

mod figure;
mod limits;
mod page;
mod planner;
mod rules;
mod traffic;
mod world;

use std::io::Write;
use std::path::Path;

use serde_json::{Value, json};

pub(crate) use self::rules::{ScalingRule, ScalingSetting};
pub(crate) use self::traffic::TrafficShape;
use self::world::ScalingOutcome;
use crate::grid::parallel;

/// The start-up delays, seconds.
pub(crate) const STARTUPS_S: [f64; 3] = [30.0, 60.0, 300.0];

/// One point of a curve, of one seed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ScalingResult {
    pub(crate) traffic: String,
    pub(crate) startup_s: f64,
    pub(crate) signal: String,
    pub(crate) setting: ScalingSetting,
    pub(crate) seed: u64,
    pub(crate) outcome: ScalingOutcome,
}

/// Runs the campaign with these signals and seeds, and prints a line for each point.
///
/// # Errors
/// When a run fails.
pub(crate) fn campaign(
    rules: &[ScalingRule],
    shapes: &[TrafficShape],
    startups: &[f64],
    seeds: &[u64],
    threads: usize,
) -> Result<Vec<ScalingResult>, String> {
    let mut jobs = Vec::new();
    for &shape in shapes {
        for &startup_s in startups {
            for &rule in rules {
                jobs.extend(rule.settings().into_iter().flat_map(|setting| {
                    seeds
                        .iter()
                        .map(move |&seed| (shape, startup_s, rule, setting, seed))
                }));
            }
        }
    }
    parallel(
        threads,
        &jobs,
        |&(shape, startup_s, rule, setting, seed)| {
            let outcome = world::run(shape, startup_s, (rule, setting), seed)?;
            let traffic = shape.name().to_owned();
            let signal = rule.name().to_owned();
            let _ = writeln!(
                std::io::stderr(),
                "{traffic:<8}{startup_s:>5} s  {signal:<24}{:>6}{:>5} s{seed:>5}  {:.4}  {:.2} h",
                setting.value,
                setting.window_s,
                outcome.attainment,
                outcome.gpu_hours
            );
            Ok(ScalingResult {
                traffic,
                startup_s,
                signal,
                setting,
                seed,
                outcome,
            })
        },
    )
}

/// Writes the results to `data`, prints them into the page `docs`, and draws the figure beside it.
///
/// # Errors
/// When a file cannot be read or written.
pub(crate) fn publish(results: &[ScalingResult], data: &Path, docs: &Path) -> Result<(), String> {
    let failed = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
    let rows: Vec<String> = results
        .iter()
        .map(|result| result.to_json().to_string())
        .collect();
    std::fs::write(data, format!("{{\"rows\":[\n{}\n]}}\n", rows.join(",\n")))
        .map_err(|error| failed(data, error))?;
    let page = std::fs::read_to_string(docs).map_err(|error| failed(docs, error))?;
    std::fs::write(docs, page::with_results(&page, results)?)
        .map_err(|error| failed(docs, error))?;
    let figure = docs.with_extension("svg");
    std::fs::write(&figure, figure::svg(results)?).map_err(|error| failed(&figure, error))
}

// === impl ScalingResult ===

impl ScalingResult {
    fn to_json(&self) -> Value {
        let Self {
            traffic,
            startup_s,
            signal,
            setting,
            seed,
            outcome:
                ScalingOutcome {
                    attainment,
                    gpu_hours,
                },
        } = self;
        let rounded = |number: f64| (number * 1e5).round() / 1e5;
        json!({
            "traffic": traffic, "startup_s": startup_s, "signal": signal, "setting": setting.value, "window_s": setting.window_s, "seed": seed,
            "attainment": rounded(*attainment), "gpu_hours": rounded(*gpu_hours),
        })
    }

    #[cfg(test)]
    fn from_json(row: &Value) -> Option<Self> {
        Some(Self {
            traffic: row["traffic"].as_str()?.to_owned(),
            startup_s: row["startup_s"].as_f64()?,
            signal: row["signal"].as_str()?.to_owned(),
            setting: ScalingSetting {
                value: row["setting"].as_f64()?,
                window_s: row["window_s"].as_f64()?,
            },
            seed: row["seed"].as_u64()?,
            outcome: ScalingOutcome {
                attainment: row["attainment"].as_f64()?,
                gpu_hours: row["gpu_hours"].as_f64()?,
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_one_run() {
        let run = || {
            world::run(
                TrafficShape::Bursts,
                30.0,
                (
                    ScalingRule::Ours,
                    ScalingSetting {
                        value: 1.0,
                        window_s: 300.0,
                    },
                ),
                7,
            )
            .unwrap()
        };
        let once = run();
        assert_eq!(once, run());
        assert!(once.attainment > 0.5 && once.gpu_hours > 2.0, "{once:?}");
    }

    /// A change that breaks the signal shows here, not only when the campaign is run again.
    #[test]
    fn ours_serves_more_in_time_for_less_than_llm_d_at_a_step() {
        let run = |rule, value, window_s| {
            world::run(
                TrafficShape::Step,
                60.0,
                (rule, ScalingSetting { value, window_s }),
                6,
            )
            .unwrap()
        };
        let ours = run(ScalingRule::Ours, 2.0, 300.0);
        let theirs = run(ScalingRule::Saturation, 0.4, 60.0);
        assert!(
            ours.attainment > theirs.attainment && ours.gpu_hours < theirs.gpu_hours,
            "{ours:?} {theirs:?}"
        );
    }
}
