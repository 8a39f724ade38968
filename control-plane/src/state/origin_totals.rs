//! The processes and kept placements of one origin in the relay of a pool.

use std::collections::VecDeque;

/// The processes and placements of one origin.
#[derive(Debug, Default)]
pub(super) struct OriginTotals {
    pub(super) processes: u32,
    /// Processes whose row counts.
    pub(super) active: u32,
    /// Processes whose row counts or counted lately.
    pub(super) recent: u32,
    /// Bytes of the origin's kept placements. `pieces` has the first number of each batch, oldest
    /// first.
    pub(super) bytes: usize,
    pub(super) pieces: VecDeque<u64>,
}

// === impl OriginTotals ===

impl OriginTotals {
    /// Whether it has neither processes nor kept placements. The placements of an origin count
    /// after its processes have left, so that it gets no more room by connecting again.
    pub(super) fn has_left(&self) -> bool {
        self.processes == 0 && self.pieces.is_empty()
    }
}
