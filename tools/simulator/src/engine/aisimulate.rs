//! NVIDIA's `aisimulate-core` behind the same trait: another implementation of vLLM's scheduler, KV
//! memory and prefix cache, with our step times. With it, conclusions do not rest on one model of
//! an engine.
//!
//! It has no LoRA adapters, takes no KV from other engines, and its cache cannot be emptied.
//! Campaigns that need these use our own engine.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use aisimulate_core::engine::generalized::{EngineIdentity, PassId, SchedulerCommand};
use aisimulate_core::engine::{
    Command, Engine, EngineConfig, EngineFactory, Metrics, Request, TimingModel,
};
use uuid::Uuid;

use super::{
    BLOCK_TOKENS, EngineJob, EngineSimulator, SimulatedEngineSpec, StepBatch, StepEvent,
    StepTimeModel,
};

/// One engine of `aisimulate-core`.
pub(crate) struct AisimulateEngine {
    spec: SimulatedEngineSpec,
    engine: Engine,
    times: Arc<AisimulateTimes>,
    pass: Option<(PassId, f64)>,
    metrics: Metrics,
    /// Tokens so far of each request in flight.
    put_out: BTreeMap<u32, u32>,
}

/// Our step times in the form that `aisimulate-core` needs: first for the prompts of a step, then
/// for its sequences that decode.
struct AisimulateTimes {
    of: StepTimeModel,
    slowdown: AtomicU64,
    /// True if the engine requested a decode time in this step.
    decoded: AtomicBool,
}

// === impl AisimulateTimes ===

impl AisimulateTimes {
    fn slowdown(&self) -> f64 {
        f64::from_bits(self.slowdown.load(Ordering::Relaxed))
    }

    /// The time of an empty step. It is part of the decode time, which `aisimulate-core` leaves out
    /// if no sequence decodes.
    fn least_ms(&self) -> f64 {
        StepTimeModel {
            slowdown: self.slowdown(),
            ..self.of
        }
        .step_ms(StepBatch::default())
    }
}

impl TimingModel for AisimulateTimes {
    fn predict_prefill_ms(
        &self,
        batch_size: usize,
        mean_isl: usize,
        mean_prefix: usize,
    ) -> anyhow::Result<f64> {
        let batch = batch_size as f64;
        let to = mean_isl as f64;
        let from = mean_prefix as f64;
        let batch = StepBatch {
            prefill: batch * (to - from),
            pairs: batch * (to.powi(2) - from.powi(2)),
            ..StepBatch::default()
        };
        Ok(StepTimeModel {
            slowdown: self.slowdown(),
            ..self.of
        }
        .step_ms(batch)
            - self.least_ms())
    }

    fn predict_decode_ms(
        &self,
        batch_size: usize,
        active_kv_tokens: usize,
        _: usize,
        _: usize,
    ) -> anyhow::Result<f64> {
        self.decoded.store(true, Ordering::Relaxed);
        let batch = StepBatch {
            sequences: batch_size as f64,
            context: active_kv_tokens as f64,
            ..StepBatch::default()
        };
        Ok(StepTimeModel {
            slowdown: self.slowdown(),
            ..self.of
        }
        .step_ms(batch))
    }
}

// === impl AisimulateEngine ===

impl AisimulateEngine {
    pub(crate) fn new(spec: SimulatedEngineSpec) -> Result<Self, String> {
        let config = EngineConfig {
            num_gpu_blocks: spec.kv_blocks,
            block_size: BLOCK_TOKENS,
            max_num_seqs: spec.sequences_max,
            max_num_batched_tokens: spec.budget,
            ..EngineConfig::default()
        };
        let times = Arc::new(AisimulateTimes {
            of: spec.times,
            slowdown: AtomicU64::new(spec.times.slowdown.to_bits()),
            decoded: AtomicBool::new(false),
        });
        let engine = EngineFactory::with_timing_model(config, times.clone())
            .and_then(|factory| factory.build(EngineIdentity::new(0), NonZeroU32::MIN))
            .map_err(to_text)?;
        Ok(Self {
            spec,
            engine,
            times,
            pass: None,
            metrics: Metrics::default(),
            put_out: BTreeMap::new(),
        })
    }
}

impl<'w> EngineSimulator<'w> for AisimulateEngine {
    fn spec(&self) -> &SimulatedEngineSpec {
        &self.spec
    }

    fn slow_down(&mut self, times: f64) {
        self.times
            .slowdown
            .store((self.times.slowdown() * times).to_bits(), Ordering::Relaxed);
    }

    fn forget(&mut self) {}

    fn announce(&mut self, _: EngineJob<'w>) {}

    fn submit(&mut self, job: EngineJob<'w>, now: f64) -> Result<(), String> {
        if job.prefilled || job.adapter > 0 {
            return Err("this engine neither takes KV from others nor has adapters".to_owned());
        }
        let request = Request {
            request_id: id(job.request),
            tokens: tokens(&job),
            max_output_tokens: job.output as usize,
            output_token_ids: None,
        };
        let effects = self
            .engine
            .apply_command_effects(SchedulerCommand::new(0, Command::Submit(request)), now)
            .map_err(to_text)?;
        if let Some(rank) = effects.into_by_rank().pop() {
            self.metrics = rank.effects.metrics;
        }
        self.put_out.insert(job.request, 0);
        Ok(())
    }

    fn busy_until(&self) -> Option<f64> {
        self.pass.map(|(_, ends)| ends)
    }

    fn counts(&self) -> (usize, usize) {
        (
            self.metrics.waiting_requests as usize,
            self.metrics.running_requests as usize,
        )
    }

    fn kv_utilization(&self) -> f64 {
        self.metrics.cache_usage
    }

    fn progress(&self, each: &mut dyn FnMut(u32, u32)) {
        self.put_out
            .iter()
            .for_each(|(&request, &tokens)| each(request, tokens));
    }

    fn start(
        &mut self,
        now: f64,
        admitted: &mut dyn FnMut(u32, u32),
    ) -> Result<Option<f64>, String> {
        self.times.decoded.store(false, Ordering::Relaxed);
        let Some(pass) = self.engine.execute_pass(now).map_err(to_text)? else {
            return Ok(None);
        };
        for admission in pass
            .by_rank
            .iter()
            .flat_map(|rank| &rank.effects.admissions)
        {
            admitted(
                request(admission.request_id),
                u32::try_from(admission.reused_input_tokens).unwrap_or(u32::MAX),
            );
        }
        let least_ms = if self.times.decoded.load(Ordering::Relaxed) {
            0.0
        } else {
            self.times.least_ms()
        };
        let ends = pass.end_ms + least_ms;
        self.pass = Some((pass.pass_id, ends));
        Ok(Some(ends))
    }

    fn end(&mut self, events: &mut Vec<StepEvent>) -> Result<(), String> {
        let Some((pass, ends)) = self.pass.take() else {
            return Ok(());
        };
        for rank in self
            .engine
            .complete_pass(pass, ends)
            .map_err(to_text)?
            .effects
            .into_by_rank()
        {
            self.metrics = rank.effects.metrics;
            for output in rank.effects.outputs {
                let request = request(output.request_id);
                if output.rejected {
                    return Err(format!("the engine refused request {request}"));
                }
                let tokens = self.put_out.entry(request).or_default();
                *tokens += u32::from(output.token_id.is_some());
                if *tokens == 1 {
                    events.push(StepEvent::First(request));
                }
                if output.completed {
                    self.put_out.remove(&request);
                    events.push(StepEvent::Done(request));
                }
            }
        }
        Ok(())
    }
}

fn to_text(error: anyhow::Error) -> String {
    format!("aisimulate: {error:#}")
}

fn id(request: u32) -> Uuid {
    Uuid::from_u128(u128::from(request) + 1)
}

fn request(id: Uuid) -> u32 {
    u32::try_from(id.as_u128().saturating_sub(1)).unwrap_or(u32::MAX)
}

/// A prompt whose blocks are equal where the job's blocks are: each begins with its hash. The rest
/// of the prompt is unique.
fn tokens(job: &EngineJob<'_>) -> Vec<u32> {
    let block = |hash: &u64| {
        [*hash as u32, (*hash >> 32) as u32]
            .into_iter()
            .chain(std::iter::repeat_n(0, BLOCK_TOKENS - 2))
    };
    let mut tokens: Vec<u32> = job.blocks.iter().flat_map(block).collect();
    tokens.resize(job.prompt as usize, job.request);
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::LLAMA_8B_H100;

    /// Plays a job on an idle engine. Returns its TTFT, its end and its cached tokens.
    fn play(engine: &mut AisimulateEngine, job: EngineJob<'_>, start: f64) -> (f64, f64, u32) {
        engine.submit(job, start).unwrap();
        let mut now = start;
        let mut events = Vec::new();
        let mut out = (0.0, 0.0, 0);
        while out.1 == 0.0 {
            now = engine
                .start(now, &mut |_, cached| out.2 = cached)
                .unwrap()
                .unwrap();
            engine.end(&mut events).unwrap();
            for event in events.drain(..) {
                match event {
                    StepEvent::First(_) => out.0 = now - start,
                    StepEvent::Done(_) => out.1 = now - start,
                }
            }
        }
        out
    }

    #[test]
    fn a_lone_request_takes_our_formulas_time_and_finds_what_came_before() {
        let mut engine = AisimulateEngine::new(LLAMA_8B_H100).unwrap();
        let blocks: Vec<u64> = (1..=100).map(|block| block << 33 | 7).collect();
        let job = EngineJob {
            request: 0,
            prompt: 6_400,
            output: 11,
            blocks: &blocks,
            hashes: &[],
            adapter: 0,
            prefilled: false,
        };
        let times = LLAMA_8B_H100.times;
        let first = play(&mut engine, job, 0.0);
        let second = play(&mut engine, EngineJob { request: 1, ..job }, 1e4);
        let decodes: f64 = (1..=10)
            .map(|i| times.mixed_ms((1.0, 6_400.0 + f64::from(i)), 0.0, 0.0))
            .sum();
        let cold = times.mixed_ms((0.0, 0.0), 6_400.0, 0.0);
        assert!(
            (first.0 / cold - 1.0).abs() < 0.01
                && ((first.1 - first.0) / decodes - 1.0).abs() < 0.01,
            "{first:?} {cold} {decodes}"
        );
        assert!(
            first.2 == 0 && second.2 >= 6_400 - 64 && second.0 < cold / 3.0,
            "{second:?}"
        );
    }

    #[test]
    fn it_says_what_it_cannot_do() {
        let mut engine = AisimulateEngine::new(LLAMA_8B_H100).unwrap();
        let job = EngineJob {
            request: 0,
            prompt: 10,
            output: 1,
            blocks: &[],
            hashes: &[],
            adapter: 3,
            prefilled: false,
        };
        assert!(
            engine.submit(job, 0.0).is_err()
                && engine
                    .submit(
                        EngineJob {
                            adapter: 0,
                            prefilled: true,
                            ..job
                        },
                        0.0
                    )
                    .is_err()
        );
    }
}
