//! A streaming xxHash64, which gives a digest at every point of the stream.
//!
//! Source: Yann Collet, "xxHash fast digest algorithm", doc/xxhash_spec.md, XXH64. In measurements
//! xxHash64 was the fastest 64-bit hash in wasm, which has no wide multiply. The state of the hash
//! carries over from block to block, so chaining takes no extra time.

/// The number of bytes that the four lanes process in one step.
pub(super) const STRIPE_BYTES: usize = 32;

const PRIME_1: u64 = 0x9E37_79B1_85EB_CA87;
const PRIME_2: u64 = 0xC2B2_AE3D_27D4_EB4F;
const PRIME_3: u64 = 0x1656_67B1_9E37_79F9;
const PRIME_4: u64 = 0x85EB_CA77_C2B2_AE63;
const PRIME_5: u64 = 0x27D4_EB2F_1656_67C5;

/// Returns the hash of `bytes` with seed 0.
pub(crate) fn xxh64(bytes: &[u8]) -> u64 {
    let mut hash = Xxh64::new(0);
    hash.write(bytes);
    hash.digest()
}

/// The state of the hash after the bytes so far.
#[derive(Clone, Debug)]
pub(super) struct Xxh64 {
    seed: u64,
    lanes: [u64; 4],
    len: u64,
    pending: [u8; STRIPE_BYTES],
    pending_len: usize,
}

// === impl Xxh64 ===

impl Xxh64 {
    pub(super) fn new(seed: u64) -> Self {
        let lanes = [
            seed.wrapping_add(PRIME_1).wrapping_add(PRIME_2),
            seed.wrapping_add(PRIME_2),
            seed,
            seed.wrapping_sub(PRIME_1),
        ];
        Self {
            seed,
            lanes,
            len: 0,
            pending: [0; STRIPE_BYTES],
            pending_len: 0,
        }
    }

    pub(super) fn write(&mut self, bytes: &[u8]) {
        self.len = self.len.wrapping_add(bytes.len() as u64);
        let bytes = if self.pending_len == 0 {
            bytes
        } else {
            self.fill_pending(bytes)
        };
        let (stripes, rest) = bytes.as_chunks::<STRIPE_BYTES>();
        let mut lanes = self.lanes;
        for stripe in stripes {
            absorb(&mut lanes, stripe);
        }
        self.lanes = lanes;
        self.keep(rest);
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Returns the hash of all bytes so far. More bytes may follow.
    pub(super) fn digest(&self) -> u64 {
        let [a, b, c, d] = self.lanes;
        let mut hash = if self.len < STRIPE_BYTES as u64 {
            self.seed.wrapping_add(PRIME_5)
        } else {
            let sum = a
                .rotate_left(1)
                .wrapping_add(b.rotate_left(7))
                .wrapping_add(c.rotate_left(12))
                .wrapping_add(d.rotate_left(18));
            self.lanes.iter().fold(sum, |hash, &lane| {
                (hash ^ round(0, lane))
                    .wrapping_mul(PRIME_1)
                    .wrapping_add(PRIME_4)
            })
        };
        hash = hash.wrapping_add(self.len);
        let (words, rest) = self
            .pending
            .get(..self.pending_len)
            .unwrap_or(&[])
            .as_chunks::<8>();
        for word in words {
            hash = (hash ^ round(0, u64::from_le_bytes(*word)))
                .rotate_left(27)
                .wrapping_mul(PRIME_1)
                .wrapping_add(PRIME_4);
        }
        let (halves, rest) = rest.as_chunks::<4>();
        for half in halves {
            let half = u64::from(u32::from_le_bytes(*half)).wrapping_mul(PRIME_1);
            hash = (hash ^ half)
                .rotate_left(23)
                .wrapping_mul(PRIME_2)
                .wrapping_add(PRIME_3);
        }
        for &byte in rest {
            hash = (hash ^ u64::from(byte).wrapping_mul(PRIME_5))
                .rotate_left(11)
                .wrapping_mul(PRIME_1);
        }
        avalanche(hash)
    }

    /// Fills the incomplete stripe with bytes from `bytes`, and returns the other bytes.
    fn fill_pending<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        let (head, rest) = bytes.split_at(bytes.len().min(STRIPE_BYTES - self.pending_len));
        self.keep(head);
        if self.pending_len == STRIPE_BYTES {
            let stripe = self.pending;
            absorb(&mut self.lanes, &stripe);
            self.pending_len = 0;
        }
        rest
    }

    fn keep(&mut self, bytes: &[u8]) {
        for (to, &from) in self.pending.iter_mut().skip(self.pending_len).zip(bytes) {
            *to = from;
        }
        self.pending_len += bytes.len();
    }
}

fn absorb(lanes: &mut [u64; 4], stripe: &[u8; STRIPE_BYTES]) {
    let (words, _) = stripe.as_chunks::<8>();
    for (lane, word) in lanes.iter_mut().zip(words) {
        *lane = round(*lane, u64::from_le_bytes(*word));
    }
}

fn round(lane: u64, word: u64) -> u64 {
    lane.wrapping_add(word.wrapping_mul(PRIME_2))
        .rotate_left(31)
        .wrapping_mul(PRIME_1)
}

fn avalanche(mut hash: u64) -> u64 {
    hash = (hash ^ (hash >> 33)).wrapping_mul(PRIME_2);
    hash = (hash ^ (hash >> 29)).wrapping_mul(PRIME_3);
    hash ^ (hash >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hash(seed: u64, bytes: &[u8]) -> u64 {
        let mut state = Xxh64::new(seed);
        state.write(bytes);
        state.digest()
    }

    /// Returns the input of the sanity check in the xxHash project.
    fn sanity(len: usize) -> Vec<u8> {
        let start = 2_654_435_761_u64;
        std::iter::successors(Some(start), |x| {
            Some(x.wrapping_mul(11_400_714_785_074_694_797))
        })
        .map(|x| (x >> 56) as u8)
        .take(len)
        .collect()
    }

    #[test]
    fn published_vectors() {
        assert_eq!(hash(0, b""), 0xEF46_DB37_51D8_E999);
        assert_eq!(hash(0, b"a"), 0xD24E_C4F1_A98C_6E5B);
        assert_eq!(hash(0, b"abc"), 0x44BC_2CF5_AD77_0999);
        let seed = 2_654_435_761;
        for (len, unseeded, seeded) in [
            (0, 0xEF46_DB37_51D8_E999, 0xAC75_FDA2_929B_17EF),
            (1, 0xE934_A84A_DB05_2768, 0x5014_6076_43A9_B4C3),
            (14, 0x8282_DCC4_994E_35C8, 0xC3BD_6BF6_3DEB_6DF0),
            (222, 0xB641_AE8C_B691_C174, 0x20CB_8AB7_AE10_C14A),
        ] {
            assert_eq!(
                (hash(0, &sanity(len)), hash(seed, &sanity(len))),
                (unseeded, seeded),
                "{len} bytes"
            );
        }
    }

    #[test]
    fn one_stripe_is_hashed_as_a_stripe() {
        assert_eq!(hash(0, &sanity(32)), 0x18B2_1649_2BB4_4B70);
    }

    proptest! {
        #[test]
        fn the_split_does_not_matter(bytes: Vec<u8>, seed: u64, cut: prop::sample::Index) {
            let (head, tail) = bytes.split_at(cut.index(bytes.len() + 1));
            let mut state = Xxh64::new(seed);
            state.write(head);
            state.write(tail);
            prop_assert_eq!(state.digest(), hash(seed, &bytes));
        }
    }
}
