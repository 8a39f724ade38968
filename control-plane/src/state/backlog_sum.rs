//! Sums the requests that the flow control of proxies queues, by priority. Each proxy gets the sum
//! without its own requests.
//!
//! A proxy takes room in the engines in proportion to its share of a priority's queued requests. So
//! an origin that invents a million requests would leave no room to others. Therefore the requests
//! of one origin count at most [`TIMES_OTHERS`] times as much as the requests of all other origins.
//! The same limit applies to owners.
//!
//! An origin may also invent priorities. If there are more than a message contains, the message
//! begins with those that its receiver queues, so made-up priorities never hide these. Then it has
//! those of all owners in turn, so owners that invent priorities leave each other owner its part.
//! These are selected at most once in [`SELECTION_INTERVAL`], and each message looks up at most
//! [`SELECTED_MAX`] of them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proto::backlog;
use scheduler::flow::QueuedInBand;
use tokio::time::Instant;

use crate::state::peer::Origin;

/// The maximum number of priorities that are read from one report, and that a message contains. A
/// proxy has the same maximum.
const PRIORITIES_MAX: usize = 64;

/// The maximum number of priorities of an owner, which bounds memory. The maximum is high, so that
/// one pod of an owner cannot use it up for the others.
const PRIORITIES_PER_OWNER_MAX: usize = 16 * PRIORITIES_MAX;

/// The maximum number of selected priorities. A message contains those that other proxies queue,
/// and its receiver alone may queue half of the selected ones.
const SELECTED_MAX: usize = 2 * PRIORITIES_MAX;

/// The minimum time between two selections among more than [`PRIORITIES_MAX`] priorities.
const SELECTION_INTERVAL: Duration = Duration::from_millis(100);

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
    /// The priorities that messages contain, and when they were selected.
    selected: Vec<i32>,
    selected_at: Option<Instant>,
    /// The reports from proxies, summed by priority for each owner and each origin.
    levels: [PrioritiesByOrigin; 2],
}

type PrioritiesByOrigin = BTreeMap<Origin, BTreeMap<i32, OriginBand>>;

/// The places of priorities in an order.
type Places = BTreeMap<i32, usize>;

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
        queued.0.retain(|priority, requests| {
            let limits = [PRIORITIES_PER_OWNER_MAX, PRIORITIES_MAX];
            let mut own = self.levels.iter().zip(&levels).zip(limits);
            let is_full = own.any(|((rows, of), max)| {
                let full = rows.get(of).filter(|bands| bands.len() >= max);
                full.is_some_and(|bands| !bands.contains_key(priority))
            });
            if is_full {
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
    /// are too many priorities, the message contains first those that this proxy queues.
    pub fn without(&mut self, origin: &Origin, own: &QueuedRequests, now: Instant) -> Vec<u8> {
        self.select(now);
        let queued = |priority: &i32| {
            let own = own.0.get(priority).copied().unwrap_or(0);
            let queued = QueuedInBand {
                priority: *priority,
                requests: self.bands.get(priority)?.counted(origin) - own,
                bytes: 0,
            };
            Some(queued).filter(|queued| queued.requests > 0)
        };
        let selected = self.selected.iter();
        let others = selected.filter(|priority| !own.0.contains_key(*priority));
        let bands = own.0.keys().chain(others).filter_map(queued);
        backlog::write(&bands.take(PRIORITIES_MAX).collect::<Vec<_>>())
    }

    fn select(&mut self, now: Instant) {
        if self.bands.len() <= PRIORITIES_MAX {
            self.selected.clear();
            self.selected.extend(self.bands.keys());
            return;
        }
        let is_recent = |at: Instant| now.saturating_duration_since(at) < SELECTION_INTERVAL;
        if self.selected_at.is_some_and(is_recent) {
            return;
        }
        let owners = |priority: &i32| {
            let band = self.bands.get(priority);
            Reverse(band.map_or(0, |band| band.ranks[0].len()))
        };
        let mut ranked: Vec<_> = self
            .places()
            .into_iter()
            .map(|(priority, place)| (place, owners(&priority), priority))
            .collect();
        ranked.sort_unstable();
        ranked.truncate(SELECTED_MAX);
        self.selected = ranked.into_iter().map(|(.., priority)| priority).collect();
        self.selected_at = Some(now);
    }

    /// Returns the place of each priority in the selection, with the first place for one priority
    /// of each owner, the second place for another one of each owner, and so on. The priorities of
    /// an owner are in the order in which its origins have them by turns, the highest first.
    fn places(&self) -> Places {
        let [_, origins] = &self.levels;
        let mut owners: BTreeMap<Origin, Places> = BTreeMap::new();
        for (origin, bands) in origins {
            let places = owners.entry(origin.owner()).or_default();
            take_places(places, bands.keys().rev().copied());
        }
        let mut all = Places::new();
        for places in owners.into_values() {
            let mut turns: Vec<_> = places
                .into_iter()
                .map(|(priority, place)| (place, Reverse(priority)))
                .collect();
            turns.sort_unstable();
            take_places(&mut all, turns.into_iter().map(|(_, priority)| priority.0));
        }
        all
    }
}

/// Gives each of these priorities its place in this order, unless it has an earlier place.
fn take_places(places: &mut Places, priorities: impl Iterator<Item = i32>) {
    for (place, priority) in priorities.enumerate() {
        let known = places.entry(priority).or_insert(place);
        *known = place.min(*known);
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

    fn pod(certificate: &str, last: u8) -> Origin {
        Origin {
            certificate: Some(certificate.into()),
            ..of(last)
        }
    }

    /// Adds a report of `count` priorities from `first`.
    fn report(sum: &mut BacklogSum, origin: &Origin, first: i32, count: i32) {
        let bands: Vec<(i32, u64)> = (first..first + count).map(|band| (band, 1)).collect();
        sum.replace(origin, &mut QueuedRequests::default(), queued(&bands));
    }

    /// Returns the priorities in a message to a proxy that queues nothing.
    fn sent(sum: &mut BacklogSum, now: Instant) -> BTreeSet<i32> {
        let none = QueuedRequests::default();
        let bands = backlog::read(&sum.without(&of(250), &none, now));
        bands.iter().map(|band| band.priority).collect()
    }

    #[test]
    fn an_owner_with_many_pods_hides_no_priority_of_another_owner() {
        for apart in [0, 64] {
            let mut sum = BacklogSum::default();
            for last in 0..64_u8 {
                let first = -100_000 + apart * i32::from(last);
                report(&mut sum, &pod("pods", last), first, 64);
            }
            for last in 0..3_u8 {
                report(&mut sum, &pod("fleet", 100 + last), last.into(), 1);
            }
            assert!(sum.bands.len() <= PRIORITIES_PER_OWNER_MAX + 3);
            let sent = sent(&mut sum, Instant::now());
            assert!(sent.is_superset(&(0..3).collect()), "{apart}: {sent:?}");
            assert_eq!(sent.len(), PRIORITIES_MAX, "{apart}");
        }
    }

    #[test]
    fn a_pod_that_makes_up_priorities_hides_none_of_its_fleet() {
        let mut sum = BacklogSum::default();
        report(&mut sum, &pod("fleet", 0), -100_000, 64);
        for last in 1..=40_u8 {
            report(&mut sum, &pod("fleet", last), last.into(), 1);
        }
        let sent = sent(&mut sum, Instant::now());
        assert!(sent.is_superset(&(1..=40).collect()), "{sent:?}");
    }

    #[test]
    fn many_priorities_are_selected_once_for_many_messages() {
        let now = Instant::now();
        for pods in [2, 64] {
            // At first there are 65 priorities.
            let mut sum = BacklogSum::default();
            report(&mut sum, &pod("pods", 0), -100_000, 64);
            report(&mut sum, &pod("pods", 1), 1_000, 1);
            sent(&mut sum, now);
            for last in 2..pods {
                let first = -100_000 + 64 * i32::from(last);
                report(&mut sum, &pod("pods", last), first, 64);
            }
            report(&mut sum, &pod("fleet", 100), 0, 1);
            let soon = now + SELECTION_INTERVAL / 2;
            assert!(!sent(&mut sum, soon).contains(&0), "{pods} pods");
            let later = now + SELECTION_INTERVAL;
            assert!(sent(&mut sum, later).contains(&0), "{pods} pods");
        }
    }

    #[test]
    fn owners_that_make_up_priorities_together_leave_each_owner_its_part() {
        for apart in [0, 64] {
            let mut sum = BacklogSum::default();
            for last in 0..20_u8 {
                let first = 1_000 + apart * i32::from(last);
                report(&mut sum, &pod(&format!("liar {last}"), last), first, 64);
            }
            report(&mut sum, &pod("fleet", 100), 0, 3);
            let sent = sent(&mut sum, Instant::now());
            assert!(sent.is_superset(&(0..3).collect()), "{apart}: {sent:?}");
        }
    }

    #[test]
    fn no_number_of_owners_hides_what_a_proxy_queues_itself() {
        let mut sum = BacklogSum::default();
        for last in 0..200_u8 {
            let first = 1_000 + 64 * i32::from(last);
            report(&mut sum, &pod(&format!("liar {last}"), last), first, 64);
        }
        let fleet = [(0, 3), (1, 5)];
        let mut own = QueuedRequests::default();
        sum.replace(&pod("fleet", 201), &mut own, queued(&fleet));
        sum.replace(
            &pod("fleet", 202),
            &mut QueuedRequests::default(),
            queued(&fleet),
        );
        let sent = backlog::read(&sum.without(&pod("fleet", 201), &own, Instant::now()));
        let sent: Vec<_> = sent
            .iter()
            .map(|band| (band.priority, band.requests))
            .collect();
        assert_eq!(sent[..2], fleet);
        assert_eq!(sent.len(), PRIORITIES_MAX);
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
                    let sent = sum.without(&self::of(1), &proxies[own], Instant::now());
                    let found: BTreeMap<i32, u64> = backlog::read(&sent)
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
            let sent = backlog::read(&sum.without(&of(0), &own, Instant::now()));
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
        let sent = backlog::read(&sum.without(&of(2), &honest, Instant::now()));
        let sent: Vec<(i32, u64)> = sent
            .iter()
            .map(|band| (band.priority, band.requests))
            .collect();
        assert_eq!(sent, [(0, 30), (1, COUNTED_MIN)]);
        let to_liar = backlog::read(&sum.without(&of(1), &liar, Instant::now()));
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
        let sent = backlog::read(&sum.without(&of(2), &honest[0], Instant::now()));
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
