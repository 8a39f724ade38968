//! The learned state of TTFT or TPOT: the current shape, the offsets of endpoints, and the errors.

use scheduler::latency::shape::LatencyShape;
use scheduler::latency::step::StepModel;
use scheduler::latency::{
    Conditions, Features, Prediction, TERMS, TargetPredictor, features, tpot_terms, ttft_terms,
};

use super::choice::{chosen, errors};
use super::errors::ErrorWindow;
use super::fit::{self, FitRow};
use super::offset::{DELAY_FRESH, EndpointOffsets};
use super::window::{LatencyTarget, RequestSample, SAMPLES_MAX};

/// The learned state of one of the two times, TTFT or TPOT.
#[derive(Clone, Debug)]
pub(super) struct TargetModel {
    target: LatencyTarget,
    pub(super) shape: Option<LatencyShape>,
    pub(super) offsets: EndpointOffsets,
    pub(super) errors: ErrorWindow,
    samples: u32,
    /// The number of samples since the last fit.
    pub(super) fresh: usize,
}

/// The minimum number of new samples for a fit, because a fit takes some ms. A fit also needs one
/// new sample for each `FRESH_PART` samples.
pub(super) const FRESH_MIN: usize = 32;
const FRESH_PART: usize = 8;

/// The newest 1/`NEWEST_PART` of the samples chooses the linear part and the number of trees of a
/// shape.
const NEWEST_PART: usize = 4;

/// The age in samples at which the weight of a sample has fallen to 1/e. Older samples say less
/// about the engine's present behaviour.
const FORGET_SAMPLES: f32 = 3_000.0;

/// The mean offset, as a logarithm (about a fifth), above which the pool as a whole has changed.
/// Samples from before the change then get the weight `BEFORE_DRIFT`.
const DRIFT: f32 = 0.2;
const BEFORE_DRIFT: f32 = 0.1;

/// The conditions of a prompt of usual length at an endpoint without other requests.
const IDLE: Conditions = Conditions {
    queued: None,
    running: None,
    requests: 0.0,
    prefill_tokens: 0.0,
    context_tokens: 0.0,
    kv_utilization: None,
    prompt_tokens: 1_000.0,
    uncached_tokens: 1_000.0,
};

/// A shape that may replace the current one.
pub(super) struct ShapeCandidate {
    /// The shape, fitted to all samples; `None` if there were too few samples.
    pub(super) shape: Option<LatencyShape>,
    /// The loss of the current fit on the newest samples, minus the loss of a new fit that did not
    /// use these samples. The loss is a mean relative error.
    pub(super) gain: f32,
    /// For each sample, the prediction of a fit to the other folds, and its error, both as
    /// logarithms.
    pub(super) errors: Vec<(f32, f32)>,
}

// === impl TargetModel ===

impl TargetModel {
    /// Creates a model without samples, or with the result of an earlier run.
    pub(super) fn new(target: LatencyTarget, earlier: Option<&TargetPredictor>) -> Self {
        let mut errors = ErrorWindow::default();
        if let Some(earlier) = earlier {
            errors.assume(&earlier.spread);
        }
        Self {
            target,
            shape: earlier.map(|earlier| earlier.shape.clone()),
            offsets: EndpointOffsets::default(),
            errors,
            samples: earlier.map_or(0, |earlier| earlier.samples),
            fresh: 0,
        }
    }

    /// Learns from a sample. `predicted` is the prediction at its pick, and `delay` the number of
    /// outcomes that came between its pick and its own outcome. Returns whether a change of the
    /// endpoint was detected.
    pub(super) fn observe(
        &mut self,
        sample: &mut RequestSample,
        x: &Features,
        predicted: Option<&Prediction>,
        delay: f32,
    ) -> bool {
        let Some(log) = sample.log(self.target) else {
            return false;
        };
        self.samples = self.samples.saturating_add(1);
        self.fresh += 1;
        let Some(shape) = &self.shape else {
            return false;
        };
        let middle = log_of(shape, self.target, x);
        let predicted =
            predicted.map(|predicted| self.target.median_and_p90(predicted).map(libm::logf));
        match predicted.filter(|logs| logs.iter().all(|log| log.is_finite())) {
            Some([median, p90]) => {
                self.offsets
                    .confirm(sample.endpoint, median - middle, log - middle);
                self.errors.push(
                    median,
                    log - median,
                    (delay < DELAY_FRESH).then_some(log > p90),
                    delay,
                );
            }
            None => {
                let median =
                    middle + self.offsets.trust() * self.offsets.offset_of(sample.endpoint);
                self.errors.push(median, log - median, None, delay);
            }
        }
        let changed = self.offsets.push(sample.endpoint, log - middle, delay);
        *sample.relative_mut(self.target) = self.offsets.relative(sample.endpoint);
        changed
    }

    /// Returns the logarithm of the ratio between this time and the time on an average endpoint,
    /// and the logarithm of the same ratio for the time that the step model gives for [`IDLE`]. So
    /// the conditions that a proxy reports do not change the second logarithm. Returns `None`
    /// before the first fit.
    pub(super) fn vote_logs(&self, ms: f32, x: &Features, step: &StepModel) -> Option<[f64; 2]> {
        let shape = self.shape.as_ref()?;
        let mean = self.offsets.trust() * self.offsets.mean();
        let idle = features(&IDLE, step);
        let [prefill_ms, step_ms, ..] = idle;
        let idle_ms = match self.target {
            LatencyTarget::Ttft => prefill_ms,
            LatencyTarget::Tpot => step_ms,
        };
        let log = |ms: f32, x: &Features| {
            let ms = ms.max(f32::MIN_POSITIVE);
            f64::from(libm::logf(ms) - log_of(shape, self.target, x) - mean)
        };
        Some([log(ms, x), log(idle_ms, &idle)])
    }

    pub(super) fn due(&self) -> bool {
        let samples = usize::try_from(self.samples).unwrap_or(usize::MAX);
        self.fresh >= FRESH_MIN.max(samples.min(SAMPLES_MAX) / FRESH_PART)
    }

    /// Fits the best candidate. The newest quarter of the samples, which is left out of the fit,
    /// chooses the linear part and the trees. The samples since the last fit decide whether the
    /// result is better.
    pub(super) fn candidate(
        &self,
        samples: &[RequestSample],
        in_force: &StepModel,
        step: &StepModel,
    ) -> ShapeCandidate {
        let drifted = self.offsets.mean().abs() > DRIFT;
        let since = if drifted { self.fresh } else { usize::MAX };
        let rows_with = |step: &StepModel| rows(samples, self.target, step, since);
        let rows = rows_with(step);
        let fresh = self.fresh.min(rows.len());
        let (old, newest) =
            rows.split_at(rows.len() - fresh.max(rows.len() / NEWEST_PART).min(rows.len()));
        if old.len() < FRESH_MIN {
            // A first fit has no shape to compare with.
            let enough = rows.len() >= FRESH_MIN && self.shape.is_none();
            return ShapeCandidate {
                shape: enough.then(|| fit::base(&rows, None)),
                gain: 0.0,
                errors: Vec::new(),
            };
        }
        let chosen = chosen(old, newest, fresh);
        let now = self.shape.as_ref().map(|shape| {
            let rows = rows_with(in_force);
            fit::loss(
                shape,
                rows.get(rows.len() - fresh..).unwrap_or_default(),
                self.offsets.trust() * self.offsets.mean(),
            )
        });
        let gain = now.map_or(f32::INFINITY, |now| now - chosen.loss);
        let shape = fit::with_trees(
            &chosen.base.fit(&rows, Some(&chosen.shape)),
            &rows,
            chosen.trees,
        );
        ShapeCandidate {
            shape: Some(shape),
            gain,
            errors: errors(&rows, &chosen),
        }
    }

    /// Recomputes the offsets of all endpoints for the current shape.
    pub(super) fn replay(&mut self, samples: &mut [RequestSample], step: &StepModel, delay: f32) {
        let Some(shape) = &self.shape else { return };
        self.offsets = EndpointOffsets::afresh(&self.offsets);
        for sample in samples {
            let Some(log) = sample.log(self.target) else {
                continue;
            };
            let x = features(&sample.conditions, step);
            self.offsets
                .push(sample.endpoint, log - log_of(shape, self.target, &x), delay);
            *sample.relative_mut(self.target) = self.offsets.relative(sample.endpoint);
        }
    }

    /// Returns the predictor to publish. The mean offset of all endpoints is included in the
    /// weights of its shape, and each endpoint's offset is its difference from that mean.
    pub(super) fn predictor(&self) -> Option<TargetPredictor> {
        let shape = self.shape.as_ref()?;
        let factor = libm::expf(self.offsets.trust() * self.offsets.mean());
        let shape = LatencyShape {
            weights: shape.weights.map(|weight| weight * factor),
            trees: shape.trees.clone(),
        };
        Some(TargetPredictor {
            samples: self.samples,
            shape,
            spread: self.errors.spread(),
        })
    }
}

fn log_of(shape: &LatencyShape, target: LatencyTarget, x: &Features) -> f32 {
    libm::logf(shape.base_ms(&terms(target, x))) + shape.correction(x)
}

fn terms(target: LatencyTarget, x: &Features) -> [f32; TERMS] {
    match target {
        LatencyTarget::Ttft => ttft_terms(x),
        LatencyTarget::Tpot => tpot_terms(x),
    }
}

/// Returns the samples as rows to fit, oldest first, without the differences between endpoints.
/// Rows older than the last `since` get little weight.
// The casts are exact, because there are only some thousands of samples.
fn rows(
    samples: &[RequestSample],
    target: LatencyTarget,
    step: &StepModel,
    since: usize,
) -> Vec<FitRow> {
    let count = samples
        .iter()
        .filter(|sample| sample.log(target).is_some())
        .count();
    let known = samples
        .iter()
        .filter_map(|sample| sample.log(target).map(|log| (sample, log)));
    let row = |(at, (sample, log)): (usize, (&RequestSample, f32))| {
        let x = features(&sample.conditions, step);
        let age = (count - at) as f32;
        let before = if count - at > since {
            BEFORE_DRIFT
        } else {
            1.0
        };
        let weight = before * libm::expf(-age / FORGET_SAMPLES);
        FitRow {
            x,
            terms: terms(target, &x),
            log: log - sample.relative(target),
            weight,
        }
    };
    known.enumerate().map(row).collect()
}
