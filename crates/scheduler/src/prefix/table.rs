//! The entries of the index: a flat two-choice hash table in one allocation that is never moved,
//! grown or rehashed.
//!
//! A bucket is one 64-byte cache line with eight entries: eight 32-bit fingerprints, then eight
//! words of class, interval, owner and stamp. The lowest bit of a fingerprint says how many blocks
//! the entry represents, as in the block's hash. An entry lies in the first bucket of its key or,
//! if that bucket was ever full, in the second. So a look-up reads one line until the table fills
//! up. The last fingerprint of a bucket says whether it was ever full, because freed entries keep
//! their fingerprints.
//!
//! In measurements, the table takes a third of the memory and a quarter of the insertion time of a
//! hash map of owner sets, and never pauses for milliseconds to grow. Each key has two buckets,
//! because with 60 % of the places in use 0.25 % of the entries are lost, and with one bucket 2.5
//! %.

use super::hash::{STRIDE, is_wide};

/// Entries per bucket: as many as fill a cache line.
pub(super) const LANES: usize = 8;

const LINE_WORDS: usize = 2 * LANES;
const LINE_BYTES: usize = LINE_WORDS * size_of::<u32>();

/// The owner of an unused or freed entry.
pub(super) const NO_OWNER: u16 = 0;

/// The word of an unused entry.
const FREE: u32 = 0;

/// The bit of a fingerprint that is set if the entry represents several blocks.
const WIDE: u32 = 1;

/// Replaces the fingerprint 0, which marks a place that was never used.
const NARROW_ZERO: u32 = 2;

type TableLine = [u32; LINE_WORDS];

/// The hash table of entries.
pub(super) struct BlockTable {
    /// The memory is zeroed at allocation, so that unused pages cost nothing where the operating
    /// system allocates them lazily.
    words: Vec<u32>,
    /// The number of words before the first cache line boundary.
    offset: usize,
    buckets: usize,
}

/// The two buckets in which entries of one block and one region of owners may lie, and their
/// fingerprint.
#[derive(Clone, Copy)]
pub(super) struct BlockKey {
    fingerprint: u32,
    first: usize,
    second: usize,
}

/// Whether a reply has confirmed an entry: see [`super::placing`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EntryClass {
    Confirmed,
    Claimed,
}

/// A value for each class of entries.
#[derive(Clone, Copy, Default)]
pub(super) struct ByClass<T> {
    pub(super) confirmed: T,
    pub(super) claimed: T,
}

/// The entry of an (owner, block) pair, without its fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockEntry {
    /// The id of the owner, below 2^11.
    pub(super) owner: u16,
    pub(super) class: EntryClass,
    /// Whether the entry represents several blocks.
    pub(super) wide: bool,
    /// How often the entry is touched.
    pub(super) interval: TouchInterval,
    /// The low bits of the epoch of its last touch.
    pub(super) stamp: u16,
}

/// The time between the touches of an entry, in 4 bits: 0 means less than one epoch, i means at
/// least 2^(i-1) and less than 2^i epochs, and 15 means unknown. Each touch moves the value by one
/// step towards its own interval, so the value stays near the median. 13 and 14 mark claims that
/// may be withdrawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TouchInterval(u8);

#[derive(Clone, Copy)]
pub(super) struct EntryPosition {
    bucket: usize,
    lane: usize,
}

// === impl ByClass ===

impl<T> ByClass<T> {
    pub(super) fn of(&self, class: EntryClass) -> &T {
        match class {
            EntryClass::Confirmed => &self.confirmed,
            EntryClass::Claimed => &self.claimed,
        }
    }

    pub(super) fn of_mut(&mut self, class: EntryClass) -> &mut T {
        match class {
            EntryClass::Confirmed => &mut self.confirmed,
            EntryClass::Claimed => &mut self.claimed,
        }
    }
}

// === impl BlockTable ===

impl BlockTable {
    /// Creates a table for `entries` entries, rounded up to whole buckets.
    pub(super) fn new(entries: usize) -> Self {
        let buckets = entries.div_ceil(LANES);
        let spare = if buckets == 0 { 0 } else { LINE_WORDS };
        let words = vec![0_u32; buckets * LINE_WORDS + spare];
        let offset = words.as_ptr().align_offset(LINE_BYTES).min(spare);
        Self {
            words,
            offset,
            buckets,
        }
    }

    pub(super) fn buckets(&self) -> usize {
        self.buckets
    }

    pub(super) fn bytes(&self) -> usize {
        self.words.len() * size_of::<u32>()
    }

    pub(super) fn key(&self, block: u64, region: u16) -> BlockKey {
        // The block is a hash already, so only the region must be mixed into every bit. Odd
        // multipliers (from SplitMix64) keep different blocks different. The high bits give the
        // first bucket, and the low bits the fingerprint.
        let x = (block ^ u64::from(region).wrapping_mul(0x9E37_79B9_7F4A_7C15))
            .wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let y = (x ^ (x >> 32)).wrapping_mul(0x94D0_49BB_1331_11EB);
        BlockKey {
            // The lowest bit of x only says whether the block is wide.
            fingerprint: match x as u32 & !WIDE | u32::from(is_wide(block)) {
                0 => NARROW_ZERO,
                fingerprint => fingerprint,
            },
            first: self.reduce(x),
            second: self.reduce(y),
        }
    }

    /// Reads a word of the first bucket of each block and region, so that the buckets are in the
    /// CPU caches when they are needed.
    pub(super) fn fetch(&self, keys: impl Iterator<Item = (u64, u16)>) {
        let word = |(block, region)| {
            self.line(self.key(block, region).first)
                .and_then(|line| line.first().copied())
                .unwrap_or(0)
        };
        std::hint::black_box(keys.map(word).fold(0, |all, word| all ^ word));
    }

    /// Whether the first bucket of `key` was ever full. If not, none of its entries was ever
    /// replaced.
    pub(super) fn was_full(&self, key: BlockKey) -> bool {
        self.line(key.first).is_some_and(was_full)
    }

    /// Calls `each` with every entry of `key`.
    #[inline(always)]
    pub(super) fn for_each(&self, key: BlockKey, mut each: impl FnMut(BlockEntry)) {
        for bucket in [key.first, key.second] {
            let Some(line) = self.line(bucket) else {
                return;
            };
            let mut hits = hits(line, key.fingerprint);
            while hits != 0 {
                let lane = hits.trailing_zeros() as usize;
                each(entry(line, lane));
                hits &= hits - 1;
            }
            if !was_full(line) {
                return;
            }
        }
    }

    /// Finds the entry of `key`, `owner` and `class`.
    pub(super) fn find(
        &self,
        key: BlockKey,
        owner: u16,
        class: EntryClass,
    ) -> Option<(EntryPosition, BlockEntry)> {
        for bucket in [key.first, key.second] {
            let line = self.line(bucket)?;
            let mut hits = hits(line, key.fingerprint);
            while hits != 0 {
                let lane = hits.trailing_zeros() as usize;
                let found = entry(line, lane);
                if found.owner == owner && found.class == class {
                    return Some((EntryPosition { bucket, lane }, found));
                }
                hits &= hits - 1;
            }
            if !was_full(line) {
                return None;
            }
        }
        None
    }

    /// Finds the entries of `key` and `owner`.
    pub(super) fn find_all(
        &self,
        key: BlockKey,
        owner: u16,
    ) -> ByClass<Option<(EntryPosition, BlockEntry)>> {
        let mut all = ByClass::default();
        for bucket in [key.first, key.second] {
            let Some(line) = self.line(bucket) else {
                return all;
            };
            let mut hits = hits(line, key.fingerprint);
            while hits != 0 {
                let lane = hits.trailing_zeros() as usize;
                let found = entry(line, lane);
                if found.owner == owner {
                    *all.of_mut(found.class) = Some((EntryPosition { bucket, lane }, found));
                }
                hits &= hits - 1;
            }
            if !was_full(line) {
                return all;
            }
        }
        all
    }

    /// Chooses the position for a new entry of `key`: an unused one, or, if all are used, that of
    /// the entry with the highest `rank`.
    pub(super) fn choose(
        &self,
        key: BlockKey,
        rank: impl Fn(BlockEntry) -> u32,
    ) -> Option<(EntryPosition, BlockEntry)> {
        for bucket in [key.first, key.second] {
            let free = equal(self.line(bucket)?.last_chunk()?, FREE);
            if free != 0 {
                return Some((
                    EntryPosition {
                        bucket,
                        lane: free.trailing_zeros() as usize,
                    },
                    BlockEntry::unpack(FREE, 0),
                ));
            }
        }
        let lines = [
            (key.first, self.line(key.first)?),
            (key.second, self.line(key.second)?),
        ];
        let places = lines.iter().flat_map(|&(bucket, line)| {
            (0..LANES).map(move |lane| (EntryPosition { bucket, lane }, entry(line, lane)))
        });
        places.max_by_key(|&(_, held)| rank(held))
    }

    /// Writes an entry of `key` to `place`.
    pub(super) fn put(&mut self, place: EntryPosition, key: BlockKey, new: BlockEntry) {
        if let Some((fingerprints, entries)) = self
            .line_mut(place.bucket)
            .map(|line| line.split_at_mut(LANES))
        {
            if let Some(fingerprint) = fingerprints.get_mut(place.lane) {
                *fingerprint = key.fingerprint;
            }
            if let Some(entry) = entries.get_mut(place.lane) {
                *entry = new.pack();
            }
        }
    }

    pub(super) fn free(&mut self, place: EntryPosition) {
        self.set(place, BlockEntry::unpack(FREE, 0));
    }

    /// Replaces the entry at `place`, keeping its key.
    pub(super) fn set(&mut self, place: EntryPosition, new: BlockEntry) {
        if let Some(entry) = self
            .line_mut(place.bucket)
            .and_then(|line| line.get_mut(LANES + place.lane))
        {
            *entry = new.pack();
        }
    }

    /// Frees the entries of `bucket` for which `keep` returns false.
    pub(super) fn retain(&mut self, bucket: usize, mut keep: impl FnMut(BlockEntry) -> bool) {
        let Some(line) = self.line_mut(bucket) else {
            return;
        };
        let (fingerprints, words) = line.split_at_mut(LANES);
        for (word, &fingerprint) in words.iter_mut().zip(fingerprints.iter()) {
            // Written only on a change, so that untouched pages stay untouched.
            if *word != FREE && !keep(BlockEntry::unpack(*word, fingerprint)) {
                *word = FREE;
            }
        }
    }

    fn reduce(&self, x: u64) -> usize {
        // The high half of x, scaled to the number of buckets (Lemire's multiply and shift).
        // `ENTRIES_MAX` keeps that number below 2^32.
        (((x >> 32) * self.buckets as u64) >> 32) as usize
    }

    fn line(&self, bucket: usize) -> Option<&TableLine> {
        self.words
            .get(self.offset..)?
            .as_chunks::<LINE_WORDS>()
            .0
            .get(bucket)
    }

    fn line_mut(&mut self, bucket: usize) -> Option<&mut TableLine> {
        self.words
            .get_mut(self.offset..)?
            .as_chunks_mut::<LINE_WORDS>()
            .0
            .get_mut(bucket)
    }
}

// === impl BlockEntry ===

impl BlockEntry {
    /// The number of blocks that the entry represents.
    pub(super) fn blocks(self) -> u32 {
        if self.wide { STRIDE as u32 } else { 1 }
    }

    fn pack(self) -> u32 {
        u32::from(self.class == EntryClass::Claimed) << 31
            | u32::from(self.interval.0) << 27
            | u32::from(self.owner) << 16
            | u32::from(self.stamp)
    }

    fn unpack(word: u32, fingerprint: u32) -> Self {
        Self {
            owner: (word >> 16) as u16 & 0x7FF,
            class: match word >> 31 {
                0 => EntryClass::Confirmed,
                _ => EntryClass::Claimed,
            },
            wide: fingerprint & WIDE != 0,
            interval: TouchInterval((word >> 27) as u8 & 0xF),
            stamp: word as u16,
        }
    }
}

// === impl TouchInterval ===

impl TouchInterval {
    /// The interval of an entry that was touched once.
    pub(super) const UNKNOWN: Self = Self(15);

    /// A claim that may be withdrawn, made once.
    pub(super) const CLAIMED: Self = Self(14);

    /// A claim that may be withdrawn, made several times.
    const CLAIMED_AGAIN: Self = Self(13);

    /// The longest known interval: 2^11 epochs or more, a quarter of a table full of touches.
    const LONGEST: u8 = 12;

    /// Returns the interval after a touch that comes `epochs` after the touch before it.
    pub(super) fn after(self, epochs: u64) -> Self {
        let seen = (u64::BITS - epochs.leading_zeros()).min(u32::from(Self::LONGEST)) as u8;
        match self {
            Self::CLAIMED | Self::CLAIMED_AGAIN => Self::CLAIMED_AGAIN,
            Self::UNKNOWN => Self(seen),
            Self(usual) => Self(if seen > usual {
                usual + 1
            } else {
                seen.max(usual.saturating_sub(1))
            }),
        }
    }

    /// Returns the middle of the interval's range, in epochs; `None` if it is unknown.
    pub(super) fn epochs(self) -> Option<f32> {
        match self.lasting() {
            Self::UNKNOWN => None,
            Self(0) => Some(0.5),
            Self(usual) => Some(0.75 * (1_u32 << usual) as f32),
        }
    }

    /// Whether the entry is a claim that may be withdrawn.
    pub(super) fn is_withdrawable(self) -> bool {
        matches!(self, Self::CLAIMED | Self::CLAIMED_AGAIN)
    }

    /// Whether the entry is a claim that may be withdrawn, made once.
    pub(super) fn is_claimed_once(self) -> bool {
        self == Self::CLAIMED
    }

    /// Returns the interval of an entry that can no longer be withdrawn. Several claims that waited
    /// for a reply count as less than an epoch apart.
    pub(super) fn lasting(self) -> Self {
        match self {
            Self::CLAIMED => Self::UNKNOWN,
            Self::CLAIMED_AGAIN => Self(0),
            lasting => lasting,
        }
    }
}

/// Returns the number of epochs since an entry was stamped.
pub(super) fn age(stamp: u16, epoch: u64) -> u16 {
    (epoch as u16).wrapping_sub(stamp)
}

/// Returns the epoch in which an entry was stamped.
pub(super) fn epoch_of(stamp: u16, epoch: u64) -> u64 {
    epoch.saturating_sub(u64::from(age(stamp, epoch)))
}

/// Returns a bit for each entry of a bucket that has this fingerprint.
#[inline(always)]
fn hits(line: &TableLine, fingerprint: u32) -> u32 {
    line.first_chunk()
        .map_or(0, |fingerprints| equal(fingerprints, fingerprint))
}

/// Returns a bit for each equal word. The code compiles to two vector compares, natively and in
/// wasm.
#[inline(always)]
fn equal(words: &[u32; LANES], word: u32) -> u32 {
    const BITS: [u32; LANES] = [1, 2, 4, 8, 16, 32, 64, 128];
    words
        .map(|have| if have == word { u32::MAX } else { 0 })
        .iter()
        .zip(BITS)
        .fold(0, |bits, (equal, bit)| bits | equal & bit)
}

fn entry(line: &TableLine, lane: usize) -> BlockEntry {
    BlockEntry::unpack(
        line.get(LANES + lane).copied().unwrap_or(FREE),
        line.get(lane).copied().unwrap_or(0),
    )
}

fn was_full(line: &TableLine) -> bool {
    line.get(LANES - 1)
        .is_some_and(|&fingerprint| fingerprint != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    fn owners(table: &BlockTable, key: BlockKey) -> Vec<u16> {
        let mut owners = Vec::new();
        table.for_each(key, |entry| owners.push(entry.owner));
        owners
    }

    #[test]
    fn lines_are_cache_lines() {
        for entries in [1, 8, 100, 10_000] {
            let table = BlockTable::new(entries);
            assert_eq!(table.line(0).unwrap().as_ptr() as usize % LINE_BYTES, 0);
            assert!(table.line(table.buckets() - 1).is_some());
        }
    }

    #[test]
    fn an_empty_table_holds_nothing() {
        let table = BlockTable::new(0);
        let key = table.key(1, 0);
        assert!(
            table.find(key, 1, EntryClass::Confirmed).is_none()
                && table.choose(key, |_| 0).is_none()
                && owners(&table, key).is_empty()
        );
        assert_eq!(table.bytes(), 0);
    }

    #[test]
    fn a_freed_place_does_not_hide_the_second_bucket() {
        let mut table = BlockTable::new(2 * LANES);
        let keys: Vec<BlockKey> = (0..10_000)
            .map(|block| table.key(block, 0))
            .filter(|key| (key.first, key.second) == (0, 1))
            .take(LANES + 1)
            .collect();
        for (owner, &key) in (1..).zip(&keys) {
            let (place, held) = table.choose(key, |_| 0).unwrap();
            assert_eq!(held.owner, NO_OWNER);
            table.put(
                place,
                key,
                BlockEntry {
                    owner,
                    class: EntryClass::Confirmed,
                    wide: false,
                    interval: TouchInterval::UNKNOWN,
                    stamp: 0,
                },
            );
        }
        table.retain(0, |entry| entry.owner == 5);
        let last = keys[LANES];
        assert_eq!(
            owners(&table, last),
            [LANES as u16 + 1],
            "it lies in the second bucket and is still found"
        );
        assert_eq!(owners(&table, keys[4]), [5]);
        assert!(
            owners(&table, keys[0])
                .iter()
                .all(|&owner| owner == NO_OWNER)
        );
    }

    #[test]
    fn the_highest_rank_goes() {
        let mut table = BlockTable::new(2 * LANES);
        let keys: Vec<BlockKey> = (0..10_000)
            .map(|block| table.key(block, 0))
            .filter(|key| (key.first, key.second) == (0, 1))
            .take(2 * LANES)
            .collect();
        for (owner, &key) in (1_u16..).zip(&keys) {
            let (place, _) = table.choose(key, |_| 0).unwrap();
            table.put(
                place,
                key,
                BlockEntry {
                    owner,
                    class: EntryClass::Confirmed,
                    wide: false,
                    interval: TouchInterval::UNKNOWN,
                    stamp: owner * 7 % 16,
                },
            );
        }
        let (_, victim) = table
            .choose(keys[0], |entry| u32::from(entry.stamp))
            .unwrap();
        assert_eq!(
            victim,
            BlockEntry {
                owner: 9,
                class: EntryClass::Confirmed,
                wide: false,
                interval: TouchInterval::UNKNOWN,
                stamp: 15
            }
        );
    }

    /// By chance, an entry agrees on k bits of the fingerprint with probability 2^-k. To see
    /// agreement on 32 bits would take days, so this test looks up absent blocks and counts
    /// agreement on 12 bits.
    #[test]
    fn false_positives_are_as_rare_as_theory_says() {
        let mut table = BlockTable::new(100_000);
        let mut rng = Rng::seeded(1);
        for _ in 0..60_000 {
            let key = table.key(rng.next_u64(), 0);
            let (place, _) = table.choose(key, |_| 0).unwrap();
            table.put(
                place,
                key,
                BlockEntry {
                    owner: 1,
                    class: EntryClass::Confirmed,
                    wide: false,
                    interval: TouchInterval::UNKNOWN,
                    stamp: 0,
                },
            );
        }
        let mut compared = 0_u32;
        let mut agree = 0_u32;
        let mut all_bits = 0;
        for _ in 0..1_000_000 {
            let key = table.key(rng.next_u64(), 1);
            for have in table
                .line(key.first)
                .unwrap()
                .iter()
                .take(LANES)
                .filter(|&&have| have != 0)
            {
                compared += 1;
                agree += u32::from((have ^ key.fingerprint) & 0xFFF == 0);
            }
            all_bits += owners(&table, key).len();
        }
        let expected = f64::from(compared) / 4096.0;
        assert!(
            (f64::from(agree) - expected).abs() < 5.0 * expected.sqrt(),
            "{agree} of {compared}, expected {expected}"
        );
        assert!(
            all_bits <= 1,
            "about one in a thousand such tests sees one at all"
        );
    }
}
