//! Panics of the module: none leaves it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// After this many panics the pools are made again. One panic may be a request's; three may mean
/// that a pool is damaged.
const REBUILD_AFTER: u64 = 3;

/// The panics that the metrics do not contain yet.
static UNCOUNTED: AtomicU64 = AtomicU64::new(0);
/// The panics since the pools were last made again.
static SINCE_REBUILD: AtomicU64 = AtomicU64::new(0);

/// Calls `act`. Returns `None` if it panics.
///
/// The work of `act` may be left half done. So a stream does nothing more except end after one of
/// its hooks panicked, and the pools are replaced after [`REBUILD_AFTER`] panics.
pub(crate) fn caught<R>(act: impl FnOnce() -> R) -> Option<R> {
    match catch_unwind(AssertUnwindSafe(act)) {
        Ok(result) => Some(result),
        Err(payload) => {
            // Dropping it could panic too.
            std::mem::forget(payload);
            UNCOUNTED.fetch_add(1, Ordering::Relaxed);
            SINCE_REBUILD.fetch_add(1, Ordering::Relaxed);
            None
        }
    }
}

/// Returns the panics since the last call.
pub(crate) fn take_count() -> u64 {
    UNCOUNTED.swap(0, Ordering::Relaxed)
}

/// Whether the pools must be made again. Returns true once.
pub(crate) fn is_rebuild_due() -> bool {
    let is_due = SINCE_REBUILD.load(Ordering::Relaxed) >= REBUILD_AFTER;
    if is_due {
        SINCE_REBUILD.store(0, Ordering::Relaxed);
    }
    is_due
}

/// Locks `mutex`, also if a thread panicked while it held the lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_caught_and_leaves_a_lock_usable() {
        let mutex = Mutex::new(1);
        let outcome = caught(|| {
            let _held = lock(&mutex);
            panic!("a test");
        });
        assert_eq!(outcome, None::<()>);
        assert_eq!(*lock(&mutex), 1);
        assert_eq!(caught(|| 2), Some(2));
    }
}
