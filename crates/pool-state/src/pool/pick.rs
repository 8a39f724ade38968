//! Picks and records the pick, and tracks its ledger entries until the exchange ends.
//!
//! Several endpoints may work on one request. The served endpoint has a ticket in the ledger until
//! the end. Endpoints of earlier stages (encode, prefill) have theirs until the served endpoint
//! answers, because by then its sidecar has their results.

use scheduler::flow::RoomLimits;
use scheduler::in_flight::{EndpointLoad, InFlightTicket};
use scheduler::prefix::{CacheEstimate, MatchLength};
use scheduler::{
    Decision, EndpointIndex, EndpointRef, Explanation, LocalState, REQUEST_ID, Request, Rng, Route,
    Slo, Snapshot, SubsetHint, TrackedSlo, session_token,
};

use super::cache_places::CachePlaces;
use super::flow::{RoomCheck, RoomSeeker};
use super::request_timing::RequestTiming;
use super::{EndpointFailures, EndpointLookups, ManagedPool, PublishedState, adapters};
use crate::queues::{FlowCharge, short_id};
use crate::refusal::PickRefusal;
use crate::usage::TokenUsage;
use scheduler::Timestamp;

/// A pick that was made and recorded.
#[derive(Debug)]
pub struct RecordedPick {
    /// The endpoints to try with their addresses, best first. Another endpoint may serve behind an
    /// address (a data-parallel rank): the named endpoint is charged.
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
    /// Expected time of the first endpoint to the first token and to the end, ms.
    pub expected_ms: (f32, f32),
    /// Whether the second endpoint of the list ever answered this VM.
    pub second_answered: bool,
}

/// Places in the ledger.
#[derive(Debug)]
pub struct LedgerHold {
    serving: InFlightTicket,
    stages: Vec<InFlightTicket>,
    /// The estimate of the prompt's blocks that the prefill endpoint had cached; `None` where the
    /// reply has no information about that endpoint.
    cache_estimate: Option<CacheEstimate>,
    /// Where the prompt was cached at the pick; `None` like `cache_estimate`.
    pub(super) places: Option<CachePlaces>,
    /// The measurement of the request; `None` when it is not measured.
    pub(super) watch: Option<Box<RequestTiming>>,
    /// The charge of the request's flow; `None` without flow control.
    pub(super) charge: Option<FlowCharge>,
    /// The number of the request, if it may be given up.
    pub(super) revocable: Option<u64>,
    /// The endpoint that this request probes: it was ejected, and no other request goes there
    /// meanwhile.
    pub(super) probe: Option<(EndpointRef, Timestamp)>,
}

/// A response header that names an endpoint to the client.
#[derive(Debug)]
pub struct SessionTokenHeader {
    pub header: Box<str>,
    /// The value for each entry of the ranked list, used if that endpoint serves.
    pub values: Vec<String>,
}

/// Receives each decision of [`ManagedPool::pick`], to record or to explain it. `()` does neither.
pub trait DecisionObserver {
    /// Called before the decision, with its inputs.
    fn before(
        &mut self,
        snapshot: &Snapshot,
        request: &Request<'_>,
        local: LocalState<'_>,
        rng: &Rng,
    );

    /// Whether [`Self::after`] needs an explanation. An explanation costs time.
    fn explains(&self) -> bool;

    /// The decision has been made.
    fn after(
        &mut self,
        snapshot: &Snapshot,
        decision: &Decision,
        explanation: Option<&Explanation>,
    );
}

impl DecisionObserver for () {
    fn before(&mut self, _: &Snapshot, _: &Request<'_>, _: LocalState<'_>, _: &Rng) {}

    fn explains(&self) -> bool {
        false
    }

    fn after(&mut self, _: &Snapshot, _: &Decision, _: Option<&Explanation>) {}
}

// === impl LedgerHold ===

impl LedgerHold {
    /// The number of the request, if it may be given up: [`ManagedPool::next_due`] names it then.
    pub fn revocable(&self) -> Option<u64> {
        self.revocable
    }

    /// Whether the request was sent for the minimum share of its band.
    pub fn is_owed(&self) -> bool {
        self.charge.is_some_and(|charge| charge.is_owed())
    }

    /// The endpoint that serves the request.
    pub(super) fn endpoint(&self) -> EndpointRef {
        self.serving.endpoint()
    }

    /// The SLOs of the request, where latency is predicted.
    pub fn slo(&self) -> Slo {
        self.serving.slo()
    }

    /// The part of the serving endpoint's load that is the request's.
    pub fn load(&self) -> EndpointLoad {
        self.serving.load()
    }

    /// The prompt tokens that are not cached at the endpoint that computes the prompt; 0 after its
    /// end.
    pub fn uncached_tokens(&self) -> u64 {
        self.stages
            .iter()
            .chain([&self.serving])
            .map(|ticket| ticket.load().prefills.uncached_tokens)
            .sum()
    }
}

// === impl ManagedPool ===

impl ManagedPool {
    /// Picks with the scheduler and records the pick: ledger and index change here. `model` is the
    /// model's name in the client's request.
    pub fn pick(
        &mut self,
        request: &Request<'_>,
        model: &str,
        now: Timestamp,
        observer: &mut impl DecisionObserver,
    ) -> Result<RecordedPick, PickRefusal> {
        self.pick_observed(request, model, None, now, observer)
    }

    /// Like [`Self::pick`]; with `room`, only if the endpoint has room.
    pub(super) fn pick_observed(
        &mut self,
        request: &Request<'_>,
        model: &str,
        room: Option<RoomCheck>,
        now: Timestamp,
        observer: &mut impl DecisionObserver,
    ) -> Result<RecordedPick, PickRefusal> {
        let planned = self.plan_observed(request, room.map(|check| check.limits), now, observer);
        self.commit(request, model, room, planned, now)
    }

    /// Like [`Self::pick`], with a decision that `choose` makes instead of the scheduler. The
    /// simulator compares other policies by this on the same state.
    pub fn pick_with(
        &mut self,
        request: &Request<'_>,
        model: &str,
        now: Timestamp,
        choose: impl FnOnce(&Snapshot, &Request<'_>, LocalState<'_>, &mut Rng) -> Decision,
    ) -> Result<RecordedPick, PickRefusal> {
        let planned = self.plan(request, None, now, choose);
        self.commit(request, model, None, planned, now)
    }

    /// Refuses a request if waiting cannot change that no endpoint may serve it. Picks nothing.
    pub(super) fn check_final(
        &mut self,
        request: &Request<'_>,
        now: Timestamp,
        observer: &mut impl DecisionObserver,
    ) -> Result<(), PickRefusal> {
        match self.plan_observed(request, None, now, observer) {
            Err(refusal) if self.is_final(&refusal) => Err(refusal),
            _ => Ok(()),
        }
    }

    /// Decides on a request: for the endpoint alone that has the stored answer which the request
    /// names, if it may serve the request.
    fn plan_observed(
        &mut self,
        request: &Request<'_>,
        limits: Option<RoomLimits>,
        now: Timestamp,
        observer: &mut impl DecisionObserver,
    ) -> Result<Route, PickRefusal> {
        if let Some(only) = self.stored_answer_hint(request, now) {
            match self.plan_by_scheduler(
                &Request {
                    subset: Some(&only),
                    ..request.clone()
                },
                limits,
                now,
                observer,
            ) {
                Err(PickRefusal::Decision(Decision::Unavailable(_))) => {}
                planned => return planned,
            }
        }
        self.plan_by_scheduler(request, limits, now, observer)
    }

    /// A hint that allows only the endpoint that has the stored answer which the request names.
    /// `None` if there is none, it is gone or ejected, or the proxy does not allow it.
    fn stored_answer_hint(&self, request: &Request<'_>, now: Timestamp) -> Option<SubsetHint> {
        let endpoint = (request.stored_id != 0)
            .then(|| self.stored_answers.endpoint(request.stored_id))
            .flatten()?;
        let snapshot = self
            .snapshot()
            .filter(|_| !self.failures.ejections.is_ejected(endpoint, now))?;
        let index = snapshot
            .indices()
            .find(|&index| snapshot.id(index) == Some(endpoint))?;
        let socket = snapshot.socket(index)?;
        request
            .subset
            .is_none_or(|subset| subset.allows_socket(socket))
            .then(|| SubsetHint::only(socket))
    }

    #[inline(never)]
    fn plan_by_scheduler(
        &mut self,
        request: &Request<'_>,
        limits: Option<RoomLimits>,
        now: Timestamp,
        observer: &mut impl DecisionObserver,
    ) -> Result<Route, PickRefusal> {
        self.plan(request, limits, now, |snapshot, request, local, rng| {
            observer.before(snapshot, request, local, rng);
            let mut explanation = observer.explains().then(Explanation::default);
            let decision = scheduler::schedule(snapshot, request, local, rng, explanation.as_mut());
            observer.after(snapshot, &decision, explanation.as_ref());
            decision
        })
    }

    /// Records the route of a plan, unless its room is left to others.
    fn commit(
        &mut self,
        request: &Request<'_>,
        model: &str,
        room: Option<RoomCheck>,
        planned: Result<Route, PickRefusal>,
        now: Timestamp,
    ) -> Result<RecordedPick, PickRefusal> {
        if let Err(PickRefusal::Decision(Decision::Shed(_))) = &planned
            && request.slo.any()
        {
            self.counters
                .count_shed(model, request.model, request.priority);
        }
        let route = planned?;
        if let Some(left) = room.and_then(|check| self.left_to_others(request, &route, check, now))
        {
            return Err(PickRefusal::Left(left));
        }
        self.record(request, &route, now)
            .ok_or(PickRefusal::NoState)
    }

    /// Decides on a request with `choose`; with `limits`, only for an endpoint that has room.
    /// Changes nothing but what the last plan looked up.
    fn plan(
        &mut self,
        request: &Request<'_>,
        limits: Option<RoomLimits>,
        now: Timestamp,
        choose: impl FnOnce(&Snapshot, &Request<'_>, LocalState<'_>, &mut Rng) -> Decision,
    ) -> Result<Route, PickRefusal> {
        let Some(state) = &self.state else {
            return Err(PickRefusal::NoState);
        };
        let EndpointFailures {
            ejections,
            health,
            crashing,
            ..
        } = &self.failures;
        if request
            .prefix_blocks
            .last()
            .is_some_and(|&prompt| crashing.is_crashing(prompt, health, now))
        {
            return Err(PickRefusal::CrashingPrompt);
        }
        let EndpointLookups {
            known,
            matched,
            reuse_interval,
            ejected,
            failing,
        } = &mut self.lookups;
        health.excess_failures(&state.refs, now, failing);
        ejections.waive_expired(&state.refs, now, failing);
        self.prefixes
            .matched(request.prefix_blocks, &state.refs, known);
        matched.clear();
        matched.extend(
            known
                .iter()
                .map(|known| known.blocks(request.prefix_blocks)),
        );
        *reuse_interval = self
            .prefixes
            .reuse_interval(request.prefix_blocks, &state.refs, known);
        ejections.mark_ejected(&state.snapshot, now, ejected);
        self.adapters.find_rooms(&state.snapshot, request.model);
        let local = LocalState {
            in_flight: &self.in_flight,
            matched_blocks: matched,
            reuse_interval: self.conversations.interval(*reuse_interval),
            evicted_share: self.evictions.share(),
            ejected,
            failing,
            last_answers: health.last_answers(),
            last_cold_picks: self.cold_picks.last(),
            adapter_rooms: self.adapters.rooms(),
            peers_unreachable: self.sharing.peers_unreachable,
            metrics_stale: state.metrics_stale(now),
        };
        let decision = choose(&state.snapshot, request, local, &mut self.rng);
        let Decision::Route(route) = decision else {
            return Err(PickRefusal::Decision(decision));
        };
        let lacks_room = |limits: &RoomLimits| {
            !scheduler::has_room(&state.snapshot, request, local, &route, *limits)
        };
        let endpoint = state
            .endpoint(serving(&route))
            .map(|(endpoint, _)| endpoint);
        match endpoint.zip(limits.filter(lacks_room)) {
            Some((full, limits)) if self.is_full(full, limits, now) => Err(PickRefusal::Full(full)),
            Some((full, _)) => Err(PickRefusal::TooLarge(full)),
            None => Ok(route),
        }
    }

    /// The endpoint of the route, if its room is left to an older request or to another proxy, or
    /// if a claim is needed first.
    fn left_to_others(
        &mut self,
        request: &Request<'_>,
        route: &Route,
        check: RoomCheck,
        now: Timestamp,
    ) -> Option<EndpointRef> {
        let (endpoint, _) = self.state.as_ref()?.endpoint(serving(route))?;
        let needs_claim = check.seeker == RoomSeeker::Arrival { needs_claim: true };
        let is_left = needs_claim
            || self.is_claimed(endpoint, request.priority, check)
            || (check.is_over_share && self.queues.leaves_room(request.priority, now));
        is_left.then_some(endpoint)
    }

    fn record(
        &mut self,
        request: &Request<'_>,
        route: &Route,
        now: Timestamp,
    ) -> Option<RecordedPick> {
        let watch = self.start_timing(request, route, now);
        let promise = self.tracked_slo(request, route, now);
        let state = self.state.as_ref()?;
        let tokens = state.tokens(route);
        let load = &state.snapshot.pipeline().production().load;
        let output_tokens = load.output_tokens(request.prompt_tokens, request.max_tokens);
        let step = state.snapshot.step();
        let serving = serving(route);
        let prompting = route.prefill.unwrap_or(serving);
        let matched = self.matched_tokens(request, prompting);
        let serving_ref = state.endpoint(serving)?.0;
        let prompting_ref = state.endpoint(prompting)?.0;
        let mut picked = state.endpoint_addresses(route);
        let stages: Vec<EndpointRef> = route
            .encode
            .iter()
            .filter_map(|&index| Some(state.endpoint(index)?.0))
            .collect();

        let uncached = request.prompt_tokens.saturating_sub(matched);
        let uncached_here = if prompting == serving { uncached } else { 0 };
        let output = request.max_tokens.map_or(step.output_tokens(), narrow);
        let expected_ms = step.expected_ms(
            serving_ref,
            &self.in_flight.load(serving_ref),
            narrow(uncached_here),
            narrow(request.prompt_tokens),
            output,
        );
        let probe = self
            .failures
            .ejections
            .is_probe(serving_ref, now)
            .then_some((serving_ref, now));
        let second_answered = picked
            .get(1)
            .is_some_and(|(second, _)| self.failures.health.answered_at(*second).is_some());
        let serving_ticket =
            self.in_flight
                .admit_prompt(serving_ref, request.prompt_tokens, uncached_here);
        let mut held = LedgerHold {
            serving: serving_ticket,
            stages: Vec::new(),
            cache_estimate: None,
            places: None,
            watch,
            charge: None,
            revocable: None,
            probe,
        };
        self.in_flight
            .expect_output(&mut held.serving, output_tokens);
        let id = short_id(
            request
                .headers
                .iter()
                .find(|(name, _)| *name == REQUEST_ID)
                .map_or("", |(_, id)| id),
        );
        self.in_flight.track(&mut held.serving, promise, id);
        let load = held.serving.load();
        self.in_flight
            .others_mut()
            .picked(serving_ref, load, now.us_since(Timestamp(0)));
        held.stages.extend(
            stages
                .into_iter()
                .map(|endpoint| self.in_flight.admit(endpoint, 0)),
        );
        if prompting != serving {
            held.stages.push(self.in_flight.admit_prompt(
                prompting_ref,
                request.prompt_tokens,
                uncached,
            ));
            self.place(
                prompting_ref,
                request.prefix_blocks,
                self.lookups.known(prompting),
            );
            self.record_model(prompting, request.model);
        }
        held.places =
            (prompting == serving).then(|| self.cache_places(serving, request.prefix_blocks));
        if let Some(places) = &held.places {
            self.evictions.record(places, request.blocks());
        }
        self.conversations
            .record(self.lookups.reuse_interval, self.lookups.is_cold());
        let cache_estimate = self.place(
            serving_ref,
            request.prefix_blocks,
            self.lookups.known(serving),
        );
        held.cache_estimate = (prompting == serving).then_some(cache_estimate);
        self.record_model(serving, request.model);
        self.counters
            .count_pick(serving_ref, request.prompt_tokens, matched);
        self.sharing.changes += 1;
        // The data-parallel rank behind the address is charged and judged.
        if let (Some(_), Some((charged, _))) = (route.data_parallel, picked.first_mut()) {
            *charged = serving_ref;
        }
        let address = |index: EndpointIndex| {
            self.state
                .as_ref()
                .and_then(|state| state.endpoint(index))
                .map(|(_, address)| address)
        };
        Some(RecordedPick {
            ranked: picked,
            hold: held,
            prefill: route.prefill.and_then(address),
            encode: route.encode.iter().copied().filter_map(address).collect(),
            data_parallel: route.data_parallel.and_then(address),
            tokens,
            expected_ms,
            second_answered,
        })
    }

    /// Moves load and placement to `to`, another endpoint of the ranked list, which served.
    pub fn move_pick(&mut self, held: &mut LedgerHold, to: EndpointRef, blocks: &[u64]) {
        self.queues.room_freed(held.serving.endpoint());
        self.in_flight.transfer(&mut held.serving, to);
        self.queues.room_freed(to);
        held.watch = held
            .watch
            .take()
            .and_then(|mut watch| watch.move_to(to).then_some(watch));
        self.sharing.changes += 1;
        // An endpoint that is gone, or has a new generation, needs no placement. Where another
        // endpoint computes the prompt, the reply is about that endpoint's cache, whichever
        // endpoint serves.
        let had_estimate = held.cache_estimate.is_some();
        self.undo_placement(held, blocks);
        let placed = self
            .knows(to)
            .then(|| self.place_unmatched(to, blocks))
            .filter(|_| had_estimate);
        held.places = held
            .places
            .zip(placed)
            .map(|(places, (_, known))| places.moved_to(known, blocks));
        held.cache_estimate = placed.map(|(estimate, _)| estimate);
    }

    /// Removes the placement of a prompt that its endpoint never worked on.
    pub fn undo_placement(&mut self, held: &mut LedgerHold, hashes: &[u64]) {
        if let Some(cache_estimate) = held.cache_estimate.take() {
            self.prefixes.undo(&cache_estimate, hashes);
        }
    }

    /// Applies the cached tokens that the engine reported. `text_bytes`: the bytes of a prompt of
    /// text alone, else 0. `blocks`: the blocks of a prompt whose tokens are spread evenly over
    /// them, else `None`.
    pub fn record_cache_hit(
        &mut self,
        held: &LedgerHold,
        usage: &TokenUsage,
        text_bytes: u32,
        blocks: Option<u32>,
    ) {
        self.token_rate.learn(text_bytes, usage);
        let reported = usage.cached_tokens.zip(usage.prompt_tokens);
        if let (Some(cache_estimate), Some(blocks), Some((cached, prompt))) =
            (&held.cache_estimate, blocks, reported)
        {
            self.prefixes
                .correct(cache_estimate, blocks, cached, prompt);
        }
    }

    /// Releases the tickets of earlier stages, because the serving endpoint answered.
    pub fn finish_earlier_stages(&mut self, held: &mut LedgerHold) {
        for ticket in held.stages.drain(..) {
            self.queues.room_freed(ticket.endpoint());
            self.in_flight.release(ticket);
            self.sharing.changes += 1;
        }
    }

    pub fn record_first_token(
        &mut self,
        held: &mut LedgerHold,
        prompt_tokens: u32,
        now: Timestamp,
    ) {
        self.observe_first_token(held, now);
        self.in_flight.first_token(&mut held.serving, prompt_tokens);
        self.sharing.changes += 1;
        self.queues.room_freed(held.serving.endpoint());
    }

    /// Adds output tokens. They are not published one by one: the next load report has them.
    pub fn record_output(&mut self, held: &mut LedgerHold, tokens: u32, now: Timestamp) {
        self.in_flight.decoded(&mut held.serving, tokens);
        self.observe_tokens(held, tokens, now);
    }

    /// Records the time to the first token, ms.
    pub fn record_ttft(&mut self, held: &LedgerHold, ms: f32) {
        self.in_flight.first_token_took(&held.serving, ms);
    }

    /// Records the time for each further token, ms.
    pub fn record_tpot(&mut self, held: &LedgerHold, ms: f32) {
        self.in_flight.tokens_took(&held.serving, ms);
    }

    /// Takes back a pick, because another VM gave the room away first.
    pub(super) fn take_back(&mut self, mut held: LedgerHold, blocks: &[u64]) {
        let endpoint = held.serving.endpoint();
        let prefills = held.load().prefills;
        self.counters.uncount_pick(
            endpoint,
            prefills.prompt_tokens,
            prefills
                .prompt_tokens
                .saturating_sub(prefills.uncached_tokens),
        );
        self.undo_placement(&mut held, blocks);
        for ticket in held.stages.drain(..).chain([held.serving]) {
            self.in_flight.release(ticket);
        }
        self.sharing.changes += 1;
    }

    /// Releases the ledger entries of a request that has ended.
    pub fn release(&mut self, mut held: LedgerHold, now: Timestamp) {
        self.finish_earlier_stages(&mut held);
        self.record_first_byte(&mut held);
        if let Some((probe, sent)) = held.probe {
            self.failures.ejections.probe_again(probe, sent, now);
        }
        if let Some(charge) = held.charge {
            self.settle_charge(charge, held.serving.load().decode_tokens);
        }
        self.queues.room_freed(held.serving.endpoint());
        self.in_flight.release(held.serving);
        self.sharing.changes += 1;
    }

    /// The SLOs that count for the request at its serving endpoint, computed before the load of the
    /// request counts there; none for a request without an SLO.
    fn tracked_slo(&self, request: &Request<'_>, route: &Route, now: Timestamp) -> TrackedSlo {
        let Some(state) = self.state.as_ref().filter(|_| request.slo.any()) else {
            return TrackedSlo::default();
        };
        let local = LocalState {
            matched_blocks: &self.lookups.matched,
            metrics_stale: state.metrics_stale(now),
            ..LocalState::new(&self.in_flight)
        };
        scheduler::tracked_slo(&state.snapshot, request, local, serving(route))
    }

    /// Like [`Self::place`], for an endpoint that was not looked up at this pick.
    fn place_unmatched(
        &mut self,
        endpoint: EndpointRef,
        hashes: &[u64],
    ) -> (CacheEstimate, MatchLength) {
        let mut known = Vec::new();
        self.prefixes.matched(hashes, &[endpoint], &mut known);
        let known = known.first().copied().unwrap_or_default();
        (self.place(endpoint, hashes, known), known)
    }

    /// Records that `endpoint` gets a prompt of these hashes and has `known` of them cached.
    /// Returns the estimate before.
    fn place(
        &mut self,
        endpoint: EndpointRef,
        hashes: &[u64],
        known: MatchLength,
    ) -> CacheEstimate {
        self.sharing.placements.push(endpoint, hashes, known.cached);
        self.prefixes.place(endpoint, hashes, known)
    }

    fn matched_tokens(&self, request: &Request<'_>, endpoint: EndpointIndex) -> u32 {
        let blocks = self.lookups.matched(endpoint);
        blocks
            .saturating_mul(request.prefix_block_tokens)
            .min(request.prompt_tokens)
    }

    /// Records the model of the request at an endpoint that serves adapters, and the pick of a
    /// prompt that is cached nowhere.
    fn record_model(&mut self, endpoint: EndpointIndex, model: &str) {
        let Some(state) = &self.state else { return };
        if let Some((endpoint_ref, _)) = state
            .endpoint(endpoint)
            .filter(|_| state.snapshot.adapter_places(endpoint, model).is_some())
        {
            let mark = adapters::model_mark(model);
            self.adapters.record_model(endpoint.get(), mark);
            self.sharing.placements.push(endpoint_ref, &[mark], 0);
        }
        if self.lookups.is_cold() {
            self.cold_picks.record(endpoint);
        }
    }
}

// === impl PublishedState ===

impl PublishedState {
    fn endpoint(&self, index: EndpointIndex) -> Option<(EndpointRef, Box<str>)> {
        self.snapshot
            .endpoint(index)
            .map(|e| (e.id, e.address.clone()))
    }

    fn endpoint_addresses(&self, route: &Route) -> Vec<(EndpointRef, Box<str>)> {
        route
            .ranked
            .iter()
            .filter_map(|index| self.endpoint(index))
            .collect()
    }

    /// The value of each session header, for each endpoint of the list.
    fn tokens(&self, route: &Route) -> Vec<SessionTokenHeader> {
        let pipeline = self.snapshot.pipeline();
        let name = |index: EndpointIndex| Some(session_token(&self.snapshot.endpoint(index)?.name));
        let of = |token: &scheduler::SessionToken| {
            let values = match pipeline.stage_of(&token.profile) {
                scheduler::Stage::Serving => match route.data_parallel {
                    Some(rank) => vec![name(rank)?],
                    None => route.ranked.iter().filter_map(name).collect(),
                },
                scheduler::Stage::Prefill => vec![name(route.prefill?)?; route.ranked.len()],
                scheduler::Stage::Encode => vec![name(*route.encode.first()?)?; route.ranked.len()],
            };
            Some(SessionTokenHeader {
                header: token.header.clone(),
                values,
            })
        };
        pipeline.session_tokens().iter().filter_map(of).collect()
    }
}

/// The endpoint that the route charges: the data-parallel rank, or else the first of the list.
fn serving(route: &Route) -> EndpointIndex {
    route.data_parallel.unwrap_or(route.ranked.first())
}

/// Converts a count to f32, whose seven digits are enough for estimated times.
#[expect(clippy::cast_precision_loss, reason = "said above")]
fn narrow(count: u32) -> f32 {
    count as f32
}

/// How many blocks of the index fit into each engine's KV cache.
pub(super) fn index_blocks(snapshot: &Snapshot) -> impl Iterator<Item = u32> + '_ {
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
