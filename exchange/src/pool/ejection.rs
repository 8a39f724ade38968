//! Endpoints that just failed are left out for a while, so that the next request does not pay for the same failure.
//!
//! The first failure ejects for [`BASE_MS`], each further one without an answer in between for twice as long, up to [`MAX_MS`]. When the time
//! is over the endpoint is tried again; an answer clears its record. At most half of the ready endpoints are ejected, the worst first: when
//! more fail, failing is no longer a reason to prefer the others.
//!
//! What is known of an endpoint is one record with the moment it is of, and of two records the later one is right: so the workers of a
//! process tell each other, in any order and as often as they like, and end up with the same. An answer is told as a record without failures.
//!
//! Other proxies tell too, by way of the daemon, but their moments come over two clocks and a network: such a record is later than one known
//! here only if it is by [`OUTSIDE_SLACK_MS`]. It is marked, and whoever speaks for a process leaves it out, so that nothing goes in circles.
//! Nor is another proxy believed without end, as it may be hostile: its word ejects for [`TOLD_MS_MAX`] at most, then for [`OUTSIDE_REST_MS`] only
//! what is seen here does; it ends no ejection for a failure seen here, and at most half being ejected, those seen here come first.

use scheduler::sort::sort_by;
use scheduler::{EndpointRef, Readiness, Snapshot};

use super::row::TOLD_MS_MAX;
use crate::time::Time;

/// First ejection, in ms: longer than a process takes to restart its listener, shorter than anybody would notice a third of the pool missing.
const BASE_MS: u64 = 1_000;

/// Longest ejection, in ms: how late at most a mended endpoint is tried again.
const MAX_MS: u64 = 30_000;

/// How long it is remembered that an endpoint answered after it had failed, in ms: until nobody tells of the failure as news any more.
const CLEARED_MS: u64 = 60_000;

/// By how much a moment told from outside may be off, in ms: several times what a message to another proxy takes.
const OUTSIDE_SLACK_MS: u64 = 100;

/// For how long after an answer here, or after the end of an ejection that another proxy asked for, no other proxy can eject the endpoint, in ms: long
/// enough that requests reach it and their answers or failures tell what is true. A proxy that trusts itself here pays one failed attempt.
const OUTSIDE_REST_MS: u64 = 10_000;

/// Which endpoints failed lately.
#[derive(Debug, Default)]
pub struct Ejections {
    /// Only endpoints that failed, and those that answered again a moment ago: at most one row for each endpoint of the pool.
    rows: Vec<Ejection>,
}

/// What is known of one endpoint's failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ejection {
    /// When this became known.
    pub at: Time,
    /// Failures without an answer in between; 0 when it answered.
    pub failures: u32,
    /// Until when it is left out.
    pub until: Time,
    /// Whose.
    pub endpoint: EndpointRef,
    /// Was it another proxy that saw it?
    pub outside: bool,
}

// === impl Ejections ===

impl Ejections {
    /// An attempt on it failed before any response. Says whether that is news.
    pub fn failed(&mut self, endpoint: EndpointRef, now: Time) -> bool {
        let known = self.rows.iter_mut().find(|r| r.endpoint == endpoint);
        // Requests that were already under way say nothing new while it is ejected.
        if known.as_ref().is_some_and(|row| row.until > now) {
            return false;
        }
        let failures = known.as_ref().map_or(0, |row| row.failures).saturating_add(1);
        let row = Ejection { at: now, failures, until: now.plus_ms(ejection_ms(failures)), endpoint, outside: false };
        match known {
            Some(known) => *known = row,
            None => self.rows.push(row),
        }
        true
    }

    /// It answered. Says whether that is news.
    pub fn answered(&mut self, endpoint: EndpointRef, now: Time) -> bool {
        let Some(row) = self.rows.iter_mut().find(|r| r.endpoint == endpoint && r.failures > 0) else { return false };
        *row = Ejection { at: now, failures: 0, until: Time(0), endpoint, outside: false };
        true
    }

    /// Somebody else knows this of an endpoint of the pool. Says whether it is news here.
    pub fn learn(&mut self, told: Ejection, now: Time) -> bool {
        let told = if told.outside { told.bounded(now) } else { told };
        let known = self.rows.iter_mut().find(|r| r.endpoint == told.endpoint);
        match known {
            Some(known) if told.outside && known.outweighs(told, now) => return false,
            Some(known) if *known >= told || (told.outside && told.at <= known.at.plus_ms(OUTSIDE_SLACK_MS)) => return false,
            Some(known) => *known = told,
            // Nothing was known against it, or that it answered was told long ago.
            None if told.is_over(now) => return false,
            None => self.rows.push(told),
        }
        true
    }

    /// What there is to tell.
    #[must_use]
    pub fn rows(&self) -> &[Ejection] {
        &self.rows
    }

    /// It left the pool.
    pub fn forget(&mut self, endpoint: EndpointRef) {
        self.rows.retain(|r| r.endpoint != endpoint);
    }

    /// Forgets what nobody needs to know any more.
    pub fn tidy(&mut self, now: Time) {
        self.rows.retain(|r| !r.is_over(now));
    }

    /// Writes who is ejected now, parallel to the snapshot's endpoints; leaves `out` empty when nobody is.
    pub fn mark(&self, snapshot: &Snapshot, now: Time, out: &mut Vec<bool>) {
        out.clear();
        let mut ejected: Vec<&Ejection> = self.rows.iter().filter(|r| r.until > now).collect();
        if ejected.is_empty() {
            return;
        }
        let ready = snapshot.endpoints().iter().filter(|e| e.readiness == Readiness::Ready).count();
        sort_by(&mut ejected, |a, b| (a.outside, b.failures, b.until, a.endpoint) < (b.outside, a.failures, a.until, b.endpoint));
        ejected.truncate(ready / 2);
        out.extend(snapshot.endpoints().iter().map(|e| ejected.iter().any(|r| r.endpoint == e.id)));
    }
}

// === impl Ejection ===

impl Ejection {
    /// What another proxy says, held to what a proxy can have seen.
    fn bounded(self, now: Time) -> Self {
        Self { at: self.at.min(now), until: self.until.min(now.plus_ms(TOLD_MS_MAX)), ..self }
    }

    /// Does this record stand whatever another proxy says?
    fn outweighs(&self, told: Self, now: Time) -> bool {
        match (self.failures > 0, told.failures > 0) {
            // An ejection for what was seen here is ended by an answer here, or by time.
            (true, false) => !self.outside && self.until > now,
            (true, true) => self.outside && now < self.until.plus_ms(OUTSIDE_REST_MS),
            (false, true) => !self.outside && now.ms_since(self.at) < OUTSIDE_REST_MS,
            (false, false) => false,
        }
    }

    fn is_over(&self, now: Time) -> bool {
        self.failures == 0 && now.ms_since(self.at) >= CLEARED_MS
    }
}

fn ejection_ms(failures: u32) -> u64 {
    BASE_MS.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(MAX_MS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use scheduler::{Endpoint, EndpointMetrics, Incarnation, Pipeline, PipelineSpec, Slot, Version};

    fn id(slot: u16) -> EndpointRef {
        EndpointRef { slot: Slot(slot), incarnation: Incarnation(1) }
    }

    fn pool(endpoints: u16) -> Snapshot {
        let endpoint = |slot| Endpoint {
            id: id(slot),
            name: format!("pod-{slot}").into(),
            address: format!("10.0.0.{slot}:8000").into(),
            readiness: Readiness::Ready,
            labels: Box::new([]),
            models: std::sync::Arc::default(),
            age_ms: 60_000,
        };
        let endpoints: Vec<Endpoint> = (0..endpoints).map(endpoint).collect();
        let metrics = vec![EndpointMetrics::default(); endpoints.len()];
        Snapshot::try_new(Version::default(), endpoints, metrics, Pipeline::build(&PipelineSpec::default()).unwrap()).unwrap()
    }

    fn ejected(ejections: &Ejections, pool: &Snapshot, now: Time) -> Vec<u16> {
        let mut out = Vec::new();
        ejections.mark(pool, now, &mut out);
        (0..).zip(out).filter_map(|(slot, ejected)| ejected.then_some(slot)).collect()
    }

    fn at(ms: u64) -> Time {
        Time(0).plus_ms(ms)
    }

    #[test]
    fn each_further_failure_ejects_for_twice_as_long_up_to_a_limit() {
        let (mut ejections, pool) = (Ejections::default(), pool(4));
        let mut now = 0;
        for expected in [1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000] {
            ejections.failed(id(1), at(now));
            assert_eq!(ejected(&ejections, &pool, at(now + expected - 1)), [1], "{expected}");
            assert!(ejected(&ejections, &pool, at(now + expected)).is_empty(), "{expected}: it is tried again");
            now += expected;
        }
    }

    #[test]
    fn requests_already_under_way_say_nothing_new() {
        let (mut ejections, pool) = (Ejections::default(), pool(4));
        for ms in 0..100 {
            ejections.failed(id(1), at(ms));
        }
        assert!(ejected(&ejections, &pool, at(1_000)).is_empty(), "one failure, seen a hundred times");
    }

    #[test]
    fn an_answer_clears_the_record() {
        let (mut ejections, pool) = (Ejections::default(), pool(4));
        ejections.failed(id(1), at(0));
        ejections.failed(id(1), at(1_000));
        ejections.answered(id(1), at(1_000));
        assert!(ejected(&ejections, &pool, at(1_001)).is_empty());
        ejections.failed(id(1), at(5_000));
        assert!(ejected(&ejections, &pool, at(6_000)).is_empty(), "it begins again with the shortest");
    }

    #[test]
    fn at_most_half_of_the_pool_and_the_worst_of_them() {
        let mut ejections = Ejections::default();
        for slot in 0..4 {
            ejections.failed(id(slot), at(0));
        }
        ejections.failed(id(3), at(1_000));
        for slot in 0..3 {
            ejections.failed(id(slot), at(1_000));
        }
        ejections.failed(id(3), at(3_000));
        assert_eq!(ejected(&ejections, &pool(4), at(3_001)), [3]);
        for slot in 0..4 {
            ejections.failed(id(slot), at(10_000));
        }
        assert_eq!(ejected(&ejections, &pool(4), at(10_001)), [0, 3], "three failures in a row, then the lowest slot of equals");
        assert!(ejected(&ejections, &pool(1), at(10_001)).is_empty(), "never the last one");
    }

    /// As two workers of one process.
    fn tell(from: &Ejections, to: &mut Ejections, now: Time) -> usize {
        from.rows().iter().filter(|row| to.learn(**row, now)).count()
    }

    #[test]
    fn what_one_worker_saw_another_knows_and_an_answer_anywhere_clears_it() {
        let (mut one, mut two, pool) = (Ejections::default(), Ejections::default(), pool(4));
        assert!(one.failed(id(1), at(0)));
        assert_eq!((tell(&one, &mut two, at(1)), tell(&one, &mut two, at(1))), (1, 0), "news only once");
        assert_eq!(ejected(&two, &pool, at(2)), [1]);
        assert!(!two.failed(id(1), at(2)), "its own failure a moment later is none");
        assert!(two.answered(id(1), at(3)) && !two.answered(id(1), at(4)), "clearing is news, once");
        assert_eq!(tell(&one, &mut two, at(5)), 0, "what is older does not come back");
        assert_eq!(tell(&two, &mut one, at(5)), 1);
        assert!(ejected(&one, &pool, at(6)).is_empty());
        assert!(one.failed(id(1), at(7)));
        assert_eq!(tell(&one, &mut two, at(8)), 1, "it failed again");
        assert_eq!(ejected(&two, &pool, at(9)), [1]);
        assert!(ejected(&two, &pool, at(7 + 1_000)).is_empty(), "for the shortest time: it had answered");
    }

    #[test]
    fn what_comes_from_outside_is_news_once_however_its_moment_wavers() {
        let (mut ejections, pool) = (Ejections::default(), pool(4));
        let told = |ms: u64, failures: u32| Ejection {
            at: at(ms),
            failures,
            until: if failures > 0 { at(ms + BASE_MS) } else { Time(0) },
            endpoint: id(1),
            outside: true,
        };
        assert!(ejections.learn(told(1_000, 1), at(1_000)));
        for waver in [0, 3, 50, OUTSIDE_SLACK_MS] {
            assert!(!ejections.learn(told(1_000 + waver, 1), at(1_110)), "{waver} ms later it is the same failure");
        }
        assert!(ejections.answered(id(1), at(1_150)));
        assert!(!ejections.learn(told(1_005, 1), at(1_160)), "told again, and known to be over");
        assert!(ejected(&ejections, &pool, at(1_160)).is_empty());
        let later = 1_150 + OUTSIDE_REST_MS;
        assert!(ejections.learn(told(later, 1), at(later)), "it failed again elsewhere");
        assert_eq!(ejected(&ejections, &pool, at(later + 1)), [1]);
        assert!(ejections.learn(told(later + 200, 0), at(later + 200)), "and answered there");
        assert!(ejected(&ejections, &pool, at(later + 201)).is_empty());
        ejections.failed(id(1), at(later + 600));
        assert!(ejections.rows().iter().all(|row| !row.outside), "seen here, it is ours to tell");
    }

    /// A peer that lies says it again and again, of half the pool and for as long as a number can say.
    #[test]
    fn another_proxys_word_ejects_for_half_a_minute_at_most_and_not_at_once_again() {
        let (mut ejections, pool) = (Ejections::default(), pool(4));
        let lie = |slot, ms: u64| Ejection { at: at(ms), failures: u32::MAX, until: Time(u64::MAX), endpoint: id(slot), outside: true };
        let (mut out, mut longest, mut free) = ([0_u64; 4], 0, 0);
        for ms in (0..200_000).step_by(100) {
            for slot in 0..2 {
                ejections.learn(lie(slot, ms), at(ms));
            }
            let ejected = ejected(&ejections, &pool, at(ms));
            for slot in 0..4_u16 {
                let spell = &mut out[usize::from(slot)];
                *spell = if ejected.contains(&slot) { *spell + 100 } else { 0 };
                longest = longest.max(*spell);
                // An endpoint that is not ejected gets requests, and answers them.
                if *spell == 0 {
                    ejections.answered(id(slot), at(ms));
                }
            }
            free += u64::from(ejected.is_empty()) * 100;
        }
        assert!((100..=TOLD_MS_MAX).contains(&longest), "{longest} ms without a request");
        assert!(free >= 200_000 * OUTSIDE_REST_MS / (OUTSIDE_REST_MS + TOLD_MS_MAX) / 2, "all served for {free} of 200,000 ms");
    }

    #[test]
    fn what_was_seen_here_is_left_out_before_what_another_proxy_says() {
        let (mut ejections, pool) = (Ejections::default(), pool(4));
        for slot in 0..2 {
            ejections.learn(Ejection { at: at(0), failures: 9, until: at(9_000), endpoint: id(slot), outside: true }, at(0));
        }
        ejections.failed(id(2), at(1));
        ejections.failed(id(3), at(1));
        assert_eq!(ejected(&ejections, &pool, at(2)), [2, 3]);
    }

    #[test]
    fn that_it_answered_is_forgotten_in_the_end() {
        let (mut one, mut two) = (Ejections::default(), Ejections::default());
        one.failed(id(1), at(0));
        one.answered(id(1), at(10));
        one.tidy(at(10 + CLEARED_MS - 1));
        assert_eq!(one.rows().len(), 1);
        assert_eq!(tell(&one, &mut two, at(10 + CLEARED_MS)), 0, "nobody takes it up any more");
        one.tidy(at(10 + CLEARED_MS));
        assert!(one.rows().is_empty());
    }

    proptest! {
        /// Whatever each of three workers sees and in whatever order they tell each other: once all have told all, they agree.
        #[test]
        fn workers_that_told_each_other_agree(events in prop::collection::vec((0..3_usize, 0..4_u16, any::<bool>(), 0..3_usize), 0..60)) {
            let mut workers = [Ejections::default(), Ejections::default(), Ejections::default()];
            let mut ms = 0;
            for (worker, slot, fails, listener) in events {
                ms += 173;
                match fails {
                    true => workers[worker].failed(id(slot), at(ms)),
                    false => workers[worker].answered(id(slot), at(ms)),
                };
                let rows = workers[worker].rows().to_vec();
                for row in rows {
                    workers[listener].learn(row, at(ms));
                }
            }
            for _ in 0..2 {
                for (from, to) in [(0, 1), (1, 2), (2, 0)] {
                    let rows = workers[from].rows().to_vec();
                    for row in rows {
                        workers[to].learn(row, at(ms));
                    }
                }
            }
            let known = workers.map(|worker| { let mut rows = worker.rows; rows.sort_unstable(); rows });
            prop_assert_eq!(&known[0], &known[1]);
            prop_assert_eq!(&known[1], &known[2]);
        }
    }
}
