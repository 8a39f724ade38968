//! One run in virtual time: proxies, engines, and the daemon's part (metrics, the learned step model) between them.
//!
//! ```text
//!  arrival ─► a proxy picks ─(api)─► engine steps ─► first token, end ─► that proxy's ledger
//!                  │                                                        │
//!                  └──── rows and placements, `sharing` ms later ───────────┴─► the other proxies
//!  every `scrape` ms: metrics of all engines, and the step model learned so far, to all proxies
//! ```

mod setting;
#[cfg(test)]
mod tests;
pub(crate) use setting::{EngineModel, PoolChange, PoolSetting, SharingMode};

use std::sync::Arc;

use scheduler::in_flight::{EndpointLoad, InFlightTicket};
use scheduler::prefix::CacheEstimate;
use scheduler::{
    Endpoint, EndpointMetrics, EndpointRef, Generation, LoraMetrics, Pipeline, ROLE_LABEL, Readiness, Slot, Snapshot, Version,
    session_token,
};

use crate::engine::{BLOCK_TOKENS, EngineJob, EngineSimulator, StepEvent};
use crate::event_queue::EventQueue;
use crate::learning::SimulatedLearner;
use crate::policy::RoutingPolicy;
use crate::router::{PolicyRouter, SimulatedPick, adapter_name};
use crate::workload::{Sampler, Workload};

/// What became of a request. Times in ms.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RequestOutcome {
    pub(crate) at: f64,
    pub(crate) ttft: f64,
    pub(crate) e2e: f64,
    pub(crate) prompt: u32,
    pub(crate) output: u32,
    pub(crate) cached: u32,
}

#[derive(Clone, Copy, Debug)]
enum WorldEvent {
    Arrives { request: u32, engine: usize },
    StepEnds { engine: usize },
    Scrape,
    Row { from: usize, to: usize, endpoint: EndpointRef, load: EndpointLoad },
    Placed { to: usize, endpoint: EndpointRef, request: u32 },
    Changes,
    Returns,
}

/// A request under way.
struct SimulatedRequest {
    ticket: InFlightTicket,
    /// What its engine was believed to hold of its prompt; `None` where another works through that.
    cache_estimate: Option<CacheEstimate>,
    proxy: usize,
    /// Where it is decoded.
    at: usize,
    /// Output told to the ledger so far.
    published: u32,
    prompt: PrefillLocation,
}

/// Where a prompt is worked through.
enum PrefillLocation {
    /// Where it is decoded.
    There,
    /// At this other engine.
    At(usize, InFlightTicket),
    /// It was, elsewhere.
    Brought,
}

struct Simulation<'w> {
    setting: &'w PoolSetting,
    workload: &'w Workload,
    policy: &'w RoutingPolicy,
    engines: Vec<Box<dyn EngineSimulator<'w> + 'w>>,
    steps_made: Vec<u64>,
    routers: Vec<PolicyRouter>,
    snapshot: Snapshot,
    refs: Vec<EndpointRef>,
    learning: SimulatedLearner,
    records: Vec<RequestOutcome>,
    /// Who served each session last, by the session's first request.
    sessions: Vec<Option<usize>>,
    /// Those under way.
    flights: Vec<Option<SimulatedRequest>>,
    agenda: EventQueue<WorldEvent>,
}

/// Steps of an engine between two looks at how far its streams are: about a tenth of a second.
const PROGRESS_STEPS: u64 = 16;

/// What it takes to bring a prompt's KV to another engine, ms, and each token of it: 128 KiB at 50 GB/s.
const TRANSFER_MS: f64 = 1.0;
const TRANSFER_TOKEN_MS: f64 = 0.0026;

/// How long a restarted engine is away, ms.
const RESTART_MS: f64 = 30_000.0;

/// Runs a workload at `rate` requests a second to its end: what became of each request, in order of arrival.
pub(crate) fn run(
    workload: &Workload,
    rate: f64,
    policy: &RoutingPolicy,
    setting: &PoolSetting,
    seed: u64,
) -> Result<Vec<RequestOutcome>, String> {
    let pipeline = Pipeline::build(&policy.pipeline(setting.prefillers > 0)?).map_err(|error| error.to_string())?;
    let mut world = Simulation::new(workload, policy, setting, pipeline, seed)?;
    world.play(workload.rate / rate, &mut Sampler::seeded(seed ^ 0x5eed))?;
    Ok(world.records)
}

// === impl Simulation ===

impl<'w> Simulation<'w> {
    fn new(
        workload: &'w Workload,
        policy: &'w RoutingPolicy,
        setting: &'w PoolSetting,
        pipeline: Pipeline,
        seed: u64,
    ) -> Result<Self, String> {
        let count = setting.replicas;
        let endpoints: Vec<Endpoint> = (0..count).map(|at| endpoint(at, setting)).collect();
        let refs: Vec<EndpointRef> = endpoints.iter().map(|endpoint| endpoint.id).collect();
        let metrics = vec![EndpointMetrics::default(); count];
        let snapshot = Snapshot::try_new(Version::default(), endpoints, metrics, pipeline).map_err(|error| error.to_string())?;
        let mut routers: Vec<PolicyRouter> =
            (0..setting.proxies).map(|number| PolicyRouter::new(seed * 1_000 + number as u64, number, setting.proxies)).collect();
        routers.iter_mut().for_each(|router| router.install(&refs, &[], setting.engine.kv_blocks));
        let requests = workload.requests().len();
        Ok(Self {
            setting,
            workload,
            policy,
            engines: setting.specs().map(|spec| setting.model.engine(spec)).collect::<Result<_, _>>()?,
            steps_made: vec![0; count],
            routers,
            snapshot,
            refs,
            learning: SimulatedLearner::new(count),
            records: Vec::with_capacity(requests),
            sessions: vec![None; requests],
            flights: (0..requests).map(|_| None).collect(),
            agenda: EventQueue::default(),
        })
    }

    fn play(&mut self, stretch: f64, dice: &mut Sampler) -> Result<(), String> {
        let arrivals: Vec<f64> = self.workload.requests().iter().map(|request| request.at * stretch).collect();
        if self.setting.scrape_ms > 0.0 {
            self.agenda.plan(0.0, WorldEvent::Scrape);
        }
        if let Some(at) = self.setting.change_at(arrivals.len()).and_then(|at| arrivals.get(at)) {
            self.agenda.plan(*at, WorldEvent::Changes);
        }
        let (mut next, mut left, mut events) = (0, arrivals.len(), Vec::new());
        while left > 0 {
            if let Some(&at) = arrivals.get(next).filter(|at| **at <= self.agenda.next_at()) {
                let proxy = if self.setting.proxies > 1 { dice.below(self.setting.proxies) } else { 0 };
                self.pick(u32::try_from(next).unwrap_or(u32::MAX), proxy, at)?;
                next += 1;
                continue;
            }
            match self.agenda.next()? {
                (now, WorldEvent::StepEnds { engine }) => left -= self.step_ends(engine, now, &mut events)?,
                (now, other) => self.happens(other, now)?,
            }
        }
        Ok(())
    }

    fn happens(&mut self, what: WorldEvent, now: f64) -> Result<(), String> {
        match what {
            WorldEvent::Arrives { request, engine } => {
                if let (Some(job), Some(at)) = (self.job_at(request, engine), self.engines.get_mut(engine)) {
                    at.submit(job, now)?;
                    self.start_step(engine, now)?;
                }
            }
            WorldEvent::StepEnds { .. } => {}
            WorldEvent::Scrape => {
                self.scrape();
                self.agenda.plan(now + self.setting.scrape_ms, WorldEvent::Scrape);
            }
            WorldEvent::Row { from, to, endpoint, load } => {
                if let Some(router) = self.routers.get_mut(to) {
                    router.told(from, endpoint, load);
                }
            }
            WorldEvent::Placed { to, endpoint, request } => {
                if let (Some(router), Some(job)) = (self.routers.get_mut(to), self.workload.job(request)) {
                    router.placed(endpoint, job.hashes);
                }
            }
            WorldEvent::Changes => self.changes(now),
            WorldEvent::Returns => self.returns(),
        }
        Ok(())
    }

    /// What the request is at this engine: its prompt alone where another decodes.
    fn job_at(&self, request: u32, engine: usize) -> Option<EngineJob<'w>> {
        let job = self.workload.job(request)?;
        let flight = self.flights.get(request as usize)?.as_ref()?;
        Some(match flight.prompt {
            PrefillLocation::At(at, _) if at == engine => EngineJob { output: 1, ..job },
            PrefillLocation::Brought => EngineJob { prefilled: true, ..job },
            _ => job,
        })
    }

    fn pick(&mut self, request: u32, proxy: usize, now: f64) -> Result<(), String> {
        if self.setting.scrape_ms <= 0.0 {
            self.scrape();
        }
        let (Some(job), Some(router)) = (self.workload.job(request), self.routers.get_mut(proxy)) else {
            return Err(format!("no request {request} or no proxy {proxy}"));
        };
        let session = self.workload.requests().get(request as usize).and_then(|of| self.sessions.get_mut(of.session as usize));
        let token = session.as_ref().and_then(|at| self.snapshot.endpoints().get((**at)?)).map(|endpoint| session_token(&endpoint.name));
        let asked = (&job, token.as_deref());
        let picked = router.pick(self.policy, &self.snapshot, asked, &self.engines, now).ok_or("nobody was picked")?;
        let SimulatedPick { at, ticket, cache_estimate, matched_tokens, prefill } = picked;
        session.into_iter().for_each(|session| *session = Some(at));
        self.records.push(RequestOutcome { at: now, prompt: job.prompt, output: job.output, ..RequestOutcome::default() });
        let first = prefill.as_ref().map_or(at, |(first, _)| *first);
        // As in a proxy: the times of a request that two engines work on are nobody's alone.
        if first == at {
            self.learning.picked(at, request, now, (job.prompt - matched_tokens, job.prompt));
        }
        let prompt = prefill.map_or(PrefillLocation::There, |(first, ticket)| PrefillLocation::At(first, ticket));
        if let Some(flight) = self.flights.get_mut(request as usize) {
            *flight = Some(SimulatedRequest { ticket, cache_estimate, proxy, at, published: 0, prompt });
        }
        self.send(job, first, now)?;
        self.tell(proxy, now);
        for at in [first, at] {
            if let Some(&endpoint) = self.refs.get(at) {
                self.tell_placement(proxy, endpoint, request, now);
            }
        }
        Ok(())
    }

    fn send(&mut self, job: EngineJob<'w>, to: usize, now: f64) -> Result<(), String> {
        let engine = self.engines.get_mut(to).ok_or("an engine that is not there was picked")?;
        engine.announce(job);
        let arrives = now + engine.spec().api_ms;
        self.agenda.plan(arrives, WorldEvent::Arrives { request: job.request, engine: to });
        Ok(())
    }

    /// The other proxies hear of what changed at `proxy`.
    fn tell(&mut self, proxy: usize, now: f64) {
        let Some(router) = self.routers.get_mut(proxy) else { return };
        let mut rows = Vec::new();
        router.changed(|endpoint, load| rows.push((endpoint, load)));
        let SharingMode::After(delay) = self.setting.sharing else { return };
        for to in (0..self.setting.proxies).filter(|&to| to != proxy) {
            for &(endpoint, load) in &rows {
                self.agenda.plan(now + delay, WorldEvent::Row { from: proxy, to, endpoint, load });
            }
        }
    }

    fn tell_placement(&mut self, proxy: usize, endpoint: EndpointRef, request: u32, now: f64) {
        let SharingMode::After(delay) = self.setting.sharing else { return };
        for to in (0..self.setting.proxies).filter(|&to| to != proxy) {
            self.agenda.plan(now + delay, WorldEvent::Placed { to, endpoint, request });
        }
    }

    fn start_step(&mut self, at: usize, now: f64) -> Result<(), String> {
        let Some(engine) = self.engines.get_mut(at).filter(|engine| engine.busy_until().is_none()) else { return Ok(()) };
        let records = &mut self.records;
        let ends = engine.start(now, &mut |request, cached| {
            if let Some(record) = records.get_mut(request as usize) {
                record.cached = record.cached.max(cached);
            }
        })?;
        if let Some(ends) = ends {
            self.agenda.plan(ends, WorldEvent::StepEnds { engine: at });
        }
        Ok(())
    }

    /// How many requests ended with the step.
    fn step_ends(&mut self, at: usize, now: f64, events: &mut Vec<StepEvent>) -> Result<usize, String> {
        let Some(engine) = self.engines.get_mut(at) else { return Ok(0) };
        engine.end(events)?;
        let mut ended = 0;
        for event in events.drain(..) {
            match event {
                StepEvent::First(request) if self.prefills(request, at) => {}
                StepEvent::Done(request) if self.prefills(request, at) => self.prefilled(request, now),
                StepEvent::First(request) => self.first_token(at, request, now),
                StepEvent::Done(request) => {
                    self.done(request, now);
                    ended += 1;
                }
            }
        }
        let steps = self.steps_made.get_mut(at).map_or(0, |steps| {
            *steps += 1;
            *steps
        });
        if steps.is_multiple_of(PROGRESS_STEPS) {
            self.progress(at);
        }
        self.start_step(at, now)?;
        if steps.is_multiple_of(PROGRESS_STEPS) {
            self.gap(at, now);
        }
        Ok(ended)
    }

    /// Is this engine there for the request's prompt alone?
    fn prefills(&self, request: u32, engine: usize) -> bool {
        let flight = self.flights.get(request as usize).and_then(Option::as_ref);
        flight.is_some_and(|flight| matches!(flight.prompt, PrefillLocation::At(at, _) if at == engine))
    }

    /// The prompt is worked through elsewhere, and its KV goes where it is decoded.
    fn prefilled(&mut self, request: u32, now: f64) {
        let (Some(job), Some(Some(flight))) = (self.workload.job(request), self.flights.get_mut(request as usize)) else { return };
        let (proxy, at) = (flight.proxy, flight.at);
        if let PrefillLocation::At(_, ticket) = std::mem::replace(&mut flight.prompt, PrefillLocation::Brought)
            && let Some(router) = self.routers.get_mut(proxy)
        {
            router.release(ticket);
        }
        let arrives = now + TRANSFER_MS + TRANSFER_TOKEN_MS * f64::from(job.prompt);
        self.agenda.plan(arrives, WorldEvent::Arrives { request, engine: at });
        self.tell(proxy, now);
    }

    fn first_token(&mut self, at: usize, request: u32, now: f64) {
        let Some(record) = self.records.get_mut(request as usize) else { return };
        record.ttft = now - record.at;
        let prompt = record.prompt;
        self.learning.first_token(at, self.refs.get(at).copied(), request, now);
        let Some(Some(flight)) = self.flights.get_mut(request as usize) else { return };
        flight.published = 1;
        let proxy = flight.proxy;
        if let Some(router) = self.routers.get_mut(proxy) {
            router.first_token(&mut flight.ticket, prompt);
        }
        self.tell(proxy, now);
    }

    fn done(&mut self, request: u32, now: f64) {
        if let Some(record) = self.records.get_mut(request as usize) {
            record.e2e = now - record.at;
            self.learning.output(record.output);
        }
        let Some(SimulatedRequest { ticket, proxy, cache_estimate, .. }) = self.flights.get_mut(request as usize).and_then(Option::take)
        else {
            return;
        };
        let (job, record) = (self.workload.job(request), self.records.get(request as usize));
        if let Some(router) = self.routers.get_mut(proxy) {
            if let (Some(cache_estimate), Some(job), Some(record)) = (cache_estimate, job, record) {
                router.hit(&cache_estimate, &job, record.cached);
            }
            router.release(ticket);
        }
        self.tell(proxy, now);
    }

    /// The ledgers hear how far the streams of an engine are. (Of a proxy they hear with every token; others hear with the next row.)
    fn progress(&mut self, at: usize) {
        let Some(engine) = self.engines.get(at) else { return };
        let (flights, routers) = (&mut self.flights, &mut self.routers);
        engine.progress(&mut |request, generated| {
            if let Some(Some(flight)) = flights.get_mut(request as usize)
                && let Some(router) = routers.get_mut(flight.proxy)
                && flight.at == at
                && generated > flight.published
            {
                router.decoded(&mut flight.ticket, generated - flight.published);
                flight.published = generated;
            }
        });
    }

    /// The next gap of the streams of an engine, as the proxy with most to do there believes it comes about.
    fn gap(&mut self, at: usize, now: f64) {
        let (Some(engine), Some(&endpoint)) = (self.engines.get(at), self.refs.get(at)) else { return };
        let Some(ends) = engine.busy_until() else { return };
        let loads = self.routers.iter().map(|router| router.load(endpoint));
        if let Some(load) = loads.max_by_key(|load| load.requests) {
            self.learning.gap(at, endpoint, load, ends - now);
        }
    }

    fn scrape(&mut self) {
        let metrics = self.engines.iter().map(|engine| {
            let (waiting, running) = engine.counts();
            EndpointMetrics {
                queue_depth: Some(waiting as f32),
                running_requests: Some(running as f32),
                kv_cache_utilization: Some(engine.kv_utilization() as f32),
                kv_blocks: u32::try_from(engine.spec().kv_blocks).ok(),
                kv_block_tokens: u32::try_from(BLOCK_TOKENS).ok(),
                lora: lora(engine.as_ref()),
                ..EndpointMetrics::default()
            }
        });
        let step = Arc::new(match self.policy {
            RoutingPolicy::Published(_) => {
                self.learning.published(self.refs.iter().zip(self.engines.iter().map(|engine| engine.spec().times)))
            }
            _ => self.learning.publish(),
        });
        if let Ok(snapshot) = self.snapshot.with_metrics(Version::default(), metrics.collect()) {
            self.snapshot = snapshot.with_step(step);
        }
        self.routers.iter_mut().for_each(|router| router.scraped(&self.refs));
    }

    fn changes(&mut self, now: f64) {
        match self.setting.change {
            Some(PoolChange::Degrades(times)) => self.engines.iter_mut().take(1).for_each(|engine| engine.slow_down(times)),
            Some(PoolChange::Restarts) => {
                self.set_readiness(|at, readiness| if at == 0 { Readiness::NotReady } else { readiness });
                self.agenda.plan(now + RESTART_MS, WorldEvent::Returns);
            }
            Some(PoolChange::Grows) => self.set_readiness(|_, _| Readiness::Ready),
            None => {}
        }
    }

    /// The restarted engine is back as another life of itself.
    fn returns(&mut self) {
        self.engines.iter_mut().take(1).for_each(|engine| engine.forget());
        let gone = self.refs.first().copied();
        if let Some(first) = self.refs.first_mut() {
            first.generation.0 += 1;
        }
        self.set_readiness(|_, _| Readiness::Ready);
        let gone: Vec<EndpointRef> = gone.into_iter().collect();
        for router in &mut self.routers {
            router.install(&self.refs, &gone, self.setting.engine.kv_blocks);
        }
    }

    fn set_readiness(&mut self, readiness: impl Fn(usize, Readiness) -> Readiness) {
        let endpoints = self.snapshot.endpoints().iter().zip(&self.refs).enumerate().map(|(at, (endpoint, id))| Endpoint {
            id: *id,
            readiness: readiness(at, endpoint.readiness),
            ..endpoint.clone()
        });
        let metrics = self.snapshot.metrics().to_vec();
        if let Ok(snapshot) = self.snapshot.with_endpoints(Version::default(), endpoints.collect(), metrics) {
            self.snapshot = snapshot;
        }
    }
}

/// What an engine with places for LoRA adapters reports of them.
fn lora(engine: &dyn EngineSimulator<'_>) -> Option<LoraMetrics> {
    let max = u32::try_from(engine.spec().adapter_places).ok().filter(|&places| places > 0)?;
    let names = |adapters: Vec<u16>| adapters.into_iter().map(|adapter| adapter_name(adapter).into()).collect();
    let (running, waiting) = engine.adapters();
    Some(LoraMetrics { running: names(running), waiting: names(waiting), max })
}

fn endpoint(at: usize, setting: &PoolSetting) -> Endpoint {
    let absent = setting.change == Some(PoolChange::Grows) && at + 2 >= setting.replicas;
    let role = (setting.prefillers > 0).then_some(if at < setting.prefillers { "prefill" } else { "decode" });
    Endpoint {
        id: EndpointRef { slot: Slot(u16::try_from(at).unwrap_or(u16::MAX)), generation: Generation(1) },
        name: format!("engine-{at}").into(),
        address: format!("10.0.{}.{}:8000", at / 250, at % 250 + 1).into(),
        readiness: if absent { Readiness::NotReady } else { Readiness::Ready },
        labels: role.map(|role| (ROLE_LABEL.into(), role.into())).into_iter().collect(),
        models: Arc::default(),
        age_ms: 60_000,
    }
}
