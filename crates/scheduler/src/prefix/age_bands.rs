//! Estimates by age how many entries of one class (confirmed or claimed) are still in an endpoint's
//! cache.
//!
//! An engine's cache is nearly least-recently-used. So the blocks of the entries are counted by the
//! epoch of their last touch, in a few *age bands*. The newest bands that together fill the
//! capacity are estimated to be cached, and the entries of older bands to be evicted. Only whole
//! bands count, so the estimate is seven to eight eighths of the capacity. The estimate is too
//! small on purpose, because the engine needs room for generated tokens too. The size of that room
//! varies, so the boundary is not sharp: of the blocks between the estimate and twice the capacity,
//! about half are still cached (`maybe_cached`).

use super::owners::ReuseDistance;
use super::table::BlockEntry;

/// The number of age bands into which the capacity of an owner is divided.
pub(super) const PARTS: u32 = 8;

/// The number of bands: [`PARTS`] for the capacity, the band being filled, four for `maybe_cached`
/// entries, and one for all evicted entries.
const AGE_BANDS: usize = 14;

/// The multiple of the capacity within which entries may be cached.
const DOUBTED_CAPACITIES: u32 = 2;

/// The number of stages of an entry: evicted, maybe cached, cached.
const STAGES: u32 = 3;

/// Whether an entry counts as cached, and whether the entry may be cached.
#[derive(Clone, Copy, Default)]
pub(super) struct EntryState {
    pub(super) cached: bool,
    pub(super) maybe_cached: bool,
}

/// The age bands of one owner and class.
#[derive(Clone, Copy)]
pub(super) struct AgeBands {
    /// The first epoch of the cached entries: entries that were touched in this epoch or later
    /// count as cached.
    oldest: u64,
    /// The first epoch of the maybe-cached entries: entries that were touched in this epoch or
    /// later may be cached.
    oldest_stale: u64,
    /// The bands, oldest first. The elements from index `len` on are unused. A live owner has at
    /// least one band.
    bands: [AgeBand; AGE_BANDS],
    len: usize,
}

#[derive(Clone, Copy, Default)]
struct AgeBand {
    /// The first epoch of the band.
    start: u64,
    /// The number of blocks of the entries that were last touched in the band.
    blocks: u32,
}

// === impl AgeBands ===

impl AgeBands {
    /// The bands of an owner without entries.
    pub(super) const NONE: Self = Self {
        oldest: u64::MAX,
        oldest_stale: u64::MAX,
        bands: [AgeBand {
            start: 0,
            blocks: 0,
        }; AGE_BANDS],
        len: 0,
    };

    pub(super) fn new(epoch: u64) -> Self {
        let mut new = Self {
            len: 1,
            oldest: epoch,
            oldest_stale: epoch,
            ..Self::NONE
        };
        if let Some(first) = new.bands.first_mut() {
            first.start = epoch;
        }
        new
    }

    /// Returns the state of an entry last touched in `epoch`.
    pub(super) fn state(&self, epoch: u64) -> EntryState {
        EntryState {
            cached: epoch >= self.oldest,
            maybe_cached: epoch >= self.oldest_stale,
        }
    }

    /// Adds the blocks of an entry that was touched in `epoch`.
    pub(super) fn gained(&mut self, entry: BlockEntry, epoch: u64) {
        if let Some(band) = self.band_mut(epoch) {
            band.blocks = band.blocks.saturating_add(entry.blocks());
        }
    }

    /// Subtracts the blocks of an entry that was last touched in `epoch`.
    pub(super) fn lost(&mut self, entry: BlockEntry, epoch: u64) {
        if let Some(band) = self.band_mut(epoch) {
            debug_assert!(
                band.blocks >= entry.blocks(),
                "an entry that was never counted"
            );
            band.blocks = band.blocks.saturating_sub(entry.blocks());
        }
    }

    /// Returns the first epoch of the newest band.
    pub(super) fn newest(&self) -> u64 {
        self.live().last().map_or(0, |band| band.start)
    }

    /// Returns the number of blocks in all bands.
    pub(super) fn blocks(&self) -> u32 {
        self.live()
            .iter()
            .fold(0_u32, |sum, band| sum.saturating_add(band.blocks))
    }

    /// Returns how many blocks were touched after an entry whose last touch was in `epoch`.
    pub(super) fn reuse(&self, epoch: u64) -> Option<ReuseDistance> {
        let live = self.live();
        let own = live
            .iter()
            .rposition(|band| band.start <= epoch)
            .unwrap_or(0);
        let at_least = live
            .iter()
            .skip(own + 1)
            .fold(0_u32, |sum, band| sum.saturating_add(band.blocks));
        Some(ReuseDistance {
            at_least,
            at_most: at_least.saturating_add(live.get(own)?.blocks),
        })
    }

    /// Starts an age band if the newest band has an eighth of the capacity. The band starts with
    /// the next epoch, because entries of the current epoch stay in the previous band.
    pub(super) fn age(&mut self, epoch: u64, capacity: u32) {
        let Some(newest) = self.live().last() else {
            return;
        };
        if newest.start > epoch || newest.blocks < (capacity / PARTS).max(1) {
            return;
        }
        if self.len == AGE_BANDS {
            self.merge();
        }
        if let Some(next) = self.bands.get_mut(self.len) {
            *next = AgeBand {
                start: epoch + 1,
                blocks: 0,
            };
            self.len += 1;
        }
    }

    /// Recomputes which entries count as cached: those of the newest bands that fill all but the
    /// last eighth of the capacity.
    pub(super) fn settle(&mut self, capacity: u32) {
        self.oldest = self.newest_of(capacity - capacity / PARTS);
        // This boundary never moves back, because older blocks may share an age band with evicted
        // blocks.
        self.oldest_stale = self
            .newest_of(capacity.saturating_mul(DOUBTED_CAPACITIES))
            .max(self.oldest_stale);
    }

    /// Does [`Self::settle`] for a new capacity, with which entries that counted as evicted may be
    /// cached.
    pub(super) fn settle_anew(&mut self, capacity: u32) {
        self.oldest_stale = 0;
        self.settle(capacity);
    }

    fn live(&self) -> &[AgeBand] {
        self.bands.get(..self.len).unwrap_or(&[])
    }

    fn live_mut(&mut self) -> &mut [AgeBand] {
        self.bands.get_mut(..self.len).unwrap_or(&mut [])
    }

    fn band_mut(&mut self, epoch: u64) -> Option<&mut AgeBand> {
        let live = self.live_mut();
        let newest_not_after = live
            .iter()
            .rposition(|band| band.start <= epoch)
            .unwrap_or(0);
        live.get_mut(newest_not_after)
    }

    /// Merges two neighbouring bands. Prefers evicted bands, whose age does not matter, then the
    /// pair of maybe-cached bands with the fewest blocks, and then the pair of cached bands with
    /// the fewest blocks.
    fn merge(&mut self) {
        let stage = |start| u32::from(start >= self.oldest_stale) + u32::from(start >= self.oldest);
        let pairs = (0..).zip(self.live().iter().zip(self.live().iter().skip(1)));
        let costs = pairs.map(|(at, (older, newer))| {
            let of_older = stage(older.start);
            let of_newer = stage(newer.start);
            let sum = older.blocks.saturating_add(newer.blocks);
            (
                if of_older == of_newer {
                    of_newer
                } else {
                    STAGES
                },
                sum,
                at,
            )
        });
        let Some((_, sum, at)) = costs.min() else {
            return;
        };
        let live = self.live_mut();
        if let Some(older) = live.get_mut(at) {
            older.blocks = sum;
        }
        live.copy_within(at + 2.., at + 1);
        self.len -= 1;
    }

    /// Returns the first epoch of the newest age bands that together have `blocks` blocks; of all
    /// bands if they have fewer blocks.
    fn newest_of(&self, blocks: u32) -> u64 {
        let mut sum = 0_u32;
        let mut oldest = u64::MAX;
        for band in self.live().iter().rev() {
            if sum >= blocks {
                break;
            }
            sum = sum.saturating_add(band.blocks);
            oldest = band.start;
        }
        oldest
    }
}
