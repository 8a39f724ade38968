//! Limits the memory that all streams together may hold.
//!
//! Every stream has a [`MemoryAccount`] of the bytes it holds: an unfinished message, a body that
//! waits for its last byte, answers that the proxy has not taken. The sum over all streams stays
//! within [`HELD_BYTES_MAX`], and a stream may hold at most a quarter of what the others leave. So
//! a few large bodies do not block all other requests: the more is held, the less a single stream
//! may add, and a small request still gets memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The most bytes that all streams hold together: 16 bodies of the longest kind (24 MiB). The
/// shipped Kubernetes manifest gives the daemon 1 GiB. Pools, scraping, EDS and the state streams
/// need up to a quarter of it, and ext_proc streams with their HTTP/2 buffers another quarter.
pub const HELD_BYTES_MAX: usize = 384 << 20;

/// A stream holds at most one part in this many of the bytes that the others leave. With no other
/// stream, a body of 24 MiB fits into its share.
const SHARE: usize = 4;

/// The number of bytes that all streams hold.
#[derive(Debug, Default)]
pub struct StreamMemory {
    used: AtomicUsize,
}

/// The number of bytes that one stream holds. Dropping the account releases them.
#[derive(Debug)]
pub struct MemoryAccount {
    memory: Arc<StreamMemory>,
    bytes: usize,
}

/// The error of a stream that would hold more than its share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryExceeded;

// === impl StreamMemory ===

impl StreamMemory {
    /// The number of bytes that are held now.
    #[must_use]
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Opens an account that holds nothing.
    #[must_use]
    pub fn account(self: &Arc<Self>) -> MemoryAccount {
        MemoryAccount {
            memory: Arc::clone(self),
            bytes: 0,
        }
    }
}

// === impl MemoryAccount ===

impl MemoryAccount {
    /// Sets the number of bytes that the stream holds.
    ///
    /// # Errors
    /// The number is larger than before and larger than the share. The account is unchanged then.
    pub fn hold(&mut self, bytes: usize) -> Result<(), MemoryExceeded> {
        if bytes <= self.bytes {
            self.record(bytes);
            return Ok(());
        }
        let had = self.bytes;
        let more = bytes - self.bytes;
        let grown = |held: usize| {
            let left_by_others = HELD_BYTES_MAX.saturating_sub(held - had);
            (bytes <= left_by_others / SHARE).then_some(held + more)
        };
        self.memory
            .used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, grown)
            .map_err(|_| MemoryExceeded)?;
        self.bytes = bytes;
        Ok(())
    }

    /// Sets the number of bytes that the stream holds, even beyond its share.
    pub fn record(&mut self, bytes: usize) {
        match bytes.checked_sub(self.bytes) {
            Some(0) => {}
            Some(more) => {
                self.memory.used.fetch_add(more, Ordering::Relaxed);
            }
            None => {
                self.memory
                    .used
                    .fetch_sub(self.bytes - bytes, Ordering::Relaxed);
            }
        }
        self.bytes = bytes;
    }
}

impl Drop for MemoryAccount {
    fn drop(&mut self) {
        self.record(0);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BODY: usize = 24 << 20;

    #[test]
    fn what_an_account_holds_is_given_back_when_it_is_dropped() {
        let memory = Arc::new(StreamMemory::default());
        let mut first = memory.account();
        let mut second = memory.account();
        assert_eq!(
            (first.hold(5), second.hold(7), first.hold(2)),
            (Ok(()), Ok(()), Ok(()))
        );
        assert_eq!(memory.used(), 9);
        drop(first);
        assert_eq!(memory.used(), 7);
        drop(second);
        assert_eq!(memory.used(), 0);
    }

    #[test]
    fn large_bodies_leave_room_for_small_ones() {
        let memory = Arc::new(StreamMemory::default());
        let mut accounts: Vec<MemoryAccount> = (0..60).map(|_| memory.account()).collect();
        let held = accounts
            .iter_mut()
            .filter_map(|account| account.hold(BODY).ok())
            .count();
        assert_eq!(held, 13, "of 60 bodies of 24 MiB");
        assert_eq!(
            memory.account().hold(1 << 20),
            Ok(()),
            "a prompt of a quarter of a million tokens"
        );
    }

    #[test]
    fn one_that_may_not_grow_keeps_what_it_had() {
        let memory = Arc::new(StreamMemory::default());
        let mut account = memory.account();
        assert_eq!(account.hold(HELD_BYTES_MAX / SHARE), Ok(()));
        assert_eq!(
            account.hold(HELD_BYTES_MAX / SHARE + 1),
            Err(MemoryExceeded)
        );
        assert_eq!(memory.used(), HELD_BYTES_MAX / SHARE);
    }

    proptest! {
        #[test]
        fn the_sum_is_bounded_and_exact(steps in prop::collection::vec((0_usize..8, 0_usize..HELD_BYTES_MAX), 0..100)) {
            let memory = Arc::new(StreamMemory::default());
            let mut accounts: Vec<MemoryAccount> = (0..8).map(|_| memory.account()).collect();
            for (index, bytes) in steps {
                let _ = accounts[index].hold(bytes);
                prop_assert!(memory.used() <= HELD_BYTES_MAX);
                prop_assert_eq!(memory.used(), accounts.iter().map(|account| account.bytes).sum::<usize>());
            }
            drop(accounts);
            prop_assert_eq!(memory.used(), 0);
        }
    }
}
