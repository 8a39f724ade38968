//! One run in virtual time, with proxies, engines and the daemon. The daemon gives the proxies
//! metrics and the step model that it has learned.
//!
//! ```text
//!  arrival ─► a proxy picks ─(api)─► engine steps ─► first token, end ─► that proxy's ledger
//!                  │                                                        │
//!                  └──── load reports and placements, `sharing` ms later ───┴─► the other proxies
//!  every `scrape` ms: metrics of all engines, and the step model learned so far, to all proxies
//! ```

mod change;
mod closed;
mod endpoints;
mod queued;
mod room;
mod scrape;
mod setting;
mod sharing;
mod steps;
#[cfg(test)]
mod tests;
use change::PoolChange;
use endpoints::endpoint;
use scrape::{EngineState, idle_states};
pub(crate) use setting::{Failover, PoolSetting, SettingChange, SharingMode};

use pool_state::LedgerHold;
use scheduler::{Endpoint, EndpointMetrics, EndpointRef, Pipeline, Snapshot, Version};

use crate::engine::{EngineJob, SimulatedEngine};
use crate::event_queue::EventQueue;
use crate::learning::SimulatedLearner;
use crate::policy::RoutingPolicy;
use crate::router::{PolicyRouter, ProxyRequest, ProxyUpdate, SimulatedPick};
use crate::workload::{Sampler, Workload};

/// The outcome of a request. Times are in ms, and lengths are in tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RequestOutcome {
    pub(crate) at: f64,
    pub(crate) ttft: f64,
    /// The time from the request's arrival to its last token.
    pub(crate) e2e: f64,
    pub(crate) prompt: u32,
    pub(crate) output: u32,
    /// The number of tokens of the prompt that the engine had cached.
    pub(crate) cached: u32,
    /// The time when the proxy sent the request to an engine. The field `engine` names this engine.
    pub(crate) sent: f64,
    pub(crate) engine: usize,
    pub(crate) proxy: usize,
    /// Whether the engine had no room for the request, given all requests that all proxies had sent
    /// to the engine. See [`Simulation::has_room`].
    pub(crate) is_beyond: bool,
    /// Whether the request failed because its engine died or its client aborted it. The times of a
    /// failed request are [`FAILED_MS`].
    pub(crate) has_failed: bool,
}

#[derive(Debug)]
enum WorldEvent {
    Arrives {
        request: u32,
        engine: usize,
    },
    /// The client of a closed session sends this request to a proxy.
    Sends {
        request: u32,
    },
    StepEnds {
        engine: usize,
    },
    Scrape,
    /// An update from one proxy reaches the other proxies.
    Published {
        from: usize,
        update: ProxyUpdate,
    },
    Changes(PoolChange),
    /// The client of a closed session aborts this request if its reply is not complete.
    TimesOut {
        request: u32,
    },
    /// The proxy sends a request again, after the request's engine has died.
    SendsAgain {
        request: u32,
        proxy: usize,
    },
    /// The proxy's next [`PolicyRouter::tick`] is due.
    Tick {
        proxy: usize,
    },
}

/// A request in flight.
struct SimulatedRequest {
    /// The request's entries in the in-flight ledger of its proxy.
    hold: LedgerHold,
    proxy: usize,
    at: usize,
    /// The output tokens that the ledger has counted so far.
    published: u32,
    prompt: PrefillLocation,
}

/// The engine that computes a prompt.
enum PrefillLocation {
    /// The engine that decodes also computes the prompt.
    Decoder,
    /// Another engine, at this position, computes the prompt.
    At(usize),
    /// Another engine, at this position, has computed the prompt and transferred the KV.
    Transferred(usize),
}

struct Simulation<'w> {
    setting: &'w PoolSetting,
    workload: &'w Workload,
    policy: &'w RoutingPolicy,
    engines: Vec<SimulatedEngine<'w>>,
    states: Vec<EngineState>,
    routers: Vec<PolicyRouter>,
    snapshot: Snapshot,
    learning: SimulatedLearner,
    records: Vec<RequestOutcome>,
    in_flight: Vec<Option<SimulatedRequest>>,
    events: EventQueue<WorldEvent>,
}

/// The time for which clients of closed sessions wait for a reply, in ms. All times of a failed
/// request have this value.
pub(crate) const FAILED_MS: f64 = 60_000.0;

/// Runs a workload to its end. Returns the outcome of each request, in
/// the order of the workload.
///
/// # Errors
/// Fails when the pipeline is invalid, when the policy picks no endpoint, or when the pool lacks an
/// engine that the setting needs.
pub(crate) fn run(
    workload: &Workload,
    policy: &RoutingPolicy,
    setting: &PoolSetting,
    seed: u64,
) -> Result<Vec<RequestOutcome>, String> {
    let pipeline = Pipeline::build(&policy.pipeline(setting.prefillers > 0)?)
        .map_err(|error| error.to_string())?;
    let mut world = Simulation::new(workload, policy, setting, pipeline, seed)?;
    world.play(&mut Sampler::seeded(seed ^ 0x5eed))?;
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
        let metrics = vec![EndpointMetrics::default(); count];
        let snapshot = Snapshot::try_new(Version::default(), endpoints, metrics, pipeline)
            .map_err(|error| error.to_string())?;
        let shares = matches!(setting.sharing, SharingMode::After(_));
        let router = |number| {
            PolicyRouter::new(
                seed.wrapping_mul(1_000) + number as u64,
                number,
                setting.proxies,
                shares,
                policy.gate(),
            )
        };
        let requests = workload.requests().len();
        let mut world = Self {
            setting,
            workload,
            policy,
            engines: setting.specs().map(SimulatedEngine::new).collect(),
            states: vec![EngineState::default(); count],
            routers: (0..setting.proxies).map(router).collect(),
            snapshot,
            learning: SimulatedLearner::new(count),
            records: vec![RequestOutcome::default(); requests],
            in_flight: (0..requests).map(|_| None).collect(),
            events: EventQueue::default(),
        };
        world.install();
        // The proxies need metrics, because the first request may arrive before the first scrape.
        world.scrape(0.0);
        world.states = idle_states(count, setting.idle_scrape_ms, seed);
        Ok(world)
    }

    fn play(&mut self, dice: &mut Sampler) -> Result<(), String> {
        let arrivals = self.arrivals();
        if self.setting.scrape_ms > 0.0 {
            self.events.plan(0.0, WorldEvent::Scrape);
        }
        self.plan_changes();
        let mut next = 0;
        let mut left = self.workload.requests().len();
        let mut events = Vec::new();
        while left > 0 {
            if let Some(&(at, request)) = arrivals
                .get(next)
                .filter(|(at, _)| *at <= self.events.next_at())
            {
                let proxy = self.proxy_of_arrival(next, dice);
                self.pick(request, proxy, at)?;
                self.publish_all(at);
                next += 1;
                continue;
            }
            let now = match self.events.next()? {
                (now, WorldEvent::StepEnds { engine }) => {
                    left -= self.step_ends(engine, now, &mut events);
                    now
                }
                (now, other) => {
                    left -= self.handle(other, now)?;
                    now
                }
            };
            self.release(now)?;
            self.publish_all(now);
        }
        Ok(())
    }

    /// Handles an event. Returns how many requests ended with the event.
    fn handle(&mut self, event: WorldEvent, now: f64) -> Result<usize, String> {
        match event {
            WorldEvent::Arrives { request, engine } => {
                let job = self.job_at(request, engine).filter(|_| self.is_up(engine));
                if let (Some(job), Some(at)) = (job, self.engines.get_mut(engine)) {
                    at.submit(job);
                    self.start_step(engine, now);
                }
            }
            WorldEvent::StepEnds { .. } => {}
            WorldEvent::Sends { request } => {
                self.pick(request, self.proxy_of_turn(request), now)?;
            }
            WorldEvent::Scrape => {
                self.scrape(now);
                self.events
                    .plan(now + self.setting.scrape_ms, WorldEvent::Scrape);
            }
            WorldEvent::Published { from, update } => {
                let others = self
                    .routers
                    .iter_mut()
                    .enumerate()
                    .filter(|(to, _)| *to != from);
                others.for_each(|(_, router)| router.receive(from, &update, now));
            }
            WorldEvent::Changes(change) => return self.changes(change, now),
            WorldEvent::TimesOut { request } => return Ok(self.fails(request, now)),
            WorldEvent::SendsAgain { request, proxy } => self.pick(request, proxy, now)?,
            WorldEvent::Tick { proxy } => self
                .routers
                .get_mut(proxy)
                .into_iter()
                .for_each(PolicyRouter::tick),
        }
        Ok(0)
    }

    /// Returns the part of the request that this engine computes, which is only the prompt if
    /// another engine decodes.
    fn job_at(&self, request: u32, engine: usize) -> Option<EngineJob<'w>> {
        let job = self.workload.job(request)?;
        let flight = self.in_flight.get(request as usize)?.as_ref()?;
        Some(match flight.prompt {
            PrefillLocation::At(at) if at == engine => EngineJob { output: 1, ..job },
            PrefillLocation::Transferred(_) => EngineJob {
                prefilled: true,
                ..job
            },
            _ => job,
        })
    }

    fn pick(&mut self, request: u32, proxy: usize, now: f64) -> Result<(), String> {
        if self.setting.scrape_ms <= 0.0 {
            self.scrape(now);
        }
        let (Some(job), Some(router)) = (self.workload.job(request), self.routers.get_mut(proxy))
        else {
            return Err(format!("no request {request} or no proxy {proxy}"));
        };
        let picked = router.pick(
            self.policy,
            ProxyRequest {
                job: &job,
                class: self.workload.class(request),
            },
            &self.engines,
            now,
        )?;
        if let Some(record) = self.records.get_mut(request as usize) {
            // A request that is sent again keeps the time of its first arrival at a proxy.
            let is_first = record.sent <= 0.0;
            let at = if is_first { now } else { record.at };
            if is_first && self.workload.is_closed {
                self.events
                    .plan(now + FAILED_MS, WorldEvent::TimesOut { request });
            }
            *record = RequestOutcome {
                at,
                prompt: job.prompt,
                output: job.output,
                ..RequestOutcome::default()
            };
        }
        match picked {
            Some(picked) => self.dispatch(job, proxy, picked, now),
            None if self.policy.gate().is_some() => self.release(now),
            None => {
                self.publish(proxy, now);
                Ok(())
            }
        }
    }

    /// Sends a request to the engine that the proxy picked.
    fn dispatch(
        &mut self,
        job: EngineJob<'w>,
        proxy: usize,
        picked: SimulatedPick,
        now: f64,
    ) -> Result<(), String> {
        let SimulatedPick { at, prefill, hold } = picked;
        let request = job.request;
        let uncached = u32::try_from(hold.uncached_tokens()).unwrap_or(job.prompt);
        let prompt_tokens = self
            .policy
            .prompt_tokens(&job, self.workload.class(request));
        let prefiller = prefill.unwrap_or(at);
        self.learning
            .picked(prefiller, request, now, uncached, prompt_tokens);
        let prompt = prefill.map_or(PrefillLocation::Decoder, PrefillLocation::At);
        let is_beyond = prefill.is_none() && !self.has_room(&job, at, &hold);
        if let Some(record) = self.records.get_mut(request as usize) {
            record.sent = now;
            record.engine = at;
            record.proxy = proxy;
            record.is_beyond = is_beyond;
        }
        if let Some(place) = self.in_flight.get_mut(request as usize) {
            *place = Some(SimulatedRequest {
                hold,
                proxy,
                at,
                published: 0,
                prompt,
            });
        }
        if let Some(state) = self.states.get_mut(at) {
            state.picked();
        }
        self.send(job, prefill.unwrap_or(at), now)?;
        self.publish(proxy, now);
        Ok(())
    }

    fn send(&mut self, job: EngineJob<'w>, to: usize, now: f64) -> Result<(), String> {
        let engine = self
            .engines
            .get_mut(to)
            .ok_or("the policy picked an unknown engine")?;
        let arrives = now + engine.spec().api_ms;
        self.events.plan(
            arrives,
            WorldEvent::Arrives {
                request: job.request,
                engine: to,
            },
        );
        Ok(())
    }

    fn endpoint(&self, at: usize) -> Option<EndpointRef> {
        self.snapshot
            .endpoints()
            .get(at)
            .map(|endpoint| endpoint.id)
    }

    fn install(&mut self) {
        self.routers
            .iter_mut()
            .for_each(|router| router.install(&self.snapshot));
    }
}
