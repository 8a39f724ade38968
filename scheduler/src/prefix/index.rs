//! Which endpoint is believed to hold which prefix blocks, in fixed memory.
//!
//! Written at the pick: the endpoint picked will hold the prompt's blocks when its prefill is done, and the next request that begins the
//! same way must know already. Read at the next pick: how far into this chain does each candidate reach?
//!
//! The length believed of an endpoint is the position of the deepest block found of it, so a lost block within a chain changes nothing. A
//! look-up does not walk the chain. Endpoints are asked about in regions of eight, whose entries of one block lie together: the first two
//! blocks tell who has any of it (most regions have nothing, and are done); the last tells who has all; in between it bisects, and where a
//! block seems missing it looks at the next as well, so a single loss does not mislead it.
//!
//! Age is counted in touches, not in time: an epoch is a fixed number of them, and entries carry the low 16 bits of the epoch of their last
//! touch. When a block finds both its buckets full, the place of a dead or expired entry is taken, else of the oldest. Every epoch a few
//! buckets are looked through and what is too old for its stamp is dropped, so that no old entry ever looks young.

use super::hash::BLOCKS_MAX;
use super::owners::{Owners, REGION_OWNERS, REGIONS, region, region_bit};
use super::table::{Entry, LANES, NOBODY, Table};
use crate::snapshot::EndpointRef;
use std::fmt;

/// Entries of an index when nothing else is configured. 100 endpoints of 6,600 blocks (64 tokens each: 422,000 tokens of KV cache) are
/// 660,000; with 2.3 places for each, 0.005 % are lost. 12.6 MB, in every VM that picks.
pub const ENTRIES_DEFAULT: usize = 1_572_864;

/// The most entries: 512 MB, far beyond what a VM should hold, and well within 32 bits of buckets.
pub const ENTRIES_MAX: usize = 1 << 26;

/// Epochs in which as many blocks are touched as the table has places. A finer clock tells ages better apart, a coarser one reaches further
/// back before its 16 bits end: [`AGE_MAX`] is 32 tables full of touches, 50 million at the default.
const EPOCHS_PER_TABLE: usize = 1024;

/// Entries not touched for as many epochs are dropped: half of what a stamp can tell.
const AGE_MAX: u16 = 1 << 15;

/// Epochs in which the whole table is looked through once: [`AGE_MAX`] and this together stay below 2^16, where stamps repeat.
const EPOCHS_PER_SWEEP: usize = 1 << 14;

/// The index. One writer.
pub struct PrefixIndex {
    table: Table,
    owners: Owners,
    /// Blocks touched so far.
    touches: u64,
    /// Touches that make an epoch.
    epoch_touches: u64,
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
        let table = Table::new(entries.min(ENTRIES_MAX));
        let owners = Owners::new(table.buckets() > 0);
        let epoch_touches = (table.buckets() * LANES / EPOCHS_PER_TABLE).max(1) as u64;
        Self { table, owners, touches: 0, epoch_touches, swept: 0, evictions: 0 }
    }

    /// Memory held, in bytes; never changes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.table.bytes() + self.owners.bytes()
    }

    /// Remembers that `endpoint` was given a prompt of these blocks, first block first; refreshes what is there already. `endpoint` is of
    /// the current snapshot: what another life at its slot held is forgotten.
    pub fn record(&mut self, endpoint: EndpointRef, blocks: &[u64]) {
        let Some(owner) = self.owner(endpoint) else { return };
        let epoch = self.epoch();
        let blocks = blocks.get(..BLOCKS_MAX).unwrap_or(blocks);
        for &block in blocks {
            self.touch(owner, block, epoch);
        }
        self.touches = self.touches.wrapping_add(blocks.len() as u64);
        self.owners.touched(owner, epoch);
        self.look_through(self.epoch() - epoch);
    }

    /// Writes to `out` how many of these blocks, counted from the first, each of `endpoints` is believed to hold: replaces what `out` had,
    /// runs parallel to `endpoints`. An endpoint never recorded holds 0.
    pub fn matched(&self, blocks: &[u64], endpoints: &[EndpointRef], out: &mut Vec<u32>) {
        out.clear();
        let mut wanted = [0_u8; REGIONS];
        let mut regions = 0;
        for &endpoint in endpoints {
            let owner = self.owners.get(endpoint).unwrap_or(NOBODY);
            out.push(u32::from(owner));
            if let (false, Some(bits)) = (owner == NOBODY, wanted.get_mut(usize::from(region(owner)))) {
                *bits |= region_bit(owner);
                regions = regions.max(usize::from(region(owner)) + 1);
            }
        }
        let mut lengths = vec![[0_u32; REGION_OWNERS]; regions];
        for ((region, &bits), lengths) in (0_u16..).zip(&wanted).zip(&mut lengths) {
            if bits != 0 {
                self.reach(Chain { blocks, region }, bits, lengths);
            }
        }
        for length in out.iter_mut() {
            *length = lengths.as_flattened().get(*length as usize).copied().unwrap_or(0);
        }
    }

    /// How many blocks of KV cache `endpoint` has, of the size that prompts are cut into (from `cache_config_info`: engine blocks times
    /// tokens of each, over the tokens of one of ours); unlimited until said. Beyond it the least recently touched of the endpoint's
    /// blocks stop counting, in steps of an eighth of the capacity. Output that fills the cache too is not known here.
    pub fn set_capacity(&mut self, endpoint: EndpointRef, blocks: u32) {
        if let Some(owner) = self.owner(endpoint) {
            self.owners.set_capacity(owner, blocks);
        }
    }

    /// Forgets all that `endpoint` held: it was removed. At once invisible; [`sweep`](Self::sweep) frees the entries. Another life at the
    /// same slot is left alone.
    pub fn forget(&mut self, endpoint: EndpointRef) {
        if self.owners.get(endpoint).is_some() {
            self.retire_slot(endpoint);
        }
    }

    /// Drops all of this chain that `endpoint` was believed to hold beyond its first `held` blocks: the engine said it had no more.
    pub fn truncate(&mut self, endpoint: EndpointRef, blocks: &[u64], held: u32) {
        let Some(owner) = self.owners.get(endpoint) else { return };
        let epoch = self.epoch();
        for &block in blocks.iter().take(BLOCKS_MAX).skip(held as usize) {
            let key = self.table.key(block, region(owner));
            if let Some((place, stamp)) = self.table.find(key, owner) {
                self.table.set(place, Entry { owner: NOBODY, stamp: 0 });
                self.owners.lost(owner, epoch_of(stamp, epoch));
            }
        }
    }

    /// Looks through `budget_buckets` buckets (of eight entries) and frees what forgotten endpoints left there. True when nothing is left to
    /// free. A bucket takes about 5 ns; one turn of the default table about 1 ms.
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

    fn epoch(&self) -> u64 {
        self.touches / self.epoch_touches
    }

    /// The owner id of `endpoint`, lent now if it has none. `None` for a slot that no snapshot has, and in an index without room.
    fn owner(&mut self, endpoint: EndpointRef) -> Option<u16> {
        if let Some(owner) = self.owners.get(endpoint) {
            return Some(owner);
        }
        self.retire_slot(endpoint);
        if let Some(owner) = self.owners.lend(endpoint, self.epoch()) {
            return Some(owner);
        }
        // Every id is lent or waits for the sweep. At most one life a slot is present, so half of the ids come free with one whole turn.
        self.look_at(self.table.buckets());
        self.owners.lend(endpoint, self.epoch())
    }

    fn retire_slot(&mut self, endpoint: EndpointRef) {
        self.owners.retire_slot(endpoint, self.swept + self.table.buckets() as u64);
    }

    fn touch(&mut self, owner: u16, block: u64, epoch: u64) {
        let key = self.table.key(block, region(owner));
        let new = Entry { owner, stamp: epoch as u16 };
        if let Some((place, stamp)) = self.table.find(key, owner) {
            if stamp != new.stamp {
                self.table.set(place, new);
                self.owners.lost(owner, epoch_of(stamp, epoch));
                self.owners.gained(owner, epoch);
            }
            return;
        }
        let rank = |entry: Entry| match epoch_of(entry.stamp, epoch) {
            _ if !self.owners.is_live(entry.owner) => u32::MAX,
            at if !self.owners.holds(entry.owner, at) => u32::MAX - 1,
            _ => u32::from(age(entry.stamp, epoch)),
        };
        let Some((place, old)) = self.table.choose(key, rank) else { return };
        if self.owners.is_live(old.owner) {
            self.owners.lost(old.owner, epoch_of(old.stamp, epoch));
            self.evictions += 1;
        }
        self.table.put(place, key, new);
        self.owners.gained(owner, epoch);
    }

    /// The share of the table that is due after `epochs` more of them.
    fn look_through(&mut self, epochs: u64) {
        if epochs > 0 {
            let share = self.table.buckets().div_ceil(EPOCHS_PER_SWEEP);
            self.look_at(share.saturating_mul(usize::try_from(epochs).unwrap_or(usize::MAX)));
        }
    }

    fn look_at(&mut self, budget_buckets: usize) {
        let (buckets, epoch) = (self.table.buckets() as u64, self.epoch());
        let until = self.swept + buckets.min(budget_buckets as u64);
        for turn in self.swept..until {
            let owners = &mut self.owners;
            self.table.retain((turn % buckets) as usize, |entry| {
                let live = owners.is_live(entry.owner);
                let keep = live && age(entry.stamp, epoch) < AGE_MAX;
                if live && !keep {
                    owners.lost(entry.owner, epoch_of(entry.stamp, epoch));
                }
                keep
            });
        }
        self.swept = until;
        self.owners.swept(until);
    }

    /// Writes to `lengths` how far into the chain each of the `wanted` owners of its region reaches.
    fn reach(&self, chain: Chain<'_>, wanted: u8, lengths: &mut [u32; REGION_OWNERS]) {
        let count = chain.blocks.len();
        if count == 0 {
            return;
        }
        let any = self.seen_from(chain, 0, count, wanted);
        if any == 0 {
            return;
        }
        let all = self.seen(chain, count - 1, any);
        set_lengths(lengths, all, count);
        self.bisect(chain, 1, count - 1, any & !all, lengths);
    }

    /// The owners of `wanted` reach at least `low` blocks and, as far as is known, at most `high`.
    fn bisect(&self, chain: Chain<'_>, low: usize, high: usize, wanted: u8, lengths: &mut [u32; REGION_OWNERS]) {
        if wanted == 0 {
            return;
        }
        if low >= high {
            set_lengths(lengths, wanted, low);
            return;
        }
        let middle = low + (high - low) / 2;
        let beyond = self.seen_from(chain, middle, high, wanted);
        self.bisect(chain, middle + 1, high, beyond, lengths);
        self.bisect(chain, low, middle, wanted & !beyond, lengths);
    }

    /// Which of `wanted` hold the block at `at`, or, should theirs be lost, the next one before `end`.
    fn seen_from(&self, chain: Chain<'_>, at: usize, end: usize, wanted: u8) -> u8 {
        let seen = self.seen(chain, at, wanted);
        if seen == wanted || at + 1 >= end {
            return seen;
        }
        seen | self.seen(chain, at + 1, wanted)
    }

    /// Which of `wanted`, owners of the chain's region by their bits, hold the block at `at`.
    fn seen(&self, chain: Chain<'_>, at: usize, wanted: u8) -> u8 {
        let Some(&block) = chain.blocks.get(at) else { return 0 };
        let (epoch, mut seen) = (self.epoch(), 0);
        self.table.for_each(self.table.key(block, chain.region), |entry| {
            if region(entry.owner) == chain.region && self.owners.holds(entry.owner, epoch_of(entry.stamp, epoch)) {
                seen |= region_bit(entry.owner);
            }
        });
        seen & wanted
    }
}

impl fmt::Debug for PrefixIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrefixIndex").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

/// A prompt's blocks, as one region of owners may hold them.
#[derive(Clone, Copy)]
struct Chain<'a> {
    blocks: &'a [u64],
    region: u16,
}

/// Epochs since an entry was stamped.
fn age(stamp: u16, epoch: u64) -> u16 {
    (epoch as u16).wrapping_sub(stamp)
}

/// The epoch an entry was stamped in.
fn epoch_of(stamp: u16, epoch: u64) -> u64 {
    epoch.saturating_sub(u64::from(age(stamp, epoch)))
}

fn set_lengths(lengths: &mut [u32; REGION_OWNERS], owners: u8, length: usize) {
    for (lane, slot) in lengths.iter_mut().enumerate() {
        if owners & (1 << lane) != 0 {
            *slot = u32::try_from(length).unwrap_or(u32::MAX);
        }
    }
}
