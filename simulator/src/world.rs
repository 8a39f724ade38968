//! One run in virtual time: proxies, engines, and the daemon's part (metrics, the learned step model) between them.
//!
//! ```text
//!  arrival ─► a proxy picks ─(api)─► engine steps ─► first token, end ─► that proxy's ledger
//!                  │                                                        │
//!                  └──── rows and placements, `sharing` ms later ───────────┴─► the other proxies
//!  every `scrape` ms: metrics of all engines, and the step model learned so far, to all proxies
//! ```

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::sync::Arc;

use scheduler::in_flight::{Load, Ticket};
use scheduler::{Endpoint, EndpointMetrics, EndpointRef, Incarnation, Pipeline, Readiness, Slot, Snapshot, Version};

use crate::engine::{BLOCK_TOKENS, Engine, EngineSpec, Event};
use crate::learning::Learning;
use crate::policy::Policy;
use crate::router::Router;
use crate::workload::{Dice, Workload};

/// What is run, beside the workload and the policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Setting {
    pub(crate) engine: EngineSpec,
    pub(crate) replicas: usize,
    /// Every other engine takes so many times as long.
    pub(crate) odd_slowdown: f64,
    pub(crate) proxies: usize,
    pub(crate) sharing: Sharing,
    /// Metrics are this old at most, ms; 0: never old.
    pub(crate) scrape_ms: f64,
    pub(crate) change: Option<Change>,
}

/// What proxies know of one another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Sharing {
    /// Nothing.
    Private,
    /// Everything, so many ms later.
    After(f64),
}

/// What happens to the pool after a third of the requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Change {
    /// The first engine becomes so many times as slow.
    Degrades(f64),
    /// The first engine takes no more requests, and comes back half a minute later with an empty cache.
    Restarts,
    /// The last two engines join; before, they were not there.
    Grows,
}

/// What became of a request. Times in ms.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Record {
    pub(crate) at: f64,
    pub(crate) ttft: f64,
    pub(crate) e2e: f64,
    pub(crate) prompt: u32,
    pub(crate) output: u32,
    pub(crate) cached: u32,
}

#[derive(Clone, Copy, Debug)]
enum What {
    Arrives { request: u32, engine: usize },
    StepEnds { engine: usize },
    Scrape,
    Row { from: usize, to: usize, endpoint: EndpointRef, load: Load },
    Placed { to: usize, endpoint: EndpointRef, request: u32 },
    Changes,
    Returns,
}

/// In the order of time, then of making.
struct When(f64, u64, What);

struct World<'w> {
    setting: &'w Setting,
    workload: &'w Workload,
    policy: &'w Policy,
    engines: Vec<Engine<'w>>,
    steps_made: Vec<u64>,
    routers: Vec<Router>,
    snapshot: Snapshot,
    refs: Vec<EndpointRef>,
    learning: Learning,
    records: Vec<Record>,
    /// Ticket and proxy of those under way, and the output told to the ledger so far.
    flights: Vec<Option<(Ticket, usize, u32)>>,
    agenda: BinaryHeap<When>,
    made: u64,
}

/// Steps of an engine between two looks at how far its streams are: about a tenth of a second.
const PROGRESS_STEPS: u64 = 16;

/// How long a restarted engine is away, ms.
const RESTART_MS: f64 = 30_000.0;

impl PartialEq for When {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for When {}

impl PartialOrd for When {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for When {
    fn cmp(&self, other: &Self) -> Ordering {
        other.0.total_cmp(&self.0).then(other.1.cmp(&self.1))
    }
}

// === impl Setting ===

impl Setting {
    /// Eight engines alike behind one proxy, metrics 50 ms old at most.
    pub(crate) fn plain(engine: EngineSpec) -> Self {
        Self { engine, replicas: 8, odd_slowdown: 1.0, proxies: 1, sharing: Sharing::Private, scrape_ms: 50.0, change: None }
    }

    fn specs(&self) -> impl Iterator<Item = EngineSpec> + '_ {
        (0..self.replicas).map(|at| {
            let mut spec = self.engine;
            spec.times.slowdown *= if at % 2 == 1 { self.odd_slowdown } else { 1.0 };
            spec
        })
    }
}

/// Runs a workload at `rate` requests a second to its end: what became of each request, in order of arrival.
pub(crate) fn run(workload: &Workload, rate: f64, policy: &Policy, setting: &Setting, seed: u64) -> Result<Vec<Record>, String> {
    let pipeline = Pipeline::build(&policy.pipeline()).map_err(|error| error.to_string())?;
    let mut world = World::new(workload, policy, setting, pipeline, seed)?;
    world.play(workload.rate / rate, &mut Dice::seeded(seed ^ 0x5eed))?;
    Ok(world.records)
}

// === impl World ===

impl<'w> World<'w> {
    fn new(workload: &'w Workload, policy: &'w Policy, setting: &'w Setting, pipeline: Pipeline, seed: u64) -> Result<Self, String> {
        let count = setting.replicas;
        let endpoints: Vec<Endpoint> = (0..count).map(|at| endpoint(at, setting)).collect();
        let refs: Vec<EndpointRef> = endpoints.iter().map(|endpoint| endpoint.id).collect();
        let metrics = vec![EndpointMetrics::default(); count];
        let snapshot = Snapshot::try_new(Version::default(), endpoints, metrics, pipeline).map_err(|error| error.to_string())?;
        let mut routers: Vec<Router> =
            (0..setting.proxies).map(|number| Router::new(seed * 1_000 + number as u64, number, setting.proxies)).collect();
        routers.iter_mut().for_each(|router| router.install(&refs, &[], setting.engine.kv_blocks));
        let requests = workload.requests().len();
        Ok(Self {
            setting,
            workload,
            policy,
            engines: setting.specs().map(Engine::new).collect(),
            steps_made: vec![0; count],
            routers,
            snapshot,
            refs,
            learning: Learning::new(count),
            records: Vec::with_capacity(requests),
            flights: (0..requests).map(|_| None).collect(),
            agenda: BinaryHeap::new(),
            made: 0,
        })
    }

    fn play(&mut self, stretch: f64, dice: &mut Dice) -> Result<(), String> {
        let arrivals: Vec<f64> = self.workload.requests().iter().map(|request| request.at * stretch).collect();
        if self.setting.scrape_ms > 0.0 {
            self.plan(0.0, What::Scrape);
        }
        if let Some(at) = arrivals.get(arrivals.len() / 3).filter(|_| self.setting.change.is_some()) {
            self.plan(*at, What::Changes);
        }
        let (mut next, mut left, mut events) = (0, arrivals.len(), Vec::new());
        while left > 0 {
            let planned = self.agenda.peek().map_or(f64::INFINITY, |when| when.0);
            if let Some(&at) = arrivals.get(next).filter(|at| **at <= planned) {
                let proxy = if self.setting.proxies > 1 { dice.below(self.setting.proxies) } else { 0 };
                self.pick(u32::try_from(next).unwrap_or(u32::MAX), proxy, at)?;
                next += 1;
                continue;
            }
            let Some(When(now, _, what)) = self.agenda.pop() else { return Err("nothing is left to happen".to_owned()) };
            match what {
                What::StepEnds { engine } => left -= self.step_ends(engine, now, &mut events),
                other => self.happens(other, now),
            }
        }
        Ok(())
    }

    fn plan(&mut self, at: f64, what: What) {
        self.made += 1;
        self.agenda.push(When(at, self.made, what));
    }

    fn happens(&mut self, what: What, now: f64) {
        match what {
            What::Arrives { request, engine } => {
                if let (Some(job), Some(at)) = (self.workload.job(request), self.engines.get_mut(engine)) {
                    at.submit(job);
                    self.start_step(engine, now);
                }
            }
            What::StepEnds { .. } => {}
            What::Scrape => {
                self.scrape();
                self.plan(now + self.setting.scrape_ms, What::Scrape);
            }
            What::Row { from, to, endpoint, load } => {
                if let Some(router) = self.routers.get_mut(to) {
                    router.told(from, endpoint, load);
                }
            }
            What::Placed { to, endpoint, request } => {
                if let (Some(router), Some(job)) = (self.routers.get_mut(to), self.workload.job(request)) {
                    router.placed(endpoint, job.blocks);
                }
            }
            What::Changes => self.changes(now),
            What::Returns => self.returns(),
        }
    }

    fn pick(&mut self, request: u32, proxy: usize, now: f64) -> Result<(), String> {
        if self.setting.scrape_ms <= 0.0 {
            self.scrape();
        }
        let (Some(job), Some(router)) = (self.workload.job(request), self.routers.get_mut(proxy)) else {
            return Err(format!("no request {request} or no proxy {proxy}"));
        };
        let picked = router.pick(self.policy, &self.snapshot, &job, &self.engines, now).ok_or("nobody was picked")?;
        let at = picked.at;
        self.learning.picked(at, request, now, (job.prompt - picked.matched_tokens, job.prompt));
        self.records.push(Record { at: now, prompt: job.prompt, output: job.output, ..Record::default() });
        if let Some(flight) = self.flights.get_mut(request as usize) {
            *flight = Some((picked.ticket, proxy, 0));
        }
        let engine = self.engines.get_mut(at).ok_or("an engine that is not there was picked")?;
        engine.announce(job);
        let arrives = now + engine.spec().api_ms;
        self.plan(arrives, What::Arrives { request, engine: at });
        self.tell(proxy, now);
        if let Some(&endpoint) = self.refs.get(at) {
            self.tell_placement(proxy, endpoint, request, now);
        }
        Ok(())
    }

    /// The other proxies hear of what changed at `proxy`.
    fn tell(&mut self, proxy: usize, now: f64) {
        let Some(router) = self.routers.get_mut(proxy) else { return };
        let mut rows = Vec::new();
        router.changed(|endpoint, load| rows.push((endpoint, load)));
        let Sharing::After(delay) = self.setting.sharing else { return };
        for to in (0..self.setting.proxies).filter(|&to| to != proxy) {
            for &(endpoint, load) in &rows {
                self.plan(now + delay, What::Row { from: proxy, to, endpoint, load });
            }
        }
    }

    fn tell_placement(&mut self, proxy: usize, endpoint: EndpointRef, request: u32, now: f64) {
        let Sharing::After(delay) = self.setting.sharing else { return };
        for to in (0..self.setting.proxies).filter(|&to| to != proxy) {
            self.plan(now + delay, What::Placed { to, endpoint, request });
        }
    }

    fn start_step(&mut self, at: usize, now: f64) {
        let Some(engine) = self.engines.get_mut(at).filter(|engine| engine.busy_until().is_none()) else { return };
        let records = &mut self.records;
        let ends = engine.start(now, |request, cached| {
            if let Some(record) = records.get_mut(request as usize) {
                record.cached = cached;
            }
        });
        if let Some(ends) = ends {
            self.plan(ends, What::StepEnds { engine: at });
        }
    }

    /// How many requests ended with the step.
    fn step_ends(&mut self, at: usize, now: f64, events: &mut Vec<Event>) -> usize {
        let Some(engine) = self.engines.get_mut(at) else { return 0 };
        engine.end(events);
        let mut ended = 0;
        for event in events.drain(..) {
            match event {
                Event::First(request) => self.first_token(at, request, now),
                Event::Done(request) => {
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
        self.start_step(at, now);
        if steps.is_multiple_of(PROGRESS_STEPS) {
            self.gap(at, now);
        }
        ended
    }

    fn first_token(&mut self, at: usize, request: u32, now: f64) {
        let Some(record) = self.records.get_mut(request as usize) else { return };
        record.ttft = now - record.at;
        let prompt = record.prompt;
        self.learning.first_token(at, self.refs.get(at).copied(), request, now);
        let Some(Some((ticket, proxy, told))) = self.flights.get_mut(request as usize) else { return };
        *told = 1;
        let proxy = *proxy;
        if let Some(router) = self.routers.get_mut(proxy) {
            router.first_token(ticket, prompt);
        }
        self.tell(proxy, now);
    }

    fn done(&mut self, request: u32, now: f64) {
        if let Some(record) = self.records.get_mut(request as usize) {
            record.e2e = now - record.at;
            self.learning.output(record.output);
        }
        let Some((ticket, proxy, _)) = self.flights.get_mut(request as usize).and_then(Option::take) else { return };
        if let Some(router) = self.routers.get_mut(proxy) {
            router.release(ticket);
        }
        self.tell(proxy, now);
    }

    /// The ledgers hear how far the streams of an engine are. (Of a proxy they hear with every token; others hear with the next row.)
    fn progress(&mut self, at: usize) {
        let Some(engine) = self.engines.get(at) else { return };
        let (flights, routers) = (&mut self.flights, &mut self.routers);
        engine.progress(|request, generated| {
            if let Some(Some((ticket, proxy, told))) = flights.get_mut(request as usize)
                && let Some(router) = routers.get_mut(*proxy)
                && generated > *told
            {
                router.decoded(ticket, generated - *told);
                *told = generated;
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
                ..EndpointMetrics::default()
            }
        });
        let step = Arc::new(self.learning.publish());
        if let Ok(snapshot) = self.snapshot.with_metrics(Version::default(), metrics.collect()) {
            self.snapshot = snapshot.with_step(step);
        }
        self.routers.iter_mut().for_each(|router| router.scraped(&self.refs));
    }

    fn changes(&mut self, now: f64) {
        match self.setting.change {
            Some(Change::Degrades(times)) => self.engines.iter_mut().take(1).for_each(|engine| engine.slow_down(times)),
            Some(Change::Restarts) => {
                self.set_readiness(|at, readiness| if at == 0 { Readiness::NotReady } else { readiness });
                self.plan(now + RESTART_MS, What::Returns);
            }
            Some(Change::Grows) => self.set_readiness(|_, _| Readiness::Ready),
            None => {}
        }
    }

    /// The restarted engine is back as another life of itself.
    fn returns(&mut self) {
        self.engines.iter_mut().take(1).for_each(Engine::forget);
        let gone = self.refs.first().copied();
        if let Some(first) = self.refs.first_mut() {
            first.incarnation.0 += 1;
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

fn endpoint(at: usize, setting: &Setting) -> Endpoint {
    let absent = setting.change == Some(Change::Grows) && at + 2 >= setting.replicas;
    Endpoint {
        id: EndpointRef { slot: Slot(u16::try_from(at).unwrap_or(u16::MAX)), incarnation: Incarnation(1) },
        name: format!("engine-{at}").into(),
        address: format!("10.0.{}.{}:8000", at / 250, at % 250 + 1).into(),
        readiness: if absent { Readiness::NotReady } else { Readiness::Ready },
        labels: Box::default(),
        models: Arc::default(),
        age_ms: 60_000,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::LLAMA_8B_H100;
    use crate::trace::Line;

    /// Prompts of three families, faster than one engine can serve them.
    fn workload() -> Workload {
        let dice = &mut Dice::seeded(4);
        let line = |number: u32| Line {
            at: f64::from(number) * 60.0,
            prompt: 2_000 + 512 * (number % 5),
            output: 20 + number % 40,
            ids: (0..12)
                .map(|id| if id < 3 { u64::from(number % 3) * 100 + id } else { u64::from(number) * 1_000 + id + dice.below(9) as u64 })
                .collect(),
        };
        let lines: Vec<Line> = (0..600).map(line).collect();
        Workload::of(&lines)
    }

    fn play(policy: &str, setting: &Setting) -> Vec<Record> {
        let workload = workload();
        run(&workload, workload.rate * 3.0, &Policy::named(policy).unwrap(), setting, 7).unwrap()
    }

    #[test]
    fn the_same_seed_is_the_same_run_under_every_policy() {
        for policy in crate::policy::MAIN {
            let ends = || play(policy, &Setting::plain(LLAMA_8B_H100)).iter().map(|record| record.e2e.to_bits()).collect::<Vec<_>>();
            assert_eq!(ends(), ends(), "{policy}");
        }
    }

    #[test]
    fn all_are_served_whatever_happens_to_the_pool() {
        let plain = Setting::plain(LLAMA_8B_H100);
        for change in [Change::Degrades(3.0), Change::Restarts, Change::Grows] {
            for sharing in [Sharing::Private, Sharing::After(0.0), Sharing::After(100.0)] {
                let setting = Setting { change: Some(change), proxies: 3, sharing, scrape_ms: 0.0, ..plain };
                let records = play("ours", &setting);
                assert_eq!(records.len(), 600);
                assert!(records.iter().all(|record| record.ttft > 0.0 && record.e2e >= record.ttft), "{change:?} {sharing:?}");
            }
        }
    }

    #[test]
    fn prefixes_are_found_where_policies_look_for_them() {
        let hits = |policy: &str| play(policy, &Setting::plain(LLAMA_8B_H100)).iter().map(|record| u64::from(record.cached)).sum::<u64>();
        assert!(hits("ours") > hits("round-robin") && hits("2/2/3/2") > hits("round-robin"));
    }

    #[test]
    fn proxies_that_hear_of_each_other_at_once_are_as_one() {
        let of = |sharing| Setting { proxies: 4, sharing, ..Setting::plain(LLAMA_8B_H100) };
        let mean = |records: &[Record]| records.iter().map(|record| record.ttft).sum::<f64>() / records.len() as f64;
        let [one, shared, private] =
            [Setting::plain(LLAMA_8B_H100), of(Sharing::After(0.0)), of(Sharing::Private)].map(|setting| mean(&play("lmetric", &setting)));
        assert!((shared / one - 1.0).abs() < 0.2 && private > shared, "{one} {shared} {private}");
    }
}
