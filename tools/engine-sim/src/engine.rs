//! Continuous batching: decides what each step of an engine computes, and ends the steps.
//!
//! ```text
//! submit ──► waiting ──(token budget, sequences, blocks, adapter)──► running ──► ended
//!               ▲────(blocks given back, recomputed later)──────────────┘ preempted: newest first
//! ```
//!
//! A step first serves the running sequences in order of admission: it computes one token, or the
//! next chunk of the prompt, for each. Then the step admits sequences from the queue. If a running
//! sequence needs a block and no block is free, the engine preempts the newest running sequence,
//! and the step admits no sequence. A step's output tokens appear at the step's end.

use std::collections::VecDeque;

use crate::adapters::LoadedAdapters;
use crate::blocks::BlockCache;
use crate::sequence::{EngineRequest, EngineSequence};
use crate::step_time::{StepBatch, StepTimeModel};

/// The limits and times of an engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SimulatedEngineSpec {
    /// The coefficients of the time that a step takes.
    pub times: StepTimeModel,
    pub kv_blocks: usize,
    /// The number of tokens in a KV block, at least 1.
    pub block_tokens: usize,
    /// The maximum number of tokens that a step computes, at least `sequences_max`.
    pub budget: usize,
    /// The maximum number of sequences that run at the same time.
    pub sequences_max: usize,
    /// The time for HTTP, tokenising and IPC before the engine gets a request, in ms. The caller
    /// submits a request this long after the client has sent it.
    pub api_ms: f64,
    /// The number of LoRA adapters that fit into GPU memory together, or 0 if adapters cost
    /// nothing.
    pub adapter_places: usize,
    /// The time that loading one adapter adds to a step, in ms.
    pub adapter_load_ms: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EngineStep {
    pub ends_ms: f64,
    pub tokens: u32,
}

/// The progress of a sequence at the end of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequenceProgress {
    /// The sequence generated its `number`th token. The first token has the number 1.
    Token { number: u32 },
    /// The sequence has all its output, and leaves the engine.
    Ended,
}

/// One simulated engine. `R` is the request, with the data that the caller attaches to the request.
#[derive(Clone, Debug)]
pub struct BatchingEngine<R> {
    spec: SimulatedEngineSpec,
    blocks: BlockCache,
    adapters: LoadedAdapters,
    waiting: VecDeque<EngineSequence<R>>,
    /// The running sequences, in order of admission.
    running: Vec<EngineSequence<R>>,
    step: Option<EngineStep>,
    preemptions: u64,
    adapter_loads: u64,
}

/// The step that the engine is composing: the tokens that it may still compute, and its work so
/// far.
struct StepPlan {
    budget: usize,
    batch: StepBatch,
}

// === impl BatchingEngine ===

impl<R: EngineRequest> BatchingEngine<R> {
    /// Creates an idle engine with an empty cache.
    pub fn new(spec: SimulatedEngineSpec) -> Self {
        Self {
            blocks: BlockCache::new(spec.kv_blocks),
            adapters: LoadedAdapters::new(spec.adapter_places),
            waiting: VecDeque::new(),
            running: Vec::new(),
            step: None,
            preemptions: 0,
            adapter_loads: 0,
            spec,
        }
    }

    pub fn spec(&self) -> &SimulatedEngineSpec {
        &self.spec
    }

    /// Sets [`StepTimeModel::slowdown`] from the next step on.
    pub fn set_slowdown(&mut self, slowdown: f64) {
        self.spec.times.slowdown = slowdown;
    }

    /// Empties the prefix cache. Running sequences continue.
    pub fn clear_cache(&mut self) {
        self.blocks.clear_cache();
    }

    /// Adds a request to the queue. The caller ensures that prompt and output fit into the KV
    /// memory, because a sequence that can never fit blocks the queue.
    pub fn submit(&mut self, request: R) {
        self.waiting.push_back(EngineSequence::new(request));
    }

    /// Removes the first sequence whose request matches. Returns the request, and the number of
    /// tokens that the sequence has generated.
    pub fn abort(&mut self, is_aborted: impl Fn(&R) -> bool) -> Option<(R, u32)> {
        let matches = |sequence: &EngineSequence<R>| is_aborted(&sequence.request);
        let sequence = match self.running.iter().position(matches) {
            Some(at) => self.running.remove(at),
            None => self
                .waiting
                .iter()
                .position(matches)
                .and_then(|at| self.waiting.remove(at))?,
        };
        self.blocks.release(&sequence.blocks);
        Some((sequence.request, sequence.generated))
    }

    /// Returns the sequences in the queue, the next one first.
    pub fn waiting(&self) -> impl ExactSizeIterator<Item = &EngineSequence<R>> {
        self.waiting.iter()
    }

    /// Returns the running sequences, in order of admission.
    pub fn running(&self) -> impl ExactSizeIterator<Item = &EngineSequence<R>> {
        self.running.iter()
    }

    /// Returns the LoRA adapters of the running sequences and those of the waiting sequences. Each
    /// list is sorted and has no duplicates.
    pub fn adapters(&self) -> [Vec<u16>; 2] {
        let distinct = |sequences: &mut dyn Iterator<Item = &EngineSequence<R>>| {
            let mut adapters: Vec<u16> = sequences
                .map(|sequence| sequence.request.adapter())
                .filter(|&adapter| adapter != 0)
                .collect();
            adapters.sort_unstable();
            adapters.dedup();
            adapters
        };
        [
            distinct(&mut self.running.iter()),
            distinct(&mut self.waiting.iter()),
        ]
    }

    /// Returns the share of the KV blocks that sequences use, from 0 to 1.
    pub fn kv_utilization(&self) -> f64 {
        self.blocks.utilization()
    }

    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    pub fn adapter_loads(&self) -> u64 {
        self.adapter_loads
    }

    pub fn step(&self) -> Option<EngineStep> {
        self.step
    }

    /// Starts the next step at `now_ms`. Returns `None` if the engine has nothing to do. Calls
    /// `admitted` with each request that is admitted for the first time, and with the number of its
    /// cached prompt tokens.
    ///
    /// The caller must first end the step in flight.
    pub fn start(
        &mut self,
        now_ms: f64,
        mut admitted: impl FnMut(&mut R, u32),
    ) -> Option<EngineStep> {
        let mut plan = StepPlan {
            budget: self.spec.budget,
            batch: StepBatch::default(),
        };
        let preempted = self.serve_running(&mut plan);
        if !preempted {
            self.admit(&mut plan, &mut admitted);
        }
        if plan.batch.tokens() == 0 {
            return None;
        }
        self.step = Some(EngineStep {
            ends_ms: now_ms + self.spec.times.step_ms(plan.batch),
            tokens: plan.batch.tokens(),
        });
        self.step
    }

    /// Ends the step in flight. Calls `progress` for each token that appears and for each sequence
    /// that ends.
    pub fn end(&mut self, mut progress: impl FnMut(&mut R, SequenceProgress)) {
        self.step = None;
        let blocks = &mut self.blocks;
        self.running.retain_mut(|sequence| {
            let scheduled = std::mem::take(&mut sequence.scheduled);
            sequence.computed += scheduled;
            if scheduled == 0 || sequence.computed < sequence.target {
                return true;
            }
            let output = sequence.request.output_tokens();
            if output > 0 {
                sequence.generated += 1;
                sequence.target += 1;
                progress(
                    &mut sequence.request,
                    SequenceProgress::Token {
                        number: sequence.generated,
                    },
                );
            }
            let ended = sequence.generated >= output;
            if ended {
                progress(&mut sequence.request, SequenceProgress::Ended);
                blocks.release(&sequence.blocks);
            }
            !ended
        });
    }

    /// Schedules the next tokens of the running sequences. Returns true if this preempted at least
    /// one sequence.
    fn serve_running(&mut self, plan: &mut StepPlan) -> bool {
        let block_tokens = self.spec.block_tokens;
        let mut at = 0;
        let mut preempted = false;
        while plan.budget > 0 {
            let Some(sequence) = self.running.get(at) else {
                break;
            };
            let tokens = (sequence.target - sequence.computed).min(plan.budget);
            let missing = sequence.blocks_missing(tokens, block_tokens);
            while self.blocks.free() < missing && self.running.len() > at {
                self.preempt_newest();
                preempted = true;
            }
            let Some(sequence) = self.running.get_mut(at) else {
                break;
            };
            self.blocks.take_free(missing, &mut sequence.blocks);
            sequence.schedule(tokens, &mut plan.batch, &mut self.blocks, block_tokens);
            plan.budget -= tokens;
            at += 1;
        }
        preempted
    }

    fn preempt_newest(&mut self) {
        let Some(mut sequence) = self.running.pop() else {
            return;
        };
        self.preemptions += 1;
        self.blocks.release(&sequence.blocks);
        sequence.blocks.clear();
        sequence.computed = 0;
        sequence.scheduled = 0;
        self.waiting.push_front(sequence);
    }

    /// Admits sequences from the queue, in order. Skips a sequence whose adapter does not fit, and
    /// stops at a sequence for which there are too few free blocks.
    fn admit(&mut self, plan: &mut StepPlan, admitted: &mut impl FnMut(&mut R, u32)) {
        let mut passed_over = Vec::new();
        while plan.budget > 0 && self.running.len() < self.spec.sequences_max {
            let Some(sequence) = self.waiting.pop_front() else {
                break;
            };
            if !self
                .adapters
                .fits(sequence.request.adapter(), in_use(&self.running))
            {
                passed_over.push(sequence);
                continue;
            }
            if let Some(refused) = self.admit_one(sequence, plan, admitted) {
                self.waiting.push_front(refused);
                break;
            }
        }
        passed_over
            .into_iter()
            .rev()
            .for_each(|sequence| self.waiting.push_front(sequence));
    }

    /// Moves the sequence to the running sequences and schedules its first chunk. Returns the
    /// sequence if too few blocks are free.
    fn admit_one(
        &mut self,
        mut sequence: EngineSequence<R>,
        plan: &mut StepPlan,
        admitted: &mut impl FnMut(&mut R, u32),
    ) -> Option<EngineSequence<R>> {
        let block_tokens = self.spec.block_tokens;
        let hashes = sequence.request.block_hashes();
        // An engine always computes the last token of a prompt, because the token's logits give the
        // next token.
        let cachable = hashes.len().min((sequence.target - 1) / block_tokens);
        let idle = self
            .blocks
            .look_up(hashes.get(..cachable).unwrap_or(&[]), &mut sequence.blocks);
        let cached = sequence.blocks.len() * block_tokens;
        // A preempted sequence has lost the KV that another engine computed.
        let done = if sequence.request.is_prefilled() && !sequence.admitted {
            sequence.target - 1
        } else {
            cached
        };
        let tokens = (sequence.target - done).min(plan.budget);
        sequence.computed = done;
        let missing = sequence.blocks_missing(tokens, block_tokens);
        if missing + idle > self.blocks.free() {
            sequence.blocks.clear();
            sequence.computed = 0;
            return Some(sequence);
        }
        self.blocks.retain(&sequence.blocks);
        self.blocks.take_free(missing, &mut sequence.blocks);
        sequence.publish(cached, done, &mut self.blocks, block_tokens);
        if !std::mem::replace(&mut sequence.admitted, true) {
            admitted(
                &mut sequence.request,
                u32::try_from(cached).unwrap_or(u32::MAX),
            );
        }
        if self
            .adapters
            .load(sequence.request.adapter(), in_use(&self.running))
        {
            self.adapter_loads += 1;
            plan.batch.loading_ms += self.spec.adapter_load_ms;
        }
        sequence.schedule(tokens, &mut plan.batch, &mut self.blocks, block_tokens);
        plan.budget -= tokens;
        self.running.push(sequence);
        None
    }

    /// Checks that each use of a block belongs to a sequence, and that each sequence has exactly
    /// the blocks that its computed tokens need.
    #[cfg(test)]
    pub(crate) fn check_blocks(&self) {
        let all = || self.running.iter().chain(&self.waiting);
        let blocks: usize = all().map(|sequence| sequence.blocks.len()).sum();
        assert_eq!(
            self.blocks.uses(),
            blocks,
            "every use of a block has a sequence"
        );
        for sequence in all() {
            assert_eq!(
                sequence.computed().div_ceil(self.spec.block_tokens),
                sequence.blocks.len()
            );
        }
        assert!(self.running.len() <= self.spec.sequences_max);
    }
}

/// Returns a function that tells whether a running sequence uses an adapter.
fn in_use<R: EngineRequest>(running: &[EngineSequence<R>]) -> impl Fn(u16) -> bool + '_ {
    |adapter| {
        running
            .iter()
            .any(|sequence| sequence.request.adapter() == adapter)
    }
}
