//! The endpoints whose counts the daemon accepts: those that a pool has or recently had.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use scheduler::{ENDPOINTS_MAX, EndpointRef, Generation, Slot};
use tokio::time::Instant;

use super::CounterTotals;
use crate::pool::writer::{Absence, PoolView};

/// The time for which counts of an endpoint are accepted after it left the pool. A proxy reports
/// once a second, and applies an update within the 30 s that the endpoint keeps its slot.
const DEPARTED_KEPT: Duration = Duration::from_secs(60);

/// The maximum number of endpoints that left and are still known: three full pools within
/// [`DEPARTED_KEPT`].
const DEPARTED_MAX: usize = 3 * ENDPOINTS_MAX;

/// The endpoints that a pool has or recently had.
#[derive(Debug, Default)]
pub struct KnownEndpoints {
    /// The revision of the view from which the endpoints are.
    revision: u64,
    present: BTreeSet<(Generation, Slot)>,
    departed: BTreeMap<(Generation, Slot), Instant>,
}

// === impl KnownEndpoints ===

impl KnownEndpoints {
    /// Takes over the endpoints of a view. Returns whether an endpoint was forgotten.
    pub fn follow(&mut self, view: &PoolView, now: Instant) -> bool {
        if self.revision != view.revision {
            self.revision = view.revision;
            let key = |id: EndpointRef| (id.generation, id.slot);
            let departing = view
                .absent
                .iter()
                .filter_map(|absentee| match absentee.absence {
                    Absence::Departing(id) => Some(key(id)),
                    _ => None,
                });
            let present: BTreeSet<_> = view
                .members
                .iter()
                .map(|member| key(member.id))
                .chain(departing)
                .collect();
            for id in self.present.difference(&present) {
                self.departed.insert(*id, now);
            }
            self.present = present;
        }
        let before = self.departed.len();
        self.departed
            .retain(|_, at| now.saturating_duration_since(*at) < DEPARTED_KEPT);
        while self.departed.len() > DEPARTED_MAX {
            self.departed.pop_first();
        }
        self.departed.len() < before
    }

    /// Returns whether the counts of an endpoint are accepted.
    pub fn has(&self, endpoint: &(Generation, Slot)) -> bool {
        self.present.contains(endpoint) || self.departed.contains_key(endpoint)
    }

    /// Removes the counts of all endpoints that are not known. Returns the number of removed
    /// endpoints.
    pub fn keep(&self, totals: &mut CounterTotals) -> usize {
        let before = totals.endpoints.len();
        totals.endpoints.retain(|endpoint, _| self.has(endpoint));
        before - totals.endpoints.len()
    }
}
