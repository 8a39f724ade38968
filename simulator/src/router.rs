//! One proxy: the real ledger and prefix index around the real `schedule()`, kept as `exchange`'s pool keeps them. Both change at the pick.

use scheduler::in_flight::{EndpointLoad, InFlight, InFlightTicket};
use scheduler::prefix::{CacheEstimate, ENTRIES_DEFAULT, MatchLength, PrefixIndex, blocks_of};
use scheduler::{AdapterRoom, Decision, EndpointIndex, EndpointRef, LocalState, Request, Rng, Snapshot, schedule};

use crate::engine::{BLOCK_TOKENS, EngineJob, EngineSimulator};
use crate::policy::{PolicyView, RoutingPolicy};

/// Where a client sends back the token of its session, by default.
const SESSION_HEADER: &str = "x-session-token";

#[derive(Debug)]
pub(crate) struct PolicyRouter {
    ledger: InFlight,
    prefixes: PrefixIndex,
    rng: Rng,
    /// How many hashes of the prompt each endpoint is believed to hold, and blocks that those stand for.
    known: Vec<MatchLength>,
    matched: Vec<u32>,
    prefix_idle: f32,
    prefix_ages: Vec<f32>,
    cold_picks: Vec<u64>,
    cold_picks_made: u64,
    /// Adapters given to each endpoint and when, by the count of picks, the last given last.
    given: Vec<Vec<(u16, u64)>>,
    rooms: Vec<AdapterRoom>,
    /// What each other proxy told of each endpoint last.
    published: Vec<Vec<Option<(EndpointRef, EndpointLoad)>>>,
    turn: usize,
}

/// What a pick made of a request.
#[derive(Debug)]
pub(crate) struct SimulatedPick {
    pub(crate) at: usize,
    pub(crate) ticket: InFlightTicket,
    /// What it was believed to hold of the prompt; `None` where another works through that.
    pub(crate) cache_estimate: Option<CacheEstimate>,
    /// Tokens of its prompt that were believed to be there.
    pub(crate) matched_tokens: u32,
    /// Who works through its prompt before, if that is another.
    pub(crate) prefill: Option<(usize, InFlightTicket)>,
}

/// What a LoRA adapter is called, and the base model.
pub(crate) fn adapter_name(adapter: u16) -> String {
    if adapter == 0 { "m".to_owned() } else { format!("adapter-{adapter}") }
}

// === impl PolicyRouter ===

impl PolicyRouter {
    pub(crate) fn new(seed: u64, number: usize, of: usize) -> Self {
        Self {
            ledger: InFlight::default(),
            prefixes: PrefixIndex::with_capacity(ENTRIES_DEFAULT),
            rng: Rng::seeded(seed),
            known: Vec::new(),
            matched: Vec::new(),
            prefix_idle: 0.0,
            prefix_ages: Vec::new(),
            cold_picks: Vec::new(),
            cold_picks_made: 0,
            given: Vec::new(),
            rooms: Vec::new(),
            published: vec![Vec::new(); of],
            turn: number * 3,
        }
    }

    /// Takes over a pool update: whom it knows, and how much each can hold.
    pub(crate) fn install(&mut self, refs: &[EndpointRef], gone: &[EndpointRef], kv_blocks: usize) {
        gone.iter().for_each(|endpoint| self.prefixes.forget(*endpoint));
        for endpoint in refs {
            self.prefixes.set_capacity(*endpoint, u32::try_from(kv_blocks).unwrap_or(u32::MAX));
        }
        self.cold_picks.resize(refs.len(), 0);
        self.given.resize(refs.len(), Vec::new());
        self.ledger.others_mut().start(refs);
        for rows in &mut self.published {
            rows.clear();
            rows.resize(refs.len(), None);
        }
    }

    pub(crate) fn load(&self, endpoint: EndpointRef) -> EndpointLoad {
        self.ledger.load(endpoint)
    }

    /// New metrics came in.
    pub(crate) fn scraped(&mut self, refs: &[EndpointRef]) {
        self.ledger.scraped(refs);
    }

    /// Picks by the policy and records it, for a client that holds this session token; `None` when the scheduler has nobody to name.
    pub(crate) fn pick<'w>(
        &mut self,
        policy: &RoutingPolicy,
        snapshot: &Snapshot,
        (job, token): (&EngineJob<'w>, Option<&str>),
        engines: &[Box<dyn EngineSimulator<'w> + 'w>],
        now: f64,
    ) -> Option<SimulatedPick> {
        let refs: Vec<EndpointRef> = snapshot.endpoints().iter().map(|endpoint| endpoint.id).collect();
        self.prefixes.matched(job.hashes, &refs, &mut self.known);
        self.prefix_idle = self.prefixes.idle(job.hashes, &refs, &self.known);
        self.prefixes.ages(job.hashes, &refs, &self.known, &mut self.prefix_ages);
        self.matched.clear();
        self.matched.extend(self.known.iter().map(|known| known.blocks(job.hashes)));
        let (at, prefill) = match policy {
            RoutingPolicy::Config(_) | RoutingPolicy::Published(_) => self.scheduled(snapshot, job, token)?,
            RoutingPolicy::Rival(rival) => {
                self.turn += 1;
                let loads: Vec<EndpointLoad> = refs.iter().map(|endpoint| self.ledger.load(*endpoint)).collect();
                let view = PolicyView { snapshot, loads: &loads, matched: &self.matched, job, engines, now, turn: self.turn };
                (rival.pick(&view, &mut self.rng)?, None)
            }
        };
        let endpoint = *refs.get(at)?;
        if self.matched.iter().all(|&blocks| blocks == 0)
            && let Some(last) = self.cold_picks.get_mut(at)
        {
            self.cold_picks_made += 1;
            *last = self.cold_picks_made;
        }
        let first = prefill.unwrap_or(at);
        let matched = self.matched.get(first).copied().unwrap_or(0);
        let matched_tokens = matched.saturating_mul(BLOCK_TOKENS as u32).min(job.prompt);
        let uncached = job.prompt - matched_tokens;
        self.given(at, job);
        let cache_estimate = self.place(at, endpoint, job);
        let ticket = self.ledger.admit_prompt(endpoint, job.prompt, if first == at { uncached } else { 0 });
        let prefill = match refs.get(first).filter(|_| first != at) {
            Some(&endpoint) => {
                self.given(first, job);
                self.place(first, endpoint, job);
                Some((first, self.ledger.admit_prompt(endpoint, job.prompt, uncached)))
            }
            None => None,
        };
        let cache_estimate = prefill.is_none().then_some(cache_estimate);
        Some(SimulatedPick { at, ticket, cache_estimate, matched_tokens, prefill })
    }

    fn place(&mut self, at: usize, endpoint: EndpointRef, job: &EngineJob<'_>) -> CacheEstimate {
        self.prefixes.place(endpoint, job.hashes, self.known.get(at).copied().unwrap_or_default())
    }

    /// The endpoint was given a request: its adapter is there from now on.
    fn given(&mut self, at: usize, job: &EngineJob<'_>) {
        let Some(row) = self.given.get_mut(at).filter(|_| job.adapter > 0) else { return };
        row.retain(|(adapter, _)| *adapter != job.adapter);
        row.push((job.adapter, u64::from(job.request) + 1));
    }

    /// Who has room for the job's adapter.
    fn look(&mut self, snapshot: &Snapshot, job: &EngineJob<'_>) {
        self.rooms.clear();
        let places = snapshot.metrics().iter().map(|metrics| metrics.lora.as_ref().map_or(0, |lora| lora.max as usize));
        for (row, places) in self.given.iter().zip(places).filter(|_| job.adapter > 0) {
            let kept = row.get(row.len().saturating_sub(places)..).unwrap_or(&[]);
            self.rooms.push(match kept.first() {
                _ if places == 0 => AdapterRoom::Unknown,
                _ if kept.iter().any(|(adapter, _)| *adapter == job.adapter) => AdapterRoom::Loaded,
                Some(&(_, displaced_used)) if kept.len() >= places => AdapterRoom::Full { displaced_used },
                _ => AdapterRoom::Free,
            });
        }
    }

    /// Who decodes, and who works through the prompt before.
    fn scheduled(&mut self, snapshot: &Snapshot, job: &EngineJob<'_>, token: Option<&str>) -> Option<(usize, Option<usize>)> {
        self.look(snapshot, job);
        let model = adapter_name(job.adapter);
        let headers: Vec<(&str, &str)> = token.iter().map(|token| (SESSION_HEADER, *token)).collect();
        let request = Request {
            model: &model,
            headers: &headers,
            prompt_tokens: job.prompt,
            prefix_blocks: job.hashes,
            prefix_block_tokens: BLOCK_TOKENS as u32,
            ..Request::default()
        };
        let local = LocalState {
            matched_blocks: &self.matched,
            prefix_idle: self.prefix_idle,
            prefix_ages: &self.prefix_ages,
            last_cold_picks: &self.cold_picks,
            adapter_rooms: &self.rooms,
            ..LocalState::new(&self.ledger)
        };
        match schedule(snapshot, &request, local, &mut self.rng, None) {
            Decision::Route(route) => Some((route.ranked.first().get(), route.prefill.map(EndpointIndex::get))),
            _ => None,
        }
    }

    /// The first token is out.
    pub(crate) fn first_token(&mut self, ticket: &mut InFlightTicket, prompt: u32) {
        self.ledger.first_token(ticket, prompt);
    }

    /// The output grew.
    pub(crate) fn decoded(&mut self, ticket: &mut InFlightTicket, tokens: u32) {
        self.ledger.decoded(ticket, tokens);
    }

    /// The reply told how much of the prompt was cached.
    pub(crate) fn hit(&mut self, cache_estimate: &CacheEstimate, job: &EngineJob<'_>, cached: u32) {
        self.prefixes.correct(cache_estimate, blocks_of(job.hashes, job.hashes.len()), cached, job.prompt);
    }

    /// The request has ended.
    pub(crate) fn release(&mut self, ticket: InFlightTicket) {
        self.ledger.release(ticket);
    }

    /// Calls `each` with every row that changed since the last call.
    pub(crate) fn changed(&mut self, each: impl FnMut(EndpointRef, EndpointLoad)) {
        self.ledger.take_changed(each);
    }

    /// Another proxy has this outstanding there, in place of what it told before.
    pub(crate) fn told(&mut self, from: usize, endpoint: EndpointRef, load: EndpointLoad) {
        let Some(row) = self.published.get_mut(from).and_then(|rows| rows.get_mut(usize::from(endpoint.slot.0))) else { return };
        let others = self.ledger.others_mut();
        if let Some((endpoint, before)) = row.replace((endpoint, load)) {
            others.subtract(endpoint, before);
        }
        others.add(endpoint, load);
    }

    /// Another proxy gave `endpoint` this prompt.
    pub(crate) fn placed(&mut self, endpoint: EndpointRef, hashes: &[u64]) {
        self.prefixes.record(endpoint, hashes);
    }
}
