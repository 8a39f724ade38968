//! The speed of an endpoint: its times as a multiple of other endpoints' times. The speed is a mean
//! of comparisons. While the endpoint is idle, these comparisons count less and less.
//!
//! Each comparison is the logarithm of an observed time divided by the time that an average
//! endpoint takes for similar inputs. The mean of an endpoint is compared with the mean of the
//! pool. Only the part of the difference that chance does not explain is published. New samples
//! replace old samples. Without samples, evidence halves every [`HALF_LIFE_MS`]: uncertainty grows
//! until nothing is left to publish. The endpoint then counts as average and is tried again, and a
//! few samples show whether it is still slow.

/// Sums over the comparisons of one endpoint. A comparison weighs as much as its expected time,
/// because short times consist mostly of parts that are equal on all engines.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SpeedEvidence {
    weight: f64,
    /// The sum of the weights times the logarithms.
    logs: f64,
    /// The sum of the squares of the weights.
    squares: f64,
}

/// The spread of single comparisons of a pool around the mean of their endpoint, as sums of squared
/// differences and of their weights.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SpeedNoise {
    weight: f64,
    squares: f64,
}

/// The time in which the evidence of an idle endpoint halves, in ms. The aim is that a slow
/// endpoint is tried again 30 s after its last sample. In the first [`IDLE_MS`] of these 30 s, the
/// evidence keeps its weight. An endpoint that was learned as 1.9 times slower counts as average
/// when evidence worth 0.6 samples of [`MEMORY_SAMPLES`] is left. For an endpoint that is 3 times
/// slower, this limit is 0.4 samples, and for one that is 10 times slower 0.2 samples (with the
/// least noise). Until then 6 to 7 half-lives pass.
const HALF_LIFE_MS: f64 = 3_000.0;

/// The time since the last sample after which evidence begins to lose weight, in ms. With 10 s, the
/// evidence of a slow endpoint with one sample in three seconds hardly loses weight, and new
/// samples correct the evidence. In simulations with 1 s, requests of long conversations took 3 %
/// longer on engines with a speed ratio of two.
pub(super) const IDLE_MS: u64 = 10_000;

/// The number of samples that the mean of an endpoint remembers while no sample is [`SURPRISING`].
/// With a noise of 0.3, equal endpoints then differ by less than 11 %. With half as many samples,
/// chance and the busy moments of a machine look like speeds.
const MEMORY_SAMPLES: f64 = 32.0;

/// The share of the evidence that is kept after a sample that cannot be compared
/// ([`Comparison::Incomparable`](super::Comparison)). Evidence does not lose weight with time while
/// an endpoint is in use, but the endpoint may have changed.
const UNCOMPARED_KEEP: f64 = 0.997;

/// The weight, in samples, of the assumption that an endpoint is as fast as the other endpoints.
/// With the value 1, a single sample moves the speed by half of its difference.
const SHRINK_SAMPLES: f64 = 1.0;

/// The number of standard errors by which an endpoint must differ from the pool before a difference
/// is published. By chance alone, the difference is larger in one of 20 cases.
const STANDARD_ERRORS: f64 = 2.0;

/// The standard deviation of a comparison, as a logarithm: the prior, and the minimum that is
/// assumed. Inputs are similar only within a factor of two, and samples of the same time resemble
/// each other for other reasons too. So a few equal samples do not prove more. With the minimum, an
/// endpoint with full evidence counts as average if it differs by less than 4 %. With the prior,
/// the limit is 11 %.
const NOISE_PRIOR: f64 = 0.3;
const NOISE_MIN: f64 = 0.1;

/// The number of samples over which the noise is averaged, and as which its prior counts.
const NOISE_SAMPLES: f64 = 256.0;
const NOISE_PRIOR_SAMPLES: f64 = 16.0;

/// The distance from the mean, in standard deviations, beyond which a sample suggests that the
/// endpoint has changed (by chance one sample in 370). Then the weight of earlier evidence is
/// halved. So a change is learned from some five samples, instead of [`MEMORY_SAMPLES`].
const SURPRISING: f64 = 3.0;
const SURPRISED_KEEP: f64 = 0.5;

/// The maximum difference of a comparison from the mean so far that counts, as a logarithm: a
/// factor of two. A larger difference of one sample may be a stall. A change of the endpoint shows
/// again in the next samples. So the first sample of an endpoint makes it at most 1.4 times slower,
/// which is the square root of two.
const SURPRISE_MAX: f64 = std::f64::consts::LN_2;

// === impl SpeedEvidence ===

impl SpeedEvidence {
    /// Returns the evidence of all these endpoints together.
    pub(super) fn from_endpoints(endpoints: impl Iterator<Item = Self>) -> Self {
        endpoints.fold(Self::default(), |all, one| Self {
            weight: all.weight + one.weight,
            logs: all.logs + one.logs,
            squares: all.squares + one.squares,
        })
    }

    /// Returns whether the endpoint was ever compared.
    pub(super) fn is_some(self) -> bool {
        self.weight > 0.0
    }

    /// Reduces the weight of the evidence for `idle_ms` without samples.
    pub(super) fn fade(&mut self, idle_ms: f64) {
        // A compared endpoint stays compared, because the sums do not become 0.
        if self.samples() > f64::EPSILON {
            *self = self.times(libm::exp2(-idle_ms / HALF_LIFE_MS).max(f64::EPSILON));
        }
    }

    /// Records a sample that cannot be compared.
    pub(super) fn pass_over(&mut self) {
        *self = self.times(UNCOMPARED_KEEP);
    }

    /// Adds a comparison, in a pool with this evidence.
    pub(super) fn add(
        &mut self,
        pool: Self,
        noise: &mut SpeedNoise,
        observed_ms: f64,
        expected_ms: f64,
    ) {
        let samples = self.samples();
        let known = if samples > 0.0 {
            self.mean()
        } else {
            pool.mean()
        };
        let surprise = libm::log(observed_ms / expected_ms) - known;
        // The variance of `surprise` is that of a sample plus that of the mean, which is 1 /
        // `samples` of the variance of a sample.
        let share = samples / (samples + 1.0);
        let is_surprising =
            share * surprise * surprise > SURPRISING * SURPRISING * noise.variance();
        let surprise = surprise.clamp(-SURPRISE_MAX, SURPRISE_MAX);
        noise.add(expected_ms, share, surprise);
        *self = self.times(if is_surprising {
            SURPRISED_KEEP
        } else {
            1.0 - 1.0 / MEMORY_SAMPLES
        });
        self.weight += expected_ms;
        self.logs += expected_ms * (known + surprise);
        self.squares += expected_ms * expected_ms;
    }

    /// Returns the time of this endpoint as a multiple of the time of the pool. The result is
    /// exactly 1 if chance explains the difference. The published part of the difference grows
    /// without a jump, from nothing just beyond chance to nearly all of a large difference: 94 % of
    /// a difference that is twice as large as chance. (The positive-part estimator of James and
    /// Stein, which does not square the quotient, publishes 75 % of that difference. With that
    /// estimator, requests took 4 % longer on engines with a speed ratio of two.)
    pub(super) fn speed(self, pool: Self, noise: SpeedNoise) -> f64 {
        let samples = self.samples();
        let difference = (self.mean() - pool.mean()) * samples / (samples + SHRINK_SAMPLES);
        let chance = STANDARD_ERRORS * STANDARD_ERRORS * noise.variance() / samples;
        let by_chance = chance / (difference * difference);
        let share = 1.0 - by_chance * by_chance;
        // `share` is NaN if there are no samples, and then the condition is false.
        if share > 0.0 {
            libm::exp(share * difference)
        } else {
            1.0
        }
    }

    /// Returns the number of samples of equal weight that would be the same evidence.
    fn samples(self) -> f64 {
        if self.squares > 0.0 {
            self.weight * self.weight / self.squares
        } else {
            0.0
        }
    }

    fn mean(self) -> f64 {
        if self.weight > 0.0 {
            self.logs / self.weight
        } else {
            0.0
        }
    }

    fn times(self, keep: f64) -> Self {
        Self {
            weight: keep * self.weight,
            logs: keep * self.logs,
            squares: keep * self.squares,
        }
    }
}

// === impl SpeedNoise ===

impl SpeedNoise {
    fn add(&mut self, weight: f64, share: f64, surprise: f64) {
        let weight = weight * weight;
        if self.weight <= 0.0 {
            self.weight = NOISE_PRIOR_SAMPLES * weight;
            self.squares = self.weight * NOISE_PRIOR * NOISE_PRIOR;
        }
        let keep = 1.0 - 1.0 / NOISE_SAMPLES;
        self.weight = keep * self.weight + share * weight;
        self.squares = keep * self.squares + share * share * weight * surprise * surprise;
    }

    fn variance(self) -> f64 {
        let variance = if self.weight > 0.0 {
            self.squares / self.weight
        } else {
            NOISE_PRIOR * NOISE_PRIOR
        };
        variance.max(NOISE_MIN * NOISE_MIN)
    }
}
