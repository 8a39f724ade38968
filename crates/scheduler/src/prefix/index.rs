//! Estimates which endpoint has which prefix blocks cached, in fixed memory.
//!
//! Each pick reads the index to learn how many blocks of the prompt each candidate has cached. Each
//! pick also writes the index, because the picked endpoint will have cached the prompt's blocks
//! when the prefill is done, and the pick for the next request with the same beginning must use
//! that. Until the endpoint's reply confirms a block, the block is only claimed: see
//! [`super::placing`].
//!
//! The estimate for an endpoint is the position of the last block found for it, so a lost block
//! within a chain changes nothing. Endpoints are looked up in groups of eight (regions), whose
//! entries of one block lie together, so [`IndexLookup`] finds the lengths of eight endpoints in
//! one search.
//!
//! Age is counted in touches (blocks recorded), not in time. An epoch is a fixed number of touches,
//! and an entry's stamp is the low 16 bits of the epoch of its last touch. When both buckets of a
//! block are full, the new entry replaces a dead or expired entry, or else the oldest entry. In
//! every epoch a few buckets are swept: entries whose age exceeds what a stamp can express are
//! dropped, so that no old entry ever looks young.

use super::age_bands::EntryState;
use super::lookup::{IndexLookup, MatchLength};
use super::owners::{OwnerTable, REGION_OWNERS, REGIONS, ReuseDistance, region};
use super::table::{BlockEntry, BlockTable, ByClass, EntryClass, LANES, NO_OWNER, age, epoch_of};
use crate::endpoint::EndpointRef;
use std::fmt;

/// The default number of entries. 100 endpoints with 6,600 blocks each (of 64 tokens: 422,000
/// tokens of KV cache) need 660,000 entries. The table has 2.4 times as many places, so that 0.005
/// % of these entries are lost. The table has room for as many `maybe_cached` entries, which are
/// replaced first. In every VM that picks, the index takes 13.7 MB.
pub const ENTRIES_DEFAULT: usize = 1_572_864;

/// The maximum number of entries. So many entries take 512 MB, far more than a VM should hold, and
/// bucket numbers stay well within 32 bits.
pub const ENTRIES_MAX: usize = 1 << 26;

/// The number of epochs in which as many blocks are touched as the table has places. By default an
/// epoch is 192 blocks, two or three prompts. A shorter epoch measures more finely how old a prefix
/// is, and how often it is requested. A longer epoch reaches further back before the 16 bits wrap.
/// [`AGE_MAX`] is four tables full of touches: by default 6 million, ten times the blocks that the
/// endpoints can cache for which the table is sized.
const EPOCHS_PER_TABLE: usize = 8192;

/// The maximum age of an entry, in epochs: half the range of a stamp. An entry that is not touched
/// for longer is dropped.
const AGE_MAX: u16 = 1 << 15;

/// The number of epochs in which the sweep covers the whole table once. The sum of this number and
/// [`AGE_MAX`] is below 2^16, because stamps repeat after 2^16 epochs.
const EPOCHS_PER_SWEEP: usize = 1 << 14;

/// The reuse interval of a prefix that was requested at most once, in prompts. This number exceeds
/// every measured interval.
pub const REQUESTED_ONCE: f32 = 1e9;

/// The prefix index of a pool, which has one writer.
pub struct PrefixIndex {
    pub(super) table: BlockTable,
    pub(super) owners: OwnerTable,
    /// The number of blocks touched so far, by class (confirmed or claimed).
    pub(super) touches: ByClass<u64>,
    pub(super) epoch_touches: u64,
    /// The current epoch, by class.
    pub(super) epochs: ByClass<u64>,
    /// The number of buckets swept so far, which says where the next sweep begins.
    swept: u64,
    pub(super) evictions: u64,
}

/// The fill level of a prefix index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixStats {
    /// The number of entries of current generations, including those beyond their endpoint's
    /// capacity.
    pub entries: usize,
    pub entries_max: usize,
    /// The number of entries of current generations that newer entries have replaced since the
    /// index was created.
    pub evictions: u64,
    /// The number of endpoints that have, or may have, entries.
    pub owners: usize,
    /// The number of former generations whose entries are not swept yet.
    pub retired: usize,
    /// The allocated memory, in bytes. The amount never changes.
    pub bytes: usize,
}

// === impl PrefixIndex ===

impl PrefixIndex {
    /// Creates an index of `entries` (endpoint, block) pairs, at most [`ENTRIES_MAX`], rounded up
    /// to whole cache lines. Allocates all memory of the index now, zeroed. An index of 0 entries,
    /// which is for a VM that serves no requests, takes no memory and remembers nothing.
    #[must_use]
    pub fn with_capacity(entries: usize) -> Self {
        let table = BlockTable::new(entries.min(ENTRIES_MAX));
        let owners = OwnerTable::new(table.buckets() > 0);
        let epoch_touches = (table.buckets() * LANES / EPOCHS_PER_TABLE).max(1) as u64;
        Self {
            table,
            owners,
            touches: ByClass::default(),
            epoch_touches,
            epochs: ByClass::default(),
            swept: 0,
            evictions: 0,
        }
    }

    pub fn bytes(&self) -> usize {
        self.table.bytes() + self.owners.bytes()
    }

    /// Sets `out` to the match length of each of `endpoints`, in their order: how many of the
    /// hashes in `blocks`, from the first, the endpoint is estimated to have cached. An endpoint
    /// that was never recorded has length 0. [`MatchLength::blocks`] converts hashes to blocks.
    pub fn matched(&self, blocks: &[u64], endpoints: &[EndpointRef], out: &mut Vec<MatchLength>) {
        out.clear();
        // Until the lengths of the endpoints are known, `out` holds the owner ids of the endpoints.
        let owner =
            |endpoint: &EndpointRef| u32::from(self.owners.get(*endpoint).unwrap_or(NO_OWNER));
        out.extend(endpoints.iter().map(|endpoint| MatchLength {
            cached: owner(endpoint),
            maybe_cached: 0,
        }));
        let mut asked = [false; REGIONS];
        for owner in out.iter() {
            if let Some(asked) = asked.get_mut(owner.cached as usize / REGION_OWNERS) {
                *asked = true;
            }
        }
        let regions = out
            .iter()
            .map(|owner| owner.cached)
            .max()
            .map_or(0, |last| last as usize / REGION_OWNERS + 1);
        let mut lengths = vec![[MatchLength::default(); REGION_OWNERS]; regions];
        let asked: Vec<u16> = (0_u16..)
            .zip(asked)
            .filter_map(|(region, asked)| asked.then_some(region))
            .collect();
        self.table.fetch(
            asked
                .iter()
                .zip(blocks.first().into_iter().cycle())
                .map(|(&region, &first)| (first, region)),
        );
        for region in asked {
            if let Some(lengths) = lengths.get_mut(usize::from(region)) {
                IndexLookup {
                    table: &self.table,
                    owners: &self.owners,
                    epochs: self.epochs,
                    blocks,
                    region,
                }
                .run(lengths);
            }
        }
        for known in out.iter_mut() {
            *known = lengths
                .as_flattened()
                .get(known.cached as usize)
                .copied()
                .unwrap_or_default();
        }
    }

    /// Sets the size of the KV cache of `endpoint`, converted from the engine's blocks
    /// (`cache_config_info`) to blocks of this index. The size is unlimited until it is set. Beyond
    /// the capacity the endpoint's least recently touched blocks become `maybe_cached`, in steps of
    /// an eighth of the capacity; beyond twice the capacity these blocks are evicted. Generated
    /// tokens fill the cache too, but the index does not count them.
    pub fn set_capacity(&mut self, endpoint: EndpointRef, blocks: u32) {
        if let Some(owner) = self.owner(endpoint) {
            self.owners.set_capacity(owner, blocks);
        }
    }

    /// Returns how many blocks `endpoint` has received since it last received this block. Returns
    /// `None` if the index has no record of the block, or only a claim.
    pub fn reuse(&self, endpoint: EndpointRef, block: u64) -> Option<ReuseDistance> {
        let owner = self.owners.get(endpoint)?;
        let key = self.table.key(block, region(owner));
        if self.table.find(key, owner, EntryClass::Claimed).is_some() {
            return None;
        }
        let (_, entry) = self.table.find(key, owner, EntryClass::Confirmed)?;
        self.owners.reuse(owner, self.epoch_of(entry))
    }

    /// Returns how rarely the longest cached prefix of these hashes is requested: the mean number
    /// of prompts of this length that each of `endpoints` receives between two requests for the
    /// prefix. Returns [`REQUESTED_ONCE`] if the prefix was not requested a second time. `known` is
    /// the result of [`matched`](Self::matched) for `endpoints`.
    pub fn reuse_interval(
        &self,
        blocks: &[u64],
        endpoints: &[EndpointRef],
        known: &[MatchLength],
    ) -> f32 {
        let Some((longest, last)) = longest(blocks, known) else {
            return REQUESTED_ONCE;
        };
        let holders = || {
            endpoints
                .iter()
                .zip(known)
                .filter(|(_, known)| known.cached == longest)
        };
        let Some((&holder, _)) = holders().next() else {
            return REQUESTED_ONCE;
        };
        let Some(owner) = self.owners.get(holder) else {
            return REQUESTED_ONCE;
        };
        let key = self.table.key(last, region(owner));
        let found = |class| Some(self.table.find(key, owner, class)?.1);
        let Some(entry) = found(EntryClass::Confirmed).or_else(|| found(EntryClass::Claimed))
        else {
            return REQUESTED_ONCE;
        };
        let Some(usual) = entry.interval.epochs() else {
            return REQUESTED_ONCE;
        };
        // The interval of a prefix that is no longer requested grows with time.
        let since = (self.epochs.of(entry.class) - self.epoch_of(entry)) as f32;
        let touches = usual.max(since) * self.epoch_touches as f32;
        // If several endpoints hold the prefix, each endpoint gets only its share of the requests
        // for the prefix.
        touches / blocks.len() as f32 / (endpoints.len() * holders().count()) as f32
    }

    /// Records a reply to this client. Returns whether [`Self::learn`] or [`Self::learn_more`] may
    /// follow.
    pub(super) fn counts_reply(
        &mut self,
        endpoint: EndpointRef,
        client: u64,
        contradicts: bool,
    ) -> bool {
        let owner = self.owners.get(endpoint);
        owner.is_some_and(|owner| self.owners.counts_reply(owner, client, contradicts))
    }

    /// Learns from an engine's report that a block of this age was still cached (`there`) or
    /// evicted, and corrects the estimated capacity by at most an eighth.
    pub fn learn(&mut self, endpoint: EndpointRef, reuse: ReuseDistance, there: bool) {
        if let Some(owner) = self.owners.get(endpoint) {
            self.owners.learn(owner, reuse, there);
        }
    }

    /// Learns that the engine had cached more of a prompt than the index estimated, and raises the
    /// capacity.
    pub fn learn_more(&mut self, endpoint: EndpointRef) {
        if let Some(owner) = self.owners.get(endpoint) {
            self.owners.learn_more(owner);
        }
    }

    /// Returns the estimated capacity of `endpoint` in blocks, which [`Self::set_capacity`] sets
    /// and [`Self::learn`] corrects.
    pub fn capacity(&self, endpoint: EndpointRef) -> Option<u32> {
        self.owners.capacity(self.owners.get(endpoint)?)
    }

    /// Forgets the blocks of `endpoint`, which was removed from the pool. The entries of the
    /// endpoint no longer match, and [`sweep`](Self::sweep) frees them. Entries of another
    /// generation at the same slot stay.
    pub fn forget(&mut self, endpoint: EndpointRef) {
        if self.owners.get(endpoint).is_some() {
            self.retire_slot(endpoint);
        }
    }

    /// Sweeps `budget_buckets` buckets (of eight entries) and frees the entries of forgotten
    /// endpoints in these buckets. Returns true when the table has no entry of a forgotten endpoint
    /// any more. A bucket takes about 20 ns, and the whole default table 4 ms, so pass a few
    /// thousand per tick.
    pub fn sweep(&mut self, budget_buckets: usize) -> bool {
        if self.owners.retired() > 0 {
            self.look_at(budget_buckets);
        }
        self.owners.retired() == 0
    }

    pub fn retired(&self) -> usize {
        self.owners.retired()
    }

    /// Returns the fill level, from the owners' counts and without a walk of the entries.
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

    /// Returns the owner id of `endpoint`, and assigns an id if the endpoint has none. Returns
    /// `None` for a slot beyond the table, and in an index without entries.
    pub(super) fn owner(&mut self, endpoint: EndpointRef) -> Option<u16> {
        if let Some(owner) = self.owners.get(endpoint) {
            return Some(owner);
        }
        if !self.owners.has_slot(endpoint) {
            return None;
        }
        self.retire_slot(endpoint);
        if let Some(owner) = self.owners.lend(endpoint, self.epochs) {
            return Some(owner);
        }
        // Every id is in use or waits for the sweep. At most one generation of a slot is current,
        // so one whole sweep frees at least half of the ids.
        self.look_at(self.table.buckets());
        self.owners.lend(endpoint, self.epochs)
    }

    fn retire_slot(&mut self, endpoint: EndpointRef) {
        self.owners
            .retire_slot(endpoint, self.swept + self.table.buckets() as u64);
    }

    pub(super) fn state(&self, entry: BlockEntry) -> EntryState {
        self.owners.holding(entry, self.epoch_of(entry))
    }

    pub(super) fn epoch_of(&self, entry: BlockEntry) -> u64 {
        epoch_of(entry.stamp, *self.epochs.of(entry.class))
    }

    /// Sweeps the part of the table that must be swept when `epochs` more epochs have begun.
    pub(super) fn look_through(&mut self, epochs: u64) {
        if epochs > 0 {
            let share = self.table.buckets().div_ceil(EPOCHS_PER_SWEEP);
            self.look_at(share.saturating_mul(usize::try_from(epochs).unwrap_or(usize::MAX)));
        }
    }

    fn look_at(&mut self, budget_buckets: usize) {
        let buckets = self.table.buckets() as u64;
        let epochs = self.epochs;
        let until = self.swept + buckets.min(budget_buckets as u64);
        for turn in self.swept..until {
            let owners = &mut self.owners;
            self.table.retain((turn % buckets) as usize, |entry| {
                let live = owners.is_live(entry.owner);
                let epoch = *epochs.of(entry.class);
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
        f.debug_struct("PrefixIndex")
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

/// Returns the largest number of these hashes that an endpoint has cached, and the last of these
/// hashes. Returns `None` if no endpoint has cached a block.
fn longest(blocks: &[u64], known: &[MatchLength]) -> Option<(u32, u64)> {
    let longest = known.iter().map(|known| known.cached).max()?;
    Some((longest, *blocks.get((longest as usize).checked_sub(1)?)?))
}

#[cfg(test)]
mod tests;
