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
use super::owners::{Holding, Owners, REGION_OWNERS, region, region_bit};
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

/// How far into a chain an endpoint reaches, in hashes from its first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Matched {
    /// Those it is believed to hold.
    pub held: u32,
    /// The same with those given so long ago that it may hold them: as often as not.
    pub may_hold: u32,
}

/// What is found of the owners of the region.
pub(super) type Lengths = [Matched; REGION_OWNERS];

/// How far they reach while a bisection goes on.
struct Reach {
    /// By what they hold, or by what they may.
    held: bool,
    lengths: [u32; REGION_OWNERS],
    /// Of whom the deepest block seen so far is doubted.
    doubted: u8,
}

/// Whose block it is, by their bits.
#[derive(Clone, Copy, Default)]
struct Seen {
    held: u8,
    may_hold: u8,
}

// === impl Matched ===

impl Matched {
    /// For how many blocks of text those of a prompt of these hashes stand, what is doubted counted half.
    #[must_use]
    pub fn blocks(self, hashes: &[u64]) -> u32 {
        let held = blocks_of(hashes, self.held as usize);
        held + blocks_of(hashes, self.may_hold as usize).saturating_sub(held) / 2
    }
}

// === impl Lookup ===

impl Lookup<'_> {
    /// Writes how far each owner of the region reaches: one more than the position of the deepest block found of it.
    pub(super) fn run(&self, found: &mut Lengths) {
        let Some(last) = self.blocks.len().checked_sub(1) else { return };
        // Most regions hold nothing and are done. The second block in case the first is lost, which it can be only where there was no room.
        let mut any = self.seen_once(0);
        if self.blocks.first().is_some_and(|&first| self.table.was_full(self.table.key(first, self.region))) {
            any = any.or(self.seen_once(1));
        }
        if any.may_hold == 0 {
            return;
        }
        let mut perhaps = Reach { held: false, lengths: [0; REGION_OWNERS], doubted: any.may_hold & !any.held };
        let end = self.seen_once(last);
        let whole = end.may_hold & any.may_hold;
        perhaps.note(end, whole);
        perhaps.set(whole, last + 1);
        self.bisect((1, last), any.may_hold & !whole, HOLES_MAX, &mut perhaps);
        let mut surely = Reach { held: true, lengths: perhaps.lengths, doubted: 0 };
        surely.set(perhaps.doubted, 0);
        self.bisect((1, last), perhaps.doubted & any.held, HOLES_MAX, &mut surely);
        for (found, (held, may_hold)) in found.iter_mut().zip(surely.lengths.into_iter().zip(perhaps.lengths)) {
            *found = Matched { held, may_hold };
        }
    }

    /// The owners of `wanted` reach `low` blocks at least and, but for holes, `high` at most.
    fn bisect(&self, (mut low, mut high): (usize, usize), wanted: u8, holes_left: u32, reach: &mut Reach) {
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
    fn seen_once(&self, at: usize) -> Seen {
        self.seen(at)
    }

    /// Which owners of the region hold the block at `at`.
    #[inline(always)]
    fn seen(&self, at: usize) -> Seen {
        let Some(&block) = self.blocks.get(at) else { return Seen::default() };
        let mut seen = Seen::default();
        self.table.for_each(self.table.key(block, self.region), |entry| {
            if region(entry.owner) == self.region {
                let Holding { held, may_hold } = self.owners.holding(entry.owner, epoch_of(entry.stamp, self.epoch));
                let bit = region_bit(entry.owner);
                seen = seen.or(Seen { held: bit * u8::from(held), may_hold: bit * u8::from(may_hold) });
            }
        });
        seen
    }
}

// === impl Seen ===

impl Seen {
    fn or(self, other: Self) -> Self {
        Self { held: self.held | other.held, may_hold: self.may_hold | other.may_hold }
    }
}

// === impl Reach ===

impl Reach {
    fn of(&self, seen: Seen) -> u8 {
        if self.held { seen.held } else { seen.may_hold }
    }

    /// These were seen to hold a block that is deeper than all they were seen to hold before.
    fn note(&mut self, seen: Seen, owners: u8) {
        self.doubted = self.doubted & !owners | owners & !seen.held;
    }

    fn set(&mut self, owners: u8, length: usize) {
        for (lane, slot) in self.lengths.iter_mut().enumerate() {
            if owners & (1 << lane) != 0 {
                *slot = u32::try_from(length).unwrap_or(u32::MAX);
            }
        }
    }
}
