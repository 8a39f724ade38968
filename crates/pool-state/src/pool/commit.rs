//! Records where a request goes: its load in the ledger, its prompt in the cache.

use scheduler::in_flight::InFlightTicket;
use scheduler::{
    EndpointIndex, EndpointRef, LocalState, REQUEST_ID, RankedList, Request, Route, TrackedSlo,
    session_token,
};

use super::ManagedPool;
use super::endpoints::PublishedState;
use super::pick::{LedgerHold, RecordedPick, Reservation, SessionTokenHeader};
use super::plan::{FlowUse, Plan, PoolReader, serving};
use crate::queues::{HeldTicket, short_id};
use scheduler::Timestamp;

/// A plan could not be recorded: the pool has changed since it was made. Plan again.
#[derive(Debug)]
pub struct Stale {
    /// The ticket of a request that stays queued.
    pub queued: Option<HeldTicket>,
}

// === impl ManagedPool ===

impl ManagedPool {
    /// Records a plan at `endpoint`: [`Plan::endpoint`], or any other one of the pool.
    ///
    /// # Errors
    /// [`Stale`]; nothing was recorded.
    pub fn commit(
        &mut self,
        mut plan: Plan,
        request: &Request<'_>,
        endpoint: EndpointRef,
        now: Timestamp,
    ) -> Result<RecordedPick, Stale> {
        let one = if endpoint == plan.endpoint {
            Some(None)
        } else {
            self.endpoints
                .index(endpoint)
                .map(|at| RankedList::new([at]))
        };
        let Some(one) = one.filter(|_| !self.is_stale(&plan)) else {
            return Err(self.discard(plan));
        };
        if let Some(one) = one {
            plan.route = Route::to(one);
            plan.endpoint = endpoint;
        }
        if let FlowUse::Queued { .. } = plan.flow {
            let claim = self.claim(plan, request, now)?;
            return self.redeem(claim, request, now);
        }
        let Some(mut reservation) = self.reserve(&plan, request, now) else {
            return Err(self.discard(plan));
        };
        if let FlowUse::Arrival { flow } = plan.flow {
            self.charge(&mut reservation.hold, request, flow, false, now);
            self.watch(&mut reservation.hold, None);
        }
        self.record(plan, reservation, request, now)
    }

    /// Drops a plan, and keeps its memory.
    pub(super) fn discard(&mut self, plan: Plan) -> Stale {
        self.planner.lookups = plan.lookups;
        Stale {
            queued: plan.flow.into_ticket(),
        }
    }

    /// Counts the load of a planned request. `None` if an endpoint of the plan is gone.
    pub(super) fn reserve(
        &mut self,
        plan: &Plan,
        request: &Request<'_>,
        now: Timestamp,
    ) -> Option<Reservation> {
        let watch = self.start_timing(request, plan, now);
        let promise = self.view().tracked_slo(request, plan, now);
        let state = self.endpoints.state.as_ref()?;
        let snapshot = &state.snapshot;
        let prompting = snapshot.endpoint(plan.prompting())?.id;
        let prompt_tokens = request.prompt_tokens;
        let uncached_here = plan.uncached_tokens(request);
        let step = snapshot.step();
        let expected_ms = step.expected_ms(
            plan.endpoint,
            &self.ledger.in_flight.load(plan.endpoint),
            narrow(uncached_here),
            narrow(prompt_tokens),
            request.max_tokens.map_or(step.output_tokens(), narrow),
        );
        let load = &snapshot.pipeline().production().load;
        let output_tokens = load.output_tokens(prompt_tokens, request.max_tokens);
        let mut headers = request.headers.iter();
        let id = headers.find(|(name, _)| *name == REQUEST_ID);
        let in_flight = &mut self.ledger.in_flight;
        let mut serving = in_flight.admit_prompt(plan.endpoint, prompt_tokens, uncached_here);
        in_flight.expect_output(&mut serving, output_tokens);
        in_flight.track(&mut serving, promise, short_id(id.map_or("", |(_, id)| id)));
        let picked_at = now.us_since(Timestamp(0));
        in_flight
            .others_mut()
            .picked(plan.endpoint, serving.load(), picked_at);
        let encoders = plan.route.encode.iter();
        let mut stages: Vec<InFlightTicket> = encoders
            .filter_map(|&index| Some(in_flight.admit(snapshot.endpoint(index)?.id, 0)))
            .collect();
        if prompting != plan.endpoint {
            let uncached = prompt_tokens.saturating_sub(plan.matched_tokens(request));
            stages.push(in_flight.admit_prompt(prompting, prompt_tokens, uncached));
        }
        self.ledger.changes += 1;
        Some(Reservation {
            hold: LedgerHold::new(serving, stages, watch),
            expected_ms,
        })
    }

    /// Drops a reservation, because another VM gave the room away first.
    pub(super) fn withdraw(&mut self, reservation: Reservation) {
        let LedgerHold {
            serving, stages, ..
        } = reservation.hold;
        for ticket in stages.into_iter().chain([serving]) {
            self.ledger.in_flight.release(ticket);
        }
        self.ledger.changes += 1;
    }

    /// Records a plan whose load counts already.
    pub(super) fn record(
        &mut self,
        plan: Plan,
        mut reservation: Reservation,
        request: &Request<'_>,
        now: Timestamp,
    ) -> Result<RecordedPick, Stale> {
        let Some(state) = &self.endpoints.state else {
            self.withdraw(reservation);
            return Err(self.discard(plan));
        };
        let route = &plan.route;
        let hold = &mut reservation.hold;
        let (estimate, places) = self.cache.record_plan(&state.snapshot, &plan, request);
        hold.cache_estimate = estimate;
        hold.places = places;
        let ejections = &mut self.endpoints.failures.ejections;
        hold.probe = ejections
            .is_probe(plan.endpoint, now)
            .then_some((plan.endpoint, now));
        self.ledger.counters.count_pick(
            plan.endpoint,
            request.prompt_tokens,
            plan.matched_tokens(request),
        );
        let mut ranked: Vec<(EndpointRef, Box<str>)> = route
            .ranked
            .iter()
            .filter_map(|index| Some((state.snapshot.endpoint(index)?.id, state.address(index)?)))
            .collect();
        let second_answered = ranked.get(1).is_some_and(|(second, _)| {
            let health = &self.endpoints.failures.health;
            health.answered_at(*second).is_some()
        });
        // The data-parallel rank behind the address is charged and judged.
        if let (Some(_), Some((charged, _))) = (route.data_parallel, ranked.first_mut()) {
            *charged = plan.endpoint;
        }
        let address = |index: EndpointIndex| state.address(index);
        let picked = RecordedPick {
            ranked,
            prefill: route.prefill.and_then(address),
            encode: route.encode.iter().copied().filter_map(address).collect(),
            data_parallel: route.data_parallel.and_then(address),
            tokens: state.tokens(route),
            expected_ms: reservation.expected_ms,
            second_answered,
            hold: reservation.hold,
        };
        self.planner.lookups = plan.lookups;
        Ok(picked)
    }
}

// === impl PoolReader ===

impl PoolReader<'_> {
    /// The SLOs that count for the request at its serving endpoint, computed before the load of the
    /// request counts there; none for a request without an SLO.
    fn tracked_slo(self, request: &Request<'_>, plan: &Plan, now: Timestamp) -> TrackedSlo {
        let Some(state) = self.endpoints.state.as_ref().filter(|_| request.slo.any()) else {
            return TrackedSlo::default();
        };
        let local = LocalState {
            matched_blocks: &plan.lookups.matched,
            metrics_stale: state.metrics_stale(now),
            ..LocalState::new(&self.ledger.in_flight)
        };
        scheduler::tracked_slo(&state.snapshot, request, local, serving(&plan.route))
    }
}

// === impl PublishedState ===

impl PublishedState {
    fn address(&self, index: EndpointIndex) -> Option<Box<str>> {
        Some(self.snapshot.endpoint(index)?.address.clone())
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

/// Converts a count to f32, whose seven digits are enough for estimated times.
#[expect(clippy::cast_precision_loss, reason = "seven digits are enough")]
fn narrow(count: u32) -> f32 {
    count as f32
}
