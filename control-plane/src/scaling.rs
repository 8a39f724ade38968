//! The scaling signal of each group of endpoints. A group has one pool, role and list of models.
//!
//! ```text
//!  counters of all proxies and of ext_proc ── every 5 s ──▶ traffic of each group ─┐
//!  counters, metrics and step model now ───────────────────────────────────────────┴─▶ learning::scaling ──▶ /metrics, /debug/scaling, KEDA
//! ```
//! Only the traffic is stored. Groups are computed from the current view of a pool when they are
//! read, so a group that no longer exists leaves no series behind.

mod goal;
mod traffic;
pub use goal::ScalingRequest;
use traffic::{GroupTraffic, RecordedTraffic};

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use discovery::InstanceState;
use learning::scaling::{
    EngineSeats, OutstandingWork, ReportedRequests, RequestMix, ScalingGoal, ScalingGroup,
    ScalingRole, ScalingSignal, TrafficWindow, signal,
};
use scheduler::latency::step::StepModel;
use scheduler::{EndpointMetrics, Pipeline, ROLE_LABEL};
use tokio::time::{Instant, MissedTickBehavior};

use crate::learn::learned_pools::LearnedPools;
use crate::pool::discovery_source::DiscoverySetup;
use crate::pool::writer::PoolMember;
use crate::shutdown::Shutdown;
use crate::state::counters::{CounterTotals, EndpointTotals};
use crate::state::life::DaemonLife;
use crate::state::pool_views::PoolTable;
use crate::state::reports::RequestReports;

/// The interval at which traffic is recorded. The interval is short enough to notice a burst within
/// an autoscaler's interval of 15 s. Proxies report once a second.
pub const SAMPLE_INTERVAL: Duration = Duration::from_secs(5);

/// The maximum time that an endpoint may take to start. An endpoint that is not ready after this
/// time is broken.
const STARTING_MAX: Duration = Duration::from_mins(15);

/// The maximum length of the label that lists a group's models, in bytes.
const MODELS_LABEL_BYTES_MAX: usize = 256;

/// The signals of all pools.
#[derive(Debug)]
pub struct ScalingSignals {
    /// The goal for pools whose KEDA trigger sets no goal of its own.
    pub goal: ScalingGoal,
    inputs: ScalingInputs,
    began: Instant,
    pools: Mutex<BTreeMap<Arc<str>, RecordedTraffic>>,
}

/// The tables from which the signals are computed.
#[derive(Debug)]
pub struct ScalingInputs {
    pub life: Arc<DaemonLife>,
    pub pools: Arc<PoolTable>,
    pub reports: Arc<RequestReports>,
    pub learned: Arc<LearnedPools>,
    pub discovery: Arc<DiscoverySetup>,
}

/// A role, and the models that its endpoints serve; an empty list means any model.
pub type GroupKey = (ScalingRole, Arc<[Box<str>]>);

/// The endpoints of a group, and the data on their work.
#[derive(Clone, Debug)]
pub struct EndpointGroup {
    pub key: GroupKey,
    pub mix: RequestMix,
    /// The requests of each owner of proxies.
    owners: Vec<RequestMix>,
    pub endpoints: Vec<OutstandingWork>,
    /// The replicas that are starting: seconds since each was first seen.
    pub starting: Arc<[f64]>,
    /// The requests that proxies hold for the group, estimated from its share of the arriving
    /// requests.
    pub held: f64,
    measured: bool,
    step: Arc<StepModel>,
    seats: EngineSeats,
}

/// Returns the role and the models of an endpoint; `None` if the endpoint serves no stage with a
/// step model.
fn key(member: &PoolMember) -> Option<GroupKey> {
    let role = member
        .instance
        .labels
        .iter()
        .find(|(label, _)| label == ROLE_LABEL)
        .map(|(_, role)| role.as_str());
    Some((
        ScalingRole::from_label(role)?,
        Arc::clone(&member.metadata.models),
    ))
}

/// Returns the work in flight at an endpoint.
fn work(
    member: &PoolMember,
    metrics: &EndpointMetrics,
    totals: &CounterTotals,
    step: &StepModel,
) -> OutstandingWork {
    let row = totals
        .endpoints
        .get(&(member.id.generation, member.id.slot))
        .copied()
        .unwrap_or_default();
    let EndpointTotals {
        requests,
        prefill_tokens,
        prompts,
        ..
    } = row;
    let reported = || {
        let waiting = metrics.queue_depth?;
        let running = metrics.running_requests?;
        Some(ReportedRequests {
            waiting: waiting.into(),
            running: running.into(),
        })
    };
    OutstandingWork {
        speed: step.speed(member.id),
        requests: float(requests),
        prompts: float(prompts),
        // If a configuration estimates outputs, `prefill_tokens` includes tokens of decoding
        // requests.
        uncached_tokens: if prompts > 0 {
            float(prefill_tokens)
        } else {
            0.0
        },
        reported: reported(),
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts of requests and tokens")]
fn float(count: u64) -> f64 {
    count as f64
}

// === impl ScalingSignals ===

impl ScalingSignals {
    #[must_use]
    pub fn new(goal: ScalingGoal, inputs: ScalingInputs) -> Arc<Self> {
        Arc::new(Self {
            goal,
            inputs,
            began: Instant::now(),
            pools: Mutex::default(),
        })
    }

    /// Records the traffic of all pools until `shutdown`.
    pub async fn run(self: Arc<Self>, mut shutdown: Shutdown) {
        let mut tick = tokio::time::interval(SAMPLE_INTERVAL);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                now = tick.tick() => self.record(now),
                () = shutdown.begun() => return,
            }
        }
    }

    /// Returns whether the daemon leads. Only a leader knows the requests of proxies.
    #[must_use]
    pub fn leads(&self) -> bool {
        self.inputs.life.leads()
    }

    /// Returns the current groups of each pool.
    pub fn by_pool(&self, now: Instant) -> impl Iterator<Item = (&Arc<str>, Vec<EndpointGroup>)> {
        let pools = self.inputs.pools.names.iter();
        pools.map(move |pool| (pool, self.groups(pool, now)))
    }

    /// Returns the current groups of a pool. The list is empty if the pool has no complete set of
    /// endpoints.
    #[must_use]
    pub fn groups(&self, pool: &str, now: Instant) -> Vec<EndpointGroup> {
        let Some(view) = self.inputs.pools.view(pool) else {
            return Vec::new();
        };
        let totals = self.inputs.reports.totals(pool, now);
        let step = self.inputs.learned.step_model(pool);
        let mut members: BTreeMap<GroupKey, Vec<(&PoolMember, &EndpointMetrics)>> = BTreeMap::new();
        for (member, metrics) in view.members.iter().zip(view.metrics.iter()) {
            if let Some(key) = key(member) {
                members.entry(key).or_default().push((member, metrics));
            }
        }
        // Discovery does not know the role and models of an endpoint that is not ready. So such
        // endpoints are counted only if the pool has one group.
        let starting: Arc<[f64]> = if members.len() == 1 {
            starting(&self.inputs.discovery, pool)
        } else {
            Vec::new()
        }
        .into();
        let requests_max = Pipeline::build(&view.pipeline)
            .ok()
            .and_then(|pipeline| pipeline.requests_max());
        let traffic = self.lock();
        let traffic = traffic.get(pool);
        let group = |(key, members): (GroupKey, Vec<(&PoolMember, &EndpointMetrics)>)| {
            let endpoints: Vec<OutstandingWork> = members
                .iter()
                .map(|(member, metrics)| work(member, metrics, &totals, &step))
                .collect();
            let traffic = traffic.and_then(|traffic| traffic.groups.get(&key));
            let output_tokens = f64::from(step.output_tokens());
            let owners: Vec<RequestMix> = traffic
                .map(|traffic| traffic.mixes(output_tokens))
                .unwrap_or_default()
                .into_iter()
                .map(|mix| with_prompts(mix, &endpoints))
                .collect();
            let mix = if owners.is_empty() {
                with_prompts(without_traffic(output_tokens), &endpoints)
            } else {
                RequestMix::joined(&owners)
            };
            let measured = traffic.is_some_and(GroupTraffic::is_measured);
            let seats = EngineSeats::from_metrics(&members.iter().map(|(_, metrics)| *metrics))
                .at_most(requests_max);
            let starting = Arc::clone(&starting);
            let step = Arc::clone(&step);
            EndpointGroup {
                key,
                mix,
                owners,
                endpoints,
                starting,
                held: 0.0,
                measured,
                step,
                seats,
            }
        };
        let mut groups: Vec<EndpointGroup> = members.into_iter().map(group).collect();
        share(
            &mut groups,
            float(totals.bands.values().map(|band| band.held).sum()),
        );
        groups
    }

    /// Returns whether requests of a pool were refused within the last minute.
    #[must_use]
    pub fn refuses(&self, pool: &str, now: Instant) -> bool {
        let refused_at = self.lock().get(pool).and_then(|traffic| traffic.refused_at);
        refused_at.is_some_and(|at| {
            now.saturating_duration_since(at).as_secs_f64() < TrafficWindow::LONG_S
        })
    }

    fn record(&self, now: Instant) {
        if !self.leads() {
            // Proxies report to the leader only: a new leader begins with a new window.
            self.lock().clear();
            return;
        }
        let at_s = now.saturating_duration_since(self.began).as_secs_f64();
        for view in self.inputs.pools.all() {
            let arrivals = self.inputs.reports.counters().take_arrivals(&view.name);
            let mut pools = self.lock();
            let pool = pools.entry(Arc::clone(&view.name)).or_default();
            if arrivals.values().any(|of_owner| of_owner.refused > 0) {
                pool.refused_at = Some(now);
            }
            pool.add(&view, &arrivals, at_s);
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, RecordedTraffic>> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// For each replica that discovery knows but that is not ready yet, returns for how many seconds it
/// has been starting.
fn starting(discovery: &DiscoverySetup, pool: &str) -> Vec<f64> {
    let components = discovery.components.get(pool).into_iter().flatten();
    let age = |since: SystemTime| {
        since
            .elapsed()
            .ok()
            .filter(|time| *time < STARTING_MAX)
            .map(|time| time.as_secs_f64())
    };
    let seen = components.flat_map(|(_, followed)| followed.seen());
    let starts = seen.filter(|seen| {
        matches!(
            seen.state,
            InstanceState::NotReady(_) | InstanceState::Pending(_)
        )
    });
    starts.filter_map(|seen| age(seen.since)).collect()
}

/// Distributes the requests that proxies hold among the groups, in proportion to the arrivals of
/// each group. The groups that prefill and the groups that decode each get all requests, because
/// every request needs both.
fn share(groups: &mut [EndpointGroup], held: f64) {
    for prefills in [true, false] {
        let mut of_stage: Vec<&mut EndpointGroup> = groups
            .iter_mut()
            .filter(|group| (group.key.0 == ScalingRole::Prefill) == prefills)
            .collect();
        let rate: f64 = of_stage.iter().map(|group| group.mix.per_second).sum();
        let count = float(of_stage.len() as u64);
        for group in &mut of_stage {
            group.held = held
                * if rate > 0.0 {
                    group.mix.per_second / rate
                } else {
                    1.0 / count
                };
        }
    }
}

/// Returns the mix of a group to which no request has been sent.
fn without_traffic(output_tokens: f64) -> RequestMix {
    RequestMix {
        output_tokens,
        ..RequestMix::default()
    }
}

/// Completes the mix with the prompts in flight, if engines report no usage.
fn with_prompts(mix: RequestMix, endpoints: &[OutstandingWork]) -> RequestMix {
    if mix.prompt_tokens > 0.0 {
        return mix;
    }
    let (prompts, tokens) = endpoints.iter().fold((0.0, 0.0), |(p, t), e| {
        (p + e.prompts, t + e.uncached_tokens)
    });
    let mean = if prompts > 0.0 { tokens / prompts } else { 0.0 };
    RequestMix {
        prompt_tokens: mean,
        uncached_tokens: mean,
        ..mix
    }
}

// === impl EndpointGroup ===

impl EndpointGroup {
    #[must_use]
    pub fn signal(&self, goal: &ScalingGoal) -> ScalingSignal {
        let Self {
            key: (role, _),
            mix,
            owners,
            endpoints,
            starting,
            held,
            measured,
            step,
            seats,
        } = self;
        let role = *role;
        let mix = *mix;
        let held = *held;
        let measured = *measured;
        let seats = *seats;
        signal(
            &ScalingGroup {
                role,
                step,
                mix,
                owners,
                measured,
                seats,
                endpoints,
                starting,
                held,
            },
            goal,
        )
    }

    /// Returns the models of the group for labels and pages, separated by commas.
    #[must_use]
    pub fn models(&self) -> String {
        let mut models = self.key.1.join(",");
        if models.len() > MODELS_LABEL_BYTES_MAX {
            models.truncate(models.floor_char_boundary(MODELS_LABEL_BYTES_MAX));
        }
        models
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(role: ScalingRole, per_second: f64) -> EndpointGroup {
        EndpointGroup {
            key: (role, Arc::new([])),
            mix: RequestMix {
                per_second,
                ..RequestMix::default()
            },
            owners: Vec::new(),
            endpoints: Vec::new(),
            starting: Arc::new([]),
            held: 0.0,
            measured: true,
            step: Arc::new(StepModel::from_parts(
                [10.0, 0.05, 1e-6],
                [10.0, 0.02, 1e-4],
                100.0,
            )),
            seats: EngineSeats::default(),
        }
    }

    #[test]
    fn requests_that_proxies_hold_are_shared_by_what_arrives() {
        use ScalingRole::{Both, Decode, Prefill};
        let held = |groups: &[(ScalingRole, f64)]| {
            let mut groups: Vec<EndpointGroup> = groups
                .iter()
                .map(|(role, rate)| group(*role, *rate))
                .collect();
            share(&mut groups, 12.0);
            groups.iter().map(|group| group.held).collect::<Vec<_>>()
        };
        assert_eq!(held(&[(Both, 3.0), (Both, 1.0)]), [9.0, 3.0]);
        assert_eq!(
            held(&[(Prefill, 5.0), (Decode, 5.0)]),
            [12.0, 12.0],
            "each request needs both"
        );
        assert_eq!(
            held(&[(Both, 0.0), (Both, 0.0)]),
            [6.0, 6.0],
            "nothing is known about the arrivals"
        );
        assert!(held(&[]).is_empty());
    }
}
