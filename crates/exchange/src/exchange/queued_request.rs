//! A request that is held by flow control, without its body.

use pool_state::Timestamp;
use pool_state::queues::HeldTicket;
use scheduler::SubsetHint;

use super::pending_request::PendingRequest;

/// A held request.
#[derive(Debug)]
pub(crate) struct QueuedRequest {
    pub(super) ticket: HeldTicket,
    pub(super) pending: PendingRequest,
    pub(super) subset: Option<SubsetHint>,
    pub(super) since: Timestamp,
    /// Whether its decision is recorded.
    pub(super) is_recorded: bool,
}
