//! One run of the daemon: whether the daemon leads, and the numbers that it assigns.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use ring::hmac;
use scheduler::Version;
use tokio::sync::watch;
use tokio::time::Instant;

/// One run of the daemon, from start to stop: whether the daemon leads, and the numbers that it
/// assigns. Only [`crate::daemon`] begins and ends terms.
#[derive(Debug)]
pub struct DaemonLife {
    leadership: watch::Sender<Leadership>,
    lease: Mutex<LeaseProof>,
    sequence: AtomicU64,
    stream_id: AtomicU64,
}

/// The proof that no other daemon leads.
#[derive(Clone, Copy, Debug)]
enum LeaseProof {
    /// No lease is needed, because there is only one daemon.
    NotNeeded,
    /// The lease is needed. The value is the time when the last confirmed renewal began, or `None`
    /// before the first renewal.
    Renewed(Option<Instant>),
}

/// Whether the daemon leads, and what a leader decides for all proxies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leadership {
    /// Whether the daemon leads now.
    pub leads: bool,
    /// The newest term that the daemon knows: its own while it leads. The term never shrinks.
    pub term: u64,
    /// The secret behind each pool's key of the hashes of prompt blocks.
    pub hash_secret: u128,
}

/// Returns the wall clock, in ms since 1970.
pub(crate) fn unix_ms() -> u64 {
    let unix = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(unix.as_millis()).unwrap_or(u64::MAX)
}

// === impl DaemonLife ===

impl DaemonLife {
    /// Creates the life of a daemon that stands by after `term`.
    #[must_use]
    pub fn new(term: u64, hash_secret: u128) -> Self {
        Self {
            leadership: watch::Sender::new(Leadership {
                leads: false,
                term,
                hash_secret,
            }),
            lease: Mutex::new(LeaseProof::NotNeeded),
            sequence: AtomicU64::new(0),
            stream_id: AtomicU64::new(0),
        }
    }

    /// Returns a version newer than all earlier versions of this daemon.
    pub fn next_version(&self) -> Version {
        Version {
            term: self.term(),
            sequence: self.sequence.fetch_add(1, Ordering::Relaxed) + 1,
        }
    }

    pub fn next_stream_id(&self) -> u64 {
        self.stream_id.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Returns whether the daemon leads now.
    #[must_use]
    pub fn leads(&self) -> bool {
        self.leadership.borrow().leads
    }

    #[must_use]
    pub fn term(&self) -> u64 {
        self.leadership.borrow().term
    }

    #[must_use]
    pub fn hash_secret(&self) -> u128 {
        self.leadership.borrow().hash_secret
    }

    /// Returns the key of the hashes of prompt blocks in `pool`. All proxies of the pool have one
    /// key, so that they can share placements. The key does not work for the prompts of another
    /// pool.
    #[must_use]
    pub fn pool_hash_secret(&self, pool: &str) -> u128 {
        let key = hmac::Key::new(hmac::HMAC_SHA256, &self.hash_secret().to_be_bytes());
        let tag = hmac::sign(&key, pool.as_bytes());
        tag.as_ref()
            .first_chunk()
            .map_or(0, |half| u128::from_be_bytes(*half))
    }

    /// Requires renewals of a lease as proof that no other daemon leads, from now on.
    pub fn require_lease(&self) {
        *self.lease() = LeaseProof::Renewed(None);
    }

    /// Records a confirmed renewal of the lease that began at `began`.
    pub fn record_renewal(&self, began: Instant) {
        *self.lease() = LeaseProof::Renewed(Some(began));
    }

    /// Returns whether it is certain that no other daemon led at any time after `moment`. A process
    /// that was stopped for long may act as leader until its next renewal fails.
    #[must_use]
    pub fn is_sole_leader_since(&self, moment: Instant) -> bool {
        match *self.lease() {
            LeaseProof::NotNeeded => true,
            LeaseProof::Renewed(began) => began.is_some_and(|began| began > moment),
        }
    }

    fn lease(&self) -> MutexGuard<'_, LeaseProof> {
        self.lease.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a receiver, which wakes when the daemon begins or stops leading.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<Leadership> {
        self.leadership.subscribe()
    }

    /// Begins a term, which must be newer than all terms that the daemon knows.
    pub fn begin_term(&self, term: u64, hash_secret: u128) {
        self.leadership.send_modify(|now| {
            *now = Leadership {
                term,
                hash_secret,
                ..*now
            }
        });
    }

    /// Records whether the daemon leads.
    pub fn set_leads(&self, leads: bool) {
        self.leadership.send_modify(|now| now.leads = leads);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pool_has_its_own_key_which_is_the_same_at_every_start() {
        let life = DaemonLife::new(1, 99);
        let of_a = life.pool_hash_secret("a");
        assert_eq!(of_a, DaemonLife::new(7, 99).pool_hash_secret("a"));
        let others = [
            life.hash_secret(),
            life.pool_hash_secret("b"),
            life.pool_hash_secret(""),
            DaemonLife::new(1, 98).pool_hash_secret("a"),
        ];
        assert!(!others.contains(&of_a), "{of_a:x} {others:x?}");
    }
}
