//! Whose the entries are: internal ids for lives of endpoints, and how much each is believed to hold.
//!
//! Entries carry an id of 16 bits. A (slot, generation) pair gets an id of its own, so what is known of a former life stops matching at
//! once, without a walk of the table; an id is lent again only after a whole sweep has passed since it was retired.
//!
//! An engine's cache is close to least-recently-used. So for each owner we count the blocks of its entries by the epoch of their last touch, in a few
//! *age bands*: the newest ones that together fill its capacity count as held, older ones as evicted. Only whole age bands are told
//! apart, so what counts is seven to eight eighths of the capacity: short rather than long, since the engine needs room for output too. How much
//! that takes varies, so the end is not sharp: of what is older, up to twice the capacity, something like half is still there.
//!
//! The capacity that an engine tells is nominal: its blocks hold more or less text than ours, and output fills it as well. What its replies tell
//! of true hits corrects it: a block that was gone sets a bound to what fits, one that was there though it no longer counted as held lifts it.

use super::table::{BlockEntry, NOBODY};
use crate::endpoint::{ENDPOINTS_MAX, EndpointRef, Generation};
use std::collections::VecDeque;

/// Ids: one for each endpoint there can be, and as many again for lives whose entries are not swept yet. Id 0 is [`NOBODY`].
pub(super) const OWNERS_MAX: usize = 2 * ENDPOINTS_MAX;

/// Owners whose entries of a block share buckets, so that one probe answers for all of them. The price is that blocks which everybody holds
/// crowd together: where all are like that, 5 % are lost at the load the default table is made for. With four it would be 0.9 %, and twice
/// the probes of every look-up.
pub(super) const REGION_OWNERS: usize = 8;

/// Regions there are.
pub(super) const REGIONS: usize = OWNERS_MAX / REGION_OWNERS;

/// An owner's capacity is cut into this many age bands ...
const PARTS: u32 = 8;

/// ... and this many are kept: those, the one being filled, four for what is doubted, and one for all that is gone. Any may have shrunk because its
/// entries were touched again.
const AGE_BANDS: usize = 14;

/// Capacities within which an entry may be held.
const DOUBTED_CAPACITIES: u32 = 2;

/// Of an entry: gone, doubted, held.
const STAGES: u32 = 3;

/// How far the true capacity may be above the nominal: text of two bytes a token where ours has four.
const CAPACITY_FACTOR_MAX: u32 = 2;

/// How long ago an endpoint was given a block, counted in blocks it was given since. Known by the age band only, so a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReuseDistance {
    /// At least so many.
    pub at_least: u32,
    /// At most so many, the block itself included.
    pub at_most: u32,
}

/// The owners.
pub(super) struct OwnerTable {
    /// By id.
    rows: Vec<Owner>,
    /// Which life a slot has now, and its id: [`NOBODY`] when it has none.
    by_slot: Vec<(Generation, u16)>,
    /// Ids whose entries are being swept, oldest first, each with the number of buckets to have been swept when it is free.
    retired: VecDeque<(u16, u64)>,
}

#[derive(Clone, Copy)]
struct Owner {
    state: OwnerState,
    /// Blocks the endpoint's cache can hold, as it says.
    nominal: u32,
    /// The same, as its hits say.
    capacity: u32,
    /// Entries touched in this epoch or later count as held.
    oldest: u64,
    /// Those touched in this or later may be.
    oldest_stale: u64,
    /// Oldest first; those from `len` on are unused. Never empty for a live owner.
    age_bands: [AgeBand; AGE_BANDS],
    len: usize,
    entries: u32,
}

/// Does an entry count as held, and may it be at least?
#[derive(Clone, Copy, Default)]
pub(super) struct EntryState {
    pub(super) cached: bool,
    pub(super) maybe_cached: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum OwnerState {
    Free,
    Live,
    Retired,
}

#[derive(Clone, Copy, Default)]
struct AgeBand {
    /// Its first epoch.
    start: u64,
    /// Blocks that the entries last touched in it stand for.
    blocks: u32,
}

/// Which region an owner belongs to.
pub(super) fn region(owner: u16) -> u16 {
    owner / REGION_OWNERS as u16
}

/// The bit of an owner within its region.
pub(super) fn region_bit(owner: u16) -> u8 {
    1 << (owner % REGION_OWNERS as u16)
}

// === impl OwnerTable ===

impl OwnerTable {
    /// Nobody yet; `present` false for an index that holds nothing and needs no room for them.
    pub(super) fn new(present: bool) -> Self {
        let (owners, slots) = if present { (OWNERS_MAX, ENDPOINTS_MAX) } else { (0, 0) };
        Self { rows: vec![Owner::FREE; owners], by_slot: vec![(Generation(0), NOBODY); slots], retired: VecDeque::with_capacity(owners) }
    }

    pub(super) fn bytes(&self) -> usize {
        self.rows.len() * size_of::<Owner>()
            + self.by_slot.len() * size_of::<(Generation, u16)>()
            + self.rows.len() * size_of::<(u16, u64)>()
    }

    /// The id of `endpoint`, if it has one.
    pub(super) fn get(&self, endpoint: EndpointRef) -> Option<u16> {
        let &(generation, id) = self.by_slot.get(usize::from(endpoint.slot.0))?;
        (id != NOBODY && generation == endpoint.generation).then_some(id)
    }

    /// Is there room for the slot of `endpoint`? Not for one no snapshot has.
    pub(super) fn has_slot(&self, endpoint: EndpointRef) -> bool {
        usize::from(endpoint.slot.0) < self.by_slot.len()
    }

    /// Lends the lowest free id to `endpoint`, which has none. `None` when none is free.
    pub(super) fn lend(&mut self, endpoint: EndpointRef, epoch: u64) -> Option<u16> {
        let slot = usize::from(endpoint.slot.0);
        let free = |row: &Owner| row.state == OwnerState::Free;
        let id = self.rows.iter().skip(1).position(free)? + 1;
        *self.by_slot.get_mut(slot)? = (endpoint.generation, id as u16);
        *self.rows.get_mut(id)? = Owner::new(epoch);
        Some(id as u16)
    }

    /// Takes the slot's id away from whichever life has it; it is free again when `clean_at` buckets have been swept.
    pub(super) fn retire_slot(&mut self, endpoint: EndpointRef, clean_at: u64) {
        let Some((_, held)) = self.by_slot.get_mut(usize::from(endpoint.slot.0)) else { return };
        let id = std::mem::replace(held, NOBODY);
        if id == NOBODY {
            return;
        }
        if let Some(row) = self.rows.get_mut(usize::from(id)) {
            *row = Owner { state: OwnerState::Retired, ..Owner::FREE };
            self.retired.push_back((id, clean_at));
        }
    }

    /// Frees the ids that a whole sweep has passed over. True when none is left waiting.
    pub(super) fn swept(&mut self, buckets: u64) -> bool {
        while let Some(&(id, clean_at)) = self.retired.front()
            && clean_at <= buckets
        {
            self.retired.pop_front();
            if let Some(row) = self.rows.get_mut(usize::from(id)) {
                row.state = OwnerState::Free;
            }
        }
        self.retired.is_empty()
    }

    pub(super) fn is_live(&self, id: u16) -> bool {
        self.row(id).is_some_and(|row| row.state == OwnerState::Live)
    }

    /// What is believed of an entry of `id` last touched in `epoch`. Nothing, when the owner is not live.
    pub(super) fn holding(&self, id: u16, epoch: u64) -> EntryState {
        self.row(id)
            .map_or(EntryState::default(), |row| EntryState { cached: epoch >= row.oldest, maybe_cached: epoch >= row.oldest_stale })
    }

    /// Counts an entry touched in `epoch`.
    pub(super) fn gained(&mut self, entry: BlockEntry, epoch: u64) {
        let Some(row) = self.rows.get_mut(usize::from(entry.owner)) else { return };
        row.entries = row.entries.saturating_add(1);
        if let Some(age_band) = row.age_band_mut(epoch) {
            age_band.blocks = age_band.blocks.saturating_add(entry.blocks());
        }
    }

    /// An entry last touched in `epoch` is gone.
    pub(super) fn lost(&mut self, entry: BlockEntry, epoch: u64) {
        let Some(row) = self.rows.get_mut(usize::from(entry.owner)) else { return };
        row.entries = row.entries.saturating_sub(1);
        if let Some(age_band) = row.age_band_mut(epoch) {
            debug_assert!(age_band.blocks >= entry.blocks(), "an entry that was never counted");
            age_band.blocks = age_band.blocks.saturating_sub(entry.blocks());
        }
    }

    /// The capacity the endpoint says it has. What was learned stands as long as that does not change.
    pub(super) fn set_capacity(&mut self, id: u16, nominal: u32) {
        if let Some(row) = self.rows.get_mut(usize::from(id)).filter(|row| row.nominal != nominal) {
            (row.nominal, row.capacity, row.oldest_stale) = (nominal, nominal, 0);
            row.settle();
        }
    }

    pub(super) fn capacity(&self, id: u16) -> Option<u32> {
        self.row(id).map(|row| row.capacity)
    }

    /// How much `id` was given since an entry that was last touched in `epoch`.
    pub(super) fn reuse(&self, id: u16, epoch: u64) -> Option<ReuseDistance> {
        let live = self.row(id)?.live();
        let own = live.iter().rposition(|age_band| age_band.start <= epoch).unwrap_or(0);
        let at_least = live.iter().skip(own + 1).fold(0_u32, |sum, age_band| sum.saturating_add(age_band.blocks));
        Some(ReuseDistance { at_least, at_most: at_least.saturating_add(live.get(own)?.blocks) })
    }

    /// A block of this age was there, or was gone.
    pub(super) fn learn(&mut self, id: u16, reuse: ReuseDistance, there: bool) {
        let Some(row) = self.rows.get_mut(usize::from(id)) else { return };
        match there {
            true if reuse.at_least >= row.capacity - row.capacity / PARTS => row.grow(),
            true => {}
            false => row.shrink(reuse),
        }
    }

    /// More was there than was believed.
    pub(super) fn learn_more(&mut self, id: u16) {
        if let Some(row) = self.rows.get_mut(usize::from(id)) {
            row.grow();
        }
    }

    /// After touches up to `epoch`: starts a age band when the newest has its share, and decides anew what counts as held.
    pub(super) fn touched(&mut self, id: u16, epoch: u64) {
        if let Some(row) = self.rows.get_mut(usize::from(id)) {
            row.age(epoch);
            row.settle();
        }
    }

    /// Live owners, and entries they have.
    pub(super) fn totals(&self) -> (usize, usize) {
        let live = self.rows.iter().filter(|row| row.state == OwnerState::Live);
        live.fold((0, 0), |(owners, entries), row| (owners + 1, entries + row.entries as usize))
    }

    /// Ids waiting for the sweep.
    pub(super) fn retired(&self) -> usize {
        self.retired.len()
    }

    fn row(&self, id: u16) -> Option<&Owner> {
        self.rows.get(usize::from(id))
    }
}

// === impl Owner ===

impl Owner {
    const FREE: Self = Self {
        state: OwnerState::Free,
        nominal: u32::MAX,
        capacity: u32::MAX,
        oldest: u64::MAX,
        oldest_stale: u64::MAX,
        age_bands: [AgeBand { start: 0, blocks: 0 }; AGE_BANDS],
        len: 0,
        entries: 0,
    };

    fn new(epoch: u64) -> Self {
        let mut new = Self { state: OwnerState::Live, len: 1, oldest: epoch, oldest_stale: epoch, ..Self::FREE };
        if let Some(first) = new.age_bands.first_mut() {
            first.start = epoch;
        }
        new
    }

    fn live(&self) -> &[AgeBand] {
        self.age_bands.get(..self.len).unwrap_or(&[])
    }

    fn live_mut(&mut self) -> &mut [AgeBand] {
        self.age_bands.get_mut(..self.len).unwrap_or(&mut [])
    }

    fn age_band_mut(&mut self, epoch: u64) -> Option<&mut AgeBand> {
        let live = self.live_mut();
        let newest_not_after = live.iter().rposition(|age_band| age_band.start <= epoch).unwrap_or(0);
        live.get_mut(newest_not_after)
    }

    /// By an eighth at a time, up to what is plausible. Where no capacity is known nothing is lifted.
    fn grow(&mut self) {
        let most = self.nominal.saturating_mul(CAPACITY_FACTOR_MAX);
        self.capacity = self.capacity.saturating_add((self.capacity / PARTS).max(1)).min(most);
        self.settle();
    }

    /// To what fits by the word of one hit, but by an eighth at most, as it grows: what runs takes memory from the cache for a while, and what is no longer
    /// believed is no longer asked for, so nothing tells that there is room again. A block given so recently that it cannot have been evicted was not
    /// computed yet, and says nothing.
    fn shrink(&mut self, ReuseDistance { at_least, at_most }: ReuseDistance) {
        let held = self.live().iter().fold(0_u32, |sum, age_band| sum.saturating_add(age_band.blocks));
        let believed = self.capacity.min(held);
        if at_least >= believed / PARTS && at_most < believed {
            self.capacity = at_most.max(believed - believed / PARTS);
            self.settle();
        }
    }

    /// Starts a age band with the next epoch when the newest has an eighth of the capacity. With the next, not this one: entries already
    /// stamped with this epoch stay counted where they are.
    fn age(&mut self, epoch: u64) {
        let Some(newest) = self.live().last() else { return };
        if newest.start > epoch || newest.blocks < (self.capacity / PARTS).max(1) {
            return;
        }
        if self.len == AGE_BANDS {
            self.merge();
        }
        if let Some(next) = self.age_bands.get_mut(self.len) {
            *next = AgeBand { start: epoch + 1, blocks: 0 };
            self.len += 1;
        }
    }

    /// Joins two neighbours: where both are gone, for how old they are does not matter; else of those that count alike the two with the fewest blocks
    /// together, the doubted before the held.
    fn merge(&mut self) {
        let stage = |start| u32::from(start >= self.oldest_stale) + u32::from(start >= self.oldest);
        let pairs = (0..).zip(self.live().iter().zip(self.live().iter().skip(1)));
        let costs = pairs.map(|(at, (older, newer))| {
            let (of_older, of_newer) = (stage(older.start), stage(newer.start));
            let sum = older.blocks.saturating_add(newer.blocks);
            (if of_older == of_newer { of_newer } else { STAGES }, sum, at)
        });
        let Some((_, sum, at)) = costs.min() else { return };
        let live = self.live_mut();
        if let Some(older) = live.get_mut(at) {
            older.blocks = sum;
        }
        live.copy_within(at + 2.., at + 1);
        self.len -= 1;
    }

    /// Decides what counts as held: what fills the capacity but for less than one more eighth.
    fn settle(&mut self) {
        self.oldest = self.newest_of(self.capacity - self.capacity / PARTS);
        // Never back: what has been given up may be in one age band with all that is gone.
        self.oldest_stale = self.newest_of(self.capacity.saturating_mul(DOUBTED_CAPACITIES)).max(self.oldest_stale);
    }

    /// The first epoch of the newest age bands that together have so many blocks, or of all.
    fn newest_of(&self, blocks: u32) -> u64 {
        let (mut sum, mut oldest) = (0_u32, u64::MAX);
        for age_band in self.live().iter().rev() {
            if sum >= blocks {
                break;
            }
            sum = sum.saturating_add(age_band.blocks);
            oldest = age_band.start;
        }
        oldest
    }
}
