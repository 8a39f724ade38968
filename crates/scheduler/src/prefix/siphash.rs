//! SipHash-2-4 for messages of whole words: a pseudorandom function with a key of 128 bits. Without
//! the key, a digest reveals nothing about the message.
//!
//! Source: Aumasson and Bernstein, "SipHash: a fast short-input PRF" (2012). With little-endian
//! words of 8 bytes, the digests equal the digests in the paper.

/// The number of rounds after each word. [`FINAL_ROUNDS`] is the number of rounds at the end.
const COMPRESSION_ROUNDS: u32 = 2;
const FINAL_ROUNDS: u32 = 4;

/// The state of hashing one message.
#[derive(Clone, Debug)]
pub(super) struct SipHash {
    v: [u64; 4],
    words: u64,
}

// === impl SipHash ===

impl SipHash {
    pub(super) fn new(key: u128) -> Self {
        // The casts split the key into its two halves.
        let low = key as u64;
        let high = (key >> 64) as u64;
        Self {
            v: [
                low ^ 0x736f_6d65_7073_6575,
                high ^ 0x646f_7261_6e64_6f6d,
                low ^ 0x6c79_6765_6e65_7261,
                high ^ 0x7465_6462_7974_6573,
            ],
            words: 0,
        }
    }

    #[inline(never)] // several callers, and the wasm module should be small
    pub(super) fn word(&mut self, word: u64) {
        self.words += 1;
        self.mix(word);
    }

    /// Adds a length-prefixed field, so that two fields cannot run together.
    #[inline(never)]
    pub(super) fn field(&mut self, bytes: &[u8]) {
        self.word(bytes.len() as u64);
        let (whole, rest) = bytes.as_chunks();
        whole
            .iter()
            .for_each(|chunk| self.word(u64::from_le_bytes(*chunk)));
        if !rest.is_empty() {
            self.word(
                rest.iter()
                    .rev()
                    .fold(0, |word, &byte| word << 8 | u64::from(byte)),
            );
        }
    }

    /// Returns the digest of the message with one more word.
    #[inline(never)] // three callers, and the wasm module should be small
    pub(super) fn of_word(&self, word: u64) -> u64 {
        let mut hash = self.clone();
        hash.word(word);
        hash.digest()
    }

    pub(super) fn digest(mut self) -> u64 {
        // The highest byte of the last word is the message's length in bytes, modulo 256.
        self.mix(self.words << 59);
        self.v[2] ^= 0xff;
        self.rounds(FINAL_ROUNDS);
        self.v.iter().fold(0, |digest, v| digest ^ v)
    }

    fn mix(&mut self, word: u64) {
        self.v[3] ^= word;
        self.rounds(COMPRESSION_ROUNDS);
        self.v[0] ^= word;
    }

    #[inline(never)]
    fn rounds(&mut self, rounds: u32) {
        let [mut a, mut b, mut c, mut d] = self.v;
        for _ in 0..rounds {
            a = a.wrapping_add(b);
            b = b.rotate_left(13) ^ a;
            a = a.rotate_left(32);
            c = c.wrapping_add(d);
            d = d.rotate_left(16) ^ c;
            a = a.wrapping_add(d);
            d = d.rotate_left(21) ^ a;
            c = c.wrapping_add(b);
            b = b.rotate_left(17) ^ c;
            c = c.rotate_left(32);
        }
        self.v = [a, b, c, d];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The key of the paper's test values: bytes 0 to 15.
    const KEY: u128 = 0x0f0e_0d0c_0b0a_0908_0706_0504_0302_0100;

    #[test]
    fn its_values_are_those_of_the_paper() {
        let message = [
            0x0706_0504_0302_0100,
            0x0f0e_0d0c_0b0a_0908,
            0x1716_1514_1312_1110,
            0x1f1e_1d1c_1b1a_1918,
        ];
        let of = |words: usize| {
            let mut hash = SipHash::new(KEY);
            message[..words].iter().for_each(|&word| hash.word(word));
            hash.digest()
        };
        assert_eq!(
            [0, 1, 2].map(of),
            [
                0x726f_db47_dd0e_0e31,
                0x93f5_f579_9a93_2462,
                0x3f2a_cc7f_57c2_9bdb
            ]
        );
    }

    #[test]
    fn fields_do_not_run_together() {
        let of = |fields: &[&[u8]]| {
            let mut hash = SipHash::new(KEY);
            fields.iter().for_each(|field| hash.field(field));
            hash.digest()
        };
        let mut all = vec![
            of(&[b"ab", b""]),
            of(&[b"a", b"b"]),
            of(&[b"", b"ab"]),
            of(&[b"ab\0", b""]),
            of(&[b"eight by", b"te"]),
        ];
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 5);
    }
}
