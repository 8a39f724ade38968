//! Elects the leader of the process. The leader is the VM that holds the daemon's stream and writes
//! the daemon's messages into shared data.
//!
//! The lease is one shared value, a [`LeaseValue`]. VMs change this value only by compare-and-swap,
//! and its times are those of the process's monotonic clock. Every change of the holder raises the
//! epoch, and everything that a leader writes names the leader's epoch. So a leader that was
//! stalled for longer than its lease cannot undo newer writes.
//!
//! No host call reports which VM belongs to the main thread. The VM of the main thread never gets a
//! request. So a VM that has served a request leaves the lease to VMs that have served no request,
//! and a leader that serves requests hands over to a VM that serves none.

use exchange::Timestamp;
use proto::shared_data::LeaseValue;

use crate::host::{Host, Result, WriteCondition};

const KEY: &str = "switchpoint/1/leader";
/// The time for which a VM that serves requests leaves a free lease to the VMs that serve none, in
/// ms: a few ticks.
const DEFER_MS: u64 = 500;
/// The time for which a leader leads before it hands over, in ms. Without this time, the lease
/// would move often during a busy start.
const DWELL_MS: u64 = 10_000;
/// The maximum number of attempts at a compare-and-swap. An attempt fails only if another VM has
/// just changed the lease, so a few attempts are enough.
const TRIES_MAX: usize = 4;

/// A VM's part in the election of the leader.
#[derive(Debug)]
pub struct LeaderElection {
    vm: u64,
    held_lease: Option<HeldLease>,
    free_since: Option<Timestamp>,
}

/// The lease that this VM holds.
#[derive(Clone, Copy, Debug)]
struct HeldLease {
    epoch: u64,
    since: Timestamp,
    until: Timestamp,
}

// === impl LeaderElection ===

impl LeaderElection {
    /// Creates the state with which the VM `vm` takes part in the election.
    #[must_use]
    pub fn new(vm: u64) -> Self {
        Self {
            vm,
            held_lease: None,
            free_since: None,
        }
    }

    /// Tries to take or renew the lease, which lasts `term_ms` without renewal. `serves` says
    /// whether this VM has ever served a request. Returns the epoch while this VM leads.
    pub fn poll<H: Host>(
        &mut self,
        host: &H,
        serves: bool,
        term_ms: u64,
        now: Timestamp,
    ) -> Option<u64> {
        match self.held_lease {
            // More than two thirds of the term are left, so this VM need not renew the lease, and
            // no other VM may take the lease.
            Some(held) if held.until.ms_since(now) > term_ms.saturating_mul(2) / 3 => {
                Some(held.epoch)
            }
            _ => self.contend(host, serves, term_ms, now),
        }
    }

    /// Whether this VM leads at `now`.
    #[must_use]
    pub fn holds(&self, now: Timestamp) -> bool {
        self.held_lease.is_some_and(|held| held.until > now)
    }

    /// Whether this VM has led for long enough to hand over.
    #[must_use]
    pub fn can_hand_over(&self, now: Timestamp) -> bool {
        self.held_lease
            .is_some_and(|held| now.ms_since(held.since) >= DWELL_MS)
    }

    /// Makes `successor` the leader, if this VM leads.
    pub fn hand_over<H: Host>(&mut self, host: &H, successor: u64, term_ms: u64, now: Timestamp) {
        let until = now.plus_ms(term_ms);
        self.give_up(host, |record| LeaseValue {
            epoch: record.epoch.saturating_add(1),
            holder: successor,
            until,
        });
    }

    /// Releases the lease, if this VM holds the lease.
    pub fn resign<H: Host>(&mut self, host: &H) {
        self.give_up(host, |record| LeaseValue {
            until: Timestamp(0),
            ..record
        });
    }

    fn give_up<H: Host>(&mut self, host: &H, next: impl Fn(LeaseValue) -> LeaseValue) {
        if self.held_lease.take().is_none() {
            return;
        }
        for _ in 0..TRIES_MAX {
            match load(host) {
                Ok((record, expect)) if record.holder == self.vm => {
                    if store(host, next(record), expect).is_ok() {
                        return;
                    }
                }
                _ => return,
            }
        }
    }

    fn contend<H: Host>(
        &mut self,
        host: &H,
        serves: bool,
        term_ms: u64,
        now: Timestamp,
    ) -> Option<u64> {
        for _ in 0..TRIES_MAX {
            let Ok((record, expect)) = load(host) else {
                break;
            };
            let mine = record.holder == self.vm && record.until > now;
            if !mine && !self.can_take(record, serves, now) {
                self.held_lease = None;
                return None;
            }
            let epoch = if mine {
                record.epoch
            } else {
                record.epoch.saturating_add(1)
            };
            let until = now.plus_ms(term_ms);
            if store(
                host,
                LeaseValue {
                    epoch,
                    holder: self.vm,
                    until,
                },
                expect,
            )
            .is_ok()
            {
                let since = self
                    .held_lease
                    .filter(|held| held.epoch == epoch)
                    .map_or(now, |held| held.since);
                self.held_lease = Some(HeldLease {
                    epoch,
                    since,
                    until,
                });
                self.free_since = None;
                return Some(epoch);
            }
        }
        // The host refused the call. If this VM holds the lease, the lease stays valid until it
        // expires.
        self.held_lease
            .filter(|held| held.until > now)
            .map(|held| held.epoch)
    }

    /// Whether this VM may take the lease `record` now.
    fn can_take(&mut self, record: LeaseValue, serves: bool, now: Timestamp) -> bool {
        if record.until > now {
            self.free_since = None;
            return false;
        }
        let since = *self.free_since.get_or_insert(now);
        !serves || now.ms_since(since) >= DEFER_MS
    }
}

// === the shared value ===

fn load<H: Host>(host: &H) -> Result<(LeaseValue, WriteCondition)> {
    Ok(match host.shared(KEY)? {
        None => (LeaseValue::default(), WriteCondition::Absent),
        Some(shared) => (
            LeaseValue::from_bytes(&shared.bytes).unwrap_or_default(),
            WriteCondition::Token(shared.token),
        ),
    })
}

fn store<H: Host>(host: &H, lease: LeaseValue, expect: WriteCondition) -> Result<()> {
    host.share(KEY, &lease.to_bytes(), expect)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::FakeHost;

    const TERM: u64 = 3_000;

    fn at(ms: u64) -> Timestamp {
        Timestamp(0).plus_ms(1_000_000 + ms)
    }

    #[test]
    fn one_vm_leads_and_renews() {
        let host = FakeHost::new();
        let mut a = LeaderElection::new(1);
        let mut b = LeaderElection::new(2);
        assert_eq!(a.poll(&host, false, TERM, at(0)), Some(1));
        for ms in (0..60_000).step_by(100) {
            assert_eq!(a.poll(&host, false, TERM, at(ms)), Some(1), "{ms}");
            assert_eq!(b.poll(&host, false, TERM, at(ms)), None, "{ms}");
        }
    }

    #[test]
    fn a_dead_leader_is_replaced_within_the_lease_and_cannot_come_back() {
        let host = FakeHost::new();
        let mut a = LeaderElection::new(1);
        let mut b = LeaderElection::new(2);
        assert_eq!(a.poll(&host, false, TERM, at(0)), Some(1));
        assert_eq!(b.poll(&host, false, TERM, at(2_999)), None);
        assert_eq!(b.poll(&host, false, TERM, at(3_000)), Some(2));
        assert!(
            !a.holds(at(3_000)),
            "the old leader sees it by its own clock"
        );
        assert_eq!(a.poll(&host, false, TERM, at(3_100)), None);
    }

    #[test]
    fn of_two_that_race_one_wins() {
        let host = FakeHost::new();
        let mut a = LeaderElection::new(1);
        let mut b = LeaderElection::new(2);
        host.before_next_share({
            let host = host.clone();
            move || assert_eq!(b.poll(&host, false, TERM, at(0)), Some(1))
        });
        assert_eq!(a.poll(&host, false, TERM, at(0)), None);
    }

    #[test]
    fn a_vm_that_serves_defers_but_not_for_ever() {
        let host = FakeHost::new();
        let mut worker = LeaderElection::new(1);
        let mut main = LeaderElection::new(2);
        assert_eq!(worker.poll(&host, true, TERM, at(0)), None);
        assert_eq!(worker.poll(&host, true, TERM, at(499)), None);
        assert_eq!(
            worker.poll(&host, true, TERM, at(500)),
            Some(1),
            "no other VM took it"
        );
        worker.resign(&host);
        assert_eq!(main.poll(&host, false, TERM, at(501)), Some(2));
    }

    #[test]
    fn handing_over_names_the_next_leader() {
        let host = FakeHost::new();
        let mut worker = LeaderElection::new(1);
        let mut main = LeaderElection::new(2);
        let mut other = LeaderElection::new(3);
        assert_eq!(worker.poll(&host, false, TERM, at(0)), Some(1));
        assert!(!worker.can_hand_over(at(9_999)) && worker.can_hand_over(at(10_000)));
        worker.hand_over(&host, 2, TERM, at(10_000));
        assert!(!worker.holds(at(10_000)));
        assert_eq!(other.poll(&host, false, TERM, at(10_001)), None);
        assert_eq!(main.poll(&host, false, TERM, at(10_001)), Some(2));
        assert_eq!(worker.poll(&host, true, TERM, at(10_002)), None);
    }

    #[test]
    fn resigning_frees_nothing_that_is_not_ours() {
        let host = FakeHost::new();
        let mut a = LeaderElection::new(1);
        let mut b = LeaderElection::new(2);
        assert_eq!(a.poll(&host, false, TERM, at(0)), Some(1));
        assert_eq!(b.poll(&host, false, TERM, at(4_000)), Some(2));
        a.resign(&host);
        assert_eq!(a.poll(&host, false, TERM, at(4_001)), None);
        assert_eq!(b.poll(&host, false, TERM, at(6_500)), Some(2));
    }

    #[test]
    fn garbage_in_the_value_is_a_free_lease() {
        let host = FakeHost::new();
        host.share(KEY, b"not ours", WriteCondition::Any).unwrap();
        assert_eq!(
            LeaderElection::new(1).poll(&host, false, TERM, at(0)),
            Some(1)
        );
    }
}
