//! The state of one pool in one proxy VM, and the operations that change it. The VM is the only
//! writer.
//!
//! The snapshot comes from the daemon. The ledger, the prefix index and the ejections belong to the
//! VM. They change at the pick, before the engine confirms anything, so that the next pick already
//! sees this one.
//!
//! Other workers and proxies pick too. Changes that they should see are counted
//! ([`ManagedPool::changes`]) and published ([`ManagedPool::write_load_report`],
//! [`ManagedPool::take_placements`]); their own changes arrive by
//! [`ManagedPool::read_load_report`], [`ManagedPool::learn_ejection`] and
//! [`ManagedPool::record_peer_placement`]. The host transports them.

mod accepted_kinds;
mod adapters;
mod counters;
mod crash_correlation;
mod ejection;
mod health;
mod load_report;
mod observation;
mod pick;
mod request_timing;
mod token_rate;
mod verdicts;

pub use counters::CountedRequest;
pub use counters::{
    CountHistogram, DURATION_BOUNDS_MS, EndpointCounters, MODELS_MAX, ModelCounters, ModelLabel, PoolCounters, TokenCounters,
};
pub use ejection::{Ejection, Ejections};
pub use load_report::{LoadReportSum, OwnLoadReport, PeerLoadReport};
pub use pick::{DecisionObserver, LedgerHold, RecordedPick, SessionTokenHeader};
pub use request_timing::{RequestEnding, ms_between};
pub use verdicts::SentRequest;

use std::collections::VecDeque;
use std::sync::Arc;

use accepted_kinds::AcceptedKinds;
use adapters::AdapterTable;
use crash_correlation::CrashCorrelator;
use health::EndpointHealthTable;
pub use health::RequestFailure;
use observation::ObservationQueue;
use proto::load_report::LoadReportHead;
use proto::observation::EncodedObservation;
use scheduler::in_flight::{EndpointLoad, InFlight};
use scheduler::latency::LatencyModel;
use scheduler::latency::step::StepModel;
use scheduler::objects::{ModelRequest, UnknownModel};
use scheduler::prefix::{MatchLength, PrefixIndex};
use scheduler::{ENDPOINTS_MAX, EndpointMetrics, EndpointRef, PrefixSettings, Rng, Snapshot, TokenSettings};
use token_rate::TokenRate;

use crate::refusal::PickRefusal;
use scheduler::Timestamp;

/// Buckets of the prefix index swept in one tick: about 0.1 ms of work, so that a removal of an endpoint stalls no request.
const SWEEP_BUCKETS: usize = 16_384;

/// The most hashes in placements that wait to be published. A host takes them after each pick; one
/// that does not loses the oldest, which is counted.
const UNTOLD_BLOCKS_MAX: usize = 4 * scheduler::prefix::BLOCKS_MAX;

/// One pool in one VM.
#[derive(Debug)]
pub struct ManagedPool {
    state: Option<PublishedState>,
    in_flight: InFlight,
    prefixes: PrefixIndex,
    ejections: Ejections,
    health: EndpointHealthTable,
    accepted: AcceptedKinds,
    crashing: CrashCorrelator,
    counters: PoolCounters,
    rng: Rng,
    /// How many hashes of the prompt each endpoint had cached at the last pick, and how many blocks
    /// they cover.
    known: Vec<MatchLength>,
    matched: Vec<u32>,
    /// Where several endpoints have the longest cached prefix: how close each is to evicting it.
    prefix_ages: Vec<f32>,
    ejected: Vec<bool>,
    /// The failure rate of each endpoint minus that of the others; empty when no endpoint fails
    /// more often.
    failing: Vec<f32>,
    /// When each endpoint last got a prompt that was cached nowhere, as a count of such picks,
    /// parallel to the snapshot's endpoints; 0 is never. Each worker has its own counts: it is
    /// enough that each worker spreads such prompts.
    cold_picks: Vec<u64>,
    cold_picks_made: u64,
    adapters: AdapterTable,
    token_rate: TokenRate,
    changes: u64,
    placements: PlacementQueue,
    /// Other proxies pick too, and their placements do not arrive here.
    peers_unreachable: bool,
    /// The models of the daemon; `None` until they arrive. Nothing is observed before.
    learned: Option<LatencyModels>,
    observations: ObservationQueue,
    /// When each slot's last first token came.
    first_tokens: Vec<Timestamp>,
}

/// The models that the daemon learned.
#[derive(Clone, Debug)]
struct LatencyModels {
    step: Arc<StepModel>,
    latency: Option<Arc<LatencyModel>>,
}

/// An endpoint was given a prompt of these blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The endpoint.
    pub endpoint: EndpointRef,
    /// Its hashes, first block first.
    pub blocks: Box<[u64]>,
    /// How many of them, from the first, it had cached before, as estimated.
    pub known: u32,
}

/// Placements that wait to be published.
#[derive(Debug, Default)]
struct PlacementQueue {
    /// Whether anything publishes them.
    enabled: bool,
    placements: VecDeque<Placement>,
    blocks: usize,
    /// How many were dropped for newer ones.
    dropped: u64,
}

/// The state that the daemon published.
#[derive(Debug)]
struct PublishedState {
    snapshot: Snapshot,
    refs: Vec<EndpointRef>,
    hash_secret: u128,
    staleness_max_ms: u64,
    metrics_at: Option<Timestamp>,
}

/// The result of the pool's objects for a request.
#[derive(Debug, Default)]
pub struct PoolResolution {
    /// The model to ask the engine for; `None`: the one the body names.
    pub target_model: Option<Box<str>>,
    /// Higher is more important; below 0 may be shed.
    pub priority: i32,
}

// === impl ManagedPool ===

impl ManagedPool {
    /// A pool without state. `prefix_entries` is the size of its prefix index: 0 where no request
    /// is served.
    #[must_use]
    pub fn new(seed: u64, prefix_entries: usize) -> Self {
        Self {
            state: None,
            in_flight: InFlight::default(),
            prefixes: PrefixIndex::with_capacity(prefix_entries),
            ejections: Ejections::with_stagger(seed),
            health: EndpointHealthTable::default(),
            accepted: AcceptedKinds::default(),
            crashing: CrashCorrelator::default(),
            counters: PoolCounters::default(),
            rng: Rng::seeded(seed),
            known: Vec::new(),
            matched: Vec::new(),
            prefix_ages: Vec::new(),
            ejected: Vec::new(),
            failing: Vec::new(),
            cold_picks: Vec::new(),
            cold_picks_made: 0,
            adapters: AdapterTable::default(),
            token_rate: TokenRate::default(),
            changes: 0,
            placements: PlacementQueue::default(),
            peers_unreachable: false,
            learned: None,
            observations: ObservationQueue::default(),
            first_tokens: Vec::new(),
        }
    }

    /// Replaces the daemon's state, except the metrics of endpoints that stay: newer metrics
    /// follow. Endpoints that are gone, or have a new generation, are forgotten at once.
    pub fn install(&mut self, snapshot: Snapshot, hash_secret: u128, staleness_max_ms: u32) {
        let refs: Vec<EndpointRef> = snapshot.endpoints().iter().map(|e| e.id).collect();
        if let Some(old) = &self.state {
            for gone in old.refs.iter().filter(|id| !refs.contains(id)) {
                self.prefixes.forget(*gone);
                self.ejections.forget(*gone);
                self.health.forget(*gone);
                self.counters.forget(*gone);
            }
        }
        let snapshot = match &self.learned {
            Some(learned) => learned.applied_to(snapshot),
            None => snapshot,
        };
        self.counters.keep_endpoints(&refs);
        self.remap_endpoints(&refs);
        let measured = self.state.as_ref().and_then(|old| old.metrics_at.zip(keep_metrics(&old.snapshot, &snapshot)));
        self.state = Some(PublishedState { snapshot, refs, hash_secret, staleness_max_ms: u64::from(staleness_max_ms), metrics_at: None });
        if let Some((at, measured)) = measured {
            self.refresh(measured, at);
        }
    }

    /// Moves what is kept by position to the new positions of the endpoints.
    fn remap_endpoints(&mut self, refs: &[EndpointRef]) {
        let before = self.state.as_ref().map_or(&[][..], |state| &state.refs);
        let moved: Vec<Option<usize>> = refs.iter().map(|id| before.iter().position(|other| other == id)).collect();
        self.cold_picks = moved.iter().map(|from| from.and_then(|at| self.cold_picks.get(at)).copied().unwrap_or(0)).collect();
        self.adapters.remap(&moved);
    }

    /// Takes over what the daemon learned. From now on requests are observed.
    pub fn install_models(&mut self, step: StepModel, latency: Option<LatencyModel>) {
        let learned = LatencyModels { step: Arc::new(step), latency: latency.map(Arc::new) };
        self.state = self.state.take().map(|state| PublishedState { snapshot: learned.applied_to(state.snapshot), ..state });
        self.learned = Some(learned);
    }

    /// The observations made since the last call, and the number of the first: they are counted from 0 on.
    pub fn take_observations(&mut self) -> (u64, VecDeque<EncodedObservation>) {
        self.observations.take()
    }

    /// Takes newer metrics: `snapshot` is [`Self::snapshot`] with other metrics.
    pub fn refresh(&mut self, snapshot: Snapshot, at: Timestamp) {
        let Some(state) = &mut self.state else { return };
        state.snapshot = snapshot;
        state.metrics_at = Some(at);
        self.in_flight.scraped(&state.refs);
        self.size_prefixes();
    }

    /// Creates the prefix index if the pool has none: at a tick, or at the first request if that
    /// comes sooner.
    pub fn reserve_prefixes(&mut self, entries: usize) {
        if self.prefixes.bytes() == 0 && entries > 0 {
            self.prefixes = PrefixIndex::with_capacity(entries);
            self.size_prefixes();
        }
    }

    /// Limits what the index remembers of an endpoint to what its KV cache can hold.
    fn size_prefixes(&mut self) {
        let Some(state) = &self.state else { return };
        for (endpoint, blocks) in state.refs.iter().zip(pick::index_blocks(&state.snapshot)) {
            self.prefixes.set_capacity(*endpoint, blocks);
        }
    }

    /// The snapshot in force; `None` before the first.
    #[must_use]
    pub fn snapshot(&self) -> Option<&Snapshot> {
        self.state.as_ref().map(|s| &s.snapshot)
    }

    /// The counters.
    #[must_use]
    pub fn counters(&self) -> &PoolCounters {
        &self.counters
    }

    /// The ledger.
    #[must_use]
    pub fn in_flight(&self) -> &InFlight {
        &self.in_flight
    }

    /// The prefix index.
    #[must_use]
    pub fn prefixes(&self) -> &PrefixIndex {
        &self.prefixes
    }

    /// Housekeeping in a bounded slice; call it now and then, never in a request.
    pub fn tick(&mut self, now: Timestamp) {
        let _ = self.prefixes.sweep(SWEEP_BUCKETS);
        self.ejections.forget_expired(now);
    }

    /// Grows with every change that others should see at once: picks, first tokens, ends, failures.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Updates `row` to the current load and failures and returns its bytes.
    pub fn write_load_report<'r>(&mut self, row: &'r mut OwnLoadReport, head: LoadReportHead) -> &'r [u8] {
        row.write(head, &mut self.in_flight, self.ejections.rows())
    }

    /// Replaces the load report of another VM by `bytes`. The caller decides whether its load
    /// `counts`. Returns whether [`Self::recompute_peer_slos`] must follow.
    pub fn read_load_report(&mut self, row: &mut PeerLoadReport, bytes: Vec<u8>, counts: bool) -> bool {
        row.replace(bytes, counts, self.in_flight.others_mut())
    }

    /// Sets whether the load of a report counts. Returns whether [`Self::recompute_peer_slos`] must
    /// follow.
    pub fn count_load_report(&mut self, row: &mut PeerLoadReport, counts: bool) -> bool {
        row.count(counts, self.in_flight.others_mut())
    }

    /// From now on a pick of this process stands for one pick of each of `proxies` other proxies
    /// until it is `delay_us` old: see [`scheduler::in_flight::PeerLoads`].
    pub fn estimate_peer_picks(&mut self, proxies: u32, delay_us: u64, now: Timestamp) {
        self.in_flight.others_mut().stand_for(proxies, delay_us, now.us_since(Timestamp(0)));
    }

    /// The known failures of endpoints.
    #[must_use]
    pub fn ejections(&self) -> &[Ejection] {
        self.ejections.rows()
    }

    /// Computes the lowest SLOs of others again, from all their reports.
    pub fn recompute_peer_slos<'r>(&mut self, rows: impl IntoIterator<Item = &'r PeerLoadReport>) {
        let others = self.in_flight.others_mut();
        others.forget_slos();
        rows.into_iter().for_each(|row| row.add_slos_to(others));
    }

    /// Counts all reports of others again: after [`Self::install`], when endpoints have other
    /// generations.
    pub fn recount_load_reports<'r>(&mut self, rows: impl IntoIterator<Item = &'r PeerLoadReport>) {
        let others = self.in_flight.others_mut();
        others.start(self.state.as_ref().map_or(&[], |state| &state.refs));
        rows.into_iter().for_each(|row| row.add_to(others));
    }

    /// Sets the load of all others, summed up elsewhere: for a host that reads no reports.
    pub fn set_peer_loads(&mut self, loads: impl IntoIterator<Item = (EndpointRef, EndpointLoad)>) {
        self.recount_load_reports([]);
        let others = self.in_flight.others_mut();
        loads.into_iter().for_each(|(endpoint, load)| others.add(endpoint, load));
    }

    /// Another worker knows this of an endpoint.
    pub fn learn_ejection(&mut self, told: Ejection, now: Timestamp) {
        if self.knows(told.endpoint) && self.ejections.learn(told, now) {
            self.changes += 1;
        }
    }

    /// Records that another worker or proxy gave `endpoint` a prompt of these blocks, or a mark.
    pub fn record_peer_placement(&mut self, endpoint: EndpointRef, blocks: &[u64], now: Timestamp) {
        let Some(at) = self.state.as_ref().and_then(|state| state.refs.iter().position(|id| *id == endpoint)) else { return };
        match blocks {
            [mark] if adapters::is_mark(*mark) => self.adapters.record_model(at, *mark),
            [mark] if crash_correlation::is_mark(*mark) => self.crashing.record(*mark, endpoint, now),
            _ => {
                self.in_flight.picked(endpoint);
                self.prefixes.record(endpoint, blocks);
            }
        }
    }

    /// Sets whether placements of other proxies are missing here. While they are, a prompt that is
    /// cached nowhere goes to the rendezvous endpoint of its head
    /// ([`scheduler::prefix::rendezvous_endpoint`]), as it does in every proxy that misses
    /// placements.
    pub fn set_peers_unreachable(&mut self, out_of_touch: bool) {
        self.peers_unreachable = out_of_touch;
    }

    /// Sets whether placements are kept for publishing.
    pub fn set_placement_publishing(&mut self, wanted: bool) {
        if self.placements.enabled != wanted {
            self.placements = PlacementQueue { enabled: wanted, dropped: self.placements.dropped, ..PlacementQueue::default() };
        }
    }

    /// The placements made here since the last call.
    pub fn take_placements(&mut self) -> VecDeque<Placement> {
        self.placements.blocks = 0;
        std::mem::take(&mut self.placements.placements)
    }

    /// How many placements were dropped for newer ones because they were not taken in time.
    #[must_use]
    pub fn placements_dropped(&self) -> u64 {
        self.placements.dropped
    }

    /// True once in so many, by chance; never for 0, which draws nothing.
    pub fn sample_one_in(&mut self, count: u32) -> bool {
        count > 0 && self.rng.below(usize::try_from(count).unwrap_or(usize::MAX)) == 0
    }

    /// The counters, to count an event that the host sees.
    pub fn counters_mut(&mut self) -> &mut PoolCounters {
        &mut self.counters
    }

    /// Tokens of this many bytes of prompt text, by the usage that engines reported before.
    pub fn text_tokens(&self, bytes: usize) -> u32 {
        self.token_rate.tokens(bytes)
    }

    /// Tokens of a full block of a prompt, likewise.
    pub fn block_tokens(&self, settings: PrefixSettings) -> u32 {
        self.token_rate.block_tokens(settings.block_tokens)
    }

    /// The settings for prompt blocks and token counting; `None` before the first state.
    pub fn prompt_settings(&self) -> Option<(PrefixSettings, TokenSettings)> {
        let production = self.snapshot()?.pipeline().production();
        Some((production.prefix, production.token))
    }

    /// The secret that keys the hashes of prompts; 0 without state.
    #[must_use]
    pub fn hash_secret(&self) -> u128 {
        self.state.as_ref().map_or(0, |s| s.hash_secret)
    }

    /// Which model to ask the engine for, and how important the request is.
    pub fn resolve(&mut self, asked: ModelRequest<'_>) -> Result<PoolResolution, PickRefusal> {
        let Some(objects) = self.state.as_ref().map(|state| state.snapshot.objects()) else { return Ok(PoolResolution::default()) };
        let resolved = objects.resolve(asked, &mut self.rng).map_err(|UnknownModel(model)| PickRefusal::UnknownModel(model.into()))?;
        Ok(PoolResolution { target_model: resolved.target_model.map(Into::into), priority: resolved.priority })
    }

    /// Whether an endpoint serves the model, ready and allowed or not, or an object names it. Then
    /// a request for it is valid.
    pub fn knows_model(&self, model: &str) -> bool {
        let Some(snapshot) = self.snapshot() else { return false };
        snapshot.objects().names(model) || snapshot.serves_anywhere(model) || snapshot.indices().any(|index| snapshot.serves(index, model))
    }

    /// Applies the load that an engine reported with a reply: it is fresher than any scrape.
    pub fn observe(&mut self, endpoint: EndpointRef, update: impl FnOnce(&mut EndpointMetrics)) {
        if let Some(state) = &mut self.state {
            state.snapshot.observe(endpoint, update);
        }
    }

    fn knows(&self, endpoint: EndpointRef) -> bool {
        self.state.as_ref().is_some_and(|state| state.refs.contains(&endpoint))
    }
}

// === impl PlacementQueue ===

impl PlacementQueue {
    fn push(&mut self, endpoint: EndpointRef, blocks: &[u64], known: u32) {
        if !self.enabled {
            return;
        }
        // A placement without blocks still counts as a request: its prompt is not read, or shorter
        // than a block.
        self.blocks += blocks.len().max(1);
        self.placements.push_back(Placement { endpoint, blocks: blocks.into(), known });
        while self.blocks > UNTOLD_BLOCKS_MAX {
            let Some(oldest) = self.placements.pop_front() else { return };
            self.blocks -= oldest.blocks.len().max(1);
            self.dropped += 1;
        }
    }
}

// === impl LatencyModels ===

impl LatencyModels {
    fn applied_to(&self, snapshot: Snapshot) -> Snapshot {
        snapshot.with_step(Arc::clone(&self.step)).with_latency(self.latency.clone())
    }
}

// === impl PublishedState ===

impl PublishedState {
    fn metrics_stale(&self, now: Timestamp) -> bool {
        self.metrics_at.is_none_or(|at| now.ms_since(at) > self.staleness_max_ms)
    }
}

/// `new` with the metrics of the endpoints that `old` has too; `None` if there are none.
fn keep_metrics(old: &Snapshot, new: &Snapshot) -> Option<Snapshot> {
    let mut by_slot: Vec<Option<(EndpointRef, &EndpointMetrics)>> = vec![None; ENDPOINTS_MAX];
    for (id, metrics) in old.endpoints().iter().map(|e| e.id).zip(old.metrics()) {
        if let Some(row) = by_slot.get_mut(usize::from(id.slot.0)) {
            *row = Some((id, metrics));
        }
    }
    let kept = |id: EndpointRef| match by_slot.get(usize::from(id.slot.0)) {
        Some(Some((known, metrics))) if *known == id => (*metrics).clone(),
        _ => EndpointMetrics::default(),
    };
    let metrics: Vec<EndpointMetrics> = new.endpoints().iter().map(|e| kept(e.id)).collect();
    new.with_metrics(new.version(), metrics).ok()
}
