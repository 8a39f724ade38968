//! Estimates p90 from the errors of predictions and from whether outcomes were within the predicted
//! p90.
//!
//! An error always belongs to a prediction made before the outcome was known, and is never the
//! residual of a fit. So future errors will be as large as these errors. The errors of a new shape
//! come from cross-validation, because the errors of another shape say nothing about the new shape.
//!
//! There are two candidates for the p90: a multiple of the predicted median that depends on this
//! median, and one level for all requests. This module mixes the two candidates by their recent
//! pinball losses, so the mix is hardly worse than the better candidate. Future errors may be
//! distributed differently. So each outcome also moves the mix, until a tenth of the outcomes are
//! above the mix (online conformal prediction by quantile tracking).

use std::collections::VecDeque;

use scheduler::latency::shape::{BINS, FACTORS, LEVELS, P90Spread};
use scheduler::sort::sort_by;

use super::p90::{CoverageIntegrator, LogOutcome, P90Tracker, PinballLosses, SHARE};

/// The newest errors of TTFT or of TPOT, and the candidates for the p90 of this time.
#[derive(Clone, Debug)]
pub(super) struct ErrorWindow {
    /// The predicted median and its error, as logarithms.
    errors: VecDeque<(f32, f32)>,
    /// The number of errors that were pushed since `multiple` was computed.
    fresh: usize,
    /// The p90 of `errors` as a multiple of the median. The multiple is an assumed value until
    /// there are enough errors.
    multiple: P90Spread,
    /// One p90 for all requests, as a logarithm.
    level: Option<P90Tracker>,
    /// The shift that is added to the logarithm of the mix.
    moved: P90Tracker,
    /// A correction in addition to `moved`, from the number of outcomes above the p90 that was
    /// predicted for them.
    integrator: CoverageIntegrator,
    /// The losses of the two candidates.
    losses: PinballLosses,
}

/// The maximum number of kept errors. The number is low enough to follow changes, and high enough
/// for a p90 of each bin.
const ERRORS_MAX: usize = 1_600;

/// The number of new errors after which `multiple` is recomputed. Each recomputation sorts all
/// errors, which takes tens of µs.
const FRESH_MAX: usize = 16;

/// The minimum number of errors in a bin.
const BIN_MIN: usize = 40;

/// The bound of `moved` in both directions, as a logarithm.
const MOVED_MAX: f32 = 2.0;

/// The p90 as a multiple of the median before any data is known.
const FACTOR_PRIOR: f32 = 1.5;

// === impl ErrorWindow ===

impl Default for ErrorWindow {
    fn default() -> Self {
        Self {
            errors: VecDeque::new(),
            fresh: 0,
            multiple: P90Spread::from_factor(FACTOR_PRIOR),
            level: None,
            moved: P90Tracker::starting_at(0.0),
            integrator: CoverageIntegrator::default(),
            losses: PinballLosses::default(),
        }
    }
}

impl ErrorWindow {
    /// Uses `spread` until there are enough errors.
    pub(super) fn assume(&mut self, spread: &P90Spread) {
        self.multiple = *spread;
    }

    /// Starts with the errors of a new shape, oldest first.
    pub(super) fn start(&mut self, errors: &[(f32, f32)]) {
        self.errors = errors
            .iter()
            .skip(errors.len().saturating_sub(ERRORS_MAX))
            .copied()
            .collect();
        self.refresh();
    }

    /// Adds one outcome. `said` is the predicted median and `error` its error, as logarithms.
    /// `above_p90` says whether the outcome was above the predicted p90; it is `None` if that
    /// prediction is no longer current. `delay` is the number of outcomes between prediction and
    /// outcome.
    pub(super) fn push(&mut self, said: f32, error: f32, above_p90: Option<bool>, delay: f32) {
        let log = said + error;
        let mut level = self.level.unwrap_or(P90Tracker::starting_at(log));
        let by_multiple = self.by_multiple(said);
        let mixed = self.mixed(by_multiple, level.at());
        if !mixed.is_finite() {
            return; // no model predicts such a value
        }
        self.losses.add(log, [by_multiple, level.at()]);
        self.integrator
            .outcome(log - mixed - self.moved.at(), above_p90);
        self.moved.outcome(LogOutcome {
            value: log - mixed,
            base: mixed,
            delay,
        });
        // The published p90 is never below the median, so a further move down has no effect.
        self.moved
            .clamp((said - mixed).clamp(-MOVED_MAX, 0.0), MOVED_MAX);
        level.outcome(LogOutcome {
            value: log,
            base: 0.0,
            delay,
        });
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

    /// Returns the first candidate for the p90, as a logarithm.
    fn by_multiple(&self, said: f32) -> f32 {
        libm::logf(
            self.multiple
                .p90_ms(libm::expf(said))
                .max(f32::MIN_POSITIVE),
        )
    }

    fn mixed(&self, by_multiple: f32, level: f32) -> f32 {
        let share = self.losses.second_counts();
        libm::logf((1.0 - share) * libm::expf(by_multiple) + share * libm::expf(level))
    }

    /// Returns the spread that is published to proxies.
    pub(super) fn spread(&self) -> P90Spread {
        let share = self.level.map_or(0.0, |_| self.losses.second_counts());
        let moved = self.moved.at() + self.integrator.at();
        let by_multiple = (1.0 - share) * libm::expf(moved);
        let level = self
            .level
            .map_or(0.0, |level| share * libm::expf(level.at() + moved));
        P90Spread {
            ends: self.multiple.ends,
            factors: self
                .multiple
                .factors
                .map(|factor| (factor * by_multiple).clamp(*FACTORS.start(), *FACTORS.end())),
            level: (self.multiple.level * by_multiple + level)
                .clamp(*LEVELS.start(), *LEVELS.end()),
        }
    }

    /// Recomputes the p90 of the errors for each bin of predictions.
    fn refresh(&mut self) {
        self.fresh = 0;
        let bins = (self.errors.len() / BIN_MIN).min(BINS);
        if bins == 0 {
            return;
        }
        let mut sorted: Vec<(f32, f32)> = self.errors.iter().copied().collect();
        sort_by(&mut sorted, |a, b| a.0 < b.0);
        let end = |bin: usize| (bin + 1) * sorted.len() / bins;
        let mut spread = P90Spread::from_factor(1.0);
        for (bin, factor) in spread.factors.iter_mut().enumerate() {
            let bin = bin.min(bins - 1);
            let of_bin = sorted
                .get(bin * sorted.len() / bins..end(bin))
                .unwrap_or_default();
            let errors = of_bin.iter().map(|(_, error)| *error).collect();
            *factor = libm::expf(quantile(errors, SHARE)).clamp(*FACTORS.start(), *FACTORS.end());
        }
        // The last bin, and bins that are not filled, have no upper end.
        for (bin, place) in spread.ends.iter_mut().enumerate() {
            *place = sorted
                .get(end(bin))
                .map_or(f32::MAX, |(said, _)| libm::expf(*said).min(f32::MAX));
        }
        self.multiple = spread;
    }
}

/// Returns quantile `share` of the errors: the ⌈(n+1)·share⌉-th of n, so that the next error is
/// below it with that probability.
fn quantile(mut errors: Vec<f32>, share: f32) -> f32 {
    sort_by(&mut errors, |a, b| a < b);
    // The cast is exact, because there are only some hundreds of errors.
    let place = (count(errors.len() + 1) * share).ceil() as usize;
    errors
        .get(place.clamp(1, errors.len().max(1)) - 1)
        .copied()
        .unwrap_or(0.0)
}

// The cast is exact, because counts stay below some thousands.
fn count(count: usize) -> f32 {
    count as f32
}
