//! The lease of the leader, and the records of leaders about messages that crash a VM.

use scheduler::Timestamp;

use crate::words::{self, WORD};

/// The maximum number of digests of a [`CrashRecord`]. A few are enough: each digest represents a
/// lost VM, and a daemon rarely sends so many different messages that crash VMs.
pub const CRASH_DIGESTS_MAX: usize = 8;

/// The lease. The bytes have the epoch, the holder and the expiry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeaseValue {
    /// The number of the lease's holder, which grows by one with each change of the holder.
    pub epoch: u64,
    /// The VM that leads; 0 before the first leader.
    pub holder: u64,
    /// The time when the lease expires without renewal.
    pub until: Timestamp,
}

/// The mark that a leader sets while it decodes a message: the VM and the digest of the message.
/// The bytes are empty while no leader decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodingMark {
    pub vm: u64,
    pub digest: u64,
}

/// The record of messages that crashed a VM. The bytes have the time of the last loss, then the
/// digests, newest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CrashRecord {
    /// The time when the last VM was lost.
    pub lost_at: Timestamp,
    /// The digests of the messages, newest first, at most [`CRASH_DIGESTS_MAX`].
    pub digests: Vec<u64>,
}

// === impl LeaseValue ===

impl LeaseValue {
    /// Decodes a lease; `None` when the bytes are invalid.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        words::read(bytes).map(|[epoch, holder, until]| Self {
            epoch,
            holder,
            until: Timestamp(until),
        })
    }

    #[must_use]
    pub fn to_bytes(self) -> Vec<u8> {
        words::write(&[self.epoch, self.holder, self.until.0], &[])
    }
}

// === impl DecodingMark ===

impl DecodingMark {
    /// Decodes a mark; `None` when the bytes are invalid or empty.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        words::read(bytes).map(|[vm, digest]| Self { vm, digest })
    }

    #[must_use]
    pub fn to_bytes(self) -> Vec<u8> {
        words::write(&[self.vm, self.digest], &[])
    }
}

// === impl CrashRecord ===

impl CrashRecord {
    /// Decodes a record. Invalid bytes give a record without losses. Digests beyond
    /// [`CRASH_DIGESTS_MAX`] are ignored.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut words = bytes
            .as_chunks::<WORD>()
            .0
            .iter()
            .map(|word| u64::from_le_bytes(*word));
        let Some(lost_at) = words.next() else {
            return Self::default();
        };
        Self {
            lost_at: Timestamp(lost_at),
            digests: words.take(CRASH_DIGESTS_MAX).collect(),
        }
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let words: Vec<u64> = std::iter::once(self.lost_at.0)
            .chain(self.digests.iter().copied())
            .collect();
        words::write(&words, &[])
    }
}
