//! The daemon scrapes the engines and learns step times, and the proxies get both.

use std::sync::Arc;

use scheduler::{EndpointMetrics, SEQUENCES_MAX_ATTRIBUTE, Version};

use super::Simulation;
use super::endpoints::lora;
use crate::policy::RoutingPolicy;

/// An engine as the daemon sees it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EngineState {
    pub(super) steps_made: u64,
    /// Requests that the last step left in the queue.
    pub(super) left_waiting: usize,
    /// Until then it counts as busy, ms.
    busy_until: f64,
    /// Before then it is not scraped, ms.
    due: f64,
}

/// How long an engine counts as busy after it had work or was picked, ms.
const BUSY_HOLD_MS: f64 = 2_000.0;

// === impl EngineState ===

impl EngineState {
    pub(super) fn picked(&mut self, now: f64) {
        self.busy_until = now + BUSY_HOLD_MS;
    }

    /// Whether it is scraped now, having work or not. The next time is decided then.
    fn is_due(&mut self, has_work: bool, idle_ms: f64, now: f64) -> bool {
        if now < self.due {
            return false;
        }
        if has_work {
            self.busy_until = now + BUSY_HOLD_MS;
        }
        self.due = if now < self.busy_until { now } else { now + idle_ms };
        true
    }
}

impl Simulation<'_> {
    pub(super) fn scrape(&mut self, now: f64) {
        let (states, before) = (self.states.iter_mut(), self.snapshot.metrics());
        let metrics = self.engines.iter().zip(states).zip(before).map(|((engine, state), before)| {
            let (waiting, running) = engine.counts();
            if !state.is_due(waiting + running > 0, self.setting.idle_scrape_ms, now) {
                return before.clone();
            }
            // An engine looks for new requests between its steps. Until then it does not report
            // them; of open workloads it does, which the published campaigns were run with.
            let waiting = if self.workload.is_closed { state.left_waiting } else { waiting };
            EndpointMetrics {
                queue_depth: Some(waiting as f32),
                running_requests: Some(running as f32),
                kv_cache_utilization: Some(engine.kv_utilization() as f32),
                kv_blocks: u32::try_from(engine.spec().kv_blocks).ok(),
                kv_block_tokens: u32::try_from(engine.spec().block_tokens).ok(),
                lora: lora(engine.as_ref()),
                attributes: Box::new([(SEQUENCES_MAX_ATTRIBUTE.into(), engine.spec().sequences_max as f32)]),
            }
        });
        let step = Arc::new(match self.policy {
            RoutingPolicy::Exact(_) => {
                let endpoints = self.snapshot.endpoints().iter().map(|endpoint| endpoint.id);
                self.learning.exact_model(endpoints.zip(self.engines.iter().map(|engine| engine.spec().times)))
            }
            _ => self.learning.publish(),
        });
        if let Ok(snapshot) = self.snapshot.with_metrics(Version::default(), metrics.collect()) {
            self.snapshot = snapshot.with_step(step);
        }
        self.routers.iter_mut().for_each(|router| router.refresh(&self.snapshot, now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_without_work_is_scraped_less_often() {
        let mut state = EngineState::default();
        let due =
            |state: &mut EngineState, has_work, at: &[f64]| at.iter().map(|&now| state.is_due(has_work, 1_000.0, now)).collect::<Vec<_>>();
        assert_eq!(due(&mut state, false, &[0.0, 100.0, 900.0, 1_000.0, 1_100.0]), [true, false, false, true, false]);
        state.picked(1_500.0);
        assert_eq!(due(&mut state, true, &[1_600.0, 2_000.0, 2_100.0]), [false, true, true], "the time was decided before");
        assert_eq!(due(&mut state, false, &[2_200.0, 4_100.0, 4_200.0, 5_100.0]), [true, true, false, true], "it is busy for 2 s more");
    }
}
