//! What one proxy VM knows of one pool, and the verbs that change it. One writer: the VM it lives in.
//!
//! The snapshot comes from the daemon; the ledger, the prefix index and the ejections are the VM's own and change at the pick, before
//! anything is confirmed, so that the next pick already sees this one.
//!
//! Other workers and proxies pick too. What changes here that they should know is counted ([`Pool::changes`]) and kept for telling
//! ([`Pool::write_row`], [`Pool::take_placements`]); what they tell comes in by [`Pool::read_row`], [`Pool::learn`] and [`Pool::placed`]. How it
//! travels is the host's business.

mod accepted;
mod adapters;
mod counters;
mod crashing;
mod ejection;
mod health;
mod judging;
mod observed;
mod pick;
mod row;
mod token_rate;
mod watch;

pub use counters::Counted;
pub use counters::{Counters, DURATION_BOUNDS_MS, EndpointCounters, Histogram, Label, MODELS_MAX, ModelCounters};
pub use ejection::{Ejection, Ejections};
pub use judging::Sent;
pub use observed::{OBSERVATION_BYTES, OBSERVATIONS_MAX, Observed};
pub use pick::{DecisionObserver, Held, Picked, Token};
pub use row::{OwnRow, PeerRow, RowHead, Sum, TOLD_MS_MAX};
pub use watch::{Ending, ms_between};

use std::collections::VecDeque;
use std::sync::Arc;

use accepted::Accepted;
use adapters::Adapters;
use crashing::Crashing;
pub use health::Failure;
use health::Health;
use observed::Untaken;
use scheduler::in_flight::{InFlight, Load};
use scheduler::latency::LatencyModel;
use scheduler::latency::step::StepModel;
use scheduler::objects::{Asked, UnknownModel};
use scheduler::prefix::{Matched, PrefixIndex};
use scheduler::{ENDPOINTS_MAX, EndpointMetrics, EndpointRef, PrefixSettings, Rng, Snapshot, TokenSettings};
use token_rate::TokenRate;

use crate::refusal::PickRefusal;
use crate::time::Time;

/// Buckets of the prefix index swept in one tick: about 0.1 ms of work, so that a removal of an endpoint stalls no request.
const SWEEP_BUCKETS: usize = 16_384;

/// Placements kept for telling, in hashes. A host takes them after each pick; one that does not loses the oldest, counted.
const UNTOLD_BLOCKS_MAX: usize = 4 * scheduler::prefix::BLOCKS_MAX;

/// One pool in one VM.
#[derive(Debug)]
pub struct Pool {
    state: Option<State>,
    in_flight: InFlight,
    prefixes: PrefixIndex,
    ejections: Ejections,
    health: Health,
    accepted: Accepted,
    crashing: Crashing,
    counters: Counters,
    rng: Rng,
    /// How many hashes of the prompt each endpoint was found to hold at the last pick, and for how many blocks they stand.
    known: Vec<Matched>,
    matched: Vec<u32>,
    /// Where several hold the longest of it: how near each is to losing that.
    prefix_ages: Vec<f32>,
    ejected: Vec<bool>,
    /// By how much requests fail at each endpoint more often than elsewhere; empty when none does.
    failing: Vec<f32>,
    /// When each endpoint was last given a prompt that nobody held a block of, by the count of such picks, parallel to the snapshot's
    /// endpoints; 0 is never. Each worker has its own: what matters is that each spreads such prompts.
    cold_picks: Vec<u64>,
    cold_picks_made: u64,
    adapters: Adapters,
    token_rate: TokenRate,
    changes: u64,
    untold: Untold,
    /// Others pick too, and where they place prompts is not known here.
    out_of_touch: bool,
    /// What the daemon learned so far; `None` until it says, and nothing is observed before.
    learned: Option<Learned>,
    untaken: Untaken,
    /// When each slot's last first token came.
    first_tokens: Vec<Time>,
}

/// What the daemon learned.
#[derive(Clone, Debug)]
struct Learned {
    step: Arc<StepModel>,
    latency: Option<Arc<LatencyModel>>,
}

/// An endpoint was given a prompt of these blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Who.
    pub endpoint: EndpointRef,
    /// Its hashes, first block first.
    pub blocks: Box<[u64]>,
    /// How many of them, from the first, it was believed to hold before.
    pub known: u32,
}

/// Placements to be told.
#[derive(Debug, Default)]
struct Untold {
    /// Is there anybody to tell?
    wanted: bool,
    placements: VecDeque<Placement>,
    blocks: usize,
    /// Those that went untold for newer ones.
    dropped: u64,
}

/// What the daemon said.
#[derive(Debug)]
struct State {
    snapshot: Snapshot,
    refs: Vec<EndpointRef>,
    hash_secret: u128,
    staleness_max_ms: u64,
    metrics_at: Option<Time>,
}

/// What the pool's objects make of a request.
#[derive(Debug, Default)]
pub struct Resolved {
    /// The model to ask the engine for; `None`: the one the body names.
    pub target_model: Option<Box<str>>,
    /// Higher is more important; below 0 may be shed.
    pub priority: i32,
}

// === impl Pool ===

impl Pool {
    /// A pool nothing is known of yet. `prefix_entries` sizes its index: 0 where no request is served.
    #[must_use]
    pub fn new(seed: u64, prefix_entries: usize) -> Self {
        Self {
            state: None,
            in_flight: InFlight::default(),
            prefixes: PrefixIndex::with_capacity(prefix_entries),
            ejections: Ejections::staggered(seed),
            health: Health::default(),
            accepted: Accepted::default(),
            crashing: Crashing::default(),
            counters: Counters::default(),
            rng: Rng::seeded(seed),
            known: Vec::new(),
            matched: Vec::new(),
            prefix_ages: Vec::new(),
            ejected: Vec::new(),
            failing: Vec::new(),
            cold_picks: Vec::new(),
            cold_picks_made: 0,
            adapters: Adapters::default(),
            token_rate: TokenRate::default(),
            changes: 0,
            untold: Untold::default(),
            out_of_touch: false,
            learned: None,
            untaken: Untaken::default(),
            first_tokens: Vec::new(),
        }
    }

    /// Replaces what the daemon said, but for the metrics of endpoints that stay: newer ones follow. Endpoints that are gone, or came back as
    /// another incarnation, are forgotten at once.
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
        self.keep_by_endpoint(&refs);
        let measured = self.state.as_ref().and_then(|old| old.metrics_at.zip(keep_metrics(&old.snapshot, &snapshot)));
        self.state = Some(State { snapshot, refs, hash_secret, staleness_max_ms: u64::from(staleness_max_ms), metrics_at: None });
        if let Some((at, measured)) = measured {
            self.refresh(measured, at);
        }
    }

    /// What is kept by position follows the endpoints to their new ones.
    fn keep_by_endpoint(&mut self, refs: &[EndpointRef]) {
        let before = self.state.as_ref().map_or(&[][..], |state| &state.refs);
        let moved: Vec<Option<usize>> = refs.iter().map(|id| before.iter().position(|other| other == id)).collect();
        self.cold_picks = moved.iter().map(|from| from.and_then(|at| self.cold_picks.get(at)).copied().unwrap_or(0)).collect();
        self.adapters.rearrange(&moved);
    }

    /// Takes over what the daemon learned. From now on requests are observed.
    pub fn learned(&mut self, step: StepModel, latency: Option<LatencyModel>) {
        let learned = Learned { step: Arc::new(step), latency: latency.map(Arc::new) };
        self.state = self.state.take().map(|state| State { snapshot: learned.applied_to(state.snapshot), ..state });
        self.learned = Some(learned);
    }

    /// The observations made since the last call, and the number of the first: they are counted from 0 on.
    pub fn take_observed(&mut self) -> (u64, VecDeque<Observed>) {
        self.untaken.take()
    }

    /// Takes newer metrics: `snapshot` is [`Self::snapshot`] with other metrics.
    pub fn refresh(&mut self, snapshot: Snapshot, at: Time) {
        let Some(state) = &mut self.state else { return };
        state.snapshot = snapshot;
        state.metrics_at = Some(at);
        self.in_flight.scraped(&state.refs);
        self.size_prefixes();
    }

    /// Gives a pool that was made without a prefix index one of `entries`: at a tick, or at the first request if that comes sooner.
    pub fn reserve_prefixes(&mut self, entries: usize) {
        if self.prefixes.bytes() == 0 && entries > 0 {
            self.prefixes = PrefixIndex::with_capacity(entries);
            self.size_prefixes();
        }
    }

    /// The index holds no more of an endpoint than its KV cache can.
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

    /// What was counted so far.
    #[must_use]
    pub fn counters(&self) -> &Counters {
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
    pub fn tick(&mut self, now: Time) {
        let _ = self.prefixes.sweep(SWEEP_BUCKETS);
        self.ejections.tidy(now);
    }

    /// Grows with everything that others should know at once: picks, first tokens, ends, failures.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Brings `row` up to date with what is outstanding here and known of failures, and gives its bytes.
    pub fn write_row<'r>(&mut self, row: &'r mut OwnRow, head: RowHead) -> &'r [u8] {
        row.write(head, &mut self.in_flight, self.ejections.rows())
    }

    /// Another VM told `bytes` in place of what it told before; whether its load `counts` is the caller's to say. Says whether
    /// [`Self::put_slos_together`] must follow.
    pub fn read_row(&mut self, row: &mut PeerRow, bytes: Vec<u8>, counts: bool) -> bool {
        row.replace(bytes, counts, self.in_flight.others_mut())
    }

    /// The load of a row begins or ceases to count. Says whether [`Self::put_slos_together`] must follow.
    pub fn count_row(&mut self, row: &mut PeerRow, counts: bool) -> bool {
        row.count(counts, self.in_flight.others_mut())
    }

    /// From now on a pick of this process stands for one of each of so many other proxies until it is `delay_us` old: see
    /// [`scheduler::in_flight::Others`].
    pub fn stand_for(&mut self, proxies: u32, delay_us: u64, now: Time) {
        self.in_flight.others_mut().stand_for(proxies, delay_us, now.us_since(Time(0)));
    }

    /// What is known of failures.
    #[must_use]
    pub fn ejections(&self) -> &[Ejection] {
        self.ejections.rows()
    }

    /// Finds the lowest SLOs of others anew, from all their rows.
    pub fn put_slos_together<'r>(&mut self, rows: impl IntoIterator<Item = &'r PeerRow>) {
        let others = self.in_flight.others_mut();
        others.forget_slos();
        rows.into_iter().for_each(|row| row.add_slos_to(others));
    }

    /// Counts all rows of others anew: after [`Self::install`], when other lives of endpoints are present.
    pub fn count_anew<'r>(&mut self, rows: impl IntoIterator<Item = &'r PeerRow>) {
        let others = self.in_flight.others_mut();
        others.start(self.state.as_ref().map_or(&[], |state| &state.refs));
        rows.into_iter().for_each(|row| row.add_to(others));
    }

    /// All that others have outstanding, summed up elsewhere: for a host that looks on and shares no rows.
    pub fn others(&mut self, loads: impl IntoIterator<Item = (EndpointRef, Load)>) {
        self.count_anew([]);
        let others = self.in_flight.others_mut();
        loads.into_iter().for_each(|(endpoint, load)| others.add(endpoint, load));
    }

    /// Another worker knows this of an endpoint.
    pub fn learn(&mut self, told: Ejection, now: Time) {
        if self.knows(told.endpoint) && self.ejections.learn(told, now) {
            self.changes += 1;
        }
    }

    /// Another worker or proxy gave `endpoint` a prompt of these blocks, or says something else of it by a mark.
    pub fn placed(&mut self, endpoint: EndpointRef, blocks: &[u64], now: Time) {
        let Some(at) = self.state.as_ref().and_then(|state| state.refs.iter().position(|id| *id == endpoint)) else { return };
        match blocks {
            [mark] if adapters::is_mark(*mark) => self.adapters.note(at, *mark),
            [mark] if crashing::is_mark(*mark) => self.crashing.note(*mark, endpoint, now),
            _ => {
                self.in_flight.picked(endpoint);
                self.prefixes.record(endpoint, blocks);
            }
        }
    }

    /// Others pick too and where they place prompts is not known here, or is again. While it is not, a prompt of which nobody here knows anything is
    /// drawn to the home of its head ([`scheduler::prefix::rendezvous_endpoint`]), where all who are out of touch send it.
    pub fn set_out_of_touch(&mut self, out_of_touch: bool) {
        self.out_of_touch = out_of_touch;
    }

    /// From now on placements are kept for telling, or not.
    pub fn tell_placements(&mut self, wanted: bool) {
        if self.untold.wanted != wanted {
            self.untold = Untold { wanted, dropped: self.untold.dropped, ..Untold::default() };
        }
    }

    /// The placements made here since the last call.
    pub fn take_placements(&mut self) -> VecDeque<Placement> {
        self.untold.blocks = 0;
        std::mem::take(&mut self.untold.placements)
    }

    /// How many placements were dropped untold, for newer ones, as nobody took them in time.
    #[must_use]
    pub fn placements_dropped(&self) -> u64 {
        self.untold.dropped
    }

    /// True once in so many, by chance; never for 0, which draws nothing.
    pub fn draws_one_in(&mut self, count: u32) -> bool {
        count > 0 && self.rng.below(usize::try_from(count).unwrap_or(usize::MAX)) == 0
    }

    /// The counters, to count an event that the host sees.
    pub fn counters_mut(&mut self) -> &mut Counters {
        &mut self.counters
    }

    /// Tokens of so many bytes of prompt text, by what engines said of prompts before.
    pub fn text_tokens(&self, bytes: usize) -> u32 {
        self.token_rate.tokens(bytes)
    }

    /// Tokens of a full block of a prompt, likewise.
    pub fn block_tokens(&self, settings: PrefixSettings) -> u32 {
        self.token_rate.block_tokens(settings.block_tokens)
    }

    /// How prompts are cut and counted; nothing before the first state.
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
    pub fn resolve(&mut self, asked: Asked<'_>) -> Result<Resolved, PickRefusal> {
        let Some(objects) = self.state.as_ref().map(|state| state.snapshot.objects()) else { return Ok(Resolved::default()) };
        let resolved = objects.resolve(asked, &mut self.rng).map_err(|UnknownModel(model)| PickRefusal::UnknownModel(model.into()))?;
        Ok(Resolved { target_model: resolved.target_model.map(Into::into), priority: resolved.priority })
    }

    /// Is there an endpoint that serves the model, ready and allowed or not, or an object that promises one? Then it may be asked for again.
    pub fn knows_model(&self, model: &str) -> bool {
        let Some(snapshot) = self.snapshot() else { return false };
        snapshot.objects().names(model) || snapshot.serves_anywhere(model) || snapshot.indices().any(|index| snapshot.serves(index, model))
    }

    /// An engine told its load with a reply: fresher than any scrape.
    pub fn observe(&mut self, endpoint: EndpointRef, update: impl FnOnce(&mut EndpointMetrics)) {
        if let Some(state) = &mut self.state {
            state.snapshot.observe(endpoint, update);
        }
    }

    fn knows(&self, endpoint: EndpointRef) -> bool {
        self.state.as_ref().is_some_and(|state| state.refs.contains(&endpoint))
    }
}

// === impl Untold ===

impl Untold {
    fn keep(&mut self, endpoint: EndpointRef, blocks: &[u64], known: u32) {
        if !self.wanted {
            return;
        }
        // One of no blocks still says that a request was given: one whose prompt is not read, or shorter than a block.
        self.blocks += blocks.len().max(1);
        self.placements.push_back(Placement { endpoint, blocks: blocks.into(), known });
        while self.blocks > UNTOLD_BLOCKS_MAX {
            let Some(oldest) = self.placements.pop_front() else { return };
            self.blocks -= oldest.blocks.len().max(1);
            self.dropped += 1;
        }
    }
}

// === impl Learned ===

impl Learned {
    fn applied_to(&self, snapshot: Snapshot) -> Snapshot {
        snapshot.with_step(Arc::clone(&self.step)).with_latency(self.latency.clone())
    }
}

// === impl State ===

impl State {
    fn metrics_stale(&self, now: Time) -> bool {
        self.metrics_at.is_none_or(|at| now.ms_since(at) > self.staleness_max_ms)
    }
}

/// `new` with the metrics of those endpoints that `old` has too; `None` when there are none.
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
