//! What was believed of an endpoint's cache when it was picked, and what its reply says of that.

use super::hash::blocks_of;
use super::index::PrefixIndex;
use super::owners::Reuse;
use crate::snapshot::EndpointRef;

/// How much of a prompt an endpoint was believed to hold, and how long ago it was given the last of that.
#[derive(Clone, Copy, Debug)]
pub struct Belief {
    endpoint: EndpointRef,
    blocks: u32,
    reuse: Option<Reuse>,
}

impl PrefixIndex {
    /// [`Self::record`]s that `endpoint` is given a prompt of these hashes, of which it was believed to hold the first `known`.
    pub fn place(&mut self, endpoint: EndpointRef, hashes: &[u64], known: u32) -> Belief {
        let last = known.checked_sub(1).and_then(|last| hashes.get(last as usize));
        let reuse = last.and_then(|&hash| self.reuse(endpoint, hash));
        self.record(endpoint, hashes);
        Belief { endpoint, blocks: blocks_of(hashes, known as usize), reuse }
    }

    /// The engine told that it had `cached` of the `prompt` tokens of a prompt of so many blocks. Its tokens are not ours, but what part of the
    /// prompt was cached is the same in both; a sixteenth is left for templates and block ends.
    pub fn told(&mut self, belief: &Belief, blocks: u32, cached: u32, prompt: u32) {
        let Some(held) = (u64::from(cached) * u64::from(blocks)).checked_div(u64::from(prompt)) else { return };
        let (believed, slack) = (u64::from(belief.blocks), 1 + u64::from(belief.blocks / 16));
        if held > believed + slack {
            self.learn_more(belief.endpoint);
        } else if let Some(reuse) = belief.reuse {
            self.learn(belief.endpoint, reuse, held + slack >= believed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::{Incarnation, Slot};

    const ENGINE: EndpointRef = EndpointRef { slot: Slot(1), incarnation: Incarnation(1) };

    /// Ten prompts of 100 blocks, of which eight to nine are believed to be there; the seventh comes again, and the engine has `cached` of its
    /// 6,400 tokens. What the endpoint is believed to hold at most, from then on.
    fn capacity(cached: u32) -> Option<u32> {
        let mut index = PrefixIndex::with_capacity(100_000);
        index.set_capacity(ENGINE, 1_000);
        let prompts: Vec<Vec<u64>> = (0..10).map(|n| (1..=100).map(|block| (n * 1_000 + block) << 1).collect()).collect();
        prompts.iter().for_each(|hashes| index.record(ENGINE, hashes));
        let mut known = Vec::new();
        index.matched(&prompts[6], &[ENGINE], &mut known);
        let belief = index.place(ENGINE, &prompts[6], known[0]);
        assert_eq!(belief.blocks, 100);
        index.told(&belief, 100, cached, 6_400);
        index.capacity(ENGINE)
    }

    #[test]
    fn a_reply_corrects_what_is_believed_to_fit() {
        assert!(capacity(0).is_some_and(|blocks| blocks < 1_000), "it was gone");
        assert_eq!(capacity(6_400), Some(1_000), "it was there");
        assert_eq!(capacity(6_000), Some(1_000), "but for a sixteenth, which is templates and block ends");
    }

    #[test]
    fn more_than_was_believed_lifts_it_and_a_reply_without_a_prompt_says_nothing() {
        let mut index = PrefixIndex::with_capacity(100_000);
        index.set_capacity(ENGINE, 1_000);
        let belief = index.place(ENGINE, &[2, 4, 6, 8], 0);
        index.told(&belief, 4, 0, 0);
        assert_eq!(index.capacity(ENGINE), Some(1_000));
        index.told(&belief, 4, 256, 256);
        assert!(index.capacity(ENGINE).is_some_and(|blocks| blocks > 1_000));
    }
}
