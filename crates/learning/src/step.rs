//! Learns a step model from observed steps, one sample at a time and at constant cost.
//!
//! Each of the two times is linear in three inputs with non-negative weights. Weights are learned
//! as multiples of their priors, by least squares of the *relative* error, so a short prefill
//! counts as much as a long one. Old samples are forgotten. A ridge pulls all weights towards the
//! one scale that would make the prior right on average: after a handful of samples the scale is
//! right, and the shape follows as inputs vary. Samples are clipped, so that one stall has little
//! effect. A new fit judges the newest samples again, so that the very first one decides nothing.
//!
//! An endpoint's speed is the ratio of its observed times to those of other endpoints for similar
//! inputs, divided by the same ratio over all endpoints: a change of the whole pool belongs to the
//! pool's model. Comparing similar inputs matters for engines that the formula does not fit: they
//! take longer than expected for some inputs on every endpoint, and an endpoint that gets more of
//! those inputs is not slower. What is known of a speed fades with time, see the module `speed`.
//!
//! Source: the simulations in which the default policy was tuned. There this learner does as well
//! as the true formulas.

mod speed;

use std::collections::{BTreeMap, VecDeque};

use speed::{IDLE_MS, SpeedEvidence, SpeedNoise};

use scheduler::latency::step::{OUTPUT_TOKENS, SPEEDS, StepModel};
use scheduler::latency::{FirstToken, TokenGap};
use scheduler::{ENDPOINTS_MAX, EndpointRef, Generation, Slot};

use crate::least_squares::solve;

/// Learns a [`StepModel`].
#[derive(Clone, Debug)]
pub struct StepLearner {
    prefill: LeastSquaresFit,
    decode: LeastSquaresFit,
    output_tokens: f64,
    /// What is known of the speeds, by slot.
    endpoints: Vec<EndpointEvidence>,
    /// The latest time of [`Self::advance`], ms.
    now_ms: u64,
}

/// Least squares of a time that is linear in three inputs.
#[derive(Clone, Debug)]
struct LeastSquaresFit {
    prior: [f64; 3],
    /// Share of the sums that each sample keeps.
    keep: f64,
    /// Weights as multiples of the prior.
    theta: [f64; 3],
    /// Samples before the newest.
    sums: FitSums,
    /// The newest samples, oldest first, at most [`NEWEST_SAMPLES`].
    newest: VecDeque<FitSample>,
    /// Samples by the powers of two between which their inputs lie; endpoints are compared within
    /// these groups.
    alike: BTreeMap<[u64; 2], SimilarSamples>,
    samples: u64,
    noise: SpeedNoise,
}

/// A sample of an average endpoint.
#[derive(Clone, Copy, Debug)]
struct FitSample {
    inputs: [f64; 3],
    seen_ms: f64,
}

/// Sums over samples, with the weight that the fit gave each.
#[derive(Clone, Copy, Debug, Default)]
struct FitSums {
    /// Products of inputs, inputs times observed time (all relative to the expected time), and the
    /// number of samples.
    normal: [[f64; 3]; 3],
    seen: [f64; 3],
    count: f64,
    /// Sums of observed times and of times by the prior; their ratio is the common scale.
    observed_ms: f64,
    prior_ms: f64,
}

/// Sums over samples with similar inputs: the time of an average endpoint, and the prior's terms.
/// The terms times the current weights give the time that the fit expects.
#[derive(Clone, Copy, Debug, Default)]
struct SimilarSamples {
    average_ms: f64,
    terms: [f64; 3],
    /// Number of samples of the fit when this group was last added to.
    at: u64,
}

/// Lower bounds of the weights of a fit.
#[derive(Clone, Copy, Debug)]
struct WeightFloors {
    least_ms: [f32; 3],
    of_first: [f32; 3],
}

/// What is known of the speeds of one endpoint.
#[derive(Clone, Copy, Debug)]
struct EndpointEvidence {
    generation: Generation,
    prefill: SpeedEvidence,
    decode: SpeedEvidence,
    /// The time of [`StepLearner::advance`] before the last sample, ms.
    used_ms: u64,
}

/// Share of the sums that each sample keeps. The fits remember about 1,000 first tokens and 500
/// gaps.
const PREFILL_KEEP: f64 = 0.999;
const DECODE_KEEP: f64 = 0.998;

/// Samples that the common scale counts as for each weight.
const RIDGE_SAMPLES: f64 = 2.0;

/// Samples of the pool needed before endpoints are compared.
const SPEEDS_FROM_SAMPLES: u64 = 16;

/// A sample is clipped at this many times the expected time plus this many ms: a longer one was not
/// only a step.
const CLIP_TIMES: f64 = 4.0;
const CLIP_MORE_MS: f64 = 20.0;

/// Each fit weighs and clips this many of the newest samples again, by what is expected now; older
/// samples keep their weight. So a first sample that is far off does not decide how much the next
/// thousand count. In tests, 16 and 64 do as well, and 8 does not.
const NEWEST_SAMPLES: usize = 32;

/// Rounds of weighing and fitting for each sample.
const FIT_ROUNDS: usize = 2;

/// Least cost of each term of a step: in ms, and relative to the first term. It is a tenth of what
/// the fastest accelerators take. Without it, the model of an engine whose time does not grow with
/// the prompt or the batch would say that load and lost prefixes cost nothing.
const PREFILL_FLOORS: WeightFloors = WeightFloors {
    least_ms: [0.0, 0.001, 0.0],
    of_first: [0.0, 1e-4, 0.0],
};
const DECODE_FLOORS: WeightFloors = WeightFloors {
    least_ms: [0.0, 5e-4, 1e-6],
    of_first: [0.0, 2e-4, 1e-6],
};

/// Valid range of a sample, ms, and the largest number of tokens or requests in one.
const SAMPLE_MS: std::ops::RangeInclusive<f32> = 0.01..=600_000.0;
const SAMPLE_COUNT_MAX: f32 = 16_777_216.0;

/// Rounds of coordinate descent: three weights settle in far fewer.
const SWEEPS: usize = 20;

/// Weight of each new output length in the mean: a memory of about 200 requests.
const OUTPUT_WEIGHT: f64 = 0.005;

// === impl StepLearner ===

impl Default for StepLearner {
    fn default() -> Self {
        Self::starting_from(&StepModel::default())
    }
}

impl StepLearner {
    /// Creates a learner with this model as its prior, for example from an earlier run or another
    /// pool. It does not take over the endpoints' speeds; it learns them again within some tens of
    /// requests.
    #[must_use]
    pub fn starting_from(model: &StepModel) -> Self {
        Self {
            prefill: LeastSquaresFit::new(model.prefill(), PREFILL_KEEP),
            decode: LeastSquaresFit::new(model.decode(), DECODE_KEEP),
            output_tokens: f64::from(model.output_tokens()),
            endpoints: Vec::new(),
            now_ms: 0,
        }
    }

    /// Lets time pass until `now_ms`, in ms since any fixed moment: what is known of the speeds of
    /// endpoints without samples fades, within about 30 s. To be called about once a second: the
    /// time since the call before the last sample counts as idle, except for the first 10 s. An
    /// earlier time than before changes nothing.
    pub fn advance(&mut self, now_ms: u64) {
        for row in &mut self.endpoints {
            let idle_from = self.now_ms.max(row.used_ms.saturating_add(IDLE_MS));
            let idle_ms = now_ms.saturating_sub(idle_from) as f64;
            row.prefill.fade(idle_ms);
            row.decode.fade(idle_ms);
        }
        self.now_ms = self.now_ms.max(now_ms);
    }

    /// Learns from a first token. `queued` says whether first tokens of other requests came at its
    /// endpoint between its pick and its own. Returns `false` for an impossible sample, which is
    /// ignored.
    pub fn first_token(
        &mut self,
        endpoint: EndpointRef,
        sample: &FirstToken,
        queued: bool,
    ) -> bool {
        let FirstToken {
            uncached_tokens,
            prompt_tokens,
            service_ms,
        } = *sample;
        if !(0.0..=SAMPLE_COUNT_MAX).contains(&prompt_tokens)
            || !(0.0..=prompt_tokens).contains(&uncached_tokens)
        {
            return false;
        }
        let u = f64::from(uncached_tokens);
        let n = f64::from(prompt_tokens);
        let pool = self.pool(|row| row.prefill);
        let Some(row) =
            row(&mut self.endpoints, endpoint).filter(|_| SAMPLE_MS.contains(&service_ms))
        else {
            return false;
        };
        let inputs = [1.0, u, u * (2.0 * n - u)];
        row.used_ms = self.now_ms;
        let speed = self.prefill.speed(row.prefill, pool);
        let seen_ms = self.prefill.learn(speed, &inputs, service_ms);
        // First tokens that follow each other closely show a fast endpoint, or one that works on
        // many prompts at once. If they counted, an endpoint would seem faster the more requests it
        // gets.
        if queued {
            row.prefill.pass_over();
        } else {
            self.prefill
                .compare((&mut row.prefill, pool), speed, &inputs, seen_ms);
        }
        true
    }

    /// Learns from a gap between two tokens. Returns `false` for an impossible sample, which is
    /// ignored.
    pub fn gap(&mut self, endpoint: EndpointRef, sample: &TokenGap) -> bool {
        let TokenGap {
            batch,
            context_tokens,
            gap_ms,
        } = *sample;
        if ![batch, context_tokens]
            .iter()
            .all(|count| (0.0..=SAMPLE_COUNT_MAX).contains(count))
        {
            return false;
        }
        let pool = self.pool(|row| row.decode);
        let Some(row) = row(&mut self.endpoints, endpoint).filter(|_| SAMPLE_MS.contains(&gap_ms))
        else {
            return false;
        };
        let inputs = [1.0, f64::from(batch), f64::from(context_tokens)];
        row.used_ms = self.now_ms;
        let speed = self.decode.speed(row.decode, pool);
        let seen_ms = self.decode.learn(speed, &inputs, gap_ms);
        self.decode
            .compare((&mut row.decode, pool), speed, &inputs, seen_ms);
        true
    }

    /// Learns that a request ended after `output_tokens`.
    pub fn ended(&mut self, output_tokens: u32) {
        let tokens = f64::from(output_tokens).min(f64::from(*OUTPUT_TOKENS.end()));
        self.output_tokens += OUTPUT_WEIGHT * (tokens - self.output_tokens);
    }

    /// Whether both times of `endpoint` were compared with those of others. The model leaves out an
    /// endpoint of average speed.
    #[must_use]
    pub fn has_compared(&self, endpoint: EndpointRef) -> bool {
        let row = self
            .endpoints
            .get(usize::from(endpoint.slot.0))
            .filter(|row| row.generation == endpoint.generation);
        row.is_some_and(|row| row.prefill.is_some() && row.decode.is_some())
    }

    /// The model as learned so far.
    #[must_use]
    pub fn model(&self) -> StepModel {
        let prefill = self.pool(|row| row.prefill);
        let decode = self.pool(|row| row.decode);
        let speeds = self.endpoints.iter().enumerate().map(|(slot, row)| {
            let endpoint = EndpointRef {
                slot: Slot(u16::try_from(slot).unwrap_or(u16::MAX)),
                generation: row.generation,
            };
            let prefill = narrow(self.prefill.speed(row.prefill, prefill));
            let decode = narrow(self.decode.speed(row.decode, decode));
            (endpoint, prefill, decode)
        });
        let costs = StepModel::of(
            PREFILL_FLOORS.under(self.prefill.weights()),
            DECODE_FLOORS.under(self.decode.weights()),
            narrow(self.output_tokens),
        );
        // The last slot comes first, so the model's table grows once.
        speeds
            .rev()
            .skip_while(|(_, prefill, decode)| (*prefill, *decode) == (1.0, 1.0))
            .fold(costs, |model, (endpoint, prefill, decode)| {
                model.with_speed(endpoint, prefill, decode)
            })
    }

    /// The evidence of all endpoints, of one of the two times.
    fn pool(&self, of: fn(&EndpointEvidence) -> SpeedEvidence) -> SpeedEvidence {
        SpeedEvidence::of(self.endpoints.iter().map(of))
    }
}

/// The row of an endpoint; starts empty if the row was of another generation.
fn row(
    endpoints: &mut Vec<EndpointEvidence>,
    endpoint: EndpointRef,
) -> Option<&mut EndpointEvidence> {
    let slot = usize::from(endpoint.slot.0);
    if slot >= ENDPOINTS_MAX {
        return None;
    }
    if endpoints.len() <= slot {
        endpoints.resize(slot + 1, EndpointEvidence::nothing(Generation(0)));
    }
    let row = endpoints.get_mut(slot)?;
    if row.generation != endpoint.generation {
        *row = EndpointEvidence::nothing(endpoint.generation);
    }
    Some(row)
}

// === impl EndpointEvidence ===

impl EndpointEvidence {
    fn nothing(generation: Generation) -> Self {
        Self {
            generation,
            prefill: SpeedEvidence::default(),
            decode: SpeedEvidence::default(),
            used_ms: 0,
        }
    }
}

// === impl WeightFloors ===

impl WeightFloors {
    fn under(self, weights: [f32; 3]) -> [f32; 3] {
        let [first, ..] = weights;
        let mut weights = weights;
        for ((weight, least_ms), share) in weights.iter_mut().zip(self.least_ms).zip(self.of_first)
        {
            *weight = weight.max(least_ms).max(share * first);
        }
        weights
    }
}

// === impl LeastSquaresFit ===

impl LeastSquaresFit {
    fn new(prior: [f32; 3], keep: f64) -> Self {
        Self {
            prior: prior.map(f64::from),
            keep,
            theta: [1.0; 3],
            sums: FitSums::default(),
            newest: VecDeque::new(),
            alike: BTreeMap::new(),
            samples: 0,
            noise: SpeedNoise::default(),
        }
    }

    fn weights(&self) -> [f32; 3] {
        let [w0, w1, w2] = self.prior;
        let [t0, t1, t2] = self.theta;
        [w0 * t0, w1 * t1, w2 * t2].map(narrow)
    }

    /// The prior's terms for these inputs, ms; never all zero.
    fn terms(&self, inputs: &[f64; 3]) -> [f64; 3] {
        let [w0, w1, w2] = self.prior;
        let [x0, x1, x2] = *inputs;
        [(w0 * x0).max(1e-6), w1 * x1, w2 * x2]
    }

    fn expected_ms(&self, inputs: &[f64; 3]) -> f64 {
        dot(&self.terms(inputs), &self.theta).max(1e-6)
    }

    /// The speed of an endpoint in a pool with this evidence, in the valid range.
    fn speed(&self, endpoint: SpeedEvidence, pool: SpeedEvidence) -> f64 {
        endpoint
            .speed(pool, self.noise)
            .clamp(f64::from(*SPEEDS.start()), f64::from(*SPEEDS.end()))
    }

    /// Adds one sample of an endpoint with this speed; the fit learns what an average endpoint
    /// would take. Returns the observed time after clipping.
    fn learn(&mut self, speed: f64, inputs: &[f64; 3], seen_ms: f32) -> f64 {
        let seen_ms = f64::from(seen_ms);
        let clipped_ms = clip(seen_ms, self.expected_ms(inputs) * speed);
        if self.newest.len() == NEWEST_SAMPLES
            && let Some(oldest) = self.newest.pop_front()
        {
            self.sums = self.with(self.sums, &oldest);
        }
        self.newest.push_back(FitSample {
            inputs: *inputs,
            seen_ms: seen_ms / speed,
        });
        if self.sums.count == 0.0 {
            self.theta = [self.median_scale(); 3];
        }
        for _ in 0..FIT_ROUNDS {
            let sums = self
                .newest
                .iter()
                .fold(self.sums, |sums, sample| self.with(sums, sample));
            self.solve(&sums);
        }
        clipped_ms
    }

    /// Compares one sample of an endpoint with earlier samples of similar inputs, in a pool with
    /// this evidence; `speed` is the speed known so far.
    fn compare(
        &mut self,
        (endpoint, pool): (&mut SpeedEvidence, SpeedEvidence),
        speed: f64,
        inputs: &[f64; 3],
        seen_ms: f64,
    ) {
        self.samples += 1;
        // The first samples of a pool are clipped by a prior that may be far off. They would make
        // the endpoint that was sampled first seem fast.
        if self.samples < SPEEDS_FROM_SAMPLES {
            return;
        }
        let [_, one, other] = *inputs;
        let terms = self.terms(inputs);
        let alike = self.alike.entry([one, other].map(octave)).or_default();
        let expected_ms =
            alike.average_ms * dot(&terms, &self.theta) / dot(&alike.terms, &self.theta);
        // The first sample of a group has nothing to be compared with.
        if expected_ms.is_normal() {
            endpoint.add(pool, &mut self.noise, (seen_ms, expected_ms));
        }
        let keep = libm::pow(self.keep, (self.samples - alike.at) as f64);
        alike.average_ms = keep * alike.average_ms + seen_ms / speed;
        for (sum, term) in alike.terms.iter_mut().zip(terms) {
            *sum = keep * *sum + term;
        }
        alike.at = self.samples;
    }

    /// The scale of the prior that half of the newest samples are above, and half below.
    fn median_scale(&self) -> f64 {
        let mut scales: Vec<f64> = self
            .newest
            .iter()
            .map(|sample| sample.seen_ms / self.terms(&sample.inputs).iter().sum::<f64>())
            .collect();
        scales.sort_by(f64::total_cmp);
        scales.get(scales.len() / 2).copied().unwrap_or(1.0)
    }

    /// These sums and one more sample, weighed and clipped by the present fit.
    fn with(&self, mut sums: FitSums, sample: &FitSample) -> FitSums {
        let terms = self.terms(&sample.inputs);
        let keep = self.keep;
        let expected_ms = self.expected_ms(&sample.inputs);
        let seen_ms = clip(sample.seen_ms, expected_ms);
        sums.count = keep * sums.count + 1.0;
        sums.observed_ms = keep * sums.observed_ms + seen_ms;
        sums.prior_ms = keep * sums.prior_ms + terms.iter().sum::<f64>();
        let relative = terms.map(|term| term / expected_ms);
        for (row, a) in sums.normal.iter_mut().zip(relative) {
            for (sum, b) in row.iter_mut().zip(relative) {
                *sum = keep * *sum + a * b;
            }
        }
        for (sum, a) in sums.seen.iter_mut().zip(relative) {
            *sum = keep * *sum + a * seen_ms / expected_ms;
        }
        sums
    }

    /// Coordinate descent: each weight as good as it can be given the others, and not negative.
    fn solve(&mut self, sums: &FitSums) {
        let scale = sums.observed_ms / sums.prior_ms;
        let pull = |own: f64| ((RIDGE_SAMPLES * own / sums.count).max(1e-9), scale);
        solve(&sums.normal, &sums.seen, &mut self.theta, pull, SWEEPS);
    }
}

/// The observed time, or the longest that may be only a step where `expected_ms` was expected.
fn clip(seen_ms: f64, expected_ms: f64) -> f64 {
    seen_ms.min(CLIP_TIMES * expected_ms + CLIP_MORE_MS)
}

/// The octave of an input: the exponent of the power of two below it.
fn octave(input: f64) -> u64 {
    (1.0 + input).to_bits() >> (f64::MANTISSA_DIGITS - 1)
}

fn dot(a: &[f64; 3], b: &[f64; 3]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[expect(clippy::cast_possible_truncation, reason = "rounding is meant")]
fn narrow(number: f64) -> f32 {
    number as f32
}

#[cfg(test)]
mod tests;
