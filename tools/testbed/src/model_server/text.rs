//! Text as tokens: four bytes are a token, sixteen tokens are a block.
//!
//! There is no tokenizer: prompts are rendered to bytes, and every four bytes are a token.
//! Generated tokens are four bytes of text too (a word and a space). So a client that sends an
//! answer back in its next turn continues the prefix whose blocks the engine still has cached.

use super::engine::BLOCK_TOKENS;

/// The number of bytes of a token. English text has about four bytes per token, and llm-d's
/// estimating tokenizer uses the same number.
pub(super) const TOKEN_BYTES: usize = 4;
const BLOCK_BYTES: usize = TOKEN_BYTES * BLOCK_TOKENS as usize;

const WORDS: [&str; 16] = [
    "the ", "sky ", "was ", "red ", "and ", "one ", "old ", "cat ", "sat ", "for ", "its ", "tea ",
    "but ", "who ", "can ", "say ",
];

/// Odd constants for the folded multiply; any constants with well spread bits work.
const FOLD: [u64; 2] = [0x9e37_79b9_7f4a_7c15, 0xd6e8_feb8_6659_fd93];

pub(super) fn token_count(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(TOKEN_BYTES)).unwrap_or(u32::MAX)
}

/// Returns a 64-bit hash that is the same in every process, so that engines with the same seed give
/// the same answers.
pub(super) fn hash(seed: u64, bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut state = seed ^ FOLD[1].wrapping_mul(bytes.len() as u64 + 1);
    for word in words {
        state = fold(state, u64::from_le_bytes(*word));
    }
    let mut last = [0; 8];
    for (to, from) in last.iter_mut().zip(rest) {
        *to = *from;
    }
    fold(state, u64::from_le_bytes(last))
}

fn fold(state: u64, word: u64) -> u64 {
    let product = u128::from(state ^ word ^ FOLD[0]) * u128::from(FOLD[1]);
    (product as u64) ^ ((product >> 64) as u64).rotate_left(29) ^ state.rotate_left(7)
}

/// Returns the chained hashes of the full blocks of `text`; `salt` separates adapters and tenants.
pub(super) fn block_hashes(salt: u64, text: &[u8]) -> Vec<u64> {
    let (blocks, _) = text.as_chunks::<BLOCK_BYTES>();
    blocks
        .iter()
        .scan(salt, |chain, block| {
            *chain = hash(*chain, block);
            Some(*chain)
        })
        .collect()
}

/// A small random number generator with a seed (splitmix64).
#[derive(Clone, Debug)]
pub(super) struct TextRng(pub u64);

impl TextRng {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(FOLD[0]);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Draws a uniform number in (0, 1].
    pub(super) fn unit(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }
}

/// Appends `tokens` tokens of seeded text.
pub(super) fn write_tokens(rng: &mut TextRng, tokens: u32, text: &mut Vec<u8>) {
    text.reserve(tokens as usize * TOKEN_BYTES);
    for _ in 0..tokens {
        text.extend_from_slice(WORDS[(rng.next() % WORDS.len() as u64) as usize].as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_token_is_four_bytes_and_a_part_counts_as_one() {
        assert_eq!([0, 1, 4, 5].map(token_count), [0, 1, 1, 2]);
        assert!(WORDS.iter().all(|word| word.len() == TOKEN_BYTES));
    }

    #[test]
    fn salt_separates_equal_texts() {
        let text = [b'x'; BLOCK_BYTES * 2];
        assert_ne!(block_hashes(1, &text), block_hashes(2, &text));
        assert_ne!(
            block_hashes(1, &text)[0],
            block_hashes(1, &text)[1],
            "equal blocks at other positions differ"
        );
    }

    proptest! {
        #[test]
        fn equal_prefixes_and_only_they_share_hashes(
            head in proptest::collection::vec(any::<u8>(), 0..300), a in any::<u8>(), b in any::<u8>(), tail in 0..200_usize,
        ) {
            let text = |byte: u8| head.iter().copied().chain(std::iter::repeat_n(byte, tail)).collect::<Vec<u8>>();
            let one = block_hashes(0, &text(a));
            let other = block_hashes(0, &text(b));
            let shared = if a == b { one.len() } else { (head.len() / BLOCK_BYTES).min(one.len()) };
            prop_assert_eq!(&one[..shared], &other[..shared]);
            prop_assert!(one[shared..].iter().zip(&other[shared..]).all(|(x, y)| x != y));
        }
    }
}
