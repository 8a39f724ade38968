//! Simulates the daemon, which scrapes the engines, learns step times, and sends both to the
//! proxies.

use std::sync::Arc;

use scheduler::{EndpointMetrics, SEQUENCES_MAX_ATTRIBUTE, Version};

use super::Simulation;
use crate::policy::RoutingPolicy;
use crate::workload::{Sampler, mix};

/// The daemon's state of an engine. Times are in ms.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EngineState {
    pub(super) steps_made: u64,
    /// The number of requests that the last step left in the engine's queue.
    pub(super) left_waiting: usize,
    /// Whether a proxy has picked the endpoint after the proxies' last report.
    is_picked: bool,
    /// The time of the next report in which the proxies say at which engines they have requests.
    report_due: f64,
    /// The time until which the daemon considers the engine busy.
    busy_until: f64,
    /// The time before which the daemon does not scrape the engine.
    due: f64,
}

/// The time for which the daemon considers an engine busy after the engine had work, or after a
/// proxy reported requests at the engine, in ms.
const BUSY_HOLD_MS: f64 = 2_000.0;

/// The time between two reports from a proxy, ms.
const REPORT_MS: f64 = 1_000.0;

/// Returns the states of `count` idle engines. The first scrape of each engine is at a random time.
/// If the daemon scraped all engines just before the first session, the KV use of the first
/// requests would stay unknown for a whole second in every run.
pub(super) fn idle_states(count: usize, idle_ms: f64, seed: u64) -> Vec<EngineState> {
    let mut dice = Sampler::seeded(mix(seed, 53));
    let report_due = REPORT_MS * dice.unit();
    (0..count)
        .map(|_| EngineState {
            report_due,
            due: idle_ms * dice.unit(),
            ..EngineState::default()
        })
        .collect()
}

// === impl EngineState ===

impl EngineState {
    pub(super) fn picked(&mut self) {
        self.is_picked = true;
    }

    /// Simulates the proxies' report about the engine, once in [`REPORT_MS`]. If the proxies have
    /// requests at the engine, or had requests there since the last report, the daemon scrapes the
    /// engine within `busy_ms`.
    fn report(&mut self, has_work: bool, busy_ms: f64, now: f64) {
        if now < self.report_due {
            return;
        }
        self.report_due += REPORT_MS;
        let was_picked = std::mem::take(&mut self.is_picked);
        if has_work || was_picked {
            self.busy_until = now + BUSY_HOLD_MS;
            self.due = self.due.min(now + busy_ms);
        }
    }

    /// Whether the daemon scrapes the engine now. If so, sets the time of the next scrape.
    fn is_due(&mut self, has_work: bool, idle_ms: f64, now: f64) -> bool {
        if now < self.due {
            return false;
        }
        if has_work {
            self.busy_until = now + BUSY_HOLD_MS;
        }
        self.due = if now < self.busy_until {
            now
        } else {
            now + idle_ms
        };
        true
    }
}

impl Simulation<'_> {
    pub(super) fn scrape(&mut self, now: f64) {
        let states = self.states.iter_mut();
        let before = self.snapshot.metrics();
        let metrics =
            self.engines
                .iter()
                .zip(states)
                .zip(before)
                .map(|((engine, state), before)| {
                    let (waiting, running) = engine.counts();
                    let has_work = waiting + running > 0;
                    state.report(has_work, self.setting.scrape_ms, now);
                    if !state.is_due(has_work, self.setting.idle_scrape_ms, now) {
                        return before.clone();
                    }
                    // Real engines accept and report new requests only between steps. In open
                    // workloads, simulated engines report new requests immediately, as in the
                    // published results.
                    let waiting = if self.workload.is_closed {
                        state.left_waiting
                    } else {
                        waiting
                    };
                    EndpointMetrics {
                        queue_depth: Some(waiting as f32),
                        running_requests: Some(running as f32),
                        kv_cache_utilization: Some(engine.kv_utilization() as f32),
                        kv_blocks: u32::try_from(engine.spec().kv_blocks).ok(),
                        kv_block_tokens: u32::try_from(engine.spec().block_tokens).ok(),
                        attributes: Box::new([(
                            SEQUENCES_MAX_ATTRIBUTE.into(),
                            engine.spec().sequences_max as f32,
                        )]),
                        ..EndpointMetrics::default()
                    }
                });
        let step = Arc::new(match self.policy {
            RoutingPolicy::Exact(_) => {
                let endpoints = self.snapshot.endpoints().iter().map(|endpoint| endpoint.id);
                self.learning.exact_model(
                    endpoints.zip(self.engines.iter().map(|engine| engine.spec().times)),
                )
            }
            _ => self.learning.publish(now),
        });
        if let Ok(snapshot) = self
            .snapshot
            .with_metrics(Version::default(), metrics.collect())
        {
            self.snapshot = snapshot.with_step(step);
        }
        self.routers
            .iter_mut()
            .for_each(|router| router.refresh(&self.snapshot, now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_without_work_is_scraped_less_often() {
        let mut state = EngineState::default();
        let due = |state: &mut EngineState, has_work, at: &[f64]| {
            at.iter()
                .map(|&now| state.is_due(has_work, 1_000.0, now))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            due(&mut state, false, &[0.0, 100.0, 900.0, 1_000.0, 1_100.0]),
            [true, false, false, true, false]
        );
        assert_eq!(
            due(&mut state, true, &[1_900.0, 2_000.0, 2_100.0]),
            [false, true, true],
            "the time was decided before"
        );
        assert_eq!(
            due(&mut state, false, &[4_000.0, 4_100.0, 4_200.0, 5_100.0]),
            [true, true, false, true],
            "it is busy for 2 s more"
        );
    }

    #[test]
    fn a_report_brings_the_next_scrape_of_a_picked_engine_forward() {
        let mut state = EngineState {
            report_due: 300.0,
            due: 900.0,
            ..EngineState::default()
        };
        let due = |state: &mut EngineState, now| {
            state.report(false, 100.0, now);
            state.is_due(false, 1_000.0, now)
        };
        state.picked();
        assert_eq!(
            [200.0, 300.0, 400.0].map(|now| due(&mut state, now)),
            [false, false, true]
        );
        assert_eq!(
            [2_200.0, 2_300.0, 2_400.0, 3_300.0].map(|now| due(&mut state, now)),
            [true, true, false, true],
            "no pick since"
        );
    }

    #[test]
    fn idle_engines_are_scraped_at_different_times() {
        let due = |seed| {
            idle_states(8, 1_000.0, seed)
                .iter()
                .map(|state| state.due)
                .collect::<Vec<_>>()
        };
        assert!(due(1) != due(2) && due(1).iter().all(|due| (0.0..1_000.0).contains(due)));
        assert!(
            idle_states(8, 0.0, 1).iter().all(|state| state.due <= 0.0),
            "without a longer time, every scrape has all"
        );
    }
}
