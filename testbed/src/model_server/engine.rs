//! The engine: continuous batching with chunked prefill over paged KV memory, as vLLM schedules it. Sans-IO: time is an argument.
//!
//! ```text
//! submit -> arriving --(tokenised)--> waiting --(admitted: budget, slots, KV, adapter)--> running --> finished
//!                                        ^------- preempted: blocks given back, recomputed later -------'
//! ```
//! A step serves running sequences in order of admission, one token each or the next chunk of their prompt, then admits from the queue
//! while token budget, sequence slots and blocks last. When a running sequence needs a block and none is free, the newest running one is
//! preempted. What a step computed is known at its end: [`ModelEngine::step`] ends the step in flight and starts the next.

use std::collections::{HashMap, VecDeque};

use super::blocks::{BLOCK_TOKENS, BlockHash, BlockId, KvBlocks};
use super::lora::{AdapterIndex, LoraSlots};
use super::step_time::{ModelBatch, StepTimes};

/// HTTP, tokenising and IPC before the engine sees a request, ms: idle TTFT of a real engine is about 7 ms above its first step.
const REQUEST_OVERHEAD_MS: f64 = 7.0;

#[derive(Clone, Debug)]
pub(super) struct ModelEngineConfig {
    pub step_times: StepTimes,
    pub kv_blocks: u32,
    /// Token budget of a step, at least `sequences_max`.
    pub batch_tokens_max: u32,
    pub sequences_max: usize,
    pub lora_slots: usize,
    /// Time to bring an adapter into a slot, ms; the step that needs it waits.
    pub lora_load_ms: f64,
    /// Steps take so many times as long as measured.
    pub slowdown: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct SequenceId(pub u64);

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FinishReason {
    Stop,
    Length,
    Abort,
}

/// One prompt to continue.
#[derive(Clone, Debug)]
pub(super) struct ModelSequence {
    pub prompt_tokens: u32,
    /// How many tokens it will generate; 0 ends it with its prefill (embeddings).
    pub output_tokens: u32,
    pub finish: FinishReason,
    /// Hashes of the full blocks of prompt and output.
    pub hashes: Vec<BlockHash>,
    pub adapter: Option<AdapterIndex>,
}

/// When things happened to a sequence, in engine ms.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct SequenceTimeline {
    pub arrived_ms: f64,
    pub queued_ms: f64,
    pub admitted_ms: f64,
    pub first_token_ms: f64,
    pub last_token_ms: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum SequenceEvent {
    /// A step ended that computed so many tokens.
    Stepped {
        tokens: u32,
    },
    /// First admission only: a preempted sequence is admitted again in silence.
    Admitted {
        id: SequenceId,
        cached_tokens: u32,
    },
    /// `since_ms`: since arrival for the first token, else since the one before.
    Token {
        id: SequenceId,
        first: bool,
        since_ms: f64,
    },
    Finished {
        id: SequenceId,
        finish: FinishReason,
        prompt_tokens: u32,
        generated: u32,
        timeline: SequenceTimeline,
        at_ms: f64,
    },
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct ModelEngineLoad {
    pub running: usize,
    pub waiting: usize,
    pub kv_usage: f64,
}

#[derive(Debug)]
struct SequenceState {
    sequence: ModelSequence,
    blocks: Vec<BlockId>,
    /// Tokens whose KV is there, or is being computed by the step in flight.
    computed: u32,
    generated: u32,
    admitted: bool,
    timeline: SequenceTimeline,
}

impl SequenceState {
    /// Tokens that must be in KV before the next one can be generated.
    fn target(&self) -> u32 {
        self.sequence.prompt_tokens + self.generated
    }

    fn blocks_missing(&self, tokens: u32) -> u32 {
        (self.computed + tokens).div_ceil(BLOCK_TOKENS).saturating_sub(self.blocks.len() as u32)
    }
}

#[derive(Debug)]
struct ModelEngineStep {
    ends_ms: f64,
    tokens: u32,
    /// Sequences whose next token this step yields.
    yields: Vec<SequenceId>,
}

/// What is left to hand out while a step is put together.
struct StepPlan {
    budget: u32,
    batch: ModelBatch,
    yields: Vec<SequenceId>,
    loads: u32,
    preempted: bool,
}

#[derive(Debug)]
pub(super) struct ModelEngine {
    config: ModelEngineConfig,
    blocks: KvBlocks,
    loras: LoraSlots,
    sequences: HashMap<SequenceId, SequenceState>,
    arriving: VecDeque<(f64, SequenceId)>,
    waiting: VecDeque<SequenceId>,
    running: Vec<SequenceId>,
    step: Option<ModelEngineStep>,
    preemptions: u64,
    lora_loads: u64,
}

impl ModelEngine {
    pub(super) fn new(config: ModelEngineConfig) -> Self {
        Self {
            blocks: KvBlocks::new(config.kv_blocks),
            loras: LoraSlots::new(config.lora_slots),
            sequences: HashMap::new(),
            arriving: VecDeque::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            step: None,
            preemptions: 0,
            lora_loads: 0,
            config,
        }
    }

    pub(super) fn load(&self) -> ModelEngineLoad {
        ModelEngineLoad { running: self.running.len(), waiting: self.waiting.len(), kv_usage: self.blocks.usage() }
    }

    /// From the next step on.
    pub(super) fn set_slowdown(&mut self, slowdown: f64) {
        self.config.slowdown = slowdown;
    }

    pub(super) fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// Adapters brought into GPU memory.
    pub(super) fn lora_loads(&self) -> u64 {
        self.lora_loads
    }

    /// Adapters of running and of waiting sequences, each once.
    pub(super) fn adapters(&self) -> [Vec<AdapterIndex>; 2] {
        let of = |ids: &mut dyn Iterator<Item = &SequenceId>| {
            let mut adapters: Vec<AdapterIndex> = ids.filter_map(|id| self.sequences.get(id)?.sequence.adapter).collect();
            adapters.sort_unstable();
            adapters.dedup();
            adapters
        };
        [of(&mut self.running.iter()), of(&mut self.waiting.iter())]
    }

    /// Takes a sequence in. The caller keeps prompt and output within the KV memory and `id` unique.
    pub(super) fn submit(&mut self, now_ms: f64, id: SequenceId, sequence: ModelSequence) {
        let timeline = SequenceTimeline { arrived_ms: now_ms, ..SequenceTimeline::default() };
        let state = SequenceState { sequence, blocks: Vec::new(), computed: 0, generated: 0, admitted: false, timeline };
        self.sequences.insert(id, state);
        self.arriving.push_back((now_ms + REQUEST_OVERHEAD_MS, id));
    }

    /// Ends a sequence now; `None` when it has ended before.
    pub(super) fn abort(&mut self, now_ms: f64, id: SequenceId) -> Option<SequenceEvent> {
        self.arriving.retain(|(_, other)| *other != id);
        self.waiting.retain(|other| *other != id);
        self.finish(now_ms, id, Some(FinishReason::Abort))
    }

    /// When [`Self::step`] has something to do; `None` while idle.
    pub(super) fn next_event_ms(&self) -> Option<f64> {
        match &self.step {
            Some(step) => Some(step.ends_ms),
            None => self.arriving.front().map(|(ready_ms, _)| *ready_ms),
        }
    }

    /// Ends the step in flight if it is over at `now_ms`, and starts the next one if there is work.
    pub(super) fn step(&mut self, now_ms: f64) -> Vec<SequenceEvent> {
        let mut events = Vec::new();
        if let Some(step) = self.step.take_if(|step| step.ends_ms <= now_ms) {
            self.end(now_ms, step, &mut events);
        }
        if self.step.is_none() {
            while let Some((ready_ms, id)) = self.arriving.pop_front_if(|(ready_ms, _)| *ready_ms <= now_ms) {
                self.waiting.push_back(id);
                if let Some(state) = self.sequences.get_mut(&id) {
                    state.timeline.queued_ms = ready_ms;
                }
            }
            self.start(now_ms, &mut events);
        }
        events
    }

    fn end(&mut self, now_ms: f64, step: ModelEngineStep, events: &mut Vec<SequenceEvent>) {
        events.push(SequenceEvent::Stepped { tokens: step.tokens });
        for id in step.yields {
            let Some(state) = self.sequences.get_mut(&id) else { continue }; // aborted meanwhile
            let first = state.generated == 0;
            let timeline = &mut state.timeline;
            let since_ms = now_ms - if first { timeline.arrived_ms } else { timeline.last_token_ms };
            timeline.last_token_ms = now_ms;
            if first {
                timeline.first_token_ms = now_ms;
            }
            if state.sequence.output_tokens > 0 {
                state.generated += 1;
                events.push(SequenceEvent::Token { id, first, since_ms });
            }
            if state.generated >= state.sequence.output_tokens {
                events.extend(self.finish(now_ms, id, None));
            }
        }
    }

    fn finish(&mut self, now_ms: f64, id: SequenceId, finish: Option<FinishReason>) -> Option<SequenceEvent> {
        let state = self.sequences.remove(&id)?;
        self.blocks.release(&state.blocks);
        self.running.retain(|other| *other != id);
        Some(SequenceEvent::Finished {
            id,
            finish: finish.unwrap_or(state.sequence.finish),
            prompt_tokens: state.sequence.prompt_tokens,
            generated: state.generated,
            timeline: state.timeline,
            at_ms: now_ms,
        })
    }

    fn start(&mut self, now_ms: f64, events: &mut Vec<SequenceEvent>) {
        let mut plan =
            StepPlan { budget: self.config.batch_tokens_max, batch: ModelBatch::default(), yields: Vec::new(), loads: 0, preempted: false };
        self.plan_running(&mut plan);
        if !plan.preempted {
            self.plan_waiting(now_ms, &mut plan, events);
        }
        if plan.batch.tokens() == 0 {
            return;
        }
        self.lora_loads += u64::from(plan.loads);
        let step_ms = self.config.slowdown * self.config.step_times.step_ms(&plan.batch) + f64::from(plan.loads) * self.config.lora_load_ms;
        self.step = Some(ModelEngineStep { ends_ms: now_ms + step_ms, tokens: plan.batch.tokens(), yields: plan.yields });
    }

    fn plan_running(&mut self, plan: &mut StepPlan) {
        let mut next = 0;
        while let Some(&id) = self.running.get(next) {
            let Some(state) = self.sequences.get(&id) else { return };
            let tokens = (state.target() - state.computed).min(plan.budget);
            if tokens == 0 {
                return;
            }
            if !self.grow(id, state.blocks_missing(tokens), plan) {
                return; // it was the newest itself
            }
            self.advance(id, tokens, plan);
            next += 1;
        }
    }

    /// Gives `id` so many blocks, preempting from the end of the running list while there are too few. False if `id` itself had to go.
    fn grow(&mut self, id: SequenceId, blocks: u32, plan: &mut StepPlan) -> bool {
        while self.blocks.free() < blocks {
            let Some(victim) = self.running.pop() else { return false };
            plan.preempted = true;
            self.preemptions += 1;
            self.waiting.push_front(victim);
            if let Some(state) = self.sequences.get_mut(&victim) {
                state.computed = 0;
                let given_back = std::mem::take(&mut state.blocks);
                self.blocks.release(&given_back);
            }
            if victim == id {
                return false;
            }
        }
        if let Some(state) = self.sequences.get_mut(&id) {
            state.blocks.extend((0..blocks).map_while(|_| self.blocks.allocate()));
        }
        true
    }

    /// Counts `tokens` more of `id` into the step. Full blocks are findable at once, as in vLLM: later ones of this very step share them.
    fn advance(&mut self, id: SequenceId, tokens: u32, plan: &mut StepPlan) {
        let Some(state) = self.sequences.get_mut(&id) else { return };
        if state.generated > 0 && tokens == 1 {
            plan.batch.add_decode(state.computed);
        } else {
            plan.batch.add_prefill(state.computed, tokens);
        }
        plan.budget -= tokens;
        let full = (state.computed / BLOCK_TOKENS) as usize;
        state.computed += tokens;
        let blocks = state.blocks.iter().zip(&state.sequence.hashes);
        for (&block, &hash) in blocks.take((state.computed / BLOCK_TOKENS) as usize).skip(full) {
            self.blocks.publish(block, hash);
        }
        if state.computed == state.target() {
            plan.yields.push(id);
        }
    }

    fn plan_waiting(&mut self, now_ms: f64, plan: &mut StepPlan, events: &mut Vec<SequenceEvent>) {
        let [mut active, _] = if self.config.lora_slots > 0 { self.adapters() } else { Default::default() };
        let mut passed_over = Vec::new();
        while plan.budget > 0 && self.running.len() < self.config.sequences_max {
            let Some(id) = self.waiting.pop_front() else { break };
            let adapter = self.sequences.get(&id).and_then(|state| state.sequence.adapter);
            if adapter.is_some_and(|adapter| !active.contains(&adapter) && active.len() >= self.config.lora_slots) {
                passed_over.push(id);
                continue;
            }
            let Some(tokens) = self.admit(now_ms, id, plan.budget, events) else {
                self.waiting.push_front(id);
                break;
            };
            if let Some(adapter) = adapter {
                plan.loads += u32::from(self.loras.load(adapter, &active));
                active.push(adapter);
                active.sort_unstable();
                active.dedup();
            }
            self.advance(id, tokens, plan);
        }
        for id in passed_over.into_iter().rev() {
            self.waiting.push_front(id);
        }
    }

    /// Finds the cached prefix, takes the blocks for the first chunk and moves `id` to the running list; the chunk's size, or `None` when
    /// the blocks do not suffice.
    fn admit(&mut self, now_ms: f64, id: SequenceId, budget: u32, events: &mut Vec<SequenceEvent>) -> Option<u32> {
        let state = self.sequences.get_mut(&id)?;
        // The last token is always computed: its logits give the next one.
        let usable = ((state.target() - 1) / BLOCK_TOKENS) as usize;
        let (found, idle) = self.blocks.lookup(&state.sequence.hashes[..usable.min(state.sequence.hashes.len())]);
        let cached_tokens = found.len() as u32 * BLOCK_TOKENS;
        let tokens = (state.target() - cached_tokens).min(budget);
        let missing = (cached_tokens + tokens).div_ceil(BLOCK_TOKENS) - found.len() as u32;
        if missing + idle > self.blocks.free() {
            return None;
        }
        for &block in &found {
            self.blocks.take(block);
        }
        state.blocks = found;
        state.blocks.extend((0..missing).map_while(|_| self.blocks.allocate()));
        state.computed = cached_tokens;
        if !state.admitted {
            state.admitted = true;
            state.timeline.admitted_ms = now_ms;
            events.push(SequenceEvent::Admitted { id, cached_tokens });
        }
        self.running.push(id);
        Some(tokens)
    }
}

#[cfg(test)]
#[path = "engine_tests.rs"]
mod tests;
