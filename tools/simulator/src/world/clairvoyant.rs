//! The clairvoyant: it knows all arrivals, prompts, output lengths and pauses before the run
//! begins, and true caches and step times.
//!
//! A plan names the engine of each request. The first plans are what the best of a few policies do.
//! The search goes through the requests in the order in which they are sent. For each it tries a
//! few other engines, for this request and the later ones of its session, and plays the run to its
//! end with each. A better plan takes the place of the one before. So the result is never worse
//! than what those policies do, in the sum over all requests of TTFT and time to the end. It is no
//! bound: the search moves one session at a time, and stops after a few rounds.

use crate::engine::{SimulatedEngine, StepEvent};
use crate::event_queue::EventQueue;
use crate::policy::{OURS, RoutingPolicy, greedy_cost};
use crate::workload::Workload;

use super::PoolSetting;

/// The policies that make first plans, and how many of these are improved, each by itself: where
/// caches are small, the better plan may grow from the worse one.
const IMPROVED: usize = 2;
const FIRST: [&str; 4] = [OURS, "oracle", "session-affinity", "lmetric"];

/// How often the search goes through all requests.
const ROUNDS: usize = 2;

/// Other engines that are tried for a request: those with the lowest greedy cost.
const TRIED: usize = 3;

/// A plan is given up while it is played when the requests that have ended cost more than as many
/// of the best plan, by this share of the cost of that whole plan and at least so many ms.
const HOPELESS: f64 = 0.002;
const HOPELESS_MS: f64 = 1_000.0;

#[derive(Clone, Copy, Debug)]
enum PlannedEvent {
    Sends { request: u32 },
    Arrives { request: u32, engine: usize },
    StepEnds { engine: usize },
}

/// A plan that was played.
struct EnginePlan {
    /// By request.
    engines: Vec<usize>,
    /// See [`PlannedRun::costs`].
    costs: Vec<f64>,
}

/// A run that can be copied: engines without proxies. Clients wait without a limit.
#[derive(Clone)]
struct PlannedRun<'w> {
    workload: &'w Workload,
    engines: Vec<SimulatedEngine<'w>>,
    events: EventQueue<PlannedEvent>,
    /// When each request was sent, ms.
    sent: Vec<f64>,
    /// The times so far to first tokens and to ends, all together, ms.
    cost: f64,
    /// The cost when each request ended, in the order of the ends.
    costs: Vec<f64>,
}

/// The best plan that was found: the engine of each request.
///
/// # Errors
/// When the pool changes during the run, or some engines only compute prompts.
pub(super) fn plan(
    workload: &Workload,
    setting: &PoolSetting,
    seed: u64,
) -> Result<Vec<usize>, String> {
    if setting.change.is_some() || setting.prefillers > 0 {
        return Err("the clairvoyant has no changes of the pool and no prefill engines".to_owned());
    }
    let start = PlannedRun::new(workload, setting);
    let first = |policy: &str| {
        let outcomes = super::run(workload, &RoutingPolicy::named(policy)?, setting, seed)?;
        EnginePlan::played(
            outcomes.iter().map(|outcome| outcome.engine).collect(),
            &start,
        )
    };
    let mut plans = FIRST
        .into_iter()
        .map(first)
        .collect::<Result<Vec<_>, String>>()?;
    plans.sort_by(|a, b| a.cost().total_cmp(&b.cost()));
    plans.truncate(IMPROVED);
    for plan in &mut plans {
        (0..ROUNDS).try_for_each(|_| plan.improve(start.clone()))?;
    }
    let best = plans
        .into_iter()
        .min_by(|a, b| a.cost().total_cmp(&b.cost()));
    best.map(|plan| plan.engines)
        .ok_or_else(|| "no policy makes a first plan".to_owned())
}

// === impl EnginePlan ===

impl EnginePlan {
    fn played(engines: Vec<usize>, start: &PlannedRun<'_>) -> Result<Self, String> {
        let costs = start
            .clone()
            .rest(&engines, None)?
            .ok_or("a first plan is never given up")?;
        Ok(Self { engines, costs })
    }

    /// The cost of the whole plan, ms.
    fn cost(&self) -> f64 {
        self.costs.last().copied().unwrap_or_default()
    }

    /// Goes through all requests once, from the start of the run.
    fn improve(&mut self, mut present: PlannedRun<'_>) -> Result<(), String> {
        while let Some((request, now)) = present.next_sent()? {
            for engine in present.promising(request, now, self.engines.get(request as usize)) {
                let mut engines = self.engines.clone();
                present.turns_from(request).for_each(|turn| {
                    engines
                        .iter_mut()
                        .skip(turn)
                        .take(1)
                        .for_each(|at| *at = engine);
                });
                let mut future = present.clone();
                future.send(request, now, &engines);
                let other = future
                    .rest(&engines, Some(self))?
                    .map(|costs| Self { engines, costs });
                if let Some(other) = other.filter(|other| other.cost() < self.cost()) {
                    *self = other;
                }
            }
            present.send(request, now, &self.engines);
        }
        Ok(())
    }
}

// === impl PlannedRun ===

impl<'w> PlannedRun<'w> {
    fn new(workload: &'w Workload, setting: &PoolSetting) -> Self {
        let mut events = EventQueue::default();
        for (request, number) in workload
            .requests()
            .iter()
            .zip(0..)
            .filter(|(request, _)| request.pause_ms.is_none())
        {
            events.plan(request.at, PlannedEvent::Sends { request: number });
        }
        let engines = setting.specs().map(SimulatedEngine::new).collect();
        Self {
            workload,
            engines,
            events,
            sent: vec![0.0; workload.requests().len()],
            cost: 0.0,
            costs: Vec::new(),
        }
    }

    /// Plays until a request is sent; returns it and when that is. `None` at the end of the run.
    fn next_sent(&mut self) -> Result<Option<(u32, f64)>, String> {
        while self.events.next_at().is_finite() {
            let (now, event) = self.events.next()?;
            match event {
                PlannedEvent::Sends { request } => return Ok(Some((request, now))),
                PlannedEvent::Arrives { request, engine } => {
                    if let (Some(job), Some(at)) =
                        (self.workload.job(request), self.engines.get_mut(engine))
                    {
                        at.submit(job);
                        self.start_step(engine, now);
                    }
                }
                PlannedEvent::StepEnds { engine } => self.step_ends(engine, now),
            }
        }
        Ok(None)
    }

    fn send(&mut self, request: u32, now: f64, engines: &[usize]) {
        let (Some(&at), Some(job)) = (engines.get(request as usize), self.workload.job(request))
        else {
            return;
        };
        if let (Some(engine), Some(sent)) = (
            self.engines.get_mut(at),
            self.sent.get_mut(request as usize),
        ) {
            *sent = now;
            engine.announce(job);
            self.events.plan(
                now + engine.spec().api_ms,
                PlannedEvent::Arrives {
                    request,
                    engine: at,
                },
            );
        }
    }

    /// Plays the plan to the end of the run. Returns the costs; `None` if it is given up.
    fn rest(
        mut self,
        engines: &[usize],
        best: Option<&EnginePlan>,
    ) -> Result<Option<Vec<f64>>, String> {
        while let Some((request, now)) = self.next_sent()? {
            if best.is_some_and(|best| self.is_hopeless(best)) {
                return Ok(None);
            }
            self.send(request, now, engines);
        }
        Ok(Some(self.costs))
    }

    fn is_hopeless(&self, best: &EnginePlan) -> bool {
        let ended = best.costs.iter().zip(&self.costs).next_back();
        ended.is_some_and(|(least, cost)| *cost > least + (HOPELESS * best.cost()).max(HOPELESS_MS))
    }

    fn start_step(&mut self, at: usize, now: f64) {
        let Some(engine) = self
            .engines
            .get_mut(at)
            .filter(|engine| engine.busy_until().is_none())
        else {
            return;
        };
        if let Some(ends) = engine.start(now, |_, _| ()) {
            self.events
                .plan(ends, PlannedEvent::StepEnds { engine: at });
        }
    }

    fn step_ends(&mut self, at: usize, now: f64) {
        let mut events = Vec::new();
        self.engines
            .get_mut(at)
            .into_iter()
            .for_each(|engine| engine.end(&mut events));
        for event in events {
            let (StepEvent::First(request) | StepEvent::Done(request)) = event;
            let ms = now - self.sent.get(request as usize).copied().unwrap_or_default();
            self.cost += ms;
            if let StepEvent::First(_) = event {
                continue;
            }
            self.costs.push(self.cost);
            if let Some(pause_ms) = self
                .workload
                .requests()
                .get(request as usize + 1)
                .and_then(|next| next.pause_ms)
            {
                self.events.plan(
                    now + pause_ms,
                    PlannedEvent::Sends {
                        request: request + 1,
                    },
                );
            }
        }
        self.start_step(at, now);
    }

    /// Engines to try for a request instead of `planned`.
    fn promising(&self, request: u32, now: f64, planned: Option<&usize>) -> Vec<usize> {
        let Some(job) = self.workload.job(request) else {
            return Vec::new();
        };
        let cost = |engine: &SimulatedEngine<'w>| {
            let (waiting, running) = engine.counts();
            greedy_cost(engine, &job, (waiting + running) as f64, now)
        };
        let others = self
            .engines
            .iter()
            .enumerate()
            .filter(|(at, _)| planned != Some(at));
        let mut costs: Vec<(f64, usize)> = others.map(|(at, engine)| (cost(engine), at)).collect();
        costs.sort_by(|a, b| a.0.total_cmp(&b.0));
        costs.into_iter().take(TRIED).map(|(_, at)| at).collect()
    }

    /// The numbers of the request and of the later ones of its closed session.
    fn turns_from(&self, request: u32) -> impl Iterator<Item = usize> + '_ {
        let first = request as usize;
        let later = self
            .workload
            .requests()
            .iter()
            .skip(first + 1)
            .take_while(|next| next.pause_ms.is_some());
        first..=first + later.count()
    }
}

#[cfg(test)]
mod tests {
    use engine_sim::EngineProfile;
    use race_cells::RaceWorkload;

    use super::*;
    use crate::policy::CLAIRVOYANT;
    use crate::workload::SESSION_BLOCK_TOKENS;
    use crate::world::{Failover, SettingChange, run};

    const SEED: u64 = 3;

    /// Two engines, and some twenty sessions.
    fn small() -> (Workload, PoolSetting) {
        let setting = PoolSetting {
            replicas: 2,
            ..PoolSetting::plain(EngineProfile::Qwen32bH200.spec(SESSION_BLOCK_TOKENS))
        };
        (
            Workload::of_sessions(&RaceWorkload::Chat.sessions(SEED, 2.5, 8.0)),
            setting,
        )
    }

    /// The engines that a policy picks, and the times to first tokens and to ends together.
    fn played(policy: &RoutingPolicy) -> (Vec<usize>, f64) {
        let (workload, setting) = small();
        let outcomes = run(&workload, policy, &setting, SEED).unwrap();
        let engines = outcomes.iter().map(|outcome| outcome.engine).collect();
        (
            engines,
            outcomes
                .iter()
                .map(|outcome| outcome.ttft + outcome.e2e)
                .sum(),
        )
    }

    #[test]
    fn a_planned_run_takes_as_long_as_the_run_that_it_repeats() {
        let (workload, setting) = small();
        for policy in FIRST {
            let (engines, ms) = played(&RoutingPolicy::named(policy).unwrap());
            let plan = EnginePlan::played(engines, &PlannedRun::new(&workload, &setting)).unwrap();
            assert!(
                (plan.cost() - ms).abs() < 1e-3,
                "{policy}: {} instead of {ms}",
                plan.cost()
            );
        }
    }

    #[test]
    fn knowing_the_arrivals_beats_every_policy_that_does_not() {
        let (engines, ms) = played(&RoutingPolicy::named(CLAIRVOYANT).unwrap());
        assert_eq!(
            played(&RoutingPolicy::Planned(engines.clone())),
            (engines.clone(), ms),
            "the plan is followed"
        );
        assert_eq!(
            played(&RoutingPolicy::named(CLAIRVOYANT).unwrap()).0,
            engines,
            "a seed gives the same plan"
        );
        for policy in FIRST {
            let theirs = played(&RoutingPolicy::named(policy).unwrap()).1;
            assert!(ms < theirs - 500.0, "{policy}: {ms} and {theirs}");
        }
    }

    #[test]
    fn a_pool_that_changes_has_no_plan() {
        let (workload, setting) = small();
        let setting = PoolSetting {
            change: Some(SettingChange {
                arrivals_ms: 8_000.0,
                failover: Failover {
                    retry_ms: 5.0,
                    readmits: true,
                },
            }),
            ..setting
        };
        assert!(plan(&workload, &setting, SEED).is_err());
    }
}
