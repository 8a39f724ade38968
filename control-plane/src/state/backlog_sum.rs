//! The requests that the flow control of many proxies queues, by priority, without those of any one
//! of them.

use std::collections::BTreeMap;

use proto::backlog;
use scheduler::flow::QueuedInBand;

use crate::state::peer::Origin;

/// The most priorities of one origin that count, and the most that a message has: those that a
/// proxy has.
const PRIORITIES_MAX: usize = 64;

/// The report of one proxy, with each priority once.
#[derive(Debug, Default)]
pub struct QueuedRequests(BTreeMap<i32, u64>);

/// The sum of what proxies reported.
#[derive(Debug, Default)]
pub struct BacklogSum {
    bands: BTreeMap<i32, QueuedBand>,
    /// The proxies of each origin that report a priority.
    origins: BTreeMap<Origin, BTreeMap<i32, u32>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct QueuedBand {
    requests: u64,
    /// The number of origins that report the priority.
    origins: u32,
}

// === impl QueuedRequests ===

impl QueuedRequests {
    /// Reads the backlog of a load report.
    pub fn read(bytes: &[u8]) -> Self {
        let mut queued = BTreeMap::new();
        for band in backlog::read(bytes) {
            if band.requests > 0 {
                queued.entry(band.priority).or_insert(band.requests);
            }
        }
        Self(queued)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

// === impl BacklogSum ===

impl BacklogSum {
    /// Replaces what a proxy of `origin` reported.
    pub fn replace(
        &mut self,
        origin: &Origin,
        queued: &mut QueuedRequests,
        newest: QueuedRequests,
    ) {
        if queued.is_empty() && newest.is_empty() {
            return;
        }
        let of_origin = self.origins.entry(origin.clone()).or_default();
        for (priority, requests) in &queued.0 {
            let Some(band) = self.bands.get_mut(priority) else {
                continue;
            };
            band.requests -= requests;
            if let Some(proxies) = of_origin.get_mut(priority) {
                *proxies -= 1;
                if *proxies == 0 {
                    of_origin.remove(priority);
                    band.origins -= 1;
                }
            }
            if band.origins == 0 {
                self.bands.remove(priority);
            }
        }
        *queued = newest;
        queued.0.retain(|priority, requests| {
            if of_origin.len() >= PRIORITIES_MAX && !of_origin.contains_key(priority) {
                return false;
            }
            let proxies = of_origin.entry(*priority).or_default();
            let band = self.bands.entry(*priority).or_default();
            band.origins += u32::from(*proxies == 0);
            band.requests += *requests;
            *proxies += 1;
            true
        });
        if of_origin.is_empty() {
            self.origins.remove(origin);
        }
    }

    /// The sum without what one proxy reported, as a message has it. If there are too many
    /// priorities, those count that most origins report.
    pub fn without(&self, own: Option<&QueuedRequests>) -> Vec<u8> {
        let of_own = |priority| own.and_then(|own| own.0.get(priority)).copied();
        let mut bands: Vec<(u32, QueuedInBand)> = self
            .bands
            .iter()
            .map(|(priority, band)| {
                let queued = QueuedInBand {
                    priority: *priority,
                    requests: band.requests - of_own(priority).unwrap_or(0),
                    bytes: 0,
                };
                (band.origins, queued)
            })
            .filter(|(_, queued)| queued.requests > 0)
            .collect();
        bands.sort_by_key(|(origins, _)| std::cmp::Reverse(*origins));
        bands.truncate(PRIORITIES_MAX);
        let bands: Vec<QueuedInBand> = bands.into_iter().map(|(_, queued)| queued).collect();
        backlog::write(&bands)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(last: u8) -> Origin {
        Origin {
            certificate: None,
            address: Some([10, 0, 0, last].into()),
        }
    }

    fn queued(bands: &[(i32, u64)]) -> QueuedRequests {
        let bands: Vec<QueuedInBand> = bands
            .iter()
            .map(|(priority, requests)| QueuedInBand {
                priority: *priority,
                requests: *requests,
                bytes: 0,
            })
            .collect();
        QueuedRequests::read(&backlog::write(&bands))
    }

    proptest! {
        #[test]
        fn each_proxy_gets_the_sum_of_the_others(
            reports in prop::collection::vec((0..3_usize, prop::collection::vec((-3..3_i32, 0..9_u64), 0..5)), 1..20)
        ) {
            let mut sum = BacklogSum::default();
            let mut proxies = [(); 3].map(|()| QueuedRequests::default());
            for (of, bands) in reports {
                sum.replace(&self::of(of.min(1) as u8), &mut proxies[of], queued(&bands));
                for own in 0..3 {
                    let mut expected = BTreeMap::new();
                    for (_, other) in proxies.iter().enumerate().filter(|(at, _)| *at != own) {
                        for (priority, requests) in &other.0 {
                            *expected.entry(*priority).or_insert(0) += requests;
                        }
                    }
                    let found: BTreeMap<i32, u64> = backlog::read(&sum.without(Some(&proxies[own])))
                        .iter()
                        .map(|band| (band.priority, band.requests))
                        .collect();
                    prop_assert_eq!(found, expected);
                }
            }
        }
    }

    #[test]
    fn made_up_priorities_do_not_push_out_those_of_most_origins() {
        let mut sum = BacklogSum::default();
        let mut liars = [(); 8].map(|()| QueuedRequests::default());
        for (first, liar) in (0..).zip(&mut liars) {
            let bands: Vec<(i32, u64)> = (0..64).map(|band| (first * 64 + band, 9)).collect();
            sum.replace(&of(1), liar, queued(&bands));
        }
        assert_eq!(sum.bands.len(), PRIORITIES_MAX);
        let mut honest = [(); 2].map(|()| QueuedRequests::default());
        for (last, proxy) in (2..).zip(&mut honest) {
            sum.replace(&of(last), proxy, queued(&[(1_000_000, 2)]));
        }
        let sent = backlog::read(&sum.without(Some(&honest[0])));
        assert_eq!(sent.len(), PRIORITIES_MAX);
        assert!(
            sent.iter()
                .any(|band| band.priority == 1_000_000 && band.requests == 2)
        );
        for (last, proxy) in (2..).zip(&mut honest) {
            sum.replace(&of(last), proxy, QueuedRequests::default());
        }
        for liar in &mut liars {
            sum.replace(&of(1), liar, QueuedRequests::default());
        }
        assert!(sum.bands.is_empty() && sum.origins.is_empty());
    }
}
