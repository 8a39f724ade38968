//! One simulated proxy: a real [`ManagedPool`], and the policy that picks endpoints.

use std::collections::VecDeque;

use pool_state::queues::{FlowArrival, QueuedTicket};
use pool_state::{
    DecideBy, FlowAdmission, LedgerHold, LoadReportHead, ManagedPool, OwnLoadReport,
    PeerLoadReport, Placement, Plan, RecordedPick, TokenUsage,
};
use scheduler::flow::QueuedInBand;
use scheduler::in_flight::EndpointLoad;
use scheduler::prefix::{ENTRIES_DEFAULT, blocks_of};
use scheduler::{
    Decision, Endpoint, EndpointRef, LocalState, RankedList, Readiness, Request, Rng, Route,
    Snapshot, UnavailableReason,
};

use crate::engine::{BLOCK_TOKENS, EngineJob, SimulatedEngine};
use crate::event_queue::virtual_time;
use crate::policy::{GateRule, PolicyMemory, PolicyView, RequestGate, RoutingPolicy, has_roles};
use crate::workload::RequestClass;

#[derive(Debug)]
pub(crate) struct PolicyRouter {
    /// The number of this proxy among the writers of load reports, from 1.
    vm: u64,
    pool: ManagedPool,
    report: OwnLoadReport,
    /// The last load report of each proxy. This proxy's own entry stays empty.
    peers: Vec<PeerLoadReport>,
    /// The number of requests that each other proxy holds, by band.
    peers_held: Vec<Vec<QueuedInBand>>,
    /// Whether the run has an event for the next call of [`Self::tick`].
    ticks: bool,
    /// Whether the proxy must publish a change after all events of this moment.
    pub(crate) publishes: bool,
    /// The age of the last update from another proxy when it arrived, in µs.
    delay_us: u64,
    /// The picks of a rival's policy, counted from a number that differs at each proxy.
    turn: usize,
    /// The state of a rival's policy between picks.
    memory: PolicyMemory,
    /// The requests that flow control holds, with their tickets.
    held: Vec<(u32, QueuedTicket)>,
    /// The queue of another router, if the policy has such a queue.
    gate: Option<RequestGate>,
}

/// The pick for a request. The proxy's pool state has recorded the pick.
#[derive(Debug)]
pub(crate) struct SimulatedPick {
    /// The position of the engine that decodes the request.
    pub(crate) at: usize,
    /// The position of the engine that computes the prompt first, if another engine decodes.
    pub(crate) prefill: Option<usize>,
    pub(crate) hold: LedgerHold,
}

/// A request that arrives at a proxy.
#[derive(Clone, Copy)]
pub(crate) struct ProxyRequest<'r, 'w> {
    pub(crate) job: &'r EngineJob<'w>,
    pub(crate) class: RequestClass,
}

/// The data that a proxy sends to the other proxies after a change.
#[derive(Debug)]
pub(crate) struct ProxyUpdate {
    report: Vec<u8>,
    placements: VecDeque<Placement>,
    held: Vec<QueuedInBand>,
    /// The time when the proxy published the update, in ms.
    at: f64,
}

/// The time in ms after which a proxy with held requests looks at the other proxies' state again.
const HOLDING_TICK_MS: f64 = 10.0;

const MODEL: &str = "m";

/// Returns the decision of a policy that picks without the scheduler. `at` is the position of the
/// picked endpoint, and `prefill` that of another engine that computes the prompt, if any does.
pub(crate) fn decision(snapshot: &Snapshot, at: Option<usize>, prefill: Option<usize>) -> Decision {
    let index = |at| snapshot.indices().nth(at);
    match at.and_then(index) {
        Some(serving) => {
            let prefill = prefill.and_then(index);
            Decision::Route(Route {
                ranked: RankedList::one(serving),
                prefill,
                encode: Vec::new(),
                data_parallel: None,
            })
        }
        None => Decision::Unavailable(UnavailableReason::NoReadyEndpoint),
    }
}

/// Whether the pool is so full that another router's queue holds its requests.
fn is_full(rule: GateRule, snapshot: &Snapshot, local: LocalState<'_>) -> bool {
    match rule {
        // Prefill and decode engines are two stages. The pool is full if one stage is full.
        GateRule::Paced(_) => {
            let is_full = |decodes| {
                scheduler::saturation(snapshot, local, |endpoint| endpoint.decodes() == decodes)
                    >= 1.0
            };
            is_full(true) || is_full(false)
        }
        // If the pool has prefill engines, only their router queues requests. The router of the
        // decode engines never does, because it counts no tokens to prefill.
        GateRule::PrefillTokens(most) => {
            let has_roles = has_roles(snapshot);
            let prefills = |endpoint: &&Endpoint| {
                endpoint.readiness == Readiness::Ready && !(has_roles && endpoint.decodes())
            };
            let mut prefillers = snapshot.endpoints().iter().filter(prefills);
            prefillers
                .all(|endpoint| local.in_flight.load(endpoint.id).prefill_tokens as f64 > most)
        }
    }
}

/// Copies the snapshot, because each proxy's pool takes ownership of a snapshot.
fn copy(snapshot: &Snapshot) -> Option<Snapshot> {
    snapshot
        .with_metrics(snapshot.version(), snapshot.metrics().to_vec())
        .ok()
}

// === impl ProxyRequest ===

impl<'w> ProxyRequest<'_, 'w> {
    fn seen_by(self, policy: &RoutingPolicy) -> Request<'w> {
        Request {
            model: MODEL,
            priority: self.class.priority,
            prompt_tokens: policy.prompt_tokens(self.job, self.class),
            prefix_blocks: self.job.hashes,
            prefix_block_tokens: BLOCK_TOKENS as u32,
            ..Request::default()
        }
    }

    fn arrival(self, now: f64) -> FlowArrival<'static> {
        FlowArrival {
            flow: self.class.flow,
            client: 0,
            request_id: "",
            bytes: 0,
            arrived: virtual_time(now),
            ttl_ms: None,
        }
    }
}

// === impl PolicyRouter ===

impl PolicyRouter {
    /// Creates proxy `number` of `proxies`. If `shares` is set, the proxy publishes its picks.
    pub(crate) fn new(
        seed: u64,
        number: usize,
        proxies: usize,
        shares: bool,
        gate: Option<GateRule>,
    ) -> Self {
        let mut pool = ManagedPool::new(seed, ENTRIES_DEFAULT);
        pool.set_placement_publishing(shares);
        let peers = (0..proxies).map(|_| PeerLoadReport::default()).collect();
        if !shares && proxies > 1 {
            pool.queues_mut()
                .set_alone(u32::try_from(proxies).unwrap_or(u32::MAX));
        }
        Self {
            vm: number as u64 + 1,
            pool,
            report: OwnLoadReport::default(),
            peers,
            peers_held: vec![Vec::new(); proxies],
            ticks: false,
            publishes: false,
            delay_us: 0,
            turn: number * 3,
            memory: PolicyMemory::default(),
            held: Vec::new(),
            gate: gate.map(RequestGate::new),
        }
    }

    /// Applies a pool update.
    pub(crate) fn install(&mut self, snapshot: &Snapshot) {
        /// The key for the hashes of prompts: none, because simulated prompts need no secret.
        const HASH_SECRET: u128 = 0;
        // Metrics of each age are used, because the age is part of the comparison.
        if let Some(snapshot) = copy(snapshot) {
            self.pool.install(snapshot, HASH_SECRET, u32::MAX);
            self.pool.recount_load_reports(&self.peers);
        }
    }

    /// Applies newer metrics and a newer step model.
    pub(crate) fn refresh(&mut self, snapshot: &Snapshot, now: f64) {
        if let Some(snapshot) = copy(snapshot) {
            self.pool.refresh(snapshot, virtual_time(now));
        }
    }

    pub(crate) fn load(&self, endpoint: EndpointRef) -> EndpointLoad {
        self.pool.in_flight().load(endpoint)
    }

    /// Returns the load at the endpoint from requests that this proxy has sent.
    pub(crate) fn own_load(&self, endpoint: EndpointRef) -> EndpointLoad {
        self.pool.in_flight().own(endpoint)
    }

    /// Picks by the policy and records the pick. Returns `None` if the proxy holds the request.
    ///
    /// # Errors
    /// Fails when the policy picks no endpoint.
    pub(crate) fn pick<'w>(
        &mut self,
        policy: &RoutingPolicy,
        from: ProxyRequest<'_, 'w>,
        engines: &[SimulatedEngine<'w>],
        now: f64,
    ) -> Result<Option<SimulatedPick>, String> {
        let ProxyRequest { job, class } = from;
        self.estimate_peer_picks(now);
        let request = from.seen_by(policy);
        let time = virtual_time(now);
        let plan = match policy {
            RoutingPolicy::Config(_) | RoutingPolicy::Exact(_) => {
                let planned = self.pool.plan(&request, time, &mut ());
                match self.pool.admit(planned, &request, &from.arrival(now), time) {
                    Ok(FlowAdmission::Go(plan)) => Ok(plan),
                    Ok(FlowAdmission::Claim(claim)) => {
                        let picked = self.pool.redeem(claim, &request, time);
                        return self.simulated(picked).map(Some);
                    }
                    Ok(FlowAdmission::Wait(ticket)) => {
                        self.held.push((job.request, ticket));
                        return Ok(None);
                    }
                    Err(refusal) => Err(refusal),
                }
            }
            RoutingPolicy::Rival(rival) => {
                self.turn += 1;
                let turn = self.turn;
                let memory = &mut self.memory;
                let decide = |snapshot: &Snapshot, local: LocalState<'_>, rng: &mut Rng| {
                    let view = PolicyView {
                        snapshot,
                        local,
                        job,
                        engines,
                        now,
                        turn,
                    };
                    decision(
                        snapshot,
                        rival.pick(&view, memory, rng),
                        rival.pick_prefill(&view, rng),
                    )
                };
                self.pool.plan(&request, time, &mut DecideBy(decide))
            }
            RoutingPolicy::Gated(..) => {
                let gate = self.gate.iter_mut();
                gate.for_each(|gate| gate.hold(job.request, class));
                return Ok(None);
            }
        };
        let plan = plan.map_err(|refusal| format!("no endpoint was picked: {refusal:?}"))?;
        self.commit(plan, &request, now)
    }

    fn commit(
        &mut self,
        plan: Plan,
        request: &Request<'_>,
        now: f64,
    ) -> Result<Option<SimulatedPick>, String> {
        let endpoint = plan.endpoint();
        let picked = self
            .pool
            .commit(plan, request, endpoint, virtual_time(now))
            .map_err(|stale| format!("the pool changed: {stale:?}"))?;
        self.simulated(picked).map(Some)
    }

    /// Returns the next held request that may have room now, or `None`.
    pub(crate) fn next_queued(&mut self, now: f64) -> Option<u32> {
        if let Some(gate) = &mut self.gate {
            let snapshot = self.pool.snapshot()?;
            let in_flight = self.pool.in_flight();
            return gate.next(|rule| is_full(rule, snapshot, LocalState::new(in_flight)));
        }
        let number = self.pool.next_due(virtual_time(now))?;
        self.held
            .iter()
            .find(|(_, ticket)| ticket.number == number)
            .map(|(request, _)| *request)
    }

    /// Records that the time that [`Self::begins_to_tick`] returned has passed.
    pub(crate) fn tick(&mut self) {
        self.gate.iter_mut().for_each(RequestGate::tick);
        self.ticks = false;
        self.pool.queues_mut().look_at_order();
    }

    /// Returns the ms until a new call of [`Self::tick`], or `None` if no new call is necessary.
    pub(crate) fn begins_to_tick(&mut self) -> Option<f64> {
        if self.gate.as_mut().is_some_and(RequestGate::begins_to_tick) {
            return Some(1.0);
        }
        let begins = !self.ticks && self.peers.len() > 1 && !self.held.is_empty();
        self.ticks |= begins;
        begins.then_some(HOLDING_TICK_MS)
    }

    /// Picks for a held request. Returns `None` if the proxy still holds the request.
    ///
    /// # Errors
    /// Fails when the pool ends the wait of the request.
    pub(crate) fn pick_queued<'w>(
        &mut self,
        policy: &RoutingPolicy,
        from: ProxyRequest<'_, 'w>,
        engines: &[SimulatedEngine<'w>],
        now: f64,
    ) -> Result<Option<SimulatedPick>, String> {
        if let RoutingPolicy::Gated(picks, _) = policy {
            return self.pick(picks, from, engines, now);
        }
        let Some(at) = self
            .held
            .iter()
            .position(|(request, _)| *request == from.job.request)
        else {
            return Ok(None);
        };
        self.estimate_peer_picks(now);
        let (_, ticket) = self.held.swap_remove(at);
        let request = from.seen_by(policy);
        let time = virtual_time(now);
        let planned = self.pool.plan(&request, time, &mut ());
        match self.pool.admit_queued(ticket, planned, &request, time) {
            Ok(FlowAdmission::Go(plan)) => self.commit(plan, &request, now),
            Ok(FlowAdmission::Claim(claim)) => {
                let picked = self.pool.redeem(claim, &request, time);
                self.simulated(picked).map(Some)
            }
            Ok(FlowAdmission::Wait(ticket)) => {
                self.held.push((from.job.request, ticket));
                Ok(None)
            }
            Err(refusal) => Err(format!("a held request was given up: {refusal:?}")),
        }
    }

    fn simulated(&self, picked: RecordedPick) -> Result<SimulatedPick, String> {
        let (endpoint, _) = picked.ranked.first().ok_or("an empty ranked list")?;
        let at = usize::from(endpoint.slot.0);
        let endpoints = self
            .pool
            .snapshot()
            .map_or(&[][..], |snapshot| snapshot.endpoints());
        let prefill = picked.prefill.and_then(|address| {
            endpoints
                .iter()
                .position(|endpoint| endpoint.address == address)
        });
        Ok(SimulatedPick {
            at,
            prefill,
            hold: picked.hold,
        })
    }

    /// Records that the prefill is done, by an engine that does not decode the request.
    pub(crate) fn prefill_done(&mut self, hold: &mut LedgerHold) {
        self.pool.finish_earlier_stages(hold);
        self.gate.iter_mut().for_each(RequestGate::room_changed);
    }

    /// Records the first token of the reply to a prompt of `prompt` tokens with these hashes.
    pub(crate) fn first_token(
        &mut self,
        hold: &mut LedgerHold,
        prompt: u32,
        hashes: &[u64],
        now: f64,
    ) {
        self.pool.confirm_placement(hold, hashes);
        self.pool
            .record_first_token(hold, prompt, virtual_time(now));
        self.gate.iter_mut().for_each(RequestGate::room_changed);
    }

    /// Records that the reply has grown by this many tokens.
    pub(crate) fn output(&mut self, hold: &mut LedgerHold, tokens: u32, now: f64) {
        self.pool.record_output(hold, tokens, virtual_time(now));
    }

    /// Ends a request. The engine had cached `cached` tokens of the request's prompt.
    pub(crate) fn done(&mut self, hold: LedgerHold, job: &EngineJob<'_>, cached: u32, now: f64) {
        let usage = TokenUsage {
            prompt_tokens: Some(job.prompt),
            cached_tokens: Some(cached),
            ..TokenUsage::default()
        };
        // Simulated prompts have no text, so they do not change the estimate of tokens per byte.
        let blocks = blocks_of(job.hashes, job.hashes.len());
        self.pool
            .record_cache_hit(&hold, &usage, 0, Some(blocks), 0);
        self.pool.release(hold, virtual_time(now));
        self.gate.iter_mut().for_each(RequestGate::room_changed);
    }

    /// Ends a request whose engine has died.
    pub(crate) fn fail(&mut self, hold: LedgerHold, now: f64) {
        self.pool.release(hold, virtual_time(now));
    }

    /// Returns the update for the other proxies: this proxy's load, its picks since the last call,
    /// and its held requests.
    pub(crate) fn publish(&mut self, now: f64) -> ProxyUpdate {
        let head = LoadReportHead {
            vm: self.vm,
            written: virtual_time(now),
            ring: 0,
        };
        let report = self.pool.write_load_report(&mut self.report, head).to_vec();
        ProxyUpdate {
            report,
            placements: self.pool.take_placements(),
            held: self.pool.queues().queued_by_band(),
            at: now,
        }
    }

    /// Applies an update that proxy `from` has published.
    pub(crate) fn receive(&mut self, from: usize, update: &ProxyUpdate, now: f64) {
        let Some(peer) = self.peers.get_mut(from) else {
            return;
        };
        if self
            .pool
            .read_load_report(peer, update.report.clone(), true)
        {
            self.pool.recompute_peer_slos(&self.peers);
        }
        let at = virtual_time(now);
        for placed in &update.placements {
            let Placement { kind, endpoint, .. } = *placed;
            self.pool
                .record_peer_placement(kind, endpoint, &placed.blocks, at);
        }
        if self.pool.flow_control().is_some() {
            self.receive_queued(from, update, now);
        }
    }

    /// Applies the counts of requests that proxy `from` holds. No simulated proxy is idle.
    fn receive_queued(&mut self, from: usize, update: &ProxyUpdate, now: f64) {
        if let Some(held) = self.peers_held.get_mut(from) {
            held.clone_from(&update.held);
        }
        let mut all: Vec<QueuedInBand> = Vec::new();
        for held in self.peers_held.iter().flatten() {
            match all.iter_mut().find(|band| band.priority == held.priority) {
                Some(band) => band.requests += held.requests,
                None => all.push(*held),
            }
        }
        let running = self.peers.iter().map(PeerLoadReport::requests).sum();
        self.delay_us = ((now - update.at) * 1e3) as u64;
        self.pool
            .queues_mut()
            .set_outside(&all, running, self.delay_us);
        self.estimate_peer_picks(now);
    }

    /// Adds an estimate of the picks that the other proxies made, but whose reports have not
    /// arrived yet.
    fn estimate_peer_picks(&mut self, now: f64) {
        if self.delay_us > 0 {
            let others = u32::try_from(self.peers.len() - 1).unwrap_or(u32::MAX);
            self.pool
                .estimate_peer_picks(others, self.delay_us, virtual_time(now));
        }
    }
}
