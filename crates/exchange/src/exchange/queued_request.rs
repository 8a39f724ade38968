//! A request that flow control has queued, without its body.

use pool_state::{ManagedPool, Timestamp};
use scheduler::{Request, SubsetHint};

use super::pending_request::PendingRequest;

#[derive(Debug)]
pub(crate) struct QueuedRequest {
    pub(super) pending: PendingRequest,
    pub(super) subset: Option<SubsetHint>,
    pub(super) since: Timestamp,
    /// Whether its decision is recorded.
    pub(super) is_recorded: bool,
}

// === impl QueuedRequest ===

impl QueuedRequest {
    #[inline(never)] // several callers, and the wasm module should be small
    pub(super) fn request<'q>(
        &'q self,
        headers: &'q [(&'q str, &'q str)],
        pool: &ManagedPool,
    ) -> Request<'q> {
        self.pending.request(self.subset.as_ref(), headers, pool)
    }
}
