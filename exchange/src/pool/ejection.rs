//! Endpoints that just failed are left out for a while, so that the next request does not pay for the same failure.
//!
//! The first failure ejects for [`BASE_MS`], each further one without an answer in between for twice as long, up to [`MAX_MS`]. When the time
//! is over the endpoint is tried again; an answer clears its record. At most half of the ready endpoints are ejected, the worst first: when
//! more fail, failing is no longer a reason to prefer the others.

use scheduler::{EndpointRef, Readiness, Snapshot};

use crate::time::Time;

/// First ejection, in ms: longer than a process takes to restart its listener, shorter than anybody would notice a third of the pool missing.
const BASE_MS: u64 = 1_000;

/// Longest ejection, in ms: how late at most a mended endpoint is tried again.
const MAX_MS: u64 = 30_000;

/// Which endpoints failed lately.
#[derive(Debug, Default)]
pub struct Ejections {
    /// Only endpoints that failed since their last answer: at most one row for each endpoint of the pool.
    rows: Vec<Row>,
}

#[derive(Debug)]
struct Row {
    endpoint: EndpointRef,
    failures: u32,
    until: Time,
}

// === impl Ejections ===

impl Ejections {
    /// An attempt on it failed before any response.
    pub fn failed(&mut self, endpoint: EndpointRef, now: Time) {
        let failures = match self.rows.iter_mut().find(|r| r.endpoint == endpoint) {
            // Requests that were already under way say nothing new while it is ejected.
            Some(row) if row.until > now => return,
            Some(row) => {
                row.failures = row.failures.saturating_add(1);
                row.until = now.plus_ms(ejection_ms(row.failures));
                return;
            }
            None => 1,
        };
        self.rows.push(Row { endpoint, failures, until: now.plus_ms(ejection_ms(failures)) });
    }

    /// It answered.
    pub fn answered(&mut self, endpoint: EndpointRef) {
        self.forget(endpoint);
    }

    /// It left the pool.
    pub fn forget(&mut self, endpoint: EndpointRef) {
        self.rows.retain(|r| r.endpoint != endpoint);
    }

    /// Writes who is ejected now, parallel to the snapshot's endpoints; leaves `out` empty when nobody is.
    pub fn mark(&self, snapshot: &Snapshot, now: Time, out: &mut Vec<bool>) {
        out.clear();
        let mut ejected: Vec<&Row> = self.rows.iter().filter(|r| r.until > now).collect();
        if ejected.is_empty() {
            return;
        }
        let ready = snapshot.endpoints().iter().filter(|e| e.readiness == Readiness::Ready).count();
        ejected.sort_unstable_by(|a, b| b.failures.cmp(&a.failures).then(b.until.cmp(&a.until)).then(a.endpoint.cmp(&b.endpoint)));
        ejected.truncate(ready / 2);
        out.extend(snapshot.endpoints().iter().map(|e| ejected.iter().any(|r| r.endpoint == e.id)));
    }
}

fn ejection_ms(failures: u32) -> u64 {
    BASE_MS.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(MAX_MS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use scheduler::{Endpoint, EndpointMetrics, Incarnation, Profile, ProfileSpec, Slot, Version};

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
            age_ms: 60_000,
        };
        let endpoints: Vec<Endpoint> = (0..endpoints).map(endpoint).collect();
        let metrics = vec![EndpointMetrics::default(); endpoints.len()];
        Snapshot::try_new(Version::default(), endpoints, metrics, Profile::build(&ProfileSpec::default_profile()).unwrap()).unwrap()
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
        ejections.answered(id(1));
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
}
