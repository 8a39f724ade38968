//! Learns a step model from what engines do, a sample at a time and at a constant cost.
//!
//! Each of the two times is linear in three inputs with weights that cannot be negative. Weights are learned as multiples of their priors, by least
//! squares of the *relative* error (a short prefill counts as much as a long one), with forgetting and with a ridge towards the one scale that would
//! make the prior right on average: after a handful of samples the scale is right, and the shape follows as inputs vary. What a sample says is
//! clipped, so that one stall teaches little. An endpoint's speed is the ratio of what was seen there to what others take for like inputs, against the
//! same ratio of all endpoints (so that a change of the whole pool is the pool's model's to learn), shrunk to 1. An engine that the formula does not fit
//! takes longer than expected for some inputs wherever they are worked on, and the endpoint that has more of them is not slower for it.
//!
//! Source: the simulations the default policy was tuned in, where this does as well as the true formulas given.

use std::collections::BTreeMap;

use super::super::least_squares::solve;
use super::{AVERAGE, COEFFICIENTS, EndpointSpeed, OUTPUT_TOKENS, SPEEDS, StepModel, nearest};
use crate::endpoint::{ENDPOINTS_MAX, EndpointRef, Generation};

/// A first token, as the step learner wants it: of the request that had waited longest at its endpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FirstToken {
    /// Prompt tokens worked through.
    pub uncached_tokens: f32,
    /// All prompt tokens.
    pub prompt_tokens: f32,
    /// From the pick, or from the endpoint's previous first token if that was later, to this first token, ms.
    pub service_ms: f32,
}

/// A gap between two tokens of one stream, while nobody at its endpoint waited for a first token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenGap {
    /// Requests decoding at the endpoint.
    pub batch: f32,
    /// Tokens of context of all of them.
    pub context_tokens: f32,
    /// The gap, ms a token.
    pub gap_ms: f32,
}

/// Learns a [`StepModel`].
#[derive(Clone, Debug)]
pub struct StepLearner {
    prefill: LeastSquaresFit,
    decode: LeastSquaresFit,
    output_tokens: f64,
    /// By slot.
    endpoints: Vec<SpeedRatios>,
}

/// Least squares of a time that is linear in three inputs.
#[derive(Clone, Debug)]
struct LeastSquaresFit {
    prior: [f64; 3],
    /// What is kept of the past at each sample.
    keep: f64,
    /// Weights as multiples of the prior.
    theta: [f64; 3],
    /// Sums over samples: of products of inputs, of inputs times what was seen (all relative to what was expected), and their number.
    normal: [[f64; 3]; 3],
    seen: [f64; 3],
    count: f64,
    /// Sums of what was seen, and of what the prior says: the common scale.
    observed_ms: f64,
    prior_ms: f64,
    /// Samples whose inputs lie between the same powers of two: what endpoints are compared by.
    alike: BTreeMap<[u64; 2], SimilarSamples>,
    samples: u64,
}

/// Sums over samples of like inputs: what an average endpoint takes, and the terms of the prior, of which the weights of any moment make what the fit says.
#[derive(Clone, Copy, Debug, Default)]
struct SimilarSamples {
    average_ms: f64,
    terms: [f64; 3],
    /// How many samples there were when it was last added to.
    at: u64,
}

/// What the weights of a fit are at least.
#[derive(Clone, Copy, Debug)]
struct WeightFloors {
    least_ms: [f32; 3],
    of_first: [f32; 3],
}

/// What was seen at one endpoint against what others take for the like.
#[derive(Clone, Copy, Debug)]
struct SpeedRatios {
    generation: Generation,
    prefill: SpeedRatio,
    decode: SpeedRatio,
}

/// Sums over samples of one endpoint: what was seen, and what was expected of an average endpoint by like samples before.
#[derive(Clone, Copy, Debug, Default)]
struct SpeedRatio {
    observed_ms: f64,
    expected_ms: f64,
    count: f64,
}

/// What is kept of the past at each sample: a memory of about 1,000 first tokens, and of 500 gaps; of an endpoint of about 330 and 100, since those
/// change sooner.
const PREFILL_KEEP: f64 = 0.999;
const DECODE_KEEP: f64 = 0.998;
const PREFILL_SPEED_KEEP: f64 = 0.997;
const DECODE_SPEED_KEEP: f64 = 0.99;

/// Samples that the common scale counts for against what is seen of each weight, and that "like all others" counts for at each endpoint.
const RIDGE_SAMPLES: f64 = 2.0;
const SHRINK_SAMPLES: f64 = 10.0;

/// An endpoint this little off is like all others: noise must not sort equal endpoints.
const SPEED_IGNORED: f64 = 0.05;

/// Samples of the pool from which on endpoints are compared.
const SPEEDS_FROM_SAMPLES: f64 = 16.0;

/// A sample counts for at most this many times what was expected, and this many ms more: beyond, something else than a step took its time.
const CLIP_TIMES: f64 = 4.0;
const CLIP_MORE_MS: f64 = 20.0;

/// The least that each term of a step may cost, ms, and the least against what the first term costs: a tenth of what the fastest accelerators take. An
/// engine whose time does not grow with the prompt, or with the batch, would else teach that load and a lost prefix are free.
const PREFILL_FLOORS: WeightFloors = WeightFloors { least_ms: [0.0, 0.001, 0.0], of_first: [0.0, 1e-4, 0.0] };
const DECODE_FLOORS: WeightFloors = WeightFloors { least_ms: [0.0, 5e-4, 1e-6], of_first: [0.0, 2e-4, 1e-6] };

/// What a sample may say, ms; tokens and requests of one.
const SAMPLE_MS: std::ops::RangeInclusive<f32> = 0.01..=600_000.0;
const SAMPLE_COUNT_MAX: f32 = 16_777_216.0;

/// Rounds of solving for one weight after the other: three weights settle in far fewer.
const SWEEPS: usize = 20;

/// How fast the mean output is followed: some 200 requests.
const OUTPUT_WEIGHT: f64 = 0.005;

const NOTHING: SpeedRatios = SpeedRatios {
    generation: Generation(0),
    prefill: SpeedRatio { observed_ms: 0.0, expected_ms: 0.0, count: 0.0 },
    decode: SpeedRatio { observed_ms: 0.0, expected_ms: 0.0, count: 0.0 },
};

// === impl StepLearner ===

impl Default for StepLearner {
    fn default() -> Self {
        Self::starting_from(&StepModel::default())
    }
}

impl StepLearner {
    /// A learner whose prior is this model (of an earlier life, or of another pool); its endpoints' speeds are not taken over, they are learned anew
    /// within some tens of requests.
    #[must_use]
    pub fn starting_from(model: &StepModel) -> Self {
        Self {
            prefill: LeastSquaresFit::new(model.prefill, PREFILL_KEEP),
            decode: LeastSquaresFit::new(model.decode, DECODE_KEEP),
            output_tokens: f64::from(model.output_tokens),
            endpoints: Vec::new(),
        }
    }

    /// Learns from a first token; `queued`: others' first tokens came at its endpoint between its pick and its own. `false` when it cannot
    /// be, and is not learned from.
    pub fn first_token(&mut self, endpoint: EndpointRef, sample: &FirstToken, queued: bool) -> bool {
        let FirstToken { uncached_tokens, prompt_tokens, service_ms } = *sample;
        if !(0.0..=SAMPLE_COUNT_MAX).contains(&prompt_tokens) || !(0.0..=prompt_tokens).contains(&uncached_tokens) {
            return false;
        }
        let (u, n) = (f64::from(uncached_tokens), f64::from(prompt_tokens));
        let pool = SpeedRatio::of(self.endpoints.iter().map(|row| row.prefill));
        let Some(row) = row(&mut self.endpoints, endpoint).filter(|_| SAMPLE_MS.contains(&service_ms)) else { return false };
        let inputs = [1.0, u, u * (2.0 * n - u)];
        let speed = row.prefill.speed(pool);
        let seen_ms = self.prefill.learn(speed, &inputs, service_ms);
        row.prefill = row.prefill.forgetting(PREFILL_SPEED_KEEP);
        // First tokens that come soon after one another show a fast endpoint, or one that works on many prompts at once: the more it is given, the
        // faster it would seem.
        if !queued {
            self.prefill.compare(&mut row.prefill, speed, &inputs, seen_ms);
        }
        true
    }

    /// Learns from a gap between two tokens. `false` when it cannot be, and is not learned from.
    pub fn gap(&mut self, endpoint: EndpointRef, sample: &TokenGap) -> bool {
        let TokenGap { batch, context_tokens, gap_ms } = *sample;
        if ![batch, context_tokens].iter().all(|count| (0.0..=SAMPLE_COUNT_MAX).contains(count)) {
            return false;
        }
        let pool = SpeedRatio::of(self.endpoints.iter().map(|row| row.decode));
        let Some(row) = row(&mut self.endpoints, endpoint).filter(|_| SAMPLE_MS.contains(&gap_ms)) else { return false };
        let inputs = [1.0, f64::from(batch), f64::from(context_tokens)];
        let speed = row.decode.speed(pool);
        let seen_ms = self.decode.learn(speed, &inputs, gap_ms);
        row.decode = row.decode.forgetting(DECODE_SPEED_KEEP);
        self.decode.compare(&mut row.decode, speed, &inputs, seen_ms);
        true
    }

    /// A request ended, with so many tokens of output.
    pub fn ended(&mut self, output_tokens: u32) {
        let tokens = f64::from(output_tokens).min(f64::from(*OUTPUT_TOKENS.end()));
        self.output_tokens += OUTPUT_WEIGHT * (tokens - self.output_tokens);
    }

    /// What it knows by now.
    #[must_use]
    pub fn model(&self) -> StepModel {
        let output_tokens = nearest(narrow(self.output_tokens), &OUTPUT_TOKENS);
        let prefill = SpeedRatio::of(self.endpoints.iter().map(|row| row.prefill));
        let decode = SpeedRatio::of(self.endpoints.iter().map(|row| row.decode));
        let speed = |row: &SpeedRatios| EndpointSpeed {
            generation: row.generation,
            prefill: nearest(narrow(row.prefill.speed(prefill)), &SPEEDS),
            decode: nearest(narrow(row.decode.speed(decode)), &SPEEDS),
        };
        let known = self.endpoints.iter().rposition(|row| speed(row) != EndpointSpeed { generation: row.generation, ..AVERAGE });
        let speeds = self.endpoints.iter().take(known.map_or(0, |last| last + 1)).map(speed).collect();
        StepModel {
            prefill: PREFILL_FLOORS.under(self.prefill.weights()),
            decode: DECODE_FLOORS.under(self.decode.weights()),
            output_tokens,
            speeds,
        }
    }
}

/// What is known of the endpoint: nothing, where the row was of another of its lives.
fn row(endpoints: &mut Vec<SpeedRatios>, endpoint: EndpointRef) -> Option<&mut SpeedRatios> {
    let slot = usize::from(endpoint.slot.0);
    if slot >= ENDPOINTS_MAX {
        return None;
    }
    if endpoints.len() <= slot {
        endpoints.resize(slot + 1, NOTHING);
    }
    let row = endpoints.get_mut(slot)?;
    if row.generation != endpoint.generation {
        *row = SpeedRatios { generation: endpoint.generation, ..NOTHING };
    }
    Some(row)
}

// === impl WeightFloors ===

impl WeightFloors {
    fn under(self, weights: [f32; 3]) -> [f32; 3] {
        let [first, ..] = weights;
        let mut weights = weights;
        for ((weight, least_ms), share) in weights.iter_mut().zip(self.least_ms).zip(self.of_first) {
            *weight = weight.max(least_ms).max(share * first);
        }
        weights
    }
}

// === impl SpeedRatio ===

impl SpeedRatio {
    fn forgetting(self, keep: f64) -> Self {
        Self { observed_ms: keep * self.observed_ms, expected_ms: keep * self.expected_ms, count: keep * self.count }
    }

    /// What was seen at all of these together against what was expected.
    fn of(rows: impl Iterator<Item = Self>) -> f64 {
        let (observed_ms, expected_ms) = rows.fold((0.0, 0.0), |(o, e), row| (o + row.observed_ms, e + row.expected_ms));
        if expected_ms > 0.0 { observed_ms / expected_ms } else { 1.0 }
    }

    /// How many times as long as a pool of that ratio this endpoint takes.
    fn speed(self, pool: f64) -> f64 {
        let shrink = SHRINK_SAMPLES * self.expected_ms / self.count;
        let speed = (self.observed_ms / pool + shrink) / (self.expected_ms + shrink);
        if !speed.is_finite() || (speed - 1.0).abs() < SPEED_IGNORED {
            return 1.0;
        }
        speed.clamp(f64::from(*SPEEDS.start()), f64::from(*SPEEDS.end()))
    }
}

// === impl LeastSquaresFit ===

impl LeastSquaresFit {
    fn new(prior: [f32; 3], keep: f64) -> Self {
        let (prior, nothing) = (prior.map(f64::from), [0.0; 3]);
        Self {
            prior,
            keep,
            theta: [1.0; 3],
            normal: [nothing; 3],
            seen: nothing,
            count: 0.0,
            observed_ms: 0.0,
            prior_ms: 0.0,
            alike: BTreeMap::new(),
            samples: 0,
        }
    }

    fn weights(&self) -> [f32; 3] {
        let [w0, w1, w2] = self.prior;
        let [t0, t1, t2] = self.theta;
        [w0 * t0, w1 * t1, w2 * t2].map(|weight| nearest(narrow(weight), &COEFFICIENTS))
    }

    /// What the prior's terms say of these inputs, ms; never all nothing.
    fn terms(&self, inputs: &[f64; 3]) -> [f64; 3] {
        let [w0, w1, w2] = self.prior;
        let [x0, x1, x2] = *inputs;
        [(w0 * x0).max(1e-6), w1 * x1, w2 * x2]
    }

    fn expected_ms(&self, inputs: &[f64; 3]) -> f64 {
        dot(&self.terms(inputs), &self.theta).max(1e-6)
    }

    /// One sample of an endpoint of that speed: teaches the fit what it says at an average one. Gives back as much of what was seen as it counts for.
    fn learn(&mut self, speed: f64, inputs: &[f64; 3], seen_ms: f32) -> f64 {
        let expected_ms = self.expected_ms(inputs);
        let seen_ms = f64::from(seen_ms).min(CLIP_TIMES * expected_ms * speed + CLIP_MORE_MS);
        self.add(inputs, seen_ms / speed, expected_ms);
        self.solve();
        seen_ms
    }

    /// One sample: says how fast its endpoint, of which that speed is known, is against those that had the like before.
    fn compare(&mut self, endpoint: &mut SpeedRatio, speed: f64, inputs: &[f64; 3], seen_ms: f64) {
        self.samples += 1;
        // The first samples of a pool are clipped by a prior that may be far off: they would make the endpoint that was sampled first seem fast.
        if self.count < SPEEDS_FROM_SAMPLES {
            return;
        }
        let [_, one, other] = *inputs;
        let terms = self.terms(inputs);
        let alike = self.alike.entry([one, other].map(octave)).or_default();
        let expected_ms = alike.average_ms * dot(&terms, &self.theta) / dot(&alike.terms, &self.theta);
        // The first of its like says nothing of its endpoint.
        if expected_ms.is_normal() {
            endpoint.observed_ms += seen_ms;
            endpoint.expected_ms += expected_ms;
            endpoint.count += 1.0;
        }
        let keep = libm::pow(self.keep, (self.samples - alike.at) as f64);
        alike.average_ms = keep * alike.average_ms + seen_ms / speed;
        for (sum, term) in alike.terms.iter_mut().zip(terms) {
            *sum = keep * *sum + term;
        }
        alike.at = self.samples;
    }

    fn add(&mut self, inputs: &[f64; 3], seen_ms: f64, expected_ms: f64) {
        let terms = self.terms(inputs);
        let keep = self.keep;
        self.count = keep * self.count + 1.0;
        self.observed_ms = keep * self.observed_ms + seen_ms;
        self.prior_ms = keep * self.prior_ms + terms.iter().sum::<f64>();
        let relative = terms.map(|term| term / expected_ms);
        for (row, a) in self.normal.iter_mut().zip(relative) {
            for (sum, b) in row.iter_mut().zip(relative) {
                *sum = keep * *sum + a * b;
            }
        }
        for (sum, a) in self.seen.iter_mut().zip(relative) {
            *sum = keep * *sum + a * seen_ms / expected_ms;
        }
    }

    /// Coordinate descent, each weight as good as it can be given the others and not negative.
    fn solve(&mut self) {
        let scale = self.observed_ms / self.prior_ms;
        let count = self.count;
        solve(&self.normal, &self.seen, &mut self.theta, |own| ((RIDGE_SAMPLES * own / count).max(1e-9), scale), SWEEPS);
    }
}

/// Between which powers of two it lies: the exponent.
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
