//! A number that a tenth of outcomes are above, followed as they come: online conformal prediction, by quantile tracking.
//!
//! A tracked number goes up by nine where an outcome is above it and down by one where it is not, so in the long run a tenth are, whatever outcomes
//! do. How long that run is, is the size of a step: large ones follow what drifts, and tremble where nothing does. So there are two, and the one
//! that lost less of late counts more.

/// What is meant to be within the ninth decile.
pub(super) const SHARE: f32 = 0.9;

/// How far an outcome moves the slow one, as a share of its scale; and the fast one where nothing comes between a pick and its outcome.
const GAIN: f32 = 0.1;
const GAIN_FAST: f32 = 0.8;

/// Outcomes over which the scale of the slow one is averaged, and of the fast one where nothing comes between.
const SCALE_OUTCOMES: f32 = 100.0;
const SCALE_OUTCOMES_FAST: f32 = 20.0;

/// Outcomes over which losses are averaged.
const LOSS_OUTCOMES: f32 = 100.0;

/// A scale before anything is known, and the least: what is exact so far need not stay so.
const SCALE_PRIOR: f32 = 0.1;
const SCALE_MIN: f32 = 0.001;

/// A ninth decile, as a logarithm or a difference of two.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ninth {
    slow: Tracked,
    fast: Tracked,
    losses: Losses,
}

/// A number that is moved until a tenth of outcomes are above it.
#[derive(Clone, Copy, Debug)]
struct Tracked {
    at: f32,
    /// How far outcomes are from it, absolute, on average.
    scale: f32,
}

/// Mean pinball losses of two candidates for a decile, ms.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Losses([f32; 2]);

/// An outcome, as logarithms.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outcome {
    /// What it was, less `base`.
    pub(super) value: f32,
    /// What the decile is added to.
    pub(super) base: f32,
    /// Was it above what had been told? Known where that was told by what is known now.
    pub(super) above_told: Option<bool>,
    /// Outcomes that came between its pick and itself.
    pub(super) delay: f32,
}

// === impl Ninth ===

impl Ninth {
    pub(super) fn starting_at(at: f32) -> Self {
        let tracked = Tracked { at, scale: SCALE_PRIOR };
        Self { slow: tracked, fast: tracked, losses: Losses::default() }
    }

    pub(super) fn at(&self) -> f32 {
        let fast = self.losses.second_counts();
        (1.0 - fast) * self.slow.at + fast * self.fast.at
    }

    /// Moves it by an outcome. The faster what is told follows outcomes that were told of by something older, the more it swings about where it
    /// should be: so the fast one is the slower, the more outcomes come between.
    pub(super) fn outcome(&mut self, Outcome { value, base, above_told, delay }: Outcome) {
        self.losses.add(base + value, [base + self.slow.at, base + self.fast.at]);
        self.slow.outcome(value, value > self.slow.at, GAIN, SCALE_OUTCOMES);
        let (gain, outcomes) = ((GAIN_FAST / (1.0 + delay)).max(GAIN), (SCALE_OUTCOMES_FAST * (1.0 + delay)).min(SCALE_OUTCOMES));
        self.fast.outcome(value, above_told.unwrap_or(value > self.fast.at), gain, outcomes);
    }

    pub(super) fn clamp(&mut self, low: f32, high: f32) {
        self.slow.at = self.slow.at.clamp(low, high);
        self.fast.at = self.fast.at.clamp(low, high);
    }
}

// === impl Tracked ===

impl Tracked {
    fn outcome(&mut self, value: f32, above: bool, gain: f32, scale_outcomes: f32) {
        self.scale += ((value - self.at).abs().clamp(SCALE_MIN, 1.0) - self.scale) / scale_outcomes;
        self.at += gain * self.scale * if above { SHARE } else { SHARE - 1.0 };
    }
}

// === impl Losses ===

impl Losses {
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
