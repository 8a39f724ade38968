//! The in-flight ledger: the requests and tokens that this proxy has in flight, by endpoint slot.
//!
//! The ledger is newer than every scrape, because an endpoint's row changes at the pick, and not
//! when the engine reports the request. Every counted request has an [`InFlightTicket`]. A ticket
//! cannot be copied and [`InFlight::release`] consumes it, so no request is released twice. A
//! ticket that is dropped without a release stays counted as long as the ledger exists. So callers
//! release tickets in the one function that ends a request. A wasm VM that crashes loses its ledger
//! too.
//!
//! A row belongs to one generation of one endpoint. The first admission for another generation
//! resets the row, and tickets of the old generation no longer count.
//!
//! Each endpoint also has a queue of its requests with an SLO ([`RunningRequest`]). The lowest SLOs
//! in this queue are part of the endpoint's load.
//!
//! The load of other workers and proxies is in [`PeerLoads`], and [`InFlight::load`] adds it.

mod endpoint_load;
pub use endpoint_load::{ATTENTION_UNIT, EndpointLoad, PendingPrefills};
use endpoint_load::{NO_PREFILLS, NOTHING};

mod last_picks;
use last_picks::LastPicks;

mod outside_claim;

mod peer_loads;
pub use peer_loads::PeerLoads;

mod running_requests;
pub use running_requests::{MEASURED_MAX, RunningRequest};
use running_requests::{RunningKey, RunningQueues};

mod since_scrape;
use since_scrape::ScrapeBaseline;
pub use since_scrape::requests_now;

mod suspended;
use suspended::SuspendedCounts;

use crate::endpoint::{ENDPOINTS_MAX, EndpointRef, Generation, Slot};
use crate::metrics::EndpointMetrics;
use crate::slo::{Slo, TrackedSlo};

/// The in-flight ledger. The ledger has one writer, and a read is an array look-up.
#[derive(Debug, Default)]
pub struct InFlight {
    /// The rows by slot, up to the highest slot used so far. There are at most [`ENDPOINTS_MAX`]
    /// rows.
    rows: Vec<LedgerRow>,
    epochs_started: u64,
    /// The slots whose rows changed since the last [`Self::take_changed`]. Each slot is in the list
    /// once.
    changed: Vec<u16>,
    others: PeerLoads,
    scraped: ScrapeBaseline,
    queues: RunningQueues,
    last_picks: LastPicks,
    /// The mean length of the prompts of the last [`PROMPTS_AVERAGED`] picks, in tokens.
    prompt_tokens: f32,
    suspended: SuspendedCounts,
}

/// The right to change and to end one request in the ledger.
#[derive(Debug)]
#[must_use = "a ticket that is never released stays counted"]
pub struct InFlightTicket {
    endpoint: EndpointRef,
    /// The epoch of the row that counts the request, or [`NOWHERE`] if no row counts it.
    row_epoch: u64,
    /// The load that the request adds to the row that counts it.
    load: EndpointLoad,
    past_first_token: bool,
    /// The number of tokens of the expected output. [`EndpointLoad::prefill_tokens`] includes these
    /// tokens until the request ends.
    output_tokens: u32,
    /// The key of the request in its endpoint's queue, if the request has an SLO.
    entry: Option<RunningKey>,
    /// The request id that operators know. It is stored only while the request is suspended.
    suspended: Option<Box<str>>,
}

#[derive(Clone, Copy, Debug)]
struct LedgerRow {
    generation: Generation,
    /// A number that is new at each reset of the row, and that no other row has had. So a ticket
    /// from before a reset never counts again, even if the row returns to the same generation.
    epoch: u64,
    load: EndpointLoad,
    /// Whether the slot is in `changed`.
    changed: bool,
}

const NOWHERE: u64 = 0;

/// The number of prompts over which the mean length is computed: few enough to follow the traffic.
const PROMPTS_AVERAGED: f32 = 64.0;

const EMPTY: LedgerRow = LedgerRow {
    generation: Generation(0),
    epoch: NOWHERE,
    load: NOTHING,
    changed: false,
};

// === impl InFlight ===

impl InFlight {
    /// Counts one more request at `endpoint`, with a prompt of `prefill_tokens` that is not cached.
    /// `endpoint` must belong to the current snapshot, because a row of another generation is
    /// reset. A slot at or above [`ENDPOINTS_MAX`], which no snapshot has, is not counted.
    pub fn admit(&mut self, endpoint: EndpointRef, prefill_tokens: u32) -> InFlightTicket {
        self.admit_prompt(endpoint, prefill_tokens, prefill_tokens)
    }

    /// Does [`Self::admit`] for a prompt. The endpoint has cached all its tokens but
    /// `uncached_tokens`.
    pub fn admit_prompt(
        &mut self,
        endpoint: EndpointRef,
        prompt_tokens: u32,
        uncached_tokens: u32,
    ) -> InFlightTicket {
        self.prompt_tokens += (prompt_tokens as f32 - self.prompt_tokens) / PROMPTS_AVERAGED;
        let prefills = PendingPrefills::from_tokens(prompt_tokens, uncached_tokens);
        let share = EndpointLoad {
            requests: 1,
            prefill_tokens: prefills.uncached_tokens,
            prefills,
            ..NOTHING
        };
        let mut ticket = InFlightTicket {
            endpoint,
            row_epoch: NOWHERE,
            load: share,
            past_first_token: false,
            output_tokens: 0,
            entry: None,
            suspended: None,
        };
        self.picked(endpoint);
        if self.current_epoch(endpoint) == NOWHERE {
            self.start_row(endpoint);
        }
        ticket.row_epoch = self.current_epoch(endpoint);
        self.add(&ticket);
        ticket
    }

    /// Adds this much expected output to the request, until it ends.
    pub fn expect_output(&mut self, ticket: &mut InFlightTicket, tokens: u32) {
        self.subtract(ticket);
        ticket.output_tokens = ticket.output_tokens.saturating_add(tokens);
        ticket.load.prefill_tokens = ticket.load.prefill_tokens.saturating_add(u64::from(tokens));
        self.add(ticket);
    }

    /// Sets the prompt and the expected output of a request that has no first token yet. The whole
    /// prompt counts as not cached.
    #[cold]
    pub fn set_prompt(&mut self, ticket: &mut InFlightTicket, tokens: u32, output_tokens: u32) {
        if ticket.past_first_token {
            return;
        }
        self.subtract(ticket);
        let prefills = PendingPrefills::from_tokens(tokens, tokens);
        ticket.output_tokens = output_tokens;
        ticket.load.prefill_tokens = prefills
            .uncached_tokens
            .saturating_add(u64::from(output_tokens));
        ticket.load.prefills = prefills;
        self.add(ticket);
    }

    /// Records that the first token arrived. The prefill is done, and `prompt_tokens` (the whole
    /// prompt, cached or not) are the context of every further token. A second call changes
    /// nothing.
    pub fn first_token(&mut self, ticket: &mut InFlightTicket, prompt_tokens: u32) {
        if !std::mem::replace(&mut ticket.past_first_token, true) {
            self.subtract(ticket);
            ticket.load.prefill_tokens = u64::from(ticket.output_tokens);
            ticket.load.prefills = NO_PREFILLS;
            ticket.load.decode_tokens = ticket
                .load
                .decode_tokens
                .saturating_add(u64::from(prompt_tokens));
            self.add(ticket);
            self.queued(ticket, |queues, slot, entry| queues.started(slot, entry.id));
        }
    }

    /// Puts a request with an SLO into the queue of its endpoint until the request ends, with the
    /// prediction of the request and the id by which operators find it. Does nothing for a request
    /// without an SLO, or on a second call.
    pub fn track(&mut self, ticket: &mut InFlightTicket, promise: TrackedSlo, request_id: &str) {
        if promise.slo.any() && ticket.entry.is_none() {
            ticket.entry = Some(self.queues.number(promise));
            self.enqueue(ticket, request_id.into());
        }
    }

    pub fn first_token_took(&mut self, ticket: &InFlightTicket, ms: f32) {
        if let Some(entry) = ticket.entry.filter(|_| self.counts(ticket)) {
            self.queues
                .first_token_took(ticket.endpoint.slot.0, entry.id, ms);
        }
    }

    pub fn tokens_took(&mut self, ticket: &InFlightTicket, ms: f32) {
        if let Some(entry) = ticket.entry.filter(|_| self.counts(ticket)) {
            self.queues
                .tokens_took(ticket.endpoint.slot.0, entry.id, ms);
        }
    }

    /// Returns this proxy's requests with an SLO at `endpoint`, the strictest SLO first.
    pub fn running(&self, endpoint: EndpointRef) -> &[RunningRequest] {
        if self.current_epoch(endpoint) == NOWHERE {
            &[]
        } else {
            self.queues.queue(endpoint.slot.0)
        }
    }

    /// Adds `tokens` to the output of the request.
    pub fn decoded(&mut self, ticket: &mut InFlightTicket, tokens: u32) {
        self.subtract(ticket);
        ticket.load.decode_tokens = ticket.load.decode_tokens.saturating_add(u64::from(tokens));
        self.add(ticket);
    }

    /// Moves the request to the endpoint `to`, which serves the request instead: a retry reached
    /// the next endpoint of the ranked list. `to` may belong to an older snapshot. So if the row
    /// of `to` has another generation, it is replaced only if it is empty; otherwise no row counts
    /// the request.
    pub fn transfer(&mut self, ticket: &mut InFlightTicket, to: EndpointRef) {
        if to == ticket.endpoint {
            return;
        }
        self.subtract(ticket);
        let mut request_id = Box::default();
        self.queued(ticket, |queues, slot, entry| {
            request_id = queues.remove(slot, entry.id);
        });
        if self.current_epoch(to) == NOWHERE
            && self.row(to.slot).is_none_or(|row| row.load == NOTHING)
        {
            self.start_row(to);
        }
        ticket.endpoint = to;
        ticket.row_epoch = self.current_epoch(to);
        self.add(ticket);
        self.enqueue(ticket, request_id);
    }

    /// Ends the request.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "taking the ticket is what rules out a second release"
    )]
    pub fn release(&mut self, ticket: InFlightTicket) {
        self.end_suspension(&ticket);
        self.subtract(&ticket);
        self.queued(&ticket, |queues, slot, entry| {
            drop(queues.remove(slot, entry.id));
        });
    }

    /// Returns the load of all VMs and proxies at `endpoint`.
    pub fn load(&self, endpoint: EndpointRef) -> EndpointLoad {
        self.own(endpoint).with(self.others.load(endpoint))
    }

    /// Returns the number of requests in [`Self::load`].
    pub fn requests(&self, endpoint: EndpointRef) -> u32 {
        let own = self
            .row(endpoint.slot)
            .filter(|row| row.is_of(endpoint))
            .map_or(0, |row| row.load.requests);
        own.saturating_add(self.others.requests(endpoint))
    }

    /// Returns the load of this VM at `endpoint`. The load is empty if the row belongs to another
    /// generation.
    pub fn own(&self, endpoint: EndpointRef) -> EndpointLoad {
        self.row(endpoint.slot)
            .filter(|row| row.is_of(endpoint))
            .map_or(NOTHING, |row| row.load)
    }

    /// Records a pick of `endpoint`, by this worker or another worker.
    pub fn picked(&mut self, endpoint: EndpointRef) {
        self.last_picks.note(endpoint);
    }

    /// Records that the last pick of `endpoint` had the number `pick`; see [`Self::last_pick`].
    pub fn picked_at(&mut self, endpoint: EndpointRef, pick: u64) {
        self.last_picks.set(endpoint, pick);
    }

    /// Returns the number of the last pick of `endpoint`. The numbers grow with every pick, and 0
    /// means never.
    pub fn last_pick(&self, endpoint: EndpointRef) -> u64 {
        self.last_picks.last_pick(endpoint)
    }

    /// Returns the load of other workers and proxies, mutably.
    pub fn others_mut(&mut self) -> &mut PeerLoads {
        &mut self.others
    }

    /// Records that new `metrics` of these endpoints arrived. From now on, [`Self::requests_now`]
    /// adds the changes since this call.
    pub fn scraped(&mut self, endpoints: &[EndpointRef], metrics: &[EndpointMetrics]) {
        for (endpoint, metrics) in endpoints.iter().zip(metrics) {
            let requests = self.requests(*endpoint);
            self.scraped.note(*endpoint, requests, metrics);
        }
    }

    /// Returns the number of requests at `endpoint` now: the engine's last report (`metrics`,
    /// running and queued together) plus the changes since that report. See [`requests_now`].
    pub fn requests_now(&self, endpoint: EndpointRef, metrics: &EndpointMetrics) -> f32 {
        let said = metrics
            .running_requests
            .map(|running| running + metrics.queue_depth.unwrap_or(0.0));
        requests_now(
            said,
            self.scraped.requests(endpoint),
            self.requests(endpoint),
        )
    }

    /// Returns every endpoint at which this VM has load, by slot.
    pub fn rows(&self) -> impl Iterator<Item = (EndpointRef, EndpointLoad)> + '_ {
        let endpoint = |(slot, row): (u16, &LedgerRow)| {
            (
                EndpointRef {
                    slot: Slot(slot),
                    generation: row.generation,
                },
                row.load,
            )
        };
        (0_u16..)
            .zip(&self.rows)
            .filter(|(_, row)| row.load != NOTHING)
            .map(endpoint)
    }

    /// Calls `each` with every row of this VM that changed since the last call. The cost depends
    /// only on the number of changed rows.
    pub fn take_changed(&mut self, mut each: impl FnMut(EndpointRef, EndpointLoad)) {
        for slot in self.changed.drain(..) {
            if let Some(row) = self.rows.get_mut(usize::from(slot)) {
                row.changed = false;
                each(
                    EndpointRef {
                        slot: Slot(slot),
                        generation: row.generation,
                    },
                    row.load,
                );
            }
        }
    }

    fn row(&self, slot: Slot) -> Option<&LedgerRow> {
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
            self.epochs_started += 1;
            *row = LedgerRow {
                generation: endpoint.generation,
                epoch: self.epochs_started,
                ..LedgerRow {
                    changed: row.changed,
                    ..EMPTY
                }
            };
            self.queues.clear(endpoint.slot.0);
        }
    }

    fn enqueue(&mut self, ticket: &InFlightTicket, request_id: Box<str>) {
        let waits = !ticket.past_first_token;
        self.queued(ticket, |queues, slot, entry| {
            queues.add(slot, entry, request_id, waits);
        });
    }

    /// Changes the queue entry of a ticket, and then updates the strictest SLOs of its endpoint.
    fn queued(
        &mut self,
        ticket: &InFlightTicket,
        change: impl FnOnce(&mut RunningQueues, u16, RunningKey),
    ) {
        let Some(entry) = ticket.entry.filter(|_| self.counts(ticket)) else {
            return;
        };
        let slot = ticket.endpoint.slot.0;
        change(&mut self.queues, slot, entry);
        let Slo { ttft_us, tpot_us } = self.queues.lowest(slot);
        if let Some(load) = self.counting(ticket) {
            load.ttft_slo_us = ttft_us;
            load.tpot_slo_us = tpot_us;
        }
    }

    /// Whether a row counts the ticket.
    fn counts(&self, ticket: &InFlightTicket) -> bool {
        ticket.row_epoch != NOWHERE
            && self
                .row(ticket.endpoint.slot)
                .is_some_and(|row| row.epoch == ticket.row_epoch)
    }

    /// Returns the epoch of the row of `endpoint`; [`NOWHERE`] if the row belongs to another
    /// generation.
    fn current_epoch(&self, endpoint: EndpointRef) -> u64 {
        self.row(endpoint.slot)
            .filter(|row| row.is_of(endpoint))
            .map_or(NOWHERE, |row| row.epoch)
    }

    /// Returns the load of the row that counts the ticket, mutably.
    fn counting(&mut self, ticket: &InFlightTicket) -> Option<&mut EndpointLoad> {
        let slot = ticket.endpoint.slot.0;
        let row = self
            .rows
            .get_mut(usize::from(slot))
            .filter(|row| ticket.row_epoch != NOWHERE && row.epoch == ticket.row_epoch)?;
        if !std::mem::replace(&mut row.changed, true) {
            self.changed.push(slot);
        }
        Some(&mut row.load)
    }

    fn add(&mut self, ticket: &InFlightTicket) {
        let Some(load) = self.counting(ticket) else {
            return;
        };
        *load = load.with(ticket.load);
    }

    fn subtract(&mut self, ticket: &InFlightTicket) {
        let Some(load) = self.counting(ticket) else {
            return;
        };
        let share = ticket.load;
        debug_assert!(
            load.requests >= share.requests
                && load.prefill_tokens >= share.prefill_tokens
                && load.decode_tokens >= share.decode_tokens,
            "a row holds at least what each of its tickets added: {load:?} < {share:?}"
        );
        load.requests = load.requests.saturating_sub(share.requests);
        load.prefill_tokens = load.prefill_tokens.saturating_sub(share.prefill_tokens);
        load.decode_tokens = load.decode_tokens.saturating_sub(share.decode_tokens);
        load.prefills = load.prefills.without(share.prefills);
    }
}

// === impl InFlightTicket ===

impl InFlightTicket {
    pub fn endpoint(&self) -> EndpointRef {
        self.endpoint
    }

    /// Returns the load that the request adds.
    pub fn load(&self) -> EndpointLoad {
        self.load
    }

    /// Returns the SLO of the request, if it is in a queue.
    pub fn slo(&self) -> Slo {
        self.entry.map_or(Slo::default(), |entry| entry.promise.slo)
    }
}

// === impl LedgerRow ===

impl LedgerRow {
    fn is_of(&self, endpoint: EndpointRef) -> bool {
        self.epoch != NOWHERE && self.generation == endpoint.generation
    }
}

#[cfg(test)]
mod tests;
