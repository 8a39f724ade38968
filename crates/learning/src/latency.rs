//! Learns a [`LatencyModel`] from finished requests.
//!
//! Each observation is added to a bounded, stratified window, so common requests do not displace
//! rare observations. An observation updates the offset of its endpoint immediately. When enough
//! new observations have arrived, the learner fits new shapes (functions from features to a time)
//! to the older part of the window. The learner tests the new shapes on the newest part, which was
//! used neither for this fit nor for the current model. It adopts the new shapes only if they
//! predict this part better than the current shapes do. So the learner never has more than one
//! model. The shapes of this model change slowly, and its offsets change quickly.
//!
//! ```text
//! observe ──► endpoint offset, error of the prediction (for p90), window
//! publish ──► enough new? fit to the old, test on the new, better? fit to all
//!         ──► model in force + offsets + p90
//! ```
//!
//! The learner ignores aborted and failed requests, because their full latency is unknown.
//! Observations with impossible numbers are refused.

mod choice;
mod errors;
mod fit;
mod offset;
mod p90;
mod target;
mod window;

use std::ops::RangeInclusive;

use scheduler::latency::step::StepModel;
use scheduler::latency::{
    BEYOND_TIMES, EndpointOffset, FEATURES, FEATURES_COUNT, Features, LatencyModel, Observation,
    Prediction, RequestEnd, features,
};
use scheduler::{EndpointRef, Generation};

use crate::origins::{ObservationTrust, OriginTrust, OriginVotes, VotedSample, VotedTime};
use crate::step::{Comparison, StepLearner};
use target::TargetModel;
use window::{LatencyTarget, RequestSample, SampleWindow};

/// The learner's decision about an observation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObservationVerdict {
    Learned,
    /// The learner ignores the observation, because the request did not complete and its latency is
    /// unknown.
    Censored,
    /// The learner ignores the observation, because its numbers are impossible.
    Refused,
    /// The learner ignores the observation, or only its TTFT and TPOT, because other origins
    /// contradict it.
    Outvoted,
}

/// Counters of the learner, for status output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LearnerStatus {
    pub learned: u64,
    pub censored: u64,
    pub refused: u64,
    pub outvoted: u64,
    pub window: usize,
    /// The number of fits whose shapes replaced the current shapes.
    pub adopted: u64,
    /// The number of fits that the learner rejected, because they predicted the newest observations
    /// no better than the current shapes.
    pub rejected: u64,
    /// The number of times that the learner detected that an endpoint, or the whole pool, had
    /// changed.
    pub drifts: u64,
}

/// Learns a [`StepModel`] and, on top of it, a [`LatencyModel`]. The caller passes the current
/// time, because the learner reads no clock. The type has many fields, because each observation
/// changes nearly all of them.
#[derive(Clone, Debug)]
pub struct LatencyLearner {
    steps: StepLearner,
    origins: OriginVotes,
    /// The prior with which learning began, and begins again after the learner has forgotten
    /// everything.
    prior: Box<LearnerPrior>,
    /// The step model with which the current shapes were fitted.
    step: StepModel,
    ttft: TargetModel,
    tpot: TargetModel,
    window: SampleWindow,
    /// The largest observed value of each feature.
    most: Features,
    standing: LearnerStatus,
    /// The mean number of outcomes (finished requests) of the same endpoint that arrive between the
    /// pick of a request and its own outcome.
    delay: f32,
    fitted_at_ms: Option<u64>,
    published_at_ms: Option<u64>,
    /// Whether the learner has learned or forgotten something since it last published a model.
    changed: bool,
}

#[derive(Clone, Debug)]
struct LearnerPrior {
    step: StepModel,
    latency: Option<LatencyModel>,
}

/// The origin of all observations if only one origin observes.
const ONLY_ORIGIN: u64 = 0;

/// The valid range of a TTFT, in ms. The maximum is one hour, because a request that takes longer
/// hangs.
const TTFT_MS: RangeInclusive<f32> = 0.01..=3_600_000.0;
/// The valid range of a TPOT, in ms.
const TPOT_MS: RangeInclusive<f32> = 0.001..=600_000.0;

/// The minimum interval between two fits, and between two publications, in ms. Publications have a
/// minimum interval, because every proxy decodes each publication.
const FIT_INTERVAL_MS: u64 = 1_000;
const PUBLISH_INTERVAL_MS: u64 = 500;

/// The number of outcomes over which `LatencyLearner::delay` is averaged. If the delay is below
/// `DELAY_FRESH`, the learner treats the prediction at the pick as a prediction made now.
const DELAY_OUTCOMES: f32 = 20.0;

// === impl LatencyLearner ===

impl Default for LatencyLearner {
    fn default() -> Self {
        Self::starting_from(&StepModel::default(), None)
    }
}

impl LatencyLearner {
    /// Creates a learner from the models of an earlier one. The learner uses `model` until it finds
    /// a better model, and `step` is the prior of the step model.
    #[must_use]
    pub fn starting_from(step: &StepModel, model: Option<&LatencyModel>) -> Self {
        let in_force = model.map_or(step, |model| &model.step);
        let mut most = Features::default();
        let limits = model.map_or(most, |model| model.limits);
        for ((most, limit), feature) in most.iter_mut().zip(&limits).zip(&FEATURES) {
            if *limit > feature.usual {
                *most = limit / BEYOND_TIMES;
            }
        }
        Self {
            steps: StepLearner::starting_from(step),
            origins: OriginVotes::default(),
            prior: Box::new(LearnerPrior {
                step: step.clone(),
                latency: model.cloned(),
            }),
            step: in_force.without_speeds(),
            ttft: TargetModel::new(LatencyTarget::Ttft, model.map(|model| &model.ttft)),
            tpot: TargetModel::new(LatencyTarget::Tpot, model.map(|model| &model.tpot)),
            window: SampleWindow::default(),
            most,
            standing: LearnerStatus::default(),
            delay: 0.0,
            fitted_at_ms: None,
            published_at_ms: None,
            changed: model.is_some(),
        }
    }

    /// Learns from one finished request. `predicted` is the prediction that was made when this
    /// request was picked.
    pub fn observe(
        &mut self,
        observation: &Observation,
        predicted: Option<&Prediction>,
    ) -> ObservationVerdict {
        self.observe_of(ONLY_ORIGIN, observation, predicted)
    }

    /// Learns from one finished request as [`Self::observe`] does, if several proxies (origins)
    /// observe. One origin alone does not decide what the learner learns.
    pub fn observe_of(
        &mut self,
        origin: u64,
        observation: &Observation,
        predicted: Option<&Prediction>,
    ) -> ObservationVerdict {
        // By Little's law, while a request is in service, as many other requests end as were in
        // service when this request arrived.
        self.judge_and_learn(
            origin,
            observation,
            predicted,
            observation.conditions.requests,
        )
    }

    /// Learns as [`Self::observe`] does, with a known `delay`: the number of outcomes of the same
    /// endpoint that arrived between the pick and this outcome. The prediction at the pick did not
    /// know these outcomes.
    pub fn observe_after(
        &mut self,
        observation: &Observation,
        predicted: Option<&Prediction>,
        delay: f32,
    ) -> ObservationVerdict {
        self.judge_and_learn(ONLY_ORIGIN, observation, predicted, delay)
    }

    fn judge_and_learn(
        &mut self,
        origin: u64,
        observation: &Observation,
        predicted: Option<&Prediction>,
        delay: f32,
    ) -> ObservationVerdict {
        let mut verdict = self.judge(observation);
        if verdict == ObservationVerdict::Learned {
            let mut observation = *observation;
            let trust = self.trust(origin, &mut observation);
            if trust.steps.min(trust.times) == OriginTrust::Outvoted {
                verdict = ObservationVerdict::Outvoted;
            }
            if trust.steps != OriginTrust::Outvoted {
                if trust.times >= OriginTrust::Unjudged {
                    self.delay += (delay - self.delay) / DELAY_OUTCOMES;
                }
                self.learn(origin, &observation, predicted, trust);
            }
        }
        match verdict {
            ObservationVerdict::Learned => self.standing.learned += 1,
            ObservationVerdict::Censored => self.standing.censored += 1,
            ObservationVerdict::Refused => self.standing.refused += 1,
            ObservationVerdict::Outvoted => self.standing.outvoted += 1,
        }
        verdict
    }

    /// Returns how far an observation from `origin` is trusted. Changes times that are far from the
    /// votes. If the other origins outvote `origin`, the learner may forget everything: see
    /// [`OriginVotes::forgets_outvoted`].
    fn trust(&mut self, origin: u64, observation: &mut Observation) -> ObservationTrust {
        let endpoint = observation.endpoint;
        let now_ms = self.steps.now_ms();
        self.origins.note(origin, now_ms);
        let unvoted = self.origins.unvoted(origin, now_ms);
        let prior = &self.prior.step;
        let x = features(&observation.conditions, &self.step);
        let queued = observation.queued();
        let first_token = observation.first_token.as_mut().map(|sample| {
            let logs = self.steps.prefill_logs(sample, prior);
            VotedSample::new(VotedTime::of_prefill(queued), logs, &mut sample.service_ms)
        });
        let gap = observation.gap.as_mut().map(|sample| {
            let logs = self.steps.decode_logs(sample, prior);
            VotedSample::new(VotedTime::Decode, logs, &mut sample.gap_ms)
        });
        let ttft = observation.ttft_ms.as_mut().map(|ms| {
            let logs = self.ttft.vote_logs(*ms, &x, &self.step);
            VotedSample::new(VotedTime::Ttft, logs, ms)
        });
        let tpot = observation.tpot_ms.as_mut().map(|ms| {
            let logs = self.tpot.vote_logs(*ms, &x, &self.step);
            VotedSample::new(VotedTime::Tpot, logs, ms)
        });
        let mut of = |samples: [Option<VotedSample<'_>>; 2]| {
            let samples = samples.into_iter().flatten();
            let trusts = samples.map(|sample| self.origins.vote(origin, endpoint, sample, now_ms));
            trusts.min().unwrap_or(unvoted)
        };
        let steps = of([first_token, gap]);
        let times = of([ttft, tpot]);
        let is_outvoted = steps.min(times) == OriginTrust::Outvoted;
        if is_outvoted && self.origins.forgets_outvoted(origin, now_ms) {
            self.start_again();
        }
        ObservationTrust {
            steps,
            times,
            queued,
        }
    }

    /// Returns a learner that begins with these models. If the returned learner must forget
    /// everything, it begins again with the prior of this learner.
    #[must_use]
    pub fn going_on_from(&self, step: &StepModel, model: Option<&LatencyModel>) -> Self {
        Self {
            prior: self.prior.clone(),
            ..Self::starting_from(step, model)
        }
    }

    /// Forgets everything that was learned, because the learner used unconfirmed samples from an
    /// origin that is outvoted or silent now.
    pub fn start_again(&mut self) {
        let LearnerPrior { step, latency } = &*self.prior;
        let now_ms = self.steps.now_ms();
        let mut origins = std::mem::take(&mut self.origins);
        origins.forgot(now_ms);
        let again = Self::starting_from(step, latency.as_ref());
        *self = Self {
            origins,
            standing: self.standing,
            fitted_at_ms: self.fitted_at_ms,
            published_at_ms: self.published_at_ms,
            changed: true,
            ..again
        };
        self.steps.advance(now_ms);
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

    fn learn(
        &mut self,
        origin: u64,
        observation: &Observation,
        predicted: Option<&Prediction>,
        trust: ObservationTrust,
    ) {
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
        let comparison = |is_similar: bool| match trust.steps {
            OriginTrust::Confirmed if is_similar => Comparison::Similar,
            OriginTrust::Confirmed => Comparison::Incomparable,
            _ => Comparison::Doubtful,
        };
        let has_steps = trust.steps > OriginTrust::Contradicted;
        if let Some(sample) = first_token.filter(|_| has_steps) {
            let comparison = comparison(!trust.queued);
            self.steps.prefill_step(endpoint, &sample, comparison);
        }
        if let Some(sample) = gap.filter(|_| has_steps) {
            self.steps.decode_step(endpoint, &sample, comparison(true));
        }
        output_tokens
            .into_iter()
            .for_each(|tokens| self.steps.ended_of(origin, endpoint, tokens));
        if (ttft_ms.is_none() && tpot_ms.is_none()) || trust.times < OriginTrust::Unjudged {
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
        for target in [&mut self.ttft, &mut self.tpot] {
            let drifted = target.observe(&mut sample, &x, predicted, self.delay);
            self.standing.drifts += u64::from(drifted);
        }
        self.window.push(sample);
        self.changed = true;
    }

    /// Fits again if there is enough new data, and returns the current model if its next
    /// publication is due. Returns `None` when nothing has changed or there is no model yet.
    pub fn publish(&mut self, now_ms: u64) -> Option<LatencyModel> {
        self.advance(now_ms);
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

    /// Returns the current model. Returns `None` before the learner has a model.
    pub fn model(&self) -> Option<LatencyModel> {
        let ttft = self.ttft.predictor()?;
        let tpot = self.tpot.predictor()?;
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

    /// Returns whether the step model compared both times of `endpoint` with those of other
    /// endpoints: see [`StepLearner::has_compared`].
    pub fn has_compared(&self, endpoint: EndpointRef) -> bool {
        self.steps.has_compared(endpoint)
    }

    /// Returns the step model as learned until `now_ms`, on the clock of [`Self::publish`]. The
    /// step model changes without observations too, because the evidence for an endpoint's speed
    /// counts less with time.
    pub fn step(&mut self, now_ms: u64) -> StepModel {
        self.advance(now_ms);
        self.steps.model()
    }

    fn advance(&mut self, now_ms: u64) {
        self.steps.advance(now_ms);
        if self.origins.forgets_silent(now_ms) {
            self.start_again();
        }
    }

    pub fn standing(&self) -> LearnerStatus {
        LearnerStatus {
            window: self.window.len(),
            ..self.standing
        }
    }

    /// Fits the shapes of TTFT and TPOT if there is enough new data. Returns whether anything was
    /// fitted.
    fn fit(&mut self) -> bool {
        let fresh = self.ttft.due() || self.tpot.due();
        if !fresh {
            return false;
        }
        let step = self.steps.model().without_speeds();
        let mut samples = self.window.by_age();
        let ttft = self.ttft.candidate(&samples, &self.step, &step);
        let tpot = self.tpot.candidate(&samples, &self.step, &step);
        let first = self.ttft.shape.is_none() || self.tpot.shape.is_none();
        // The shapes of TTFT and TPOT use the same step model, so the learner adopts or rejects
        // both, by the sum of their gains.
        let better = ttft.gain + tpot.gain > 0.0;
        if !(better || first) {
            self.standing.rejected += 1;
        } else {
            self.standing.adopted += 1;
            self.step = step;
            for (target, candidate) in [(&mut self.ttft, ttft), (&mut self.tpot, tpot)] {
                if candidate.shape.is_some() {
                    target.shape = candidate.shape;
                    target.errors.start(&candidate.errors);
                    target.replay(&mut samples, &self.step, self.delay);
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

#[cfg(test)]
mod coverage;
#[cfg(test)]
mod golden;
#[cfg(test)]
mod tests;
