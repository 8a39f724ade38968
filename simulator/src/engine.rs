//! One engine as vLLM schedules it: continuous batching, chunked prefill, first come first served, paged KV memory with a prefix cache,
//! preemption by recompute.
//!
//! ```text
//! submit ──► waiting ──(budget, sequence slots, blocks)──► running ──► done
//!               ▲────(blocks given back)─────────────┘ preempted: the newest first
//! ```
//! A step first serves those running, in order of admission: one token each, or the next chunk of their prompt; then it admits from the
//! queue. What it computed is known at its end. It takes `overhead + decode(B, K) + max(0, prefill(n | context) - weights)` ms: the weights
//! are read once a step, so a prefill adds only what exceeds that.

mod adapters;
#[cfg(feature = "aisimulate")]
mod aisimulate;
mod blocks;
mod model;
#[cfg(test)]
mod tests;
use adapters::LoadedAdapters;
#[cfg(feature = "aisimulate")]
pub(crate) use aisimulate::AisimulateEngine;
use blocks::BlockCache;
pub(crate) use model::EngineSimulator;

use std::collections::VecDeque;

/// Tokens of a KV block here: those of the router's index (vLLM's have 16, which costs time and changes little).
pub(crate) const BLOCK_TOKENS: usize = 64;

/// What steps cost, ms; measured kernels, see docs/reference/routing-quality.md.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct StepTimeModel {
    /// Constant, each sequence, each token of context.
    pub(crate) decode: [f64; 3],
    /// Constant, each token, each pair of tokens.
    pub(crate) prefill: [f64; 3],
    /// What kernels leave out: sampling and the CPU between two steps.
    pub(crate) overhead: f64,
    /// So many times as slow.
    pub(crate) slowdown: f64,
}

/// An engine's limits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SimulatedEngineSpec {
    pub(crate) times: StepTimeModel,
    pub(crate) kv_blocks: usize,
    /// Tokens a step may compute.
    pub(crate) budget: usize,
    pub(crate) sequences_max: usize,
    /// HTTP and tokenising before the engine sees a request, ms.
    pub(crate) api_ms: f64,
    /// LoRA adapters that fit at once.
    pub(crate) adapter_places: usize,
    /// What loading one adds to a step, ms.
    pub(crate) adapter_load_ms: f64,
}

/// What a request asks of an engine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EngineJob<'w> {
    pub(crate) request: u32,
    pub(crate) prompt: u32,
    /// At least 1.
    pub(crate) output: u32,
    pub(crate) blocks: &'w [u64],
    /// What a proxy's index knows its prompt by.
    pub(crate) hashes: &'w [u64],
    /// The LoRA adapter it is for; 0: none.
    pub(crate) adapter: u16,
    /// Another engine worked through its prompt, and the KV of all but its last token is here.
    pub(crate) prefilled: bool,
}

/// What happened at the end of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StepEvent {
    First(u32),
    Done(u32),
}

/// What a policy that sees everything may ask.
#[derive(Default)]
pub(crate) struct EngineInternals {
    /// Prompts not worked through: tokens left, tokens done, output.
    pub(crate) prefills: Vec<(f64, f64, f64)>,
    /// Sequences decoding: tokens left, tokens of context.
    pub(crate) decodes: Vec<(f64, f64)>,
}

#[derive(Debug)]
pub(crate) struct SimulatedEngine<'w> {
    spec: SimulatedEngineSpec,
    blocks: BlockCache,
    adapters: LoadedAdapters,
    waiting: VecDeque<EngineSequence<'w>>,
    running: Vec<EngineSequence<'w>>,
    /// Requests on their way here.
    coming: Vec<EngineJob<'w>>,
    step: Option<EngineStep>,
    preemptions: u64,
}

#[derive(Debug)]
struct EngineSequence<'w> {
    job: EngineJob<'w>,
    /// Tokens in KV.
    computed: usize,
    /// Tokens that must be there before the next one comes out.
    target: usize,
    /// Tokens put out.
    generated: u32,
    /// Computed by the step in flight.
    scheduled: usize,
    blocks: Vec<u32>,
    admitted: bool,
    cached: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct EngineStep {
    ends: f64,
}

/// What a step has to compute.
#[derive(Clone, Copy, Debug, Default)]
struct StepBatch {
    sequences: f64,
    context: f64,
    prefill: f64,
    pairs: f64,
    loading_ms: f64,
}

// === impl StepTimeModel ===

impl StepTimeModel {
    fn step_ms(&self, batch: StepBatch) -> f64 {
        let [d0, d1, d2] = self.decode;
        let [p0, p1, p2] = self.prefill;
        let decode = d0 + d1 * batch.sequences + d2 * batch.context;
        let prefill = if batch.prefill > 0.0 { (p0 + p1 * batch.prefill + p2 * batch.pairs - d0).max(0.0) } else { 0.0 };
        self.slowdown * (self.overhead + decode + prefill) + batch.loading_ms
    }

    /// A step of so many sequences with so much context and a prefill of `tokens` after `done` ones, ms.
    pub(crate) fn mixed_ms(&self, (sequences, context): (f64, f64), tokens: f64, done: f64) -> f64 {
        self.step_ms(StepBatch { sequences, context, prefill: tokens, pairs: (done + tokens).powi(2) - done.powi(2), loading_ms: 0.0 })
    }

    /// A prompt that nobody holds, on an idle engine, ms.
    pub(crate) fn cold_ms(&self, tokens: u32, budget: usize) -> f64 {
        let (mut done, mut total) = (0.0, 0.0);
        while done < f64::from(tokens) {
            let chunk = (f64::from(tokens) - done).min(budget as f64);
            total += self.mixed_ms((0.0, 0.0), chunk, done);
            done += chunk;
        }
        total
    }
}

// === impl SimulatedEngine ===

impl<'w> SimulatedEngine<'w> {
    pub(crate) fn new(spec: SimulatedEngineSpec) -> Self {
        let (blocks, adapters) = (BlockCache::new(spec.kv_blocks), LoadedAdapters::new(spec.adapter_places));
        Self { spec, blocks, adapters, waiting: VecDeque::new(), running: Vec::new(), coming: Vec::new(), step: None, preemptions: 0 }
    }

    #[cfg(test)]
    pub(crate) fn preemptions(&self) -> u64 {
        self.preemptions
    }

    #[cfg(test)]
    /// Blocks in use by sequences.
    pub(crate) fn blocks_held(&self) -> usize {
        self.blocks.used()
    }

    /// True when somebody had to give way.
    fn serve_running(&mut self, batch: &mut StepBatch, budget: &mut usize) -> bool {
        let (mut at, mut preempted) = (0, false);
        while at < self.running.len() && *budget > 0 {
            let Some(sequence) = self.running.get(at) else { break };
            let tokens = (sequence.target - sequence.computed).min(*budget);
            let needed = (sequence.computed + tokens).div_ceil(BLOCK_TOKENS).saturating_sub(sequence.blocks.len());
            while self.blocks.free() < needed && self.running.len() > at {
                self.preempt();
                preempted = true;
            }
            let Some(sequence) = self.running.get_mut(at) else { break };
            self.blocks.take_free(needed, &mut sequence.blocks);
            sequence.schedule(tokens, batch, &mut self.blocks);
            *budget -= tokens;
            at += 1;
        }
        preempted
    }

    fn preempt(&mut self) {
        let Some(mut sequence) = self.running.pop() else { return };
        self.preemptions += 1;
        self.blocks.release(&sequence.blocks);
        sequence.blocks.clear();
        (sequence.computed, sequence.scheduled) = (0, 0);
        self.waiting.push_front(sequence);
    }

    fn admit(&mut self, batch: &mut StepBatch, budget: &mut usize, admitted: &mut dyn FnMut(u32, u32)) {
        let mut passed_over = Vec::new();
        while *budget > 0 && self.running.len() < self.spec.sequences_max {
            let Some(sequence) = self.waiting.pop_front() else { break };
            let running = &self.running;
            let in_use = |adapter| running.iter().any(|other| other.job.adapter == adapter);
            if !self.adapters.fits(sequence.job.adapter, in_use) {
                passed_over.push(sequence);
                continue;
            }
            if let Some(refused) = self.admit_one(sequence, batch, budget, admitted) {
                self.waiting.push_front(refused);
                break;
            }
        }
        passed_over.into_iter().rev().for_each(|sequence| self.waiting.push_front(sequence));
    }

    /// Gives it back where there are too few blocks for it.
    fn admit_one(
        &mut self,
        mut sequence: EngineSequence<'w>,
        batch: &mut StepBatch,
        budget: &mut usize,
        admitted: &mut dyn FnMut(u32, u32),
    ) -> Option<EngineSequence<'w>> {
        // The last token of a prompt is always computed.
        let cachable = sequence.job.blocks.len().min((sequence.target - 1) / BLOCK_TOKENS);
        let idle = self.blocks.look_up(sequence.job.blocks.get(..cachable).unwrap_or(&[]), &mut sequence.blocks);
        let cached = sequence.blocks.len() * BLOCK_TOKENS;
        // What another engine computed is lost with a preemption.
        let done = if sequence.job.prefilled && !sequence.admitted { sequence.target - 1 } else { cached };
        let tokens = (sequence.target - done).min(*budget);
        let needed = (done + tokens).div_ceil(BLOCK_TOKENS) - sequence.blocks.len();
        if needed + idle > self.blocks.free() {
            sequence.blocks.clear();
            return Some(sequence);
        }
        self.blocks.retain(&sequence.blocks);
        self.blocks.take_free(needed, &mut sequence.blocks);
        sequence.publish(cached, done, &mut self.blocks);
        sequence.computed = done;
        if !std::mem::replace(&mut sequence.admitted, true) {
            sequence.cached = u32::try_from(cached).unwrap_or(u32::MAX);
            admitted(sequence.job.request, sequence.cached);
        }
        let running = &self.running;
        if self.adapters.take(sequence.job.adapter, |adapter| running.iter().any(|other| other.job.adapter == adapter)) {
            batch.loading_ms += self.spec.adapter_load_ms;
        }
        sequence.schedule(tokens, batch, &mut self.blocks);
        *budget -= tokens;
        self.running.push(sequence);
        None
    }
}

impl<'w> EngineSimulator<'w> for SimulatedEngine<'w> {
    fn spec(&self) -> &SimulatedEngineSpec {
        &self.spec
    }

    fn slow_down(&mut self, times: f64) {
        self.spec.times.slowdown *= times;
    }

    fn forget(&mut self) {
        self.blocks.forget();
    }

    fn announce(&mut self, job: EngineJob<'w>) {
        self.coming.push(job);
    }

    fn submit(&mut self, job: EngineJob<'w>, _now: f64) -> Result<(), String> {
        self.coming.retain(|other| other.request != job.request);
        self.waiting.push_back(EngineSequence {
            job,
            computed: 0,
            target: job.prompt as usize,
            generated: 0,
            scheduled: 0,
            blocks: Vec::new(),
            admitted: false,
            cached: 0,
        });
        Ok(())
    }

    fn busy_until(&self) -> Option<f64> {
        self.step.map(|step| step.ends)
    }

    fn counts(&self) -> (usize, usize) {
        (self.waiting.len(), self.running.len())
    }

    fn kv_utilization(&self) -> f64 {
        self.blocks.utilization()
    }

    fn adapters(&self) -> (Vec<u16>, Vec<u16>) {
        let distinct = |jobs: &mut dyn Iterator<Item = &EngineJob<'w>>| {
            let mut adapters: Vec<u16> = jobs.map(|job| job.adapter).filter(|&adapter| adapter != 0).collect();
            adapters.sort_unstable();
            adapters.dedup();
            adapters
        };
        let running = distinct(&mut self.running.iter().map(|sequence| &sequence.job));
        let mut waiting = distinct(&mut self.waiting.iter().map(|sequence| &sequence.job));
        waiting.retain(|adapter| !running.contains(adapter));
        (running, waiting)
    }

    fn progress(&self, each: &mut dyn FnMut(u32, u32)) {
        self.running.iter().for_each(|sequence| each(sequence.job.request, sequence.generated));
    }

    fn start(&mut self, now: f64, admitted: &mut dyn FnMut(u32, u32)) -> Result<Option<f64>, String> {
        let (mut batch, mut budget) = (StepBatch::default(), self.spec.budget);
        let preempted = self.serve_running(&mut batch, &mut budget);
        if !preempted {
            self.admit(&mut batch, &mut budget, admitted);
        }
        if self.running.iter().all(|sequence| sequence.scheduled == 0) {
            return Ok(None);
        }
        let ends = now + self.spec.times.step_ms(batch);
        self.step = Some(EngineStep { ends });
        Ok(Some(ends))
    }

    fn end(&mut self, events: &mut Vec<StepEvent>) -> Result<(), String> {
        self.step = None;
        let blocks = &mut self.blocks;
        self.running.retain_mut(|sequence| {
            let scheduled = std::mem::take(&mut sequence.scheduled);
            sequence.computed += scheduled;
            if scheduled == 0 || sequence.computed < sequence.target {
                return true;
            }
            sequence.generated += 1;
            sequence.target += 1;
            if sequence.generated == 1 {
                events.push(StepEvent::First(sequence.job.request));
            }
            let done = sequence.generated >= sequence.job.output;
            if done {
                events.push(StepEvent::Done(sequence.job.request));
                blocks.release(&sequence.blocks);
            }
            !done
        });
        Ok(())
    }

    fn would_find(&self, job: &EngineJob<'w>) -> u32 {
        let held = self.blocks.peek(job.blocks);
        let longest = |blocks: &[u64]| blocks.iter().zip(job.blocks).take_while(|(a, b)| a == b).count();
        let ahead = self.waiting.iter().map(|sequence| sequence.job.blocks).chain(self.coming.iter().map(|job| job.blocks));
        let found = ahead.map(longest).max().unwrap_or(0).max(held);
        u32::try_from(found * BLOCK_TOKENS).unwrap_or(u32::MAX).min(job.prompt.saturating_sub(1))
    }

    fn inside(&self) -> EngineInternals {
        let mut inside = EngineInternals { prefills: Vec::new(), decodes: Vec::new() };
        for sequence in &self.running {
            let (computed, output) = (sequence.computed + sequence.scheduled, f64::from(sequence.job.output - sequence.generated));
            if sequence.generated == 0 && computed < sequence.target {
                inside.prefills.push(((sequence.target - computed) as f64, computed as f64, output));
            } else {
                inside.decodes.push((output, computed as f64));
            }
        }
        let waiting = self.waiting.iter().map(|sequence| (&sequence.job, sequence.target, sequence.generated));
        let coming = self.coming.iter().map(|job| (job, job.prompt as usize, 0));
        for (job, target, generated) in waiting.chain(coming) {
            let found = (self.blocks.peek(job.blocks) * BLOCK_TOKENS).min(target - 1);
            inside.prefills.push(((target - found) as f64, found as f64, f64::from(job.output - generated)));
        }
        inside
    }
}

// === impl EngineSequence ===

impl EngineSequence<'_> {
    /// The step computes `tokens` of it; its full blocks can be found at once, as in vLLM.
    fn schedule(&mut self, tokens: usize, batch: &mut StepBatch, blocks: &mut BlockCache) {
        let (from, to) = (self.computed, self.computed + tokens);
        self.scheduled = tokens;
        if self.generated > 0 && tokens == 1 {
            batch.sequences += 1.0;
            batch.context += to as f64;
            return;
        }
        batch.prefill += tokens as f64;
        batch.pairs += (to as f64).powi(2) - (from as f64).powi(2);
        self.publish(from, to, blocks);
    }

    /// Full blocks of its prompt, between these tokens, can be found from now on.
    fn publish(&self, from: usize, to: usize, blocks: &mut BlockCache) {
        let full = from / BLOCK_TOKENS..(to / BLOCK_TOKENS).min(self.job.blocks.len());
        for (block, hash) in self.blocks.iter().zip(self.job.blocks).take(full.end).skip(full.start) {
            blocks.publish(*block, *hash);
        }
    }
}
