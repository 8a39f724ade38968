//! How far into a chain of blocks the owners of one region reach, without walking the chain.
//!
//! Who holds a block held all before it when it was recorded, so "holds block i" is true up to some length and false beyond: bisection
//! finds the length, for eight owners at once. Blocks get lost from the table, though, and such a hole looks like the end. A bisection that
//! hits a hole closes in on exactly that place, since all before it is held; so where it ends, one look at the next block tells an end from
//! a hole, and beyond a hole it goes on.

use super::owners::{Owners, REGION_OWNERS, region, region_bit};
use super::table::{Table, epoch_of};

/// Holes a look-up steps over. In a table that has lost 7 % it meets one in two look-ups of 400 blocks, so eight are not met by chance.
const HOLES_MAX: u32 = 8;

/// One look-up.
pub(super) struct Lookup<'a> {
    pub(super) table: &'a Table,
    pub(super) owners: &'a Owners,
    pub(super) epoch: u64,
    pub(super) blocks: &'a [u64],
    pub(super) region: u16,
}

/// Blocks reached, by owner within the region.
pub(super) type Lengths = [u32; REGION_OWNERS];

// === impl Lookup ===

impl Lookup<'_> {
    /// Writes how far each owner of the region reaches: one more than the position of the deepest block found of it.
    pub(super) fn run(&self, lengths: &mut Lengths) {
        let count = self.blocks.len();
        // Most regions hold nothing and are done. The second block in case the first is lost, which it can be only where there was no room.
        let mut any = self.seen(0);
        if self.blocks.first().is_some_and(|&first| self.table.was_full(self.table.key(first, self.region))) {
            any |= self.seen(1);
        }
        if any != 0 {
            let all = self.seen(count - 1) & any;
            set(lengths, all, count);
            self.bisect((1, count - 1), any & !all, HOLES_MAX, lengths);
        }
    }

    /// The owners of `wanted` reach `low` blocks at least and, but for holes, `high` at most.
    fn bisect(&self, (mut low, mut high): (usize, usize), wanted: u8, holes_left: u32, lengths: &mut Lengths) {
        if wanted == 0 {
            return;
        }
        while low < high {
            let middle = low + (high - low) / 2;
            let beyond = self.seen(middle) & wanted;
            if beyond == wanted {
                low = middle + 1;
            } else {
                if beyond != 0 {
                    self.bisect((middle + 1, high), beyond, holes_left, lengths);
                    return self.bisect((low, middle), wanted & !beyond, holes_left, lengths);
                }
                high = middle;
            }
        }
        let last = self.blocks.len() - 1;
        let holed = if holes_left > 0 && low + 1 < last { self.seen(low + 1) & wanted } else { 0 };
        set(lengths, wanted & !holed, low);
        self.bisect((low + 2, last), holed, holes_left.saturating_sub(1), lengths);
    }

    /// Which owners of the region, by their bits, hold the block at `at`.
    #[inline(always)]
    fn seen(&self, at: usize) -> u8 {
        let Some(&block) = self.blocks.get(at) else { return 0 };
        let mut seen = 0;
        self.table.for_each(self.table.key(block, self.region), |entry| {
            if region(entry.owner) == self.region && self.owners.holds(entry.owner, epoch_of(entry.stamp, self.epoch)) {
                seen |= region_bit(entry.owner);
            }
        });
        seen
    }
}

fn set(lengths: &mut Lengths, owners: u8, length: usize) {
    for (lane, slot) in lengths.iter_mut().enumerate() {
        if owners & (1 << lane) != 0 {
            *slot = u32::try_from(length).unwrap_or(u32::MAX);
        }
    }
}
