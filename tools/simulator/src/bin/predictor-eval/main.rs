//! Evaluates latency predictors on measurements of real engines: `make predictor-eval`.
//!
//! Every file is replayed in the order of time, with all predictors side by side, in three views:
//!
//! - *As served*: a prediction uses only the outcomes that were known when the request was picked.
//!   A request that waited for minutes is predicted from outcomes that are minutes old.
//! - *In order*: one row after the other, each predicted from all rows before it.
//! - *Frozen*: predictors are fitted to the first 70 % and learn nothing after.
//!
//! In the first two views all predictors continue to learn: ours after each row, the others by a
//! fit to all known rows after every hundred, as the reference's trainer does. The figures of all
//! views are of the last 30 %. With `--tune` the last 30 % are left out: the constants were chosen
//! on the rest alone.
#![deny(clippy::indexing_slicing)]

mod baselines;
mod gbdt;
mod rows;

use std::io::Write;
use std::ops::RangeInclusive;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use scheduler::latency::learn::{LatencyLearner, Observation, RequestEnd};
use scheduler::latency::{Calibration, LatencyModel, Prediction};
use scheduler::{EndpointRef, Generation, Slot};
use serde_json::json;

use crate::baselines::{BaselinePrediction, BaselinePredictor, FittedBaseline};
use crate::rows::{EvaluatedTarget, EvaluationRow, EvaluationTrace};

#[derive(Parser)]
#[command(
    about = "Evaluates latency predictors on measurements of real engines",
    version
)]
struct Args {
    /// Leave out the last 30 % of each file. Use it to choose constants.
    #[arg(long)]
    tune: bool,
    /// Use only files whose name contains this.
    #[arg(long, default_value = "")]
    only: String,
    /// Evaluate only our predictor.
    #[arg(long)]
    ours: bool,
    /// The file for the figures.
    #[arg(long, default_value = "target/bench/predictor.json")]
    out: String,
}

/// The part of a file that predictors learn from before figures count.
const FIRST: f64 = 0.7;

/// In the view in order, this many times the usual time is between rows: a second, after which
/// everything that was learned has been published.
const IN_ORDER_SLOWER: u64 = 10;

/// The rows between two fits of the other predictors.
const REFIT_ROWS: usize = 100;

/// The files do not name the pod that served, so all rows have the same one.
const POD: EndpointRef = EndpointRef {
    slot: Slot(0),
    generation: Generation(1),
};

/// The rows that a prediction may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EvaluationView {
    /// The rows whose outcomes were known when the request was picked.
    Served,
    /// All rows before it.
    InOrder,
    /// The first part of the file.
    Frozen,
}

const VIEWS: [EvaluationView; 3] = [
    EvaluationView::Served,
    EvaluationView::InOrder,
    EvaluationView::Frozen,
];

/// One line of the result.
struct EvaluationLine {
    trace: String,
    target: EvaluatedTarget,
    view: EvaluationView,
    model: String,
    calibration: Calibration,
    abstained: u64,
}

const OURS: &str = "switchpoint";

/// The required coverage of every file in the view in order.
const COVERAGE: RangeInclusive<f64> = 0.88..=0.92;

// === impl EvaluationView ===

impl EvaluationView {
    fn name(self) -> &'static str {
        match self {
            Self::Served => "as served",
            Self::InOrder => "in order",
            Self::Frozen => "frozen",
        }
    }

    /// The learner's clock, ms. In the view in order, a request arrives seconds after the one
    /// before it has ended and its outcome is known.
    fn clock(self, known_ms: u64) -> u64 {
        if self == Self::InOrder {
            known_ms * IN_ORDER_SLOWER
        } else {
            known_ms
        }
    }
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "predictor-eval: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), String> {
    let mut lines = Vec::new();
    for mut trace in rows::all()? {
        if !trace.name.contains(&args.only) {
            continue;
        }
        if args.tune {
            trace.keep_first(FIRST);
        }
        ours(&trace, &mut lines);
        if !args.ours {
            for target in [EvaluatedTarget::Ttft, EvaluatedTarget::Tpot] {
                baselines::ALL
                    .iter()
                    .for_each(|rival| theirs(&trace, target, *rival, &mut lines));
            }
        }
    }
    print(&lines);
    print_required(&lines);
    if !args.tune {
        write(&lines, Path::new(&args.out))?;
    }
    Ok(())
}

/// Evaluates our predictor, in every view.
fn ours(trace: &EvaluationTrace, lines: &mut Vec<EvaluationLine>) {
    let split = trace.split(FIRST);
    for view in trace.views() {
        let mut learner = LatencyLearner::default();
        let mut model: Option<LatencyModel> = None;
        let mut said: Vec<Option<Prediction>> = vec![None; trace.rows.len()];
        let mut results = [(Calibration::default(), 0); 2];
        for event in trace.events() {
            match event {
                rows::EvaluationEvent::Picked(at) => {
                    let predicted = model
                        .as_ref()
                        .zip(trace.rows.get(at))
                        .and_then(|(model, row)| model.predict(POD, &row.conditions).ok());
                    if let Some(place) = said.get_mut(at) {
                        *place = predicted;
                    }
                }
                rows::EvaluationEvent::Known(at) => {
                    let Some(row) = trace.rows.get(at) else {
                        continue;
                    };
                    let now = || {
                        model
                            .as_ref()
                            .and_then(|model| model.predict(POD, &row.conditions).ok())
                    };
                    // In any view but the one in order, the first part is learned as served.
                    let at_pick = view == EvaluationView::Served
                        || (view == EvaluationView::Frozen && at < split);
                    let predicted = if at_pick {
                        said.get(at).copied().flatten()
                    } else {
                        now()
                    };
                    if at >= split {
                        count(&mut results, row, predicted);
                    }
                    if at < split || view != EvaluationView::Frozen {
                        // In order, each request ended before the next arrived.
                        let delay = if at_pick { trace.delay(row) } else { 0.0 };
                        learner.observe_after(&observation(row), predicted.as_ref(), delay);
                        model = learner.publish(view.clock(row.known_ms)).or(model);
                    }
                }
            }
        }
        for (target, (calibration, abstained)) in [EvaluatedTarget::Ttft, EvaluatedTarget::Tpot]
            .into_iter()
            .zip(results)
        {
            lines.push(EvaluationLine {
                trace: trace.name.clone(),
                target,
                view,
                model: OURS.to_owned(),
                calibration,
                abstained,
            });
        }
        if let Some(model) = &model {
            let _ = writeln!(
                std::io::stderr(),
                "{} {}: {:?}, trees {:?}, {} bytes",
                trace.name,
                view.name(),
                learner.standing(),
                model.trees(),
                model.bytes()
            );
        }
    }
}

fn count(
    results: &mut [(Calibration, u64); 2],
    row: &EvaluationRow,
    predicted: Option<Prediction>,
) {
    let [ttft, tpot] = results;
    for ((calibration, abstained), actual, of) in [
        (
            ttft,
            row.ttft_ms,
            (|p: &Prediction| (p.ttft_ms, p.ttft_p90_ms)) as fn(&Prediction) -> (f32, f32),
        ),
        (tpot, row.tpot_ms, |p| (p.tpot_ms, p.tpot_p90_ms)),
    ] {
        let Some(actual) = actual else { continue };
        match predicted.as_ref().map(of) {
            Some((middle, p90)) => calibration.add(middle, p90, actual),
            None => *abstained += 1,
        }
    }
}

fn observation(row: &EvaluationRow) -> Observation {
    let EvaluationRow {
        conditions,
        ttft_ms,
        tpot_ms,
        ..
    } = *row;
    let output_tokens = None;
    let first_token = None;
    let gap = None;
    Observation {
        endpoint: POD,
        conditions,
        ended: RequestEnd::Done,
        ttft_ms,
        tpot_ms,
        output_tokens,
        first_token,
        gap,
    }
}

/// Evaluates another predictor for one target, in every view.
fn theirs(
    trace: &EvaluationTrace,
    target: EvaluatedTarget,
    rival: BaselinePredictor,
    lines: &mut Vec<EvaluationLine>,
) {
    let split = trace.split(FIRST);
    let known = |upto: usize| -> Vec<(&EvaluationRow, f32)> {
        let rows = trace.rows.iter().take(upto);
        rows.filter_map(|row| row.actual(target).map(|actual| (row, actual)))
            .collect()
    };
    let frozen = rival.fit(&known(split));
    let mut fitted = None;
    let mut fitted_rows = 0;
    let mut said: Vec<Option<BaselinePrediction>> = vec![None; trace.rows.len()];
    let mut results = [(Calibration::default(), 0); VIEWS.len()];
    for event in trace.events() {
        match event {
            rows::EvaluationEvent::Picked(at) => {
                if let (Some(fitted), Some(row), Some(place)) =
                    (&fitted, trace.rows.get(at), said.get_mut(at))
                {
                    *place = Some(rival.predict(fitted, row));
                }
            }
            rows::EvaluationEvent::Known(at) => {
                let Some((row, actual)) = trace
                    .rows
                    .get(at)
                    .and_then(|row| Some((row, row.actual(target)?)))
                else {
                    continue;
                };
                if at >= split {
                    let predict = |fitted: &FittedBaseline| rival.predict(fitted, row);
                    let all = [
                        said.get(at).copied().flatten(),
                        fitted.as_ref().map(predict),
                        Some(predict(&frozen)),
                    ];
                    for ((calibration, abstained), said) in results.iter_mut().zip(all) {
                        match said {
                            Some(said) => calibration.add(said.middle_ms, said.p90_ms, actual),
                            None => *abstained += 1,
                        }
                    }
                }
                // In time order, all rows before this one are known.
                if at + 1 >= fitted_rows + REFIT_ROWS {
                    fitted = Some(rival.fit(&known(at + 1)));
                    fitted_rows = at + 1;
                }
            }
        }
    }
    for (view, (calibration, abstained)) in VIEWS
        .into_iter()
        .zip(results)
        .filter(|(view, _)| trace.views().any(|of| of == *view))
    {
        lines.push(EvaluationLine {
            trace: trace.name.clone(),
            target,
            view,
            model: rival.name().to_owned(),
            calibration,
            abstained,
        });
    }
}

fn print(lines: &[EvaluationLine]) {
    let mut out = std::io::stdout().lock();
    let mut heading = None;
    let mut sorted: Vec<&EvaluationLine> = lines.iter().collect();
    sorted.sort_by_key(|line| (line.trace.clone(), line.target.name(), line.view as usize));
    for line in sorted {
        let this = (line.trace.clone(), line.target, line.view);
        if heading.as_ref() != Some(&this) {
            let name = format!(
                "{} {}, {}",
                line.trace,
                line.target.name(),
                line.view.name()
            );
            let _ = writeln!(
                out,
                "\n{name:<56}{:>8}{:>16}{:>26}{:>8}{:>10}",
                "MAPE", "pinball@0.9", "coverage (95 %)", "n", "abstained"
            );
            heading = Some(this);
        }
        let c = &line.calibration;
        let percent = |share: Option<f64>| {
            share.map_or_else(|| "-".to_owned(), |share| format!("{:.1} %", 100.0 * share))
        };
        let pinball = c
            .pinball90_ms()
            .map_or_else(|| "-".to_owned(), |ms| format!("{ms:.3} ms"));
        let between = interval95(c).map_or_else(String::new, |[low, high]| {
            format!(" ({:.1} to {:.1})", 100.0 * low, 100.0 * high)
        });
        let worse = if is_worse(line, lines) {
            "  worse than another"
        } else {
            ""
        };
        let _ = writeln!(
            out,
            "  {:<54}{:>8}{pinball:>16}{:>26}{:>8}{:>10}{worse}",
            line.model,
            percent(c.mape()),
            percent(c.coverage90()) + &between,
            c.count(),
            line.abstained
        );
    }
}

/// Prints the requirements for every file and target in the view in order, and whether ours meets
/// them.
fn print_required(lines: &[EvaluationLine]) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(
        out,
        "\nrequired in order: pinball loss below the constant's and the ridge's, coverage 88 to 92 %"
    );
    for line in lines
        .iter()
        .filter(|line| line.model == OURS && line.view == EvaluationView::InOrder)
    {
        let pinball = line.calibration.pinball90_ms();
        let coverage = line.calibration.coverage90();
        let rivals: Vec<&EvaluationLine> = others(line, lines)
            .filter(|other| ["constant", "ridge"].contains(&other.model.as_str()))
            .collect();
        let below = |other: &&EvaluationLine| {
            pinball
                .zip(other.calibration.pinball90_ms())
                .is_some_and(|(ours, theirs)| ours < theirs)
        };
        let said = |reached: bool| if reached { "reached" } else { "MISSED" };
        let loss = if rivals.is_empty() {
            "not compared"
        } else {
            said(rivals.iter().all(below))
        };
        let within = coverage.is_some_and(|coverage| COVERAGE.contains(&coverage));
        let name = format!("{} {}", line.trace, line.target.name());
        let percent = 100.0 * coverage.unwrap_or(f64::NAN);
        let _ = writeln!(
            out,
            "  {name:<54}pinball loss {loss:<14}coverage {percent:5.1} % {}",
            said(within)
        );
    }
}

/// The 95 % confidence interval of the true coverage if outcomes were independent (Wilson's
/// interval). They are not quite, so the true interval is wider.
fn interval95(calibration: &Calibration) -> Option<[f64; 2]> {
    const Z: f64 = 1.96;
    let share = calibration.coverage90()?;
    let count = calibration.count() as f64;
    let middle = share + Z * Z / (2.0 * count);
    let weight = 1.0 + Z * Z / count;
    let half = Z * (share * (1.0 - share) / count + (Z / (2.0 * count)).powi(2)).sqrt();
    Some([(middle - half) / weight, (middle + half) / weight])
}

/// Whether a line of ours is worse than another predictor's, by its pinball loss or by its MAPE.
fn is_worse(line: &EvaluationLine, lines: &[EvaluationLine]) -> bool {
    let above = |a: Option<f64>, b: Option<f64>| a.zip(b).is_some_and(|(a, b)| a > b);
    let c = &line.calibration;
    let better = |other: &EvaluationLine| {
        above(c.pinball90_ms(), other.calibration.pinball90_ms())
            || above(c.mape(), other.calibration.mape())
    };
    line.model == OURS && others(line, lines).any(better)
}

/// The lines of the same file, target and view as this one.
fn others<'l>(
    line: &'l EvaluationLine,
    lines: &'l [EvaluationLine],
) -> impl Iterator<Item = &'l EvaluationLine> {
    lines.iter().filter(|other| {
        (&other.trace, other.target, other.view) == (&line.trace, line.target, line.view)
    })
}

fn write(lines: &[EvaluationLine], path: &Path) -> Result<(), String> {
    let row = |line: &EvaluationLine| {
        let c = &line.calibration;
        let mape = c.mape();
        let pinball90 = c.pinball90_ms();
        let coverage90 = c.coverage90();
        json!({"trace": line.trace, "target": line.target.name(), "view": line.view.name(), "model": line.model, "mape": mape, "pinball90": pinball90, "coverage90": coverage90, "coverage90_interval95": interval95(c), "n": c.count(), "abstained": line.abstained})
    };
    let text = json!({"rows": lines.iter().map(row).collect::<Vec<_>>()});
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    std::fs::create_dir_all(path.parent().unwrap_or(Path::new("."))).map_err(failed)?;
    std::fs::write(path, format!("{text:#}\n")).map_err(failed)
}
