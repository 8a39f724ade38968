//! Estimates what the caches of a pool's engines hold: prompts, adapters and stored answers.

use proto::placements::PlacementKind;
use scheduler::prefix::{BlockClaim, CacheEstimate, MatchLength, PrefixIndex};
use scheduler::{EndpointIndex, EndpointRef, Snapshot, Timestamp};

use super::adapters::{self, AdapterTable};
use super::conversations::ConversationShare;
use super::endpoints::Endpoints;
use super::evictions::EvictionShare;
use super::lookups::ColdPicks;
use super::placements::PlacementQueue;
use super::stored_answers::{self, StoredAnswers};
use super::token_rate::TokenRate;

/// How long an endpoint that restarted or was removed is remembered, in ms. This is longer than a
/// pod takes to load a large model.
const REMEMBERED_MS: u64 = 600_000;

/// The maximum number of remembered endpoints that restarted or were removed. Each keeps an id of
/// the index, which has twice as many ids as endpoints. New entries may replace their entries at
/// any time.
const REMEMBERED_MAX: usize = 64;

/// The caches of a pool's engines, as estimated.
#[derive(Debug)]
pub(super) struct Cache {
    pub(super) prefixes: PrefixIndex,
    /// The time at which the index began to remember an endpoint that restarted or was removed.
    remembered_since: Option<Timestamp>,
    pub(super) evictions: EvictionShare,
    /// Measures how many requests a conversation has.
    pub(super) conversations: ConversationShare,
    pub(super) cold_picks: ColdPicks,
    pub(super) adapters: AdapterTable,
    pub(super) stored_answers: StoredAnswers,
    pub(super) token_rate: TokenRate,
    pub(super) placements: PlacementQueue,
    /// Whether there are other proxies whose placements do not arrive here.
    pub(super) peers_unreachable: bool,
    /// A number that grows with every placement.
    version: u64,
}

// === impl Cache ===

impl Cache {
    /// An empty cache. `entries` is the size of its prefix index.
    pub(super) fn new(entries: usize) -> Self {
        Self {
            prefixes: PrefixIndex::with_capacity(entries),
            remembered_since: None,
            evictions: EvictionShare::default(),
            conversations: ConversationShare::default(),
            cold_picks: ColdPicks::default(),
            adapters: AdapterTable::default(),
            stored_answers: StoredAnswers::default(),
            token_rate: TokenRate::default(),
            placements: PlacementQueue::default(),
            peers_unreachable: false,
            version: 0,
        }
    }

    pub(super) fn version(&self) -> u64 {
        self.version
    }

    pub(super) fn forget(&mut self, endpoint: EndpointRef) {
        self.prefixes.forget(endpoint);
    }

    /// Moves the data that is kept by endpoint position to the new positions.
    pub(super) fn remap(&mut self, before: &[EndpointRef], refs: &[EndpointRef]) {
        let moved: Vec<Option<usize>> = refs
            .iter()
            .map(|id| before.iter().position(|other| other == id))
            .collect();
        self.cold_picks.remap(&moved);
        self.adapters.remap(&moved);
    }

    /// Creates the prefix index if there is none. Returns whether it was created.
    pub(super) fn reserve(&mut self, entries: usize) -> bool {
        let is_due = self.prefixes.bytes() == 0 && entries > 0;
        if is_due {
            self.prefixes = PrefixIndex::with_capacity(entries);
        }
        is_due
    }

    /// Limits the index entries of each endpoint to the blocks that fit into its KV cache.
    pub(super) fn set_sizes(&mut self, endpoints: &Endpoints) {
        let Some(state) = &endpoints.state else {
            return;
        };
        for (endpoint, blocks) in state.refs.iter().zip(index_blocks(&state.snapshot)) {
            self.prefixes.set_capacity(*endpoint, blocks);
        }
    }

    /// Records that `endpoint` gets a prompt with these hashes and has `known` of them cached. The
    /// endpoint's reply will show whether that is true. Returns the earlier estimate.
    pub(super) fn place(
        &mut self,
        endpoint: EndpointRef,
        hashes: &[u64],
        known: MatchLength,
    ) -> CacheEstimate {
        self.version += 1;
        let estimate = self.prefixes.place(endpoint, hashes, known);
        // A prompt that is too long for the endpoint's cache still counts as a pick.
        let new = match self.prefixes.fits(endpoint, hashes) {
            true => estimate.new_hashes(hashes),
            false => &[],
        };
        self.placements
            .push(PlacementKind::Unconfirmed, endpoint, new, 0);
        estimate
    }

    /// Records that the endpoint worked on a prompt that was placed there.
    pub(super) fn confirm(&mut self, placed: &CacheEstimate, hashes: &[u64]) {
        let endpoint = placed.endpoint();
        if !self.prefixes.fits(endpoint, hashes) {
            return;
        }
        self.version += 1;
        let known = self.prefixes.confirm(endpoint, hashes);
        let known = u32::try_from(known).unwrap_or(u32::MAX);
        self.placements
            .push(PlacementKind::Confirmed, endpoint, hashes, known);
    }

    /// Like [`Self::place`], for an endpoint that was not looked up.
    pub(super) fn place_unmatched(
        &mut self,
        endpoint: EndpointRef,
        hashes: &[u64],
    ) -> (CacheEstimate, MatchLength) {
        let mut known = Vec::new();
        self.prefixes.matched(hashes, &[endpoint], &mut known);
        let known = known.first().copied().unwrap_or_default();
        (self.place(endpoint, hashes, known), known)
    }

    /// Removes the placement of a prompt that its endpoint never worked on.
    pub(super) fn undo(&mut self, placed: &CacheEstimate, hashes: &[u64]) {
        self.version += 1;
        let endpoint = placed.endpoint();
        let new = placed.new_hashes(hashes);
        self.prefixes.withdraw(endpoint, new);
        if self.prefixes.fits(endpoint, hashes) && !new.is_empty() {
            self.placements
                .push(PlacementKind::Withdrawn, endpoint, new, 0);
        }
    }

    /// Records a placement that another worker or proxy sent.
    pub(super) fn record_peer(
        &mut self,
        kind: PlacementKind,
        endpoint: EndpointRef,
        blocks: &[u64],
    ) {
        self.version += 1;
        match kind {
            PlacementKind::Confirmed => self.prefixes.record(endpoint, blocks),
            PlacementKind::Unconfirmed => {
                self.prefixes
                    .claim(endpoint, blocks, BlockClaim::Unconfirmed);
            }
            PlacementKind::OverShare => {
                self.prefixes.claim(endpoint, blocks, BlockClaim::OverShare);
            }
            PlacementKind::Withdrawn => self.prefixes.withdraw(endpoint, blocks),
            PlacementKind::PeerWithdrawn => self.prefixes.withdraw_of_peer(endpoint, blocks),
        }
    }

    /// Records the model of a request at an endpoint that serves adapters.
    pub(super) fn record_model(&mut self, snapshot: &Snapshot, at: EndpointIndex, model: &str) {
        if let Some(endpoint) = snapshot
            .endpoint(at)
            .filter(|_| snapshot.adapter_places(at, model).is_some())
        {
            let mark = adapters::model_mark(model);
            self.adapters.record_model(at.get(), mark, false);
            self.placements
                .push(PlacementKind::Confirmed, endpoint.id, &[mark], 0);
        }
    }

    /// Records that `endpoint` gave an answer that it may keep. `id` is the hash of the answer's
    /// id, `client` that of its client.
    pub(super) fn record_stored_answer(&mut self, endpoint: EndpointRef, id: u64, client: u64) {
        let mark = stored_answers::mark(id, client);
        self.stored_answers.record(mark, endpoint, false);
        self.placements
            .push(PlacementKind::Confirmed, endpoint, &[mark], 0);
    }

    /// Frees the index entries of endpoints that restarted or were removed, a few at each tick,
    /// once they need not be remembered any longer.
    pub(super) fn sweep(&mut self, buckets: usize, now: Timestamp) {
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

/// How many blocks of the index fit into each engine's KV cache.
fn index_blocks(snapshot: &Snapshot) -> impl Iterator<Item = u32> + '_ {
    let settings = snapshot.pipeline().production().prefix;
    snapshot.metrics().iter().map(move |metrics| {
        let tokens = |blocks: Option<u32>, tokens: Option<u32>| {
            u64::from(blocks?).checked_mul(u64::from(tokens?))
        };
        let known =
            tokens(metrics.kv_blocks, metrics.kv_block_tokens).filter(|_| settings.auto_tune);
        let blocks =
            known.and_then(|tokens| u32::try_from(tokens / u64::from(settings.block_tokens)).ok());
        blocks.unwrap_or(settings.blocks_per_endpoint)
    })
}
