//! Paged KV memory with a prefix cache, with the same rules as in vLLM.
//!
//! A block is either used by sequences or free. A free block keeps its content until another
//! sequence takes it, so the free list is also the cache. A new sequence takes the block that has
//! been free for the longest time. A sequence frees its last block first, so the end of a prompt is
//! evicted before its beginning.

use std::hash::{BuildHasherDefault, Hasher};

/// The KV blocks of one engine. A block is created at its first use, so an engine with little to do
/// takes little memory. A sequence takes a block that was never used before it takes a block of the
/// free list.
#[derive(Clone, Debug)]
pub(crate) struct BlockCache {
    total: usize,
    users: Vec<u32>,
    /// For each block, the hash under which the block can be found, or 0 if it cannot be found.
    hashes: Vec<u64>,
    /// The previous block and the next block of each block in the free list.
    before: Vec<u32>,
    after: Vec<u32>,
    oldest: u32,
    newest: u32,
    /// The length of the free list, without the blocks that were never used.
    listed: usize,
    found: BlocksByHash,
}

#[expect(
    clippy::disallowed_types,
    reason = "the hasher has no seed, and no code depends on the order of entries"
)]
type BlocksByHash = std::collections::HashMap<u64, u32, BuildHasherDefault<IdentityHasher>>;

/// A hasher that returns its input, because the keys are hashes already.
#[derive(Debug, Default)]
pub(crate) struct IdentityHasher(u64);

const NONE: u32 = u32::MAX;

impl Hasher for IdentityHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes
            .iter()
            .for_each(|&byte| self.0 = self.0.rotate_left(8) ^ u64::from(byte));
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

// === impl BlockCache ===

#[expect(
    clippy::indexing_slicing,
    reason = "block numbers are below the length of every column, which never shrinks"
)]
impl BlockCache {
    pub(crate) fn new(total: usize) -> Self {
        Self {
            total: total.min(NONE as usize),
            users: Vec::new(),
            hashes: Vec::new(),
            before: Vec::new(),
            after: Vec::new(),
            oldest: NONE,
            newest: NONE,
            listed: 0,
            found: BlocksByHash::default(),
        }
    }

    /// Returns the number of blocks that no sequence uses.
    pub(crate) fn free(&self) -> usize {
        self.total - self.users.len() + self.listed
    }

    /// Returns the number of blocks that sequences use.
    pub(crate) fn used(&self) -> usize {
        self.users.len() - self.listed
    }

    pub(crate) fn utilization(&self) -> f64 {
        self.used() as f64 / self.total.max(1) as f64
    }

    /// Returns the length of the longest cached prefix of `hashes`, in blocks.
    #[cfg(test)]
    fn peek(&self, hashes: &[u64]) -> usize {
        hashes
            .iter()
            .take_while(|hash| self.found.contains_key(hash))
            .count()
    }

    /// Appends the blocks of the longest cached prefix of `hashes` to `into`. Returns how many of
    /// these blocks are free now, because [`Self::retain`] will take them from the free list.
    pub(crate) fn look_up(&self, hashes: &[u64], into: &mut Vec<u32>) -> usize {
        let before = into.len();
        into.extend(
            hashes
                .iter()
                .map_while(|hash| self.found.get(hash).copied()),
        );
        into.iter()
            .skip(before)
            .filter(|&&block| self.users[block as usize] == 0)
            .count()
    }

    /// Adds one user to each of these blocks.
    pub(crate) fn retain(&mut self, blocks: &[u32]) {
        for &block in blocks {
            if self.users[block as usize] == 0 {
                self.unlink(block);
            }
            self.users[block as usize] += 1;
        }
    }

    /// Takes `count` free blocks and appends them to `into`. These blocks lose their cached
    /// content. The caller checks that enough blocks are free.
    pub(crate) fn take_free(&mut self, count: usize, into: &mut Vec<u32>) {
        for _ in 0..count {
            if self.users.len() < self.total {
                into.push(self.users.len() as u32);
                self.users.push(1);
                self.hashes.push(0);
                self.before.push(NONE);
                self.after.push(NONE);
                continue;
            }
            let block = self.oldest;
            if block == NONE {
                return;
            }
            self.unlink(block);
            let hash = std::mem::take(&mut self.hashes[block as usize]);
            if hash != 0 {
                self.found.remove(&hash);
            }
            self.users[block as usize] = 1;
            into.push(block);
        }
    }

    /// Lets later sequences find the block by this hash, unless the cache already has a block with
    /// this hash.
    pub(crate) fn publish(&mut self, block: u32, hash: u64) {
        if self.hashes[block as usize] == 0 && hash != 0 && !self.found.contains_key(&hash) {
            self.hashes[block as usize] = hash;
            self.found.insert(hash, block);
        }
    }

    /// Removes one user from each of these blocks, starting with the last block.
    pub(crate) fn release(&mut self, blocks: &[u32]) {
        for &block in blocks.iter().rev() {
            self.users[block as usize] -= 1;
            if self.users[block as usize] == 0 {
                self.link_newest(block);
            }
        }
    }

    /// Empties the prefix cache. Sequences keep the blocks that they use.
    pub(crate) fn clear_cache(&mut self) {
        self.found.clear();
        self.hashes.fill(0);
    }

    fn link_newest(&mut self, block: u32) {
        let last = std::mem::replace(&mut self.newest, block);
        self.before[block as usize] = last;
        self.after[block as usize] = NONE;
        match last {
            NONE => self.oldest = block,
            last => self.after[last as usize] = block,
        }
        self.listed += 1;
    }

    fn unlink(&mut self, block: u32) {
        let before = self.before[block as usize];
        let after = self.after[block as usize];
        match before {
            NONE => self.oldest = after,
            before => self.after[before as usize] = after,
        }
        match after {
            NONE => self.newest = before,
            after => self.before[after as usize] = before,
        }
        self.listed -= 1;
    }

    /// Returns the total number of users of all blocks. If this number equals the number of blocks
    /// of all sequences, no block leaks.
    #[cfg(test)]
    pub(crate) fn uses(&self) -> usize {
        self.users.iter().map(|&users| users as usize).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(cache: &mut BlockCache, count: usize) -> Vec<u32> {
        let mut blocks = Vec::new();
        cache.take_free(count, &mut blocks);
        blocks
    }

    fn filled(cache: &mut BlockCache, hashes: &[u64]) -> Vec<u32> {
        let blocks = taken(cache, hashes.len());
        blocks
            .iter()
            .zip(hashes)
            .for_each(|(&block, &hash)| cache.publish(block, hash));
        blocks
    }

    fn found(cache: &BlockCache, hashes: &[u64]) -> (Vec<u32>, usize) {
        let mut blocks = Vec::new();
        let idle = cache.look_up(hashes, &mut blocks);
        assert_eq!(cache.peek(hashes), blocks.len());
        (blocks, idle)
    }

    #[test]
    fn a_freed_prefix_is_found_until_its_blocks_are_needed_last_block_first() {
        let mut cache = BlockCache::new(4);
        let blocks = filled(&mut cache, &[1, 2, 3]);
        assert_eq!(cache.utilization(), 0.75);
        cache.release(&blocks);
        assert_eq!(cache.free(), 4);
        assert_eq!(found(&cache, &[1, 2, 3, 4]), (blocks.clone(), 3));

        taken(&mut cache, 1);
        assert_eq!(
            found(&cache, &[1, 2, 3]).0.len(),
            3,
            "the block that was never used goes first"
        );
        taken(&mut cache, 1);
        assert_eq!(
            found(&cache, &[1, 2, 3]).0,
            blocks[..2],
            "then the end of the prefix"
        );
        cache.clear_cache();
        assert_eq!((found(&cache, &[1, 2, 3]).0.len(), cache.free()), (0, 2));
    }

    #[test]
    fn a_shared_block_is_free_only_when_its_last_user_releases_it() {
        let mut cache = BlockCache::new(2);
        let blocks = filled(&mut cache, &[7]);
        cache.retain(&blocks);
        cache.release(&blocks);
        assert_eq!(cache.free(), 1);
        assert_eq!(found(&cache, &[7]), (blocks.clone(), 0));
        cache.release(&blocks);
        assert_eq!(cache.free(), 2);
    }

    #[test]
    fn a_full_cache_gives_nothing() {
        let mut cache = BlockCache::new(1);
        let block = taken(&mut cache, 1);
        assert!(taken(&mut cache, 1).is_empty());
        cache.release(&block);
        assert_eq!(taken(&mut cache, 1), block);
    }
}
