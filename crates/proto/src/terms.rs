//! The rule for which terms a reader accepts.
//!
//! The term of a daemon is the time at which it began to lead, in ms since 1970, or one more than
//! the last term that it knows. A reader refuses terms older than the term that it knows. So after
//! a term from the far future, a reader would refuse every later daemon.

/// The maximum time by which a term may be ahead of the reader's clock, in ms. One day is far more
/// than the difference between the clocks of a deployment, and far more than daemons raise terms.
pub const TERM_AHEAD_MS_MAX: u64 = 86_400_000;

/// The time (2025-01-01 in ms since 1970) below which a clock was never set. A reader with such a
/// clock accepts only terms of this century.
const CLOCK_SET_MS: u64 = 1_735_689_600_000;

/// The end of this century: 2100-01-01 in ms since 1970.
const CENTURY_END_MS: u64 = 4_102_444_800_000;

/// Whether a reader whose clock shows `unix_ms` accepts this term.
#[must_use]
pub fn is_credible(term: u64, unix_ms: u64) -> bool {
    let latest = if unix_ms < CLOCK_SET_MS {
        CENTURY_END_MS
    } else {
        unix_ms
    };
    term <= latest.saturating_add(TERM_AHEAD_MS_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_term_of_the_far_future_is_not_believed() {
        let now = CLOCK_SET_MS + 1;
        for term in [0, 40, now, now + TERM_AHEAD_MS_MAX] {
            assert!(is_credible(term, now), "{term}");
        }
        for term in [now + TERM_AHEAD_MS_MAX + 1, u64::MAX] {
            assert!(!is_credible(term, now), "{term}");
        }
        assert!(is_credible(now, 0), "the clock of the reader was never set");
        assert!(!is_credible(u64::MAX, 0));
    }
}
