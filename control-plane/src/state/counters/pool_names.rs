//! The names under which the counts of a pool are shown.

use tokio::time::Instant;

use super::reported_names::ReportedNames;
use super::totals::{BANDS_MAX, CounterTotals, KEYS_MAX, MODELS_MAX, TotalsLabel};
use crate::state::peer::Origin;

/// The names of a pool by kind.
#[derive(Debug)]
pub struct PoolNames {
    pub models: ReportedNames<TotalsLabel>,
    pub reasons: ReportedNames<String>,
    pub priorities: ReportedNames<i32>,
}

/// The treatment of counts whose names are not shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OtherNames {
    /// Counts under these names are added to [`super::OTHER`]. Counts of bands are left out.
    Count,
    /// Counts under these names are left out.
    Leave,
}

// === impl PoolNames ===

impl Default for PoolNames {
    fn default() -> Self {
        Self {
            models: ReportedNames::new(MODELS_MAX),
            reasons: ReportedNames::new(KEYS_MAX),
            priorities: ReportedNames::new(4 * BANDS_MAX),
        }
    }
}

impl PoolNames {
    /// Records the names in a report of `origin`.
    pub fn report(&mut self, origin: &Origin, totals: &CounterTotals, now: Instant) {
        self.models.report(origin, totals.models.keys(), now);
        self.reasons.report(origin, totals.dropped.keys(), now);
        self.priorities.report(origin, totals.bands.keys(), now);
    }

    /// Forgets the names that are no longer reported, also in these totals.
    pub fn expire(&mut self, now: Instant, merged: &mut [&mut CounterTotals]) {
        let models = self.models.expire(now);
        let reasons = self.reasons.expire(now);
        let priorities = self.priorities.expire(now);
        for totals in merged {
            for label in &models {
                totals.models.remove(label);
            }
            for reason in &reasons {
                totals.dropped.remove(reason);
            }
            for priority in &priorities {
                totals.bands.remove(priority);
            }
        }
    }
}
