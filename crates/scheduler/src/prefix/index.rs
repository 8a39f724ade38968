//! Estimates which endpoint has which prefix blocks cached, in fixed memory.
//!
//! Each pick writes the index: the picked endpoint will have cached the prompt's blocks when its
//! prefill is done, and the next request with the same beginning must know that already. Each pick
//! also reads the index: how many blocks of this chain does each candidate have cached? Blocks that
//! an endpoint has not confirmed are only claimed: see [`super::placing`].
//!
//! The estimate for an endpoint is the position of the deepest block found for it, so a lost block
//! within a chain changes nothing. Endpoints are looked up in regions of eight, whose entries of
//! one block lie together; [`IndexLookup`] finds eight lengths at once.
//!
//! Age is counted in touches, not in time: an epoch is a fixed number of touches, and an entry
//! carries the low 16 bits of the epoch of its last touch. When both buckets of a block are full,
//! its entry replaces a dead or expired entry, or the oldest entry if none is dead or expired. In
//! every epoch a few buckets are swept: entries too old for their stamp are dropped, so that no old
//! entry ever looks young.

use super::age_bands::EntryState;
use super::lookup::{IndexLookup, MatchLength};
use super::owners::{OwnerTable, REGION_OWNERS, REGIONS, ReuseDistance, region};
use super::table::{BlockEntry, BlockTable, ByClass, EntryClass, LANES, NO_OWNER, age, epoch_of};
use crate::endpoint::EndpointRef;
use std::fmt;

/// Default number of entries. 100 endpoints with 6,600 blocks each (of 64 tokens: 422,000 tokens of
/// KV cache) need 660,000 entries. With 2.4 places for each of these entries, 0.005 % are lost. As
/// many entries again may be `maybe_cached`, and are replaced first. Index and owner table take
/// 13.7 MB in every VM that picks.
pub const ENTRIES_DEFAULT: usize = 1_572_864;

/// Maximum number of entries: 512 MB, far more than a VM should hold, and well within 32 bits of
/// buckets.
pub const ENTRIES_MAX: usize = 1 << 26;

/// The number of epochs in which as many blocks are touched as the table has places. A shorter
/// epoch measures age, and how often a prefix is requested, more finely: at the default an epoch is
/// 192 blocks, two or three prompts. A longer epoch reaches further back before the 16 bits wrap:
/// [`AGE_MAX`] is four tables full of touches. By default that is 6 million touches, ten times what
/// the endpoints that the table is sized for can cache.
const EPOCHS_PER_TABLE: usize = 8192;

/// The maximum age of an entry: it is dropped if it is not touched for this many epochs. This is
/// half the range of a stamp.
const AGE_MAX: u16 = 1 << 15;

/// The sweep covers the whole table once in this many epochs. The sum of this and [`AGE_MAX`] stays
/// below 2^16, where stamps repeat.
const EPOCHS_PER_SWEEP: usize = 1 << 14;

/// The reuse interval of a prefix that was requested at most once: longer than any other.
pub const REQUESTED_ONCE: f32 = 1e9;

/// The prefix index of a pool, with one writer.
pub struct PrefixIndex {
    pub(super) table: BlockTable,
    pub(super) owners: OwnerTable,
    /// Blocks touched so far, by class.
    pub(super) touches: ByClass<u64>,
    pub(super) epoch_touches: u64,
    /// The current epochs.
    pub(super) epochs: ByClass<u64>,
    /// Buckets swept so far; the position of the next follows from it.
    swept: u64,
    pub(super) evictions: u64,
}

/// Fill level of a prefix index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixStats {
    /// Entries of current generations, including those beyond their endpoint's capacity.
    pub entries: usize,
    pub entries_max: usize,
    /// Entries of current generations that were replaced by newer ones, since the index was
    /// created.
    pub evictions: u64,
    /// Endpoints that have, or may have, entries.
    pub owners: usize,
    /// Former generations whose entries are not swept yet.
    pub retired: usize,
    /// Allocated memory, bytes; constant.
    pub bytes: usize,
}

// === impl PrefixIndex ===

impl PrefixIndex {
    /// An index of `entries` (endpoint, block) pairs, at most [`ENTRIES_MAX`], rounded up to whole
    /// cache lines. Allocates all its memory here, zeroed. With 0 entries, the index holds no
    /// memory, remembers nothing and never matches. A VM that serves no requests uses this.
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

    /// Allocated memory, bytes; constant.
    pub fn bytes(&self) -> usize {
        self.table.bytes() + self.owners.bytes()
    }

    /// Replaces `out` by the number of these hashes, counted from the first, that each of
    /// `endpoints` is estimated to have cached; `out` runs parallel to `endpoints`. An endpoint
    /// that was never recorded has 0. [`MatchLength::blocks`] converts hashes to blocks.
    pub fn matched(&self, blocks: &[u64], endpoints: &[EndpointRef], out: &mut Vec<MatchLength>) {
        out.clear();
        // Until their lengths are known, `out` holds the owner ids of the endpoints.
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

    /// Sets how many blocks of KV cache `endpoint` has, in blocks of the prompt hashes (from the
    /// engine's `cache_config_info`: engine blocks times tokens of each, over the tokens of one
    /// block here). Unlimited until set. Beyond the capacity the endpoint's least recently touched
    /// blocks become `maybe_cached`, in steps of an eighth of the capacity; beyond twice the
    /// capacity they are evicted. Generated tokens fill the cache too, but the index does not count
    /// them.
    pub fn set_capacity(&mut self, endpoint: EndpointRef, blocks: u32) {
        if let Some(owner) = self.owner(endpoint) {
            self.owners.set_capacity(owner, blocks);
        }
    }

    /// How long ago `endpoint` received this block, counted in blocks. `None` if the index has no
    /// record of that, or only a claim.
    pub fn reuse(&self, endpoint: EndpointRef, block: u64) -> Option<ReuseDistance> {
        let owner = self.owners.get(endpoint)?;
        let key = self.table.key(block, region(owner));
        if self.table.find(key, owner, EntryClass::Claimed).is_some() {
            return None;
        }
        let (_, entry) = self.table.find(key, owner, EntryClass::Confirmed)?;
        self.owners.reuse(owner, self.epoch_of(entry))
    }

    /// How rarely the longest cached prefix of these hashes is requested: the mean number of
    /// prompts of this length that each of `endpoints` receives between two requests for the
    /// prefix. [`REQUESTED_ONCE`] if there was no second request. `known` is the result of
    /// [`matched`](Self::matched), parallel to `endpoints`.
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
        // A prefix that is no longer requested becomes rare while it waits.
        let since = (self.epochs.of(entry.class) - self.epoch_of(entry)) as f32;
        let touches = usual.max(since) * self.epoch_touches as f32;
        // Requests for a prefix with several holders go to each in turn.
        touches / blocks.len() as f32 / (endpoints.len() * holders().count()) as f32
    }

    /// Learns from an engine's report that a block of this age was still cached (`there`) or
    /// evicted: corrects the estimated capacity by an eighth at a time.
    pub fn learn(&mut self, endpoint: EndpointRef, reuse: ReuseDistance, there: bool) {
        if let Some(owner) = self.owners.get(endpoint) {
            self.owners.learn(owner, reuse, there);
        }
    }

    /// Learns that the engine had more of a prompt cached than was estimated.
    pub fn learn_more(&mut self, endpoint: EndpointRef) {
        if let Some(owner) = self.owners.get(endpoint) {
            self.owners.learn_more(owner);
        }
    }

    /// Estimated capacity of `endpoint`, blocks: set by [`Self::set_capacity`], corrected by
    /// [`Self::learn`].
    pub fn capacity(&self, endpoint: EndpointRef) -> Option<u32> {
        self.owners.capacity(self.owners.get(endpoint)?)
    }

    /// Drops everything `endpoint` has cached, because it was removed. The endpoint's entries are
    /// invisible at once, and [`sweep`](Self::sweep) frees them. The entries of another generation
    /// at the same slot stay.
    pub fn forget(&mut self, endpoint: EndpointRef) {
        if self.owners.get(endpoint).is_some() {
            self.retire_slot(endpoint);
        }
    }

    /// Sweeps `budget_buckets` buckets (of eight entries) and frees the entries of forgotten
    /// endpoints there. Returns true when none is left to free. A bucket takes about 20 ns: 4 ms
    /// for the whole default table, so pass a few thousand per tick.
    pub fn sweep(&mut self, budget_buckets: usize) -> bool {
        if self.owners.retired() > 0 {
            self.look_at(budget_buckets);
        }
        self.owners.retired() == 0
    }

    /// Former generations whose entries are not swept yet.
    pub fn retired(&self) -> usize {
        self.owners.retired()
    }

    /// The fill level. Walks the owners, not the entries.
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

    /// The owner id of `endpoint`; assigns one if it has none. `None` for a slot beyond the table,
    /// and in an index without room.
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

    /// The epoch of the entry's last touch.
    pub(super) fn epoch_of(&self, entry: BlockEntry) -> u64 {
        epoch_of(entry.stamp, *self.epochs.of(entry.class))
    }

    /// Sweeps the share of the table that is due after `epochs` more epochs.
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

/// The largest number of these hashes that an endpoint has cached, and the last of those hashes;
/// `None` if no endpoint has any cached.
fn longest(blocks: &[u64], known: &[MatchLength]) -> Option<(u32, u64)> {
    let longest = known.iter().map(|known| known.cached).max()?;
    Some((longest, *blocks.get((longest as usize).checked_sub(1)?)?))
}

#[cfg(test)]
mod tests;
