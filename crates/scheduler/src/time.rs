//! Points in time, which callers pass as arguments.

/// A point in time on a monotonic clock, in nanoseconds. Only the difference between two timestamps
/// has a meaning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp(pub u64);

impl Timestamp {
    /// Returns the milliseconds since `earlier`; 0 when `earlier` is later.
    #[must_use]
    pub fn ms_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0) / 1_000_000
    }

    /// Returns the microseconds since `earlier`; 0 when `earlier` is later.
    #[must_use]
    pub fn us_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0) / 1_000
    }

    #[must_use]
    pub fn plus_ms(self, ms: u64) -> Self {
        // Saturates without a product of 128 bits, which is slow and long in wasm.
        Self(
            self.0
                .saturating_add(ms.min(u64::MAX / 1_000_000) * 1_000_000),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_and_order() {
        let early = Timestamp(1_000_000);
        let late = Timestamp(5_500_999);
        assert_eq!((late.ms_since(early), late.us_since(early)), (4, 4_500));
        assert_eq!((early.ms_since(late), early.us_since(late)), (0, 0));
        assert_eq!(early.plus_ms(3), Timestamp(4_000_000));
        assert_eq!(late.plus_ms(u64::MAX), Timestamp(u64::MAX));
    }
}
