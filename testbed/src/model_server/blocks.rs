//! Paged KV memory with a prefix cache, as vLLM keeps it.
//!
//! A block is used (some sequence holds it) or free. A free block keeps its content until it is handed out again, so the free list is
//! also the cache: least recently freed first. Sequences give blocks back tail first, so a shared head outlives the tails.

use std::collections::HashMap;

/// Tokens in a block; vLLM's default.
pub(super) const BLOCK_TOKENS: u32 = 16;

/// Chained hash of a full block: it stands for the whole prefix up to the block's end.
pub(super) type BlockHash = u64;
pub(super) type BlockId = u32;

const NIL: BlockId = BlockId::MAX;

#[derive(Clone, Copy, Debug)]
struct KvBlock {
    users: u32,
    hash: Option<BlockHash>,
    prev: BlockId,
    next: BlockId,
}

/// The pool. Blocks come into being at first use: never-used ones are the oldest of the free list anyway, and idle engines stay small.
#[derive(Debug)]
pub(super) struct KvBlocks {
    blocks: Vec<KvBlock>,
    total: u32,
    free_listed: u32,
    head: BlockId,
    tail: BlockId,
    cached: HashMap<BlockHash, BlockId>,
}

impl KvBlocks {
    pub(super) fn new(total: u32) -> Self {
        Self { blocks: Vec::new(), total, free_listed: 0, head: NIL, tail: NIL, cached: HashMap::new() }
    }

    pub(super) fn free(&self) -> u32 {
        self.total - self.blocks.len() as u32 + self.free_listed
    }

    /// Used share, 0 to 1.
    pub(super) fn usage(&self) -> f64 {
        if self.total == 0 { 0.0 } else { f64::from(self.total - self.free()) / f64::from(self.total) }
    }

    /// The blocks that hold the longest cached prefix of `hashes`, and how many of them are free now (taking them shrinks the free list).
    pub(super) fn lookup(&self, hashes: &[BlockHash]) -> (Vec<BlockId>, u32) {
        let found: Vec<BlockId> = hashes.iter().map_while(|hash| self.cached.get(hash).copied()).collect();
        let idle = found.iter().filter(|&&id| self.block(id).users == 0).count();
        (found, idle as u32)
    }

    pub(super) fn take(&mut self, id: BlockId) {
        if self.block(id).users == 0 {
            self.unlink(id);
        }
        self.block_mut(id).users += 1;
    }

    /// A block with nothing in it, or `None` when all are used.
    pub(super) fn allocate(&mut self) -> Option<BlockId> {
        if (self.blocks.len() as u32) < self.total {
            self.blocks.push(KvBlock { users: 1, hash: None, prev: NIL, next: NIL });
            return Some(self.blocks.len() as u32 - 1);
        }
        if self.head == NIL {
            return None;
        }
        let id = self.head;
        self.unlink(id);
        if let Some(hash) = self.block_mut(id).hash.take() {
            self.cached.remove(&hash);
        }
        self.block_mut(id).users = 1;
        Some(id)
    }

    /// Makes a full block findable. The first block with a content wins; a twin stays private.
    pub(super) fn publish(&mut self, id: BlockId, hash: BlockHash) {
        if self.block(id).hash.is_none() && !self.cached.contains_key(&hash) {
            self.block_mut(id).hash = Some(hash);
            self.cached.insert(hash, id);
        }
    }

    pub(super) fn release(&mut self, blocks: &[BlockId]) {
        for &id in blocks.iter().rev() {
            let block = self.block_mut(id);
            block.users -= 1;
            if block.users == 0 {
                self.link_last(id);
            }
        }
    }

    fn block(&self, id: BlockId) -> &KvBlock {
        &self.blocks[id as usize]
    }

    fn block_mut(&mut self, id: BlockId) -> &mut KvBlock {
        &mut self.blocks[id as usize]
    }

    fn link_last(&mut self, id: BlockId) {
        let tail = std::mem::replace(&mut self.tail, id);
        let block = self.block_mut(id);
        (block.prev, block.next) = (tail, NIL);
        if tail == NIL {
            self.head = id;
        } else {
            self.block_mut(tail).next = id;
        }
        self.free_listed += 1;
    }

    fn unlink(&mut self, id: BlockId) {
        let KvBlock { prev, next, .. } = *self.block(id);
        if prev == NIL {
            self.head = next;
        } else {
            self.block_mut(prev).next = next;
        }
        if next == NIL {
            self.tail = prev;
        } else {
            self.block_mut(next).prev = prev;
        }
        self.free_listed -= 1;
    }

    /// Sum of users over all blocks; with the holders' own lists it shows that nothing leaks.
    #[cfg(test)]
    pub(super) fn uses(&self) -> usize {
        self.blocks.iter().map(|block| block.users as usize).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(pool: &mut KvBlocks, hashes: &[BlockHash]) -> Vec<BlockId> {
        let blocks: Vec<BlockId> = hashes.iter().map(|_| pool.allocate().unwrap()).collect();
        for (&block, &hash) in blocks.iter().zip(hashes) {
            pool.publish(block, hash);
        }
        blocks
    }

    #[test]
    fn a_freed_prefix_is_found_until_its_blocks_are_needed_tail_first() {
        let mut pool = KvBlocks::new(4);
        let blocks = filled(&mut pool, &[1, 2, 3]);
        assert_eq!(pool.usage(), 0.75);
        pool.release(&blocks);
        assert_eq!(pool.free(), 4);
        assert_eq!(pool.lookup(&[1, 2, 3, 4]), (blocks.clone(), 3));

        pool.allocate().unwrap();
        assert_eq!(pool.lookup(&[1, 2, 3]).0.len(), 3, "the never-used block goes first");
        pool.allocate().unwrap();
        assert_eq!(pool.lookup(&[1, 2, 3]).0, blocks[..2], "then the tail of the prefix");
    }

    #[test]
    fn a_shared_block_is_free_only_when_its_last_user_goes() {
        let mut pool = KvBlocks::new(2);
        let blocks = filled(&mut pool, &[7]);
        pool.take(blocks[0]);
        pool.release(&blocks);
        assert_eq!(pool.free(), 1);
        assert_eq!(pool.lookup(&[7]), (blocks.clone(), 0));
        pool.release(&blocks);
        assert_eq!(pool.free(), 2);
    }

    #[test]
    fn a_full_pool_gives_nothing() {
        let mut pool = KvBlocks::new(1);
        let block = pool.allocate().unwrap();
        assert_eq!(pool.allocate(), None);
        pool.release(&[block]);
        assert_eq!(pool.allocate(), Some(block));
    }
}
