//! Tracks the value that a tenth of outcomes exceed, by quantile tracking (online conformal
//! prediction).
//!
//! A tracked value rises by nine steps when an outcome is above it and falls by one step when it is
//! not. So in the long run a tenth of outcomes are above the tracked value, whatever their
//! distribution. Large steps follow a drift sooner, but add noise where there is no drift. So there
//! are two trackers, and the tracker with the smaller recent loss has more weight.
//!
//! Over a short run, the share of outcomes within the value is still random. If no outcome comes
//! between a pick and its own outcome, the number of outcomes above the value is known at the next
//! pick. Then an integrator, as in a controller, corrects this number (conformal PID control).

/// The intended share of outcomes within the p90.
pub(super) const SHARE: f32 = 0.9;

/// The intended share of outcomes within the median.
pub(super) const HALF: f32 = 0.5;

/// The step for each outcome as a share of the scale. `GAIN` is for the slow tracker and the
/// median, and `GAIN_FAST` for the fast tracker if no outcome comes between a pick and its own
/// outcome.
pub(super) const GAIN: f32 = 0.1;
const GAIN_FAST: f32 = 0.8;

/// The number of outcomes over which a scale is averaged. `SCALE_OUTCOMES` is for the slow tracker,
/// and `SCALE_OUTCOMES_FAST` for the median and the fast tracker if no outcome comes between a pick
/// and its own outcome.
const SCALE_OUTCOMES: f32 = 100.0;
pub(super) const SCALE_OUTCOMES_FAST: f32 = 20.0;

/// The number of outcomes over which losses are averaged.
const LOSS_OUTCOMES: f32 = 100.0;

/// The integrator's step for each surplus outcome above the p90, as a share of its scale, during
/// the first `INTEGRAL_OUTCOMES`. The target is a share of the outcomes, so a longer run may have a
/// larger surplus. In a run n times as long, the step is therefore divided by n², where n is at
/// most `INTEGRAL_LONGEST`.
const INTEGRAL_GAIN: f32 = 0.5;
const INTEGRAL_OUTCOMES: f32 = 300.0;
const INTEGRAL_LONGEST: f32 = 3.0;

/// The maximum surplus or lack of outcomes that is corrected during the first `INTEGRAL_OUTCOMES`.
/// In a run n times as long it is n times as high. A larger surplus was a change, which the
/// trackers follow, and not an error to compensate.
const INTEGRAL_MAX: f32 = 3.0;

/// The scale before any data is known, and the minimum scale. The minimum is needed, because
/// outcomes that matched their predictions so far may differ from them later.
const SCALE_PRIOR: f32 = 0.1;
const SCALE_MIN: f32 = 0.001;

/// A p90 that two trackers follow, as a logarithm or a difference of logarithms.
#[derive(Clone, Copy, Debug)]
pub(super) struct P90Tracker {
    slow: QuantileTracker,
    fast: QuantileTracker,
    losses: PinballLosses,
}

/// A value that is moved until a given share of outcomes are within it.
#[derive(Clone, Copy, Debug)]
pub(super) struct QuantileTracker {
    at: f32,
    /// The mean absolute distance of outcomes from the value.
    scale: f32,
}

/// Corrects for a past surplus or lack of outcomes above the p90 that was predicted for them.
#[derive(Clone, Copy, Debug)]
pub(super) struct CoverageIntegrator {
    /// The number of outcomes above the p90, minus a tenth of all outcomes.
    sum: f32,
    outcomes: f32,
    /// The mean absolute distance of outcomes from the uncorrected p90.
    scale: f32,
}

/// The mean pinball losses of two candidates for a p90, ms.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PinballLosses([f32; 2]);

/// An outcome, as logarithms.
#[derive(Clone, Copy, Debug)]
pub(super) struct LogOutcome {
    /// The outcome minus `base`.
    pub(super) value: f32,
    /// The value that the tracked p90 is added to.
    pub(super) base: f32,
    /// The number of outcomes that came between the pick and this outcome.
    pub(super) delay: f32,
}

// === impl P90Tracker ===

impl P90Tracker {
    pub(super) fn starting_at(at: f32) -> Self {
        let tracked = QuantileTracker::starting_at(at);
        Self {
            slow: tracked,
            fast: tracked,
            losses: PinballLosses::default(),
        }
    }

    pub(super) fn at(&self) -> f32 {
        let fast = self.losses.second_counts();
        (1.0 - fast) * self.slow.at + fast * self.fast.at
    }

    /// Updates the slow and the fast tracker with one outcome. A value oscillates if it follows the
    /// outcomes of older predictions too fast. So the fast tracker is slower if more outcomes come
    /// between a pick and its own outcome.
    pub(super) fn outcome(&mut self, LogOutcome { value, base, delay }: LogOutcome) {
        self.losses
            .add(base + value, [base + self.slow.at, base + self.fast.at]);
        self.slow.outcome(value, SHARE, GAIN, SCALE_OUTCOMES);
        let gain = (GAIN_FAST / (1.0 + delay)).max(GAIN);
        let outcomes = (SCALE_OUTCOMES_FAST * (1.0 + delay)).min(SCALE_OUTCOMES);
        self.fast.outcome(value, SHARE, gain, outcomes);
    }

    pub(super) fn clamp(&mut self, low: f32, high: f32) {
        self.slow.at = self.slow.at.clamp(low, high);
        self.fast.at = self.fast.at.clamp(low, high);
    }
}

/// Returns the signed step for an outcome: `share` if the outcome is above the value, `share - 1`
/// if not. The steps add up to zero if `share` of the outcomes are within the value.
fn up(above: bool, share: f32) -> f32 {
    if above { share } else { share - 1.0 }
}

// === impl QuantileTracker ===

impl QuantileTracker {
    pub(super) const fn starting_at(at: f32) -> Self {
        Self {
            at,
            scale: SCALE_PRIOR,
        }
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
        Self {
            sum: 0.0,
            outcomes: 0.0,
            scale: SCALE_PRIOR,
        }
    }
}

impl CoverageIntegrator {
    /// Returns the correction, as a logarithm.
    pub(super) fn at(&self) -> f32 {
        INTEGRAL_GAIN * self.scale * self.sum / (self.longer() * self.longer())
    }

    /// Returns the length of the run as a multiple of `INTEGRAL_OUTCOMES`, 1 to `INTEGRAL_LONGEST`.
    fn longer(&self) -> f32 {
        (self.outcomes / INTEGRAL_OUTCOMES).clamp(1.0, INTEGRAL_LONGEST)
    }

    /// Adds an outcome: its distance `off` from the uncorrected p90, and whether it was above the
    /// p90 predicted for it. `None` means that this prediction is too old to be corrected.
    pub(super) fn outcome(&mut self, off: f32, above_p90: Option<bool>) {
        self.scale += (off.abs().clamp(SCALE_MIN, 1.0) - self.scale) / SCALE_OUTCOMES_FAST;
        self.outcomes += 1.0;
        let most = INTEGRAL_MAX * self.longer();
        self.sum = above_p90.map_or(0.0, |above| {
            (self.sum + up(above, SHARE)).clamp(-most, most)
        });
    }
}

// === impl PinballLosses ===

impl PinballLosses {
    /// Adds an outcome, as a logarithm, and the values of the two candidates.
    pub(super) fn add(&mut self, log: f32, candidates: [f32; 2]) {
        for (loss, candidate) in self.0.iter_mut().zip(candidates) {
            let off = libm::expf(log) - libm::expf(candidate);
            *loss += ((SHARE * off).max((SHARE - 1.0) * off) - *loss) / LOSS_OUTCOMES;
        }
    }

    /// Returns the weight of the second candidate, 0 to 1. Weights are proportional to
    /// loss^-`STRICTNESS`, so the mix is hardly worse than the better candidate.
    pub(super) fn second_counts(&self) -> f32 {
        const STRICTNESS: f32 = 8.0;
        let [first, second] = self.0;
        let odds = libm::powf(first / second.max(f32::MIN_POSITIVE), STRICTNESS);
        if odds.is_finite() {
            odds / (1.0 + odds)
        } else {
            1.0
        }
    }
}
