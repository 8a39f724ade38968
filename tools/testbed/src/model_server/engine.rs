//! The engine of a model server: `engine-sim`, with arrivals, aborts, and the times of each
//! sequence. It does no I/O, and time is an argument.
//!
//! ```text
//! submit ──► arriving ──(API overhead over)──► waiting ──► running ──► finished
//! ```
//!
//! [`ModelEngine::step`] ends the step in flight and starts the next.

use std::collections::VecDeque;

use engine_sim::{BatchingEngine, EngineRequest, SequenceProgress, SimulatedEngineSpec};

/// The number of tokens in a KV block, which is vLLM's default.
pub(super) const BLOCK_TOKENS: u32 = 16;

/// An adapter's index in the list of served adapters.
pub(super) type AdapterIndex = usize;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct SequenceId(pub u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FinishReason {
    Stop,
    Length,
    Abort,
}

/// A prompt, and how the engine continues it.
#[derive(Clone, Debug)]
pub(super) struct ModelSequence {
    pub prompt_tokens: u32,
    /// The number of tokens to generate; 0 ends the sequence with its prefill, as for embeddings.
    pub output_tokens: u32,
    /// How the sequence finishes if the client does not abort it.
    pub finish: FinishReason,
    /// Hashes of the full blocks of prompt and output.
    pub hashes: Vec<u64>,
    pub adapter: Option<AdapterIndex>,
}

/// The times of a sequence's events, in engine ms.
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
    /// A step ended, which computed this many tokens.
    Stepped { tokens: u32 },
    /// The engine admitted a sequence for the first time. A preempted sequence that is admitted
    /// again causes no event.
    Admitted { id: SequenceId, cached_tokens: u32 },
    /// The engine generated a token. For the first token, `since_ms` is the time since the arrival;
    /// for later tokens, the time since the previous token.
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
struct TimedSequence {
    id: SequenceId,
    sequence: ModelSequence,
    timeline: SequenceTimeline,
}

impl EngineRequest for TimedSequence {
    fn prompt_tokens(&self) -> u32 {
        self.sequence.prompt_tokens
    }

    fn output_tokens(&self) -> u32 {
        self.sequence.output_tokens
    }

    fn block_hashes(&self) -> &[u64] {
        &self.sequence.hashes
    }

    /// Returns the adapter's index plus one, or 0 for the base model.
    fn adapter(&self) -> u16 {
        self.sequence
            .adapter
            .map_or(0, |adapter| u16::try_from(adapter + 1).unwrap_or(u16::MAX))
    }
}

impl TimedSequence {
    fn token(&mut self, first: bool, now_ms: f64) -> SequenceEvent {
        let timeline = &mut self.timeline;
        let since_ms = now_ms
            - if first {
                timeline.arrived_ms
            } else {
                timeline.last_token_ms
            };
        timeline.last_token_ms = now_ms;
        if first {
            timeline.first_token_ms = now_ms;
        }
        SequenceEvent::Token {
            id: self.id,
            first,
            since_ms,
        }
    }

    fn finished(&mut self, finish: FinishReason, generated: u32, now_ms: f64) -> SequenceEvent {
        // The sequence of an embedding ends with its prefill, without a token.
        if generated == 0 && finish != FinishReason::Abort {
            self.timeline.first_token_ms = now_ms;
            self.timeline.last_token_ms = now_ms;
        }
        SequenceEvent::Finished {
            id: self.id,
            finish,
            prompt_tokens: self.sequence.prompt_tokens,
            generated,
            timeline: self.timeline,
            at_ms: now_ms,
        }
    }
}

#[derive(Debug)]
pub(super) struct ModelEngine {
    engine: BatchingEngine<TimedSequence>,
    /// The sequences that arrive, each with the time when it enters the queue.
    arriving: VecDeque<(f64, TimedSequence)>,
}

impl ModelEngine {
    pub(super) fn new(spec: SimulatedEngineSpec) -> Self {
        Self {
            engine: BatchingEngine::new(spec),
            arriving: VecDeque::new(),
        }
    }

    pub(super) fn load(&self) -> ModelEngineLoad {
        let engine = &self.engine;
        ModelEngineLoad {
            running: engine.running().len(),
            waiting: engine.waiting().len(),
            kv_usage: engine.kv_utilization(),
        }
    }

    /// Sets the factor on the measured step times, from the next step on.
    pub(super) fn set_slowdown(&mut self, slowdown: f64) {
        self.engine.set_slowdown(slowdown);
    }

    pub(super) fn preemptions(&self) -> u64 {
        self.engine.preemptions()
    }

    /// Returns how many adapters were loaded into GPU memory so far.
    pub(super) fn lora_loads(&self) -> u64 {
        self.engine.adapter_loads()
    }

    /// Returns the adapters of running and of waiting sequences, each adapter once.
    pub(super) fn adapters(&self) -> [Vec<AdapterIndex>; 2] {
        self.engine.adapters().map(|adapters| {
            adapters
                .into_iter()
                .map(|adapter| usize::from(adapter) - 1)
                .collect()
        })
    }

    /// Adds a sequence. The caller ensures that prompt and output fit into the KV memory, and that
    /// `id` is unique.
    pub(super) fn submit(&mut self, now_ms: f64, id: SequenceId, sequence: ModelSequence) {
        let timeline = SequenceTimeline {
            arrived_ms: now_ms,
            ..SequenceTimeline::default()
        };
        self.arriving.push_back((
            now_ms + self.engine.spec().api_ms,
            TimedSequence {
                id,
                sequence,
                timeline,
            },
        ));
    }

    /// Ends a sequence now. Returns `None` if it has ended before.
    pub(super) fn abort(&mut self, now_ms: f64, id: SequenceId) -> Option<SequenceEvent> {
        let arriving = self
            .arriving
            .iter()
            .position(|(_, sequence)| sequence.id == id)
            .and_then(|at| self.arriving.remove(at));
        let (mut sequence, generated) = match arriving {
            Some((_, sequence)) => (sequence, 0),
            None => self.engine.abort(|sequence| sequence.id == id)?,
        };
        Some(sequence.finished(FinishReason::Abort, generated, now_ms))
    }

    /// Returns the time when [`Self::step`] has something to do; `None` while idle.
    pub(super) fn next_event_ms(&self) -> Option<f64> {
        match self.engine.step() {
            Some(step) => Some(step.ends_ms),
            None => self.arriving.front().map(|(ready_ms, _)| *ready_ms),
        }
    }

    /// Ends the step in flight if the step is over at `now_ms`, and starts the next step if there
    /// is work.
    pub(super) fn step(&mut self, now_ms: f64) -> Vec<SequenceEvent> {
        let mut events = Vec::new();
        if let Some(step) = self.engine.step().filter(|step| step.ends_ms <= now_ms) {
            events.push(SequenceEvent::Stepped {
                tokens: step.tokens,
            });
            self.engine.end(|sequence, progress| {
                events.push(match progress {
                    SequenceProgress::Token { number } => sequence.token(number == 1, now_ms),
                    SequenceProgress::Ended => sequence.finished(
                        sequence.sequence.finish,
                        sequence.sequence.output_tokens,
                        now_ms,
                    ),
                });
            });
        }
        if self.engine.step().is_none() {
            while let Some((ready_ms, mut sequence)) = self
                .arriving
                .pop_front_if(|(ready_ms, _)| *ready_ms <= now_ms)
            {
                sequence.timeline.queued_ms = ready_ms;
                self.engine.submit(sequence);
            }
            self.engine.start(now_ms, |sequence, cached_tokens| {
                sequence.timeline.admitted_ms = now_ms;
                events.push(SequenceEvent::Admitted {
                    id: sequence.id,
                    cached_tokens,
                });
            });
        }
        events
    }
}

#[cfg(test)]
#[path = "engine_tests.rs"]
mod tests;
