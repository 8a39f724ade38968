//! Requests of several SLO classes on a pool of two speeds, in virtual time: what share of each class is in time, by who picks. The experiment of the
//! long end-to-end test, with the real scheduler, ledger and latency learner between, and nothing of the machine that it runs on.

mod policy;
pub(crate) use policy::SloPolicy;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use scheduler::in_flight::{EndpointLoad, InFlight, InFlightTicket};
use scheduler::latency::learn::{LatencyLearner, Observation, RequestEnd};
use scheduler::latency::step::{FirstToken, TokenGap};
use scheduler::latency::{Conditions, Prediction};
use scheduler::{
    Decision, Endpoint, EndpointMetrics, EndpointRef, Generation, LocalState, Pipeline, Readiness, Request, Rng, Slo, Slot, Snapshot,
    Version, schedule, tracked_slo,
};

use crate::engine::{EngineJob, EngineSimulator, SimulatedEngine, SimulatedEngineSpec, StepEvent};
use crate::event_queue::EventQueue;
use crate::hardware::LLAMA_8B_H100;
use crate::workload::Sampler;

/// A class of requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SloClass {
    pub(crate) name: &'static str,
    /// 1 is critical.
    priority: i32,
    /// How many of ten requests are of it.
    tenths: usize,
    ttft_ms: f64,
    tpot_ms: f64,
}

/// What critical requests ask for, for each further token, ms: what slow engines just miss, or just meet.
pub(crate) const CRITICAL_TPOT_MS: f64 = 45.0;

/// Those of the end-to-end test, where critical requests ask for less.
pub(crate) const CLASSES: [SloClass; 3] = [
    SloClass { name: "critical", priority: 1, tenths: 3, ttft_ms: 1_500.0, tpot_ms: CRITICAL_TPOT_MS },
    SloClass { name: "standard", priority: 0, tenths: 4, ttft_ms: 5_000.0, tpot_ms: 150.0 },
    SloClass { name: "batch", priority: -1, tenths: 3, ttft_ms: 5_000.0, tpot_ms: 150.0 },
];

/// What became of a class in one run.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SloAttainment {
    pub(crate) by: String,
    /// Share of the pool's capacity.
    pub(crate) load: f64,
    pub(crate) class: String,
    pub(crate) seed: u64,
    pub(crate) outcome: ClassOutcome,
}

/// What became of the requests of a class.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ClassOutcome {
    pub(crate) sent: u32,
    pub(crate) in_time: u32,
    pub(crate) shed: u32,
}

/// Of the pool: two fast engines, and two that take three times as long.
const SLOWDOWNS: [f64; 4] = [2.0, 2.0, 6.0, 6.0];

const ENGINE: SimulatedEngineSpec = SimulatedEngineSpec { sequences_max: 4, ..LLAMA_8B_H100 };

/// Tokens of every answer, and of prompts.
const OUTPUT: u32 = 16;
const PROMPTS: [usize; 2] = [110, 510];

/// How long is learned before anything counts, and how long requests count, ms.
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

/// One request, and what became of it.
struct SloRequest {
    class: SloClass,
    at: f64,
    prompt: u32,
    endpoint: usize,
    conditions: Conditions,
    predicted: Option<Prediction>,
    ticket: Option<InFlightTicket>,
    first: f64,
    end: f64,
    shed: bool,
}

struct SloSimulation<'w> {
    by: &'w SloPolicy,
    engines: Vec<SimulatedEngine<'w>>,
    snapshot: Snapshot,
    refs: Vec<EndpointRef>,
    ledger: InFlight,
    rng: Rng,
    learner: LatencyLearner,
    flights: Vec<SloRequest>,
    agenda: EventQueue<SloEvent>,
    /// By endpoint: who waits for a first token, when the last one came out, a gap that is not told yet.
    waiting: Vec<VecDeque<usize>>,
    last_first: Vec<f64>,
    gaps: Vec<Option<TokenGap>>,
    turn: usize,
}

/// Requests a second that the pool can do, each engine asked for twice what it runs at once.
///
/// # Errors
/// What an engine cannot do.
pub(crate) fn capacity() -> Result<f64, String> {
    const LASTING_MS: f64 = 60_000.0;
    let of_engine = |slowdown: f64| -> Result<f64, String> {
        let (mut engine, mut dice, mut events) = (SimulatedEngine::new(spec(slowdown)), Sampler::seeded(1), Vec::new());
        let (mut now, mut done, mut next) = (0.0, 0.0, 0);
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
        while let Some(ends) = engine.start(now, &mut |_, _| {})?.filter(|ends| *ends < LASTING_MS) {
            now = ends;
            engine.end(&mut events)?;
            for _ in events.drain(..).filter(|event| matches!(event, StepEvent::Done(_))) {
                done += 1.0;
                submit(&mut engine, now)?;
            }
        }
        Ok(done * 1e3 / LASTING_MS)
    };
    SLOWDOWNS.iter().map(|slowdown| of_engine(*slowdown)).sum()
}

/// Of all that were sent in these runs, the share that is counted.
pub(crate) fn share(runs: &[ClassOutcome], count: fn(&ClassOutcome) -> u32) -> f64 {
    let sum = |count: fn(&ClassOutcome) -> u32| f64::from(runs.iter().map(count).sum::<u32>());
    sum(count) / sum(|outcome| outcome.sent).max(1.0)
}

/// What becomes of each class at `rate` requests a second, where critical ones ask for so much, ms a token.
pub(crate) fn run(by: &SloPolicy, (rate, critical_tpot_ms): (f64, f64), seed: u64) -> Result<BTreeMap<&'static str, ClassOutcome>, String> {
    let mut world = SloSimulation::new(by, seed)?;
    let mut dice = Sampler::seeded(seed);
    let mut at = 0.0;
    while at < WARM_UP_MS + MEASURED_MS {
        let class = class(dice.below(10));
        let tpot_ms = if class.priority > 0 { critical_tpot_ms } else { class.tpot_ms };
        world.expect(at, SloClass { tpot_ms, ..class }, prompt(&mut dice));
        at += dice.exponential() * 1e3 / rate;
    }
    world.play()?;
    let mut outcomes: BTreeMap<&'static str, ClassOutcome> = BTreeMap::new();
    for flight in world.flights.iter().filter(|flight| flight.at >= WARM_UP_MS) {
        let all = outcomes.entry(flight.class.name).or_default();
        let (in_time, shed) = (u32::from(flight.is_in_time()), u32::from(flight.shed));
        *all = ClassOutcome { sent: all.sent + 1, in_time: all.in_time + in_time, shed: all.shed + shed };
    }
    Ok(outcomes)
}

fn spec(slowdown: f64) -> SimulatedEngineSpec {
    let mut spec = ENGINE;
    spec.times.slowdown = slowdown;
    // Half as fast as the engine they are of, its front end included.
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
        !self.shed && self.first - self.at <= self.class.ttft_ms && self.tpot_ms() <= self.class.tpot_ms
    }

    fn slo(&self) -> Slo {
        let us = |ms: f64| Some((ms * 1e3) as u32);
        Slo { ttft_us: us(self.class.ttft_ms), tpot_us: us(self.class.tpot_ms) }
    }
}

// === impl SloSimulation ===

impl<'w> SloSimulation<'w> {
    fn new(by: &'w SloPolicy, seed: u64) -> Result<Self, String> {
        let pipeline = Pipeline::build(&by.pipeline()).map_err(|error| error.to_string())?;
        let count = SLOWDOWNS.len();
        let endpoints: Vec<Endpoint> = (0..count).map(endpoint).collect();
        let refs = endpoints.iter().map(|endpoint| endpoint.id).collect();
        let metrics = vec![EndpointMetrics::default(); count];
        Ok(Self {
            by,
            engines: SLOWDOWNS.iter().map(|slowdown| SimulatedEngine::new(spec(*slowdown))).collect(),
            snapshot: Snapshot::try_new(Version::default(), endpoints, metrics, pipeline).map_err(|error| error.to_string())?,
            refs,
            ledger: InFlight::default(),
            rng: Rng::seeded(seed ^ 0x5eed),
            learner: LatencyLearner::default(),
            flights: Vec::new(),
            agenda: EventQueue::default(),
            waiting: vec![VecDeque::new(); count],
            last_first: vec![0.0; count],
            gaps: vec![None; count],
            turn: 0,
        })
    }

    fn expect(&mut self, at: f64, class: SloClass, prompt: u32) {
        self.agenda.plan(at, SloEvent::Arrives(self.flights.len()));
        let (conditions, predicted, ticket) = (Conditions::default(), None, None);
        let (first, end) = (f64::INFINITY, f64::INFINITY);
        self.flights.push(SloRequest { class, at, prompt, endpoint: 0, conditions, predicted, ticket, first, end, shed: false });
    }

    fn play(&mut self) -> Result<(), String> {
        let (mut left, mut events) = (self.flights.len(), Vec::new());
        self.agenda.plan(0.0, SloEvent::Scrape);
        self.agenda.plan(0.0, SloEvent::Publish);
        while left > 0 {
            let (now, what) = self.agenda.next()?;
            match what {
                SloEvent::Arrives(at) => left -= usize::from(!self.arrives(at, now)),
                SloEvent::Submits(at) => self.submits(at, now)?,
                SloEvent::StepEnds(at) => left -= self.step_ends(at, now, &mut events)?,
                SloEvent::Scrape => {
                    self.scrape();
                    self.agenda.plan(now + SCRAPE_MS, SloEvent::Scrape);
                }
                SloEvent::Publish => {
                    self.publish(now);
                    self.agenda.plan(now + PUBLISH_MS, SloEvent::Publish);
                }
            }
        }
        Ok(())
    }

    /// Is it sent to anybody?
    fn arrives(&mut self, at: usize, now: f64) -> bool {
        let Some(flight) = self.flights.get_mut(at) else { return false };
        let request = Request {
            model: "m",
            priority: flight.class.priority,
            prompt_tokens: flight.prompt,
            max_tokens: Some(OUTPUT),
            slo: flight.slo(),
            prediction_based: true,
            ..Request::default()
        };
        let unmatched = [0; SLOWDOWNS.len()];
        let local = LocalState { matched_blocks: &unmatched, ..LocalState::new(&self.ledger) };
        let picked = match self.by {
            SloPolicy::Turns => {
                self.turn += 1;
                self.snapshot.indices().nth(self.turn % SLOWDOWNS.len())
            }
            SloPolicy::Slo(_) | SloPolicy::Scored(_) => match schedule(&self.snapshot, &request, local, &mut self.rng, None) {
                Decision::Route(route) => Some(route.ranked.first()),
                _ => None,
            },
        };
        let Some((index, endpoint)) = picked.and_then(|index| Some((index, *self.refs.get(index.get())?))) else {
            flight.shed = true;
            return false;
        };
        flight.conditions = Conditions::at_pick(&self.snapshot, &local, &request, index);
        flight.predicted = self.snapshot.latency().and_then(|model| model.predict(endpoint, &flight.conditions).ok());
        flight.endpoint = index.get();
        let promised = tracked_slo(&self.snapshot, &request, local, index);
        let mut ticket = self.ledger.admit_prompt(endpoint, flight.prompt, flight.prompt);
        self.ledger.track(&mut ticket, promised, "");
        flight.ticket = Some(ticket);
        if let Some(waiting) = self.waiting.get_mut(index.get()) {
            waiting.push_back(at);
        }
        let api_ms = self.engines.get(index.get()).map_or(0.0, |engine| engine.spec().api_ms);
        self.agenda.plan(now + api_ms, SloEvent::Submits(at));
        true
    }

    fn submits(&mut self, at: usize, now: f64) -> Result<(), String> {
        let Some(flight) = self.flights.get(at) else { return Ok(()) };
        let endpoint = flight.endpoint;
        let job =
            EngineJob { request: at as u32, prompt: flight.prompt, output: OUTPUT, blocks: &[], hashes: &[], adapter: 0, prefilled: false };
        if let Some(engine) = self.engines.get_mut(endpoint) {
            engine.submit(job, now)?;
        }
        self.start_step(endpoint, now)
    }

    fn start_step(&mut self, at: usize, now: f64) -> Result<(), String> {
        let Some(engine) = self.engines.get_mut(at).filter(|engine| engine.busy_until().is_none()) else { return Ok(()) };
        let Some(ends) = engine.start(now, &mut |_, _| {})? else { return Ok(()) };
        self.agenda.plan(ends, SloEvent::StepEnds(at));
        let waits = self.waiting.get(at).is_none_or(|waiting| !waiting.is_empty());
        if let (Some(endpoint), Some(gap)) = (self.refs.get(at).filter(|_| !waits), self.gaps.get_mut(at)) {
            let EndpointLoad { requests, decode_tokens, .. } = self.ledger.load(*endpoint);
            *gap = Some(TokenGap { batch: requests as f32, context_tokens: decode_tokens as f32, gap_ms: (ends - now) as f32 });
        }
        Ok(())
    }

    /// How many requests ended.
    fn step_ends(&mut self, at: usize, now: f64, events: &mut Vec<StepEvent>) -> Result<usize, String> {
        let Some(engine) = self.engines.get_mut(at) else { return Ok(0) };
        engine.end(events)?;
        let (ledger, flights) = (&mut self.ledger, &mut self.flights);
        engine.progress(&mut |request, _| {
            let ticket = flights.get_mut(request as usize).filter(|flight| flight.first < now).and_then(|flight| flight.ticket.as_mut());
            ticket.into_iter().for_each(|ticket| ledger.decoded(ticket, 1));
        });
        let mut ended = 0;
        for event in events.drain(..) {
            match event {
                StepEvent::First(request) => self.first_token(at, request as usize, now),
                StepEvent::Done(request) => {
                    self.done(at, request as usize, now);
                    ended += 1;
                }
            }
        }
        self.start_step(at, now)?;
        Ok(ended)
    }

    fn first_token(&mut self, at: usize, request: usize, now: f64) {
        let Some(flight) = self.flights.get_mut(request) else { return };
        flight.first = now;
        if let Some(ticket) = &mut flight.ticket {
            self.ledger.first_token(ticket, flight.prompt);
        }
        let (Some(waiting), Some(last)) = (self.waiting.get_mut(at), self.last_first.get_mut(at)) else { return };
        let first_in_line = waiting.front() == Some(&request);
        waiting.retain(|other| *other != request);
        let service_ms = (now - flight.at.max(*last)) as f32;
        *last = now;
        let Some(endpoint) = self.refs.get(at).filter(|_| first_in_line) else { return };
        let first_token = FirstToken { uncached_tokens: flight.prompt as f32, prompt_tokens: flight.prompt as f32, service_ms };
        self.learner.observe(&Observation { first_token: Some(first_token), ..bare(*endpoint, flight.conditions) }, None);
    }

    fn done(&mut self, at: usize, request: usize, now: f64) {
        let (Some(flight), Some(endpoint)) = (self.flights.get_mut(request), self.refs.get(at)) else { return };
        flight.end = now;
        flight.ticket.take().into_iter().for_each(|ticket| self.ledger.release(ticket));
        let observation = Observation {
            ttft_ms: Some((flight.first - flight.at) as f32),
            tpot_ms: Some(flight.tpot_ms() as f32),
            output_tokens: Some(OUTPUT),
            gap: self.gaps.get_mut(at).and_then(Option::take),
            ..bare(*endpoint, flight.conditions)
        };
        self.learner.observe(&observation, flight.predicted.as_ref());
    }

    fn scrape(&mut self) {
        let metrics = self.engines.iter().map(|engine| {
            let (waiting, running) = engine.counts();
            EndpointMetrics {
                queue_depth: Some(waiting as f32),
                running_requests: Some(running as f32),
                kv_cache_utilization: Some(engine.kv_utilization() as f32),
                ..EndpointMetrics::default()
            }
        });
        if let Ok(snapshot) = self.snapshot.with_metrics(Version::default(), metrics.collect()) {
            self.snapshot = snapshot;
        }
        self.ledger.scraped(&self.refs);
    }

    fn publish(&mut self, now: f64) {
        let metrics = self.snapshot.metrics().to_vec();
        let Ok(snapshot) = self.snapshot.with_metrics(Version::default(), metrics) else { return };
        let snapshot = snapshot.with_step(Arc::new(self.learner.step()));
        self.snapshot = match self.learner.publish(now as u64) {
            Some(model) => snapshot.with_latency(Some(Arc::new(model))),
            None => snapshot,
        };
    }
}

fn bare(endpoint: EndpointRef, conditions: Conditions) -> Observation {
    let (ttft_ms, tpot_ms, output_tokens, first_token, gap) = (None, None, None, None, None);
    Observation { endpoint, conditions, ended: RequestEnd::Done, ttft_ms, tpot_ms, output_tokens, first_token, gap }
}

fn endpoint(at: usize) -> Endpoint {
    Endpoint {
        id: EndpointRef { slot: Slot(u16::try_from(at).unwrap_or(u16::MAX)), generation: Generation(1) },
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

    /// As in the end-to-end test: critical requests ask for what only the fast engines can do.
    fn of(name: &str, seed: u64) -> BTreeMap<&'static str, ClassOutcome> {
        run(&SloPolicy::named(name).unwrap(), (0.9 * capacity().unwrap(), 30.0), seed).unwrap()
    }

    #[test]
    fn critical_requests_are_in_time_where_without_slos_they_are_late_and_only_others_are_shed() {
        for by in ["slo", "slo:headroomSelectionStrategy=most"] {
            let ours = of(by, 1)["critical"];
            assert!(ours.attainment() >= 0.95 && ours.shed == 0, "{by}: {ours:?}");
        }
        for by in ["default", "weighed", "turns"] {
            assert!(of(by, 1)["critical"].attainment() < 0.95, "{by}: where it is not late, this shows nothing");
        }
    }

    #[test]
    fn a_seed_is_a_run_and_another_is_another() {
        assert_eq!(of("slo", 2), of("slo", 2));
        assert_ne!(of("default", 2), of("default", 3));
        assert!(SloPolicy::named("best").is_err() && SloPolicy::named("slo:least").is_err() && SloPolicy::named("slo:nothing=1").is_err());
    }
}
