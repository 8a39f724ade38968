//! A prompt as a chain of block hashes.
//!
//! ```text
//! section = tools, system, turns: the pieces of one in order, with one byte 0xFF after each
//! sum(i)  = xxh64(siphash(secret); first (i + 1) * block_bytes bytes of the section)
//! whole   = the same of all bytes of the section
//! hash(i) = siphash(secret; len(model) model len(cache_salt) cache_salt whole... sum(i))
//!           each field padded to whole words of 8 bytes; the sums of the sections before
//! kept    = all blocks until the prompt has 128, then every fourth of a section: i + 1 = 132, ...
//!           lowest bit: 0 for one block, 1 for four
//! ```
//!
//! Each hash covers all bytes before it, so equal hashes mean equal prefixes. The sums of all
//! prefixes take one pass over the text, because xxh64 gives a digest at any point of its stream.
//! The four lanes of xxh64 (256 bits) also carry more state from block to block than a 64-bit hash
//! would. Model and cache salt are part of each hash, because engines share no KV block between two
//! models, adapters or salts.
//!
//! **Before the whole prompt is known.** Clients write the fields of a body in different orders:
//! many write `messages` first, and `model` and `tools` after them. So each section is hashed by
//! itself ([`SectionSums`]) while its bytes arrive. At the end, the model and the other sections
//! are added to each kept block ([`block_hashes`]). To make that possible, each section begins a
//! block of its own. The bytes behind the last kept block of a section enter only `whole`, and have
//! a separate hash only where the prompt ends.
//!
//! A deployment has one secret of 128 bits. Hashes leave the process, and xxh64 does not protect
//! its seed: a reader who knows the text of one sum can compute the seed, and then try other texts.
//! So each published hash is a pseudorandom function of a sum, keyed by the secret. A reader
//! without the secret learns which hashes are equal, but learns no prompt, even if the reader can
//! guess prompts.
//!
//! Each of the first [`DENSE_BLOCKS`] blocks has a hash. After them only every [`STRIDE`]th block
//! has a hash, which represents that block and the blocks since the previous hash. Positions are
//! counted from the start, so a prompt and its extension have hashes at the same positions. The
//! shared part of a long prompt is therefore estimated too short by less than [`STRIDE`] blocks, at
//! most 2 % of its length. In return, hashes cost a third of the memory, time and messages. In
//! every message and table, the lowest bit of a hash says how many blocks the hash represents
//! ([`blocks_of`]).
//!
//! A trailing partial block has a hash, as in llm-d's approximate prefix producer. An engine caches
//! only full blocks, but its blocks are smaller (16 tokens, here 64), so the engine caches most of
//! this block. Because of this hash, a prompt shorter than one block also stays at the same
//! endpoint. For prompts that are repeated unchanged, the estimate is therefore too long by less
//! than a block (after the first [`DENSE_BLOCKS`], by less than [`STRIDE`]).

use super::siphash::SipHash;
use super::xxh64::{STRIPE_BYTES, Xxh64};

/// The default block size in bytes: 64 tokens of 4 bytes, the smallest block that llm-d's
/// approximate prefix producer allows.
pub const BLOCK_BYTES_DEFAULT: usize = 256;

/// The smallest block size, in bytes: one stripe of xxh64, about 8 tokens. No engine caches in
/// smaller units by default.
pub const BLOCK_BYTES_MIN: usize = STRIPE_BYTES;

/// The largest block size, in bytes: 16,384 tokens of 4 bytes. With larger blocks, whole prompts
/// would fit into one block and would match completely or not at all.
pub const BLOCK_BYTES_MAX: usize = 65_536;

/// The maximum number of blocks of one prompt: 1M tokens at [`BLOCK_BYTES_DEFAULT`]. llm-d stops at
/// 131,072 tokens (2,048 blocks). But today's agents send 200,000 tokens in the median, and tokens
/// beyond the limit would look uncached everywhere. A prompt at the limit, whose prefill takes
/// minutes, has 34 KB of hashes, which are recorded in about half a millisecond.
pub const BLOCKS_MAX: usize = 16_384;

/// The number of blocks, from the first of a prompt, that each have a separate hash: 8,192 tokens
/// at [`BLOCK_BYTES_DEFAULT`].
pub const DENSE_BLOCKS: usize = 128;

/// The number of blocks that each later hash represents.
pub const STRIDE: usize = 4;

/// The bit that marks a hash of [`STRIDE`] blocks.
const WIDE: u64 = 1;

/// The byte between two pieces (messages) of a prompt. The byte does not occur in UTF-8, and so not
/// in JSON text.
const SEPARATOR: [u8; 1] = [0xFF];

/// One section of a prompt, hashed up to the end of each block. The result does not depend on how
/// the bytes are divided into calls of [`update`](Self::update).
#[derive(Clone, Debug)]
pub struct SectionSums {
    text: Xxh64,
    /// The state of the hash before the first byte of text.
    empty: Xxh64,
    block_bytes: usize,
    blocks_max: usize,
    /// The number of blocks that the sums so far represent.
    blocks: usize,
    /// The number of bytes until the next sum is computed.
    bytes_left: usize,
    sums: Vec<u64>,
}

/// A piece whose token count does not follow from its bytes, such as the data URI of an image. The
/// prompt contains the 8 bytes of the piece's hash instead, whatever the length of the piece.
#[derive(Clone, Debug)]
pub struct OpaquePiece(Xxh64);

/// Returns whether a hash represents [`STRIDE`] blocks rather than one block.
#[must_use]
pub fn is_wide(hash: u64) -> bool {
    hash & WIDE != 0
}

/// Returns the number of blocks that the first `count` of these hashes of a prompt represent.
#[must_use]
pub fn blocks_of(hashes: &[u64], count: usize) -> u32 {
    let hashes = hashes.get(..count).unwrap_or(hashes);
    let wide = match hashes.last() {
        Some(&last) if is_wide(last) => {
            hashes.len() - hashes.partition_point(|&hash| !is_wide(hash))
        }
        _ => 0,
    };
    u32::try_from(hashes.len() + wide * (STRIDE - 1)).unwrap_or(u32::MAX)
}

/// Returns the hashes of the prompt's blocks, beginning with the first block. `sections` are in the
/// order of the prompt; `cache_salt` is empty if the client sent none.
#[must_use]
pub fn block_hashes(
    secret: u128,
    model: &[u8],
    cache_salt: &[u8],
    sections: &[SectionSums],
) -> Vec<u64> {
    let mut keyed = SipHash::new(secret);
    [model, cache_salt]
        .into_iter()
        .for_each(|field| keyed.field(field));
    let mut hashes = Vec::with_capacity(
        sections
            .iter()
            .map(|section| section.sums.len())
            .sum::<usize>()
            + 1,
    );
    let mut blocks = 0;
    let last = sections.iter().rposition(|section| section.text.len() > 0);
    for (at, section) in sections
        .iter()
        .enumerate()
        .take(last.map_or(0, |last| last + 1))
    {
        let Some(whole) = section.hash(&keyed, &mut blocks, &mut hashes, last == Some(at)) else {
            break;
        };
        keyed.word(whole);
    }
    hashes
}

// === impl SectionSums ===

impl SectionSums {
    /// Creates a section without text. `block_bytes` is clamped to
    /// [`BLOCK_BYTES_MIN`]`..=`[`BLOCK_BYTES_MAX`] and rounded down to a multiple of
    /// [`BLOCK_BYTES_MIN`]; `blocks_max` limits the number of blocks of the prompt, and is clamped
    /// to at most [`BLOCKS_MAX`].
    #[must_use]
    pub fn new(secret: u128, block_bytes: usize, blocks_max: usize) -> Self {
        let block_bytes = block_bytes.clamp(BLOCK_BYTES_MIN, BLOCK_BYTES_MAX);
        let block_bytes = block_bytes - block_bytes % STRIPE_BYTES;
        let empty = Xxh64::new(SipHash::new(secret).digest());
        let blocks_max = blocks_max.min(BLOCKS_MAX);
        Self {
            text: empty.clone(),
            empty,
            block_bytes,
            blocks_max,
            blocks: 0,
            bytes_left: block_bytes,
            sums: Vec::new(),
        }
    }

    /// Returns the size of the allocated memory of the sums, in bytes.
    pub fn memory(&self) -> usize {
        self.sums.capacity() * size_of::<u64>()
    }

    /// Adds the next bytes of the section. Ignores bytes beyond the last block.
    #[inline(never)] // several callers, and the wasm module should be small
    pub fn update(&mut self, mut bytes: &[u8]) {
        while self.has_room() && bytes.len() >= self.bytes_left {
            let (head, rest) = bytes.split_at(self.bytes_left);
            self.text.write(head);
            if self.sums.capacity() == 0 {
                self.sums.reserve_exact(DENSE_BLOCKS);
            }
            self.sums.push(self.text.digest());
            self.blocks += self.span();
            self.bytes_left = self.span() * self.block_bytes;
            bytes = rest;
        }
        if self.has_room() {
            self.text.write(bytes);
            self.bytes_left -= bytes.len();
        }
    }

    /// Adds a piece that [`OpaquePiece`] hashed.
    pub fn opaque(&mut self, piece: &OpaquePiece) {
        self.update(&piece.0.digest().to_le_bytes());
    }

    /// Ends a piece, so that the pieces `"ab"`, `"c"` have another hash than `"a"`, `"bc"`.
    pub fn separator(&mut self) {
        self.update(&SEPARATOR);
    }

    /// Forgets the text so far.
    pub fn clear(&mut self) {
        self.sums.clear();
        self.blocks = 0;
        self.bytes_left = self.block_bytes;
        self.text = self.empty.clone();
    }

    /// Appends the hashes of the section to `hashes`, which represent `blocks` blocks so far.
    /// Returns the checksum of the whole section, or `None` if the prompt has reached the maximum
    /// number of blocks.
    fn hash(
        &self,
        keyed: &SipHash,
        blocks: &mut usize,
        hashes: &mut Vec<u64>,
        is_last: bool,
    ) -> Option<u64> {
        // `dense` is a multiple of the stride, so that each later hash represents [`STRIDE`]
        // blocks.
        let dense = DENSE_BLOCKS
            .saturating_sub(*blocks)
            .next_multiple_of(STRIDE);
        let mut end = 0;
        let mut push = |sum: u64, end: usize| {
            let (span, wide) = if end < dense { (1, 0) } else { (STRIDE, WIDE) };
            if *blocks + span > self.blocks_max {
                return false;
            }
            hashes.push(keyed.of_word(sum) & !WIDE | wide);
            *blocks += span;
            true
        };
        for (at, &sum) in self.sums.iter().enumerate() {
            let place = if at < DENSE_BLOCKS {
                at + 1
            } else {
                DENSE_BLOCKS + (at + 1 - DENSE_BLOCKS) * STRIDE
            };
            if place <= dense || place.is_multiple_of(STRIDE) {
                if !push(sum, end) {
                    return None;
                }
                end = place;
            }
        }
        let whole = self.text.digest();
        if is_last && self.text.len() > end as u64 * self.block_bytes as u64 {
            push(whole, end);
        }
        Some(whole)
    }

    fn span(&self) -> usize {
        if self.blocks < DENSE_BLOCKS {
            1
        } else {
            STRIDE
        }
    }

    fn has_room(&self) -> bool {
        self.blocks + self.span() <= self.blocks_max
    }
}

// === impl OpaquePiece ===

impl OpaquePiece {
    /// Adds the next bytes of the piece.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }
}

impl Default for OpaquePiece {
    fn default() -> Self {
        Self(Xxh64::new(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BLOCK: usize = BLOCK_BYTES_DEFAULT;

    fn section() -> SectionSums {
        SectionSums::new(7, BLOCK, BLOCKS_MAX)
    }

    fn of(text: &[u8]) -> SectionSums {
        let mut sums = section();
        sums.update(text);
        sums
    }

    fn hashes(sections: &[SectionSums]) -> Vec<u64> {
        block_hashes(7, b"llama", b"", sections)
    }

    fn chain(messages: &[&[u8]]) -> Vec<u64> {
        let mut sums = section();
        for message in messages {
            sums.update(message);
            sums.separator();
        }
        hashes(&[sums])
    }

    fn text(bytes: usize) -> Vec<u8> {
        (0..bytes).map(|i| (i % 251) as u8).collect()
    }

    #[test]
    fn each_hash_is_the_keyed_one_of_the_prefix() {
        let keyed = |words: &[u64]| {
            let mut hash = SipHash::new(7);
            words.iter().for_each(|&word| hash.word(word));
            hash.digest()
        };
        let sum = |bytes: &[u8]| {
            let mut sum = Xxh64::new(keyed(&[]));
            sum.write(bytes);
            sum.digest()
        };
        let model = [5, u64::from_le_bytes(*b"llama\0\0\0"), 0];
        let hash = |before: &[&[u8]], bytes: &[u8]| {
            let before = before.iter().map(|text| sum(text));
            keyed(
                &model
                    .into_iter()
                    .chain(before)
                    .chain([sum(bytes)])
                    .collect::<Vec<_>>(),
            ) & !1
        };
        let turns = text(BLOCK * 3 + 17);
        let of_turns = |before: &[&[u8]]| {
            [BLOCK, BLOCK * 2, BLOCK * 3, turns.len()].map(|end| hash(before, &turns[..end]))
        };
        assert_eq!(hashes(&[of(&turns)]), of_turns(&[]));
        assert_eq!(
            hashes(&[section(), section(), of(&turns)]),
            of_turns(&[b"", b""])
        );
        let tools = text(BLOCK + 1);
        let all = [
            &[hash(&[], &tools[..BLOCK])][..],
            &of_turns(&[&tools, b"system"]),
        ]
        .concat();
        assert_eq!(
            hashes(&[of(&tools), of(b"system"), of(&turns)]),
            all,
            "only the end of the prompt has a part of a block"
        );
        assert_eq!(
            hashes(&[of(&tools), of(b"system"), section()])[1..],
            [hash(&[&tools], b"system")]
        );
    }

    #[test]
    fn no_more_blocks_are_hashed_than_requested() {
        for (asked, given) in [(0, 0), (2, 2), (usize::MAX, 5)] {
            let mut sums = SectionSums::new(7, BLOCK, asked);
            sums.update(&[b'x'; BLOCK * 5]);
            assert_eq!(hashes(&[sums.clone()]).len(), given);
            assert_eq!(
                hashes(&[sums.clone(), section(), sums]).len(),
                asked.min(10)
            );
        }
    }

    #[test]
    fn a_tail_counts_and_nothing_does_not() {
        let count = |len: usize| hashes(&[of(&vec![b'x'; len])]).len();
        assert_eq!(
            [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK * 2].map(count),
            [0, 1, 1, 1, 2, 2]
        );
    }

    #[test]
    fn an_image_differs_from_another_and_fills_no_blocks() {
        let with = |image: &[u8]| {
            let mut piece = OpaquePiece::default();
            image.chunks(1_000).for_each(|part| piece.update(part));
            let mut sums = section();
            sums.opaque(&piece);
            sums.update(&[b'x'; BLOCK - 8]);
            hashes(&[sums])
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
    fn a_cleared_section_is_as_new() {
        let mut sums = of(&text(BLOCK * 140));
        sums.clear();
        sums.update(b"again");
        assert_eq!(hashes(&[sums]), hashes(&[of(b"again")]));
    }

    #[test]
    fn fields_and_sections_do_not_run_together() {
        let first = |secret: u128, model: &[u8], salt: &[u8], sections: [&[u8]; 2]| {
            let sections = sections.map(|text| {
                let mut sums = SectionSums::new(secret, BLOCK, BLOCKS_MAX);
                sums.update(text);
                sums
            });
            block_hashes(secret, model, salt, &sections)[0]
        };
        let mut all = vec![
            first(1, b"ab", b"", [b"", b"xy"]),
            first(1, b"a", b"b", [b"", b"xy"]),
            first(1, b"", b"ab", [b"", b"xy"]),
            first(2, b"ab", b"", [b"", b"xy"]),
            first(1 << 64 | 1, b"ab", b"", [b"", b"xy"]),
            first(1, b"ab", b"", [b"x", b"y"]),
            first(1, b"ab", b"", [b"xy", b""]),
        ];
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 7);
    }

    /// Computes the seed from the xxh64 of a text shorter than one stripe. This works because each
    /// step of xxh64 is invertible.
    fn seed_of(sum: u64, text: &[u8]) -> u64 {
        const PRIMES: [u64; 5] = [
            0x9E37_79B1_85EB_CA87,
            0xC2B2_AE3D_27D4_EB4F,
            0x1656_67B1_9E37_79F9,
            0x85EB_CA77_C2B2_AE63,
            0x27D4_EB2F_1656_67C5,
        ];
        let inverse = |prime: u64| {
            (0..6).fold(prime, |x, _| {
                x.wrapping_mul(2_u64.wrapping_sub(prime.wrapping_mul(x)))
            })
        };
        let unshift = |x: u64, by: u32| (0..64 / by).fold(x, |y, _| x ^ y >> by);
        let mut hash = unshift(sum, 32).wrapping_mul(inverse(PRIMES[2]));
        hash = unshift(hash, 29).wrapping_mul(inverse(PRIMES[1]));
        hash = unshift(hash, 33);
        for &byte in text.iter().rev() {
            hash = hash.wrapping_mul(inverse(PRIMES[0])).rotate_right(11)
                ^ u64::from(byte).wrapping_mul(PRIMES[4]);
        }
        hash.wrapping_sub(text.len() as u64).wrapping_sub(PRIMES[4])
    }

    /// Checks that an attacker learns no other prompt, if the attacker reads hashes, has a
    /// dictionary that contains the prompts sent, and knows the text of one of the hashes.
    #[test]
    fn a_reader_with_a_dictionary_and_one_known_prompt_learns_no_other() {
        let mut sum = Xxh64::new(0x5eed);
        sum.write(b"hi\xFF");
        assert_eq!(
            seed_of(sum.digest(), b"hi\xFF"),
            0x5eed,
            "of a bare xxh64 the reader learns the seed"
        );

        let dictionary: Vec<String> = (0..2_000).map(|n| format!("prompt {n}")).collect();
        let secret = 0x0123_4567_89ab_cdef_u128 << 64 | 0xfeed;
        let mut sent = Vec::new();
        for text in [&"hi".to_owned(), &dictionary[1_234]] {
            let mut sums = SectionSums::new(secret, BLOCK, BLOCKS_MAX);
            sums.update(text.as_bytes());
            sums.separator();
            sent.extend(block_hashes(secret, b"llama", b"", &[sums]));
        }
        // Without the secret, an attacker can try weak secrets. The attacker can also try seeds
        // that are computed from the known hash, with both values of the lowest bit of the hash.
        let mut seeds: Vec<u64> = [sent[0], sent[0] | 1]
            .map(|hash| seed_of(hash, b"hi\xFF"))
            .into();
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
        let mut sums = SectionSums::new(0, BLOCK_BYTES_MIN, usize::MAX);
        sums.update(&vec![b'x'; BLOCK_BYTES_MIN * (BLOCKS_MAX + 2) + 1]);
        sums.separator();
        sums.update(b"more");
        let blocks = hashes(&[sums]);
        assert_eq!(blocks_of(&blocks, blocks.len()), BLOCKS_MAX as u32);
    }

    #[test]
    fn behind_the_first_blocks_every_fourth_has_a_hash_that_stands_for_four() {
        let text: Vec<u8> = (0..DENSE_BLOCKS + 3 * STRIDE)
            .flat_map(|block| [block as u8; BLOCK])
            .collect();
        let of = |blocks: usize| hashes(&[of(&text[..blocks * BLOCK])]);
        let all = of(DENSE_BLOCKS + 3 * STRIDE);
        assert_eq!(all.len(), DENSE_BLOCKS + 3);
        assert!(
            all.iter()
                .enumerate()
                .all(|(at, &hash)| is_wide(hash) == (at >= DENSE_BLOCKS))
        );
        assert_eq!(
            [0, 1, 128, 129, 131, 999].map(|count| blocks_of(&all, count)),
            [0, 1, 128, 132, 140, 140]
        );
        let shorter = of(DENSE_BLOCKS + STRIDE + 3);
        assert_eq!(shorter[..DENSE_BLOCKS + 1], all[..DENSE_BLOCKS + 1]);
        assert_eq!(
            (
                shorter.len(),
                shorter[DENSE_BLOCKS + 1] == all[DENSE_BLOCKS + 1]
            ),
            (DENSE_BLOCKS + 2, false),
            "its tail is its own"
        );
        assert_eq!(of(DENSE_BLOCKS)[..], all[..DENSE_BLOCKS]);
    }

    #[test]
    fn the_first_blocks_are_those_of_the_prompt_and_no_block_counts_twice() {
        for (head, turns, dense, wide) in [
            (1, 127, 128, 0),
            (1, 128, 129, 0),
            (1, 132, 129, 1),
            (3, 140, 131, 3),
            (128, 8, 128, 2),
            (140, 8, 128, 5),
        ] {
            let all = hashes(&[of(&text(head * BLOCK)), of(&text(turns * BLOCK))]);
            assert_eq!(all.len(), dense + wide, "{head} + {turns}");
            assert!(
                all.iter()
                    .enumerate()
                    .all(|(at, &hash)| is_wide(hash) == (at >= dense)),
                "{head} + {turns}"
            );
            assert_eq!(
                blocks_of(&all, all.len()) as usize,
                head + turns,
                "{head} + {turns}"
            );
        }
    }

    #[test]
    fn a_limit_between_two_places_leaves_out_what_lies_behind_the_first() {
        for (limit, count) in [(1, 1), (128, 128), (129, 128), (131, 128), (132, 129)] {
            let mut sums = SectionSums::new(7, BLOCK, limit);
            sums.update(&[b'x'; 140 * BLOCK]);
            assert_eq!(hashes(&[sums]).len(), count, "{limit}");
        }
    }

    #[test]
    fn odd_block_sizes_are_brought_into_range() {
        for (asked, got) in [
            (0, 32),
            (31, 32),
            (33, 32),
            (100, 96),
            (256, 256),
            (usize::MAX, BLOCK_BYTES_MAX),
        ] {
            assert_eq!(
                SectionSums::new(0, asked, BLOCKS_MAX).block_bytes,
                got,
                "{asked}"
            );
        }
    }

    proptest! {
        #[test]
        fn cuts_do_not_matter(text in prop::collection::vec(any::<u8>(), 0..6000), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6)) {
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
            cuts.sort_unstable();
            let section = || SectionSums::new(7, BLOCK_BYTES_MIN, BLOCKS_MAX);
            let mut whole = section();
            let mut parts = section();
            let mut from = 0;
            whole.update(&text);
            for cut in cuts {
                parts.update(&text[from..cut]);
                from = cut;
            }
            parts.update(&text[from..]);
            prop_assert_eq!(hashes(&[whole]), hashes(&[parts]));
        }

        #[test]
        fn chains_agree_as_far_as_the_text_does(a in prop::collection::vec(0_u8..2, 1..8000), b in prop::collection::vec(0_u8..2, 1..8000), common in 0..8000_usize) {
            let mut b = b;
            for (to, from) in b.iter_mut().zip(a.iter().take(common)) {
                *to = *from;
            }
            let same = a.iter().zip(&b).take_while(|(x, y)| x == y).count() / BLOCK_BYTES_MIN;
            let chain = |text: &[u8]| {
                let mut sums = SectionSums::new(7, BLOCK_BYTES_MIN, BLOCKS_MAX);
                sums.update(text);
                sums.separator();
                hashes(&[sums])
            };
            let chain_a = chain(&a);
            let chain_b = chain(&b);
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
