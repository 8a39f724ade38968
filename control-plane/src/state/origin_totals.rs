//! The processes and kept placements of each origin, and each owner, in the relay of a pool.

use std::collections::{BTreeMap, VecDeque};

use crate::state::kept_placements::{BYTES_KEPT_MAX, BYTES_PER_ORIGIN_MAX, BYTES_PER_OWNER_MAX};
use crate::state::peer::Origin;

/// The origins of a pool's processes, and their owners.
#[derive(Debug, Default)]
pub(super) struct OriginTable {
    origins: BTreeMap<Origin, OriginTotals>,
    owners: BTreeMap<Origin, OwnerTotals>,
}

/// The processes and placements of one origin.
#[derive(Debug, Default)]
pub(super) struct OriginTotals {
    pub(super) processes: u32,
    /// Processes whose load report is used.
    pub(super) active: u32,
    /// Processes whose load report is used, or was used lately.
    pub(super) recent: u32,
    pub(super) kept: KeptPieces,
}

/// The origins and placements of one owner.
#[derive(Debug, Default)]
pub(super) struct OwnerTotals {
    /// Origins that have [`OriginTotals`].
    pub(super) origins: u32,
    pub(super) kept: KeptPieces,
}

/// The kept placements of one origin or owner.
#[derive(Debug, Default)]
pub(super) struct KeptPieces {
    pub(super) bytes: usize,
    /// The number of the first placement of each batch, oldest first. A batch that was dropped
    /// because of another limit stays until it is the oldest.
    pub(super) pieces: VecDeque<u64>,
}

// === impl OriginTable ===

impl OriginTable {
    pub(super) fn get(&self, origin: &Origin) -> Option<&OriginTotals> {
        self.origins.get(origin)
    }

    pub(super) fn get_mut(&mut self, origin: &Origin) -> Option<&mut OriginTotals> {
        self.origins.get_mut(origin)
    }

    pub(super) fn all_mut(&mut self) -> impl Iterator<Item = &mut OriginTotals> {
        self.origins.values_mut()
    }

    pub(super) fn len(&self) -> usize {
        self.origins.len()
    }

    /// Adds a process of an origin.
    pub(super) fn join(&mut self, origin: &Origin) {
        let of_owner = self.owners.entry(origin.owner()).or_default();
        let of = self.origins.entry(origin.clone()).or_insert_with(|| {
            of_owner.origins += 1;
            OriginTotals::default()
        });
        of.processes += 1;
    }

    /// Removes a process of an origin.
    pub(super) fn leave(&mut self, origin: &Origin) {
        if let Some(of) = self.origins.get_mut(origin) {
            of.processes -= 1;
        }
        self.remove_left(origin);
    }

    /// Removes an origin, and its owner, if nothing is left of it.
    pub(super) fn remove_left(&mut self, origin: &Origin) {
        let owner = origin.owner();
        let left = self.origins.get(origin).is_some_and(OriginTotals::has_left);
        if left {
            self.origins.remove(origin);
        }
        if let Some(of_owner) = self.owners.get_mut(&owner) {
            of_owner.origins -= u32::from(left);
            if of_owner.has_left() {
                self.owners.remove(&owner);
            }
        }
    }

    /// Returns the number of origins that divide the share of the owner of `origin`, if there is
    /// another owner.
    pub(super) fn divided_by(&self, origin: &Origin) -> Option<u32> {
        let of_owner = self.owners.get(&origin.owner());
        of_owner
            .filter(|_| self.owners.len() > 1)
            .map(|of_owner| of_owner.origins)
    }

    /// Returns the kept placements of an origin and of its owner.
    pub(super) fn kept_pieces(&mut self, origin: &Origin) -> impl Iterator<Item = &mut KeptPieces> {
        let of = self.origins.get_mut(origin).map(|of| &mut of.kept);
        let of_owner = self.owners.get_mut(&origin.owner()).map(|of| &mut of.kept);
        of.into_iter().chain(of_owner)
    }

    /// Removes and returns the oldest batch of an origin, or of its owner, that has more bytes than
    /// its share.
    pub(super) fn pop_over(&mut self, origin: &Origin) -> Option<u64> {
        let of_owner_max = match self.owners.len() {
            0 | 1 => BYTES_KEPT_MAX,
            _ => BYTES_PER_OWNER_MAX,
        };
        self.kept_pieces(origin)
            .zip([BYTES_PER_ORIGIN_MAX, of_owner_max])
            .find_map(|(kept, bytes_max)| kept.pop_over(bytes_max))
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.origins.is_empty() && self.owners.is_empty()
    }
}

// === impl OriginTotals ===

impl OriginTotals {
    /// Whether the origin has neither processes nor kept placements. Placements stay when the
    /// processes have left, so that an origin gets no more room by connecting again.
    pub(super) fn has_left(&self) -> bool {
        self.processes == 0 && self.kept.pieces.is_empty()
    }
}

// === impl OwnerTotals ===

impl OwnerTotals {
    pub(super) fn has_left(&self) -> bool {
        self.origins == 0 && self.kept.pieces.is_empty()
    }
}

// === impl KeptPieces ===

impl KeptPieces {
    pub(super) fn add(&mut self, first: u64, bytes: usize) {
        self.bytes += bytes;
        self.pieces.push_back(first);
    }

    /// Removes and returns the oldest batch, if there are more bytes than `bytes_max`.
    pub(super) fn pop_over(&mut self, bytes_max: usize) -> Option<u64> {
        self.pieces.pop_front_if(|_| self.bytes > bytes_max)
    }
}
