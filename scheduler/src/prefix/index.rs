//! Which endpoint is believed to hold which prefix blocks, in fixed memory.
//!
//! Written at the pick: the endpoint picked will hold the prompt's blocks when its prefill is done, and the next request that begins the
//! same way must know already. Read at the next pick: how far into this chain does each candidate reach?
//!
//! The length believed of an endpoint is the position of the deepest block found of it, so a lost block within a chain changes nothing.
//! Endpoints are asked about in regions of eight, whose entries of one block lie together; [`IndexLookup`] finds eight lengths at once.
//!
//! Age is counted in touches, not in time: an epoch is a fixed number of them, and entries carry the low 16 bits of the epoch of their last
//! touch. When a block finds both its buckets full, the place of a dead or expired entry is taken, else of the oldest. Every epoch a few
//! buckets are looked through and what is too old for its stamp is dropped, so that no old entry ever looks young.

use super::hash::{BLOCKS_MAX, is_wide};
use super::lookup::{IndexLookup, MatchLength};
use super::owners::{EntryState, OwnerTable, REGION_OWNERS, REGIONS, ReuseDistance, region};
use super::table::{BlockEntry, BlockTable, LANES, NOBODY, age, epoch_of};
use crate::endpoint::EndpointRef;
use std::fmt;

/// Entries of an index when nothing else is configured. 100 endpoints of 6,600 blocks (64 tokens each: 422,000 tokens of KV cache) are
/// 660,000; with 2.4 places for each, 0.005 % are lost. As many again may be doubted, and give way to those. 13.2 MB with the books of the owners, in every VM that picks.
pub const ENTRIES_DEFAULT: usize = 1_572_864;

/// The most entries: 512 MB, far beyond what a VM should hold, and well within 32 bits of buckets.
pub const ENTRIES_MAX: usize = 1 << 26;

/// Epochs in which as many blocks are touched as the table has places. A finer clock tells ages better apart, and how often a prefix is asked for:
/// at the default an epoch is 192 blocks, two or three prompts. A coarser one reaches further back before its 16 bits end: [`AGE_MAX`] is four
/// tables full of touches, 6 million at the default, ten times what the endpoints it is made for can hold.
const EPOCHS_PER_TABLE: usize = 8192;

/// Entries not touched for as many epochs are dropped: half of what a stamp can tell.
const AGE_MAX: u16 = 1 << 15;

/// Epochs in which the whole table is looked through once: [`AGE_MAX`] and this together stay below 2^16, where stamps repeat.
const EPOCHS_PER_SWEEP: usize = 1 << 14;

/// What is doubted goes before anything that is held: beyond any age.
const DOUBTED: u32 = 1 << 16;

/// Copies of a prefix whose ages are told apart: each costs a probe, and what more hold is asked for too often to be lost.
const COPIES_MAX: usize = 16;

/// Blocks whose cache lines are fetched together. The table is far larger than the caches, so nearly every block is a miss, and the processor
/// waits for some ten of them at a time when none depends on another.
const AT_ONCE: usize = 64;

/// The index. One writer.
pub struct PrefixIndex {
    table: BlockTable,
    owners: OwnerTable,
    /// Blocks touched so far.
    touches: u64,
    /// Touches that make an epoch.
    epoch_touches: u64,
    /// The present epoch.
    epoch: u64,
    /// Buckets looked through so far; where the next is follows from it.
    swept: u64,
    evictions: u64,
}

/// How full an index is, and of what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixStats {
    /// Entries of present lives, those beyond their endpoint's capacity included.
    pub entries: usize,
    /// Entries there is room for.
    pub entries_max: usize,
    /// Entries of present lives that had to go for newer ones, since the index was made.
    pub evictions: u64,
    /// Endpoints that have, or may have, entries.
    pub owners: usize,
    /// Former lives whose entries are not swept yet.
    pub retired: usize,
    /// Memory held, in bytes; never changes.
    pub bytes: usize,
}

// === impl PrefixIndex ===

impl PrefixIndex {
    /// An index of `entries` (endpoint, block) pairs, at most [`ENTRIES_MAX`], rounded up to whole cache lines. All its memory is allocated
    /// here, once, zeroed. With 0 it holds no memory, remembers nothing and never matches: for a VM that serves no requests.
    #[must_use]
    pub fn with_capacity(entries: usize) -> Self {
        let table = BlockTable::new(entries.min(ENTRIES_MAX));
        let owners = OwnerTable::new(table.buckets() > 0);
        let epoch_touches = (table.buckets() * LANES / EPOCHS_PER_TABLE).max(1) as u64;
        Self { table, owners, touches: 0, epoch_touches, epoch: 0, swept: 0, evictions: 0 }
    }

    /// Memory held, in bytes; never changes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.table.bytes() + self.owners.bytes()
    }

    /// Remembers that `endpoint` was given a prompt of these hashes, first block first; refreshes what is there already. `endpoint` is of
    /// the current snapshot: what another life at its slot held is forgotten.
    pub fn record(&mut self, endpoint: EndpointRef, blocks: &[u64]) {
        let Some(owner) = self.owner(endpoint) else { return };
        let blocks = blocks.get(..BLOCKS_MAX).unwrap_or(blocks);
        for blocks in blocks.chunks(AT_ONCE) {
            self.table.fetch(blocks.iter().map(|&block| (block, region(owner))));
            for &block in blocks {
                self.touch(owner, block);
            }
        }
        self.owners.touched(owner, self.epoch);
        self.touches += blocks.len() as u64;
        let before = std::mem::replace(&mut self.epoch, self.touches / self.epoch_touches);
        self.look_through(self.epoch - before);
    }

    /// Writes to `out` how many of these hashes, counted from the first, each of `endpoints` is believed to hold: replaces what `out` had,
    /// runs parallel to `endpoints`. An endpoint never recorded holds 0. [`MatchLength::blocks`] says for how many blocks they stand.
    pub fn matched(&self, blocks: &[u64], endpoints: &[EndpointRef], out: &mut Vec<MatchLength>) {
        out.clear();
        // Who they are in the index, until it is known what they hold.
        let owner = |endpoint: &EndpointRef| u32::from(self.owners.get(*endpoint).unwrap_or(NOBODY));
        out.extend(endpoints.iter().map(|endpoint| MatchLength { cached: owner(endpoint), maybe_cached: 0 }));
        let mut asked = [false; REGIONS];
        for owner in out.iter() {
            if let Some(asked) = asked.get_mut(owner.cached as usize / REGION_OWNERS) {
                *asked = true;
            }
        }
        let regions = out.iter().map(|owner| owner.cached).max().map_or(0, |last| last as usize / REGION_OWNERS + 1);
        let mut lengths = vec![[MatchLength::default(); REGION_OWNERS]; regions];
        let asked: Vec<u16> = (0_u16..).zip(asked).filter_map(|(region, asked)| asked.then_some(region)).collect();
        self.table.fetch(asked.iter().zip(blocks.first().into_iter().cycle()).map(|(&region, &first)| (first, region)));
        for region in asked {
            if let Some(lengths) = lengths.get_mut(usize::from(region)) {
                IndexLookup { table: &self.table, owners: &self.owners, epoch: self.epoch, blocks, region }.run(lengths);
            }
        }
        for known in out.iter_mut() {
            *known = lengths.as_flattened().get(known.cached as usize).copied().unwrap_or_default();
        }
    }

    /// How many blocks of KV cache `endpoint` has, of the size that prompts are cut into (from `cache_config_info`: engine blocks times
    /// tokens of each, over the tokens of one of ours); unlimited until said. Beyond it the least recently touched of the endpoint's
    /// blocks are doubted, in steps of an eighth of the capacity, and beyond twice as many they stop counting. Output that fills the cache too is not known here.
    pub fn set_capacity(&mut self, endpoint: EndpointRef, blocks: u32) {
        if let Some(owner) = self.owner(endpoint) {
            self.owners.set_capacity(owner, blocks);
        }
    }

    /// Forgets that `endpoint` was given these blocks: it never worked on them. What other prompts gave it meanwhile of the same blocks is
    /// forgotten too, until it is given them again.
    pub fn withdraw(&mut self, endpoint: EndpointRef, blocks: &[u64]) {
        let Some(owner) = self.owners.get(endpoint) else { return };
        for &block in blocks {
            if let Some((place, entry)) = self.table.find(self.table.key(block, region(owner)), owner) {
                self.table.free(place);
                self.owners.lost(entry, epoch_of(entry.stamp, self.epoch));
            }
        }
    }

    /// How long ago `endpoint` was given this block; `None` when it is not known to have been.
    #[must_use]
    pub fn reuse(&self, endpoint: EndpointRef, block: u64) -> Option<ReuseDistance> {
        let owner = self.owners.get(endpoint)?;
        let (_, entry) = self.table.find(self.table.key(block, region(owner)), owner)?;
        self.owners.reuse(owner, epoch_of(entry.stamp, self.epoch))
    }

    /// How little is asked for the longest prefix of these that anybody holds: how many prompts of as many hashes each of `endpoints` was given, on
    /// average, since it was last. 0 when nobody holds any; `known` is what [`matched`](Self::matched) found, parallel to `endpoints`.
    #[must_use]
    pub fn idle(&self, blocks: &[u64], endpoints: &[EndpointRef], known: &[MatchLength]) -> f32 {
        let Some((longest, last)) = longest(blocks, known) else { return 0.0 };
        let holders = || endpoints.iter().zip(known).filter(|(_, known)| known.cached == longest);
        let Some((&holder, _)) = holders().next() else { return 0.0 };
        let Some(owner) = self.owners.get(holder) else { return 0.0 };
        let Some((_, entry)) = self.table.find(self.table.key(last, region(owner)), owner) else { return 0.0 };
        let touches = (self.epoch - epoch_of(entry.stamp, self.epoch)) * self.epoch_touches;
        // Of several holders each is asked in turn.
        touches as f32 / blocks.len() as f32 / (endpoints.len() * holders().count()) as f32
    }

    /// Where several of `endpoints` hold the longest prefix of these alike: how near each is to losing it, from 0, just asked for there, to 1, as much
    /// given since as fits. 0 for those that hold less. Empties `out` where only one holds it, or nobody, or more than sixteen; `known` as in [`idle`](Self::idle).
    pub fn ages(&self, blocks: &[u64], endpoints: &[EndpointRef], known: &[MatchLength], out: &mut Vec<f32>) {
        out.clear();
        let Some((longest, last)) = longest(blocks, known) else { return };
        if (2..=COPIES_MAX).contains(&known.iter().filter(|known| known.cached == longest).count()) {
            let age = |endpoint, known: &MatchLength| if known.cached == longest { self.age(endpoint, last) } else { None };
            out.extend(endpoints.iter().zip(known).map(|(&endpoint, known)| age(endpoint, known).unwrap_or(0.0)));
        }
    }

    /// How much `endpoint` was given since this block, as a share of what it can hold; in whole eighths, short rather than long.
    fn age(&self, endpoint: EndpointRef, block: u64) -> Option<f32> {
        let (since, capacity) = (self.reuse(endpoint, block)?.at_least, self.capacity(endpoint)?);
        Some((since as f32 / capacity.max(1) as f32).min(1.0))
    }

    /// The engine said of a block given so long ago that it was `there`, or gone: what its cache really holds is learned, an eighth of it at a
    /// time.
    pub fn learn(&mut self, endpoint: EndpointRef, reuse: ReuseDistance, there: bool) {
        if let Some(owner) = self.owners.get(endpoint) {
            self.owners.learn(owner, reuse, there);
        }
    }

    /// The engine held more of a prompt than was believed.
    pub fn learn_more(&mut self, endpoint: EndpointRef) {
        if let Some(owner) = self.owners.get(endpoint) {
            self.owners.learn_more(owner);
        }
    }

    /// Blocks that `endpoint` is believed to hold at most: told by [`Self::set_capacity`], corrected by [`Self::learn`].
    #[must_use]
    pub fn capacity(&self, endpoint: EndpointRef) -> Option<u32> {
        self.owners.capacity(self.owners.get(endpoint)?)
    }

    /// Forgets all that `endpoint` cached: it was removed. At once invisible; [`sweep`](Self::sweep) frees the entries. Another life at the
    /// same slot is left alone.
    pub fn forget(&mut self, endpoint: EndpointRef) {
        if self.owners.get(endpoint).is_some() {
            self.retire_slot(endpoint);
        }
    }

    /// Looks through `budget_buckets` buckets (of eight entries) and frees what forgotten endpoints left there. True when nothing is left to
    /// free. A bucket takes about 20 ns: 4 ms for one turn of the default table, so give it a few thousand a tick.
    pub fn sweep(&mut self, budget_buckets: usize) -> bool {
        if self.owners.retired() > 0 {
            self.look_at(budget_buckets);
        }
        self.owners.retired() == 0
    }

    /// How full it is. Walks the owners, not the entries.
    #[must_use]
    pub fn stats(&self) -> PrefixStats {
        let (owners, entries) = self.owners.totals();
        PrefixStats {
            entries,
            entries_max: self.table.buckets() * LANES,
            evictions: self.evictions,
            owners,
            retired: self.owners.retired(),
            bytes: self.bytes(),
        }
    }

    /// The owner id of `endpoint`, lent now if it has none. `None` for a slot that no snapshot has, and in an index without room.
    fn owner(&mut self, endpoint: EndpointRef) -> Option<u16> {
        if let Some(owner) = self.owners.get(endpoint) {
            return Some(owner);
        }
        if !self.owners.has_slot(endpoint) {
            return None;
        }
        self.retire_slot(endpoint);
        if let Some(owner) = self.owners.lend(endpoint, self.epoch) {
            return Some(owner);
        }
        // Every id is lent or waits for the sweep. At most one life a slot is present, so half of the ids come free with one whole turn.
        self.look_at(self.table.buckets());
        self.owners.lend(endpoint, self.epoch)
    }

    fn retire_slot(&mut self, endpoint: EndpointRef) {
        self.owners.retire_slot(endpoint, self.swept + self.table.buckets() as u64);
    }

    /// Stamps the entry of `owner` and `block` with the present epoch.
    fn touch(&mut self, owner: u16, block: u64) {
        let epoch = self.epoch;
        let key = self.table.key(block, region(owner));
        let new = BlockEntry { owner, wide: is_wide(block), stamp: epoch as u16 };
        if let Some((place, old)) = self.table.find(key, owner) {
            if old.stamp != new.stamp {
                self.table.set(place, new);
                self.owners.lost(old, epoch_of(old.stamp, epoch));
                self.owners.gained(new, epoch);
            }
            return;
        }
        let rank = |entry: BlockEntry| match self.owners.holding(entry.owner, epoch_of(entry.stamp, epoch)) {
            EntryState { cached: true, .. } => u32::from(age(entry.stamp, epoch)),
            EntryState { maybe_cached: true, .. } => DOUBTED + u32::from(age(entry.stamp, epoch)),
            _ => u32::MAX,
        };
        let Some((place, old)) = self.table.choose(key, rank) else { return };
        if self.owners.is_live(old.owner) {
            self.owners.lost(old, epoch_of(old.stamp, epoch));
            self.evictions += 1;
        }
        self.table.put(place, key, new);
        self.owners.gained(new, epoch);
    }

    /// The share of the table that is due after `epochs` more of them.
    fn look_through(&mut self, epochs: u64) {
        if epochs > 0 {
            let share = self.table.buckets().div_ceil(EPOCHS_PER_SWEEP);
            self.look_at(share.saturating_mul(usize::try_from(epochs).unwrap_or(usize::MAX)));
        }
    }

    fn look_at(&mut self, budget_buckets: usize) {
        let (buckets, epoch) = (self.table.buckets() as u64, self.epoch);
        let until = self.swept + buckets.min(budget_buckets as u64);
        for turn in self.swept..until {
            let owners = &mut self.owners;
            self.table.retain((turn % buckets) as usize, |entry| {
                let live = owners.is_live(entry.owner);
                let keep = live && age(entry.stamp, epoch) < AGE_MAX;
                if live && !keep {
                    owners.lost(entry, epoch_of(entry.stamp, epoch));
                }
                keep
            });
        }
        self.swept = until;
        self.owners.swept(until);
    }
}

impl fmt::Debug for PrefixIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrefixIndex").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

/// How many of these hashes anybody holds at most, and the last of them; `None` where nobody holds any.
fn longest(blocks: &[u64], known: &[MatchLength]) -> Option<(u32, u64)> {
    let longest = known.iter().map(|known| known.cached).max()?;
    Some((longest, *blocks.get((longest as usize).checked_sub(1)?)?))
}

#[cfg(test)]
mod tests;
