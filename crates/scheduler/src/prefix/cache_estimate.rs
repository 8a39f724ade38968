//! The estimate at a pick of how much of the prompt an endpoint has cached, and the correction of
//! the estimate by the endpoint's reply.

use super::hash::blocks_of;
use super::index::PrefixIndex;
use super::lookup::MatchLength;
use super::owners::ReuseDistance;
use super::placing::BlockClaim;
use crate::endpoint::EndpointRef;

/// The estimate, at a pick, of the part of a prompt that an endpoint has cached.
#[derive(Clone, Copy, Debug)]
pub struct CacheEstimate {
    endpoint: EndpointRef,
    /// The number of hashes, from the first, that the endpoint was estimated to have cached.
    known: usize,
    held: CachedPart,
    may_hold: CachedPart,
}

/// The beginning of a prompt, and how long ago the endpoint received the last block of this
/// beginning.
#[derive(Clone, Copy, Debug)]
struct CachedPart {
    blocks: u32,
    reuse: Option<ReuseDistance>,
}

// === impl CacheEstimate ===

impl CacheEstimate {
    #[must_use]
    pub fn endpoint(&self) -> EndpointRef {
        self.endpoint
    }

    /// Returns the hashes of the prompt that were not estimated to be cached.
    #[must_use]
    pub fn new_hashes<'h>(&self, hashes: &'h [u64]) -> &'h [u64] {
        hashes.get(self.known..).unwrap_or_default()
    }
}

// === impl PrefixIndex ===

impl PrefixIndex {
    /// Records a claim that `endpoint` gets a prompt with these hashes. `known` is the part of the
    /// prompt that the endpoint was estimated to have cached before.
    pub fn place(
        &mut self,
        endpoint: EndpointRef,
        hashes: &[u64],
        known: MatchLength,
    ) -> CacheEstimate {
        let part = |length: u32| {
            let last = length
                .checked_sub(1)
                .and_then(|last| hashes.get(last as usize));
            CachedPart {
                blocks: blocks_of(hashes, length as usize),
                reuse: last.and_then(|&hash| self.reuse(endpoint, hash)),
            }
        };
        let held = part(known.cached);
        let may_hold = if known.maybe_cached > known.cached {
            part(known.maybe_cached)
        } else {
            held
        };
        // Confirmed blocks need no claim. If the last of the cached blocks is only claimed, all
        // blocks are claimed again.
        let claimed_from = match held.reuse {
            Some(_) => known.cached as usize,
            None => 0,
        };
        if self.fits(endpoint, hashes) {
            let claimed = hashes.get(claimed_from..).unwrap_or_default();
            self.claim(endpoint, claimed, BlockClaim::Unconfirmed);
        }
        CacheEstimate {
            endpoint,
            known: known.cached as usize,
            held,
            may_hold,
        }
    }

    /// Corrects the estimated capacity by a reply: the engine had cached `cached` of `prompt`
    /// tokens in a prompt of `blocks` blocks. The engine's token counts differ from the token
    /// counts of the estimate, so only the cached share is compared. A difference of a sixteenth is
    /// tolerated, because of chat templates and block ends. A miss in the maybe-cached part changes
    /// nothing. Replies to one client that contradict the estimate count once for each eighth of
    /// the capacity that is received.
    pub fn correct(
        &mut self,
        belief: &CacheEstimate,
        blocks: u32,
        cached: u32,
        prompt: u32,
        client: u64,
    ) {
        let Some(held) = (u64::from(cached) * u64::from(blocks)).checked_div(u64::from(prompt))
        else {
            return;
        };
        let slack = |part: CachedPart| 1 + u64::from(part.blocks / 16);
        let has = |part: CachedPart| held + slack(part) >= u64::from(part.blocks);
        // The maybe-cached part is compared separately only if it exceeds the cached part by more
        // than the slack.
        let doubts = u64::from(belief.may_hold.blocks)
            > u64::from(belief.held.blocks) + slack(belief.may_hold);
        let part = if doubts && has(belief.may_hold) {
            belief.may_hold
        } else {
            belief.held
        };
        if held > u64::from(belief.may_hold.blocks) + slack(belief.may_hold) {
            if self.counts_reply(belief.endpoint, client, true) {
                self.learn_more(belief.endpoint);
            }
        } else if let Some(reuse) = part.reuse
            && self.counts_reply(belief.endpoint, client, !has(part))
        {
            self.learn(belief.endpoint, reuse, has(part));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::{Generation, Slot};

    const ENGINE: EndpointRef = EndpointRef {
        slot: Slot(1),
        generation: Generation(1),
    };

    /// In a list of replies, this client stands for 250 other blocks that the engine receives.
    const OTHER_BLOCKS: u64 = u64::MAX;

    /// Records thirty prompts of 100 blocks, so that eight to nine are cached and ten more maybe
    /// cached. Sends prompt number `again` once more, for which the estimate should be `believed`.
    /// The engine reports that `cached` of the prompt's 6,400 tokens were cached. Returns the
    /// estimated capacity after this report.
    fn capacity(again: usize, believed: MatchLength, cached: u32) -> u32 {
        let mut index = PrefixIndex::with_capacity(100_000);
        index.set_capacity(ENGINE, 1_000);
        let prompts: Vec<Vec<u64>> = (0..30)
            .map(|n| (1..=100).map(|block| (n * 1_000 + block) << 1).collect())
            .collect();
        prompts
            .iter()
            .for_each(|hashes| index.record(ENGINE, hashes));
        let mut known = Vec::new();
        index.matched(&prompts[again], &[ENGINE], &mut known);
        assert_eq!(known, [believed]);
        let belief = index.place(ENGINE, &prompts[again], known[0]);
        index.correct(&belief, 100, cached, 6_400, 0);
        index.capacity(ENGINE).unwrap()
    }

    #[test]
    fn a_reply_corrects_the_estimated_capacity() {
        let capacity = |cached| {
            capacity(
                26,
                MatchLength {
                    cached: 100,
                    maybe_cached: 100,
                },
                cached,
            )
        };
        assert!(capacity(0) < 1_000, "it was gone");
        assert_eq!(capacity(6_400), 1_000, "it was there");
        assert_eq!(
            capacity(6_000),
            1_000,
            "except for a sixteenth, which is templates and block ends"
        );
    }

    #[test]
    fn a_client_whose_prompts_miss_lowers_the_capacity_once_for_an_eighth_of_new_blocks() {
        let capacity = |replies: &[(u64, bool)]| {
            let mut index = PrefixIndex::with_capacity(100_000);
            index.set_capacity(ENGINE, 1_000);
            let part = CachedPart {
                blocks: 100,
                reuse: Some(ReuseDistance {
                    at_least: 500,
                    at_most: 501,
                }),
            };
            let belief = CacheEstimate {
                endpoint: ENGINE,
                known: 100,
                held: part,
                may_hold: part,
            };
            let blocks: Vec<u64> = (1..=2_000).map(|block| block << 1).collect();
            blocks
                .chunks(100)
                .for_each(|hashes| index.record(ENGINE, hashes));
            for (client, is_hit) in replies {
                if *client == OTHER_BLOCKS {
                    let more: Vec<u64> = (3_001..=3_250).map(|block| block << 1).collect();
                    more.chunks(50)
                        .for_each(|hashes| index.record(ENGINE, hashes));
                    continue;
                }
                index.correct(&belief, 100, u32::from(*is_hit) * 6_400, 6_400, *client);
            }
            index.capacity(ENGINE).unwrap()
        };
        let hit = (1, true);
        let miss = (2, false);
        let misses = [miss; 30];
        assert_eq!(capacity(&[&[hit][..], &misses[..]].concat()), 875);
        assert_eq!(capacity(&[hit, miss].repeat(15)), 875, "beside others");
        assert_eq!(
            capacity(&[hit, miss, (OTHER_BLOCKS, true), miss, hit, miss]),
            766,
            "the endpoint received a quarter of its capacity"
        );
        assert!(capacity(&misses) < 600, "the only client");
        assert!(
            capacity(&[&[hit][..], &[miss; 60][..]].concat()) < 600,
            "the other is gone"
        );
    }

    #[test]
    fn a_maybe_cached_part_within_the_slack_teaches_nothing() {
        for (held, cached) in [(0, 0), (95, 95 * 64)] {
            let mut index = PrefixIndex::with_capacity(100_000);
            index.set_capacity(ENGINE, 1_000);
            let (prompt, other): (Vec<u64>, Vec<u64>) = (
                (1..=100).map(|block| block << 1).collect(),
                (201..=1_401).map(|block| block << 1).collect(),
            );
            index.record(ENGINE, &prompt);
            other
                .chunks(100)
                .for_each(|blocks| index.record(ENGINE, blocks));
            index.record(ENGINE, &prompt[..held]);
            let blocks = if held == 0 { &prompt[..1] } else { &prompt };
            let mut known = Vec::new();
            index.matched(blocks, &[ENGINE], &mut known);
            assert_eq!(
                known,
                [MatchLength {
                    cached: held as u32,
                    maybe_cached: blocks.len() as u32
                }]
            );
            let belief = index.place(ENGINE, blocks, known[0]);
            index.correct(
                &belief,
                blocks.len() as u32,
                cached,
                64 * blocks.len() as u32,
                0,
            );
            assert_eq!(index.capacity(ENGINE), Some(1_000), "{held} held");
        }
    }

    #[test]
    fn of_maybe_cached_blocks_only_a_hit_teaches() {
        let capacity = |cached| {
            capacity(
                16,
                MatchLength {
                    cached: 0,
                    maybe_cached: 100,
                },
                cached,
            )
        };
        assert_eq!([0, 3_000].map(capacity), [1_000; 2]);
        assert_eq!([6_000, 6_400].map(capacity), [1_125; 2]);
    }

    #[test]
    fn a_withdrawal_removes_only_blocks_that_were_not_there_before() {
        let mut index = PrefixIndex::with_capacity(100_000);
        let (hashes, mut known): (Vec<u64>, _) =
            ((1..=100).map(|block| block << 1).collect(), Vec::new());
        let mut held = |index: &PrefixIndex| {
            index.matched(&hashes, &[ENGINE], &mut known);
            known[0].cached
        };
        index.record(ENGINE, &hashes[..30]);
        let belief = index.place(
            ENGINE,
            &hashes,
            MatchLength {
                cached: 30,
                maybe_cached: 30,
            },
        );
        assert_eq!(held(&index), 100);
        for _ in 0..2 {
            index.withdraw(ENGINE, belief.new_hashes(&hashes));
            assert_eq!(held(&index), 30);
            assert_eq!(index.stats().entries, 30);
        }
        index.place(ENGINE, &hashes, MatchLength::default());
        assert_eq!(index.confirm(ENGINE, &hashes), 30, "confirmed before");
        index.withdraw(ENGINE, &hashes);
        assert_eq!(held(&index), 100, "confirmed blocks stay");
        assert_eq!(index.confirm(ENGINE, &hashes), 100);
    }

    #[test]
    fn more_hits_than_estimated_raise_the_capacity() {
        let mut index = PrefixIndex::with_capacity(100_000);
        index.set_capacity(ENGINE, 1_000);
        let belief = index.place(ENGINE, &[2, 4, 6, 8], MatchLength::default());
        index.correct(&belief, 4, 0, 0, 0);
        assert_eq!(index.capacity(ENGINE), Some(1_000));
        index.correct(&belief, 4, 256, 256, 0);
        assert!(index.capacity(ENGINE).is_some_and(|blocks| blocks > 1_000));
    }

    #[test]
    fn a_client_with_hits_beyond_the_estimate_raises_the_capacity_once_until_another_gets_one() {
        let capacity = |clients: &[u64]| {
            let mut index = PrefixIndex::with_capacity(100_000);
            index.set_capacity(ENGINE, 1_000);
            let belief = index.place(ENGINE, &[2, 4, 6, 8], MatchLength::default());
            for client in clients {
                index.correct(&belief, 4, 256, 256, *client);
            }
            index.capacity(ENGINE).unwrap()
        };
        assert_eq!(capacity(&[1; 6]), 2_000, "the only client");
        assert_eq!(capacity(&[1, 2]), 1_265);
        assert_eq!(capacity(&[1, 2, 2, 2, 2, 2, 2]), 1_265);
        assert_eq!(capacity(&[1, 2, 2, 2, 1, 2]), 1_600);
    }
}
