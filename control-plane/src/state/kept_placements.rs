//! The placements that a pool's relay keeps until all proxies have got them.

use std::collections::VecDeque;
use std::time::Duration;

use pool_state::peers::EncodedPlacements;
use proto::SHARE_EXPIRY_MS;
use tokio::time::Instant;

use crate::state::origin_totals::OriginTable;
use crate::state::peer::Origin;
use crate::state::placement_shares::PlacingPeer;

/// The maximum number of bytes of a pool's placements that are kept for proxies that have not got
/// them yet: twice 300 prompts of 400 blocks.
pub(super) const BYTES_KEPT_MAX: usize = 2 << 20;

/// The maximum number of bytes of placements that are kept from one origin. Beyond this number, the
/// origin's oldest placements are dropped, so one host does not displace the placements of all
/// others. A proxy gets placements within 120 ms.
pub(super) const BYTES_PER_ORIGIN_MAX: usize = BYTES_KEPT_MAX / 4;

/// The maximum number of bytes that are kept from one owner while the pool has other owners.
pub(super) const BYTES_PER_OWNER_MAX: usize = BYTES_KEPT_MAX / 4 * 3;

/// The maximum time for which placements are kept. A proxy's report is used for the same time. A
/// proxy that has not read the placements within this time is probably gone.
pub(super) const KEPT_MAX: Duration = Duration::from_millis(SHARE_EXPIRY_MS);

/// The placements of a pool for the proxies that have not got them yet.
#[derive(Debug, Default)]
pub(super) struct KeptPlacements {
    /// The batches, oldest first.
    pub(super) batches: VecDeque<PlacementBatch>,
    /// The number of the next placement.
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
    /// The encoded placements; empty if they were dropped because the origin has placed too much
    /// since.
    pub(super) encoded: EncodedPlacements,
}

// === impl KeptPlacements ===

impl KeptPlacements {
    /// Keeps placements of a peer that is in the pool.
    pub(super) fn keep(
        &mut self,
        origins: &mut OriginTable,
        peer: PlacingPeer<'_>,
        encoded: EncodedPlacements,
        count: u64,
        now: Instant,
    ) {
        let first = self.next;
        let bytes = encoded.bytes();
        for kept in origins.kept_pieces(peer.origin) {
            kept.add(first, bytes);
        }
        self.next += count;
        self.bytes += bytes;
        self.batches.push_back(PlacementBatch {
            process_id: peer.process_id,
            origin: peer.origin.clone(),
            at: now,
            count,
            first,
            encoded,
        });
        while let Some(first) = origins.pop_over(peer.origin) {
            self.empty_batch(origins, first);
        }
    }

    /// Drops the placements of a batch. The batch stays, so that its loss is counted.
    fn empty_batch(&mut self, origins: &mut OriginTable, first: u64) {
        let batches = &mut self.batches;
        let position = batches.partition_point(|placed| placed.first < first);
        let Some(placed) = batches.get_mut(position) else {
            return;
        };
        let bytes = std::mem::take(&mut placed.encoded).bytes();
        let origin = placed.origin.clone();
        self.bytes -= bytes;
        for kept in origins.kept_pieces(&origin) {
            kept.bytes -= bytes;
        }
    }

    /// Drops placements that are too old, and the oldest placements if there are too many.
    pub(super) fn drop_old(&mut self, origins: &mut OriginTable, now: Instant) {
        let is_over = |oldest: &mut PlacementBatch, bytes| {
            bytes > BYTES_KEPT_MAX || now.saturating_duration_since(oldest.at) >= KEPT_MAX
        };
        while let Some(oldest) = self
            .batches
            .pop_front_if(|oldest| is_over(oldest, self.bytes))
        {
            let bytes = oldest.encoded.bytes();
            self.bytes -= bytes;
            for kept in origins.kept_pieces(&oldest.origin) {
                kept.pieces.pop_front_if(|first| *first == oldest.first);
                kept.bytes -= bytes;
            }
            origins.remove_left(&oldest.origin);
        }
    }
}
