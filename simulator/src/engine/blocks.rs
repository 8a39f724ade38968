//! Paged KV memory with a prefix cache: blocks are counted by who uses them; unused ones stay found by their hash until their place is needed,
//! the least recently given back first, of a prompt its end before its beginning.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// The blocks of one engine.
#[derive(Debug)]
pub(super) struct BlockCache {
    users: Vec<u32>,
    /// 0: nothing that could be found.
    hashes: Vec<u64>,
    /// Neighbours in the list of unused blocks.
    before: Vec<u32>,
    after: Vec<u32>,
    oldest: u32,
    newest: u32,
    free: usize,
    found: HashMap<u64, u32, BuildHasherDefault<IdentityHasher>>,
}

/// Hashes of blocks are hashed already.
#[derive(Debug, Default)]
pub(super) struct IdentityHasher(u64);

const NONE: u32 = u32::MAX;

impl Hasher for IdentityHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.0 = self.0.rotate_left(8) ^ u64::from(byte));
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

// === impl BlockCache ===

#[expect(clippy::indexing_slicing, reason = "block numbers are below the length of every column, which never changes")]
impl BlockCache {
    pub(super) fn new(count: usize) -> Self {
        let mut blocks = Self {
            users: vec![0; count],
            hashes: vec![0; count],
            before: vec![NONE; count],
            after: vec![NONE; count],
            oldest: NONE,
            newest: NONE,
            free: 0,
            found: HashMap::default(),
        };
        (0..u32::try_from(count).unwrap_or(NONE)).for_each(|block| blocks.put(block));
        blocks
    }

    pub(super) fn free(&self) -> usize {
        self.free
    }

    pub(super) fn used(&self) -> usize {
        self.users.len() - self.free
    }

    pub(super) fn utilization(&self) -> f64 {
        self.used() as f64 / self.users.len().max(1) as f64
    }

    /// How many of these, from the first, would be found.
    pub(super) fn peek(&self, hashes: &[u64]) -> usize {
        hashes.iter().take_while(|hash| self.found.contains_key(hash)).count()
    }

    /// Appends those that are found, from the first; how many of them nobody uses.
    pub(super) fn look_up(&self, hashes: &[u64], into: &mut Vec<u32>) -> usize {
        let before = into.len();
        into.extend(hashes.iter().map_while(|hash| self.found.get(hash).copied()));
        into.iter().skip(before).filter(|&&block| self.users[block as usize] == 0).count()
    }

    /// One more uses each of these.
    pub(super) fn retain(&mut self, blocks: &[u32]) {
        for &block in blocks {
            if self.users[block as usize] == 0 {
                self.take(block);
            }
            self.users[block as usize] += 1;
        }
    }

    /// Appends so many that nobody uses, and takes them. There must be as many.
    pub(super) fn take_free(&mut self, count: usize, into: &mut Vec<u32>) {
        for _ in 0..count {
            let block = self.oldest;
            if block == NONE {
                return;
            }
            self.take(block);
            let hash = std::mem::take(&mut self.hashes[block as usize]);
            if hash != 0 {
                self.found.remove(&hash);
            }
            self.users[block as usize] = 1;
            into.push(block);
        }
    }

    /// The block can be found by this hash from now on, unless another is.
    pub(super) fn publish(&mut self, block: u32, hash: u64) {
        if self.hashes[block as usize] == 0 && hash != 0 && !self.found.contains_key(&hash) {
            self.hashes[block as usize] = hash;
            self.found.insert(hash, block);
        }
    }

    /// One less uses each of these.
    pub(super) fn release(&mut self, blocks: &[u32]) {
        for &block in blocks.iter().rev() {
            self.users[block as usize] -= 1;
            if self.users[block as usize] == 0 {
                self.put(block);
            }
        }
    }

    /// Nothing is found any more.
    pub(super) fn forget(&mut self) {
        self.found.clear();
        self.hashes.fill(0);
    }

    fn put(&mut self, block: u32) {
        let last = std::mem::replace(&mut self.newest, block);
        self.before[block as usize] = last;
        self.after[block as usize] = NONE;
        match last {
            NONE => self.oldest = block,
            last => self.after[last as usize] = block,
        }
        self.free += 1;
    }

    fn take(&mut self, block: u32) {
        let (before, after) = (self.before[block as usize], self.after[block as usize]);
        match before {
            NONE => self.oldest = after,
            before => self.after[before as usize] = after,
        }
        match after {
            NONE => self.newest = before,
            after => self.before[after as usize] = before,
        }
        self.free -= 1;
    }
}
