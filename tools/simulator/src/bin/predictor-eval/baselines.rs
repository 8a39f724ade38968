//! The predictors that ours is compared with.

use scheduler::latency::Conditions;

use crate::gbdt::{BoostedTrees, TreeObjective};
use crate::rows::EvaluationRow;

/// A predictor. Each predicts logarithms of ms.
#[derive(Clone, Copy, Debug)]
pub(crate) enum BaselinePredictor {
    /// The median and the p90 of the known times.
    Constant,
    /// Ridge regression on logarithms of the features; the p90 is that of its residuals.
    Ridge,
    /// 200 trees of depth 6 with learning rate 0.05, as in the reference's predictor; separate
    /// trees for the p90.
    Boosted,
}

pub(crate) const ALL: [BaselinePredictor; 3] = [
    BaselinePredictor::Constant,
    BaselinePredictor::Ridge,
    BaselinePredictor::Boosted,
];

/// The prediction for a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BaselinePrediction {
    pub(crate) middle_ms: f32,
    pub(crate) p90_ms: f32,
}

/// A fitted predictor.
pub(crate) enum FittedBaseline {
    Constant(BaselinePrediction),
    Ridge(RidgeModel),
    Boosted(Box<[BoostedTrees; 2]>),
}

/// A model that is linear in standardised inputs.
pub(crate) struct RidgeModel {
    means: Vec<f64>,
    deviations: Vec<f64>,
    weights: Vec<f64>,
    bias: f64,
    p90: f64,
}

const PENALTY: f64 = 1.0;

// === impl BaselinePredictor ===

impl BaselinePredictor {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Constant => "constant",
            Self::Ridge => "ridge",
            Self::Boosted => "gbdt",
        }
    }

    pub(crate) fn fit(self, rows: &[(&EvaluationRow, f32)]) -> FittedBaseline {
        let logs: Vec<f64> = rows.iter().map(|(_, ms)| f64::from(*ms).ln()).collect();
        match self {
            Self::Constant => FittedBaseline::Constant(BaselinePrediction {
                middle_ms: exp(quantile(&logs, 0.5)),
                p90_ms: exp(quantile(&logs, 0.9)),
            }),
            Self::Ridge => FittedBaseline::Ridge(RidgeModel::fit(
                &rows
                    .iter()
                    .map(|(row, _)| logarithms(row))
                    .collect::<Vec<_>>(),
                &logs,
            )),
            Self::Boosted => {
                let inputs: Vec<Vec<f64>> = rows.iter().map(|(row, _)| plain(row)).collect();
                FittedBaseline::Boosted(Box::new([
                    BoostedTrees::fit(&inputs, &logs, TreeObjective::Mean),
                    BoostedTrees::fit(&inputs, &logs, TreeObjective::Quantile(0.9)),
                ]))
            }
        }
    }

    pub(crate) fn predict(
        self,
        fitted: &FittedBaseline,
        row: &EvaluationRow,
    ) -> BaselinePrediction {
        match fitted {
            FittedBaseline::Constant(constant) => *constant,
            FittedBaseline::Ridge(ridge) => {
                let log = ridge.log(&logarithms(row));
                BaselinePrediction {
                    middle_ms: exp(log),
                    p90_ms: exp(log + ridge.p90),
                }
            }
            FittedBaseline::Boosted(both) => {
                let [middle, p90] = &**both;
                let (x, middle_of) = (plain(row), |model: &BoostedTrees, x: &[f64]| {
                    exp(model.log(x))
                });
                BaselinePrediction {
                    middle_ms: middle_of(middle, &x),
                    p90_ms: middle_of(p90, &x),
                }
            }
        }
    }
}

/// The features of the reference's predictor.
fn plain(row: &EvaluationRow) -> Vec<f64> {
    let Conditions {
        queued,
        running,
        requests,
        prefill_tokens,
        context_tokens,
        kv_utilization,
        prompt_tokens,
        uncached_tokens,
    } = row.conditions;
    let queued = queued.unwrap_or(0.0);
    let is_queued = if queued > 0.0 { 1.0 } else { 0.0 };
    let numbers = [
        kv_utilization.unwrap_or(0.0),
        prompt_tokens,
        queued,
        running.unwrap_or(requests),
        requests,
        prefill_tokens,
        context_tokens,
        uncached_tokens,
        is_queued,
    ];
    numbers.iter().map(|number| f64::from(*number)).collect()
}

/// The same features and their logarithms.
fn logarithms(row: &EvaluationRow) -> Vec<f64> {
    let plain = plain(row);
    plain
        .iter()
        .map(|number| number.ln_1p())
        .chain(plain.iter().copied())
        .collect()
}

// === impl RidgeModel ===

impl RidgeModel {
    fn fit(rows: &[Vec<f64>], logs: &[f64]) -> Self {
        let width = rows.first().map_or(0, Vec::len);
        let count = rows.len().max(1) as f64;
        let mean_of = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / count;
        let column = |at: usize| {
            rows.iter()
                .map(move |row| row.get(at).copied().unwrap_or(0.0))
        };
        let means: Vec<f64> = (0..width).map(|at| mean_of(&mut column(at))).collect();
        let deviation = |(at, mean): (usize, &f64)| {
            mean_of(&mut column(at).map(|x| (x - mean).powi(2))).sqrt() + 1e-9
        };
        let deviations: Vec<f64> = means.iter().enumerate().map(deviation).collect();
        let bias = mean_of(&mut logs.iter().copied());
        let mut ridge = Self {
            means,
            deviations,
            weights: vec![0.0; width],
            bias,
            p90: 0.0,
        };
        let standard: Vec<Vec<f64>> = rows.iter().map(|row| ridge.standard(row)).collect();
        let mut left: Vec<f64> = logs.iter().map(|log| log - bias).collect();
        for _ in 0..300 {
            for (at, weight) in ridge.weights.iter_mut().enumerate() {
                let of = |row: &Vec<f64>| row.get(at).copied().unwrap_or(0.0);
                let mut own = PENALTY;
                let mut seen = 0.0;
                for (row, left) in standard.iter().zip(&left) {
                    own += of(row).powi(2);
                    seen += of(row) * (left + *weight * of(row));
                }
                let better = seen / own;
                for (row, left) in standard.iter().zip(&mut left) {
                    *left -= (better - *weight) * of(row);
                }
                *weight = better;
            }
        }
        ridge.p90 = quantile(&left, 0.9);
        ridge
    }

    fn standard(&self, row: &[f64]) -> Vec<f64> {
        row.iter()
            .zip(&self.means)
            .zip(&self.deviations)
            .map(|((x, mean), deviation)| (x - mean) / deviation)
            .collect()
    }

    fn log(&self, row: &[f64]) -> f64 {
        self.bias
            + self
                .standard(row)
                .iter()
                .zip(&self.weights)
                .map(|(x, weight)| x * weight)
                .sum::<f64>()
    }
}

/// A quantile, by linear interpolation.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "positions of some thousands"
)]
pub(crate) fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let place = share * (sorted.len().saturating_sub(1)) as f64;
    let low = place.floor() as usize;
    let part = place.fract();
    let at = |at: usize| sorted.get(at).or(sorted.last()).copied().unwrap_or(0.0);
    at(low) + part * (at(low + 1) - at(low))
}

#[expect(clippy::cast_possible_truncation, reason = "rounding is meant")]
fn exp(log: f64) -> f32 {
    log.clamp(-20.0, 20.0).exp() as f32
}
