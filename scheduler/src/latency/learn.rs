//! From what requests saw to a [`LatencyModel`].
//!
//! Each observation is kept in a bounded window, stratified so that the common case does not push out the rare ones; it moves its endpoint's offset
//! at once; and when enough new ones have come, new shapes are fitted to the older part of the window and judged by the newest, which neither they
//! nor the model in force were fitted to. Only what is better there takes its place. So there is one model in force at any time, and it changes
//! slowly in shape, quickly in offsets.
//!
//! ```text
//! observe ──► endpoint's offset, error of what was predicted (for the ninth decile), window
//! publish ──► enough is new? fit to the old, judge by the new, better? fit to all ──► model in force + offsets + deciles
//! ```
//!
//! What an aborted or failed request would have taken is not known, so it teaches nothing. Nor do numbers that cannot be.

mod errors;
mod fit;
mod offset;
mod p90;
mod window;

use std::ops::RangeInclusive;

use errors::ErrorWindow;
use fit::FitRow;
use offset::{DELAY_FRESH, EndpointOffsets};
use window::{LatencyTarget, RequestSample, SampleWindow};

use super::features::{FEATURES, FEATURES_COUNT, Features, TERMS, features, tpot_terms, ttft_terms};
use super::model::{BEYOND_TIMES, EndpointOffset, LatencyModel, TargetPredictor};
use super::shape::{LatencyShape, TREES_MAX};
use super::step::{self, FirstToken, StepModel, TokenGap};
use super::{Conditions, Prediction};
use crate::endpoint::{EndpointRef, Generation};

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestEnd {
    /// With its last token.
    Done,
    /// The client left before that: how long it would have taken is not known, so it is not learned from.
    Aborted,
    /// The endpoint failed it: no measure of its speed either.
    Failed,
}

/// What one request saw.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Observation {
    /// Who served it.
    pub endpoint: EndpointRef,
    /// What was true of that endpoint and this request at the pick.
    pub conditions: Conditions,
    /// How it ended.
    pub ended: RequestEnd,
    /// From sending it to its first token, ms; `None` when it was not streamed.
    pub ttft_ms: Option<f32>,
    /// Time for each token after the first, by tokens, ms; `None` when it was not streamed, or had but one.
    pub tpot_ms: Option<f32>,
    /// Tokens it put out.
    pub output_tokens: Option<u32>,
    /// Its first token as a measure of a prefill, when it was one.
    pub first_token: Option<FirstToken>,
    /// A gap of its stream as a measure of a decode step, when there was one.
    pub gap: Option<TokenGap>,
}

/// A first token that took this much longer since its pick than its service did had to wait for others', ms.
const QUEUED_MS: f32 = 0.5;

impl Observation {
    /// Did the first tokens of other requests come at its endpoint between its pick and its own? Of one that was not streamed: did prompts wait there at
    /// the pick?
    #[must_use]
    pub fn queued(&self) -> bool {
        match (self.ttft_ms, self.first_token) {
            (Some(ttft_ms), Some(first)) => ttft_ms > first.service_ms + QUEUED_MS,
            _ => self.conditions.prefill_tokens > 0.0,
        }
    }
}

/// What became of an observation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObservationVerdict {
    /// Learned from.
    Learned,
    /// Not learned from: how long it would have taken is not known.
    Censored,
    /// Not learned from: no such numbers can be.
    Refused,
}

/// How learning stands, for people.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LearnerStatus {
    /// Observations learned from.
    pub learned: u64,
    /// Observations of requests that were aborted or failed.
    pub censored: u64,
    /// Observations that cannot be.
    pub refused: u64,
    /// Of those learned from, in the window.
    pub window: usize,
    /// Shapes that took the place of the one in force.
    pub adopted: u64,
    /// Shapes that did not, as they were no better on the newest observations.
    pub rejected: u64,
    /// How often an endpoint, or the whole pool, was found to have changed.
    pub drifts: u64,
}

/// Learns a [`StepModel`] and, on top of it, a [`LatencyModel`]. One writer; time is an argument.
#[derive(Clone, Debug, Default)]
pub struct LatencyLearner {
    steps: step::StepLearner,
    /// The step model that the shapes in force were fitted with.
    step: StepModel,
    ttft: TargetModel,
    tpot: TargetModel,
    window: SampleWindow,
    /// The most seen of each feature.
    most: Features,
    standing: LearnerStatus,
    /// Outcomes of an endpoint that come between the pick of a request and its own, on average.
    delay: f32,
    fitted_at_ms: Option<u64>,
    published_at_ms: Option<u64>,
    /// Anything new since the last publication?
    changed: bool,
}

/// What is learned of one of the two times.
#[derive(Clone, Debug, Default)]
struct TargetModel {
    /// In force.
    shape: Option<LatencyShape>,
    offsets: EndpointOffsets,
    errors: ErrorWindow,
    samples: u32,
    /// Samples since the last fit.
    fresh: usize,
}

/// What a time may be, ms: an hour. What takes longer hangs.
const TTFT_MS: RangeInclusive<f32> = 0.01..=3_600_000.0;
/// What a time for a token may be, ms.
const TPOT_MS: RangeInclusive<f32> = 0.001..=600_000.0;

/// New samples below which nothing is fitted, and the part of all samples that must be new: a fit costs some ms of the daemon's time.
const FRESH_MIN: usize = 32;
const FRESH_PART: usize = 8;

/// How long a fit is left alone, and a publication, ms: the latter is what proxies decode.
const FIT_INTERVAL_MS: u64 = 1_000;
const PUBLISH_INTERVAL_MS: u64 = 500;

/// Samples below which no trees are tried: they would learn chance.
const TREES_SAMPLES_MIN: usize = 200;

/// How many trees are tried.
const TREES: [usize; 3] = [0, TREES_MAX / 2, TREES_MAX];

/// The part of all samples, the newest, that chooses what a shape is built of.
const NEWEST_PART: usize = 4;

/// Parts of the time, each of which is predicted by a fit to the others.
const PARTS: usize = 3;

/// Samples after which one counts for 1/e: what an engine did then says less of what it does now.
const FORGET_SAMPLES: f32 = 3_000.0;

/// The pool as a whole has changed when all its endpoints are off by this, as a logarithm: a fifth. What is older then counts for a tenth.
const DRIFT: f32 = 0.2;
const BEFORE_DRIFT: f32 = 0.1;

/// Outcomes over which it is averaged how many come between a pick and its own; below [`DELAY_FRESH`], what was told is what would be told now.
const DELAY_OUTCOMES: f32 = 20.0;

// === impl LatencyLearner ===

impl LatencyLearner {
    /// A learner that starts from what another learned: its model is in force until a better one is found, and its step model is the prior.
    #[must_use]
    pub fn starting_from(step: &StepModel, model: Option<&LatencyModel>) -> Self {
        let mut learner = Self { steps: step::StepLearner::starting_from(step), step: step.without_speeds(), ..Self::default() };
        if let Some(model) = model {
            learner.step = model.step.without_speeds();
            learner.ttft = TargetModel { shape: Some(model.ttft.shape.clone()), samples: model.ttft.samples, ..TargetModel::default() };
            learner.tpot = TargetModel { shape: Some(model.tpot.shape.clone()), samples: model.tpot.samples, ..TargetModel::default() };
            for ((most, limit), feature) in learner.most.iter_mut().zip(&model.limits).zip(&FEATURES) {
                *most = if *limit > feature.usual { limit / BEYOND_TIMES } else { 0.0 };
            }
            learner.ttft.errors.assume(&model.ttft.spread);
            learner.tpot.errors.assume(&model.tpot.spread);
            learner.changed = true;
        }
        learner
    }

    /// Learns from what one request saw; `predicted` is what was said of it at the pick, if anything was.
    pub fn observe(&mut self, observation: &Observation, predicted: Option<&Prediction>) -> ObservationVerdict {
        // As many requests end, while one is there, as there were when it came: Little's law.
        self.observe_after(observation, predicted, observation.conditions.requests)
    }

    /// The same, where it is known how many outcomes of its endpoint came between its pick and its own: by so many, what was said of it is old.
    pub fn observe_after(&mut self, observation: &Observation, predicted: Option<&Prediction>, delay: f32) -> ObservationVerdict {
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
        let times =
            observation.ttft_ms.is_none_or(|ms| TTFT_MS.contains(&ms)) && observation.tpot_ms.is_none_or(|ms| TPOT_MS.contains(&ms));
        if times && observation.conditions.checked().is_some() { ObservationVerdict::Learned } else { ObservationVerdict::Refused }
    }

    fn learn(&mut self, observation: &Observation, predicted: Option<&Prediction>) {
        let Observation { endpoint, conditions, ttft_ms, tpot_ms, output_tokens, first_token, gap, .. } = *observation;
        first_token.map(|sample| self.steps.first_token(endpoint, &sample, observation.queued()));
        gap.map(|sample| self.steps.gap(endpoint, &sample));
        output_tokens.into_iter().for_each(|tokens| self.steps.ended(tokens));
        if ttft_ms.is_none() && tpot_ms.is_none() {
            return;
        }
        let x = features(&conditions, &self.step);
        for (most, value) in self.most.iter_mut().zip(&x) {
            *most = most.max(*value);
        }
        let mut sample = RequestSample::new(endpoint, conditions, ttft_ms.map(libm::logf), tpot_ms.map(libm::logf));
        let said = |of: fn(&Prediction) -> [f32; 2]| predicted.map(|predicted| of(predicted).map(libm::logf));
        self.standing.drifts +=
            u64::from(self.ttft.observe(&mut sample, LatencyTarget::Ttft, &x, (said(|p| [p.ttft_ms, p.ttft_p90_ms]), self.delay)));
        self.standing.drifts +=
            u64::from(self.tpot.observe(&mut sample, LatencyTarget::Tpot, &x, (said(|p| [p.tpot_ms, p.tpot_p90_ms]), self.delay)));
        self.window.push(sample);
        self.changed = true;
    }

    /// Fits anew where enough is new, and gives the model in force when it is time to tell proxies of it; `None` when nothing has changed, or nothing
    /// is known yet.
    pub fn publish(&mut self, now_ms: u64) -> Option<LatencyModel> {
        let due = |last: Option<u64>, interval_ms: u64| last.is_none_or(|last| now_ms >= last.saturating_add(interval_ms));
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
        let (ttft, tpot) = (self.ttft.head()?, self.tpot.head()?);
        let slots = self.ttft.offsets.slots().max(self.tpot.offsets.slots());
        let offset = |slot| {
            let (ttft, tpot) = (self.ttft.offsets.told(slot), self.tpot.offsets.told(slot));
            let generation = ttft.or(tpot).map_or(Generation(0), |(generation, _)| generation);
            let of = |row: Option<_>| row.filter(|(life, _)| *life == generation).map_or(0.0, |(_, offset)| offset);
            EndpointOffset { generation, ttft: of(ttft), tpot: of(tpot) }
        };
        let mut limits = [0.0; FEATURES_COUNT];
        for ((limit, most), feature) in limits.iter_mut().zip(&self.most).zip(&FEATURES) {
            *limit = (BEYOND_TIMES * most).max(feature.usual);
        }
        Some(LatencyModel { step: self.step.clone(), ttft, tpot, limits, offsets: (0..slots).map(offset).collect() })
    }

    /// What is known of the steps of engines by now.
    #[must_use]
    pub fn step(&self) -> StepModel {
        self.steps.model()
    }

    /// How learning stands.
    #[must_use]
    pub fn standing(&self) -> LearnerStatus {
        LearnerStatus { window: self.window.len(), ..self.standing }
    }

    /// Fits both times where enough is new. Was anything fitted?
    fn fit(&mut self) -> bool {
        let fresh = self.ttft.due() || self.tpot.due();
        if !fresh {
            return false;
        }
        let step = self.steps.model().without_speeds();
        let mut samples = self.window.by_age();
        let ttft = self.ttft.candidate(LatencyTarget::Ttft, &samples, (&self.step, &step));
        let tpot = self.tpot.candidate(LatencyTarget::Tpot, &samples, (&self.step, &step));
        let first = self.ttft.shape.is_none() || self.tpot.shape.is_none();
        // Both are of one step model: they are taken, or left, together, by what they are better by in sum.
        let better = ttft.gain + tpot.gain > 0.0;
        if !(better || first) {
            self.standing.rejected += 1;
        } else {
            self.standing.adopted += 1;
            self.step = step;
            for (target, which, candidate) in [(&mut self.ttft, LatencyTarget::Ttft, ttft), (&mut self.tpot, LatencyTarget::Tpot, tpot)] {
                if candidate.shape.is_some() {
                    target.shape = candidate.shape;
                    target.errors.start(&candidate.errors);
                    target.replay(which, &mut samples, (&self.step, self.delay));
                }
            }
            self.window.refresh(&samples);
            self.changed = true;
        }
        (self.ttft.fresh, self.tpot.fresh) = (0, 0);
        true
    }
}

/// A shape that might take the place of the one in force.
struct ShapeCandidate {
    /// Fitted to all samples; `None` where there were too few.
    shape: Option<LatencyShape>,
    /// How much less wrong it is on the newest samples, fitted without them; a relative error.
    gain: f32,
    /// What it says, and how far off that is, for each sample, fitted without it, as logarithms.
    errors: Vec<(f32, f32)>,
}

// === impl TargetModel ===

impl TargetModel {
    /// Learns from a sample; `said` are the middle and the ninth decile it was told, as logarithms, and so many outcomes came between. Was its endpoint
    /// found to have changed?
    fn observe(&mut self, sample: &mut RequestSample, which: LatencyTarget, x: &Features, (said, delay): (Option<[f32; 2]>, f32)) -> bool {
        let Some(log) = sample.log(which) else { return false };
        (self.samples, self.fresh) = (self.samples.saturating_add(1), self.fresh + 1);
        let Some(shape) = &self.shape else { return false };
        let middle = log_of(shape, which, x);
        match said.filter(|said| said.iter().all(|log| log.is_finite())) {
            Some([said, ninth]) => {
                self.offsets.proved(sample.endpoint, said - middle, log - middle);
                self.errors.push(said, log - said, (delay < DELAY_FRESH).then_some(log > ninth), delay);
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

    /// The best that can be fitted: what it is built of is chosen by the newest quarter, fitted without it, and it is judged by what is new since the
    /// last fit.
    fn candidate(&self, which: LatencyTarget, samples: &[RequestSample], (in_force, step): (&StepModel, &StepModel)) -> ShapeCandidate {
        let drifted = self.offsets.mean().abs() > DRIFT;
        let of = |step: &StepModel| rows(samples, which, step, if drifted { self.fresh } else { usize::MAX });
        let rows = of(step);
        let fresh = self.fresh.min(rows.len());
        let (old, newest) = rows.split_at(rows.len() - fresh.max(rows.len() / NEWEST_PART).min(rows.len()));
        if old.len() < FRESH_MIN {
            // The first fit of all: there is nothing to compare with.
            let enough = rows.len() >= FRESH_MIN && self.shape.is_none();
            return ShapeCandidate { shape: enough.then(|| fit::base(&rows, None)), gain: 0.0, errors: Vec::new() };
        }
        let chosen = chosen(old, newest, fresh);
        let now = self.shape.as_ref().map(|shape| {
            let rows = of(in_force);
            fit::loss(shape, rows.get(rows.len() - fresh..).unwrap_or_default(), self.offsets.trust() * self.offsets.mean())
        });
        let gain = now.map_or(f32::INFINITY, |now| now - chosen.loss);
        let shape = fit::with_trees(&chosen.base.fit(&rows, Some(&chosen.shape)), &rows, chosen.trees);
        ShapeCandidate { shape: Some(shape), gain, errors: errors(&rows, &chosen) }
    }

    /// Learns the offsets of endpoints anew, against another shape.
    fn replay(&mut self, which: LatencyTarget, samples: &mut [RequestSample], (step, delay): (&StepModel, f32)) {
        let Some(shape) = &self.shape else { return };
        self.offsets = EndpointOffsets::afresh(&self.offsets);
        for sample in samples {
            let Some(log) = sample.log(which) else { continue };
            let x = features(&sample.conditions, step);
            self.offsets.push(sample.endpoint, log - log_of(shape, which, &x), delay);
            *sample.relative_mut(which) = self.offsets.relative(sample.endpoint);
        }
    }

    /// As a proxy is told: what all endpoints are off by is in the shape, what each is off by besides in its offset.
    fn head(&self) -> Option<TargetPredictor> {
        let shape = self.shape.as_ref()?;
        let factor = libm::expf(self.offsets.trust() * self.offsets.mean());
        let shape = LatencyShape { weights: shape.weights.map(|weight| weight * factor), trees: shape.trees.clone() };
        Some(TargetPredictor { samples: self.samples, shape, spread: self.errors.spread() })
    }
}

/// What the linear part is made of.
#[derive(Clone, Copy, Debug)]
enum LinearBase {
    Terms,
    Constant,
}

impl LinearBase {
    fn fit(self, rows: &[FitRow], near: Option<&LatencyShape>) -> LatencyShape {
        match self {
            Self::Terms => fit::base(rows, near),
            Self::Constant => fit::constant(rows),
        }
    }
}

/// What is least wrong on the `newest` rows when fitted to the `old` ones.
struct FittedShape {
    base: LinearBase,
    trees: usize,
    /// The linear part.
    shape: LatencyShape,
    /// How wrong it is on the last rows alone.
    loss: f32,
}

/// Chooses by the newest rows; how wrong that is on the `fresh` last of them is told.
fn chosen(old: &[FitRow], newest: &[FitRow], fresh: usize) -> FittedShape {
    let loss_of = |shape: &LatencyShape| fit::loss(shape, newest, 0.0);
    let (terms, constant) = (fit::base(old, None), fit::constant(old));
    let (base, shape) = if loss_of(&terms) <= loss_of(&constant) { (LinearBase::Terms, terms) } else { (LinearBase::Constant, constant) };
    let most = if old.len() >= TREES_SAMPLES_MIN { TREES_MAX } else { 0 };
    let all = fit::with_trees(&shape, old, most);
    let first = |count: usize| LatencyShape { weights: all.weights, trees: all.trees.iter().take(count).copied().collect() };
    let tried = TREES.into_iter().filter(|count| *count <= most).map(|count| (count, loss_of(&first(count))));
    let (trees, _) = tried.fold((0, f32::INFINITY), |best, tried| if tried.1 < best.1 { tried } else { best });
    let judges = newest.get(newest.len().saturating_sub(fresh)..).unwrap_or_default();
    FittedShape { base, trees, shape, loss: fit::loss(&first(trees), judges, 0.0) }
}

/// What such a shape says of each row, fitted to the other parts of the time, and how far off that is.
fn errors(rows: &[FitRow], chosen: &FittedShape) -> Vec<(f32, f32)> {
    let part = rows.len().div_ceil(PARTS).max(1);
    let of_part = |(at, part): (usize, &[FitRow])| {
        let start = at * part.len();
        let others: Vec<FitRow> = rows.iter().take(start).chain(rows.iter().skip(start + part.len())).copied().collect();
        let shape = fit::with_trees(&chosen.base.fit(&others, Some(&chosen.shape)), &others, chosen.trees);
        part.iter().map(|row| fit::log(&shape, row)).zip(part).map(|(said, row)| (said, row.log - said)).collect::<Vec<_>>()
    };
    rows.chunks(part).enumerate().flat_map(of_part).collect()
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

/// Samples of one time as rows to fit, oldest first, those that endpoints differ by taken out; before the last `since`, they count for little.
#[expect(clippy::cast_precision_loss, reason = "some thousands of samples")]
fn rows(samples: &[RequestSample], which: LatencyTarget, step: &StepModel, since: usize) -> Vec<FitRow> {
    let count = samples.iter().filter(|sample| sample.log(which).is_some()).count();
    let known = samples.iter().filter_map(|sample| sample.log(which).map(|log| (sample, log)));
    let row = |(at, (sample, log)): (usize, (&RequestSample, f32))| {
        let x = features(&sample.conditions, step);
        let age = (count - at) as f32;
        let before = if count - at > since { BEFORE_DRIFT } else { 1.0 };
        let weight = before * libm::expf(-age / FORGET_SAMPLES);
        FitRow { x, terms: terms(which, &x), log: log - sample.relative(which), weight }
    };
    known.enumerate().map(row).collect()
}

#[cfg(test)]
mod coverage;
#[cfg(test)]
mod golden;
#[cfg(test)]
mod tests;
