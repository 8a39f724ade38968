//! Finds where the prompt of a pick is cached, and attributes the tokens that its engine had to
//! compute: see [`super::cache_places`].

use scheduler::EndpointIndex;
use scheduler::prefix::{MatchLength, blocks_of};

use super::cache_places::CachePlaces;
use super::miss_cause::{MissCause, MissedTokens};
use super::{LedgerHold, ManagedPool};
use crate::usage::TokenUsage;
use scheduler::Timestamp;

/// How long an endpoint that restarted or was removed is remembered, in ms: longer than a pod takes
/// to load a large model.
const REMEMBERED_MS: u64 = 600_000;

/// The most such endpoints. Each keeps an id of the index, which has twice as many ids as
/// endpoints. New entries may replace the entries of such an endpoint at any time.
const REMEMBERED_MAX: usize = 64;

// === impl LedgerHold ===

impl LedgerHold {
    /// The prompt tokens that the engine had to compute, by cause. `blocks` as in
    /// [`ManagedPool::record_cache_hit`]. Hits and misses add up to the tokens of the prompt.
    #[must_use]
    pub fn missed(&self, usage: &TokenUsage, blocks: Option<u32>) -> MissedTokens {
        let prompt = usage.prompt_tokens.unwrap_or(0);
        match (&self.places, usage.cached_tokens, blocks) {
            (Some(places), Some(hit), Some(blocks @ 1..)) => {
                places.attribute(prompt, hit.min(prompt), blocks)
            }
            (_, hit, _) => {
                let mut missed = MissedTokens::default();
                missed.set(MissCause::Unknown, prompt.saturating_sub(hit.unwrap_or(0)));
                missed
            }
        }
    }
}

// === impl ManagedPool ===

impl ManagedPool {
    /// Where the prompt of these hashes is cached, for a request that `endpoint` gets. Call it
    /// before the placement is recorded.
    pub(super) fn cache_places(&self, endpoint: EndpointIndex, hashes: &[u64]) -> CachePlaces {
        let known = &self.lookups.known;
        let longest =
            |length: fn(&MatchLength) -> u32| known.iter().map(length).max().unwrap_or(0) as usize;
        let recalled = self
            .prefixes
            .recall(hashes, longest(|known| known.maybe_cached));
        CachePlaces {
            cached: blocks_of(hashes, self.lookups.known(endpoint).cached as usize),
            elsewhere: blocks_of(hashes, longest(|known| known.cached)),
            given: blocks_of(hashes, recalled.given),
            lost: blocks_of(hashes, recalled.lost),
        }
    }

    /// Frees the index entries of endpoints that restarted or were removed, a few at each tick,
    /// when they need not be remembered any longer.
    pub(super) fn sweep_prefixes(&mut self, buckets: usize, now: Timestamp) {
        let retired = self.prefixes.retired();
        if retired == 0 {
            self.remembered_since = None;
            return;
        }
        let since = *self.remembered_since.get_or_insert(now);
        if retired > REMEMBERED_MAX || now.ms_since(since) >= REMEMBERED_MS {
            let _ = self.prefixes.sweep(buckets);
        }
    }
}
