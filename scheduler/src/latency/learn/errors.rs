//! How far off predictions were, by how long they were: from it follows the ninth decile.
//!
//! Errors are of what was said before the time was known, never of a fit to it, so that they are as large as the next ones will be. They are kept for
//! the newest only, so the decile follows when a pool changes.

use std::collections::VecDeque;

use super::super::shape::{BINS, FACTORS, Spread};

/// The newest errors of one time.
#[derive(Clone, Debug)]
pub(super) struct Errors {
    /// What was said, and how far off that was, as logarithms.
    errors: VecDeque<(f32, f32)>,
    /// What holds until there are enough.
    assumed: Spread,
}

/// Errors kept: few enough to follow, enough for a decile of each bin.
const ERRORS_MAX: usize = 640;

/// Errors of a bin, at least.
const BIN_MIN: usize = 40;

/// The ninth decile before anything is known.
const FACTOR_PRIOR: f32 = 1.5;

// === impl Errors ===

impl Default for Errors {
    fn default() -> Self {
        Self { errors: VecDeque::new(), assumed: Spread::of(FACTOR_PRIOR) }
    }
}

impl Errors {
    /// Until there are enough errors, this.
    pub(super) fn assume(&mut self, spread: &Spread) {
        self.assumed = *spread;
    }

    pub(super) fn push(&mut self, said: f32, error: f32) {
        if self.errors.len() >= ERRORS_MAX {
            self.errors.pop_front();
        }
        self.errors.push_back((said, error));
    }

    pub(super) fn spread(&self) -> Spread {
        let bins = (self.errors.len() / BIN_MIN).min(BINS);
        if bins == 0 {
            return self.assumed;
        }
        let mut sorted: Vec<(f32, f32)> = self.errors.iter().copied().collect();
        crate::sort::sort_by(&mut sorted, |a, b| a.0 < b.0);
        let end = |bin: usize| (bin + 1) * sorted.len() / bins;
        let mut spread = Spread::of(1.0);
        for (bin, factor) in spread.factors.iter_mut().enumerate() {
            let bin = bin.min(bins - 1);
            let start = bin * sorted.len() / bins;
            let of_bin = sorted.get(start..end(bin)).unwrap_or_default();
            *factor = libm::expf(ninth_decile(of_bin.iter().map(|(_, error)| *error).collect())).clamp(*FACTORS.start(), *FACTORS.end());
        }
        for (bin, place) in spread.ends.iter_mut().enumerate().take(bins - 1) {
            *place = sorted.get(end(bin)).map_or(f32::MAX, |(said, _)| libm::expf(*said).min(f32::MAX));
        }
        spread
    }
}

/// What nine of ten are at most: of n, the (n+1)·0.9th, so that the next one is below it with that chance.
fn ninth_decile(mut errors: Vec<f32>) -> f32 {
    crate::sort::sort_by(&mut errors, |a, b| a < b);
    let at = ((errors.len() + 1) * 9).div_ceil(10).clamp(1, errors.len().max(1)) - 1;
    errors.get(at).copied().unwrap_or(0.0)
}
