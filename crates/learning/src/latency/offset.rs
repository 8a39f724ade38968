//! Learns how far each endpoint deviates from the common shape. Each sample changes the offset
//! immediately, so the learner notices a pod that slows down before it fits a shape again.
//!
//! Two averages follow the errors of an endpoint: a slow one with little noise, and a fast one.
//! While they agree within the noise, the slow average is used. When they disagree, the endpoint
//! has changed, and the slow average takes the value of the fast one.
//!
//! If no other outcome comes between a pick and its own outcome, the average of about the newest
//! two errors is used too. The next outcome is expected to repeat this average, to the degree to
//! which earlier outcomes repeated the errors just before them. The times of engines that admit
//! requests in waves jump. Between two jumps, the median would stay on one side of the outcomes for
//! long. So each outcome also moves the median a little, until half of the outcomes are above the
//! median.

use scheduler::latency::OFFSETS;
use scheduler::{ENDPOINTS_MAX, EndpointRef, Generation};

use super::p90::{GAIN, HALF, QuantileTracker, SCALE_OUTCOMES_FAST};

/// The number of outcomes between a pick and its own outcome, below which the learner treats the
/// prediction at the pick as a prediction made now.
pub(super) const DELAY_FRESH: f32 = 1.0;

/// The offsets of TTFT or of TPOT, by slot.
#[derive(Clone, Debug)]
pub(super) struct EndpointOffsets {
    rows: Vec<OffsetRow>,
    /// The mean absolute error of single samples.
    noise: f32,
    trust: OffsetTrust,
    persistence: OffsetPersistence,
}

/// The share of an offset that is still true when a request is served. When the request is served,
/// a slow pod is still slow, but a short disturbance is over. The share is a least squares fit of
/// requests' errors to the offset at their pick.
#[derive(Clone, Copy, Debug, Default)]
struct OffsetTrust {
    products: f32,
    squares: f32,
}

/// The share of the newest errors that the next outcome repeats: 0 if outcomes are noise, 1 if they
/// come in long runs, and more if they drift. The share is a least squares fit of the errors of
/// outcomes to the errors just before them.
#[derive(Clone, Copy, Debug, Default)]
struct OffsetPersistence {
    products: f32,
    squares: f32,
    /// The sum of the squared errors of outcomes, and the number of these outcomes.
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
    /// The difference of `newest` from `slow`, if it can still hold at the next pick; otherwise 0.
    lead: f32,
    /// The shift that is added to the published offset so that half of the outcomes are above the
    /// offset; 0 if `lead` is 0.
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

/// The maximum number of samples that each average remembers. An average is late by the number of
/// outcomes that come between a pick and its own outcome. An average that follows faster than this
/// delay oscillates. So the slow average remembers ten times as many outcomes as the delay, but at
/// most `SLOW`.
const SLOW: f32 = 100.0;
const FAST: f32 = 10.0;
const NEWEST: f32 = 2.0;

/// The weight, in samples, of the assumption that an endpoint is like all others.
const SHRINK: f32 = 8.0;

/// The difference of the two averages, as a multiple of the noise, above which the endpoint counts
/// as changed. The fast average varies by about 0.3 times the noise, so false alarms are rare.
const CHANGED: f32 = 1.2;

/// The bound of a sample's error, as a logarithm. A single large error is often a stall, which says
/// little about the next request.
const ERROR_MAX: f32 = 2.0;

/// The noise before any data is known, the minimum noise that is assumed, and the number of samples
/// over which the noise is averaged.
const NOISE_PRIOR: f32 = 0.3;
const NOISE_MIN: f32 = 0.02;
const NOISE_SAMPLES: f32 = 200.0;

/// The factor by which each sample reduces the sums for the trust, and the squared offset of the
/// prior, which is full trust.
const TRUST_KEEP: f32 = 0.995;
const TRUST_PRIOR: f32 = 0.05;

/// The minimum trust. With a trust of 0, no offset would be published, so none could prove true
/// again.
const TRUST_MIN: f32 = 0.2;

/// The factor by which each outcome reduces the sums for the persistence, and the number of
/// outcomes in the prior, which is pure noise.
const PERSISTENCE_KEEP: f32 = 0.98;
const PERSISTENCE_PRIOR: f32 = 1.0;

/// The largest share of a lead that is published. Under a steady drift, an average is late in
/// proportion to its memory. This share of the difference between two averages makes up for the
/// delay.
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
        // `noise` is not used instead, because it averages hundreds of outcomes, and the first of
        // these outcomes came before the first prediction.
        let chance = self.errors / self.outcomes.max(1.0);
        (self.products / (self.squares + PERSISTENCE_PRIOR * chance).max(f32::MIN_POSITIVE))
            .clamp(0.0, PERSISTENCE_MAX)
    }
}

// === impl EndpointOffsets ===

impl Default for EndpointOffsets {
    fn default() -> Self {
        Self {
            rows: Vec::new(),
            noise: NOISE_PRIOR,
            trust: OffsetTrust::default(),
            persistence: OffsetPersistence::default(),
        }
    }
}

impl EndpointOffsets {
    /// Starts without offsets, but with the earlier noise, trust and persistence.
    pub(super) fn afresh(before: &Self) -> Self {
        Self {
            rows: Vec::new(),
            ..*before
        }
    }

    /// Learns trust and persistence from a request of `endpoint` that was picked with `offset` in
    /// force and deviated from the shape by `error`.
    pub(super) fn confirm(&mut self, endpoint: EndpointRef, offset: f32, error: f32) {
        if let Some(row) = self.row(endpoint) {
            self.persistence
                .learn(row.lead, (error - row.slow).clamp(-ERROR_MAX, ERROR_MAX));
        }
        self.trust.learn(
            offset.clamp(-ERROR_MAX, ERROR_MAX),
            error.clamp(-ERROR_MAX, ERROR_MAX),
        );
    }

    /// Returns the share of an offset to apply, [`TRUST_MIN`] to 1.
    pub(super) fn trust(&self) -> f32 {
        self.trust.share()
    }

    /// Adds a sample of `endpoint`. The sample deviated from the shape by `error`, as a logarithm,
    /// and `delay` outcomes came between its pick and its outcome. Returns whether a change of the
    /// endpoint was detected.
    pub(super) fn push(&mut self, endpoint: EndpointRef, error: f32, delay: f32) -> bool {
        let slot = usize::from(endpoint.slot.0);
        if slot >= ENDPOINTS_MAX {
            return false;
        }
        if self.rows.len() <= slot {
            self.rows.resize(slot + 1, NOTHING);
        }
        let mean = self.mean();
        let trust = self.trust();
        let share = self.persistence.share();
        let Some(row) = self.rows.get_mut(slot) else {
            return false;
        };
        if row.generation != endpoint.generation || row.count == 0.0 {
            *row = OffsetRow {
                generation: endpoint.generation,
                slow: mean,
                fast: mean,
                newest: mean,
                ..NOTHING
            };
        }
        let error = error.clamp(row.slow - ERROR_MAX, row.slow + ERROR_MAX);
        row.middle.outcome(
            error - trust * row.slow - share * row.lead,
            HALF,
            GAIN,
            SCALE_OUTCOMES_FAST,
        );
        self.noise += ((error - row.slow).abs().max(NOISE_MIN) - self.noise) / NOISE_SAMPLES;
        row.count += 1.0;
        row.newest += (error - row.newest) / NEWEST;
        row.fast += (error - row.fast) / (row.count + 2.0).min(FAST);
        row.slow += (error - row.slow) / (row.count + SHRINK).min((FAST * (1.0 + delay)).min(SLOW));
        let changed = row.count > FAST && (row.fast - row.slow).abs() > CHANGED * self.noise;
        if changed {
            row.slow = row.fast;
            row.count = FAST;
        }
        if delay < DELAY_FRESH {
            row.lead = row.newest - row.slow;
        } else {
            row.lead = 0.0;
            row.middle = NOTHING.middle;
        }
        changed
    }

    fn row(&self, endpoint: EndpointRef) -> Option<&OffsetRow> {
        let row = self.rows.get(usize::from(endpoint.slot.0));
        row.filter(|row| row.count > 0.0 && row.generation == endpoint.generation)
    }

    /// Returns the offset of `endpoint`; the mean of all endpoints if `endpoint` is unknown.
    pub(super) fn offset_of(&self, endpoint: EndpointRef) -> f32 {
        self.row(endpoint)
            .map_or_else(|| self.mean(), |row| row.slow)
            .clamp(*OFFSETS.start(), *OFFSETS.end())
    }

    pub(super) fn mean(&self) -> f32 {
        let (sum, count) = self.rows.iter().fold((0.0, 0.0), |(sum, count), row| {
            let weight = row.count.min(SLOW);
            (sum + weight * row.slow, count + weight)
        });
        if count > 0.0 {
            (sum / count).clamp(*OFFSETS.start(), *OFFSETS.end())
        } else {
            0.0
        }
    }

    /// Returns the offset of `endpoint` relative to the mean of all endpoints.
    pub(super) fn relative(&self, endpoint: EndpointRef) -> f32 {
        (self.offset_of(endpoint) - self.mean()).clamp(*OFFSETS.start(), *OFFSETS.end())
    }

    pub(super) fn slots(&self) -> usize {
        self.rows.len()
    }

    /// Returns the generation known at a slot, and its published offset. The published offset is
    /// the trusted share of its difference from the mean, plus the persistent share of its lead,
    /// plus the shift to the median.
    pub(super) fn published(&self, slot: usize) -> Option<(Generation, f32)> {
        let row = self.rows.get(slot).filter(|row| row.count > 0.0)?;
        let offset = self.trust() * (row.slow - self.mean())
            + self.persistence.share() * row.lead
            + row.middle.at();
        Some((
            row.generation,
            offset.clamp(*OFFSETS.start(), *OFFSETS.end()),
        ))
    }
}
