//! The processes and kept placements of each origin, and each owner, in the relay of a pool.

use std::collections::{BTreeMap, VecDeque};

use crate::state::kept_placements::{BYTES_KEPT_MAX, BYTES_PER_ORIGIN_MAX, BYTES_PER_OWNER_MAX};
use crate::state::peer::Origin;

/// The maximum number of processes of one origin that are treated as active. Each pick assumes one
/// unreported pick of every other active process. A host runs one Envoy, two during a restart,
/// sometimes a handful. If a host claims hundreds, other proxies must not assume hundreds of picks.
pub const ACTIVE_PER_ORIGIN_MAX: u32 = 16;

/// The same for all origins of an owner while there is another owner. An owner has as many times
/// the share of an origin in other limits.
pub const ACTIVE_PER_OWNER_MAX: u32 = 4 * ACTIVE_PER_ORIGIN_MAX;

/// The origins of a pool's processes, and their owners.
#[derive(Debug, Default)]
pub(super) struct OriginTable {
    origins: BTreeMap<Origin, OriginTotals>,
    owners: BTreeMap<Origin, OwnerTotals>,
    /// The number of owners that have processes, without the daemon's own ext_proc server. Shares
    /// limit owners only if there are several of these.
    present: usize,
    active: ActiveProcesses,
}

/// The number of processes whose load report is used.
#[derive(Clone, Copy, Debug, Default)]
struct ActiveProcesses {
    /// With at most [`ACTIVE_PER_ORIGIN_MAX`] of each origin.
    by_origin: u32,
    /// With at most [`ACTIVE_PER_OWNER_MAX`] of each owner as well.
    by_owner: u32,
}

/// The processes and placements of one origin.
#[derive(Debug, Default)]
pub(super) struct OriginTotals {
    pub(super) processes: u32,
    /// The number of processes whose load report is used.
    pub(super) active: u32,
    /// The number of processes whose load report is used, or was used within the last minute.
    pub(super) recent: u32,
    pub(super) kept: KeptPieces,
}

/// The origins and placements of one owner.
#[derive(Debug, Default)]
pub(super) struct OwnerTotals {
    /// The number of origins that have [`OriginTotals`].
    pub(super) origins: u32,
    pub(super) processes: u32,
    /// Processes whose load report is used, with at most [`ACTIVE_PER_ORIGIN_MAX`] of each origin.
    pub(super) active: u32,
    /// Processes whose load report is used, or was used lately, with the same limit.
    pub(super) recent: u32,
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

    /// Returns the maximum number of active processes of one owner.
    fn owner_max(&self) -> u32 {
        match self.present {
            0 | 1 => u32::MAX,
            _ => ACTIVE_PER_OWNER_MAX,
        }
    }

    /// Returns the number of active processes, with the limits of each origin and each owner.
    pub(super) fn active(&self) -> u32 {
        match self.present {
            0 | 1 => self.active.by_origin,
            _ => self.active.by_owner,
        }
    }

    /// Updates the numbers of active processes when a process of `origin` becomes active, or no
    /// longer is.
    pub(super) fn set_active(&mut self, origin: &Origin, was: bool, is: bool) {
        let of_owner = self.owners.get_mut(&origin.owner());
        let Some((of, of_owner)) = self.origins.get_mut(origin).zip(of_owner) else {
            return;
        };
        let before = of.active.min(ACTIVE_PER_ORIGIN_MAX);
        of.active = of.active + u32::from(is) - u32::from(was);
        let now = of.active.min(ACTIVE_PER_ORIGIN_MAX);
        self.active.by_origin = self.active.by_origin + now - before;
        let of_owner_before = of_owner.active.min(ACTIVE_PER_OWNER_MAX);
        of_owner.active = of_owner.active + now - before;
        let of_owner_now = of_owner.active.min(ACTIVE_PER_OWNER_MAX);
        self.active.by_owner = self.active.by_owner + of_owner_now - of_owner_before;
    }

    /// Whether [`Self::active`] would be lower without an active process of `origin`. An origin or
    /// owner with more processes than its share has the same count without this process.
    pub(super) fn counts_active(&self, origin: &Origin) -> bool {
        let of = self.origins.get(origin).map(|of| of.active);
        let of_owner = self.owners.get(&origin.owner()).map(|of| of.active);
        of.is_some_and(|active| active <= ACTIVE_PER_ORIGIN_MAX)
            && of_owner.is_some_and(|active| active <= self.owner_max())
    }

    /// Starts to count the recent processes again.
    pub(super) fn reset_recent(&mut self) {
        self.origins.values_mut().for_each(|of| of.recent = 0);
        self.owners.values_mut().for_each(|of| of.recent = 0);
    }

    /// Adds a recent process of `origin`. Returns whether it counts within the limits of its origin
    /// and its owner.
    pub(super) fn add_recent(&mut self, origin: &Origin) -> bool {
        let owner_max = self.owner_max();
        let of_owner = self.owners.get_mut(&origin.owner());
        let Some((of, of_owner)) = self.origins.get_mut(origin).zip(of_owner) else {
            return false;
        };
        of.recent += 1;
        let is_within = of.recent <= ACTIVE_PER_ORIGIN_MAX;
        of_owner.recent += u32::from(is_within);
        is_within && of_owner.recent <= owner_max
    }

    /// Whether the number of recent processes would be lower without a recent process of `origin`.
    pub(super) fn counts_recent(&self, origin: &Origin) -> bool {
        let of = self.origins.get(origin).map(|of| of.recent);
        let of_owner = self.owners.get(&origin.owner()).map(|of| of.recent);
        of.is_some_and(|recent| (1..=ACTIVE_PER_ORIGIN_MAX).contains(&recent))
            && of_owner.is_some_and(|recent| recent <= self.owner_max())
    }

    /// Returns how many shares of messages the processes of an origin need: while there are other
    /// origins, all its processes together get as many as [`ACTIVE_PER_ORIGIN_MAX`] processes, and
    /// while there are other owners, those of its owner as many as [`ACTIVE_PER_OWNER_MAX`].
    pub(super) fn message_shares(&self, origin: &Origin) -> u32 {
        let of = self.origins.get(origin).filter(|_| self.origins.len() > 1);
        let of = of.map_or(1, |of| of.processes.div_ceil(ACTIVE_PER_ORIGIN_MAX));
        let of_owner = self.owners.get(&origin.owner());
        let of_owner = of_owner.map_or(1, |of| of.processes.div_ceil(self.owner_max()));
        of.max(of_owner).max(1)
    }

    /// Adds a process of an origin.
    pub(super) fn join(&mut self, origin: &Origin) {
        let of_owner = self.owners.entry(origin.owner()).or_default();
        let of = self.origins.entry(origin.clone()).or_insert_with(|| {
            of_owner.origins += 1;
            OriginTotals::default()
        });
        of.processes += 1;
        self.present += usize::from(of_owner.processes == 0 && origin.is_remote());
        of_owner.processes += 1;
    }

    /// Removes a process of an origin.
    pub(super) fn leave(&mut self, origin: &Origin) {
        if let Some(of) = self.origins.get_mut(origin) {
            of.processes -= 1;
        }
        if let Some(of_owner) = self.owners.get_mut(&origin.owner()) {
            of_owner.processes -= 1;
            self.present -= usize::from(of_owner.processes == 0 && origin.is_remote());
        }
        self.remove_left(origin);
    }

    /// Removes an origin, and its owner, if they have neither processes nor placements.
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
            .filter(|_| self.present > 1)
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
        let of_owner_max = match self.present {
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
    /// Returns whether the origin has neither processes nor kept placements. Placements stay when
    /// the processes have left, so that an origin gets no more room by connecting again.
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
