//! From how far off predictions were, and whether outcomes were within the deciles that had been said of them, to the ninth decile.
//!
//! Errors are of what was said before the time was known, never of a fit to it, so that they are as large as the next ones will be. A new shape brings
//! those of its own, on parts of the window that it was fitted without for that; errors of another shape say nothing of it.
//!
//! There are two candidates for the decile: a multiple of the middle, by how long that is, and one level for all requests. They are mixed by the pinball
//! loss that each had of late, so the mix is hardly worse than the better of both. And as errors to come need not be as those of the past were,
//! the mix is moved, outcome by outcome, until a tenth is above it: online conformal prediction, by quantile tracking.

use std::collections::VecDeque;

use super::super::shape::{BINS, FACTORS, LEVELS, P90Spread};
use super::p90::{CoverageIntegrator, LogOutcome, P90Tracker, PinballLosses, SHARE};

/// The newest errors of one time, and the candidates for its ninth decile.
#[derive(Clone, Debug)]
pub(super) struct ErrorWindow {
    /// What was said, and how far off that was, as logarithms.
    errors: VecDeque<(f32, f32)>,
    /// Pushed since `multiple` was made of them.
    fresh: usize,
    /// How many times the middle the decile was among `errors`; until there are enough, what was assumed.
    multiple: P90Spread,
    /// One decile for all requests, as a logarithm.
    level: Option<P90Tracker>,
    /// What is added to the logarithm of both mixed.
    moved: P90Tracker,
    /// What is added to that for those above what was told.
    integrator: CoverageIntegrator,
    /// Of the two candidates.
    losses: PinballLosses,
}

/// Errors kept: few enough to follow, enough for a decile of each bin.
const ERRORS_MAX: usize = 1_600;

/// Errors after which it is looked anew how many times the middle the decile is: sorting them costs some tens of µs.
const FRESH_MAX: usize = 16;

/// Errors of a bin, at least.
const BIN_MIN: usize = 40;

/// The farthest that the mix is moved, as a logarithm.
const MOVED_MAX: f32 = 2.0;

/// The ninth decile before anything is known.
const FACTOR_PRIOR: f32 = 1.5;

// === impl ErrorWindow ===

impl Default for ErrorWindow {
    fn default() -> Self {
        Self {
            errors: VecDeque::new(),
            fresh: 0,
            multiple: P90Spread::of(FACTOR_PRIOR),
            level: None,
            moved: P90Tracker::starting_at(0.0),
            integrator: CoverageIntegrator::default(),
            losses: PinballLosses::default(),
        }
    }
}

impl ErrorWindow {
    /// Until there are enough errors, this.
    pub(super) fn assume(&mut self, spread: &P90Spread) {
        self.multiple = *spread;
    }

    /// Another shape is in force: its errors, oldest first.
    pub(super) fn start(&mut self, errors: &[(f32, f32)]) {
        self.errors = errors.iter().skip(errors.len().saturating_sub(ERRORS_MAX)).copied().collect();
        self.refresh();
    }

    /// What was said of a time, and how far off that was, as logarithms; was it above the decile that was told, where that is told now too, and how many
    /// outcomes came between.
    pub(super) fn push(&mut self, said: f32, error: f32, above_told: Option<bool>, delay: f32) {
        let log = said + error;
        let mut level = self.level.unwrap_or(P90Tracker::starting_at(log));
        let by_multiple = self.by_multiple(said);
        let mixed = self.mixed(by_multiple, level.at());
        if !mixed.is_finite() {
            return; // nobody said that
        }
        self.losses.add(log, [by_multiple, level.at()]);
        self.integrator.outcome(log - mixed - self.moved.at(), above_told);
        self.moved.outcome(LogOutcome { value: log - mixed, base: mixed, delay });
        // No decile is below the middle, so there is nothing to gain from moving further than there.
        self.moved.clamp((said - mixed).clamp(-MOVED_MAX, 0.0), MOVED_MAX);
        level.outcome(LogOutcome { value: log, base: 0.0, delay });
        self.level = Some(level);
        if self.errors.len() >= ERRORS_MAX {
            self.errors.pop_front();
        }
        self.errors.push_back((said, error));
        self.fresh += 1;
        if self.fresh >= FRESH_MAX {
            self.refresh();
        }
    }

    /// The decile as a multiple of what was said, as a logarithm.
    fn by_multiple(&self, said: f32) -> f32 {
        libm::logf(self.multiple.p90_ms(libm::expf(said)).max(f32::MIN_POSITIVE))
    }

    fn mixed(&self, by_multiple: f32, level: f32) -> f32 {
        let share = self.losses.second_counts();
        libm::logf((1.0 - share) * libm::expf(by_multiple) + share * libm::expf(level))
    }

    /// As proxies are told.
    pub(super) fn spread(&self) -> P90Spread {
        let share = self.level.map_or(0.0, |_| self.losses.second_counts());
        let moved = self.moved.at() + self.integrator.at();
        let by_multiple = (1.0 - share) * libm::expf(moved);
        let level = self.level.map_or(0.0, |level| share * libm::expf(level.at() + moved));
        P90Spread {
            ends: self.multiple.ends,
            factors: self.multiple.factors.map(|factor| (factor * by_multiple).clamp(*FACTORS.start(), *FACTORS.end())),
            level: (self.multiple.level * by_multiple + level).clamp(*LEVELS.start(), *LEVELS.end()),
        }
    }

    /// Makes anew what decile the errors have, by how long it was that was said.
    fn refresh(&mut self) {
        self.fresh = 0;
        let bins = (self.errors.len() / BIN_MIN).min(BINS);
        if bins == 0 {
            return;
        }
        let mut sorted: Vec<(f32, f32)> = self.errors.iter().copied().collect();
        crate::sort::sort_by(&mut sorted, |a, b| a.0 < b.0);
        let end = |bin: usize| (bin + 1) * sorted.len() / bins;
        let mut spread = P90Spread::of(1.0);
        for (bin, factor) in spread.factors.iter_mut().enumerate() {
            let bin = bin.min(bins - 1);
            let of_bin = sorted.get(bin * sorted.len() / bins..end(bin)).unwrap_or_default();
            let errors = of_bin.iter().map(|(_, error)| *error).collect();
            *factor = libm::expf(quantile(errors, SHARE)).clamp(*FACTORS.start(), *FACTORS.end());
        }
        // The last bin, and those that are not filled, have no end.
        for (bin, place) in spread.ends.iter_mut().enumerate() {
            *place = sorted.get(end(bin)).map_or(f32::MAX, |(said, _)| libm::expf(*said).min(f32::MAX));
        }
        self.multiple = spread;
    }
}

/// What this share of errors is at most: of n, the (n+1)·share-th, so that the next one is below it with that chance.
fn quantile(mut errors: Vec<f32>, share: f32) -> f32 {
    crate::sort::sort_by(&mut errors, |a, b| a < b);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of some hundreds")]
    let place = (count(errors.len() + 1) * share).ceil() as usize;
    errors.get(place.clamp(1, errors.len().max(1)) - 1).copied().unwrap_or(0.0)
}

#[expect(clippy::cast_precision_loss, reason = "some hundreds")]
fn count(count: usize) -> f32 {
    count as f32
}
