//! Endpoints that discovery reports as not ready although they did not report so themselves. This
//! module reads no clock: the caller passes the time.
//!
//! After an outage of the API server that is longer than the grace period of nodes, Kubernetes
//! reports every pod of a node as not ready until its kubelet is back. Meanwhile the engines keep
//! serving, and removing them would empty the pool. Discovery marks such endpoints
//! ([`Instance::unconfirmed`]), and their scrapes show whether they are alive:
//!
//! | the unconfirmed endpoint | in the pool |
//! |---|---|
//! | is a member, and a scrape succeeded within the staleness limit | stays |
//! | is a member, and its metrics are unknown after a failed scrape | leaves |
//! | is not a member (this daemon has just become the leader) | joins if nearly all are unconfirmed |
//! | has been unconfirmed for [`UNCONFIRMED_MAX`] | leaves |
//! | is deleted, terminating, or reports itself that it is not ready | leaves at once, by discovery |
//!
//! An endpoint that left comes back when discovery confirms it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use discovery::Instance;
use tokio::time::Instant;

use crate::pool::clock::WallAndMonotonic;
use crate::pool::member::{Absence, Absentee, MetricsStatus, PoolMember};

/// The maximum time that an unconfirmed endpoint may stay in the pool. On a real node pods were
/// ready again 75 s after an outage of the API server. After 300 s (the default toleration of an
/// unreachable node) Kubernetes deletes the pods of a lost node, so the pool and the cluster agree
/// from then on.
pub const UNCONFIRMED_MAX: Duration = Duration::from_secs(300);

/// Nearly all endpoints of a pool count as unconfirmed if at most one in this many endpoints is
/// confirmed. If more are confirmed, the confirmed endpoints can do the work, so an unconfirmed
/// endpoint joins only after a successful scrape.
const CONFIRMED_ONE_IN: usize = 10;

/// The identity of a process: its namespace, name, generation and address.
pub(super) type EndpointKey = (String, String, String, SocketAddr);

/// The unconfirmed endpoints of a pool.
#[derive(Debug, Default)]
pub(super) struct UnconfirmedEndpoints {
    known: BTreeMap<EndpointKey, Doubt>,
    /// The last set from discovery, while it has unconfirmed endpoints.
    set: Vec<Instance>,
}

/// The time since when an endpoint is unconfirmed, on both clocks, and whether the endpoint is in
/// the pool.
#[derive(Clone, Debug)]
struct Doubt {
    since: Instant,
    wall: SystemTime,
    standing: Standing,
}

/// Whether an unconfirmed endpoint is in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// The endpoint is in the pool.
    Stays,
    /// The endpoint has not joined the pool.
    Outside,
    /// The endpoint left the pool.
    Left,
}

/// Returns the identity of the process behind this instance.
pub(super) fn key(instance: &Instance) -> EndpointKey {
    (
        instance.namespace.clone(),
        instance.name.clone(),
        instance.generation.clone(),
        instance.address,
    )
}

// === impl UnconfirmedEndpoints ===

impl UnconfirmedEndpoints {
    /// Applies a set of instances from discovery. Returns the instances that belong in the pool,
    /// and the other instances.
    pub(super) fn select(
        &mut self,
        set: Vec<Instance>,
        members: &[PoolMember],
        now: WallAndMonotonic,
    ) -> (Vec<Instance>, Vec<Absentee>) {
        let mut before = std::mem::take(&mut self.known);
        if set.iter().all(|instance| instance.unconfirmed.is_none()) {
            self.set.clear();
            return (set, Vec::new());
        }
        let statuses: BTreeMap<EndpointKey, &MetricsStatus> = members
            .iter()
            .map(|m| (key(&m.instance), &m.metrics))
            .collect();
        let confirmed = set
            .iter()
            .filter(|instance| instance.unconfirmed.is_none())
            .count();
        let nearly_all = confirmed * CONFIRMED_ONE_IN <= set.len();
        self.set.clone_from(&set);
        let mut kept = Vec::new();
        let mut absent = Vec::new();
        for instance in set {
            if instance.unconfirmed.is_none() {
                kept.push(instance);
                continue;
            }
            let key = key(&instance);
            let status = statuses.get(&key).copied();
            let first = if status.is_some() {
                Standing::Stays
            } else {
                Standing::Outside
            };
            let doubt = before.remove(&key).unwrap_or(Doubt {
                since: now.instant,
                wall: now.wall,
                standing: first,
            });
            let standing = doubt.judge(status, nearly_all, now.instant);
            match standing {
                Standing::Stays => kept.push(instance),
                Standing::Outside | Standing::Left => {
                    absent.push(Absentee {
                        instance: Arc::new(instance),
                        absence: Absence::Unconfirmed,
                        since: doubt.wall,
                    });
                }
            }
            self.known.insert(key, Doubt { standing, ..doubt });
        }
        (kept, absent)
    }

    /// Returns the last set, if one of its endpoints must leave the pool now.
    pub(super) fn overdue(&self, members: &[PoolMember], now: Instant) -> Option<Vec<Instance>> {
        let leaves = |member: &PoolMember| {
            let doubt = self.known.get(&key(&member.instance));
            doubt.is_some_and(|doubt| {
                doubt.judge(Some(&member.metrics), true, now) == Standing::Left
            })
        };
        let any = members
            .iter()
            .filter(|member| member.instance.unconfirmed.is_some())
            .any(leaves);
        any.then(|| self.set.clone())
    }
}

// === impl Doubt ===

impl Doubt {
    fn judge(&self, status: Option<&MetricsStatus>, nearly_all: bool, now: Instant) -> Standing {
        let expired = now.saturating_duration_since(self.since) >= UNCONFIRMED_MAX;
        let silent = matches!(status, Some(MetricsStatus::Unknown(_)));
        match self.standing {
            Standing::Left => Standing::Left,
            _ if expired || silent => Standing::Left,
            Standing::Outside if nearly_all => Standing::Stays,
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use scheduler::{EndpointRef, Generation, Slot};

    use super::*;
    use crate::pool::member::member;

    fn instance(name: u16, unconfirmed: bool) -> Instance {
        let instance = Instance::new(
            format!("e{name}"),
            SocketAddr::from(([10, 0, 0, 1], name + 1)),
        );
        Instance {
            unconfirmed: unconfirmed.then(|| "node".into()),
            ..instance
        }
    }

    fn set(of: &[(u16, bool)]) -> Vec<Instance> {
        of.iter()
            .map(|&(name, unconfirmed)| instance(name, unconfirmed))
            .collect()
    }

    fn members(of: &[(u16, MetricsStatus)]) -> Vec<PoolMember> {
        let id = |name: u16| EndpointRef {
            slot: Slot(name),
            generation: Generation(1),
        };
        let make = |(name, metrics): &(u16, MetricsStatus)| {
            let made = member(
                id(*name),
                Arc::new(instance(*name, true)),
                1,
                WallAndMonotonic::read(),
            );
            PoolMember {
                metrics: metrics.clone(),
                ..made
            }
        };
        of.iter().map(make).collect()
    }

    fn fresh(names: impl IntoIterator<Item = u16>) -> Vec<PoolMember> {
        members(
            &names
                .into_iter()
                .map(|name| (name, MetricsStatus::Fresh))
                .collect::<Vec<_>>(),
        )
    }

    fn at(origin: Instant, elapsed: Duration) -> WallAndMonotonic {
        WallAndMonotonic {
            instant: origin + elapsed,
            wall: SystemTime::UNIX_EPOCH + elapsed,
        }
    }

    fn names(kept: &(Vec<Instance>, Vec<Absentee>)) -> String {
        kept.0
            .iter()
            .map(|instance| instance.name.as_str())
            .collect::<Vec<_>>()
            .join(" ")
    }

    fn unknown() -> MetricsStatus {
        MetricsStatus::Unknown("refused".to_owned())
    }

    #[test]
    fn endpoints_that_answer_stay_and_silent_ones_leave() {
        let origin = Instant::now();
        let mut doubts = UnconfirmedEndpoints::default();
        let all = set(&[(0, true), (1, true), (2, true)]);
        let failing = MetricsStatus::Failing("timeout".to_owned());
        let now = members(&[(0, MetricsStatus::Fresh), (1, failing), (2, unknown())]);
        let kept = doubts.select(all.clone(), &now, at(origin, Duration::ZERO));
        assert_eq!(names(&kept), "e0 e1", "one failed scrape is no proof");
        assert_eq!(
            (kept.1[0].absence, &*kept.1[0].instance.name),
            (Absence::Unconfirmed, "e2")
        );
        assert_eq!(
            names(&doubts.select(all, &fresh(0..2), at(origin, Duration::from_secs(1)))),
            "e0 e1",
            "e2 does not come back"
        );
        let recovered = doubts.select(
            set(&[(0, true), (1, true), (2, false)]),
            &fresh(0..2),
            at(origin, Duration::from_secs(2)),
        );
        assert_eq!(names(&recovered), "e0 e1 e2", "until it is confirmed");
    }

    #[test]
    fn an_endpoint_that_answers_leaves_at_the_limit() {
        let origin = Instant::now();
        let mut doubts = UnconfirmedEndpoints::default();
        let all = set(&[(0, true), (1, false)]);
        doubts.select(all.clone(), &fresh(0..2), at(origin, Duration::ZERO));
        let last = UNCONFIRMED_MAX - Duration::from_millis(1);
        assert_eq!(doubts.overdue(&fresh(0..2), origin + last), None);
        assert_eq!(
            names(&doubts.select(all.clone(), &fresh(0..2), at(origin, last))),
            "e0 e1",
            "a set does not restart the time"
        );
        assert_eq!(
            doubts.overdue(&fresh(0..2), origin + UNCONFIRMED_MAX),
            Some(all.clone())
        );
        assert_eq!(
            names(&doubts.select(all, &fresh(0..2), at(origin, UNCONFIRMED_MAX))),
            "e1"
        );
        doubts.select(set(&[(0, false)]), &[], at(origin, UNCONFIRMED_MAX));
        let again = doubts.select(set(&[(0, true)]), &fresh(0..1), at(origin, UNCONFIRMED_MAX));
        assert_eq!(
            names(&again),
            "e0",
            "confirmed in between: the time starts again"
        );
    }

    #[test]
    fn a_new_leader_takes_them_only_if_nearly_all_are_unconfirmed() {
        let now = at(Instant::now(), Duration::ZERO);
        let with_confirmed = |confirmed: u16| -> Vec<Instance> {
            (0..10).map(|i| instance(i, i >= confirmed)).collect()
        };
        let joined = |confirmed: u16| {
            UnconfirmedEndpoints::default()
                .select(with_confirmed(confirmed), &[], now)
                .0
                .len()
        };
        assert_eq!(
            [joined(0), joined(1), joined(2), joined(10)],
            [10, 10, 2, 10]
        );
        let mut doubts = UnconfirmedEndpoints::default();
        doubts.select(with_confirmed(5), &[], now);
        assert_eq!(
            doubts.select(with_confirmed(1), &[], now).0.len(),
            10,
            "the nodes are reported one after another"
        );
    }

    #[test]
    fn an_endpoint_that_discovery_has_no_more_leaves_at_once() {
        let now = at(Instant::now(), Duration::ZERO);
        let mut doubts = UnconfirmedEndpoints::default();
        doubts.select(set(&[(0, true), (1, true)]), &fresh(0..2), now);
        assert_eq!(
            names(&doubts.select(set(&[(0, true)]), &fresh(0..2), now)),
            "e0"
        );
        assert_eq!(
            names(&doubts.select(Vec::new(), &fresh(0..2), now)),
            "",
            "a pool scaled to zero is empty"
        );
        assert!(doubts.known.is_empty() && doubts.set.is_empty());
    }

    proptest! {
        #[test]
        fn laws_hold_for_any_order_of_events(
            steps in prop::collection::vec((prop::collection::btree_map(0u16..8, any::<bool>(), 0..8), 0u8..=255, 0u64..100_000), 1..40),
        ) {
            let origin = Instant::now();
            let mut doubts = UnconfirmedEndpoints::default();
            let mut elapsed = Duration::ZERO;
            let mut pool: Vec<u16> = Vec::new();
            let mut since: BTreeMap<u16, Duration> = BTreeMap::new();
            for (discovered, silent, wait) in steps {
                elapsed += Duration::from_millis(wait);
                let is_silent = |name: u16| silent >> name & 1 == 1;
                let status = |name: u16| if is_silent(name) { unknown() } else { MetricsStatus::Fresh };
                let members = members(&pool.iter().map(|&name| (name, status(name))).collect::<Vec<_>>());
                since.retain(|name, _| discovered.get(name) == Some(&true));
                for (&name, _) in discovered.iter().filter(|(_, unconfirmed)| **unconfirmed) {
                    since.entry(name).or_insert(elapsed);
                }
                let all: Vec<Instance> = discovered.iter().map(|(&name, &unconfirmed)| instance(name, unconfirmed)).collect();
                let (kept, absent) = doubts.select(all, &members, at(origin, elapsed));
                prop_assert_eq!(kept.len() + absent.len(), discovered.len(), "each endpoint is in one of them");
                let names: Vec<u16> = kept.iter().map(|i| i.address.port() - 1).collect();
                for (&name, &unconfirmed) in &discovered {
                    let is_in = names.contains(&name);
                    prop_assert!(unconfirmed || is_in, "a confirmed endpoint is in the pool");
                    let expired = unconfirmed && elapsed - since[&name] >= UNCONFIRMED_MAX;
                    prop_assert!(!(is_in && expired), "no endpoint stays longer than the limit");
                    let shown_dead = unconfirmed && pool.contains(&name) && is_silent(name);
                    prop_assert!(!(is_in && shown_dead), "no silent endpoint stays");
                    let serves = unconfirmed && pool.contains(&name) && !is_silent(name) && !expired;
                    prop_assert!(is_in || !serves, "an endpoint that answers stays");
                }
                pool = names;
            }
        }
    }
}
