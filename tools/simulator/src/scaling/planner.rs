//! Dynamo's planner for aggregated engines (`docs/design-docs/planner-design.md` of ai-dynamo): a
//! lower bound from the throughput of the last interval, and a faster loop that adds or removes one
//! replica at a time. It has exact step times here, where the real one has a profile.

use learning::scaling::{RequestMix, TrafficWindow};

use super::limits::{TPOT_SLO_S, TTFT_SLO_S};
use super::rules::{Autoscaler, EngineSample, PoolSample};
use super::traffic::seats;
use crate::hardware::QWEN_32B_H200;

/// The planner's default interval of the throughput loop, s.
const THROUGHPUT_INTERVAL_S: f64 = 180.0;

/// Below this part of both SLOs a replica is removed: the planner's default.
const DOWN_SENSITIVITY: f64 = 0.8;

pub(super) struct ThroughputPlanner {
    ttft_s: f64,
    itl_s: f64,
    floor: usize,
    planned_at: f64,
    last: (f64, f64),
}

// === impl ThroughputPlanner ===

impl ThroughputPlanner {
    /// Plans for this part of both SLOs.
    pub(super) fn new(part: f64) -> Self {
        Self {
            ttft_s: TTFT_SLO_S * part,
            itl_s: TPOT_SLO_S * part,
            floor: 1,
            planned_at: 0.0,
            last: (0.0, 0.0),
        }
    }

    pub(super) fn replicas(&mut self, window: &TrafficWindow, pool: &PoolSample<'_>) -> usize {
        let mix = window.mix(f64::from(pool.step.output_tokens()));
        if pool.now_s - self.planned_at >= THROUGHPUT_INTERVAL_S {
            // The constant predictor: the next interval is like the last one.
            let (then, picked) = self.last;
            let per_second =
                (pool.totals.picked - picked) / (pool.now_s - then).max(Autoscaler::TICK_S);
            self.last = (pool.now_s, pool.totals.picked);
            self.planned_at = pool.now_s;
            self.floor = (per_second / self.engine_rate(&mix)).ceil() as usize;
        }
        let ordered = pool.engines.len() + pool.starting.len();
        if ordered < self.floor || !pool.starting.is_empty() || pool.engines.is_empty() {
            return ordered.max(self.floor);
        }
        let estimates: Vec<(f64, f64)> = pool
            .engines
            .iter()
            .map(|engine| estimate(engine, &mix))
            .collect();
        let all = |holds: &dyn Fn(&(f64, f64)) -> bool| estimates.iter().all(holds);
        let ttft_s = self.ttft_s;
        let itl_s = self.itl_s;
        if all(&|e| e.0 > ttft_s) || all(&|e| e.1 > itl_s) {
            ordered + 1
        } else if all(&|e| e.0 < ttft_s * DOWN_SENSITIVITY && e.1 < itl_s * DOWN_SENSITIVITY) {
            ordered.saturating_sub(1).max(self.floor)
        } else {
            ordered
        }
    }

    /// The highest rate of an engine within the ITL, requests a second.
    fn engine_rate(&self, mix: &RequestMix) -> f64 {
        let mut low = 0.0;
        let mut high = 1e3;
        for _ in 0..40 {
            let rate = f64::midpoint(low, high);
            *if step_s(rate, mix).is_some_and(|step_s| step_s <= self.itl_s) {
                &mut low
            } else {
                &mut high
            } = rate;
        }
        low.max(1e-3)
    }
}

/// The time of a step of an engine that gets `rate` requests a second, s, with the prompts and the
/// batch that this needs (Little's law). `None` if they do not fit.
fn step_s(rate: f64, mix: &RequestMix) -> Option<f64> {
    let context = mix.prompt_tokens + mix.output_tokens / 2.0;
    let times = QWEN_32B_H200.times;
    let mut step_s = 0.02;
    for _ in 0..60 {
        let batch = rate * mix.output_tokens * step_s;
        let prefill = rate * mix.uncached_tokens * step_s;
        let pairs = prefill * (2.0 * mix.prompt_tokens - mix.uncached_tokens);
        let too_much = batch > seats().sequences_max? || batch * context > seats().kv_tokens?;
        if too_much || prefill > QWEN_32B_H200.budget as f64 {
            return None;
        }
        step_s = (times.decode[0]
            + times.overhead
            + times.decode[1] * batch
            + times.decode[2] * batch * context
            + times.prefill[1] * prefill
            + times.prefill[2] * pairs)
            / 1e3;
    }
    Some(step_s)
}

/// The TTFT of the next request and the ITL at an engine, s, by its queue.
fn estimate(engine: &EngineSample, mix: &RequestMix) -> (f64, f64) {
    let times = QWEN_32B_H200.times;
    let [_, p1, p2] = times.prefill;
    let context = engine.load.decode_tokens as f64 + engine.waiting * mix.prompt_tokens;
    let decode_ms = times.decode[0]
        + times.overhead
        + times.decode[1] * (engine.running + engine.waiting)
        + times.decode[2] * context;
    let queued = engine.load.prefills.uncached_tokens as f64 + mix.uncached_tokens;
    let prefill_ms = queued * (p1 + p2 * mix.prompt_tokens);
    let chunks = (queued / QWEN_32B_H200.budget as f64).ceil();
    let piggybacked_ms = if engine.load.prefills.prompts > 0 {
        mix.uncached_tokens * p1
    } else {
        0.0
    };
    (
        (prefill_ms + chunks * decode_ms) / 1e3,
        (decode_ms + piggybacked_ms) / 1e3,
    )
}
