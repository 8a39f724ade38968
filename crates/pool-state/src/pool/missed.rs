//! Finds where the prompt of a pick is cached, and the causes of the tokens that its engine had to
//! compute: see [`super::cache_places`].

use scheduler::prefix::{CacheEstimate, MatchLength, blocks_of};
use scheduler::{EndpointIndex, Request, Snapshot};

use super::LedgerHold;
use super::cache::Cache;
use super::cache_places::CachePlaces;
use super::lookups::EndpointLookups;
use super::miss_cause::{MissCause, MissedTokens};
use super::plan::{Plan, serving};
use crate::usage::TokenUsage;

/// A prompt whose endpoints have not yet shown that they work on it. Until they do, nothing is
/// learned from the prompt.
#[derive(Clone, Copy, Debug)]
pub(super) struct UnconfirmedPrompt {
    /// The estimate at the serving endpoint.
    pub(super) served: Option<CacheEstimate>,
    /// The estimate at the endpoint that computes the prompt, if another endpoint decodes.
    pub(super) prefilled: Option<CacheEstimate>,
    blocks: u32,
    reuse_interval: f32,
    is_cold: bool,
}

// === impl UnconfirmedPrompt ===

impl UnconfirmedPrompt {
    pub(super) fn placements(&self) -> impl Iterator<Item = &CacheEstimate> {
        self.prefilled.iter().chain(&self.served)
    }
}

// === impl LedgerHold ===

impl LedgerHold {
    /// The prompt tokens that the engine had to compute, by cause. `blocks` has the same meaning as
    /// in [`ManagedPool::record_cache_hit`]. Hits and misses add up to the tokens of the prompt.
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

// === impl Cache ===

impl Cache {
    /// Records in `hold` that the endpoints of the plan get the prompt.
    pub(super) fn record_plan(
        &mut self,
        hold: &mut LedgerHold,
        snapshot: &Snapshot,
        plan: &Plan,
        request: &Request<'_>,
    ) {
        let serving = serving(&plan.route);
        let prompting = plan.prompting();
        let mut prefilled = None;
        if prompting == serving {
            hold.places = Some(self.places(&plan.lookups, serving, request.prefix_blocks));
        } else {
            prefilled = self.record_prompt(snapshot, plan, prompting, request);
        }
        let served = self.record_prompt(snapshot, plan, serving, request);
        hold.cache_estimate = served.filter(|_| prompting == serving);
        hold.unconfirmed = Some(UnconfirmedPrompt {
            served,
            prefilled,
            blocks: request.blocks(),
            reuse_interval: plan.lookups.reuse_interval,
            is_cold: plan.lookups.is_cold(),
        });
    }

    /// Records that the endpoints worked on the prompt, and learns from where it was cached.
    pub(super) fn confirm_prompt(
        &mut self,
        prompt: &UnconfirmedPrompt,
        places: Option<&CachePlaces>,
        hashes: &[u64],
    ) {
        if let Some(places) = places {
            self.evictions.record(places, prompt.blocks);
        }
        self.conversations
            .record(prompt.reuse_interval, prompt.is_cold);
        for placed in prompt.placements() {
            self.confirm(placed, hashes);
        }
    }

    #[inline(never)] // several callers, and the wasm module should be small
    fn record_prompt(
        &mut self,
        snapshot: &Snapshot,
        plan: &Plan,
        at: EndpointIndex,
        request: &Request<'_>,
    ) -> Option<CacheEstimate> {
        let endpoint = snapshot.endpoint(at)?.id;
        let estimate = self.place(endpoint, request.prefix_blocks, plan.lookups.known(at));
        self.record_model(snapshot, at, request.model);
        if plan.lookups.is_cold() {
            self.cold_picks.record(at);
        }
        Some(estimate)
    }

    /// Where the prompt with these hashes is cached, before `endpoint` gets it.
    fn places(
        &self,
        lookups: &EndpointLookups,
        endpoint: EndpointIndex,
        hashes: &[u64],
    ) -> CachePlaces {
        let known = &lookups.known;
        let longest =
            |length: fn(&MatchLength) -> u32| known.iter().map(length).max().unwrap_or(0) as usize;
        let recalled = self
            .prefixes
            .recall(hashes, longest(|known| known.maybe_cached));
        CachePlaces {
            cached: blocks_of(hashes, lookups.known(endpoint).cached as usize),
            elsewhere: blocks_of(hashes, longest(|known| known.cached)),
            given: blocks_of(hashes, recalled.given),
            lost: blocks_of(hashes, recalled.lost),
        }
    }
}
