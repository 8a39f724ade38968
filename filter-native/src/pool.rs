//! One pool, which all workers of the process share behind one lock.
//!
//! The lock is held for one step of one exchange, some µs, and while a message of the daemon is
//! applied. Bodies are parsed and hashed outside of it.

mod held_streams;
mod process_peers;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Instant;

use exchange::{ManagedPool, Timestamp};
use front::counter_rows;
use pool_state::{
    Applied, AppliedVersions, CountHistogram, DURATION_BOUNDS_MS, DaemonUpdate, EncodedObservation,
};
use prost::Message as _;
use proto::state::{self, daemon_message};
use scheduler::Version;

use self::held_streams::HeldStreams;
use self::process_peers::ProcessPeers;
use crate::panics::lock;

/// The time that threads waited for locks of pools and that the metrics do not contain yet, in ns.
static LOCK_WAIT_NS: AtomicU64 = AtomicU64::new(0);

pub(crate) struct NativePool {
    /// The daemon's name of the pool.
    pub(crate) name: Box<str>,
    state: Mutex<NativePoolState>,
    /// Times of picks, in µs. They have a lock of their own, so that a pick holds the pool's lock
    /// only once.
    pick_us: Mutex<CountHistogram>,
    has_state: AtomicBool,
}

/// The part of a pool that the lock protects.
pub(crate) struct NativePoolState {
    pub(crate) pool: ManagedPool,
    applied: AppliedVersions,
    peers: ProcessPeers,
    pub(crate) held: HeldStreams,
    /// The learned models in force, as the daemon sent them.
    models: Vec<u8>,
}

/// What became of a message.
#[derive(Debug)]
pub(crate) enum Applying {
    Done(Applied),
    /// The same or a newer state is in force already.
    InForce,
    /// A pool update is older than this version, which is in force.
    Older(Version),
}

/// How often the main thread must look at a pool.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PoolActivity {
    pub(crate) has_peers: bool,
    pub(crate) holds: bool,
}

/// Returns the time that threads waited for locks of pools since the last call, in µs.
pub(crate) fn take_lock_wait_us() -> u64 {
    let ns = LOCK_WAIT_NS.load(Ordering::Relaxed);
    // The rest below a µs stays for the next call.
    let us = ns / 1_000;
    LOCK_WAIT_NS.fetch_sub(us.saturating_mul(1_000), Ordering::Relaxed);
    us
}

// === impl NativePool ===

impl NativePool {
    pub(crate) fn new(name: &str, seed: u64) -> Self {
        Self {
            name: name.into(),
            state: Mutex::new(NativePoolState {
                pool: ManagedPool::new(seed, 0),
                applied: AppliedVersions::default(),
                peers: ProcessPeers::default(),
                held: HeldStreams::default(),
                models: Vec::new(),
            }),
            pick_us: Mutex::default(),
            has_state: AtomicBool::new(false),
        }
    }

    /// Locks the pool for one step, and measures the wait.
    pub(crate) fn lock(&self) -> MutexGuard<'_, NativePoolState> {
        match self.state.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                let began = Instant::now();
                let guard = self.state.lock().unwrap_or_else(PoisonError::into_inner);
                let ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
                LOCK_WAIT_NS.fetch_add(ns, Ordering::Relaxed);
                guard
            }
        }
    }

    pub(crate) fn has_state(&self) -> bool {
        self.has_state.load(Ordering::Acquire)
    }

    /// Records that a pick took `us` microseconds.
    #[expect(clippy::cast_precision_loss, reason = "a pick is far below 2^52 µs")]
    pub(crate) fn record_pick_time(&self, us: u64) {
        lock(&self.pick_us).record(us as f64, &DURATION_BOUNDS_MS);
    }

    /// Applies a decoded message, whose bytes are `message`, completely or not at all.
    pub(crate) fn apply(&self, update: DaemonUpdate, message: &[u8], now: Timestamp) -> Applying {
        let mut state = self.lock();
        let NativePoolState {
            pool,
            applied,
            peers,
            models,
            ..
        } = &mut *state;
        match &update {
            DaemonUpdate::PoolUpdate(update) if self.has_state() => {
                let held = applied.pool_update();
                if update.snapshot.version() < held {
                    return Applying::Older(held);
                }
                if update.snapshot.version() == held {
                    return Applying::InForce;
                }
            }
            DaemonUpdate::Metrics { sequence, .. } if *sequence <= applied.metrics_sequence() => {
                return Applying::InForce;
            }
            DaemonUpdate::Learned(learned) if learned.version <= applied.models() => {
                return Applying::InForce;
            }
            DaemonUpdate::Learned(_) => *models = message.to_vec(),
            _ => {}
        }
        let outcome = applied.apply(pool, update, now);
        if outcome == Applied::PoolUpdate {
            peers.recount(pool);
            self.has_state.store(true, Ordering::Release);
        }
        state.release_next(now);
        Applying::Done(outcome)
    }

    /// Receives the load and placements of the other proxies. Returns the delay of this proxy's
    /// reports in µs, if the message shows the delay.
    pub(crate) fn receive_peers(&self, message: state::PeerLoad, now: Timestamp) -> Option<u32> {
        let mut state = self.lock();
        let NativePoolState { pool, peers, .. } = &mut *state;
        let delay_us = peers.receive(pool, message, now);
        state.release_next(now);
        delay_us
    }

    /// Does the work of a tick. A complete tick, every 100 ms, also does the housekeeping.
    pub(crate) fn tick(&self, is_complete: bool, shares: bool, now: Timestamp) -> PoolActivity {
        let mut state = self.lock();
        let NativePoolState {
            pool,
            applied,
            peers,
            held,
            ..
        } = &mut *state;
        if is_complete {
            pool.tick(now);
            held.forget_missed();
            if shares {
                peers.join();
            }
        }
        peers.tick(pool, applied.metrics_at(), is_complete, now);
        let activity = PoolActivity {
            has_peers: peers.has_peers(),
            holds: pool.queues().queued() > 0,
        };
        state.release_next(now);
        activity
    }

    /// Returns what the daemon must hear now: observations of ended requests, and changes of load
    /// for other proxies.
    pub(crate) fn news(
        &self,
        vm: u64,
        now: Timestamp,
    ) -> (Option<state::Observations>, Option<state::LoadReport>) {
        let mut state = self.lock();
        let NativePoolState { pool, peers, .. } = &mut *state;
        let (first, rows) = pool.take_observations();
        let report = peers.next_report(&self.name, pool, now);
        drop(state);
        let rows: Vec<u8> = rows.iter().flat_map(EncodedObservation::to_bytes).collect();
        let observations = (!rows.is_empty()).then(|| state::Observations {
            pool: self.name.to_string(),
            vm_id: vm,
            first,
            rows,
        });
        (observations, report)
    }

    /// Returns the row of counters for the daemon.
    pub(crate) fn counters(&self, vm: u64) -> Vec<u8> {
        let pick_us = lock(&self.pick_us).clone();
        let mut state = self.lock();
        let decision = state.pool.take_sample();
        let version = state.applied.pool_update();
        let row = state::VmCounters {
            decision,
            ..counter_rows::row(&self.name, vm, version, &state.pool, &pick_us)
        };
        drop(state);
        row.encode_to_vec()
    }

    /// Returns the learned models in force, in the form in which they arrived.
    pub(crate) fn models(&self) -> Option<state::LearnedModels> {
        let message = self.lock().models.clone();
        match proto::daemon_message(&message).ok()?.message? {
            daemon_message::Message::LearnedModels(models) => Some(models),
            _ => None,
        }
    }

    /// Returns the number of endpoints, and the version and the time of the state.
    pub(crate) fn summary(&self) -> (usize, Version, Option<Timestamp>) {
        let state = self.lock();
        let endpoints = state.pool.snapshot().map_or(0, |s| s.endpoints().len());
        let applied = &state.applied;
        (endpoints, applied.pool_update(), applied.metrics_at())
    }
}

// === impl NativePoolState ===

impl AsRef<ManagedPool> for NativePoolState {
    fn as_ref(&self) -> &ManagedPool {
        &self.pool
    }
}

impl NativePoolState {
    /// Wakes the next held request that may have room now. The woken stream wakes the next one, so
    /// that the picks have the order of the queues.
    pub(crate) fn release_next(&mut self, now: Timestamp) {
        while let Some(number) = self.pool.next_due(now) {
            if self.held.wake(number) {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_for_a_lock_is_counted() {
        take_lock_wait_us();
        let pool = NativePool::new("waited", 1);
        std::thread::scope(|scope| {
            let held = pool.lock();
            let waiter = scope.spawn(|| drop(pool.lock()));
            let began = Instant::now();
            while began.elapsed().as_millis() < 20 {
                std::thread::yield_now();
            }
            drop(held);
            waiter.join().unwrap();
        });
        // Other tests may wait too, but none waits less than nothing.
        assert!(take_lock_wait_us() > 0);
    }
}
