//! What each endpoint is off by: learned at once from each sample, so that a pod that slows down is known before any shape is fitted anew.
//!
//! Two averages follow the errors of an endpoint, a slow one that hardly trembles and a fast one. While they agree within what chance explains, the slow
//! one counts. When they do not, the endpoint has changed: the slow one jumps to the fast one.
//!
//! Where nothing comes between a pick and its outcome, a third, of the newest two, leads it: what they are off by besides, the next is off by again, as far as
//! that has proved true. Between the jumps of what comes in waves that still leaves the middle on one side of outcomes for long; so besides, it is moved a little
//! with each, until half are above it.

use super::super::model::OFFSETS;
use super::p90::{GAIN, HALF, QuantileTracker, SCALE_OUTCOMES_FAST};
use crate::endpoint::{ENDPOINTS_MAX, EndpointRef, Generation};

/// With fewer outcomes than this between a pick and its own, what was told is what would be told now.
pub(super) const DELAY_FRESH: f32 = 1.0;

/// Offsets of one time, by slot.
#[derive(Clone, Debug)]
pub(super) struct EndpointOffsets {
    rows: Vec<OffsetRow>,
    /// How far single samples are off, absolute, on average.
    noise: f32,
    trust: OffsetTrust,
    persistence: OffsetPersistence,
}

/// How much of an offset is true by the time a request is served: a slow pod is slow then, too, but a passing hour has passed. By least squares of
/// what requests were off by, on the offset that was in force when they were picked.
#[derive(Clone, Copy, Debug, Default)]
struct OffsetTrust {
    products: f32,
    squares: f32,
}

/// How much of what the newest outcomes were off by, the next one is off by, too: nothing where outcomes tremble, all where they come in long runs, and
/// more than that where they drift. By least squares of what outcomes were off by, on what those before them were.
#[derive(Clone, Copy, Debug, Default)]
struct OffsetPersistence {
    products: f32,
    squares: f32,
    /// Squares of what outcomes were off by, and how many outcomes those are of.
    errors: f32,
    outcomes: f32,
}

#[derive(Clone, Copy, Debug)]
struct OffsetRow {
    generation: Generation,
    count: f32,
    slow: f32,
    fast: f32,
    newest: f32,
    /// How far the newest lead the slow one, where that can still be so at the next pick; else nothing.
    lead: f32,
    /// What is added to what else is told, so that half of outcomes are above: where a lead can be, else nothing.
    middle: QuantileTracker,
}

const NOTHING: OffsetRow = OffsetRow {
    generation: Generation(0),
    count: 0.0,
    slow: 0.0,
    fast: 0.0,
    newest: 0.0,
    lead: 0.0,
    middle: QuantileTracker::starting_at(0.0),
};

/// Samples that the slow average remembers, at most, and the fast one. What is told by an average comes true as many outcomes later as come between a
/// pick and its own; one that follows faster than that swings. So the slow one remembers ten times as many, where that is less.
const SLOW: f32 = 100.0;
const FAST: f32 = 10.0;
const NEWEST: f32 = 2.0;

/// Samples that "as all others" counts for.
const SHRINK: f32 = 8.0;

/// The averages disagree by more than chance beyond so many times the noise: the fast one trembles by some 0.3 of it, so a false alarm is rare.
const CHANGED: f32 = 1.2;

/// How far one sample may be off: a stall says little of what comes after it.
const ERROR_MAX: f32 = 2.0;

/// Noise before anything is known of it, least noise that is believed, and samples over which it is learned.
const NOISE_PRIOR: f32 = 0.3;
const NOISE_MIN: f32 = 0.02;
const NOISE_SAMPLES: f32 = 200.0;

/// Samples that trust remembers, and squared offset that full trust counts for beforehand.
const TRUST_KEEP: f32 = 0.995;
const TRUST_PRIOR: f32 = 0.05;

/// The least trust: an offset of which nothing is told can never prove true again.
const TRUST_MIN: f32 = 0.2;

/// Outcomes that persistence remembers, as a share kept by each, and how many outcomes that are off by chance alone count beforehand.
const PERSISTENCE_KEEP: f32 = 0.98;
const PERSISTENCE_PRIOR: f32 = 1.0;

/// The most of a lead that is told. An average lags a steady drift by what it remembers: this much of their difference makes up for the lag of both.
const PERSISTENCE_MAX: f32 = FAST / (FAST - NEWEST);

// === impl OffsetTrust ===

impl OffsetTrust {
    fn learn(&mut self, offset: f32, error: f32) {
        self.products = TRUST_KEEP * self.products + offset * error;
        self.squares = TRUST_KEEP * self.squares + offset * offset;
    }

    fn share(self) -> f32 {
        ((self.products + TRUST_PRIOR) / (self.squares + TRUST_PRIOR)).clamp(TRUST_MIN, 1.0)
    }
}

// === impl OffsetPersistence ===

impl OffsetPersistence {
    fn learn(&mut self, lead: f32, error: f32) {
        self.products = PERSISTENCE_KEEP * self.products + lead * error;
        self.squares = PERSISTENCE_KEEP * self.squares + lead * lead;
        self.errors = PERSISTENCE_KEEP * self.errors + error * error;
        self.outcomes = PERSISTENCE_KEEP * self.outcomes + 1.0;
    }

    fn share(self) -> f32 {
        // Of these outcomes, not the noise of all: that is of hundreds, of which the first were told by nothing.
        let chance = self.errors / self.outcomes.max(1.0);
        (self.products / (self.squares + PERSISTENCE_PRIOR * chance).max(f32::MIN_POSITIVE)).clamp(0.0, PERSISTENCE_MAX)
    }
}

// === impl EndpointOffsets ===

impl Default for EndpointOffsets {
    fn default() -> Self {
        Self { rows: Vec::new(), noise: NOISE_PRIOR, trust: OffsetTrust::default(), persistence: OffsetPersistence::default() }
    }
}

impl EndpointOffsets {
    /// None yet, but with the noise, and the trust, of before.
    pub(super) fn afresh(before: &Self) -> Self {
        Self { rows: Vec::new(), ..*before }
    }

    /// A request of `endpoint` that was picked when `offset` was in force was off by `error` of what the shape says.
    pub(super) fn proved(&mut self, endpoint: EndpointRef, offset: f32, error: f32) {
        if let Some(row) = self.row(endpoint) {
            self.persistence.learn(row.lead, (error - row.slow).clamp(-ERROR_MAX, ERROR_MAX));
        }
        self.trust.learn(offset.clamp(-ERROR_MAX, ERROR_MAX), error.clamp(-ERROR_MAX, ERROR_MAX));
    }

    /// How much of an offset to believe, 0 to 1.
    pub(super) fn trust(&self) -> f32 {
        self.trust.share()
    }

    /// A sample of `endpoint` took this much longer than the shape says, as a logarithm, and so many outcomes came between its pick and itself. Was the
    /// endpoint found to have changed?
    pub(super) fn push(&mut self, endpoint: EndpointRef, error: f32, delay: f32) -> bool {
        let slot = usize::from(endpoint.slot.0);
        if slot >= ENDPOINTS_MAX {
            return false;
        }
        if self.rows.len() <= slot {
            self.rows.resize(slot + 1, NOTHING);
        }
        let (mean, trust, share) = (self.mean(), self.trust(), self.persistence.share());
        let Some(row) = self.rows.get_mut(slot) else { return false };
        if row.generation != endpoint.generation || row.count == 0.0 {
            *row = OffsetRow { generation: endpoint.generation, slow: mean, fast: mean, newest: mean, ..NOTHING };
        }
        let error = error.clamp(row.slow - ERROR_MAX, row.slow + ERROR_MAX);
        row.middle.outcome(error - trust * row.slow - share * row.lead, HALF, GAIN, SCALE_OUTCOMES_FAST);
        self.noise += ((error - row.slow).abs().max(NOISE_MIN) - self.noise) / NOISE_SAMPLES;
        row.count += 1.0;
        row.newest += (error - row.newest) / NEWEST;
        row.fast += (error - row.fast) / (row.count + 2.0).min(FAST);
        row.slow += (error - row.slow) / (row.count + SHRINK).min((FAST * (1.0 + delay)).min(SLOW));
        let changed = row.count > FAST && (row.fast - row.slow).abs() > CHANGED * self.noise;
        if changed {
            (row.slow, row.count) = (row.fast, FAST);
        }
        if delay < DELAY_FRESH {
            row.lead = row.newest - row.slow;
        } else {
            (row.lead, row.middle) = (0.0, NOTHING.middle);
        }
        changed
    }

    fn row(&self, endpoint: EndpointRef) -> Option<&OffsetRow> {
        let row = self.rows.get(usize::from(endpoint.slot.0));
        row.filter(|row| row.count > 0.0 && row.generation == endpoint.generation)
    }

    /// What `endpoint` is off by; what all are, when nothing is known of it.
    pub(super) fn of(&self, endpoint: EndpointRef) -> f32 {
        self.row(endpoint).map_or_else(|| self.mean(), |row| row.slow).clamp(*OFFSETS.start(), *OFFSETS.end())
    }

    /// What all endpoints are off by, on average.
    pub(super) fn mean(&self) -> f32 {
        let (sum, count) = self.rows.iter().fold((0.0, 0.0), |(sum, count), row| {
            let weight = row.count.min(SLOW);
            (sum + weight * row.slow, count + weight)
        });
        if count > 0.0 { (sum / count).clamp(*OFFSETS.start(), *OFFSETS.end()) } else { 0.0 }
    }

    /// What `endpoint` is off by more than all are.
    pub(super) fn relative(&self, endpoint: EndpointRef) -> f32 {
        (self.of(endpoint) - self.mean()).clamp(*OFFSETS.start(), *OFFSETS.end())
    }

    pub(super) fn slots(&self) -> usize {
        self.rows.len()
    }

    /// Who is known at a slot, and what is told of it: by what it is off more than all are, as far as that is believed, and what leads that.
    pub(super) fn told(&self, slot: usize) -> Option<(Generation, f32)> {
        let row = self.rows.get(slot).filter(|row| row.count > 0.0)?;
        let offset = self.trust() * (row.slow - self.mean()) + self.persistence.share() * row.lead + row.middle.at();
        Some((row.generation, offset.clamp(*OFFSETS.start(), *OFFSETS.end())))
    }
}
