//! Measures how good predictions were: compares the prediction at the pick with the measurement.
//!
//! The newest outcomes of each endpoint are kept, so that the figures are current and show a drift.
//! MAPE alone says little, because a constant has a good MAPE where times vary little. So there are
//! two more figures. One is the pinball loss at 0.9, which a fit of the p90 minimises. The other is
//! the coverage: the share of outcomes at or below the p90, which should be 0.9.

use std::collections::{BTreeMap, VecDeque};

use pool_state::EncodedObservation;
use scheduler::EndpointRef;

use crate::state::counters::TotalsHistogram;

/// The maximum number of outcomes kept for each endpoint and target. The number is enough for a
/// standard error of the coverage of 3 percentage points at 90 %, and small enough to show a drift
/// and its end.
const RECENT_MAX: usize = 100;

/// A predicted time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PredictedTarget {
    /// Time to the first token.
    Ttft,
    /// Time for each further token.
    Tpot,
}

/// The maximum ratio of outcome to prediction that is added to the sum, so that one prediction near
/// 0 does not dominate the mean.
const RATIO_MAX: f64 = 100.0;

/// The upper bounds of the buckets of the ratio outcome / prediction; a last bucket is unbounded.
/// The bounds are dense around 1, where good predictions are.
pub const RATIO_BOUNDS: [f64; 10] = [0.25, 0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0];

/// The scores of one pool.
#[derive(Debug, Default)]
pub struct PredictionScores {
    rows: BTreeMap<(EndpointRef, PredictedTarget), EndpointOutcomes>,
    /// One comparison for each target, in the order of [`PredictedTarget::ALL`].
    compared: [PredictionComparison; 2],
}

/// All predictions of one target whose outcome is known, with these outcomes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PredictionComparison {
    /// The predictions, in ms.
    pub predicted_ms: TotalsHistogram,
    /// The outcomes, in ms.
    pub actual_ms: TotalsHistogram,
    /// The ratio of outcome to prediction: the counts by bucket of [`RATIO_BOUNDS`].
    pub ratios: [u64; RATIO_BOUNDS.len() + 1],
    pub ratio_sum: f64,
}

/// The outcomes of one endpoint and target.
#[derive(Debug, Default)]
struct EndpointOutcomes {
    count: u64,
    recent: VecDeque<PredictionOutcome>,
}

#[derive(Clone, Copy, Debug)]
struct PredictionOutcome {
    relative_error: f64,
    pinball_ms: f64,
    covered: bool,
}

/// The quality of predictions, over the newest outcomes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PredictionScore {
    /// The number of predictions that were ever compared with an outcome.
    pub count: u64,
    /// The number of outcomes that the other fields cover.
    pub recent: usize,
    /// The mean absolute error relative to the outcome (1 = 100 %).
    pub mape: f64,
    /// The pinball loss at 0.9, in ms.
    pub pinball90_ms: f64,
    /// The share of outcomes at or below the predicted p90.
    pub coverage90: f64,
}

// === impl PredictedTarget ===

impl PredictedTarget {
    pub const ALL: [Self; 2] = [Self::Ttft, Self::Tpot];

    /// Returns the name of the target in metrics and pages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ttft => "ttft",
            Self::Tpot => "tpot",
        }
    }

    /// Returns the prediction, its p90 and the outcome, ms; `None` if one of them is unknown.
    fn prediction_and_outcome(self, observed: &EncodedObservation) -> Option<(f64, f64, f64)> {
        let predicted = observed.predicted?;
        let (middle, decile, seen) = match self {
            Self::Ttft => (
                predicted.ttft_ms,
                predicted.ttft_p90_ms,
                observed.observation.ttft_ms?,
            ),
            Self::Tpot => (
                predicted.tpot_ms,
                predicted.tpot_p90_ms,
                observed.observation.tpot_ms?,
            ),
        };
        (seen > 0.0).then_some((f64::from(middle), f64::from(decile), f64::from(seen)))
    }
}

// === impl PredictionScores ===

impl PredictionScores {
    /// Records the outcome of a successful request. Does nothing without a prediction.
    pub fn record(&mut self, observed: &EncodedObservation) {
        for (target, compared) in PredictedTarget::ALL.into_iter().zip(&mut self.compared) {
            let Some((middle, decile, seen)) = target.prediction_and_outcome(observed) else {
                continue;
            };
            compared.record(middle, seen);
            let over = seen - decile;
            let outcome = PredictionOutcome {
                relative_error: (middle - seen).abs() / seen,
                pinball_ms: if over >= 0.0 { 0.9 * over } else { -0.1 * over },
                covered: over <= 0.0,
            };
            self.rows
                .entry((observed.observation.endpoint, target))
                .or_default()
                .record(outcome);
        }
    }

    /// Keeps only the endpoints (with their generation) for which `is_present` holds.
    pub fn retain(&mut self, is_present: impl Fn(EndpointRef) -> bool) {
        self.rows.retain(|(endpoint, _), _| is_present(*endpoint));
    }

    /// Returns all comparisons, in the order of [`PredictedTarget::ALL`].
    #[must_use]
    pub fn comparisons(&self) -> [PredictionComparison; 2] {
        self.compared
    }

    #[must_use]
    pub fn of_endpoint(&self, endpoint: EndpointRef, target: PredictedTarget) -> PredictionScore {
        PredictionScore::from_rows(self.rows.get(&(endpoint, target)))
    }

    /// Returns the score of all endpoints together.
    #[must_use]
    pub fn of_pool(&self, target: PredictedTarget) -> PredictionScore {
        PredictionScore::from_rows(
            self.rows
                .iter()
                .filter(|((_, of), _)| *of == target)
                .map(|(_, row)| row),
        )
    }
}

// === impl PredictionComparison ===

impl PredictionComparison {
    fn record(&mut self, predicted_ms: f64, actual_ms: f64) {
        self.predicted_ms.record(predicted_ms);
        self.actual_ms.record(actual_ms);
        // For a prediction of 0, the ratio is the maximum.
        let ratio = if predicted_ms > 0.0 {
            actual_ms / predicted_ms
        } else {
            RATIO_MAX
        };
        if let Some(count) = self
            .ratios
            .get_mut(RATIO_BOUNDS.partition_point(|bound| *bound < ratio))
        {
            *count += 1;
        }
        self.ratio_sum += ratio.min(RATIO_MAX);
    }
}

// === impl EndpointOutcomes ===

impl EndpointOutcomes {
    fn record(&mut self, outcome: PredictionOutcome) {
        self.count += 1;
        if self.recent.len() >= RECENT_MAX {
            self.recent.pop_front();
        }
        self.recent.push_back(outcome);
    }
}

// === impl PredictionScore ===

impl PredictionScore {
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    fn from_rows<'o>(rows: impl IntoIterator<Item = &'o EndpointOutcomes>) -> Self {
        let mut score = Self::default();
        let mut covered = 0_usize;
        for row in rows {
            score.count += row.count;
            score.recent += row.recent.len();
            for outcome in &row.recent {
                score.mape += outcome.relative_error;
                score.pinball90_ms += outcome.pinball_ms;
                covered += usize::from(outcome.covered);
            }
        }
        let of = score.recent.max(1) as f64;
        Self {
            mape: score.mape / of,
            pinball90_ms: score.pinball90_ms / of,
            coverage90: covered as f64 / of,
            ..score
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{endpoint, observed};
    use super::*;
    use scheduler::latency::Prediction;

    fn predicted(ttft_ms: f32) -> Option<Prediction> {
        Some(Prediction {
            ttft_ms,
            tpot_ms: 10.0,
            ttft_p90_ms: 2.0 * ttft_ms,
            tpot_p90_ms: 12.0,
        })
    }

    #[test]
    fn errors_are_of_what_was_predicted_at_the_pick() {
        let mut calibration = PredictionScores::default();
        for (at, seen, predicted) in [
            (1, 100.0, predicted(80.0)),
            (1, 200.0, predicted(80.0)),
            (2, 50.0, predicted(50.0)),
            (2, 50.0, None),
        ] {
            calibration.record(&EncodedObservation {
                predicted,
                ..observed(at, seen)
            });
        }
        let score = calibration.of_endpoint(endpoint(1), PredictedTarget::Ttft);
        assert_eq!((score.count, score.recent, score.coverage90), (2, 2, 0.5));
        assert!((score.mape - (0.2 + 0.6) / 2.0).abs() < 1e-6, "{score:?}");
        assert!(
            (score.pinball90_ms - (0.1 * 60.0 + 0.9 * 40.0) / 2.0).abs() < 1e-6,
            "{score:?}"
        );
        assert_eq!(
            calibration
                .of_endpoint(endpoint(2), PredictedTarget::Ttft)
                .count,
            1,
            "the other request had no prediction"
        );
        assert_eq!(
            (
                calibration.of_pool(PredictedTarget::Ttft).count,
                calibration.of_pool(PredictedTarget::Tpot).count
            ),
            (3, 3)
        );
        calibration.retain(|at| at == endpoint(2));
        assert_eq!(
            (
                calibration.of_pool(PredictedTarget::Ttft).count,
                calibration
                    .of_endpoint(endpoint(1), PredictedTarget::Ttft)
                    .count
            ),
            (1, 0)
        );
    }

    #[test]
    fn the_past_is_forgotten() {
        let mut calibration = PredictionScores::default();
        let mut note = |seen, times| {
            (0..times).for_each(|_| {
                calibration.record(&EncodedObservation {
                    predicted: predicted(100.0),
                    ..observed(1, seen)
                });
            });
        };
        note(300.0, 1_000);
        note(100.0, RECENT_MAX);
        let score = calibration.of_pool(PredictedTarget::Ttft);
        assert_eq!(
            (score.count, score.recent, score.mape),
            (1_000 + RECENT_MAX as u64, RECENT_MAX, 0.0)
        );
    }
}
