//! A number that a tenth of outcomes are above, followed as they come: online conformal prediction, by quantile tracking.
//!
//! A tracked number goes up by nine where an outcome is above it and down by one where it is not, so in the long run a tenth are, whatever outcomes
//! do. How long that run is, is the size of a step: large ones follow what drifts, and tremble where nothing does. So there are two, and the one
//! that lost less of late counts more.
//!
//! What few outcomes are within what they were told is still left to chance. Where nothing comes between a pick and its outcome, how many were above is
//! known at the next pick, and the integrator of a controller makes up for it (conformal PID control).

/// What is meant to be within the ninth decile.
pub(super) const SHARE: f32 = 0.9;

/// What is meant to be within the middle.
pub(super) const HALF: f32 = 0.5;

/// How far an outcome moves the slow one, and the middle, as a share of its scale; and the fast one where nothing comes between a pick and its outcome.
pub(super) const GAIN: f32 = 0.1;
const GAIN_FAST: f32 = 0.8;

/// Outcomes over which the scale of the slow one is averaged; and of the fast one, and of the middle, where nothing comes between.
const SCALE_OUTCOMES: f32 = 100.0;
pub(super) const SCALE_OUTCOMES_FAST: f32 = 20.0;

/// Outcomes over which losses are averaged.
const LOSS_OUTCOMES: f32 = 100.0;

/// How far one outcome too many above moves what is told, as a share of the integrator's scale, in the first so many outcomes. What is to be right is a share,
/// and the more outcomes it is of, the more may be too many: so in a run that is longer it is less, by the square of how many times as long, up to the last.
const INTEGRAL_GAIN: f32 = 0.5;
const INTEGRAL_OUTCOMES: f32 = 300.0;
const INTEGRAL_LONGEST: f32 = 3.0;

/// The most outcomes too many, or too few, that are made up for in the first ones, and as many times as that later: what is beyond was a change, which is
/// followed, not paid back.
const INTEGRAL_MAX: f32 = 3.0;

/// A scale before anything is known, and the least: what is exact so far need not stay so.
const SCALE_PRIOR: f32 = 0.1;
const SCALE_MIN: f32 = 0.001;

/// A ninth decile, as a logarithm or a difference of two.
#[derive(Clone, Copy, Debug)]
pub(super) struct P90Tracker {
    slow: QuantileTracker,
    fast: QuantileTracker,
    losses: PinballLosses,
}

/// A number that is moved until a share of outcomes are within it.
#[derive(Clone, Copy, Debug)]
pub(super) struct QuantileTracker {
    at: f32,
    /// How far outcomes are from it, absolute, on average.
    scale: f32,
}

/// What makes up for outcomes that were above what they had been told, and for those that should have been.
#[derive(Clone, Copy, Debug)]
pub(super) struct CoverageIntegrator {
    /// Outcomes above, less a tenth of all.
    sum: f32,
    outcomes: f32,
    /// How far outcomes are from where it starts, absolute, on average.
    scale: f32,
}

/// Mean pinball losses of two candidates for a decile, ms.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PinballLosses([f32; 2]);

/// An outcome, as logarithms.
#[derive(Clone, Copy, Debug)]
pub(super) struct LogOutcome {
    /// What it was, less `base`.
    pub(super) value: f32,
    /// What the decile is added to.
    pub(super) base: f32,
    /// Outcomes that came between its pick and itself.
    pub(super) delay: f32,
}

// === impl P90Tracker ===

impl P90Tracker {
    pub(super) fn starting_at(at: f32) -> Self {
        let tracked = QuantileTracker::starting_at(at);
        Self { slow: tracked, fast: tracked, losses: PinballLosses::default() }
    }

    pub(super) fn at(&self) -> f32 {
        let fast = self.losses.second_counts();
        (1.0 - fast) * self.slow.at + fast * self.fast.at
    }

    /// Moves it by an outcome. The faster what is told follows outcomes that were told of by something older, the more it swings about where it
    /// should be: so the fast one is the slower, the more outcomes come between.
    pub(super) fn outcome(&mut self, LogOutcome { value, base, delay }: LogOutcome) {
        self.losses.add(base + value, [base + self.slow.at, base + self.fast.at]);
        self.slow.outcome(value, SHARE, GAIN, SCALE_OUTCOMES);
        let (gain, outcomes) = ((GAIN_FAST / (1.0 + delay)).max(GAIN), (SCALE_OUTCOMES_FAST * (1.0 + delay)).min(SCALE_OUTCOMES));
        self.fast.outcome(value, SHARE, gain, outcomes);
    }

    pub(super) fn clamp(&mut self, low: f32, high: f32) {
        self.slow.at = self.slow.at.clamp(low, high);
        self.fast.at = self.fast.at.clamp(low, high);
    }
}

/// What an outcome counts for where this share is meant to be within: so much where it is above, so much less one where it is not; where as many are above as
/// are meant to, nothing in sum.
fn up(above: bool, share: f32) -> f32 {
    if above { share } else { share - 1.0 }
}

// === impl QuantileTracker ===

impl QuantileTracker {
    pub(super) const fn starting_at(at: f32) -> Self {
        Self { at, scale: SCALE_PRIOR }
    }

    pub(super) fn at(&self) -> f32 {
        self.at
    }

    pub(super) fn outcome(&mut self, value: f32, share: f32, gain: f32, scale_outcomes: f32) {
        self.scale += ((value - self.at).abs().clamp(SCALE_MIN, 1.0) - self.scale) / scale_outcomes;
        self.at += gain * self.scale * up(value > self.at, share);
    }
}

// === impl CoverageIntegrator ===

impl Default for CoverageIntegrator {
    fn default() -> Self {
        Self { sum: 0.0, outcomes: 0.0, scale: SCALE_PRIOR }
    }
}

impl CoverageIntegrator {
    /// As a logarithm.
    pub(super) fn at(&self) -> f32 {
        INTEGRAL_GAIN * self.scale * self.sum / (self.longer() * self.longer())
    }

    /// How many times as many as the first outcomes there were.
    fn longer(&self) -> f32 {
        (self.outcomes / INTEGRAL_OUTCOMES).clamp(1.0, INTEGRAL_LONGEST)
    }

    /// An outcome was so far from where the integrator starts; was it above what it had been told? Where that was told by what is no longer so, there is
    /// nothing to make up for.
    pub(super) fn outcome(&mut self, off: f32, above_told: Option<bool>) {
        self.scale += (off.abs().clamp(SCALE_MIN, 1.0) - self.scale) / SCALE_OUTCOMES_FAST;
        self.outcomes += 1.0;
        let most = INTEGRAL_MAX * self.longer();
        self.sum = above_told.map_or(0.0, |above| (self.sum + up(above, SHARE)).clamp(-most, most));
    }
}

// === impl PinballLosses ===

impl PinballLosses {
    /// It was `log`, and the candidates said so much.
    pub(super) fn add(&mut self, log: f32, candidates: [f32; 2]) {
        for (loss, candidate) in self.0.iter_mut().zip(candidates) {
            let off = libm::expf(log) - libm::expf(candidate);
            *loss += ((SHARE * off).max((SHARE - 1.0) * off) - *loss) / LOSS_OUTCOMES;
        }
    }

    /// How much the second counts, 0 to 1: shares are as losses to minus the strictness, so the mix is hardly worse than the better of both.
    pub(super) fn second_counts(&self) -> f32 {
        const STRICTNESS: f32 = 8.0;
        let [first, second] = self.0;
        let odds = libm::powf(first / second.max(f32::MIN_POSITIVE), STRICTNESS);
        if odds.is_finite() { odds / (1.0 + odds) } else { 1.0 }
    }
}
