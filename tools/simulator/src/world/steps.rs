//! The steps of engines: first tokens, ends of requests, and the samples that proxies and the
//! learner get from them.

use super::{PrefillLocation, SimulatedRequest, Simulation, WorldEvent};
use crate::engine::StepEvent;

/// The number of an engine's steps after which the proxies get its counts of output tokens: about
/// every tenth of a second.
const PROGRESS_STEPS: u64 = 16;

/// The time to transfer a prompt's KV to another engine, in ms: a constant, and the time for each
/// token, which has 128 KiB at 50 GB/s.
const TRANSFER_MS: f64 = 1.0;
const TRANSFER_TOKEN_MS: f64 = 0.0026;

impl Simulation<'_> {
    pub(super) fn start_step(&mut self, at: usize, now: f64) {
        let Some(engine) = self
            .engines
            .get_mut(at)
            .filter(|engine| engine.busy_until().is_none())
        else {
            return;
        };
        let records = &mut self.records;
        let ends = engine.start(now, |request, cached| {
            if let Some(record) = records.get_mut(request as usize) {
                record.cached = record.cached.max(cached);
            }
        });
        if let Some(state) = self.states.get_mut(at) {
            state.left_waiting = engine.counts().0;
        }
        if let Some(ends) = ends {
            self.events.plan(ends, WorldEvent::StepEnds { engine: at });
        }
    }

    /// Ends an engine's step. Returns how many requests ended with the step.
    pub(super) fn step_ends(&mut self, at: usize, now: f64, events: &mut Vec<StepEvent>) -> usize {
        let Some(engine) = self.engines.get_mut(at) else {
            return 0;
        };
        engine.end(events);
        let mut ended = 0;
        for event in events.drain(..) {
            match event {
                StepEvent::First(request) if self.prefills(request, at) => {}
                StepEvent::Done(request) if self.prefills(request, at) => {
                    self.prefilled(request, now);
                }
                StepEvent::First(request) => self.first_token(at, request, now),
                StepEvent::Done(request) => {
                    self.done(request, now);
                    ended += 1;
                }
            }
        }
        let steps = self.states.get_mut(at).map_or(0, |state| {
            state.steps_made += 1;
            state.steps_made
        });
        if steps.is_multiple_of(PROGRESS_STEPS) {
            self.progress(at, now);
        }
        self.start_step(at, now);
        if steps.is_multiple_of(PROGRESS_STEPS) {
            self.gap(at, now);
        }
        ended
    }

    /// Whether this engine computes only the request's prompt.
    fn prefills(&self, request: u32, engine: usize) -> bool {
        let flight = self
            .in_flight
            .get(request as usize)
            .and_then(Option::as_ref);
        flight
            .is_some_and(|flight| matches!(flight.prompt, PrefillLocation::At(at) if at == engine))
    }

    /// Transfers the KV of a prompt that another engine has computed to the engine that decodes.
    fn prefilled(&mut self, request: u32, now: f64) {
        let (Some(job), Some(Some(flight))) = (
            self.workload.job(request),
            self.in_flight.get_mut(request as usize),
        ) else {
            return;
        };
        let proxy = flight.proxy;
        let at = flight.at;
        if let PrefillLocation::At(prefiller) = flight.prompt {
            flight.prompt = PrefillLocation::Transferred(prefiller);
        }
        if let Some(router) = self.routers.get_mut(proxy) {
            router.prefill_done(&mut flight.hold);
        }
        let arrives = now + TRANSFER_MS + TRANSFER_TOKEN_MS * f64::from(job.prompt);
        self.events.plan(
            arrives,
            WorldEvent::Arrives {
                request,
                engine: at,
            },
        );
        self.publish(proxy, now);
    }

    fn first_token(&mut self, at: usize, request: u32, now: f64) {
        let Some(record) = self.records.get_mut(request as usize) else {
            return;
        };
        record.ttft = now - record.at;
        let prompt = self.workload.job(request).map_or(record.prompt, |job| {
            self.policy
                .prompt_tokens(&job, self.workload.class(request))
        });
        let Some(Some(flight)) = self.in_flight.get_mut(request as usize) else {
            return;
        };
        flight.published = 1;
        let proxy = flight.proxy;
        let prefiller = if let PrefillLocation::Transferred(from) = flight.prompt {
            from
        } else {
            at
        };
        // The first token shows the proxy that the engine that computed the prompt is done.
        self.learning
            .first_token(prefiller, self.endpoint(prefiller), request, now);
        let Some(Some(flight)) = self.in_flight.get_mut(request as usize) else {
            return;
        };
        if let (Some(router), Some(job)) = (self.routers.get_mut(proxy), self.workload.job(request))
        {
            router.first_token(&mut flight.hold, prompt, job.hashes, now);
        }
        self.publish(proxy, now);
    }

    fn done(&mut self, request: u32, now: f64) {
        let flight = self
            .in_flight
            .get(request as usize)
            .and_then(Option::as_ref);
        let endpoint = flight.and_then(|flight| self.endpoint(flight.at));
        if let Some(record) = self.records.get_mut(request as usize) {
            record.e2e = now - record.at;
            self.learning.output(endpoint, record.output);
        }
        let Some(SimulatedRequest { hold, proxy, .. }) = self
            .in_flight
            .get_mut(request as usize)
            .and_then(Option::take)
        else {
            return;
        };
        let job = self.workload.job(request);
        let record = self.records.get(request as usize);
        if let (Some(router), Some(job), Some(record)) = (self.routers.get_mut(proxy), job, record)
        {
            router.done(hold, &job, record.cached, now);
        }
        self.publish(proxy, now);
        self.plan_next_turn(request, now);
    }

    /// Updates the proxies' ledgers with the output of an engine's streams. (A real proxy counts
    /// every token immediately, and other proxies get the counts with the next load report.)
    fn progress(&mut self, at: usize, now: f64) {
        let Some(engine) = self.engines.get(at) else {
            return;
        };
        let in_flight = &mut self.in_flight;
        let routers = &mut self.routers;
        engine.progress(|request, generated| {
            if let Some(Some(flight)) = in_flight.get_mut(request as usize)
                && let Some(router) = routers.get_mut(flight.proxy)
                && flight.at == at
                && generated > flight.published
            {
                router.output(&mut flight.hold, generated - flight.published, now);
                flight.published = generated;
            }
        });
    }

    /// Gives the learner the next gap between tokens of an engine's streams as a sample. Of the
    /// proxies' views of the engine's load, the sample has the one with the most requests.
    fn gap(&mut self, at: usize, now: f64) {
        let (Some(engine), Some(endpoint)) = (self.engines.get(at), self.endpoint(at)) else {
            return;
        };
        let Some(ends) = engine.busy_until() else {
            return;
        };
        let loads = self.routers.iter().map(|router| router.load(endpoint));
        if let Some(load) = loads.max_by_key(|load| load.requests) {
            self.learning.gap(at, endpoint, load, ends - now);
        }
    }
}
