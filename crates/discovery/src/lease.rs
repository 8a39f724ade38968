//! Leader election among several processes, by a lease that the leader renews. The timings are
//! those of Kubernetes' own controllers.
//!
//! ```text
//!            free, mine, or unchanged for LEASE_DURATION as seen from here
//!  standby ──────────────────────────────────────────────────────────────▶ leads ── renewed every RENEW_PERIOD
//!     ▲                                                                      │
//!     └── another holds it, or no renewal was confirmed for RENEW_DEADLINE ──┘
//! ```
//! Clocks are not compared. A candidate measures on its own monotonic clock how long the record has
//! not changed. A leader stops leading after [`RENEW_DEADLINE`] without a confirmed renewal, before
//! any candidate may take the lease. Writes are compare-and-swap, so only one of two candidates
//! that try at the same time succeeds. A leader that stops gracefully releases the lease, and
//! another process leads within [`STANDBY_PERIOD`]. After a leader that is killed, another process
//! leads within [`LEASE_DURATION`] and one [`STANDBY_PERIOD`], both lengthened by the jitter.

use std::time::Duration;

use futures::future::BoxFuture;
use tokio::sync::watch;
use tokio::time::Instant;

/// The time for which other processes respect a lease that is not renewed.
pub const LEASE_DURATION: Duration = Duration::from_secs(15);

/// The time for which the leader continues to lead without a confirmed renewal.
pub const RENEW_DEADLINE: Duration = Duration::from_secs(10);

/// The interval at which the leader renews the lease.
pub const RENEW_PERIOD: Duration = Duration::from_secs(2);

/// The interval at which a standby reads the lease. The interval is the longest part of a handover,
/// and a read costs little.
pub const STANDBY_PERIOD: Duration = Duration::from_secs(1);

/// The maximum time that one read and write may take together. Two such attempts fit into
/// [`RENEW_DEADLINE`].
const ATTEMPT_DEADLINE: Duration = Duration::from_secs(4);

/// A lease as read from the store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeaseRecord {
    /// The name of the holder; empty if the lease has no holder.
    pub holder: String,
    /// A version that changes with each write.
    pub version: String,
    /// The number of changes of the holder.
    pub transitions: u32,
}

/// The store of a lease.
pub trait LeaseStore: Send + Sync {
    /// Returns the current lease; `None` if there is none yet.
    fn read(&self) -> BoxFuture<'_, Result<Option<LeaseRecord>, String>>;

    /// Writes `holder` if the lease is still as `expected`. Returns the new lease, or `None` if
    /// another process was faster.
    fn write<'a>(
        &'a self,
        holder: &'a str,
        expected: Option<&'a LeaseRecord>,
    ) -> BoxFuture<'a, Result<Option<LeaseRecord>, String>>;
}

/// The state of one candidate. This type has no I/O and reads no clock.
#[derive(Debug)]
struct Election {
    me: String,
    /// The lease as last read, and when this process first saw it with this content.
    lease: Option<(LeaseRecord, Instant)>,
    /// The time when the last confirmed renewal began; `None` if this process does not lead.
    renewed: Option<Instant>,
}

// === impl Election ===

impl Election {
    fn new(me: String) -> Self {
        Self {
            me,
            lease: None,
            renewed: None,
        }
    }

    /// Records the lease as read from the store. Returns whether this process may write the lease.
    fn read(&mut self, found: Option<&LeaseRecord>, now: Instant) -> bool {
        let Some(found) = found else {
            self.lease = None;
            self.renewed = None;
            return true;
        };
        if self.lease.as_ref().is_none_or(|(seen, _)| seen != found) {
            self.lease = Some((found.clone(), now));
        }
        let mine = found.holder == self.me;
        if !mine {
            self.renewed = None;
        }
        let lapsed = self
            .lease
            .as_ref()
            .is_some_and(|(_, since)| now.saturating_duration_since(*since) >= LEASE_DURATION);
        mine || found.holder.is_empty() || lapsed
    }

    /// Records the result of a write that began at `began`.
    fn written(&mut self, now_is: Option<LeaseRecord>, began: Instant) {
        if let Some(seen) = now_is {
            self.lease = Some((seen, began));
            self.renewed = Some(began);
        }
    }

    /// Returns the time to read the lease again: after its interval, which `jitter` varies. If the
    /// lease of another process expires earlier, a standby reads it exactly then.
    fn next_attempt(&self, began: Instant, jitter: f64) -> Instant {
        if self.renewed.is_some() {
            return began + RENEW_PERIOD.mul_f64(1.0 + jitter);
        }
        let next = began + STANDBY_PERIOD.mul_f64(1.0 + jitter);
        let lapses = self
            .lease
            .as_ref()
            .map(|(_, since)| *since + LEASE_DURATION);
        lapses
            .filter(|at| *at > began)
            .map_or(next, |at| at.min(next))
    }

    /// Returns the time until which this process leads without another renewal.
    fn leads_until(&self) -> Option<Instant> {
        self.renewed.map(|at| at + RENEW_DEADLINE)
    }
}

/// Campaigns for the lease as `me` until `stop`, then releases it. `leads` is true while `me` holds
/// the lease.
///
/// `me` must be unique to this process, because two processes with one name would both lead. Only
/// `stop` ends the campaign. `failed` receives the errors of the store. `renewed` receives the time
/// at which each confirmed renewal began.
pub async fn campaign(
    store: &dyn LeaseStore,
    me: String,
    leads: &watch::Sender<bool>,
    stop: impl Future<Output = ()>,
    mut renewed: impl FnMut(Instant),
    mut failed: impl FnMut(String),
) {
    let mut election = Election::new(me);
    tokio::pin!(stop);
    'wanted: loop {
        let began = Instant::now();
        // If the store does not answer, the attempt ends in time for the leader to stop leading.
        let until = election
            .leads_until()
            .filter(|until| *until > began)
            .map_or(began + ATTEMPT_DEADLINE, |u| {
                u.min(began + ATTEMPT_DEADLINE)
            });
        let done = tokio::select! {
            done = tokio::time::timeout_at(until, attempt(store, &mut election)) => done,
            () = &mut stop => break 'wanted,
        };
        if let Err(why) = done.unwrap_or_else(|_| Err("no answer in time".to_owned())) {
            failed(why);
        }
        if let Some(at) = election.renewed {
            renewed(at);
        }
        let next = election.next_attempt(began, crate::registry::chance() / 5.0);
        let over = election
            .leads_until()
            .filter(|until| *until < next)
            .unwrap_or(next);
        for at in [Instant::now(), over] {
            tokio::select! {
                () = tokio::time::sleep_until(at) => {}
                () = &mut stop => break 'wanted,
            }
            let now = election
                .leads_until()
                .is_some_and(|until| Instant::now() < until);
            leads.send_if_modified(|led| std::mem::replace(led, now) != now);
        }
    }
    if leads.send_replace(false)
        && let Some((seen, _)) = &election.lease
    {
        let _ = tokio::time::timeout(ATTEMPT_DEADLINE, store.write("", Some(seen))).await; // otherwise it expires
    }
}

async fn attempt(store: &dyn LeaseStore, election: &mut Election) -> Result<(), String> {
    let found = store.read().await?;
    if election.read(found.as_ref(), Instant::now()) {
        let began = Instant::now();
        let me = election.me.clone();
        election.written(store.write(&me, found.as_ref()).await?, began);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// A store that can be cut off from each of its users.
    #[derive(Clone, Default)]
    struct FakeLeaseStore {
        lease: Arc<Mutex<(Option<LeaseRecord>, u64)>>,
        down: Arc<Mutex<bool>>,
    }

    impl LeaseStore for FakeLeaseStore {
        fn read(&self) -> BoxFuture<'_, Result<Option<LeaseRecord>, String>> {
            Box::pin(async move {
                if *self.down.lock().unwrap() {
                    std::future::pending::<()>().await;
                }
                Ok(self.lease.lock().unwrap().0.clone())
            })
        }

        fn write<'a>(
            &'a self,
            holder: &'a str,
            expected: Option<&'a LeaseRecord>,
        ) -> BoxFuture<'a, Result<Option<LeaseRecord>, String>> {
            Box::pin(async move {
                if *self.down.lock().unwrap() {
                    return Err("down".to_owned());
                }
                let mut lease = self.lease.lock().unwrap();
                if lease.0.as_ref() != expected {
                    return Ok(None);
                }
                lease.1 += 1;
                lease.0 = Some(LeaseRecord {
                    holder: holder.to_owned(),
                    version: lease.1.to_string(),
                    transitions: 0,
                });
                Ok(lease.0.clone())
            })
        }
    }

    struct LeaseCandidate {
        leads: watch::Receiver<bool>,
        down: Arc<Mutex<bool>>,
        stop: Option<tokio::sync::oneshot::Sender<()>>,
        task: tokio::task::JoinHandle<()>,
    }

    fn candidate(shelf: &FakeLeaseStore, me: &str) -> LeaseCandidate {
        let shelf = FakeLeaseStore {
            lease: Arc::clone(&shelf.lease),
            down: Arc::default(),
        };
        let (leads, follow) = watch::channel(false);
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let me = me.to_owned();
        let down = Arc::clone(&shelf.down);
        let task = tokio::spawn(async move {
            let stopped = async { drop(stopped.await) };
            campaign(&shelf, me, &leads, stopped, |_| {}, |_| {}).await;
        });
        LeaseCandidate {
            leads: follow,
            down,
            stop: Some(stop),
            task,
        }
    }

    async fn after(elapsed: Duration, all: &[&LeaseCandidate]) -> Vec<bool> {
        let end = Instant::now() + elapsed;
        while Instant::now() < end {
            tokio::time::sleep(Duration::from_millis(20)).await;
            assert!(
                all.iter().filter(|c| *c.leads.borrow()).count() <= 1,
                "two lead"
            );
        }
        all.iter().map(|c| *c.leads.borrow()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn one_leads_and_another_when_it_is_cut_off_never_both() {
        let shelf = FakeLeaseStore::default();
        let a = candidate(&shelf, "a");
        assert_eq!(after(RENEW_PERIOD, &[&a]).await, [true]);
        let b = candidate(&shelf, "b");
        assert_eq!(after(LEASE_DURATION * 4, &[&a, &b]).await, [true, false]);
        *a.down.lock().unwrap() = true;
        assert_eq!(
            after(RENEW_DEADLINE - RENEW_PERIOD * 2, &[&a, &b]).await,
            [true, false],
            "the leader leads on until its deadline"
        );
        assert_eq!(
            after(RENEW_PERIOD * 2, &[&a, &b]).await,
            [false, false],
            "then it gives up by itself"
        );
        assert_eq!(
            after(
                LEASE_DURATION - RENEW_DEADLINE + RENEW_PERIOD * 2,
                &[&a, &b]
            )
            .await,
            [false, true]
        );
        *a.down.lock().unwrap() = false;
        assert_eq!(
            after(LEASE_DURATION * 2, &[&a, &b]).await,
            [false, true],
            "when it is back, it stands by"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn stopped_in_good_order_it_is_given_back() {
        let shelf = FakeLeaseStore::default();
        let mut a = candidate(&shelf, "a");
        after(RENEW_PERIOD, &[&a]).await;
        let b = candidate(&shelf, "b");
        after(RENEW_PERIOD, &[&a, &b]).await;
        a.stop.take().unwrap().send(()).unwrap();
        assert_eq!(
            after(STANDBY_PERIOD.mul_f64(1.25), &[&a, &b]).await,
            [false, true]
        );
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_kill_another_leads_within_the_duration_and_one_period() {
        for round in 0..20 {
            let shelf = FakeLeaseStore::default();
            let a = candidate(&shelf, "a");
            after(RENEW_PERIOD, &[&a]).await;
            let b = candidate(&shelf, "b");
            after(RENEW_PERIOD + Duration::from_millis(97 * round), &[&a, &b]).await;
            a.task.abort();
            let began = Instant::now();
            while !*b.leads.borrow() {
                after(Duration::from_millis(20), &[&b]).await;
            }
            let elapsed = began.elapsed();
            assert!(
                elapsed <= LEASE_DURATION + STANDBY_PERIOD.mul_f64(1.25),
                "round {round}: {elapsed:?}"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn during_an_outage_of_the_store_no_candidate_leads_and_after_it_one() {
        let shelf = FakeLeaseStore::default();
        let all = ["a", "b", "c"].map(|me| candidate(&shelf, me));
        let all: Vec<&LeaseCandidate> = all.iter().collect();
        after(RENEW_PERIOD * 2, &all).await;
        all.iter().for_each(|c| *c.down.lock().unwrap() = true);
        assert_eq!(after(LEASE_DURATION * 2, &all).await, [false; 3]);
        all.iter().for_each(|c| *c.down.lock().unwrap() = false);
        assert_eq!(
            after(LEASE_DURATION * 2, &all)
                .await
                .iter()
                .filter(|leads| **leads)
                .count(),
            1
        );
    }
}
