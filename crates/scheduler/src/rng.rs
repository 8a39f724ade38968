//! The random generator: a value that the caller seeds, and from which the scheduler draws numbers.

/// A SplitMix64 generator: eight bytes of state, good enough to break ties and to sample, and
/// identical on every host.
///
/// Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Creates a generator with this seed.
    #[must_use]
    pub const fn seeded(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the state of the generator. A new generator with the returned value as its seed
    /// returns the same numbers as this generator does from now on.
    pub const fn state(&self) -> u64 {
        self.0
    }

    /// Returns the next 64 uniform bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a uniform number in the open interval (0, 1). The number is never 0, so its
    /// logarithm is finite.
    pub fn open01(&mut self) -> f32 {
        open_unit(self.next_u64())
    }

    /// Returns a uniform index in `0..n`, or 0 if `n` is 0. The bias is below 2^-32 for the sizes
    /// that a pool can have.
    pub fn below(&mut self, n: usize) -> usize {
        let wide = (self.next_u64() >> 32).wrapping_mul(n as u64) >> 32;
        usize::try_from(wide).unwrap_or(0)
    }
}

/// Returns the middle of one of 2^23 equal parts of (0, 1). With 2^24 parts, the middle of a part
/// would not fit the mantissa, and the middle of the last part would round to 1.
fn open_unit(bits: u64) -> f32 {
    // The cast is exact, because 23 bits and a half fit the mantissa of an f32.
    let part = (bits >> 41) as f32;
    (part + 0.5) / 8_388_608.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_seed_same_draws() {
        let mut a = Rng::seeded(7);
        let mut b = Rng::seeded(7);
        assert!((0..100).all(|_| a.next_u64() == b.next_u64()));
    }

    #[test]
    fn a_state_is_a_seed_of_the_rest() {
        let mut rng = Rng::seeded(7);
        rng.next_u64();
        let mut rest = Rng::seeded(rng.state());
        assert!((0..100).all(|_| rng.next_u64() == rest.next_u64()));
    }

    #[test]
    fn draws_what_splitmix64_draws() {
        let mut rng = Rng::seeded(1_234_567);
        let known = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
            4_593_380_528_125_082_431,
        ];
        assert_eq!(
            known.map(|_| rng.next_u64()),
            known,
            "the published first draws of this seed"
        );
    }

    #[test]
    fn below_reaches_every_index_and_no_other() {
        let mut rng = Rng::seeded(1);
        let mut seen = [0u32; 5];
        for _ in 0..5_000 {
            seen[rng.below(5)] += 1;
        }
        assert!(seen.iter().all(|&n| (800..1200).contains(&n)), "{seen:?}");
        assert_eq!(rng.below(0), 0);
    }

    #[test]
    fn open01_is_open() {
        assert!(open_unit(0) > 0.0 && open_unit(u64::MAX) < 1.0);
        let mut rng = Rng::seeded(3);
        assert!(
            (0..100_000)
                .map(|_| rng.open01())
                .all(|x| x > 0.0 && x < 1.0)
        );
    }
}
