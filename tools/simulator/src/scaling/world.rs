//! One run of the scaling campaign, with a pool to which replicas are added and from which replicas
//! are removed.
//!
//! ```text
//!  arrival ─► the default policy picks among ready replicas ─► engine steps ─► first token, end
//!  every 5 s: the autoscaler reads the pool and orders replicas, which are ready `startup` later
//! ```

use learning::scaling::TrafficTotals;
use pool_state::{LedgerHold, ManagedPool};
use scheduler::{EndpointMetrics, EndpointRef, Pipeline, PipelineSpec, Request, Snapshot, Version};

use super::limits::{TPOT_SLO_S, TTFT_SLO_S};
use super::rules::{Autoscaler, EngineSample, PoolSample, ScalingRun};
use super::traffic::{ArrivingRequest, LASTING_S};
use crate::engine::{BLOCK_TOKENS, EngineJob, StepEvent};
use crate::event_queue::{EventQueue, virtual_time};
use crate::hardware::QWEN_32B_H200;
use crate::learning::SimulatedLearner;

mod replicas;
use replicas::{Replica, ReplicaState};

/// The time between two scrapes of the metrics, ms.
const SCRAPE_MS: f64 = 1_000.0;

/// The number of steps of an engine after which the ledger gets the engine's output.
const PROGRESS_STEPS: u64 = 16;

/// The figures of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ScalingOutcome {
    /// The share of the requests that met both SLOs.
    pub(crate) attainment: f64,
    /// The sum of the hours of all replicas, each from its order to its end.
    pub(crate) gpu_hours: f64,
}

#[derive(Clone, Copy, Debug)]
enum ScalingEvent {
    Submits { request: u32, at: usize },
    StepEnds { at: usize },
    Scrape,
    Tick,
    Started { at: usize, generation: u32 },
}

/// A request in flight.
struct AwaitedRequest {
    hold: LedgerHold,
    first: f64,
    published: u32,
}

struct ScalingWorld<'w> {
    requests: &'w [ArrivingRequest],
    replicas: Vec<Replica<'w>>,
    pool: ManagedPool,
    learner: SimulatedLearner,
    autoscaler: Autoscaler,
    startup_ms: f64,
    pending: Vec<Option<AwaitedRequest>>,
    events: EventQueue<ScalingEvent>,
    totals: TrafficTotals,
    ticks: u64,
    replica_ms: f64,
    good: usize,
}

// === impl ScalingRun ===

impl ScalingRun {
    /// Plays the run.
    ///
    /// # Errors
    /// Fails when an engine or the pool refuses a request.
    pub(super) fn play(&self) -> Result<ScalingOutcome, String> {
        let requests = self.shape.requests(self.seed);
        let mut world = ScalingWorld::new(self, &requests)?;
        world.play()?;
        Ok(ScalingOutcome {
            attainment: world.good as f64 / requests.len().max(1) as f64,
            gpu_hours: world.replica_ms / 3.6e6,
        })
    }
}

// === impl ScalingWorld ===

impl<'w> ScalingWorld<'w> {
    fn new(run: &ScalingRun, requests: &'w [ArrivingRequest]) -> Result<Self, String> {
        let pipeline =
            Pipeline::build(&PipelineSpec::default()).map_err(|error| error.to_string())?;
        let replicas = replicas::at_start();
        let endpoints = replicas::endpoints(&replicas);
        let metrics = vec![EndpointMetrics::default(); replicas.len()];
        let snapshot = Snapshot::try_new(Version::default(), endpoints, metrics, pipeline)
            .map_err(|error| error.to_string())?;
        let mut pool = ManagedPool::new(run.seed ^ 0x5eed, 0);
        pool.install(snapshot, 0, u32::MAX);
        Ok(Self {
            requests,
            learner: SimulatedLearner::new(replicas.len()),
            replicas,
            pool,
            autoscaler: Autoscaler::new(run, requests),
            startup_ms: run.startup_s * 1e3,
            pending: requests.iter().map(|_| None).collect(),
            events: EventQueue::default(),
            totals: TrafficTotals::default(),
            ticks: 0,
            replica_ms: 0.0,
            good: 0,
        })
    }

    fn play(&mut self) -> Result<(), String> {
        let mut next = 0;
        let mut left = self.requests.len();
        let mut steps = Vec::new();
        self.events.plan(0.0, ScalingEvent::Scrape);
        self.events.plan(0.0, ScalingEvent::Tick);
        while left > 0 {
            if let Some(request) = self
                .requests
                .get(next)
                .filter(|request| request.at <= self.events.next_at())
            {
                self.arrives(next as u32, *request)?;
                next += 1;
                continue;
            }
            match self.events.next()? {
                (now, ScalingEvent::Submits { request, at }) => {
                    let job = self.job(request).ok_or("no such request")?;
                    self.replicas
                        .get_mut(at)
                        .ok_or("no such replica")?
                        .engine
                        .submit(job);
                    self.start_step(at, now);
                }
                (now, ScalingEvent::StepEnds { at }) => {
                    left -= self.step_ends(at, now, &mut steps);
                }
                (now, ScalingEvent::Scrape) => self.scrape(now),
                (now, ScalingEvent::Tick) => self.tick(now),
                (_, ScalingEvent::Started { at, generation }) => self.started(at, generation),
            }
        }
        let now = LASTING_S * 1e3;
        (0..self.replicas.len()).for_each(|at| self.end(at, now));
        Ok(())
    }

    fn job(&self, request: u32) -> Option<EngineJob<'w>> {
        let &ArrivingRequest { prompt, output, .. } = self.requests.get(request as usize)?;
        Some(EngineJob {
            request,
            prompt,
            output,
            blocks: &[],
            hashes: &[],
            prefilled: false,
        })
    }

    fn arrives(
        &mut self,
        number: u32,
        ArrivingRequest {
            at: now, prompt, ..
        }: ArrivingRequest,
    ) -> Result<(), String> {
        let request = Request {
            model: "m",
            prompt_tokens: prompt,
            ..Request::default()
        };
        let time = virtual_time(now);
        let plan = self
            .pool
            .plan(&request, time, &mut ())
            .map_err(|refusal| format!("{refusal:?}"))?;
        let endpoint = plan.endpoint();
        let picked = self
            .pool
            .commit(plan, &request, endpoint, time)
            .map_err(|stale| format!("{stale:?}"))?;
        let at = usize::from(
            picked
                .ranked
                .first()
                .ok_or("an empty ranked list")?
                .0
                .slot
                .0,
        );
        self.totals.picked += 1.0;
        self.learner.picked(at, number, now, prompt, prompt);
        if let Some(pending) = self.pending.get_mut(number as usize) {
            *pending = Some(AwaitedRequest {
                hold: picked.hold,
                first: f64::INFINITY,
                published: 0,
            });
        }
        self.replicas
            .get_mut(at)
            .ok_or("no such replica")?
            .in_flight += 1;
        self.events.plan(
            now + QWEN_32B_H200.api_ms,
            ScalingEvent::Submits {
                request: number,
                at,
            },
        );
        Ok(())
    }

    fn start_step(&mut self, at: usize, now: f64) {
        let Some(replica) = self
            .replicas
            .get_mut(at)
            .filter(|replica| replica.engine.busy_until().is_none())
        else {
            return;
        };
        if let Some(ends) = replica.engine.start(now, |_, _| ()) {
            self.events.plan(ends, ScalingEvent::StepEnds { at });
        }
    }

    /// Ends a replica's step. Returns how many requests ended with the step.
    fn step_ends(&mut self, at: usize, now: f64, steps: &mut Vec<StepEvent>) -> usize {
        let Some(replica) = self.replicas.get_mut(at) else {
            return 0;
        };
        replica.engine.end(steps);
        replica.steps += 1;
        let publishes = replica.steps.is_multiple_of(PROGRESS_STEPS);
        if publishes {
            let pool = &mut self.pool;
            let pending = &mut self.pending;
            replica.engine.progress(|request, generated| {
                if let Some(Some(request)) =
                    pending.get_mut(request as usize).filter(|_| generated > 0)
                {
                    pool.record_output(
                        &mut request.hold,
                        generated.saturating_sub(request.published),
                        virtual_time(now),
                    );
                    request.published = generated;
                }
            });
        }
        let mut ended = 0;
        for event in steps.drain(..) {
            match event {
                StepEvent::First(request) => self.first_token(at, request, now),
                StepEvent::Done(request) => {
                    self.done(at, request, now);
                    ended += 1;
                }
            }
        }
        self.start_step(at, now);
        let ends = self
            .replicas
            .get(at)
            .and_then(|replica| replica.engine.busy_until())
            .filter(|_| publishes);
        if let (Some(ends), Some(endpoint)) = (ends, self.endpoint(at)) {
            self.learner.gap(
                at,
                endpoint,
                self.pool.in_flight().load(endpoint),
                ends - now,
            );
        }
        ended
    }

    fn endpoint(&self, at: usize) -> Option<EndpointRef> {
        Some(self.pool.snapshot()?.endpoints().get(at)?.id)
    }

    fn first_token(&mut self, at: usize, number: u32, now: f64) {
        self.learner.first_token(at, self.endpoint(at), number, now);
        let (Some(Some(pending)), Some(request)) = (
            self.pending.get_mut(number as usize),
            self.requests.get(number as usize),
        ) else {
            return;
        };
        pending.first = now;
        pending.published = 1;
        self.pool
            .record_first_token(&mut pending.hold, request.prompt, virtual_time(now));
    }

    fn done(&mut self, at: usize, number: u32, now: f64) {
        let pending = self.pending.get_mut(number as usize).and_then(Option::take);
        let (Some(pending), Some(request)) = (pending, self.requests.get(number as usize)) else {
            return;
        };
        self.pool.release(pending.hold, virtual_time(now));
        let endpoint = self
            .pool
            .snapshot()
            .and_then(|pool| pool.endpoints().get(at));
        self.learner
            .output(endpoint.map(|endpoint| endpoint.id), request.output);
        let tpot_ms = (now - pending.first) / f64::from(request.output.saturating_sub(1).max(1));
        self.good += usize::from(
            pending.first - request.at <= TTFT_SLO_S * 1e3 && tpot_ms <= TPOT_SLO_S * 1e3,
        );
        self.totals.ended += 1.0;
        self.totals.prompt_tokens += f64::from(request.prompt);
        self.totals.output_tokens += f64::from(request.output);
        let Some(replica) = self.replicas.get_mut(at) else {
            return;
        };
        replica.in_flight -= 1;
        if replica.state == ReplicaState::Draining && replica.in_flight == 0 {
            self.end(at, now);
        }
    }

    fn scrape(&mut self, now: f64) {
        self.events.plan(now + SCRAPE_MS, ScalingEvent::Scrape);
        let metrics = self.replicas.iter().map(|replica| {
            let (waiting, running) = replica.engine.counts();
            EndpointMetrics {
                queue_depth: Some(waiting as f32),
                running_requests: Some(running as f32),
                kv_cache_utilization: Some(replica.engine.kv_utilization() as f32),
                kv_blocks: u32::try_from(QWEN_32B_H200.kv_blocks).ok(),
                kv_block_tokens: u32::try_from(BLOCK_TOKENS).ok(),
                ..EndpointMetrics::default()
            }
        });
        let metrics = metrics.collect();
        let newer = self
            .pool
            .snapshot()
            .and_then(|snapshot| snapshot.with_metrics(Version::default(), metrics).ok());
        newer
            .into_iter()
            .for_each(|snapshot| self.pool.refresh(snapshot, virtual_time(now)));
        self.pool.install_models(self.learner.publish(now), None);
    }

    fn tick(&mut self, now: f64) {
        self.events
            .plan(now + Autoscaler::TICK_S * 1e3, ScalingEvent::Tick);
        if now >= LASTING_S * 1e3 {
            return;
        }
        let step = self.learner.publish(now);
        let engines: Vec<EngineSample> = (0..self.replicas.len())
            .filter_map(|at| self.sample(at))
            .collect();
        let starts = self
            .replicas
            .iter()
            .filter(|replica| replica.state == ReplicaState::Starting);
        let starting: Vec<f64> = starts
            .map(|replica| (now - replica.ordered_at) / 1e3)
            .collect();
        let ordered = engines.len() + starting.len();
        let pool = PoolSample {
            now_s: now / 1e3,
            engines,
            starting,
            totals: self.totals,
            step: &step,
        };
        let wanted = self.autoscaler.replicas(self.ticks, &pool);
        self.ticks += 1;
        for _ in ordered..wanted {
            self.order(now);
        }
        for _ in wanted..ordered {
            self.remove(now);
        }
        if ordered != wanted {
            self.install();
        }
    }

    fn sample(&self, at: usize) -> Option<EngineSample> {
        let engine = &self
            .replicas
            .get(at)
            .filter(|replica| replica.state == ReplicaState::Ready)?
            .engine;
        let (waiting, running) = engine.counts();
        let load = self.pool.in_flight().load(self.endpoint(at)?);
        Some(EngineSample {
            waiting: waiting as f64,
            running: running as f64,
            kv: engine.kv_utilization(),
            load,
        })
    }
}
