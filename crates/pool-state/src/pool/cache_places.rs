//! Finds, for each part of a prompt, the reason why its engine had to compute the tokens.
//!
//! At a pick, the index estimates where the prompt is cached, and where it was cached before. The
//! engine reports how many tokens it had cached, from the first token of the prompt. The rest is
//! divided at the ends of the parts that the index estimated:
//!
//! ```text
//!  0       hit      cached   elsewhere    given      lost          prompt
//!  |--------|---------|----------|----------|----------|-------------|
//!     hit    belief or   moved     evicted    restart    never seen
//!            rounding
//! ```
//! So hits and misses by cause add up exactly to the tokens of the prompt. If the engine had more
//! cached than the index estimated, the parts before the end of the hit are empty.

use scheduler::prefix::{MatchLength, blocks_of};

use super::miss_cause::{MissCause, MissedTokens};

/// Where the beginning of a prompt was cached at its pick, as estimated. Each field is a number of
/// blocks from the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CachePlaces {
    /// Blocks cached at the picked endpoint.
    pub(super) cached: u32,
    /// Blocks cached at the endpoint that had the most of the prompt cached.
    pub(super) elsewhere: u32,
    /// Blocks received by an endpoint that is still in the pool.
    pub(super) given: u32,
    /// Blocks received by an endpoint that has restarted or left the pool.
    pub(super) lost: u32,
}

// === impl CachePlaces ===

impl CachePlaces {
    /// Finds the causes for the tokens that an engine did not have cached. The engine had `hit` of
    /// `prompt` tokens cached, and the prompt has `blocks` blocks.
    pub(super) fn attribute(self, prompt: u32, hit: u32, blocks: u32) -> MissedTokens {
        let tokens = |part: u32| {
            let tokens = u64::from(part.min(blocks)) * u64::from(prompt) / u64::from(blocks.max(1));
            u32::try_from(tokens).unwrap_or(prompt)
        };
        // A difference of this size is not significant when a reply corrects the index.
        let is_rounding = tokens(self.cached).saturating_sub(hit) <= tokens(1 + self.cached / 16);
        let of_cached = if is_rounding {
            MissCause::Rounding
        } else {
            MissCause::WrongBelief
        };
        let mut missed = MissedTokens::default();
        let mut from = hit;
        for (until, cause) in [
            (tokens(self.cached), of_cached),
            (tokens(self.elsewhere), MissCause::Moved),
            (tokens(self.given), MissCause::Evicted),
            (tokens(self.lost), MissCause::Restart),
            (prompt, MissCause::NeverSeen),
        ] {
            missed.set(cause, until.saturating_sub(from));
            from = from.max(until);
        }
        missed
    }

    /// Returns the estimate for a request that moved to another endpoint, which has the part
    /// `known` of the prompt cached. Blocks that the former endpoint has cached count as
    /// `elsewhere`.
    pub(super) fn moved_to(self, known: MatchLength, hashes: &[u64]) -> Self {
        Self {
            cached: blocks_of(hashes, known.cached as usize),
            elsewhere: self.elsewhere.max(self.cached),
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACES: CachePlaces = CachePlaces {
        cached: 20,
        elsewhere: 40,
        given: 60,
        lost: 80,
    };

    fn missed(hit: u32) -> MissedTokens {
        PLACES.attribute(1_000, hit, 100)
    }

    #[test]
    fn a_prompt_is_divided_at_the_places_that_the_pick_knew() {
        //                           never evicted moved belief restart rounding unknown
        assert_eq!(missed(0).0, [200, 200, 200, 200, 200, 0, 0]);
        assert_eq!(
            missed(190).0,
            [200, 200, 200, 0, 200, 10, 0],
            "less than a block and a sixteenth"
        );
        assert_eq!(missed(200).0, [200, 200, 200, 0, 200, 0, 0]);
        assert_eq!(
            missed(500).0,
            [200, 100, 0, 0, 200, 0, 0],
            "a hit beyond the belief"
        );
        assert_eq!(missed(1_000).0, [0; 7]);
        assert_eq!(
            CachePlaces::default().attribute(1_000, 0, 100).0,
            [1_000, 0, 0, 0, 0, 0, 0]
        );
        assert_eq!(missed(0).main_cause().map(|(_, tokens)| tokens), Some(200));
        assert_eq!(missed(1_000).main_cause(), None);
    }

    /// Hits and misses by cause add up to the tokens of the prompt, whatever the engine reports and
    /// the index estimates.
    #[test]
    fn hits_and_misses_are_the_prompt() {
        let mut rng = scheduler::Rng::seeded(7);
        let mut below = |max: usize| u32::try_from(rng.below(max)).unwrap();
        for _ in 0..20_000 {
            let places = CachePlaces {
                cached: below(200),
                elsewhere: below(200),
                given: below(200),
                lost: below(200),
            };
            let prompt = below(100_000);
            let blocks = 1 + below(150);
            let hit = below(100_000).min(prompt);
            let missed: u64 = places
                .attribute(prompt, hit, blocks)
                .0
                .into_iter()
                .map(u64::from)
                .sum();
            assert_eq!(
                u64::from(hit) + missed,
                u64::from(prompt),
                "{places:?} {prompt} {hit} {blocks}"
            );
        }
    }

    #[test]
    fn a_retry_moves_the_request() {
        let hashes: Vec<u64> = (1..=100).map(|block| block << 1).collect();
        let places = PLACES.moved_to(
            MatchLength {
                cached: 10,
                maybe_cached: 90,
            },
            &hashes,
        );
        assert_eq!(
            places,
            CachePlaces {
                cached: 10,
                ..PLACES
            }
        );
        let places = CachePlaces {
            cached: 50,
            elsewhere: 50,
            given: 50,
            lost: 50,
        }
        .moved_to(MatchLength::default(), &hashes);
        assert_eq!(places.attribute(1_000, 0, 100).0, [500, 0, 500, 0, 0, 0, 0]);
    }
}
