//! The signals that the campaign compares, and the autoscaler that follows them.
//!
//! A horizontal pod autoscaler (HPA) with its default behaviour follows the signals of Switchpoint
//! and of llm-d. The oracle, which knows all future requests, sets the number of replicas without
//! an HPA.

use std::collections::VecDeque;

use learning::scaling::{
    OutstandingWork, ReportedRequests, ScalingGoal, ScalingGroup, ScalingRole, TrafficTotals,
    TrafficWindow, signal,
};
use scheduler::in_flight::EndpointLoad;
use scheduler::latency::step::StepModel;

use super::limits::{REPLICAS_MAX, REPLICAS_MIN, TTFT_SLO_S};
use super::traffic::{ArrivingRequest, LASTING_S, TrafficShape, seats, seconds};
use crate::hardware::QWEN_32B_H200;

/// A scaling signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum ScalingRule {
    /// `switchpoint_desired_replicas`. The value of a setting is the number of spare replicas. A
    /// negative value means no spare replicas, and a higher target than 1 for the HPA, which then
    /// sets fewer replicas than desired.
    Ours,
    /// Requests waiting in the engines, for each replica.
    QueueLength,
    /// llm-d's `flow_control_pool_saturation` (utilization-detector).
    #[value(name = "llm-d-saturation")]
    Saturation,
    /// llm-d's token backlog: seconds of prefill for each replica, and KV usage of 0.8.
    #[value(name = "llm-d-token-backlog")]
    TokenBacklog,
    /// llm-d's `request_running`, for each replica.
    #[value(name = "llm-d-running-requests")]
    RunningRequests,
    /// Knows all future requests. The setting is the utilization.
    Oracle,
}

/// The setting of a signal. Each setting gives one point on the signal's curve of attainment and
/// cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ScalingSetting {
    /// The target value of the signal, unless [`ScalingRule`] gives the value another meaning.
    pub(crate) value: f64,
    /// The HPA's stabilization window for scaling down, in seconds, or 0 without an HPA.
    pub(crate) window_s: f64,
}

/// One run: its traffic, its signal and the signal's setting.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScalingRun {
    pub(super) shape: TrafficShape,
    /// The time from the order of a replica until the replica is ready, in s.
    pub(super) startup_s: f64,
    pub(super) rule: ScalingRule,
    pub(super) setting: ScalingSetting,
    pub(super) seed: u64,
}

/// The data of one ready engine, which signals read.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EngineSample {
    pub(super) waiting: f64,
    pub(super) running: f64,
    pub(super) kv: f64,
    pub(super) load: EndpointLoad,
}

/// The data of the pool at one moment.
pub(super) struct PoolSample<'s> {
    pub(super) now_s: f64,
    pub(super) engines: Vec<EngineSample>,
    /// For each replica that starts, the seconds since the autoscaler ordered the replica.
    pub(super) starting: Vec<f64>,
    pub(super) totals: TrafficTotals,
    pub(super) step: &'s StepModel,
}

/// An autoscaler and its signal, with the state of both.
pub(super) struct Autoscaler {
    rule: ScalingRule,
    setting: ScalingSetting,
    startup_s: f64,
    window: TrafficWindow,
    /// For the oracle: the seconds of work of the requests that arrive in each [`Self::TICK_S`].
    future: Vec<f64>,
    /// The HPA's recommendations within the stabilization window: time in s, and number of
    /// replicas.
    recommended: VecDeque<(f64, usize)>,
}

/// A metric and its target, in one of the two forms that the HPA knows.
#[derive(Clone, Copy, Debug)]
enum HpaMetric {
    /// The form `AverageValue`: the sum over the pool, and the target for one replica.
    Average(f64, f64),
    /// The form `Value`: a number for the whole pool, and the target for this number.
    Value(f64, f64),
}

// === impl ScalingRule ===

impl ScalingRule {
    /// Returns the settings to compare, in the order of their expected number of replicas: fewest
    /// first within each window.
    pub(crate) fn settings(self) -> Vec<ScalingSetting> {
        let with = |values: &[f64], window_s| {
            values
                .iter()
                .map(move |&value| ScalingSetting { value, window_s })
                .collect::<Vec<_>>()
        };
        let (usual, short): (&[f64], &[f64]) = match self {
            Self::Ours => (
                &[-1.0, -0.6, -0.4, -0.2, 0.0, 0.5, 1.0, 2.0, 3.0, 4.0],
                &[-0.4, -0.2, 0.0],
            ),
            Self::QueueLength => (&[10.0, 5.0, 1.0, 0.25], &[10.0, 5.0, 1.0, 0.25]),
            Self::Saturation => (&[0.8, 0.6, 0.4, 0.2], &[0.8, 0.6, 0.4, 0.2]),
            Self::TokenBacklog => (&[1.5, 0.75, 0.4, 0.15], &[1.5, 0.75, 0.4, 0.15]),
            Self::RunningRequests => (&[64.0, 48.0, 32.0, 16.0], &[64.0, 48.0, 32.0, 16.0]),
            Self::Oracle => return with(&[1.1, 0.95, 0.8, 0.65], 0.0),
        };
        [
            with(short, ScalingSetting::SHORT_WINDOW_S),
            with(usual, ScalingSetting::WINDOW_S),
        ]
        .concat()
    }
}

// === impl ScalingSetting ===

impl ScalingSetting {
    /// The HPA's default stabilization window for scaling down, in seconds.
    const WINDOW_S: f64 = 300.0;

    const SHORT_WINDOW_S: f64 = 60.0;

    /// Returns [`ScalingGoal::drain_s`] for Switchpoint's signal. With the short window the signal
    /// drains queues within 30 s. With the default window it drains them within 60 s, or within 10
    /// min for the cheapest settings, which have negative values.
    fn drain_s(self) -> f64 {
        match (self.window_s < Self::WINDOW_S, self.value < 0.0) {
            (true, _) => 30.0,
            (false, true) => 600.0,
            (false, false) => 60.0,
        }
    }
}

// === impl Autoscaler ===

impl Autoscaler {
    /// The interval at which a rule reads the pool's state, in s, as in Switchpoint's daemon.
    pub(super) const TICK_S: f64 = 5.0;

    /// The number of ticks between two actions of the HPA. Its default sync period is 15 s.
    const HPA_TICKS: u64 = 3;

    /// The HPA's default tolerance: a smaller relative deviation from the target changes nothing.
    const TOLERANCE: f64 = 0.1;

    /// The number of ticks over which the oracle averages the work of requests.
    const AHEAD_TICKS: usize = 6;

    pub(super) fn new(run: &ScalingRun, requests: &[ArrivingRequest]) -> Self {
        let ScalingRun {
            rule,
            setting,
            startup_s,
            ..
        } = *run;
        let mut future = vec![0.0; (LASTING_S / Self::TICK_S) as usize + 1];
        for request in requests.iter().filter(|_| rule == ScalingRule::Oracle) {
            if let Some(bin) = future.get_mut((request.at / 1e3 / Self::TICK_S) as usize) {
                *bin += seconds(f64::from(request.prompt), f64::from(request.output));
            }
        }
        let window = TrafficWindow::default();
        Self {
            rule,
            setting,
            startup_s,
            window,
            future,
            recommended: VecDeque::new(),
        }
    }

    /// Returns the number of replicas that the autoscaler orders at this tick. The argument `tick`
    /// is the number of the call.
    pub(super) fn replicas(&mut self, tick: u64, pool: &PoolSample<'_>) -> usize {
        let ordered = pool.engines.len() + pool.starting.len();
        self.window.record(pool.now_s, pool.totals);
        let wanted = match self.rule {
            ScalingRule::Oracle => self.foreseen(pool.now_s),
            _ if !tick.is_multiple_of(Self::HPA_TICKS) => ordered,
            _ => {
                let wanted = self
                    .metrics(pool)
                    .into_iter()
                    .map(|metric| metric.replicas(pool.engines.len(), ordered))
                    .max();
                self.stabilized(pool.now_s, ordered, wanted.unwrap_or(ordered))
            }
        };
        wanted.clamp(REPLICAS_MIN, REPLICAS_MAX)
    }

    fn metrics(&self, pool: &PoolSample<'_>) -> Vec<HpaMetric> {
        let sum = |of: fn(&EngineSample) -> f64| pool.engines.iter().map(of).sum::<f64>();
        match self.rule {
            ScalingRule::Ours => vec![HpaMetric::Average(
                self.ours(pool),
                1.0 - self.setting.value.min(0.0),
            )],
            ScalingRule::QueueLength => {
                vec![HpaMetric::Average(sum(|e| e.waiting), self.setting.value)]
            }
            ScalingRule::Saturation => {
                let saturation =
                    sum(|e| (e.waiting / 5.0).max(e.kv / 0.8)) / pool.engines.len().max(1) as f64;
                vec![HpaMetric::Value(saturation, self.setting.value)]
            }
            ScalingRule::TokenBacklog => {
                let peak = QWEN_32B_H200.budget as f64
                    / QWEN_32B_H200.times.cold_ms(8192, QWEN_32B_H200.budget)
                    * 1e3;
                let backlog_s = sum(|e| e.load.prefills.uncached_tokens as f64) / peak;
                vec![
                    HpaMetric::Average(backlog_s, self.setting.value),
                    HpaMetric::Average(sum(|e| e.kv), 0.8),
                ]
            }
            ScalingRule::RunningRequests => vec![HpaMetric::Average(
                sum(|e| f64::from(e.load.requests)),
                self.setting.value,
            )],
            ScalingRule::Oracle => Vec::new(),
        }
    }

    fn ours(&self, pool: &PoolSample<'_>) -> f64 {
        let endpoints: Vec<OutstandingWork> = pool
            .engines
            .iter()
            .map(|engine| OutstandingWork {
                speed: (1.0, 1.0),
                requests: f64::from(engine.load.requests),
                prompts: f64::from(engine.load.prefills.prompts),
                uncached_tokens: engine.load.prefills.uncached_tokens as f64,
                reported: Some(ReportedRequests {
                    waiting: engine.waiting,
                    running: engine.running,
                }),
            })
            .collect();
        let group = ScalingGroup {
            role: ScalingRole::Both,
            step: pool.step,
            mix: self.window.mix(f64::from(pool.step.output_tokens())),
            owners: &[],
            measured: self.window.is_measured(),
            seats: seats(),
            endpoints: &endpoints,
            starting: &pool.starting,
            held: 0.0,
        };
        let goal = ScalingGoal {
            ttft_s: TTFT_SLO_S,
            drain_s: self.setting.drain_s(),
            startup_s: self.startup_s,
            spare: self.setting.value.max(0.0),
            replicas: (REPLICAS_MIN as u32, REPLICAS_MAX as u32),
        };
        signal(&group, &goal).desired
    }

    /// Applies the behaviour of an HPA. In one step, the HPA at most doubles the number of replicas
    /// or adds four. It removes replicas only if all recommendations within the window are lower.
    fn stabilized(&mut self, now_s: f64, ordered: usize, wanted: usize) -> usize {
        self.recommended.push_back((now_s, wanted));
        while self
            .recommended
            .pop_front_if(|(at, _)| now_s - *at > self.setting.window_s)
            .is_some()
        {}
        if wanted >= ordered {
            return wanted.min((2 * ordered).max(ordered + 4));
        }
        let highest = self.recommended.iter().map(|(_, replicas)| *replicas).max();
        highest.unwrap_or(wanted).min(ordered)
    }

    /// Returns the number of replicas that the arriving requests need at the busiest moment until a
    /// replica ordered at the next tick is ready.
    fn foreseen(&self, now_s: f64) -> usize {
        let from = (now_s / Self::TICK_S) as usize;
        let ahead = (self.startup_s / Self::TICK_S) as usize + 2;
        let bins = self
            .future
            .get(from.min(self.future.len())..)
            .unwrap_or_default();
        let sums = bins
            .windows(Self::AHEAD_TICKS)
            .take(ahead)
            .map(|bins| bins.iter().sum::<f64>());
        let busiest = sums.fold(0.0, f64::max) / (Self::AHEAD_TICKS as f64 * Self::TICK_S);
        (busiest / self.setting.value).ceil() as usize
    }
}

// === impl HpaMetric ===

impl HpaMetric {
    /// Applies the HPA's formula. Returns the current number if the deviation is within the
    /// tolerance.
    fn replicas(self, ready: usize, ordered: usize) -> usize {
        let (ratio, wanted) = match self {
            Self::Average(sum, target) => (sum / (target * ordered as f64), sum / target),
            Self::Value(value, target) => (value / target, value / target * ready as f64),
        };
        if (ratio - 1.0).abs() <= Autoscaler::TOLERANCE {
            ordered
        } else {
            wanted.ceil() as usize
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(rule: ScalingRule, window_s: f64, startup_s: f64) -> ScalingRun {
        ScalingRun {
            shape: TrafficShape::Day,
            startup_s,
            rule,
            setting: ScalingSetting {
                value: 1.0,
                window_s,
            },
            seed: 1,
        }
    }

    #[test]
    fn the_autoscaler_follows_the_formula_of_kubernetes() {
        for (metric, ready, ordered, expected) in [
            (HpaMetric::Average(10.0, 2.0), 3, 3, 5),
            (HpaMetric::Average(6.5, 2.0), 3, 3, 3),
            (HpaMetric::Average(0.0, 2.0), 3, 3, 0),
            (HpaMetric::Value(1.5, 1.0), 4, 6, 6),
            (HpaMetric::Value(1.05, 1.0), 4, 6, 6),
            (HpaMetric::Value(0.5, 1.0), 4, 4, 2),
        ] {
            assert_eq!(metric.replicas(ready, ordered), expected, "{metric:?}");
        }
        let mut scaler = Autoscaler::new(&run(ScalingRule::QueueLength, 300.0, 30.0), &[]);
        assert_eq!(scaler.stabilized(0.0, 2, 30), 6);
        assert_eq!(
            scaler.stabilized(15.0, 10, 3),
            10,
            "the window has a higher recommendation"
        );
        assert_eq!(scaler.stabilized(300.0, 10, 4), 10);
        assert_eq!(scaler.stabilized(315.0, 10, 2), 4);
    }

    #[test]
    fn the_oracle_orders_before_the_burst() {
        let burst = |at: f64| ArrivingRequest {
            at,
            prompt: 4_000,
            output: 100,
        };
        let requests: Vec<ArrivingRequest> = (0..600)
            .map(|n| burst(600_000.0 + f64::from(n) * 100.0))
            .collect();
        let scaler = Autoscaler::new(&run(ScalingRule::Oracle, 0.0, 60.0), &requests);
        assert_eq!(scaler.foreseen(300.0), 0);
        assert!(scaler.foreseen(545.0) >= 4 && scaler.foreseen(700.0) == 0);
    }
}
