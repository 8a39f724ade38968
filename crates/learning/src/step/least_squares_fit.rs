//! The cost of a prefill or of a decode step, fitted to samples of an average endpoint.

use std::collections::{BTreeMap, VecDeque};

use scheduler::latency::step::SPEEDS;

use super::speed::{SpeedEvidence, SpeedNoise};
use super::to_f32;
use crate::least_squares::solve;

/// The least squares fit of a time that is linear in three inputs.
#[derive(Clone, Debug)]
pub(super) struct LeastSquaresFit {
    prior: [f64; 3],
    /// The factor by which each new sample reduces the sums.
    keep: f64,
    /// The weights, as multiples of the prior's weights.
    theta: [f64; 3],
    /// The sums over the samples before `newest`.
    sums: FitSums,
    /// The newest samples, oldest first, at most [`NEWEST_SAMPLES`].
    newest: VecDeque<FitSample>,
    /// Groups of samples whose inputs lie between the same powers of two. Endpoints are compared
    /// within each group.
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
    /// Sums of the products of inputs, of inputs times observed time (all relative to the expected
    /// time), and the number of samples.
    normal: [[f64; 3]; 3],
    seen: [f64; 3],
    count: f64,
    /// Sums of observed times and of the times that the prior gives. The ratio of the two sums is
    /// the common scale.
    observed_ms: f64,
    prior_ms: f64,
}

/// Sums over samples with similar inputs: the time of an average endpoint, and the prior's terms.
/// The sum of these terms times the current weights is the time that the fit expects.
#[derive(Clone, Copy, Debug, Default)]
struct SimilarSamples {
    average_ms: f64,
    terms: [f64; 3],
    /// The number of samples that the fit had when a sample was last added to this group.
    at: u64,
}

/// The weight, in samples, with which the common scale pulls each weight.
const RIDGE_SAMPLES: f64 = 2.0;

/// The number of samples that the pool needs before endpoints are compared.
const SPEEDS_FROM_SAMPLES: u64 = 16;

/// The multiple of the expected time, plus [`CLIP_MORE_MS`], at which a sample is clipped, because
/// a longer time was not that of a step alone.
const CLIP_TIMES: f64 = 4.0;
const CLIP_MORE_MS: f64 = 20.0;

/// The number of the newest samples that each fit weighs and clips again, by the time that the fit
/// expects now. Older samples keep their weight. So a first sample that is far off does not decide
/// how much the next thousand samples count. In tests, 16 and 64 work equally well, and 8 does not.
const NEWEST_SAMPLES: usize = 32;

/// The number of rounds of weighing and fitting for each sample.
const FIT_ROUNDS: usize = 2;

/// The number of rounds of coordinate descent. Three weights converge in far fewer rounds.
const SWEEPS: usize = 20;

// === impl LeastSquaresFit ===

impl LeastSquaresFit {
    pub(super) fn new(prior: [f32; 3], keep: f64) -> Self {
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

    pub(super) fn weights(&self) -> [f32; 3] {
        let [w0, w1, w2] = self.prior;
        let [t0, t1, t2] = self.theta;
        [w0 * t0, w1 * t1, w2 * t2].map(to_f32)
    }

    /// Returns the prior's terms for these inputs, in ms. The terms are never all zero.
    fn terms(&self, inputs: &[f64; 3]) -> [f64; 3] {
        let [w0, w1, w2] = self.prior;
        let [x0, x1, x2] = *inputs;
        [(w0 * x0).max(1e-6), w1 * x1, w2 * x2]
    }

    fn expected_ms(&self, inputs: &[f64; 3]) -> f64 {
        dot(&self.terms(inputs), &self.theta).max(1e-6)
    }

    /// Returns the speed of an endpoint with this evidence, limited to the valid range.
    pub(super) fn speed(&self, endpoint: SpeedEvidence, pool: SpeedEvidence) -> f64 {
        endpoint
            .speed(pool, self.noise)
            .clamp(f64::from(*SPEEDS.start()), f64::from(*SPEEDS.end()))
    }

    /// Returns the logarithm of the ratio between this time and the time of an average endpoint for
    /// similar inputs.
    pub(super) fn log_of(&self, inputs: &[f64; 3], seen_ms: f32) -> f64 {
        let [_, one, other] = *inputs;
        let alike = self.alike.get(&[one, other].map(octave));
        let expected_ms = alike.map_or(0.0, |alike| self.average_ms(alike, inputs));
        let expected_ms = if expected_ms.is_normal() {
            expected_ms
        } else {
            self.expected_ms(inputs)
        };
        libm::log(f64::from(seen_ms) / expected_ms)
    }

    /// Returns the time of an average endpoint for these inputs, in ms, by similar samples.
    fn average_ms(&self, alike: &SimilarSamples, inputs: &[f64; 3]) -> f64 {
        alike.average_ms * dot(&self.terms(inputs), &self.theta) / dot(&alike.terms, &self.theta)
    }

    /// Adds one sample of an endpoint with this speed. The fit learns the time of an average
    /// endpoint. Returns the observed time after clipping.
    pub(super) fn learn(&mut self, speed: f64, inputs: &[f64; 3], seen_ms: f32) -> f64 {
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
    /// this evidence. `speed` is the speed known so far.
    pub(super) fn compare(
        &mut self,
        endpoint: &mut SpeedEvidence,
        pool: SpeedEvidence,
        speed: f64,
        inputs: &[f64; 3],
        seen_ms: f64,
    ) {
        self.samples += 1;
        // The first samples of a pool are clipped by a prior that may be far off. Such samples
        // would make the endpoint that was sampled first seem fast.
        if self.samples < SPEEDS_FROM_SAMPLES {
            return;
        }
        let [_, one, other] = *inputs;
        let terms = self.terms(inputs);
        let group = [one, other].map(octave);
        let known = self.alike.get(&group).copied().unwrap_or_default();
        let expected_ms = self.average_ms(&known, inputs);
        let alike = self.alike.entry(group).or_default();
        // The first sample of a group has nothing to be compared with.
        if expected_ms.is_normal() {
            endpoint.add(pool, &mut self.noise, seen_ms, expected_ms);
        }
        let keep = libm::pow(self.keep, (self.samples - alike.at) as f64);
        alike.average_ms = keep * alike.average_ms + seen_ms / speed;
        for (sum, term) in alike.terms.iter_mut().zip(terms) {
            *sum = keep * *sum + term;
        }
        alike.at = self.samples;
    }

    /// Returns the factor for the prior with which half of the newest samples take longer than
    /// expected.
    fn median_scale(&self) -> f64 {
        let mut scales: Vec<f64> = self
            .newest
            .iter()
            .map(|sample| sample.seen_ms / self.terms(&sample.inputs).iter().sum::<f64>())
            .collect();
        scales.sort_by(f64::total_cmp);
        scales.get(scales.len() / 2).copied().unwrap_or(1.0)
    }

    /// Adds one sample to `sums`, weighed and clipped by the present fit.
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

    /// Fits the weights to `sums` by coordinate descent: each weight becomes the best non-negative
    /// weight for the current values of the other weights.
    fn solve(&mut self, sums: &FitSums) {
        let scale = sums.observed_ms / sums.prior_ms;
        let pull = |own: f64| ((RIDGE_SAMPLES * own / sums.count).max(1e-9), scale);
        solve(&sums.normal, &sums.seen, &mut self.theta, pull, SWEEPS);
    }
}

/// Limits the observed time to the longest that a step alone may take if `expected_ms` was
/// expected.
fn clip(seen_ms: f64, expected_ms: f64) -> f64 {
    seen_ms.min(CLIP_TIMES * expected_ms + CLIP_MORE_MS)
}

/// Returns the exponent of the largest power of two that is not above `1 + input`.
fn octave(input: f64) -> u64 {
    (1.0 + input).to_bits() >> (f64::MANTISSA_DIGITS - 1)
}

fn dot(a: &[f64; 3], b: &[f64; 3]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
