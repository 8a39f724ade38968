//! A prompt as a chain of block hashes.
//!
//! ```text
//! seed    = siphash(secret; len(model) model len(lora) lora len(cache_salt) cache_salt)
//!           each field padded to whole words of 8 bytes
//! text    = the prompt's pieces in order, with one byte 0xFF at each separator
//! sum(i)  = xxh64(seed; first (i + 1) * block_bytes bytes of text); the last: all of text
//! hash(i) = siphash(secret; sum(i))   a single word, which no seed's message is
//! kept    = hash(i) for i < 128, then every fourth: i + 1 = 132, 136, ...
//!           lowest bit: 0 for one block, 1 for four
//! ```
//!
//! Each hash covers all bytes before it, so equal hashes mean equal prefixes. Hashing every prefix
//! from its start takes one pass over the text, because xxh64 gives a digest at any point of its
//! stream. Its four running lanes (256 bits) also chain more state than feeding a 64-bit hash into
//! the next block would. Model, LoRA adapter and cache salt seed the chain, because engines share
//! no KV block between two models, adapters or salts.
//!
//! A deployment has one secret of 128 bits. Hashes leave the process, and xxh64 is not a keyed
//! function: a reader who knows the text of one sum can compute the seed, and then try other texts.
//! So the hasher publishes only a pseudorandom function of each sum, keyed by the secret. A reader
//! without the secret learns which hashes are equal, but no prompt, whatever prompts it can guess.
//!
//! Each of the first [`DENSE_BLOCKS`] blocks has a hash; after them only every [`STRIDE`]th block,
//! whose hash stands for itself and the blocks since the previous hash. Positions are counted from
//! the start, so prompts that extend each other agree on them. The shared part of a long prompt is
//! therefore found too short by less than [`STRIDE`] blocks, at most 2 % of it; in return, storing,
//! looking up and sending hashes costs a third. The lowest bit of a hash says how many blocks it
//! stands for ([`blocks_of`]), in every message and table.
//!
//! A trailing partial block counts, as in llm-d's approximate prefix producer. An engine caches
//! only full blocks, but its blocks are smaller (16 tokens against our 64), so most of such a tail
//! is cached; and a prompt shorter than one block keeps its affinity. The price: for prompts that
//! are repeated unchanged, the estimate is too long by less than a block (after the first
//! [`DENSE_BLOCKS`], by less than [`STRIDE`]).

use super::siphash::SipHash;
use super::xxh64::{STRIPE_BYTES, Xxh64};

/// Default block size, bytes: 64 tokens of 4 bytes, the smallest block that llm-d's producer
/// allows.
pub const BLOCK_BYTES_DEFAULT: usize = 256;

/// The smallest block size, bytes: one stripe of xxh64, about 8 tokens. No engine caches in smaller
/// units by default.
pub const BLOCK_BYTES_MIN: usize = STRIPE_BYTES;

/// The largest block size, bytes: 16,384 tokens of 4 bytes. With larger blocks, whole prompts would
/// fit into one block and match all or nothing.
pub const BLOCK_BYTES_MAX: usize = 65_536;

/// Maximum blocks of one prompt: a prompt of 1M tokens at [`BLOCK_BYTES_DEFAULT`]. llm-d stops at
/// 131,072 tokens (2,048 blocks), but today's agents send 200,000 tokens in the median, and what is
/// beyond the limit would look uncached everywhere. The cost at the limit is bounded: 128 KB of
/// hashes and about half a millisecond to record, for a prompt whose prefill takes minutes.
pub const BLOCKS_MAX: usize = 16_384;

/// The first blocks of a prompt, each with its own hash: 8,192 tokens at [`BLOCK_BYTES_DEFAULT`].
pub const DENSE_BLOCKS: usize = 128;

/// Blocks that each later hash stands for.
pub const STRIDE: usize = 4;

/// The bit that marks a hash that stands for [`STRIDE`] blocks.
const WIDE: u64 = 1;

/// Separates two pieces of a prompt (messages). The byte does not occur in UTF-8, so not in JSON
/// text.
const SEPARATOR: [u8; 1] = [0xFF];

/// Hashes one prompt, piece by piece. The result does not depend on how the bytes are divided into
/// calls of [`update`](Self::update).
#[derive(Clone, Debug)]
pub struct BlockHasher {
    text: Xxh64,
    /// The keyed function before any input.
    keyed: SipHash,
    block_bytes: usize,
    /// Blocks before those that the next hash stands for.
    blocks: usize,
    blocks_max: usize,
    /// Bytes until the next hash is due.
    bytes_left: usize,
}

/// Returns whether this hash stands for [`STRIDE`] blocks rather than for one.
#[must_use]
pub fn is_wide(hash: u64) -> bool {
    hash & WIDE != 0
}

/// The number of blocks that the first `count` of these hashes of a prompt stand for.
#[must_use]
pub fn blocks_of(hashes: &[u64], count: usize) -> u32 {
    let hashes = hashes.get(..count).unwrap_or(hashes);
    let wide = match hashes.last() {
        Some(&last) if is_wide(last) => hashes.len() - hashes.partition_point(|&hash| !is_wide(hash)),
        _ => 0,
    };
    u32::try_from(hashes.len() + wide * (STRIDE - 1)).unwrap_or(u32::MAX)
}

// === impl BlockHasher ===

impl BlockHasher {
    /// A hasher for a prompt to `model` with adapter `lora` (empty: none) and the client's
    /// `cache_salt` (empty: none). `block_bytes` is clamped to
    /// [`BLOCK_BYTES_MIN`]`..=`[`BLOCK_BYTES_MAX`] and rounded down to a multiple of
    /// [`BLOCK_BYTES_MIN`].
    #[must_use]
    pub fn new(secret: u128, model: &[u8], lora: &[u8], cache_salt: &[u8], block_bytes: usize) -> Self {
        let keyed = SipHash::new(secret);
        let mut seed = keyed.clone();
        [model, lora, cache_salt].into_iter().for_each(|field| seed.field(field));
        let block_bytes = block_bytes.clamp(BLOCK_BYTES_MIN, BLOCK_BYTES_MAX);
        let block_bytes = block_bytes - block_bytes % STRIPE_BYTES;
        Self { text: Xxh64::new(seed.digest()), keyed, block_bytes, blocks: 0, blocks_max: BLOCKS_MAX, bytes_left: block_bytes }
    }

    /// Limits the hasher to the first `blocks_max` blocks of a prompt, at most [`BLOCKS_MAX`].
    #[must_use]
    pub fn up_to(self, blocks_max: usize) -> Self {
        Self { blocks_max: blocks_max.min(BLOCKS_MAX), ..self }
    }

    /// Hashes the next bytes of the prompt and appends the hashes that become due. Ignores bytes
    /// beyond the last block.
    pub fn update(&mut self, mut bytes: &[u8], hashes: &mut Vec<u64>) {
        while self.has_room() && bytes.len() >= self.bytes_left {
            let (head, rest) = bytes.split_at(self.bytes_left);
            self.text.write(head);
            hashes.push(self.hash());
            self.blocks += self.span();
            self.bytes_left = self.span() * self.block_bytes;
            bytes = rest;
        }
        if self.has_room() {
            self.text.write(bytes);
            self.bytes_left -= bytes.len();
        }
    }

    /// Hashes a piece whose token count does not follow from its bytes (an image, by its data URI).
    /// A piece of any length counts as the 8 bytes of its hash.
    pub fn opaque(&mut self, bytes: &[u8], hashes: &mut Vec<u64>) {
        let mut hash = Xxh64::new(0);
        hash.write(bytes);
        self.update(&hash.digest().to_le_bytes(), hashes);
    }

    /// Ends a message, so that `"ab"`, `"c"` differs from `"a"`, `"bc"`.
    pub fn separator(&mut self, hashes: &mut Vec<u64>) {
        self.update(&SEPARATOR, hashes);
    }

    /// Ends the prompt; bytes left since the last hash make one more.
    pub fn finish(self, hashes: &mut Vec<u64>) {
        if self.has_room() && self.bytes_left < self.span() * self.block_bytes {
            hashes.push(self.hash());
        }
    }

    /// Blocks that the next hash stands for.
    fn span(&self) -> usize {
        if self.blocks < DENSE_BLOCKS { 1 } else { STRIDE }
    }

    fn has_room(&self) -> bool {
        self.blocks + self.span() <= self.blocks_max
    }

    #[inline(never)] // three callers, and the wasm module should be small
    fn hash(&self) -> u64 {
        let wide = if self.blocks < DENSE_BLOCKS { 0 } else { WIDE };
        let mut hash = self.keyed.clone();
        hash.word(self.text.digest());
        hash.digest() & !WIDE | wide
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BLOCK: usize = BLOCK_BYTES_DEFAULT;

    fn hasher() -> BlockHasher {
        BlockHasher::new(7, b"llama", b"", b"", BLOCK)
    }

    fn chain(messages: &[&[u8]]) -> Vec<u64> {
        let (mut hasher, mut blocks) = (hasher(), Vec::new());
        for message in messages {
            hasher.update(message, &mut blocks);
            hasher.separator(&mut blocks);
        }
        hasher.finish(&mut blocks);
        blocks
    }

    #[test]
    fn each_hash_is_the_keyed_one_of_the_prefix() {
        let text: Vec<u8> = (0..BLOCK * 3 + 17).map(|i| (i % 251) as u8).collect();
        let keyed = |words: &[u64]| {
            let mut hash = SipHash::new(7);
            words.iter().for_each(|&word| hash.word(word));
            hash.digest()
        };
        let seed = keyed(&[5, u64::from_le_bytes(*b"llama\0\0\0"), 0, 0]);
        let of = |bytes: &[u8]| {
            let mut sum = Xxh64::new(seed);
            sum.write(bytes);
            keyed(&[sum.digest()]) & !1
        };
        let (mut hasher, mut blocks) = (hasher(), Vec::new());
        hasher.update(&text, &mut blocks);
        assert_eq!(blocks, [of(&text[..BLOCK]), of(&text[..BLOCK * 2]), of(&text[..BLOCK * 3])]);
        hasher.finish(&mut blocks);
        assert_eq!(blocks[3..], [of(&text)]);
    }

    #[test]
    fn no_more_blocks_are_hashed_than_requested() {
        for (asked, given) in [(0, 0), (2, 2), (usize::MAX, 5)] {
            let (mut hasher, mut blocks) = (hasher().up_to(asked), Vec::new());
            hasher.update(&[b'x'; BLOCK * 5], &mut blocks);
            hasher.finish(&mut blocks);
            assert_eq!(blocks.len(), given);
        }
    }

    #[test]
    fn a_tail_counts_and_nothing_does_not() {
        let count = |len: usize| {
            let (mut hasher, mut blocks) = (hasher(), Vec::new());
            hasher.update(&vec![b'x'; len], &mut blocks);
            hasher.finish(&mut blocks);
            blocks.len()
        };
        assert_eq!([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK * 2].map(count), [0, 1, 1, 1, 2, 2]);
    }

    #[test]
    fn an_image_differs_from_another_and_fills_no_blocks() {
        let with = |image: &[u8]| {
            let (mut hasher, mut blocks) = (hasher(), Vec::new());
            hasher.opaque(image, &mut blocks);
            hasher.update(&[b'x'; BLOCK], &mut blocks);
            blocks
        };
        let image = vec![b'i'; BLOCK * 100];
        assert_eq!(with(&image).len(), 1);
        assert_eq!(with(&image), with(&image.clone()));
        assert_ne!(with(&image), with(&image[1..]));
    }

    #[test]
    fn messages_do_not_run_together() {
        assert_ne!(chain(&[b"ab", b"c"]), chain(&[b"a", b"bc"]));
        assert_ne!(chain(&[b"ab", b""]), chain(&[b"ab"]));
        assert_ne!(chain(&[b"", b"ab"]), chain(&[b"ab", b""]));
    }

    #[test]
    fn seed_fields_do_not_run_together() {
        let first = |secret: u128, model: &[u8], lora: &[u8], salt: &[u8]| {
            let (mut hasher, mut blocks) = (BlockHasher::new(secret, model, lora, salt, BLOCK), Vec::new());
            hasher.update(&[b'x'; BLOCK], &mut blocks);
            blocks[0]
        };
        let mut all = vec![
            first(1, b"ab", b"", b""),
            first(1, b"a", b"b", b""),
            first(1, b"", b"ab", b""),
            first(1, b"", b"", b"ab"),
            first(1, b"a", b"", b"b"),
            first(2, b"ab", b"", b""),
            first(1 << 64 | 1, b"ab", b"", b""),
        ];
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 7);
    }

    /// Inverts xxh64 of a text shorter than one stripe: each of its steps is invertible.
    fn seed_of(sum: u64, text: &[u8]) -> u64 {
        const PRIMES: [u64; 5] =
            [0x9E37_79B1_85EB_CA87, 0xC2B2_AE3D_27D4_EB4F, 0x1656_67B1_9E37_79F9, 0x85EB_CA77_C2B2_AE63, 0x27D4_EB2F_1656_67C5];
        let inverse = |prime: u64| (0..6).fold(prime, |x, _| x.wrapping_mul(2_u64.wrapping_sub(prime.wrapping_mul(x))));
        let unshift = |x: u64, by: u32| (0..64 / by).fold(x, |y, _| x ^ y >> by);
        let mut hash = unshift(sum, 32).wrapping_mul(inverse(PRIMES[2]));
        hash = unshift(hash, 29).wrapping_mul(inverse(PRIMES[1]));
        hash = unshift(hash, 33);
        for &byte in text.iter().rev() {
            hash = hash.wrapping_mul(inverse(PRIMES[0])).rotate_right(11) ^ u64::from(byte).wrapping_mul(PRIMES[4]);
        }
        hash.wrapping_sub(text.len() as u64).wrapping_sub(PRIMES[4])
    }

    /// An attacker reads hashes, has a dictionary that contains the prompts sent, and knows the
    /// text of one of the hashes.
    #[test]
    fn a_reader_with_a_dictionary_and_one_known_prompt_learns_no_other() {
        let mut sum = Xxh64::new(0x5eed);
        sum.write(b"hi\xFF");
        assert_eq!(seed_of(sum.digest(), b"hi\xFF"), 0x5eed, "of a bare xxh64 the reader learns the seed");

        let dictionary: Vec<String> = (0..2_000).map(|n| format!("prompt {n}")).collect();
        let (secret, mut sent) = (0x0123_4567_89ab_cdef_u128 << 64 | 0xfeed, Vec::new());
        for text in [&"hi".to_owned(), &dictionary[1_234]] {
            let mut hasher = BlockHasher::new(secret, b"llama", b"", b"", BLOCK);
            hasher.update(text.as_bytes(), &mut sent);
            hasher.separator(&mut sent);
            hasher.finish(&mut sent);
        }
        // The attempts that are possible without the secret: seeds computed back from the known
        // hash, with both values of the lowest bit, and weak secrets.
        let mut seeds: Vec<u64> = [sent[0], sent[0] | 1].map(|hash| seed_of(hash, b"hi\xFF")).into();
        seeds.extend(0..4);
        for text in &dictionary {
            let text = [text.as_bytes(), b"\xFF"].concat();
            for &seed in &seeds {
                let mut sum = Xxh64::new(seed);
                sum.write(&text);
                assert_ne!(sum.digest() & !WIDE, sent[1]);
            }
        }
    }

    #[test]
    fn stops_at_the_cap() {
        let (mut hasher, mut blocks) = (BlockHasher::new(0, b"", b"", b"", BLOCK_BYTES_MIN), Vec::new());
        hasher.update(&vec![b'x'; BLOCK_BYTES_MIN * (BLOCKS_MAX + 2) + 1], &mut blocks);
        hasher.separator(&mut blocks);
        hasher.update(b"more", &mut blocks);
        hasher.finish(&mut blocks);
        assert_eq!(blocks_of(&blocks, blocks.len()), BLOCKS_MAX as u32);
    }

    #[test]
    fn behind_the_first_blocks_every_fourth_has_a_hash_that_stands_for_four() {
        let text: Vec<u8> = (0..DENSE_BLOCKS + 3 * STRIDE).flat_map(|block| [block as u8; BLOCK]).collect();
        let of = |blocks: usize| {
            let (mut hasher, mut hashes) = (hasher(), Vec::new());
            hasher.update(&text[..blocks * BLOCK], &mut hashes);
            hasher.finish(&mut hashes);
            hashes
        };
        let all = of(DENSE_BLOCKS + 3 * STRIDE);
        assert_eq!(all.len(), DENSE_BLOCKS + 3);
        assert!(all.iter().enumerate().all(|(at, &hash)| is_wide(hash) == (at >= DENSE_BLOCKS)));
        assert_eq!([0, 1, 128, 129, 131, 999].map(|count| blocks_of(&all, count)), [0, 1, 128, 132, 140, 140]);
        let shorter = of(DENSE_BLOCKS + STRIDE + 3);
        assert_eq!(shorter[..DENSE_BLOCKS + 1], all[..DENSE_BLOCKS + 1]);
        assert_eq!((shorter.len(), shorter[DENSE_BLOCKS + 1] == all[DENSE_BLOCKS + 1]), (DENSE_BLOCKS + 2, false), "its tail is its own");
        assert_eq!(of(DENSE_BLOCKS)[..], all[..DENSE_BLOCKS]);
    }

    #[test]
    fn a_limit_between_two_places_leaves_out_what_lies_behind_the_first() {
        for (limit, hashes) in [(1, 1), (128, 128), (129, 128), (131, 128), (132, 129)] {
            let (mut hasher, mut all) = (hasher().up_to(limit), Vec::new());
            hasher.update(&[b'x'; 140 * BLOCK], &mut all);
            hasher.finish(&mut all);
            assert_eq!(all.len(), hashes, "{limit}");
        }
    }

    #[test]
    fn odd_block_sizes_are_brought_into_range() {
        for (asked, got) in [(0, 32), (31, 32), (33, 32), (100, 96), (256, 256), (usize::MAX, BLOCK_BYTES_MAX)] {
            assert_eq!(BlockHasher::new(0, b"", b"", b"", asked).block_bytes, got, "{asked}");
        }
    }

    proptest! {
        #[test]
        fn cuts_do_not_matter(text in prop::collection::vec(any::<u8>(), 0..6000), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6)) {
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
            cuts.sort_unstable();
            let hasher = || BlockHasher::new(7, b"llama", b"", b"", BLOCK_BYTES_MIN);
            let (mut whole, mut whole_blocks) = (hasher(), Vec::new());
            whole.update(&text, &mut whole_blocks);
            whole.finish(&mut whole_blocks);
            let (mut parts, mut parts_blocks, mut from) = (hasher(), Vec::new(), 0);
            for cut in cuts {
                parts.update(&text[from..cut], &mut parts_blocks);
                from = cut;
            }
            parts.update(&text[from..], &mut parts_blocks);
            parts.finish(&mut parts_blocks);
            prop_assert_eq!(whole_blocks, parts_blocks);
        }

        #[test]
        fn chains_agree_as_far_as_the_text_does(a in prop::collection::vec(0_u8..2, 1..8000), b in prop::collection::vec(0_u8..2, 1..8000), common in 0..8000_usize) {
            let mut b = b;
            for (to, from) in b.iter_mut().zip(a.iter().take(common)) {
                *to = *from;
            }
            let same = a.iter().zip(&b).take_while(|(x, y)| x == y).count() / BLOCK_BYTES_MIN;
            let chain = |text: &[u8]| {
                let (mut hasher, mut hashes) = (BlockHasher::new(7, b"llama", b"", b"", BLOCK_BYTES_MIN), Vec::new());
                hasher.update(text, &mut hashes);
                hasher.separator(&mut hashes);
                hasher.finish(&mut hashes);
                hashes
            };
            let (chain_a, chain_b) = (chain(&a), chain(&b));
            let agree = chain_a.iter().zip(&chain_b).take_while(|(x, y)| x == y).count();
            if a == b {
                prop_assert_eq!(chain_a, chain_b);
            } else {
                prop_assert_eq!(blocks_of(&chain_a, agree) as usize, same - same.saturating_sub(DENSE_BLOCKS) % STRIDE);
                prop_assert!(chain_a[agree..].iter().zip(&chain_b[agree..]).all(|(x, y)| x != y), "once apart, apart for ever");
            }
        }
    }
}
