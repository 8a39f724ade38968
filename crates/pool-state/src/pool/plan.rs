//! Decides to which endpoint a request is sent. Planning reads the pool and changes nothing.
//! [`ManagedPool::commit`] records the plan.

use scheduler::flow::RoomLimits;
use scheduler::{
    Decision, EndpointIndex, EndpointRef, LocalState, Request, Rng, Route, Snapshot, SubsetHint,
    Timestamp,
};

use super::ManagedPool;
use super::cache::Cache;
use super::endpoints::{EndpointFailures, Endpoints, PublishedState};
use super::ledger::Ledger;
use super::lookups::EndpointLookups;
use crate::refusal::PickRefusal;

/// Chooses the endpoints of a plan: the scheduler, or another policy in the simulator.
pub trait DecisionMaker {
    /// Chooses endpoints for a request. One plan may call this function twice: first only for the
    /// endpoint with the stored answer that the request names, then for all endpoints.
    fn decide(
        &mut self,
        snapshot: &Snapshot,
        request: &Request<'_>,
        local: LocalState<'_>,
        rng: &mut Rng,
    ) -> Decision;
}

/// Lets the scheduler decide.
impl DecisionMaker for () {
    fn decide(
        &mut self,
        snapshot: &Snapshot,
        request: &Request<'_>,
        local: LocalState<'_>,
        rng: &mut Rng,
    ) -> Decision {
        scheduler::schedule(snapshot, request, local, rng, None)
    }
}

/// Lets a function decide. The simulator uses this to compare other policies on the same state.
#[derive(Debug)]
pub struct DecideBy<F>(pub F);

impl<F> DecisionMaker for DecideBy<F>
where
    F: FnMut(&Snapshot, LocalState<'_>, &mut Rng) -> Decision,
{
    fn decide(
        &mut self,
        snapshot: &Snapshot,
        _: &Request<'_>,
        local: LocalState<'_>,
        rng: &mut Rng,
    ) -> Decision {
        (self.0)(snapshot, local, rng)
    }
}

/// The endpoints to which a request is sent, and the data with which [`ManagedPool::commit`]
/// records them. Dropping a plan changes nothing.
#[derive(Debug)]
pub struct Plan {
    pub(super) route: Route,
    /// The endpoint to which the load of the request is charged.
    pub(super) endpoint: EndpointRef,
    /// The data that was looked up for each endpoint.
    pub(super) lookups: EndpointLookups,
    /// The version of the pool that the plan was made for.
    version: u64,
    /// The flow that is charged for a request that never waited; `None` without flow control.
    pub(super) flow: Option<u64>,
}

/// The random generator and the memory for plans of one configuration.
#[derive(Debug)]
pub struct Planner {
    pub(super) rng: Rng,
    /// Memory for the next plan.
    pub(super) lookups: EndpointLookups,
}

/// The parts of a pool that a plan reads.
#[derive(Clone, Copy, Debug)]
pub struct PoolReader<'p> {
    pub(super) endpoints: &'p Endpoints,
    pub(super) ledger: &'p Ledger,
    pub(super) cache: &'p Cache,
}

// === impl Planner ===

impl Planner {
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self {
            rng: Rng::seeded(seed),
            lookups: EndpointLookups::default(),
        }
    }
}

// === impl Plan ===

impl Plan {
    /// The endpoint to which the load of the request is charged.
    #[must_use]
    pub fn endpoint(&self) -> EndpointRef {
        self.endpoint
    }

    /// The endpoint that computes the prompt.
    pub(super) fn prompting(&self) -> EndpointIndex {
        self.route.prefill.unwrap_or(serving(&self.route))
    }

    /// The prompt tokens that the endpoint which computes the prompt has cached.
    pub(super) fn matched_tokens(&self, request: &Request<'_>) -> u32 {
        self.lookups
            .matched(self.prompting())
            .saturating_mul(request.prefix_block_tokens)
            .min(request.prompt_tokens)
    }

    /// The prompt tokens that the charged endpoint must compute.
    pub(super) fn uncached_tokens(&self, request: &Request<'_>) -> u32 {
        if self.prompting() == serving(&self.route) {
            request
                .prompt_tokens
                .saturating_sub(self.matched_tokens(request))
        } else {
            0
        }
    }
}

// === impl PoolReader ===

impl<'p> PoolReader<'p> {
    /// A number that grows with every change of the pool that may lead to another plan.
    pub(super) fn version(self) -> u64 {
        self.endpoints.version() + self.ledger.version() + self.cache.version()
    }

    /// Plans a request. If an endpoint has the stored answer that the request names and may serve
    /// the request, only that endpoint is considered. `planner` belongs to one configuration.
    ///
    /// # Errors
    /// Returns the reason why no endpoint may serve the request now.
    pub fn plan(
        self,
        request: &Request<'_>,
        now: Timestamp,
        maker: &mut impl DecisionMaker,
        planner: &mut Planner,
    ) -> Result<Plan, PickRefusal> {
        if let Some(only) = self.stored_answer_hint(request, now) {
            let request = Request {
                subset: Some(&only),
                ..request.clone()
            };
            match self.decide(&request, now, maker, planner) {
                Err(PickRefusal::Decision(Decision::Unavailable(_))) => {}
                planned => return planned,
            }
        }
        self.decide(request, now, maker, planner)
    }

    /// A subset hint that allows only the endpoint with the stored answer that the request names.
    /// `None` if there is no such endpoint, if it left the pool or is ejected, or if the proxy does
    /// not allow it.
    fn stored_answer_hint(self, request: &Request<'_>, now: Timestamp) -> Option<SubsetHint> {
        let endpoint = (request.stored_id != 0)
            .then(|| self.cache.stored_answers.endpoint(request.stored_id))
            .flatten()?;
        let snapshot = self
            .endpoints
            .snapshot()
            .filter(|_| !self.endpoints.failures.ejections.is_ejected(endpoint, now))?;
        let socket = snapshot.socket(self.endpoints.index(endpoint)?)?;
        request
            .subset
            .is_none_or(|subset| subset.allows_socket(socket))
            .then(|| SubsetHint::only(socket))
    }

    #[inline(never)] // two callers, and the wasm module should be small
    fn decide(
        self,
        request: &Request<'_>,
        now: Timestamp,
        maker: &mut impl DecisionMaker,
        planner: &mut Planner,
    ) -> Result<Plan, PickRefusal> {
        let Some(state) = &self.endpoints.state else {
            return Err(PickRefusal::NoState);
        };
        self.look_up(state, request, now, &mut planner.lookups);
        let local = self.local(state, &planner.lookups, now);
        let decision = maker.decide(&state.snapshot, request, local, &mut planner.rng);
        let Decision::Route(route) = decision else {
            return Err(PickRefusal::Decision(decision));
        };
        let endpoint = state.snapshot.endpoint(serving(&route));
        Ok(Plan {
            endpoint: endpoint.ok_or(PickRefusal::NoState)?.id,
            route,
            lookups: std::mem::take(&mut planner.lookups),
            version: self.version(),
            flow: None,
        })
    }

    /// Looks up the data that a decision needs for each endpoint.
    fn look_up(
        self,
        state: &PublishedState,
        request: &Request<'_>,
        now: Timestamp,
        lookups: &mut EndpointLookups,
    ) {
        let EndpointFailures {
            ejections, health, ..
        } = &self.endpoints.failures;
        let blocks = request.prefix_blocks;
        let EndpointLookups {
            known,
            matched,
            reuse_interval,
            ejected,
            failing,
            adapter_rooms,
        } = lookups;
        health.excess_failures(&state.refs, now, failing);
        ejections.waive_expired(&state.refs, now, failing);
        self.cache.prefixes.matched(blocks, &state.refs, known);
        matched.clear();
        matched.extend(known.iter().map(|known| known.blocks(blocks)));
        *reuse_interval = self
            .cache
            .prefixes
            .reuse_interval(blocks, &state.refs, known);
        ejections.mark_ejected(&state.snapshot, now, ejected);
        health.mark_avoided(&state.refs, request.client, now, ejected);
        self.cache
            .adapters
            .find_rooms(&state.snapshot, request.model, adapter_rooms);
    }

    /// The state of this VM that a decision needs.
    fn local<'l>(
        self,
        state: &PublishedState,
        lookups: &'l EndpointLookups,
        now: Timestamp,
    ) -> LocalState<'l>
    where
        'p: 'l,
    {
        LocalState {
            in_flight: &self.ledger.in_flight,
            matched_blocks: &lookups.matched,
            reuse_interval: self.cache.conversations.interval(lookups.reuse_interval),
            evicted_share: self.cache.evictions.share(),
            ejected: &lookups.ejected,
            failing: &lookups.failing,
            last_answers: self.endpoints.failures.health.last_answers(),
            last_cold_picks: self.cache.cold_picks.last(),
            adapter_rooms: &lookups.adapter_rooms,
            peers_unreachable: self.cache.peers_unreachable,
            metrics_stale: state.metrics_stale(now),
        }
    }

    /// Whether the limits leave room for the request where the plan sends it.
    pub(super) fn has_room(
        self,
        plan: &Plan,
        request: &Request<'_>,
        limits: RoomLimits,
        now: Timestamp,
    ) -> bool {
        self.endpoints.state.as_ref().is_none_or(|state| {
            let local = self.local(state, &plan.lookups, now);
            scheduler::has_room(&state.snapshot, request, local, &plan.route, limits)
        })
    }
}

// === impl ManagedPool ===

impl ManagedPool {
    /// The parts of the pool that a plan reads.
    #[must_use]
    pub fn view(&self) -> PoolReader<'_> {
        PoolReader {
            endpoints: &self.endpoints,
            ledger: &self.ledger,
            cache: &self.cache,
        }
    }

    /// Plans a request by the pool's own configuration: see [`PoolReader::plan`].
    ///
    /// # Errors
    /// Returns the reason why no endpoint may serve the request now.
    pub fn plan(
        &mut self,
        request: &Request<'_>,
        now: Timestamp,
        maker: &mut impl DecisionMaker,
    ) -> Result<Plan, PickRefusal> {
        let view = PoolReader {
            endpoints: &self.endpoints,
            ledger: &self.ledger,
            cache: &self.cache,
        };
        view.plan(request, now, maker, &mut self.planner)
    }

    /// Whether the pool has changed since the plan.
    pub(super) fn is_stale(&self, plan: &Plan) -> bool {
        plan.version != self.view().version()
    }
}

/// The endpoint that is charged for a route: the data-parallel rank if there is one, otherwise the
/// first endpoint of the list.
pub(super) fn serving(route: &Route) -> EndpointIndex {
    route.data_parallel.unwrap_or(route.ranked.first())
}
