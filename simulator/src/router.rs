//! One proxy: the real ledger and prefix index around the real `schedule()`, kept as `exchange`'s pool keeps them. Both change at the pick.

use scheduler::in_flight::{InFlight, Load, Ticket};
use scheduler::prefix::PrefixIndex;
use scheduler::{Decision, EndpointRef, Local, Request, Rng, Snapshot, schedule};

use crate::engine::{BLOCK_TOKENS, Engine, Job};
use crate::policy::{Policy, View};

/// Entries of a prefix index: twice what eight engines hold.
const INDEX_ENTRIES: usize = 1 << 17;

#[derive(Debug)]
pub(crate) struct Router {
    ledger: InFlight,
    prefixes: PrefixIndex,
    rng: Rng,
    matched: Vec<u32>,
    cold_picks: Vec<u64>,
    cold_picks_made: u64,
    /// What each other proxy told of each endpoint last.
    told: Vec<Vec<Option<(EndpointRef, Load)>>>,
    turn: usize,
}

/// What a pick made of a request.
#[derive(Debug)]
pub(crate) struct Picked {
    pub(crate) at: usize,
    pub(crate) ticket: Ticket,
    /// Tokens of its prompt that were believed to be there.
    pub(crate) matched_tokens: u32,
}

// === impl Router ===

impl Router {
    pub(crate) fn new(seed: u64, number: usize, of: usize) -> Self {
        Self {
            ledger: InFlight::default(),
            prefixes: PrefixIndex::with_capacity(INDEX_ENTRIES),
            rng: Rng::seeded(seed),
            matched: Vec::new(),
            cold_picks: Vec::new(),
            cold_picks_made: 0,
            told: vec![Vec::new(); of],
            turn: number * 3,
        }
    }

    /// Takes over a roster: whom it knows, and how much each can hold.
    pub(crate) fn install(&mut self, refs: &[EndpointRef], gone: &[EndpointRef], kv_blocks: usize) {
        gone.iter().for_each(|endpoint| self.prefixes.forget(*endpoint));
        for endpoint in refs {
            self.prefixes.set_capacity(*endpoint, u32::try_from(kv_blocks).unwrap_or(u32::MAX));
        }
        self.cold_picks.resize(refs.len(), 0);
        self.ledger.others_mut().start(refs);
        for rows in &mut self.told {
            rows.clear();
            rows.resize(refs.len(), None);
        }
    }

    pub(crate) fn load(&self, endpoint: EndpointRef) -> Load {
        self.ledger.load(endpoint)
    }

    /// New metrics came in.
    pub(crate) fn scraped(&mut self, refs: &[EndpointRef]) {
        self.ledger.scraped(refs);
    }

    /// Picks by the policy and records it; `None` when the scheduler has nobody to name.
    pub(crate) fn pick(&mut self, policy: &Policy, snapshot: &Snapshot, job: &Job<'_>, engines: &[Engine<'_>], now: f64) -> Option<Picked> {
        let refs: Vec<EndpointRef> = snapshot.endpoints().iter().map(|endpoint| endpoint.id).collect();
        self.prefixes.matched(job.blocks, &refs, &mut self.matched);
        let at = match policy {
            Policy::Config(_) => self.scheduled(snapshot, job)?,
            Policy::Rival(rival) => {
                self.turn += 1;
                let loads: Vec<Load> = refs.iter().map(|endpoint| self.ledger.load(*endpoint)).collect();
                let view = View { snapshot, loads: &loads, matched: &self.matched, job, engines, now, turn: self.turn };
                rival.pick(&view, &mut self.rng)?
            }
        };
        let endpoint = *refs.get(at)?;
        if self.matched.iter().all(|&blocks| blocks == 0)
            && let Some(last) = self.cold_picks.get_mut(at)
        {
            self.cold_picks_made += 1;
            *last = self.cold_picks_made;
        }
        let matched = self.matched.get(at).copied().unwrap_or(0);
        let matched_tokens = matched.saturating_mul(BLOCK_TOKENS as u32).min(job.prompt);
        self.prefixes.record(endpoint, job.blocks);
        let ticket = self.ledger.admit_prompt(endpoint, job.prompt, job.prompt - matched_tokens);
        Some(Picked { at, ticket, matched_tokens })
    }

    fn scheduled(&mut self, snapshot: &Snapshot, job: &Job<'_>) -> Option<usize> {
        let request = Request {
            model: "m",
            prompt_tokens: job.prompt,
            prefix_blocks: job.blocks,
            prefix_block_tokens: BLOCK_TOKENS as u32,
            ..Request::default()
        };
        let local = Local {
            in_flight: &self.ledger,
            matched_blocks: &self.matched,
            ejected: &[],
            last_cold_picks: &self.cold_picks,
            adapter_rooms: &[],
            metrics_stale: false,
        };
        match schedule(snapshot, &request, local, &mut self.rng, None) {
            Decision::Route(route) => Some(route.ranked.first().get()),
            _ => None,
        }
    }

    /// The first token is out.
    pub(crate) fn first_token(&mut self, ticket: &mut Ticket, prompt: u32) {
        self.ledger.first_token(ticket, prompt);
    }

    /// The output grew.
    pub(crate) fn decoded(&mut self, ticket: &mut Ticket, tokens: u32) {
        self.ledger.decoded(ticket, tokens);
    }

    /// The request has ended.
    pub(crate) fn release(&mut self, ticket: Ticket) {
        self.ledger.release(ticket);
    }

    /// Calls `each` with every row that changed since the last call.
    pub(crate) fn changed(&mut self, each: impl FnMut(EndpointRef, Load)) {
        self.ledger.take_changed(each);
    }

    /// Another proxy has this outstanding there, in place of what it told before.
    pub(crate) fn told(&mut self, from: usize, endpoint: EndpointRef, load: Load) {
        let Some(row) = self.told.get_mut(from).and_then(|rows| rows.get_mut(usize::from(endpoint.slot.0))) else { return };
        let others = self.ledger.others_mut();
        if let Some((endpoint, before)) = row.replace((endpoint, load)) {
            others.subtract(endpoint, before);
        }
        others.add(endpoint, load);
    }

    /// Another proxy gave `endpoint` this prompt.
    pub(crate) fn placed(&mut self, endpoint: EndpointRef, blocks: &[u64]) {
        self.prefixes.record(endpoint, blocks);
    }
}
