//! The placements that a pool's relay keeps until all proxies have got them.

use std::collections::VecDeque;

use pool_state::peers::EncodedPlacements;
use tokio::time::Instant;

use crate::state::peer::Origin;

/// The placements of a pool for the proxies that have not got them yet.
#[derive(Debug, Default)]
pub(super) struct KeptPlacements {
    /// The batches, oldest first.
    pub(super) batches: VecDeque<PlacementBatch>,
    /// Number of the next placement.
    pub(super) next: u64,
    pub(super) bytes: usize,
    /// The number of placements that some proxy did not get.
    pub(super) dropped: u64,
}

/// Placements that arrived together and are sent together.
#[derive(Debug)]
pub(super) struct PlacementBatch {
    pub(super) process_id: u64,
    pub(super) origin: Origin,
    pub(super) at: Instant,
    /// The number of placements.
    pub(super) count: u64,
    /// The number of the first placement.
    pub(super) first: u64,
    /// Empty if they were dropped because the origin has placed too much since.
    pub(super) encoded: EncodedPlacements,
}
