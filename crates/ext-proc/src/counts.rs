//! Counters of ext_proc streams.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::memory::StreamMemory;

/// The number of streams, and the memory that they hold.
#[derive(Debug, Default)]
pub struct StreamCounts {
    begun: AtomicU64,
    ended: AtomicU64,
    refused: AtomicU64,
    memory: Arc<StreamMemory>,
}

// === impl StreamCounts ===

impl StreamCounts {
    /// Counts one more stream and returns its number.
    pub(super) fn begin(&self) -> u64 {
        self.begun.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn end(&self) {
        self.ended.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn refuse(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    #[must_use]
    pub fn memory(&self) -> &Arc<StreamMemory> {
        &self.memory
    }

    /// Requests refused since the start, because there was no room for them or their bodies did
    /// not end.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Streams since the start.
    #[must_use]
    pub fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }

    /// Streams open now.
    #[must_use]
    pub fn open(&self) -> u64 {
        let ended = self.ended.load(Ordering::Relaxed);
        self.begun().saturating_sub(ended)
    }
}
