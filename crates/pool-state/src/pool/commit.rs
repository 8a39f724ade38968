//! Records to which endpoint a request is sent: its load in the ledger, and its prompt in the
//! prefix index.

use scheduler::in_flight::InFlightTicket;
use scheduler::{
    EndpointIndex, EndpointRef, LocalState, REQUEST_ID, RankedList, Request, Route, TrackedSlo,
    session_token,
};

use super::ManagedPool;
use super::endpoints::PublishedState;
use super::pick::{LedgerHold, RecordedPick, SessionTokenHeader};
use super::plan::{Plan, PoolReader, serving};
use crate::queues::short_id;
use scheduler::Timestamp;

/// A plan could not be recorded, because the pool has changed since it was made. The caller must
/// plan again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stale;

// === impl ManagedPool ===

impl ManagedPool {
    /// Records a plan at `endpoint`, which is [`Plan::endpoint`] or any other endpoint of the pool.
    ///
    /// # Errors
    /// Returns [`Stale`] if the pool has changed since the plan. Then nothing was recorded.
    pub fn commit(
        &mut self,
        mut plan: Plan,
        request: &Request<'_>,
        endpoint: EndpointRef,
        now: Timestamp,
    ) -> Result<RecordedPick, Stale> {
        if endpoint != plan.endpoint {
            let at = self.endpoints.index(endpoint).ok_or(Stale)?;
            plan.route = Route::to(RankedList::new([at]).ok_or(Stale)?);
            plan.endpoint = endpoint;
        }
        let picked = (!self.is_stale(&plan))
            .then(|| self.reserve(&plan, request, now))
            .flatten();
        let Some(mut picked) = picked else {
            self.discard(plan);
            return Err(Stale);
        };
        if let Some(flow) = plan.flow {
            self.charge(&mut picked.hold, request, flow, false, now);
            self.watch(&mut picked.hold, None);
        }
        Ok(self.record(plan, picked, request, now))
    }

    /// Drops a plan, and keeps its memory for the next plan.
    #[inline(never)] // several callers, and the wasm module should be small
    pub(super) fn discard(&mut self, plan: Plan) {
        self.planner.lookups = plan.lookups;
    }

    /// Counts the load of a planned request. Other VMs must see this load before the order of all
    /// VMs' queued requests is written. `None` if an endpoint of the plan has left the pool.
    #[inline(never)] // several callers, and the wasm module should be small
    pub(super) fn reserve(
        &mut self,
        plan: &Plan,
        request: &Request<'_>,
        now: Timestamp,
    ) -> Option<RecordedPick> {
        let watch = self.start_timing(request, plan, now);
        let tracked_slo = self.view().tracked_slo(request, plan, now);
        let state = self.endpoints.state.as_ref()?;
        let snapshot = &state.snapshot;
        let prompting = snapshot.endpoint(plan.prompting())?.id;
        let prompt_tokens = request.prompt_tokens;
        let here = serving(&plan.route);
        let work = |at| state.work_tokens(at, prompt_tokens);
        let uncached = prompt_tokens.saturating_sub(plan.matched_tokens(request));
        let uncached_here = plan.uncached_tokens(request);
        let step = snapshot.step();
        let expected_ms = step.expected_ms(
            plan.endpoint,
            &self.ledger.in_flight.load(plan.endpoint),
            to_f32(uncached_here),
            to_f32(prompt_tokens),
            request.max_tokens.map_or(step.output_tokens(), to_f32),
        );
        let load = &snapshot.pipeline().production().load;
        let output_tokens = load.output_tokens(work(here), request.max_tokens);
        let mut headers = request.headers.iter();
        let id = headers.find(|(name, _)| *name == REQUEST_ID);
        let in_flight = &mut self.ledger.in_flight;
        let mut serving = in_flight.admit_prompt(plan.endpoint, work(here), uncached_here);
        in_flight.expect_output(&mut serving, output_tokens);
        in_flight.track(
            &mut serving,
            tracked_slo,
            short_id(id.map_or("", |(_, id)| id)),
        );
        let picked_at = now.us_since(Timestamp(0));
        in_flight
            .others_mut()
            .picked(plan.endpoint, serving.load(), picked_at);
        let encoders = plan.route.encode.iter();
        let mut stages: Vec<InFlightTicket> = encoders
            .filter_map(|&index| Some(in_flight.admit(snapshot.endpoint(index)?.id, 0)))
            .collect();
        if prompting != plan.endpoint {
            let prompt = work(plan.prompting());
            stages.push(in_flight.admit_prompt(prompting, prompt, uncached));
        }
        self.ledger.changes += 1;
        let hold = LedgerHold::new(serving, stages, watch);
        let health = &self.endpoints.failures.health;
        let mut picked = state.picked(plan, hold, expected_ms);
        let second = picked.ranked.get(1);
        picked.second_answered =
            second.is_some_and(|(second, _)| health.answered_at(*second).is_some());
        Some(picked)
    }

    /// Removes the load that [`Self::reserve`] counted.
    #[inline(never)] // several callers, and the wasm module should be small
    pub(super) fn withdraw(&mut self, picked: RecordedPick) {
        let LedgerHold {
            serving, stages, ..
        } = picked.hold;
        for ticket in stages.into_iter().chain([serving]) {
            self.ledger.in_flight.release(ticket);
        }
        self.ledger.changes += 1;
    }

    /// Records a plan whose load is already in the ledger.
    #[inline(never)] // several callers, and the wasm module should be small
    pub(super) fn record(
        &mut self,
        plan: Plan,
        mut picked: RecordedPick,
        request: &Request<'_>,
        now: Timestamp,
    ) -> RecordedPick {
        let hold = &mut picked.hold;
        if let Some(state) = &self.endpoints.state {
            self.cache
                .record_plan(hold, &state.snapshot, &plan, request);
        }
        let ejections = &mut self.endpoints.failures.ejections;
        let is_probe = ejections.is_probe(plan.endpoint, now);
        hold.probe = is_probe.then_some((plan.endpoint, now));
        self.ledger.counters.count_pick(
            plan.endpoint,
            request.prompt_tokens,
            plan.matched_tokens(request),
        );
        self.discard(plan);
        picked
    }
}

// === impl PoolReader ===

impl PoolReader<'_> {
    /// The SLOs of the request that later picks have to respect at its serving endpoint; none for a
    /// request without an SLO. Call this before the load of the request is added there.
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
    /// The endpoints of a plan, with their addresses.
    fn picked(&self, plan: &Plan, hold: LedgerHold, expected_ms: (f32, f32)) -> RecordedPick {
        let route = &plan.route;
        let address = |index| Some(self.snapshot.endpoint(index)?.address.clone());
        // The load and the failures count for the data-parallel rank behind the address.
        let charged = |index| match route.data_parallel {
            Some(_) => Some(plan.endpoint),
            None => Some(self.snapshot.endpoint(index)?.id),
        };
        let ranked = route.ranked.iter();
        RecordedPick {
            ranked: ranked
                .filter_map(|index| Some((charged(index)?, address(index)?)))
                .collect(),
            prefill: route.prefill.and_then(address),
            encode: route.encode.iter().copied().filter_map(address).collect(),
            data_parallel: route.data_parallel.and_then(address),
            tokens: self.tokens(route),
            expected_ms,
            second_answered: false,
            hold,
        }
    }

    /// The response headers that carry a session token, each with its value for each endpoint of
    /// the route.
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
fn to_f32(count: u32) -> f32 {
    count as f32
}
