//! How far off predictions were, by how long they were: from it follows the ninth decile.
//!
//! Errors are of what was said before the time was known, never of a fit to it, so that they are as large as the next ones will be. A new shape brings
//! those of its own, on parts of the window that it was fitted without for that; errors of another shape say nothing of it.

use std::collections::VecDeque;

use super::super::shape::{BINS, FACTORS, Spread};

/// The newest errors of one time.
#[derive(Clone, Debug)]
pub(super) struct Errors {
    /// What was said, and how far off that was, as logarithms.
    errors: VecDeque<(f32, f32)>,
    /// What holds until there are enough.
    assumed: Spread,
    /// The share of times that were within the decile that had been said of them, of late.
    covered: f32,
}

/// Errors kept: few enough to follow, enough for a decile of each bin.
const ERRORS_MAX: usize = 1_600;

/// Errors of a bin, at least.
const BIN_MIN: usize = 40;

/// What is meant to be within the ninth decile.
const SHARE: f32 = 0.9;

/// Samples over which it is followed how many are.
const COVERED_SAMPLES: f32 = 100.0;

/// By how many mean errors deciles would be moved if all times were above them, in place of a tenth: where errors to come are not as those of the past
/// were, that is made up for.
const MADE_UP: f32 = 4.0;

/// The ninth decile before anything is known.
const FACTOR_PRIOR: f32 = 1.5;

// === impl Errors ===

impl Default for Errors {
    fn default() -> Self {
        Self { errors: VecDeque::new(), assumed: Spread::of(FACTOR_PRIOR), covered: SHARE }
    }
}

impl Errors {
    /// Until there are enough errors, this.
    pub(super) fn assume(&mut self, spread: &Spread) {
        self.assumed = *spread;
    }

    /// Another shape is in force: its errors, oldest first.
    pub(super) fn start(&mut self, errors: &[(f32, f32)]) {
        self.errors = errors.iter().skip(errors.len().saturating_sub(ERRORS_MAX)).copied().collect();
    }

    pub(super) fn push(&mut self, said: f32, error: f32) {
        if self.errors.len() >= ERRORS_MAX {
            self.errors.pop_front();
        }
        self.errors.push_back((said, error));
    }

    /// Was a time above the decile that had been said of it?
    pub(super) fn judged(&mut self, above: bool) {
        self.covered += (if above { 0.0 } else { 1.0 } - self.covered) / COVERED_SAMPLES;
    }

    pub(super) fn spread(&self) -> Spread {
        let bins = (self.errors.len() / BIN_MIN).min(BINS);
        if bins == 0 {
            return self.assumed;
        }
        let mut sorted: Vec<(f32, f32)> = self.errors.iter().copied().collect();
        crate::sort::sort_by(&mut sorted, |a, b| a.0 < b.0);
        let end = |bin: usize| (bin + 1) * sorted.len() / bins;
        let made_up = MADE_UP * (SHARE - self.covered);
        let mut spread = Spread::of(1.0);
        for (bin, factor) in spread.factors.iter_mut().enumerate() {
            let bin = bin.min(bins - 1);
            let of_bin = sorted.get(bin * sorted.len() / bins..end(bin)).unwrap_or_default();
            let errors: Vec<f32> = of_bin.iter().map(|(_, error)| *error).collect();
            let mean = errors.iter().map(|error| error.abs()).sum::<f32>() / count(errors.len().max(1));
            *factor = libm::expf(quantile(errors, SHARE) + made_up * mean).clamp(*FACTORS.start(), *FACTORS.end());
        }
        for (bin, place) in spread.ends.iter_mut().enumerate().take(bins - 1) {
            *place = sorted.get(end(bin)).map_or(f32::MAX, |(said, _)| libm::expf(*said).min(f32::MAX));
        }
        spread
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
