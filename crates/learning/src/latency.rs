//! Learns a [`LatencyModel`] from finished requests.
//!
//! Each observation goes into a bounded, stratified window, so that common requests do not push out
//! rare ones. It updates the offset of its endpoint at once. When enough new observations have
//! arrived, the learner fits new shapes to the older part of the window and tests them on the
//! newest part, which was used neither for this fit nor for the model in force. A new shape is
//! adopted only if it is better there. So one model is in force at any time; its shape changes
//! slowly, its offsets change quickly.
//!
//! ```text
//! observe ──► endpoint offset, error of the prediction (for p90), window
//! publish ──► enough new? fit to the old, test on the new, better? fit to all
//!         ──► model in force + offsets + p90
//! ```
//!
//! An aborted or failed request is not learned from: its full latency is unknown. Observations with
//! impossible numbers are refused.

mod choice;
mod errors;
mod fit;
mod offset;
mod p90;
mod window;

use std::ops::RangeInclusive;

use choice::{chosen, errors};
use errors::ErrorWindow;
use fit::FitRow;
use offset::{DELAY_FRESH, EndpointOffsets};
use window::{LatencyTarget, RequestSample, SampleWindow};

use scheduler::latency::shape::LatencyShape;
use scheduler::latency::step::StepModel;
use scheduler::latency::{
    BEYOND_TIMES, EndpointOffset, FEATURES, FEATURES_COUNT, Features, LatencyModel, Observation,
    Prediction, RequestEnd, TERMS, TargetPredictor, features, tpot_terms, ttft_terms,
};
use scheduler::{EndpointRef, Generation};

use crate::step::StepLearner;

/// The learner's use of an observation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObservationVerdict {
    Learned,
    /// Not learned from: the request did not complete, so its latency is unknown.
    Censored,
    /// Not learned from: its numbers are impossible.
    Refused,
}

/// Counters of the learner, for status output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LearnerStatus {
    /// Observations learned from.
    pub learned: u64,
    /// Observations of requests that were aborted or failed.
    pub censored: u64,
    /// Observations refused because of impossible numbers.
    pub refused: u64,
    /// Observations now in the window.
    pub window: usize,
    /// Fits whose shapes replaced those in force.
    pub adopted: u64,
    /// Fits that were rejected because they were no better on the newest observations.
    pub rejected: u64,
    /// How often a change of an endpoint, or of the whole pool, was detected.
    pub drifts: u64,
}

/// Learns a [`StepModel`] and, on top of it, a [`LatencyModel`]. Has one writer; time is an
/// argument.
#[derive(Clone, Debug, Default)]
pub struct LatencyLearner {
    steps: StepLearner,
    /// The step model that the shapes in force were fitted with.
    step: StepModel,
    ttft: TargetModel,
    tpot: TargetModel,
    window: SampleWindow,
    /// The largest value seen of each feature.
    most: Features,
    standing: LearnerStatus,
    /// Outcomes of the same endpoint that arrive between a pick and its own outcome, on average.
    delay: f32,
    fitted_at_ms: Option<u64>,
    published_at_ms: Option<u64>,
    /// Whether anything changed since the last publication.
    changed: bool,
}

/// The learned state of one of the two times, TTFT or TPOT.
#[derive(Clone, Debug, Default)]
struct TargetModel {
    /// The shape in force.
    shape: Option<LatencyShape>,
    offsets: EndpointOffsets,
    errors: ErrorWindow,
    samples: u32,
    /// Samples since the last fit.
    fresh: usize,
}

/// Valid range of TTFT, ms. The maximum is one hour: a request that takes longer hangs.
const TTFT_MS: RangeInclusive<f32> = 0.01..=3_600_000.0;
/// Valid range of TPOT, ms.
const TPOT_MS: RangeInclusive<f32> = 0.001..=600_000.0;

/// A fit needs at least `FRESH_MIN` new samples and one new sample in `FRESH_PART` of all: a fit
/// costs some ms of the daemon's time.
const FRESH_MIN: usize = 32;
const FRESH_PART: usize = 8;

/// Least interval between two fits, and between two publications, ms. Every proxy decodes each
/// publication.
const FIT_INTERVAL_MS: u64 = 1_000;
const PUBLISH_INTERVAL_MS: u64 = 500;

/// One in this many of all samples, the newest, chooses the base and the number of trees of a
/// shape.
const NEWEST_PART: usize = 4;

/// The age, in samples, at which the weight of a sample has fallen to 1/e: older samples say less
/// about what the engine does now.
const FORGET_SAMPLES: f32 = 3_000.0;

/// The pool as a whole has changed when the mean offset exceeds `DRIFT`, as a logarithm (about a
/// fifth). Samples from before the change then get the weight `BEFORE_DRIFT`.
const DRIFT: f32 = 0.2;
const BEFORE_DRIFT: f32 = 0.1;

/// Outcomes over which `LatencyLearner::delay` is averaged. Below [`DELAY_FRESH`], the prediction
/// at the pick equals the one that would be made now.
const DELAY_OUTCOMES: f32 = 20.0;

// === impl LatencyLearner ===

impl LatencyLearner {
    /// Creates a learner from an earlier result: `model` is in force until a better one is found,
    /// and `step` is the prior of the step model.
    #[must_use]
    pub fn starting_from(step: &StepModel, model: Option<&LatencyModel>) -> Self {
        let mut learner = Self {
            steps: StepLearner::starting_from(step),
            step: step.without_speeds(),
            ..Self::default()
        };
        if let Some(model) = model {
            learner.step = model.step.without_speeds();
            learner.ttft = TargetModel {
                shape: Some(model.ttft.shape.clone()),
                samples: model.ttft.samples,
                ..TargetModel::default()
            };
            learner.tpot = TargetModel {
                shape: Some(model.tpot.shape.clone()),
                samples: model.tpot.samples,
                ..TargetModel::default()
            };
            for ((most, limit), feature) in
                learner.most.iter_mut().zip(&model.limits).zip(&FEATURES)
            {
                *most = if *limit > feature.usual {
                    limit / BEYOND_TIMES
                } else {
                    0.0
                };
            }
            learner.ttft.errors.assume(&model.ttft.spread);
            learner.tpot.errors.assume(&model.tpot.spread);
            learner.changed = true;
        }
        learner
    }

    /// Learns from one finished request. `predicted` is the prediction made at its pick, if there
    /// was one.
    pub fn observe(
        &mut self,
        observation: &Observation,
        predicted: Option<&Prediction>,
    ) -> ObservationVerdict {
        // Little's law: while a request is in service, as many others end as were there when it
        // arrived.
        self.observe_after(observation, predicted, observation.conditions.requests)
    }

    /// Like [`Self::observe`], where `delay` is known: the number of outcomes of the same endpoint
    /// that came between the pick and this outcome. The prediction at the pick is older than that
    /// many outcomes.
    pub fn observe_after(
        &mut self,
        observation: &Observation,
        predicted: Option<&Prediction>,
        delay: f32,
    ) -> ObservationVerdict {
        let verdict = self.judge(observation);
        match verdict {
            ObservationVerdict::Learned => self.standing.learned += 1,
            ObservationVerdict::Censored => self.standing.censored += 1,
            ObservationVerdict::Refused => self.standing.refused += 1,
        }
        if verdict == ObservationVerdict::Learned {
            self.delay += (delay - self.delay) / DELAY_OUTCOMES;
            self.learn(observation, predicted);
        }
        verdict
    }

    fn judge(&self, observation: &Observation) -> ObservationVerdict {
        if observation.ended != RequestEnd::Done {
            return ObservationVerdict::Censored;
        }
        let times = observation.ttft_ms.is_none_or(|ms| TTFT_MS.contains(&ms))
            && observation.tpot_ms.is_none_or(|ms| TPOT_MS.contains(&ms));
        if times && observation.conditions.checked().is_some() {
            ObservationVerdict::Learned
        } else {
            ObservationVerdict::Refused
        }
    }

    fn learn(&mut self, observation: &Observation, predicted: Option<&Prediction>) {
        let Observation {
            endpoint,
            conditions,
            ttft_ms,
            tpot_ms,
            output_tokens,
            first_token,
            gap,
            ..
        } = *observation;
        first_token.map(|sample| {
            self.steps
                .first_token(endpoint, &sample, observation.queued())
        });
        gap.map(|sample| self.steps.gap(endpoint, &sample));
        output_tokens
            .into_iter()
            .for_each(|tokens| self.steps.ended(tokens));
        if ttft_ms.is_none() && tpot_ms.is_none() {
            return;
        }
        let x = features(&conditions, &self.step);
        for (most, value) in self.most.iter_mut().zip(&x) {
            *most = most.max(*value);
        }
        let mut sample = RequestSample::new(
            endpoint,
            conditions,
            ttft_ms.map(libm::logf),
            tpot_ms.map(libm::logf),
        );
        let said = |of: fn(&Prediction) -> [f32; 2]| {
            predicted.map(|predicted| of(predicted).map(libm::logf))
        };
        self.standing.drifts += u64::from(self.ttft.observe(
            &mut sample,
            LatencyTarget::Ttft,
            &x,
            (said(|p| [p.ttft_ms, p.ttft_p90_ms]), self.delay),
        ));
        self.standing.drifts += u64::from(self.tpot.observe(
            &mut sample,
            LatencyTarget::Tpot,
            &x,
            (said(|p| [p.tpot_ms, p.tpot_p90_ms]), self.delay),
        ));
        self.window.push(sample);
        self.changed = true;
    }

    /// Fits again if enough is new, and returns the model in force if it is time to publish it.
    /// Returns `None` when nothing has changed or there is no model yet.
    pub fn publish(&mut self, now_ms: u64) -> Option<LatencyModel> {
        self.steps.advance(now_ms);
        let due = |last: Option<u64>, interval_ms: u64| {
            last.is_none_or(|last| now_ms >= last.saturating_add(interval_ms))
        };
        if due(self.fitted_at_ms, FIT_INTERVAL_MS) && self.fit() {
            self.fitted_at_ms = Some(now_ms);
        }
        if !self.changed || !due(self.published_at_ms, PUBLISH_INTERVAL_MS) {
            return None;
        }
        let model = self.model()?;
        self.published_at_ms = Some(now_ms);
        self.changed = false;
        Some(model)
    }

    /// The model in force; `None` before there is one.
    #[must_use]
    pub fn model(&self) -> Option<LatencyModel> {
        let ttft = self.ttft.head()?;
        let tpot = self.tpot.head()?;
        let slots = self.ttft.offsets.slots().max(self.tpot.offsets.slots());
        let offset = |slot| {
            let ttft = self.ttft.offsets.published(slot);
            let tpot = self.tpot.offsets.published(slot);
            let generation = ttft
                .or(tpot)
                .map_or(Generation(0), |(generation, _)| generation);
            let of = |row: Option<_>| {
                row.filter(|(life, _)| *life == generation)
                    .map_or(0.0, |(_, offset)| offset)
            };
            EndpointOffset {
                generation,
                ttft: of(ttft),
                tpot: of(tpot),
            }
        };
        let mut limits = [0.0; FEATURES_COUNT];
        for ((limit, most), feature) in limits.iter_mut().zip(&self.most).zip(&FEATURES) {
            *limit = (BEYOND_TIMES * most).max(feature.usual);
        }
        Some(LatencyModel {
            step: self.step.clone(),
            ttft,
            tpot,
            limits,
            offsets: (0..slots).map(offset).collect(),
        })
    }

    /// As [`StepLearner::has_compared`].
    #[must_use]
    pub fn has_compared(&self, endpoint: EndpointRef) -> bool {
        self.steps.has_compared(endpoint)
    }

    /// The step model as learned until `now_ms`, which is on the clock of [`Self::publish`]. It
    /// changes without observations too: what is known of an endpoint's speed fades.
    pub fn step(&mut self, now_ms: u64) -> StepModel {
        self.steps.advance(now_ms);
        self.steps.model()
    }

    /// The counters of the learner.
    #[must_use]
    pub fn standing(&self) -> LearnerStatus {
        LearnerStatus {
            window: self.window.len(),
            ..self.standing
        }
    }

    /// Fits both times if enough is new; returns whether anything was fitted.
    fn fit(&mut self) -> bool {
        let fresh = self.ttft.due() || self.tpot.due();
        if !fresh {
            return false;
        }
        let step = self.steps.model().without_speeds();
        let mut samples = self.window.by_age();
        let ttft = self
            .ttft
            .candidate(LatencyTarget::Ttft, &samples, (&self.step, &step));
        let tpot = self
            .tpot
            .candidate(LatencyTarget::Tpot, &samples, (&self.step, &step));
        let first = self.ttft.shape.is_none() || self.tpot.shape.is_none();
        // Both shapes use the same step model, so they are adopted or rejected together, by the sum
        // of their gains.
        let better = ttft.gain + tpot.gain > 0.0;
        if !(better || first) {
            self.standing.rejected += 1;
        } else {
            self.standing.adopted += 1;
            self.step = step;
            for (target, which, candidate) in [
                (&mut self.ttft, LatencyTarget::Ttft, ttft),
                (&mut self.tpot, LatencyTarget::Tpot, tpot),
            ] {
                if candidate.shape.is_some() {
                    target.shape = candidate.shape;
                    target.errors.start(&candidate.errors);
                    target.replay(which, &mut samples, (&self.step, self.delay));
                }
            }
            self.window.refresh(&samples);
            self.changed = true;
        }
        self.ttft.fresh = 0;
        self.tpot.fresh = 0;
        true
    }
}

/// A shape that may replace the one in force.
struct ShapeCandidate {
    /// The shape, fitted to all samples; `None` if there were too few.
    shape: Option<LatencyShape>,
    /// The reduction of the loss on the newest samples, for a fit without them; a relative error.
    gain: f32,
    /// For each sample, the prediction of a fit without that sample's fold, and its error, both as
    /// logarithms.
    errors: Vec<(f32, f32)>,
}

// === impl TargetModel ===

impl TargetModel {
    /// Learns from a sample. `said` are the median and p90 that were predicted for it, as
    /// logarithms; `delay` is the number of outcomes that came in between. Returns whether a change
    /// of the endpoint was detected.
    fn observe(
        &mut self,
        sample: &mut RequestSample,
        which: LatencyTarget,
        x: &Features,
        (said, delay): (Option<[f32; 2]>, f32),
    ) -> bool {
        let Some(log) = sample.log(which) else {
            return false;
        };
        self.samples = self.samples.saturating_add(1);
        self.fresh += 1;
        let Some(shape) = &self.shape else {
            return false;
        };
        let middle = log_of(shape, which, x);
        match said.filter(|said| said.iter().all(|log| log.is_finite())) {
            Some([said, ninth]) => {
                self.offsets
                    .confirm(sample.endpoint, said - middle, log - middle);
                self.errors.push(
                    said,
                    log - said,
                    (delay < DELAY_FRESH).then_some(log > ninth),
                    delay,
                );
            }
            None => {
                let would_say = middle + self.offsets.trust() * self.offsets.of(sample.endpoint);
                self.errors.push(would_say, log - would_say, None, delay);
            }
        }
        let changed = self.offsets.push(sample.endpoint, log - middle, delay);
        *sample.relative_mut(which) = self.offsets.relative(sample.endpoint);
        changed
    }

    fn due(&self) -> bool {
        let samples = usize::try_from(self.samples).unwrap_or(usize::MAX);
        self.fresh >= FRESH_MIN.max(samples.min(window::SAMPLES_MAX) / FRESH_PART)
    }

    /// Fits the best candidate. The newest quarter, left out of the fit, chooses base and trees;
    /// the samples since the last fit judge the result.
    fn candidate(
        &self,
        which: LatencyTarget,
        samples: &[RequestSample],
        (in_force, step): (&StepModel, &StepModel),
    ) -> ShapeCandidate {
        let drifted = self.offsets.mean().abs() > DRIFT;
        let of = |step: &StepModel| {
            rows(
                samples,
                which,
                step,
                if drifted { self.fresh } else { usize::MAX },
            )
        };
        let rows = of(step);
        let fresh = self.fresh.min(rows.len());
        let (old, newest) =
            rows.split_at(rows.len() - fresh.max(rows.len() / NEWEST_PART).min(rows.len()));
        if old.len() < FRESH_MIN {
            // The first fit: there is no shape to compare with.
            let enough = rows.len() >= FRESH_MIN && self.shape.is_none();
            return ShapeCandidate {
                shape: enough.then(|| fit::base(&rows, None)),
                gain: 0.0,
                errors: Vec::new(),
            };
        }
        let chosen = chosen(old, newest, fresh);
        let now = self.shape.as_ref().map(|shape| {
            let rows = of(in_force);
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

    /// Recomputes the offsets of all endpoints against the shape in force.
    fn replay(
        &mut self,
        which: LatencyTarget,
        samples: &mut [RequestSample],
        (step, delay): (&StepModel, f32),
    ) {
        let Some(shape) = &self.shape else { return };
        self.offsets = EndpointOffsets::afresh(&self.offsets);
        for sample in samples {
            let Some(log) = sample.log(which) else {
                continue;
            };
            let x = features(&sample.conditions, step);
            self.offsets
                .push(sample.endpoint, log - log_of(shape, which, &x), delay);
            *sample.relative_mut(which) = self.offsets.relative(sample.endpoint);
        }
    }

    /// The predictor to publish: the mean offset of all endpoints is folded into the weights of the
    /// shape; what an endpoint differs from the mean is its own offset.
    fn head(&self) -> Option<TargetPredictor> {
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

fn log_of(shape: &LatencyShape, which: LatencyTarget, x: &Features) -> f32 {
    libm::logf(shape.base_ms(&terms(which, x))) + shape.correction(x)
}

fn terms(which: LatencyTarget, x: &Features) -> [f32; TERMS] {
    match which {
        LatencyTarget::Ttft => ttft_terms(x),
        LatencyTarget::Tpot => tpot_terms(x),
    }
}

/// The samples of one time as rows to fit, oldest first, without the differences between endpoints.
/// Rows older than the last `since` get little weight.
#[expect(clippy::cast_precision_loss, reason = "some thousands of samples")]
fn rows(
    samples: &[RequestSample],
    which: LatencyTarget,
    step: &StepModel,
    since: usize,
) -> Vec<FitRow> {
    let count = samples
        .iter()
        .filter(|sample| sample.log(which).is_some())
        .count();
    let known = samples
        .iter()
        .filter_map(|sample| sample.log(which).map(|log| (sample, log)));
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
            terms: terms(which, &x),
            log: log - sample.relative(which),
            weight,
        }
    };
    known.enumerate().map(row).collect()
}

#[cfg(test)]
mod coverage;
#[cfg(test)]
mod golden;
#[cfg(test)]
mod tests;
