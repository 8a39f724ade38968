//! Observations of finished requests: the conditions at the pick, the prediction, and the measured
//! times.
//!
//! ```text
//!  pick: a RequestTiming, with the conditions of the ranked list ── served endpoint ── first token
//!    ── gaps ── end: an EncodedObservation
//! ```
//! A VM keeps the newest observations until its host takes them
//! ([`super::ManagedPool::take_observations`]); their bytes ([`proto::observation`]) go to the
//! daemon, which learns from them. Nothing is observed until the daemon has sent its first models.

use std::collections::VecDeque;

use proto::observation::{EncodedObservation, OBSERVATIONS_MAX};
use scheduler::latency::Conditions;

use crate::usage::TokenUsage;

/// Observations that were not taken yet.
#[derive(Debug, Default)]
pub(super) struct ObservationQueue {
    rows: VecDeque<EncodedObservation>,
    /// The number of the first row in `rows`.
    before: u64,
}

/// Uncached prompt tokens: the estimated prompt minus the share that the engine reports as cached.
#[must_use]
pub(super) fn uncached_tokens(conditions: &Conditions, usage: &TokenUsage) -> f32 {
    match (usage.cached_tokens, usage.prompt_tokens) {
        (Some(cached), Some(prompt @ 1..)) => {
            conditions.prompt_tokens * (1.0 - to_f32(cached) / to_f32(prompt)).clamp(0.0, 1.0)
        }
        _ => conditions.uncached_tokens,
    }
}

#[expect(clippy::cast_precision_loss, reason = "at most 2^24")]
fn to_f32(count: u32) -> f32 {
    const MAX: u32 = 1 << f32::MANTISSA_DIGITS;
    count.min(MAX) as f32
}

// === impl ObservationQueue ===

impl ObservationQueue {
    pub(super) fn push(&mut self, observed: EncodedObservation) {
        if self.rows.len() >= OBSERVATIONS_MAX {
            self.rows.pop_front();
            self.before += 1;
        }
        self.rows.push_back(observed);
    }

    /// Takes all observations, and the number of the first observation. Numbers start at 0.
    pub(super) fn take(&mut self) -> (u64, VecDeque<EncodedObservation>) {
        let first = self.before;
        self.before += self.rows.len() as u64;
        (first, std::mem::take(&mut self.rows))
    }
}
