//! How far into a chain of blocks the owners of one region reach, without walking the chain.
//!
//! Who holds a block held all before it when it was recorded, so "holds block i" is true up to some length and false beyond: bisection
//! finds the length, for eight owners at once. Blocks get lost from the table, though, and such a hole looks like the end. A bisection that
//! hits a hole closes in on exactly that place, since all before it is held; so where it ends, one look at the next block tells an end from
//! a hole, and beyond a hole it goes on.

//!
//! What was given long ago is doubted, and who is given a block is given all before it: so the held end where the doubted begin, which is looked for
//! only where the last of all is doubted. (Other proxies tell the end of a prompt alone when they have told its head before. A head that is asked
//! for through them only ages here, and takes what hangs on it along.)

use super::hash::blocks_of;
use super::owners::{EntryState, OwnerTable, REGION_OWNERS, region, region_bit};
use super::table::{BlockTable, epoch_of};

/// Holes a look-up steps over. In a table that has lost 7 % it meets one in two look-ups of 400 blocks, so eight are not met by chance.
const HOLES_MAX: u32 = 8;

/// One look-up.
pub(super) struct IndexLookup<'a> {
    pub(super) table: &'a BlockTable,
    pub(super) owners: &'a OwnerTable,
    pub(super) epoch: u64,
    pub(super) blocks: &'a [u64],
    pub(super) region: u16,
}

/// How far into a chain an endpoint reaches, in hashes from its first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MatchLength {
    /// Those it is believed to hold.
    pub cached: u32,
    /// The same with those given so long ago that it may hold them: as often as not.
    pub maybe_cached: u32,
}

/// What is found of the owners of the region.
pub(super) type MatchLengths = [MatchLength; REGION_OWNERS];

/// How far they reach while a bisection goes on.
struct MatchBounds {
    /// By what they hold, or by what they may.
    cached: bool,
    lengths: [u32; REGION_OWNERS],
    /// Of whom the deepest block seen so far is doubted.
    stale: u8,
}

/// Whose block it is, by their bits.
#[derive(Clone, Copy, Default)]
struct OwnerBits {
    cached: u8,
    maybe_cached: u8,
}

// === impl MatchLength ===

impl MatchLength {
    /// For how many blocks of text those of a prompt of these hashes stand, what is doubted counted half.
    #[must_use]
    pub fn blocks(self, hashes: &[u64]) -> u32 {
        let held = blocks_of(hashes, self.cached as usize);
        held + blocks_of(hashes, self.maybe_cached as usize).saturating_sub(held) / 2
    }
}

// === impl IndexLookup ===

impl IndexLookup<'_> {
    /// Writes how far each owner of the region reaches: one more than the position of the deepest block found of it.
    pub(super) fn run(&self, found: &mut MatchLengths) {
        let Some(last) = self.blocks.len().checked_sub(1) else { return };
        // Most regions hold nothing and are done. The second block in case the first is lost, which it can be only where there was no room.
        let mut any = self.seen_once(0);
        if self.blocks.first().is_some_and(|&first| self.table.was_full(self.table.key(first, self.region))) {
            any = any.or(self.seen_once(1));
        }
        if any.maybe_cached == 0 {
            return;
        }
        let mut perhaps = MatchBounds { cached: false, lengths: [0; REGION_OWNERS], stale: any.maybe_cached & !any.cached };
        let end = self.seen_once(last);
        let whole = end.maybe_cached & any.maybe_cached;
        perhaps.note(end, whole);
        perhaps.set(whole, last + 1);
        self.bisect((1, last), any.maybe_cached & !whole, HOLES_MAX, &mut perhaps);
        let mut surely = MatchBounds { cached: true, lengths: perhaps.lengths, stale: 0 };
        surely.set(perhaps.stale, 0);
        self.bisect((1, last), perhaps.stale & any.cached, HOLES_MAX, &mut surely);
        for (found, (held, may_hold)) in found.iter_mut().zip(surely.lengths.into_iter().zip(perhaps.lengths)) {
            *found = MatchLength { cached: held, maybe_cached: may_hold };
        }
    }

    /// The owners of `wanted` reach `low` blocks at least and, but for holes, `high` at most.
    fn bisect(&self, (mut low, mut high): (usize, usize), wanted: u8, holes_left: u32, reach: &mut MatchBounds) {
        if wanted == 0 {
            return;
        }
        while low < high {
            let middle = low + (high - low) / 2;
            let seen = self.seen(middle);
            let beyond = reach.of(seen) & wanted;
            reach.note(seen, beyond);
            if beyond == wanted {
                low = middle + 1;
            } else {
                if beyond != 0 {
                    self.bisect((middle + 1, high), beyond, holes_left, reach);
                    return self.bisect((low, middle), wanted & !beyond, holes_left, reach);
                }
                high = middle;
            }
        }
        let last = self.blocks.len() - 1;
        let mut holed = 0;
        if holes_left > 0 && low + 1 < last {
            let seen = self.seen_once(low + 1);
            holed = reach.of(seen) & wanted;
            reach.note(seen, holed);
        }
        reach.set(wanted & !holed, low);
        self.bisect((low + 2, last), holed, holes_left.saturating_sub(1), reach);
    }

    /// [`Self::seen`] where it is not asked again and again.
    #[inline(never)]
    fn seen_once(&self, at: usize) -> OwnerBits {
        self.seen(at)
    }

    /// Which owners of the region hold the block at `at`.
    #[inline(always)]
    fn seen(&self, at: usize) -> OwnerBits {
        let Some(&block) = self.blocks.get(at) else { return OwnerBits::default() };
        let mut seen = OwnerBits::default();
        self.table.for_each(self.table.key(block, self.region), |entry| {
            if region(entry.owner) == self.region {
                let EntryState { cached: held, maybe_cached: may_hold } =
                    self.owners.holding(entry.owner, epoch_of(entry.stamp, self.epoch));
                let bit = region_bit(entry.owner);
                seen = seen.or(OwnerBits { cached: bit * u8::from(held), maybe_cached: bit * u8::from(may_hold) });
            }
        });
        seen
    }
}

// === impl OwnerBits ===

impl OwnerBits {
    fn or(self, other: Self) -> Self {
        Self { cached: self.cached | other.cached, maybe_cached: self.maybe_cached | other.maybe_cached }
    }
}

// === impl MatchBounds ===

impl MatchBounds {
    fn of(&self, seen: OwnerBits) -> u8 {
        if self.cached { seen.cached } else { seen.maybe_cached }
    }

    /// These were seen to hold a block that is deeper than all they were seen to hold before.
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
