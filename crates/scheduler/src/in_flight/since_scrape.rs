//! The number of requests at an endpoint, from a scrape and the ledger together.
//!
//! A scrape includes requests that did not come through this proxy, but the scrape is old. The
//! ledger is current, but has only the requests of this proxy. The sum of the scrape and the ledger
//! would count the requests of this proxy twice. So the ledger's count is stored when a scrape
//! arrives, and only the change of the ledger since the scrape (picks minus ends) is added to the
//! scrape.
//!
//! The scorers of llm-d keep their formulas: they read either only the scrape or only the ledger,
//! and do not use this module.

use crate::endpoint::{ENDPOINTS_MAX, EndpointRef, Generation};
use crate::metrics::EndpointMetrics;

/// The ledger's request counts when the last scrape arrived.
#[derive(Debug, Default)]
pub(super) struct ScrapeBaseline {
    /// The ledger's request counts, by slot.
    rows: Vec<Option<BaselineRow>>,
}

#[derive(Clone, Copy, Debug)]
struct BaselineRow {
    generation: Generation,
    requests: u32,
    /// Whether the engine has ever reported a request. An engine that has never reported one may
    /// leave out all its requests.
    counts: bool,
}

/// Returns the number of requests that an endpoint has now: the scraped requests (running and
/// queued) plus the change of the ledger since the scrape (`now - then`). The result is never below
/// the count in the ledger, because all requests in the ledger are at the endpoint or on their way
/// to it. Without a scrape, only the ledger counts.
///
/// Picks between the scrape and its arrival (a few tens of ms) are missing, but nothing is counted
/// twice.
#[must_use]
// The casts are exact, because counts of requests stay far below 2^24.
pub fn requests_now(scraped: Option<f32>, then: u32, now: u32) -> f32 {
    match scraped.filter(|scraped| scraped.is_finite()) {
        None => now as f32,
        Some(scraped) => (scraped + now as f32 - then as f32).max(now as f32),
    }
}

// === impl ScrapeBaseline ===

impl ScrapeBaseline {
    /// Records the ledger's count for an endpoint whose new metrics arrived.
    #[cold] // because it runs only once per scrape
    pub(super) fn note(&mut self, endpoint: EndpointRef, requests: u32, metrics: &EndpointMetrics) {
        let slot = usize::from(endpoint.slot.0);
        if slot >= ENDPOINTS_MAX {
            return;
        }
        if self.rows.len() <= slot {
            self.rows.resize(slot + 1, None);
        }
        let counts = self.row(endpoint).is_some_and(|row| row.counts)
            || metrics
                .running_requests
                .is_some_and(|running| running > 0.0);
        if let Some(row) = self.rows.get_mut(slot) {
            *row = Some(BaselineRow {
                generation: endpoint.generation,
                requests,
                counts,
            });
        }
    }

    pub(super) fn requests(&self, endpoint: EndpointRef) -> u32 {
        self.row(endpoint).map_or(0, |row| row.requests)
    }

    pub(super) fn counts(&self, endpoint: EndpointRef) -> bool {
        self.row(endpoint).is_some_and(|row| row.counts)
    }

    fn row(&self, endpoint: EndpointRef) -> Option<BaselineRow> {
        self.rows
            .get(usize::from(endpoint.slot.0))
            .copied()
            .flatten()
            .filter(|row| row.generation == endpoint.generation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::Slot;
    use crate::in_flight::{EndpointLoad, InFlight};
    use crate::metrics::EndpointMetrics;
    use proptest::prelude::*;

    #[test]
    fn a_scrape_and_what_changed_since() {
        for (scraped, then, now, expected) in [
            (None, 0, 3, 3.0),
            (Some(f32::NAN), 0, 3, 3.0),
            (Some(10.0), 4, 4, 10.0),
            (Some(10.0), 4, 7, 13.0),
            (Some(10.0), 4, 1, 7.0),
            (Some(2.0), 9, 5, 5.0),
            (Some(0.0), 0, 5, 5.0),
        ] {
            assert_eq!(
                requests_now(scraped, then, now),
                expected,
                "{scraped:?} {then} {now}"
            );
        }
    }

    #[test]
    fn the_ledger_is_noted_when_a_scrape_comes_in() {
        let at = EndpointRef {
            slot: Slot(3),
            generation: Generation(1),
        };
        let other_life = EndpointRef {
            generation: Generation(2),
            ..at
        };
        let said = EndpointMetrics {
            running_requests: Some(5.0),
            queue_depth: Some(2.0),
            ..EndpointMetrics::default()
        };
        let mut ledger = InFlight::default();
        let first = ledger.admit(at, 1);
        ledger.others_mut().start(&[at]);
        ledger.others_mut().add(
            at,
            EndpointLoad {
                requests: 2,
                ..EndpointLoad::default()
            },
        );
        assert_eq!(
            ledger.requests_now(at, &said),
            10.0,
            "no scrape arrived: all of ours count as new"
        );
        ledger.scraped(&[at], std::slice::from_ref(&said));
        assert_eq!(
            ledger.requests_now(at, &said),
            7.0,
            "ours are among the seven"
        );
        let second = ledger.admit(at, 1);
        assert_eq!(
            (
                ledger.requests_now(at, &said),
                ledger.requests_now(other_life, &said)
            ),
            (8.0, 7.0)
        );
        ledger.release(first);
        ledger.release(second);
        assert_eq!(ledger.requests_now(at, &said), 6.0);
        assert_eq!(
            ledger.requests_now(at, &EndpointMetrics::default()),
            2.0,
            "no scrape is known"
        );
    }

    #[test]
    fn a_slot_that_no_snapshot_has_is_not_noted() {
        let at = |slot: usize| EndpointRef {
            slot: Slot(slot as u16),
            generation: Generation(1),
        };
        let mut noted = ScrapeBaseline::default();
        let metrics = EndpointMetrics::default();
        noted.note(at(ENDPOINTS_MAX - 1), 3, &metrics);
        noted.note(at(ENDPOINTS_MAX), 4, &metrics);
        assert_eq!(
            (
                noted.requests(at(ENDPOINTS_MAX - 1)),
                noted.requests(at(ENDPOINTS_MAX))
            ),
            (3, 0)
        );
    }

    proptest! {
        /// Checks that the count for an engine that serves requests of this proxy and of others
        /// stays right, whatever starts and ends after a scrape.
        #[test]
        fn nothing_is_counted_twice(ours in 0..50_u32, foreign in 0..50_u32, picks in 0..50_u32, ends in 0..50_u32) {
            let now = (ours + picks).saturating_sub(ends);
            let truth = foreign + now;
            prop_assert_eq!(requests_now(Some((ours + foreign) as f32), ours, now), truth as f32);
        }
    }
}
