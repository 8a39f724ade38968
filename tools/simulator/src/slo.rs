//! Requests of several SLO classes on a pool of two speeds, in virtual time: the share of each
//! class that meets its SLO, by policy. It is the experiment of the long end-to-end test with the
//! real scheduler, pool state and latency learner, independent of the machine that it runs on.

mod policy;
pub(crate) use policy::SloPolicy;

use std::collections::BTreeMap;
use std::sync::Arc;

use pool_state::{LedgerHold, ManagedPool, RequestEnding, TokenUsage};
use scheduler::latency::LatencyModel;
use scheduler::latency::learn::{LatencyLearner, RequestEnd};
use scheduler::{
    Endpoint, EndpointMetrics, EndpointRef, Generation, Pipeline, Readiness, Request, Slo, Slot,
    Snapshot, Version,
};

use crate::engine::{EngineJob, EngineSimulator, SimulatedEngine, SimulatedEngineSpec, StepEvent};
use crate::event_queue::{EventQueue, virtual_time};
use crate::hardware::LLAMA_8B_H100;
use crate::router::decision;
use crate::workload::Sampler;

/// A class of requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SloClass {
    pub(crate) name: &'static str,
    /// 1 is critical.
    priority: i32,
    /// How many of ten requests belong to the class.
    tenths: usize,
    ttft_ms: f64,
    tpot_ms: f64,
}

/// The TPOT SLO of critical requests, ms: slow engines just miss it, or just meet it.
pub(crate) const CRITICAL_TPOT_MS: f64 = 45.0;

/// The classes of the end-to-end test, where critical requests have a shorter TPOT SLO.
pub(crate) const CLASSES: [SloClass; 3] = [
    SloClass {
        name: "critical",
        priority: 1,
        tenths: 3,
        ttft_ms: 1_500.0,
        tpot_ms: CRITICAL_TPOT_MS,
    },
    SloClass {
        name: "standard",
        priority: 0,
        tenths: 4,
        ttft_ms: 5_000.0,
        tpot_ms: 150.0,
    },
    SloClass {
        name: "batch",
        priority: -1,
        tenths: 3,
        ttft_ms: 5_000.0,
        tpot_ms: 150.0,
    },
];

/// The outcome of a class in one run.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SloAttainment {
    /// The policy.
    pub(crate) by: String,
    /// Share of the pool's capacity.
    pub(crate) load: f64,
    pub(crate) class: String,
    pub(crate) seed: u64,
    pub(crate) outcome: ClassOutcome,
}

/// The outcome of the requests of a class, as counts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ClassOutcome {
    pub(crate) sent: u32,
    pub(crate) in_time: u32,
    pub(crate) shed: u32,
}

/// The slowdowns of the pool's engines: two fast ones, and two that take three times as long.
const SLOWDOWNS: [f64; 4] = [2.0, 2.0, 6.0, 6.0];

const ENGINE: SimulatedEngineSpec = SimulatedEngineSpec {
    sequences_max: 4,
    ..LLAMA_8B_H100
};

/// Tokens of every answer.
const OUTPUT: u32 = 16;

/// The fewest and the most tokens of a prompt.
const PROMPTS: [usize; 2] = [110, 510];

/// How long the learner learns before requests count, and how long they count, ms.
const WARM_UP_MS: f64 = 60_000.0;
const MEASURED_MS: f64 = 120_000.0;

const SCRAPE_MS: f64 = 50.0;
const PUBLISH_MS: f64 = 100.0;

#[derive(Clone, Copy, Debug)]
enum SloEvent {
    Arrives(usize),
    Submits(usize),
    StepEnds(usize),
    Scrape,
    Publish,
}

/// One request and its outcome. Times in ms.
struct SloRequest {
    class: SloClass,
    at: f64,
    prompt: u32,
    /// The position of its engine.
    endpoint: usize,
    /// The ledger entries of the request, while it is in flight.
    hold: Option<LedgerHold>,
    first: f64,
    end: f64,
    shed: bool,
}

struct SloSimulation<'w> {
    policy: &'w SloPolicy,
    engines: Vec<SimulatedEngine<'w>>,
    pool: ManagedPool,
    learner: LatencyLearner,
    /// The latency model that the learner published last.
    model: Option<LatencyModel>,
    requests: Vec<SloRequest>,
    events: EventQueue<SloEvent>,
    turn: usize,
}

/// Requests a second that the pool can serve, with twice as many requests at each engine as it runs
/// at once.
///
/// # Errors
/// When an engine cannot do a request.
pub(crate) fn capacity() -> Result<f64, String> {
    const LASTING_MS: f64 = 60_000.0;
    let of_engine = |slowdown: f64| -> Result<f64, String> {
        let mut engine = SimulatedEngine::new(spec(slowdown));
        let mut dice = Sampler::seeded(1);
        let mut events = Vec::new();
        let mut now = 0.0;
        let mut done = 0.0;
        let mut next = 0;
        let mut submit = |engine: &mut SimulatedEngine<'_>, now| {
            let job = EngineJob {
                request: next,
                prompt: prompt(&mut dice),
                output: OUTPUT,
                blocks: &[],
                hashes: &[],
                adapter: 0,
                prefilled: false,
            };
            next += 1;
            engine.submit(job, now)
        };
        (0..2 * ENGINE.sequences_max).try_for_each(|_| submit(&mut engine, now))?;
        while let Some(ends) = engine
            .start(now, &mut |_, _| {})?
            .filter(|ends| *ends < LASTING_MS)
        {
            now = ends;
            engine.end(&mut events)?;
            for _ in events
                .drain(..)
                .filter(|event| matches!(event, StepEvent::Done(_)))
            {
                done += 1.0;
                submit(&mut engine, now)?;
            }
        }
        Ok(done * 1e3 / LASTING_MS)
    };
    SLOWDOWNS.iter().map(|slowdown| of_engine(*slowdown)).sum()
}

/// The share of the requests that `count` selects among all requests sent in these runs.
pub(crate) fn share(runs: &[ClassOutcome], count: fn(&ClassOutcome) -> u32) -> f64 {
    let sum = |count: fn(&ClassOutcome) -> u32| f64::from(runs.iter().map(count).sum::<u32>());
    sum(count) / sum(|outcome| outcome.sent).max(1.0)
}

/// The outcome of each class at `rate` requests a second, with this TPOT SLO of critical requests.
///
/// # Errors
/// When the pipeline is invalid or an engine cannot do a request.
pub(crate) fn run(
    policy: &SloPolicy,
    (rate, critical_tpot_ms): (f64, f64),
    seed: u64,
) -> Result<BTreeMap<&'static str, ClassOutcome>, String> {
    let mut world = SloSimulation::new(policy, seed)?;
    let mut dice = Sampler::seeded(seed);
    let mut at = 0.0;
    while at < WARM_UP_MS + MEASURED_MS {
        let class = class(dice.below(10));
        let tpot_ms = if class.priority > 0 {
            critical_tpot_ms
        } else {
            class.tpot_ms
        };
        world.expect(at, SloClass { tpot_ms, ..class }, prompt(&mut dice));
        at += dice.exponential() * 1e3 / rate;
    }
    world.play()?;
    let mut outcomes: BTreeMap<&'static str, ClassOutcome> = BTreeMap::new();
    for request in world
        .requests
        .iter()
        .filter(|request| request.at >= WARM_UP_MS)
    {
        let all = outcomes.entry(request.class.name).or_default();
        let in_time = u32::from(request.is_in_time());
        let shed = u32::from(request.shed);
        *all = ClassOutcome {
            sent: all.sent + 1,
            in_time: all.in_time + in_time,
            shed: all.shed + shed,
        };
    }
    Ok(outcomes)
}

fn spec(slowdown: f64) -> SimulatedEngineSpec {
    let mut spec = ENGINE;
    spec.times.slowdown = slowdown;
    // Half as fast as the engine that is modelled, its API server included.
    spec.api_ms *= 2.0;
    spec
}

fn prompt(dice: &mut Sampler) -> u32 {
    let [from, to] = PROMPTS;
    u32::try_from(from + dice.below(to - from)).unwrap_or(u32::MAX)
}

fn class(mut tenth: usize) -> SloClass {
    let [first, ..] = CLASSES;
    for class in CLASSES {
        match tenth.checked_sub(class.tenths) {
            Some(rest) => tenth = rest,
            None => return class,
        }
    }
    first
}

// === impl ClassOutcome ===

impl ClassOutcome {
    /// Share of those sent that were in time.
    pub(crate) fn attainment(self) -> f64 {
        f64::from(self.in_time) / f64::from(self.sent.max(1))
    }
}

// === impl SloRequest ===

impl SloRequest {
    fn tpot_ms(&self) -> f64 {
        (self.end - self.first) / f64::from(OUTPUT - 1)
    }

    fn is_in_time(&self) -> bool {
        !self.shed
            && self.first - self.at <= self.class.ttft_ms
            && self.tpot_ms() <= self.class.tpot_ms
    }

    fn slo(&self) -> Slo {
        let us = |ms: f64| Some((ms * 1e3) as u32);
        Slo {
            ttft_us: us(self.class.ttft_ms),
            tpot_us: us(self.class.tpot_ms),
        }
    }
}

// === impl SloSimulation ===

impl<'w> SloSimulation<'w> {
    fn new(policy: &'w SloPolicy, seed: u64) -> Result<Self, String> {
        let pipeline = Pipeline::build(&policy.pipeline()).map_err(|error| error.to_string())?;
        let endpoints: Vec<Endpoint> = (0..SLOWDOWNS.len()).map(endpoint).collect();
        let metrics = vec![EndpointMetrics::default(); SLOWDOWNS.len()];
        let snapshot = Snapshot::try_new(Version::default(), endpoints, metrics, pipeline)
            .map_err(|error| error.to_string())?;
        // Prompts share no prefix here. Metrics never count as stale.
        let mut pool = ManagedPool::new(seed ^ 0x5eed, 0);
        pool.install(snapshot, 0, u32::MAX);
        Ok(Self {
            policy,
            engines: SLOWDOWNS
                .iter()
                .map(|slowdown| SimulatedEngine::new(spec(*slowdown)))
                .collect(),
            pool,
            learner: LatencyLearner::default(),
            model: None,
            requests: Vec::new(),
            events: EventQueue::default(),
            turn: 0,
        })
    }

    fn expect(&mut self, at: f64, class: SloClass, prompt: u32) {
        self.events.plan(at, SloEvent::Arrives(self.requests.len()));
        let first = f64::INFINITY;
        let end = f64::INFINITY;
        self.requests.push(SloRequest {
            class,
            at,
            prompt,
            endpoint: 0,
            hold: None,
            first,
            end,
            shed: false,
        });
    }

    fn play(&mut self) -> Result<(), String> {
        let mut left = self.requests.len();
        let mut steps = Vec::new();
        self.scrape(0.0);
        self.events.plan(SCRAPE_MS, SloEvent::Scrape);
        self.events.plan(0.0, SloEvent::Publish);
        while left > 0 {
            let (now, event) = self.events.next()?;
            match event {
                SloEvent::Arrives(at) => left -= usize::from(!self.arrives(at, now)),
                SloEvent::Submits(at) => self.submits(at, now)?,
                SloEvent::StepEnds(at) => left -= self.step_ends(at, now, &mut steps)?,
                SloEvent::Scrape => {
                    self.scrape(now);
                    self.events.plan(now + SCRAPE_MS, SloEvent::Scrape);
                }
                SloEvent::Publish => {
                    self.publish(now);
                    self.events.plan(now + PUBLISH_MS, SloEvent::Publish);
                }
            }
        }
        Ok(())
    }

    /// Picks for a request. Returns whether it is sent to an endpoint.
    fn arrives(&mut self, at: usize, now: f64) -> bool {
        let Some(arrived) = self.requests.get_mut(at) else {
            return false;
        };
        let request = Request {
            model: "m",
            priority: arrived.class.priority,
            prompt_tokens: arrived.prompt,
            max_tokens: Some(OUTPUT),
            slo: arrived.slo(),
            prediction_based: true,
            ..Request::default()
        };
        let picked = match self.policy {
            SloPolicy::Turns => {
                self.turn += 1;
                let next = self.turn % SLOWDOWNS.len();
                self.pool
                    .pick_with(&request, "m", virtual_time(now), |snapshot, _, _, _| {
                        decision(snapshot, Some(next), None)
                    })
            }
            SloPolicy::Slo(_) | SloPolicy::Scored(_) => {
                self.pool.pick(&request, "m", virtual_time(now), &mut ())
            }
        };
        let Some((EndpointRef { slot, .. }, hold)) = picked
            .ok()
            .and_then(|picked| Some((picked.ranked.first()?.0, picked.hold)))
        else {
            arrived.shed = true;
            return false;
        };
        arrived.endpoint = usize::from(slot.0);
        arrived.hold = Some(hold);
        let api_ms = self
            .engines
            .get(arrived.endpoint)
            .map_or(0.0, |engine| engine.spec().api_ms);
        self.events.plan(now + api_ms, SloEvent::Submits(at));
        true
    }

    fn submits(&mut self, at: usize, now: f64) -> Result<(), String> {
        let Some(&SloRequest {
            endpoint, prompt, ..
        }) = self.requests.get(at)
        else {
            return Ok(());
        };
        let job = EngineJob {
            request: at as u32,
            prompt,
            output: OUTPUT,
            blocks: &[],
            hashes: &[],
            adapter: 0,
            prefilled: false,
        };
        if let Some(engine) = self.engines.get_mut(endpoint) {
            engine.submit(job, now)?;
        }
        self.start_step(endpoint, now)
    }

    fn start_step(&mut self, at: usize, now: f64) -> Result<(), String> {
        let Some(engine) = self
            .engines
            .get_mut(at)
            .filter(|engine| engine.busy_until().is_none())
        else {
            return Ok(());
        };
        if let Some(ends) = engine.start(now, &mut |_, _| {})? {
            self.events.plan(ends, SloEvent::StepEnds(at));
        }
        Ok(())
    }

    /// Ends an engine's step. Returns how many requests ended with it.
    fn step_ends(
        &mut self,
        at: usize,
        now: f64,
        steps: &mut Vec<StepEvent>,
    ) -> Result<usize, String> {
        let Some(engine) = self.engines.get_mut(at) else {
            return Ok(0);
        };
        engine.end(steps)?;
        let pool = &mut self.pool;
        let requests = &mut self.requests;
        engine.progress(&mut |request, _| {
            let hold = requests
                .get_mut(request as usize)
                .filter(|request| request.first < now)
                .and_then(|request| request.hold.as_mut());
            hold.into_iter()
                .for_each(|hold| pool.record_output(hold, 1, virtual_time(now)));
        });
        let mut ended = 0;
        for event in steps.drain(..) {
            match event {
                StepEvent::First(request) => self.first_token(request as usize, now),
                StepEvent::Done(request) => {
                    self.done(request as usize, now);
                    ended += 1;
                }
            }
        }
        self.start_step(at, now)?;
        Ok(ended)
    }

    fn first_token(&mut self, request: usize, now: f64) {
        let Some(request) = self.requests.get_mut(request) else {
            return;
        };
        request.first = now;
        if let Some(hold) = &mut request.hold {
            self.pool
                .record_first_token(hold, request.prompt, virtual_time(now));
            self.pool.record_ttft(hold, (now - request.at) as f32);
        }
    }

    /// Ends a request: the learner gets the measurements of the pool.
    fn done(&mut self, request: usize, now: f64) {
        let Some(request) = self.requests.get_mut(request) else {
            return;
        };
        request.end = now;
        let Some(hold) = request.hold.take() else {
            return;
        };
        let usage = TokenUsage {
            prompt_tokens: Some(request.prompt),
            completion_tokens: Some(OUTPUT),
            cached_tokens: Some(0),
            ..TokenUsage::default()
        };
        let ending = RequestEnding {
            ended: RequestEnd::Done,
            ttft_ms: Some((request.first - request.at) as f32),
            tpot_ms: Some(request.tpot_ms() as f32),
            usage: &usage,
        };
        self.pool.observe_end(&hold, &ending);
        self.pool.release(hold, virtual_time(now));
        let (_, observations) = self.pool.take_observations();
        for row in observations {
            self.learner
                .observe(&row.observation, row.predicted.as_ref());
        }
    }

    fn scrape(&mut self, now: f64) {
        let metrics = self.engines.iter().map(|engine| {
            let (waiting, running) = engine.counts();
            EndpointMetrics {
                queue_depth: Some(waiting as f32),
                running_requests: Some(running as f32),
                kv_cache_utilization: Some(engine.kv_utilization() as f32),
                ..EndpointMetrics::default()
            }
        });
        let metrics: Vec<EndpointMetrics> = metrics.collect();
        let newer = self
            .pool
            .snapshot()
            .and_then(|snapshot| snapshot.with_metrics(Version::default(), metrics).ok());
        newer
            .into_iter()
            .for_each(|snapshot| self.pool.refresh(snapshot, virtual_time(now)));
    }

    fn publish(&mut self, now: f64) {
        self.model = self.learner.publish(now as u64).or(self.model.take());
        self.pool
            .install_models(self.learner.step(now as u64), self.model.clone());
    }
}

fn endpoint(at: usize) -> Endpoint {
    Endpoint {
        id: EndpointRef {
            slot: Slot(u16::try_from(at).unwrap_or(u16::MAX)),
            generation: Generation(1),
        },
        name: format!("engine-{at}").into(),
        address: format!("10.0.0.{}:8000", at + 1).into(),
        readiness: Readiness::Ready,
        labels: Box::default(),
        models: Arc::default(),
        age_ms: 60_000,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As in the end-to-end test: only the fast engines meet the SLO of critical requests.
    fn of(name: &str, seed: u64) -> BTreeMap<&'static str, ClassOutcome> {
        run(
            &SloPolicy::named(name).unwrap(),
            (0.9 * capacity().unwrap(), 30.0),
            seed,
        )
        .unwrap()
    }

    #[test]
    fn slo_policies_keep_critical_requests_in_time_and_shed_only_others() {
        for by in ["slo", "slo:headroomSelectionStrategy=most"] {
            let ours = of(by, 1)["critical"];
            assert!(
                ours.attainment() >= 0.95 && ours.shed == 0,
                "{by}: {ours:?}"
            );
        }
        for by in ["default", "weighed", "turns"] {
            assert!(
                of(by, 1)["critical"].attainment() < 0.95,
                "{by}: the test needs a policy that is late"
            );
        }
    }

    #[test]
    fn a_seed_gives_one_run_and_another_seed_another() {
        assert_eq!(of("slo", 2), of("slo", 2));
        assert_ne!(of("default", 2), of("default", 3));
        assert!(
            SloPolicy::named("best").is_err()
                && SloPolicy::named("slo:least").is_err()
                && SloPolicy::named("slo:nothing=1").is_err()
        );
    }
}
