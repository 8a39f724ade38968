//! The ledger of what this proxy has outstanding, by endpoint slot.
//!
//! Fresher than any scrape: a row changes at the pick, not when the engine confirms. Every request accounted for is a [`Ticket`], which
//! cannot be copied and which [`InFlight::release`] consumes, so nothing is released twice. A ticket that is dropped unreleased stays
//! counted for as long as the ledger lives: callers release in the one place where a request's state ends, and a VM that traps takes its
//! ledger with it.
//!
//! A row belongs to one life of one endpoint. The first admission of another life starts the row afresh; tickets of the former life then
//! count nowhere and change nothing.
//!
//! Requests with an SLO are also in the queue of their endpoint ([`Running`]), whose lowest SLOs are part of its load.
//!
//! What others have outstanding is kept beside it ([`Others`]) and read together with it: a pick sees all that is known to be under way.

mod last_picks;
use last_picks::LastPicks;

mod others;
pub use others::Others;

mod running;
use running::{Entry, Queues};
pub use running::{MEASURED_MAX, Running};

mod since_scrape;
use since_scrape::SinceScrape;
pub use since_scrape::requests_now;

use crate::endpoint::{ENDPOINTS_MAX, EndpointRef, Incarnation, Slot};
use crate::metrics::EndpointMetrics;
use crate::slo::{Slo, TrackedSlo};

/// What one endpoint has outstanding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests picked and not ended.
    pub requests: u32,
    /// Uncached prompt tokens of requests without a first token, and the output that requests are expected to have, where that counts.
    pub prefill_tokens: u64,
    /// Tokens being decoded: prompt and output of requests past their first token.
    pub decode_tokens: u64,
    /// Prompts of requests without a first token.
    pub prefills: Prefills,
    /// The lowest TTFT SLO of requests that wait for their first token, µs; `None` when none of them has one.
    pub ttft_slo_us: Option<u32>,
    /// The lowest TPOT SLO of all of them, µs a token: those who wait for their first token will want it kept, too. `None` when none has one.
    pub tpot_slo_us: Option<u32>,
}

/// Prompts that wait for their prefill or are in it, as the sums from which a step model that is linear in them tells how long they take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prefills {
    /// How many have anything to be worked through.
    pub prompts: u32,
    /// Their tokens, cached or not.
    pub prompt_tokens: u64,
    /// Those of them that are not believed to be cached.
    pub uncached_tokens: u64,
    /// What attention costs them: of a prompt of n tokens, u of them uncached, n^2 - (n - u)^2, in units of [`ATTENTION_UNIT`].
    pub attention: u64,
}

/// Pairs of tokens that count as one in [`Prefills::attention`]: of a prompt of 256 tokens, whose attention takes a fraction of a millisecond.
/// So thousands of the longest prompts add up to 32 bits on the wire.
pub const ATTENTION_UNIT: u64 = 65_536;

/// The ledger. One writer; reads are array look-ups.
#[derive(Debug, Default)]
pub struct InFlight {
    /// By slot; grows to the highest slot seen, at most [`ENDPOINTS_MAX`].
    rows: Vec<Row>,
    lives_started: u64,
    /// Slots whose rows changed since they were last asked for, each once.
    changed: Vec<u16>,
    others: Others,
    scraped: SinceScrape,
    queues: Queues,
    last_picks: LastPicks,
}

/// One request's place in the ledger.
#[derive(Debug)]
#[must_use = "a ticket that is never released counts for ever"]
pub struct Ticket {
    endpoint: EndpointRef,
    /// The life of the row that counts it; [`NOWHERE`] when none does.
    life: u64,
    /// What it adds to that row.
    share: Load,
    past_first_token: bool,
    /// What it counts for in [`Load::prefill_tokens`] to its end.
    output_tokens: u32,
    /// Its place in a queue, if it has an SLO.
    entry: Option<Entry>,
}

#[derive(Clone, Copy, Debug)]
struct Row {
    incarnation: Incarnation,
    /// Which start of a row this is, of all the ledger ever made: an incarnation that comes back does not get its old tickets back.
    life: u64,
    load: Load,
    /// Is it among the changed?
    changed: bool,
}

const NOWHERE: u64 = 0;

const EMPTY: Row = Row { incarnation: Incarnation(0), life: NOWHERE, load: NOTHING, changed: false };

const NOTHING: Load =
    Load { requests: 0, prefill_tokens: 0, decode_tokens: 0, prefills: NO_PREFILLS, ttft_slo_us: None, tpot_slo_us: None };

const NO_PREFILLS: Prefills = Prefills { prompts: 0, prompt_tokens: 0, uncached_tokens: 0, attention: 0 };

// === impl Prefills ===

impl Prefills {
    /// One prompt of so many tokens, of which so many are not believed to be cached.
    #[must_use]
    pub fn of(prompt_tokens: u32, uncached_tokens: u32) -> Self {
        let (prompt, uncached) = (u64::from(prompt_tokens), u64::from(uncached_tokens.min(prompt_tokens)));
        let attention = prompt.pow(2) - (prompt - uncached).pow(2);
        Self {
            prompts: u32::from(uncached > 0),
            prompt_tokens: prompt,
            uncached_tokens: uncached,
            attention: attention.div_ceil(ATTENTION_UNIT),
        }
    }

    /// Both together.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self {
            prompts: self.prompts.saturating_add(other.prompts),
            prompt_tokens: self.prompt_tokens.saturating_add(other.prompt_tokens),
            uncached_tokens: self.uncached_tokens.saturating_add(other.uncached_tokens),
            attention: self.attention.saturating_add(other.attention),
        }
    }

    /// What is left without these.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self {
            prompts: self.prompts.saturating_sub(other.prompts),
            prompt_tokens: self.prompt_tokens.saturating_sub(other.prompt_tokens),
            uncached_tokens: self.uncached_tokens.saturating_sub(other.uncached_tokens),
            attention: self.attention.saturating_sub(other.attention),
        }
    }

    /// So many times as much.
    #[must_use]
    pub fn times(self, count: u32) -> Self {
        Self {
            prompts: self.prompts.saturating_mul(count),
            prompt_tokens: self.prompt_tokens.saturating_mul(u64::from(count)),
            uncached_tokens: self.uncached_tokens.saturating_mul(u64::from(count)),
            attention: self.attention.saturating_mul(u64::from(count)),
        }
    }
}

// === impl Load ===

impl Load {
    /// Both together.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        let lowest = |one: Option<u32>, two: Option<u32>| one.into_iter().chain(two).min();
        Self {
            requests: self.requests.saturating_add(other.requests),
            prefill_tokens: self.prefill_tokens.saturating_add(other.prefill_tokens),
            decode_tokens: self.decode_tokens.saturating_add(other.decode_tokens),
            prefills: self.prefills.with(other.prefills),
            ttft_slo_us: lowest(self.ttft_slo_us, other.ttft_slo_us),
            tpot_slo_us: lowest(self.tpot_slo_us, other.tpot_slo_us),
        }
    }

    /// So many times as much; the same SLOs.
    #[must_use]
    pub fn times(self, count: u32) -> Self {
        Self {
            requests: self.requests.saturating_mul(count),
            prefill_tokens: self.prefill_tokens.saturating_mul(u64::from(count)),
            decode_tokens: self.decode_tokens.saturating_mul(u64::from(count)),
            prefills: self.prefills.times(count),
            ..self
        }
    }
}

// === impl InFlight ===

impl InFlight {
    /// Counts one more request at `endpoint`, with a prompt of `prefill_tokens` to work through first, none of it cached. `endpoint` is of
    /// the current snapshot: where the row is another life's, it starts afresh. A slot at or above [`ENDPOINTS_MAX`], which no snapshot has,
    /// is counted nowhere.
    pub fn admit(&mut self, endpoint: EndpointRef, prefill_tokens: u32) -> Ticket {
        self.admit_prompt(endpoint, prefill_tokens, prefill_tokens)
    }

    /// The same with a prompt of which only `uncached_tokens` are to be worked through there.
    pub fn admit_prompt(&mut self, endpoint: EndpointRef, prompt_tokens: u32, uncached_tokens: u32) -> Ticket {
        let prefills = Prefills::of(prompt_tokens, uncached_tokens);
        let share = Load { requests: 1, prefill_tokens: prefills.uncached_tokens, prefills, ..NOTHING };
        let mut ticket = Ticket { endpoint, life: NOWHERE, share, past_first_token: false, output_tokens: 0, entry: None };
        self.picked(endpoint);
        if self.life(endpoint) == NOWHERE {
            self.start_row(endpoint);
        }
        ticket.life = self.life(endpoint);
        self.add(&ticket);
        ticket
    }

    /// The request counts for this much output, too, from now to its end.
    pub fn expect_output(&mut self, ticket: &mut Ticket, tokens: u32) {
        self.subtract(ticket);
        ticket.output_tokens = ticket.output_tokens.saturating_add(tokens);
        ticket.share.prefill_tokens = ticket.share.prefill_tokens.saturating_add(u64::from(tokens));
        self.add(ticket);
    }

    /// The request's first token is out: its prefill is done, and `prompt_tokens` (the whole prompt, cached or not) are context that every
    /// further token attends to. A second call changes nothing.
    pub fn first_token(&mut self, ticket: &mut Ticket, prompt_tokens: u32) {
        if !std::mem::replace(&mut ticket.past_first_token, true) {
            self.subtract(ticket);
            ticket.share.prefill_tokens = u64::from(ticket.output_tokens);
            ticket.share.prefills = NO_PREFILLS;
            ticket.share.decode_tokens = ticket.share.decode_tokens.saturating_add(u64::from(prompt_tokens));
            self.add(ticket);
            self.queued(ticket, |queues, slot, entry| queues.started(slot, entry.id));
        }
    }

    /// The request has an SLO, and this was promised when it was sent: from now to its end it is in the queue of its endpoint, by the id that people know it
    /// by. Nothing for one without an SLO, or a second time.
    pub fn track(&mut self, ticket: &mut Ticket, promise: TrackedSlo, request_id: &str) {
        if promise.slo.any() && ticket.entry.is_none() {
            ticket.entry = Some(self.queues.number(promise));
            self.enqueue(ticket, request_id.into());
        }
    }

    /// The request's first token took this long, ms.
    pub fn first_token_took(&mut self, ticket: &Ticket, ms: f32) {
        if let Some(entry) = ticket.entry.filter(|_| self.counts(ticket)) {
            self.queues.first_token_took(ticket.endpoint.slot.0, entry.id, ms);
        }
    }

    /// Further tokens of the request took this long, ms each.
    pub fn tokens_took(&mut self, ticket: &Ticket, ms: f32) {
        if let Some(entry) = ticket.entry.filter(|_| self.counts(ticket)) {
            self.queues.tokens_took(ticket.endpoint.slot.0, entry.id, ms);
        }
    }

    /// Our own requests with an SLO at `endpoint`, the strictest first.
    #[must_use]
    pub fn running(&self, endpoint: EndpointRef) -> &[Running] {
        if self.life(endpoint) == NOWHERE { &[] } else { self.queues.queue(endpoint.slot.0) }
    }

    /// The request's output grew by `tokens`.
    pub fn decoded(&mut self, ticket: &mut Ticket, tokens: u32) {
        self.subtract(ticket);
        ticket.share.decode_tokens = ticket.share.decode_tokens.saturating_add(u64::from(tokens));
        self.add(ticket);
    }

    /// The request is served by `to` instead (a retry went on to the next of the ranked list): all it counts for moves there. `to` may be of
    /// an older snapshot, so it takes over another life's row only when that row is empty; else the request counts nowhere.
    pub fn transfer(&mut self, ticket: &mut Ticket, to: EndpointRef) {
        if to == ticket.endpoint {
            return;
        }
        self.subtract(ticket);
        let mut request_id = Box::default();
        self.queued(ticket, |queues, slot, entry| request_id = queues.remove(slot, entry.id));
        if self.life(to) == NOWHERE && self.row(to.slot).is_none_or(|row| row.load == EMPTY.load) {
            self.start_row(to);
        }
        ticket.endpoint = to;
        ticket.life = self.life(to);
        self.add(ticket);
        self.enqueue(ticket, request_id);
    }

    /// The request has ended, in whatever way.
    #[expect(clippy::needless_pass_by_value, reason = "taking the ticket is what rules out a second release")]
    pub fn release(&mut self, ticket: Ticket) {
        self.subtract(&ticket);
        self.queued(&ticket, |queues, slot, entry| drop(queues.remove(slot, entry.id)));
    }

    /// What `endpoint` has outstanding as far as is known: of our own, and of others.
    #[must_use]
    pub fn load(&self, endpoint: EndpointRef) -> Load {
        self.own(endpoint).with(self.others.load(endpoint))
    }

    /// The requests of [`Self::load`] alone.
    #[must_use]
    pub fn requests(&self, endpoint: EndpointRef) -> u32 {
        let own = self.row(endpoint.slot).filter(|row| row.is_of(endpoint)).map_or(0, |row| row.load.requests);
        own.saturating_add(self.others.requests(endpoint))
    }

    /// What `endpoint` has outstanding of our own; nothing for another incarnation than the row's.
    #[must_use]
    pub fn own(&self, endpoint: EndpointRef) -> Load {
        self.row(endpoint.slot).filter(|row| row.is_of(endpoint)).map_or(EMPTY.load, |row| row.load)
    }

    /// Somebody gives `endpoint` a request: one that is admitted here, or one of another worker that was told of.
    pub fn picked(&mut self, endpoint: EndpointRef) {
        self.last_picks.note(endpoint);
    }

    /// `endpoint` was last given a request at this pick, by the count of [`Self::last_pick`].
    pub fn picked_at(&mut self, endpoint: EndpointRef, pick: u64) {
        self.last_picks.set(endpoint, pick);
    }

    /// When `endpoint` was last given a request, in numbers that grow with every pick; 0: never.
    #[must_use]
    pub fn last_pick(&self, endpoint: EndpointRef) -> u64 {
        self.last_picks.of(endpoint)
    }

    /// What others have outstanding, to be told anew.
    pub fn others_mut(&mut self) -> &mut Others {
        &mut self.others
    }

    /// Metrics of these endpoints came in: from now on [`Self::requests_now`] adds to them what changes from now on.
    pub fn scraped(&mut self, endpoints: &[EndpointRef]) {
        let mut scraped = std::mem::take(&mut self.scraped);
        scraped.start(endpoints.iter().map(|endpoint| (*endpoint, self.requests(*endpoint))));
        self.scraped = scraped;
    }

    /// How many requests `endpoint` has, by what its engine said last (`metrics`, running and queued together) and what changed since: see
    /// [`requests_now`].
    #[must_use]
    pub fn requests_now(&self, endpoint: EndpointRef, metrics: &EndpointMetrics) -> f32 {
        let said = metrics.running_requests.map(|running| running + metrics.queue_depth.unwrap_or(0.0));
        requests_now(said, self.scraped.requests(endpoint), self.requests(endpoint))
    }

    /// Every endpoint that has anything of our own outstanding, by slot.
    pub fn rows(&self) -> impl Iterator<Item = (EndpointRef, Load)> + '_ {
        let endpoint = |(slot, row): (u16, &Row)| (EndpointRef { slot: Slot(slot), incarnation: row.incarnation }, row.load);
        (0_u16..).zip(&self.rows).filter(|(_, row)| row.load != EMPTY.load).map(endpoint)
    }

    /// Calls `each` with every row of our own that changed since the last call, as it is now: to tell others, at a cost of what changed.
    pub fn take_changed(&mut self, mut each: impl FnMut(EndpointRef, Load)) {
        for slot in self.changed.drain(..) {
            if let Some(row) = self.rows.get_mut(usize::from(slot)) {
                row.changed = false;
                each(EndpointRef { slot: Slot(slot), incarnation: row.incarnation }, row.load);
            }
        }
    }

    fn row(&self, slot: Slot) -> Option<&Row> {
        self.rows.get(usize::from(slot.0))
    }

    fn start_row(&mut self, endpoint: EndpointRef) {
        let slot = usize::from(endpoint.slot.0);
        if slot >= ENDPOINTS_MAX {
            return;
        }
        if self.rows.len() <= slot {
            self.rows.resize(slot + 1, EMPTY);
        }
        if let Some(row) = self.rows.get_mut(slot) {
            self.lives_started += 1;
            *row = Row { incarnation: endpoint.incarnation, life: self.lives_started, ..Row { changed: row.changed, ..EMPTY } };
            self.queues.clear(endpoint.slot.0);
        }
    }

    fn enqueue(&mut self, ticket: &Ticket, request_id: Box<str>) {
        let waits = !ticket.past_first_token;
        self.queued(ticket, |queues, slot, entry| queues.add(slot, entry, request_id, waits));
    }

    /// Changes the queue that a ticket belongs in, and then what its endpoint must keep.
    fn queued(&mut self, ticket: &Ticket, change: impl FnOnce(&mut Queues, u16, Entry)) {
        let Some(entry) = ticket.entry.filter(|_| self.counts(ticket)) else { return };
        let slot = ticket.endpoint.slot.0;
        change(&mut self.queues, slot, entry);
        let Slo { ttft_us, tpot_us } = self.queues.lowest(slot);
        if let Some(load) = self.counting(ticket) {
            (load.ttft_slo_us, load.tpot_slo_us) = (ttft_us, tpot_us);
        }
    }

    /// Does any row count the ticket?
    fn counts(&self, ticket: &Ticket) -> bool {
        ticket.life != NOWHERE && self.row(ticket.endpoint.slot).is_some_and(|row| row.life == ticket.life)
    }

    /// The life a request at `endpoint` is counted in from now on.
    fn life(&self, endpoint: EndpointRef) -> u64 {
        self.row(endpoint.slot).filter(|row| row.is_of(endpoint)).map_or(NOWHERE, |row| row.life)
    }

    /// The load that counts the ticket, if any does: about to change.
    fn counting(&mut self, ticket: &Ticket) -> Option<&mut Load> {
        let slot = ticket.endpoint.slot.0;
        let row = self.rows.get_mut(usize::from(slot)).filter(|row| ticket.life != NOWHERE && row.life == ticket.life)?;
        if !std::mem::replace(&mut row.changed, true) {
            self.changed.push(slot);
        }
        Some(&mut row.load)
    }

    fn add(&mut self, ticket: &Ticket) {
        let Some(load) = self.counting(ticket) else { return };
        *load = load.with(ticket.share);
    }

    fn subtract(&mut self, ticket: &Ticket) {
        let Some(load) = self.counting(ticket) else { return };
        let share = ticket.share;
        debug_assert!(
            load.requests >= share.requests && load.prefill_tokens >= share.prefill_tokens && load.decode_tokens >= share.decode_tokens,
            "a row holds at least what each of its tickets added: {load:?} < {share:?}"
        );
        load.requests = load.requests.saturating_sub(share.requests);
        load.prefill_tokens = load.prefill_tokens.saturating_sub(share.prefill_tokens);
        load.decode_tokens = load.decode_tokens.saturating_sub(share.decode_tokens);
        load.prefills = load.prefills.without(share.prefills);
    }
}

// === impl Ticket ===

impl Ticket {
    /// What it counts for.
    #[must_use]
    pub fn load(&self) -> Load {
        self.share
    }

    /// What it asked for, if it is in a queue.
    #[must_use]
    pub fn slo(&self) -> Slo {
        self.entry.map_or(Slo::default(), |entry| entry.promise.slo)
    }
}

// === impl Row ===

impl Row {
    fn is_of(&self, endpoint: EndpointRef) -> bool {
        self.life != NOWHERE && self.incarnation == endpoint.incarnation
    }
}

#[cfg(test)]
mod tests;
