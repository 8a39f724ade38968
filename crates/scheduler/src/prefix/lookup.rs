//! Finds how much of a chain of blocks the owners of one region have cached, without walking the
//! chain.
//!
//! An owner of a block had all earlier blocks when the block was recorded, so "has block i cached"
//! is true up to some length and false beyond. A binary search finds this length, for eight owners
//! together. But the table can lose a block, and this hole looks like the end of the cached blocks.
//! A binary search that meets a hole ends exactly at the hole, since everything before the hole is
//! cached. So at its end the search looks at one more block. If the owner has that block, the
//! search has met a hole, and continues beyond it.
//!
//! Blocks received long ago are only maybe cached, and an owner that receives a block also receives
//! all earlier blocks. So the maybe-cached blocks begin where the cached blocks end. The search
//! looks for that position only if the last block found is maybe cached. (The rule also holds for
//! placements of other proxies. Another proxy reports only the end of a prompt if it reported the
//! beginning before. If only other proxies request a beginning, both the beginning and the blocks
//! after it age in this index.)

use super::age_bands::EntryState;
use super::hash::blocks_of;
use super::owners::{OwnerTable, REGION_OWNERS, region, region_bit};
use super::table::{BlockTable, ByClass, epoch_of};

/// The maximum number of holes that a look-up steps over. Even if the table has lost 7 % of its
/// entries, only one in two look-ups of 400 blocks meets a hole.
const HOLES_MAX: u32 = 8;

/// A look-up of one chain of blocks for the owners of one region.
pub(super) struct IndexLookup<'a> {
    pub(super) table: &'a BlockTable,
    pub(super) owners: &'a OwnerTable,
    pub(super) epochs: ByClass<u64>,
    pub(super) blocks: &'a [u64],
    pub(super) region: u16,
}

/// The part of a chain that an endpoint has cached, as a number of hashes from the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MatchLength {
    /// The number of hashes that are estimated to be cached.
    pub cached: u32,
    /// `cached` plus the number of hashes whose blocks the endpoint received so long ago that only
    /// about half of these blocks are still cached.
    pub maybe_cached: u32,
}

pub(super) type MatchLengths = [MatchLength; REGION_OWNERS];

/// The state of a binary search for the lengths of all owners.
struct MatchBounds {
    /// Whether the search looks for cached blocks only, or also for maybe-cached blocks.
    cached: bool,
    lengths: [u32; REGION_OWNERS],
    /// The owners whose last block found so far is only maybe cached, as bits.
    stale: u8,
}

/// The owners of a block, as bits.
#[derive(Clone, Copy, Default)]
struct OwnerBits {
    cached: u8,
    maybe_cached: u8,
}

// === impl MatchLength ===

impl MatchLength {
    /// Returns the number of cached blocks of a prompt with these hashes, plus half of the
    /// maybe-cached blocks.
    #[must_use]
    pub fn blocks(self, hashes: &[u64]) -> u32 {
        let held = blocks_of(hashes, self.cached as usize);
        held + blocks_of(hashes, self.maybe_cached as usize).saturating_sub(held) / 2
    }
}

// === impl IndexLookup ===

impl IndexLookup<'_> {
    /// Writes the length for each owner of the region: one more than the position of the last block
    /// found.
    pub(super) fn run(&self, found: &mut MatchLengths) {
        let Some(last) = self.blocks.len().checked_sub(1) else {
            return;
        };
        // The first block decides for most regions, which have cached nothing: then the look-up
        // ends below. The second block is read too if the table may have lost the first, which
        // happens only if the bucket of the first was full.
        let mut any = self.seen_once(0);
        if self
            .blocks
            .first()
            .is_some_and(|&first| self.table.was_full(self.table.key(first, self.region)))
        {
            any = any.or(self.seen_once(1));
        }
        if any.maybe_cached == 0 {
            return;
        }
        let mut perhaps = MatchBounds {
            cached: false,
            lengths: [0; REGION_OWNERS],
            stale: any.maybe_cached & !any.cached,
        };
        let end = self.seen_once(last);
        let whole = end.maybe_cached & any.maybe_cached;
        perhaps.note(end, whole);
        perhaps.set(whole, last + 1);
        self.bisect(1, last, any.maybe_cached & !whole, HOLES_MAX, &mut perhaps);
        let mut surely = MatchBounds {
            cached: true,
            lengths: perhaps.lengths,
            stale: 0,
        };
        surely.set(perhaps.stale, 0);
        self.bisect(1, last, perhaps.stale & any.cached, HOLES_MAX, &mut surely);
        for (found, (held, may_hold)) in found
            .iter_mut()
            .zip(surely.lengths.into_iter().zip(perhaps.lengths))
        {
            *found = MatchLength {
                cached: held,
                maybe_cached: may_hold,
            };
        }
    }

    /// Searches for the lengths of the owners in `wanted`. Except for holes, each length is at
    /// least `low` and at most `high`.
    fn bisect(
        &self,
        mut low: usize,
        mut high: usize,
        wanted: u8,
        holes_left: u32,
        reach: &mut MatchBounds,
    ) {
        if wanted == 0 {
            return;
        }
        while low < high {
            let middle = low + (high - low) / 2;
            let seen = self.seen(middle);
            let beyond = reach.owners(seen) & wanted;
            reach.note(seen, beyond);
            if beyond == wanted {
                low = middle + 1;
            } else {
                if beyond != 0 {
                    self.bisect(middle + 1, high, beyond, holes_left, reach);
                    return self.bisect(low, middle, wanted & !beyond, holes_left, reach);
                }
                high = middle;
            }
        }
        let last = self.blocks.len() - 1;
        let mut holed = 0;
        if holes_left > 0 && low + 1 < last {
            let seen = self.seen_once(low + 1);
            holed = reach.owners(seen) & wanted;
            reach.note(seen, holed);
        }
        reach.set(wanted & !holed, low);
        self.bisect(low + 2, last, holed, holes_left.saturating_sub(1), reach);
    }

    /// Does [`Self::seen`] for callers outside the inner loop. This function is not inlined, to
    /// keep the code small.
    #[inline(never)]
    fn seen_once(&self, at: usize) -> OwnerBits {
        self.seen(at)
    }

    /// Returns the owners of the region that have the block at `at`.
    #[inline(always)]
    fn seen(&self, at: usize) -> OwnerBits {
        let Some(&block) = self.blocks.get(at) else {
            return OwnerBits::default();
        };
        let mut seen = OwnerBits::default();
        self.table
            .for_each(self.table.key(block, self.region), |entry| {
                if region(entry.owner) == self.region {
                    let EntryState {
                        cached: held,
                        maybe_cached: may_hold,
                    } = self
                        .owners
                        .holding(entry, epoch_of(entry.stamp, *self.epochs.of(entry.class)));
                    let bit = region_bit(entry.owner);
                    seen = seen.or(OwnerBits {
                        cached: bit * u8::from(held),
                        maybe_cached: bit * u8::from(may_hold),
                    });
                }
            });
        seen
    }
}

// === impl OwnerBits ===

impl OwnerBits {
    fn or(self, other: Self) -> Self {
        Self {
            cached: self.cached | other.cached,
            maybe_cached: self.maybe_cached | other.maybe_cached,
        }
    }
}

// === impl MatchBounds ===

impl MatchBounds {
    fn owners(&self, seen: OwnerBits) -> u8 {
        if self.cached {
            seen.cached
        } else {
            seen.maybe_cached
        }
    }

    /// Records that the owners in `owners` have this block, which is the last block found for them
    /// so far.
    fn note(&mut self, seen: OwnerBits, owners: u8) {
        self.stale = self.stale & !owners | owners & !seen.cached;
    }

    fn set(&mut self, owners: u8, length: usize) {
        for (lane, slot) in self.lengths.iter_mut().enumerate() {
            if owners & (1 << lane) != 0 {
                *slot = u32::try_from(length).unwrap_or(u32::MAX);
            }
        }
    }
}
