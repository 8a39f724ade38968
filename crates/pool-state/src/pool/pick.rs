//! A recorded pick, with its entries in the ledger and the cache until the exchange ends.
//!
//! Several endpoints may work on the same request. The served endpoint has a ticket in the ledger
//! until the end. Endpoints of earlier stages (encode, prefill) have theirs until the served
//! endpoint answers, because by then its sidecar has their results.

use scheduler::in_flight::{EndpointLoad, InFlightTicket};
use scheduler::prefix::CacheEstimate;
use scheduler::{EndpointMetrics, EndpointRef, Slo, Timestamp};

use super::ManagedPool;
use super::cache_places::CachePlaces;
use super::missed::UnconfirmedPrompt;
use super::request_timing::RequestTiming;
use crate::queues::FlowCharge;
use crate::usage::TokenUsage;

/// A pick that was made and recorded.
#[derive(Debug)]
pub struct RecordedPick {
    /// The endpoints to try with their addresses, best first. If a data-parallel rank serves behind
    /// an address, the endpoint of the entry is the rank, because it is charged.
    pub ranked: Vec<(EndpointRef, Box<str>)>,
    /// The entries of the pick in the ledger.
    pub hold: LedgerHold,
    /// Address of the prefill endpoint.
    pub prefill: Option<Box<str>>,
    /// Addresses of the encode endpoints.
    pub encode: Vec<Box<str>>,
    /// Address of the data-parallel rank.
    pub data_parallel: Option<Box<str>>,
    /// The session tokens for the client.
    pub tokens: Vec<SessionTokenHeader>,
    /// The time expected at the first endpoint, to the first token and to the end, in ms.
    pub expected_ms: (f32, f32),
    /// Whether the second endpoint of the ranked list ever answered this VM.
    pub second_answered: bool,
}

/// The entries of a pick in the ledger.
#[derive(Debug)]
pub struct LedgerHold {
    pub(super) serving: InFlightTicket,
    pub(super) stages: Vec<InFlightTicket>,
    /// The estimate of the prompt's blocks that the prefill endpoint had cached. `None` if the
    /// reply has no information about that endpoint.
    pub(super) cache_estimate: Option<CacheEstimate>,
    /// Where the prompt was cached at the pick; `None` under the same condition as
    /// `cache_estimate`.
    pub(super) places: Option<CachePlaces>,
    /// The prompt. `None` once the endpoint has shown that it works on the prompt, or has refused
    /// the prompt.
    pub(super) unconfirmed: Option<UnconfirmedPrompt>,
    /// The measurement of the request; `None` when it is not measured.
    pub(super) watch: Option<Box<RequestTiming>>,
    /// The charge of the request's flow; `None` without flow control.
    pub(super) charge: Option<FlowCharge>,
    /// The number of the request, if it may be given up.
    pub(super) revocable: Option<u64>,
    /// The endpoint that this request probes, and the time of the pick. The endpoint was ejected,
    /// and other requests avoid it during the probe.
    pub(super) probe: Option<(EndpointRef, Timestamp)>,
}

/// A response header that names an endpoint to the client.
#[derive(Debug)]
pub struct SessionTokenHeader {
    pub header: Box<str>,
    /// The value for each entry of the ranked list, used if that endpoint serves.
    pub values: Vec<String>,
}

// === impl LedgerHold ===

impl LedgerHold {
    pub(super) fn new(
        serving: InFlightTicket,
        stages: Vec<InFlightTicket>,
        watch: Option<Box<RequestTiming>>,
    ) -> Self {
        Self {
            serving,
            stages,
            cache_estimate: None,
            places: None,
            unconfirmed: None,
            watch,
            charge: None,
            revocable: None,
            probe: None,
        }
    }

    /// The number of the request, if it may be given up. [`ManagedPool::next_due`] names this
    /// number when the request must be given up.
    pub fn revocable(&self) -> Option<u64> {
        self.revocable
    }

    /// Whether the request was sent because its band had not yet had its minimum share.
    pub fn is_owed(&self) -> bool {
        self.charge.is_some_and(|charge| charge.is_owed())
    }

    /// Charges the request's flow for the time for which it kept its place without progress, when
    /// it ends or is suspended. A request that is suspended has no place.
    pub fn charge_silence(&mut self, ms: u64) {
        if let Some(charge) = &mut self.charge
            && !self.serving.is_suspended()
        {
            charge.silent_ms = ms;
        }
    }

    /// The endpoint that serves the request.
    pub(super) fn endpoint(&self) -> EndpointRef {
        self.serving.endpoint()
    }

    /// The SLOs of the request, where latency is predicted.
    pub fn slo(&self) -> Slo {
        self.serving.slo()
    }

    /// The request's part of the serving endpoint's load.
    pub fn load(&self) -> EndpointLoad {
        self.serving.load()
    }

    /// The prompt tokens that are not cached at the endpoint that computes the prompt; 0 once the
    /// prompt is computed.
    pub fn uncached_tokens(&self) -> u64 {
        self.tickets()
            .map(|ticket| ticket.load().prefills.uncached_tokens)
            .sum()
    }

    /// The endpoints that work on the request.
    pub(super) fn endpoints(&self) -> impl Iterator<Item = EndpointRef> {
        self.tickets().map(InFlightTicket::endpoint)
    }

    pub(super) fn tickets_mut(&mut self) -> impl Iterator<Item = &mut InFlightTicket> {
        self.stages.iter_mut().chain([&mut self.serving])
    }

    fn tickets(&self) -> impl Iterator<Item = &InFlightTicket> {
        self.stages.iter().chain([&self.serving])
    }
}

// === impl ManagedPool ===

impl ManagedPool {
    /// Moves load and placement to `to`, another endpoint of the ranked list, which served the
    /// request.
    pub fn move_pick(&mut self, held: &mut LedgerHold, to: EndpointRef, blocks: &[u64]) {
        self.queues.room_freed(held.serving.endpoint());
        self.ledger.in_flight.transfer(&mut held.serving, to);
        self.queues.room_freed(to);
        held.watch = held
            .watch
            .take()
            .and_then(|mut watch| watch.move_to(to).then_some(watch));
        self.ledger.changes += 1;
        // An endpoint that has left the pool, or has a new generation, needs no placement. If
        // another endpoint computes the prompt, the reply is about that endpoint's cache, whichever
        // endpoint serves.
        let had_estimate = held.cache_estimate.is_some();
        let refused = held
            .unconfirmed
            .as_mut()
            .and_then(|prompt| prompt.served.take());
        if let Some(refused) = refused {
            self.cache.undo(&refused, blocks);
        }
        let placed = self
            .endpoints
            .knows(to)
            .then(|| self.cache.place_unmatched(to, blocks));
        if let Some(prompt) = &mut held.unconfirmed {
            prompt.served = placed.map(|(estimate, _)| estimate);
        }
        let placed = placed.filter(|_| had_estimate);
        held.places = held
            .places
            .zip(placed)
            .map(|(places, (_, known))| places.moved_to(known, blocks));
        held.cache_estimate = placed.map(|(estimate, _)| estimate);
    }

    /// Records once that the endpoint has shown that it works on the prompt with these hashes. The
    /// first token or the end is recorded at the same time, so other VMs receive both.
    #[inline(never)] // several callers, and the wasm module should be small
    pub fn confirm_placement(&mut self, held: &mut LedgerHold, hashes: &[u64]) {
        if let Some(prompt) = held.unconfirmed.take() {
            self.cache
                .confirm_prompt(&prompt, held.places.as_ref(), hashes);
        }
    }

    /// Removes the placement of a prompt that its endpoint refused, unless the endpoint has already
    /// worked on it.
    pub fn undo_placement(&mut self, held: &mut LedgerHold, hashes: &[u64]) {
        if let Some(prompt) = held.unconfirmed.take() {
            prompt
                .placements()
                .for_each(|placed| self.cache.undo(placed, hashes));
        }
    }

    /// Applies the cached tokens that the engine reported. `text_bytes` is the number of bytes of a
    /// prompt that is only text, otherwise 0. `blocks` is the number of blocks of a prompt whose
    /// tokens are spread evenly over them, otherwise `None`. `client` is the hash of the client.
    pub fn record_cache_hit(
        &mut self,
        held: &LedgerHold,
        usage: &TokenUsage,
        text_bytes: u32,
        blocks: Option<u32>,
        client: u64,
    ) {
        let endpoint = held.serving.endpoint();
        self.cache.token_rate.learn(endpoint, text_bytes, usage);
        let reported = usage.cached_tokens.zip(usage.prompt_tokens);
        if let (Some(cache_estimate), Some(blocks), Some((cached, prompt))) =
            (&held.cache_estimate, blocks, reported)
        {
            let prefixes = &mut self.cache.prefixes;
            prefixes.correct(cache_estimate, blocks, cached, prompt, client);
        }
    }

    /// Releases the tickets of earlier stages, because the serving endpoint answered.
    pub fn finish_earlier_stages(&mut self, held: &mut LedgerHold) {
        for ticket in held.stages.drain(..) {
            self.queues.room_freed(ticket.endpoint());
            self.ledger.in_flight.release(ticket);
            self.ledger.changes += 1;
        }
    }

    pub fn record_first_token(
        &mut self,
        held: &mut LedgerHold,
        prompt_tokens: u32,
        now: Timestamp,
    ) {
        self.observe_first_token(held, now);
        // The engine may have cut off a prompt that is longer than its cache.
        let metrics = self.endpoints.metrics_of(held.serving.endpoint());
        let cache_tokens = metrics.map_or(u64::MAX, EndpointMetrics::kv_tokens);
        let prompt_tokens = u32::try_from(cache_tokens).map_or(prompt_tokens, |cache_tokens| {
            prompt_tokens.min(cache_tokens)
        });
        self.ledger
            .in_flight
            .first_token(&mut held.serving, prompt_tokens);
        self.ledger.changes += 1;
        self.queues.room_freed(held.serving.endpoint());
    }

    /// Adds output tokens. They are not published one by one, because the next load report has
    /// them.
    pub fn record_output(&mut self, held: &mut LedgerHold, tokens: u32, now: Timestamp) {
        self.ledger.in_flight.decoded(&mut held.serving, tokens);
        self.observe_tokens(held, tokens, now);
    }

    /// Records the time to the first token, ms.
    pub fn record_ttft(&mut self, held: &LedgerHold, ms: f32) {
        self.ledger.in_flight.first_token_took(&held.serving, ms);
    }

    /// Records the time for each further token, ms.
    pub fn record_tpot(&mut self, held: &LedgerHold, ms: f32) {
        self.ledger.in_flight.tokens_took(&held.serving, ms);
    }

    /// Releases the ledger entries of a request that has ended.
    pub fn release(&mut self, mut held: LedgerHold, now: Timestamp) {
        self.finish_earlier_stages(&mut held);
        self.record_first_byte(&mut held);
        if let Some((probe, sent)) = held.probe {
            self.endpoints
                .failures
                .ejections
                .probe_again(probe, sent, now);
        }
        if let Some(charge) = held.charge {
            self.settle_charge(charge, held.serving.load().decode_tokens);
        }
        self.queues.room_freed(held.serving.endpoint());
        self.ledger.in_flight.release(held.serving);
        self.ledger.changes += 1;
    }
}
