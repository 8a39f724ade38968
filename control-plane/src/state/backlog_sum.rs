//! Sums the requests that the flow control of proxies queues, by priority. Each proxy gets the sum
//! without its own requests.
//!
//! A proxy takes room in the engines in proportion to its share of a priority's queued requests. So
//! an origin that invents a million requests would leave no room to others. Therefore the requests
//! of one origin count at most [`TIMES_OTHERS`] times as much as the requests of all other origins.
//! The same limit applies to owners.

use std::collections::{BTreeMap, BTreeSet};

use proto::backlog;
use scheduler::flow::QueuedInBand;

use crate::state::peer::Origin;

/// The maximum number of priorities that are read from one report, and that a message contains. A
/// proxy has the same maximum.
const PRIORITIES_MAX: usize = 64;

/// The maximum number of an origin's requests with a priority that count, as a multiple of the
/// requests of all others. So a quarter of the room stays with the others.
const TIMES_OTHERS: u64 = 3;

/// The number of an origin's requests that always count, so that other proxies know that the origin
/// has requests with that priority.
const COUNTED_MIN: u64 = 8;

/// The report of one proxy, with each priority once.
#[derive(Debug, Default)]
pub struct QueuedRequests(BTreeMap<i32, u64>);

/// The sum of the queued requests that proxies reported.
#[derive(Debug, Default)]
pub struct BacklogSum {
    bands: BTreeMap<i32, QueuedBand>,
    /// The reports from proxies, summed by priority for each owner and each origin.
    levels: [BTreeMap<Origin, BTreeMap<i32, OriginBand>>; 2],
}

#[derive(Debug, Default)]
struct QueuedBand {
    all: OriginBand,
    /// The owners and the origins that report the priority, by their requests.
    ranks: [BTreeSet<(u64, Origin)>; 2],
}

#[derive(Clone, Copy, Debug, Default)]
struct OriginBand {
    proxies: u32,
    requests: u64,
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
    /// Replaces the report from a proxy of `origin`.
    pub fn replace(
        &mut self,
        origin: &Origin,
        queued: &mut QueuedRequests,
        newest: QueuedRequests,
    ) {
        if queued.is_empty() && newest.is_empty() {
            return;
        }
        let levels = origin.levels();
        for (priority, requests) in &queued.0 {
            self.change(&levels, *priority, |known| OriginBand {
                proxies: known.proxies - 1,
                requests: known.requests - requests,
            });
        }
        *queued = newest;
        let [owner, _] = &levels;
        queued.0.retain(|priority, requests| {
            let [owners, origins] = &self.levels;
            let own = [
                owners.get(owner).filter(|_| owners.len() > 1),
                origins.get(origin),
            ];
            let is_full = |bands: &BTreeMap<i32, OriginBand>| {
                bands.len() >= PRIORITIES_MAX && !bands.contains_key(priority)
            };
            if own.into_iter().flatten().any(is_full) {
                return false;
            }
            self.change(&levels, *priority, |known| OriginBand {
                proxies: known.proxies + 1,
                requests: known.requests + *requests,
            });
            true
        });
    }

    /// Changes the number of requests that an owner and an origin report for a priority.
    fn change(
        &mut self,
        levels: &[Origin; 2],
        priority: i32,
        new: impl Fn(OriginBand) -> OriginBand,
    ) {
        let band = self.bands.entry(priority).or_default();
        band.all = new(band.all);
        let ranked = band.ranks.iter_mut().zip(&mut self.levels);
        for ((ranks, rows), of) in ranked.zip(levels) {
            let bands = rows.entry(of.clone()).or_default();
            let known = bands.entry(priority).or_default();
            let before = std::mem::replace(known, new(*known));
            ranks.remove(&(before.requests, of.clone()));
            if known.proxies > 0 {
                ranks.insert((known.requests, of.clone()));
            } else {
                bands.remove(&priority);
            }
            if bands.is_empty() {
                rows.remove(of);
            }
        }
        if band.all.proxies == 0 {
            self.bands.remove(&priority);
        }
    }

    /// Returns the sum without the report of one proxy of `origin`, encoded for a message. If there
    /// are too many priorities, the priorities that most owners report are kept, then the
    /// priorities that most origins report.
    pub fn without(&self, origin: &Origin, own: &QueuedRequests) -> Vec<u8> {
        let mut bands: Vec<([usize; 2], QueuedInBand)> = self
            .bands
            .iter()
            .map(|(priority, band)| {
                let own = own.0.get(priority).copied().unwrap_or(0);
                let queued = QueuedInBand {
                    priority: *priority,
                    requests: band.counted(origin) - own,
                    bytes: 0,
                };
                (band.ranks.each_ref().map(BTreeSet::len), queued)
            })
            .filter(|(_, queued)| queued.requests > 0)
            .collect();
        bands.sort_by_key(|(origins, _)| std::cmp::Reverse(*origins));
        bands.truncate(PRIORITIES_MAX);
        let bands: Vec<QueuedInBand> = bands.into_iter().map(|(_, queued)| queued).collect();
        backlog::write(&bands)
    }
}

// === impl QueuedBand ===

impl QueuedBand {
    /// Returns the number of requests that a proxy of `origin` takes into account, including the
    /// proxy's own requests. Only the owner with the most requests, and the origin with the most
    /// requests, can exceed their shares. The receiver's own owner and origin have no share,
    /// because many proxies may be behind one address.
    fn counted(&self, origin: &Origin) -> u64 {
        let counted = self.ranks.iter().zip(origin.levels()).map(|(ranks, own)| {
            let largest = ranks.last().filter(|(_, of)| *of != own);
            let claimed = largest.map_or(0, |(requests, _)| *requests);
            let others = self.all.requests - claimed;
            others + claimed.min((TIMES_OTHERS * others).max(COUNTED_MIN))
        });
        counted.min().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_owner_with_many_pods_has_the_priorities_of_one() {
        let pod = |last| Origin {
            certificate: Some("pods".into()),
            ..of(last)
        };
        let mut sum = BacklogSum::default();
        sum.replace(&of(1), &mut QueuedRequests::default(), queued(&[(-1, 1)]));
        for last in 0..10_u8 {
            let first = 1_000 * i32::from(last);
            let bands: Vec<(i32, u64)> = (first..first + 40).map(|band| (band, 1)).collect();
            sum.replace(&pod(last), &mut QueuedRequests::default(), queued(&bands));
        }
        assert_eq!(sum.bands.len(), PRIORITIES_MAX + 1);
    }

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
                sum.replace(&self::of(1), &mut proxies[of], queued(&bands));
                for own in 0..3 {
                    let mut expected = BTreeMap::new();
                    for (_, other) in proxies.iter().enumerate().filter(|(at, _)| *at != own) {
                        for (priority, requests) in &other.0 {
                            *expected.entry(*priority).or_insert(0) += requests;
                        }
                    }
                    let found: BTreeMap<i32, u64> = backlog::read(&sum.without(&self::of(1), &proxies[own]))
                        .iter()
                        .map(|band| (band.priority, band.requests))
                        .collect();
                    prop_assert_eq!(found, expected);
                }
            }
        }
    }

    proptest! {
        #[test]
        fn an_origin_counts_at_most_three_times_the_others_and_small_backlogs_in_full(
            reports in prop::collection::vec((0..4_u8, 0..2_i32, prop_oneof![0..9_u64, Just(100_000)]), 1..20)
        ) {
            let mut sum = BacklogSum::default();
            let mut proxies: BTreeMap<u8, QueuedRequests> = BTreeMap::new();
            for (of, priority, requests) in reports {
                let queue = proxies.entry(of).or_default();
                sum.replace(&self::of(of), queue, queued(&[(priority, requests)]));
            }
            let own = proxies.remove(&0).unwrap_or_default();
            let sent = backlog::read(&sum.without(&of(0), &own));
            for priority in 0..2 {
                let of_queue = |queue: &QueuedRequests| queue.0.get(&priority).copied().unwrap_or(0);
                let claims: Vec<u64> = proxies.values().map(of_queue).collect();
                let all = of_queue(&own) + claims.iter().sum::<u64>();
                let counted = |claim: u64| claim.min((3 * (all - claim)).max(COUNTED_MIN));
                let expected: u64 = claims.iter().map(|claim| counted(*claim)).sum();
                let band = sent.iter().find(|band| band.priority == priority);
                prop_assert_eq!(band.map_or(0, |band| band.requests), expected);
            }
        }
    }

    #[test]
    fn a_made_up_backlog_leaves_a_quarter_to_others() {
        let mut sum = BacklogSum::default();
        let mut liar = QueuedRequests::default();
        let mut honest = QueuedRequests::default();
        sum.replace(&of(1), &mut liar, queued(&[(0, 1_000_000), (1, 1_000_000)]));
        sum.replace(&of(2), &mut honest, queued(&[(0, 10)]));
        let sent = backlog::read(&sum.without(&of(2), &honest));
        let sent: Vec<(i32, u64)> = sent
            .iter()
            .map(|band| (band.priority, band.requests))
            .collect();
        assert_eq!(sent, [(0, 30), (1, COUNTED_MIN)]);
        let to_liar = backlog::read(&sum.without(&of(1), &liar));
        assert_eq!(to_liar[0].requests, 10, "a claim is never raised");
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
        let sent = backlog::read(&sum.without(&of(2), &honest[0]));
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
        assert!(sum.bands.is_empty() && sum.levels.iter().all(BTreeMap::is_empty));
    }
}
