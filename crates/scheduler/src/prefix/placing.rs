//! Records the blocks of prompts in the index, and removes claims again.
//!
//! Until the reply of an endpoint shows work, the blocks of a prompt are only *claimed*, because
//! the endpoint may refuse the prompt. A claim counts as cached like a *confirmed* block, but takes
//! no place from a confirmed block. Each of the two classes has its own ages, epochs and estimate
//! of what is cached, and in the table no claim replaces a confirmed block that is, or may be,
//! cached. So a claim that is withdrawn, or was never true, has changed nothing for confirmed
//! blocks. If a peer (another proxy) reports more picks than its share, the picks beyond the share
//! are claims as well.

use super::age_bands::EntryState;
use super::hash::{BLOCKS_MAX, blocks_of, is_wide};
use super::index::PrefixIndex;
use super::owners::region;
use super::table::{BlockEntry, BlockKey, EntryClass, EntryPosition, TouchInterval, age};
use crate::endpoint::EndpointRef;

/// The number that is added to the rank of entries that are only `maybe_cached`. This number is
/// more than the maximum age, so these entries are replaced before all cached entries.
const DOUBTED: u32 = 1 << 16;

/// The number that is added to the rank of claims, so that claims are replaced before all confirmed
/// entries that are, or may be, cached.
const CLAIMED: u32 = 2 * DOUBTED;

/// The number of blocks whose cache lines are fetched together. The table is far larger than the
/// CPU caches, so nearly every block is a miss, and the processor handles about ten independent
/// misses at a time.
const AT_ONCE: usize = 64;

/// The origin of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockClaim {
    /// The claim comes from a pick whose endpoint has not answered. A claim of this origin may be
    /// withdrawn.
    Unconfirmed,
    /// The claim comes from a report of a peer that reports more picks than its share.
    OverShare,
}

// === impl PrefixIndex ===

impl PrefixIndex {
    /// Records that `endpoint` has cached a prompt with these hashes, which begin with the first
    /// block, and refreshes entries that exist. `endpoint` must belong to the current snapshot,
    /// because entries of another generation at its slot are dropped.
    pub fn record(&mut self, endpoint: EndpointRef, blocks: &[u64]) {
        let _ = self.confirm(endpoint, blocks);
    }

    /// Does [`Self::record`], and returns how many of the hashes, from the first, were already
    /// confirmed and cached.
    pub fn confirm(&mut self, endpoint: EndpointRef, blocks: &[u64]) -> usize {
        let mut known = 0;
        self.touch_all(
            endpoint,
            blocks,
            EntryClass::Confirmed,
            |index, at, owner, block| {
                let was_cached = index.confirm_block(owner, block);
                known += usize::from(was_cached && at == known);
            },
        );
        known
    }

    /// Records a claim that `endpoint` has these blocks. Blocks that are confirmed and cached at
    /// `endpoint` do not change.
    pub fn claim(&mut self, endpoint: EndpointRef, blocks: &[u64], claim: BlockClaim) {
        self.touch_all(
            endpoint,
            blocks,
            EntryClass::Claimed,
            |index, _, owner, block| {
                index.claim_block(owner, block, claim);
            },
        );
    }

    /// Whether a prompt with these hashes may fit into the cache of `endpoint`. A prompt that does
    /// not fit is not recorded, because the engine cannot have cached all of it.
    pub fn fits(&self, endpoint: EndpointRef, blocks: &[u64]) -> bool {
        self.owners
            .get(endpoint)
            .is_none_or(|owner| self.owners.fits(owner, blocks_of(blocks, blocks.len())))
    }

    fn touch_all(
        &mut self,
        endpoint: EndpointRef,
        blocks: &[u64],
        class: EntryClass,
        mut touch: impl FnMut(&mut Self, usize, u16, u64),
    ) {
        let Some(owner) = self.owner(endpoint) else {
            return;
        };
        if !self.fits(endpoint, blocks) {
            return;
        }
        let blocks = blocks.get(..BLOCKS_MAX).unwrap_or(blocks);
        for (piece, blocks) in (0_usize..).zip(blocks.chunks(AT_ONCE)) {
            self.table
                .fetch(blocks.iter().map(|&block| (block, region(owner))));
            for (at, &block) in (piece * AT_ONCE..).zip(blocks) {
                touch(self, at, owner, block);
            }
        }
        self.owners.touched(owner, class, *self.epochs.of(class));
        let touches = self.touches.of_mut(class);
        *touches += blocks.len() as u64;
        let epoch = *touches / self.epoch_touches;
        let before = std::mem::replace(self.epochs.of_mut(class), epoch);
        self.look_through(epoch - before);
    }

    /// Removes the claims of these blocks of `endpoint`, which refused the prompt with these
    /// blocks. Confirmed blocks and claims of peers stay. Blocks that other prompts have also
    /// claimed at `endpoint` are removed too, until they are recorded again.
    pub fn withdraw(&mut self, endpoint: EndpointRef, blocks: &[u64]) {
        self.remove_claims(endpoint, blocks, TouchInterval::is_withdrawable);
    }

    /// Does [`Self::withdraw`] for a peer, which may be hostile. Blocks that were claimed several
    /// times stay, because one of the claims may come from another proxy.
    pub fn withdraw_of_peer(&mut self, endpoint: EndpointRef, blocks: &[u64]) {
        self.remove_claims(endpoint, blocks, TouchInterval::is_claimed_once);
    }

    fn remove_claims(
        &mut self,
        endpoint: EndpointRef,
        blocks: &[u64],
        is_removed: fn(TouchInterval) -> bool,
    ) {
        let Some(owner) = self.owners.get(endpoint) else {
            return;
        };
        for &block in blocks {
            let key = self.table.key(block, region(owner));
            if let Some((place, entry)) = self.table.find(key, owner, EntryClass::Claimed)
                && is_removed(entry.interval)
            {
                self.table.free(place);
                self.owners.lost(entry, self.epoch_of(entry));
            }
        }
        self.owners
            .touched(owner, EntryClass::Claimed, self.epochs.claimed);
    }

    /// Stamps the confirmed entry of `owner` and `block` with the current epoch. If the entry is a
    /// claim, it becomes a confirmed entry. Returns whether the block was confirmed and cached
    /// before.
    fn confirm_block(&mut self, owner: u16, block: u64) -> bool {
        let key = self.table.key(block, region(owner));
        let found = self.table.find_all(key, owner);
        let mut new = self.new_entry(owner, block, EntryClass::Confirmed);
        if let Some((place, claim)) = found.claimed {
            self.owners.lost(claim, self.epoch_of(claim));
            new.interval = claim.interval.lasting();
            if found.confirmed.is_none() {
                self.table.set(place, new);
                self.owners.gained(new, self.epochs.confirmed);
                return false;
            }
            self.table.free(place);
        }
        let Some((place, old)) = found.confirmed else {
            self.insert(key, new);
            return false;
        };
        let was_cached = self.state(old).cached;
        self.refresh(place, old, new);
        was_cached
    }

    /// Stamps the claim of `owner` and `block` with the current epoch, unless the block is
    /// confirmed and cached.
    fn claim_block(&mut self, owner: u16, block: u64, claim: BlockClaim) {
        let key = self.table.key(block, region(owner));
        let found = self.table.find_all(key, owner);
        if found
            .confirmed
            .is_some_and(|(_, entry)| self.state(entry).cached)
        {
            return;
        }
        let mut new = self.new_entry(owner, block, EntryClass::Claimed);
        let Some((place, mut old)) = found.claimed else {
            if claim == BlockClaim::Unconfirmed {
                new.interval = TouchInterval::CLAIMED;
            }
            self.insert(key, new);
            return;
        };
        if claim == BlockClaim::OverShare {
            old.interval = old.interval.lasting();
        }
        self.refresh(place, old, new);
    }

    fn new_entry(&self, owner: u16, block: u64, class: EntryClass) -> BlockEntry {
        BlockEntry {
            owner,
            class,
            wide: is_wide(block),
            interval: TouchInterval::UNKNOWN,
            stamp: *self.epochs.of(class) as u16,
        }
    }

    /// Replaces `old` at `place` by `new`, which is the same entry after another touch.
    fn refresh(&mut self, place: EntryPosition, old: BlockEntry, mut new: BlockEntry) {
        let epoch = *self.epochs.of(new.class);
        let last = self.epoch_of(old);
        new.interval = old.interval.after(epoch - last);
        self.table.set(place, new);
        if new.stamp != old.stamp {
            self.owners.lost(old, last);
            self.owners.gained(new, epoch);
        }
    }

    /// Writes a new entry to an unused place, or replaces the entry with the highest rank. A claim
    /// does not replace a confirmed entry that is, or may be, cached.
    fn insert(&mut self, key: BlockKey, new: BlockEntry) {
        let rank = |entry: BlockEntry| {
            let class = match entry.class {
                EntryClass::Confirmed => 0,
                EntryClass::Claimed => CLAIMED,
            };
            let age = u32::from(age(entry.stamp, *self.epochs.of(entry.class)));
            match self.state(entry) {
                EntryState { cached: true, .. } => class + age,
                EntryState {
                    maybe_cached: true, ..
                } => class + DOUBTED + age,
                _ => u32::MAX,
            }
        };
        let Some((place, old)) = self.table.choose(key, rank) else {
            return;
        };
        if new.class == EntryClass::Claimed && rank(old) < CLAIMED {
            return;
        }
        if self.owners.is_live(old.owner) {
            self.owners.lost(old, self.epoch_of(old));
            self.evictions += 1;
        }
        self.table.put(place, key, new);
        self.owners.gained(new, *self.epochs.of(new.class));
    }
}
