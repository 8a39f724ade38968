//! Limits the request bodies that gateways keep for retries. A gateway keeps such a body until the
//! reply has ended, so its copies could fill the gateway's memory.

use std::sync::{Arc, Mutex, PoisonError};

use exchange::KeptBodies;

/// The maximum number of bytes that all gateways together keep for retries: an eighth of the heap
/// limit of the shipped Envoy file, and as much as four workers with the filter keep. A client may
/// have half of what others leave.
const COPIES_BYTES_MAX: usize = 256 << 20;

/// All bodies that gateways keep for retries.
#[derive(Debug, Default)]
pub struct RetryCopies(Mutex<KeptBodies>);

/// A body that a gateway keeps for a retry. Dropping it makes room for another one.
#[derive(Debug)]
pub struct RetryCopy {
    all: Arc<RetryCopies>,
    client: u64,
    bytes: usize,
}

// === impl RetryCopy ===

impl RetryCopy {
    /// Counts a body of this client, if there is room for it.
    pub fn keep(all: &Arc<RetryCopies>, client: u64, bytes: usize) -> Option<Self> {
        let mut kept = all.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.keep(client, bytes, COPIES_BYTES_MAX).then(|| Self {
            all: Arc::clone(all),
            client,
            bytes,
        })
    }
}

impl Drop for RetryCopy {
    fn drop(&mut self) {
        let kept = self.all.0.lock();
        kept.unwrap_or_else(PoisonError::into_inner)
            .release(self.client, self.bytes);
    }
}
