//! The engine of a run (`engine-sim`), and the requests on their way to it. Times are ms of virtual
//! time.

pub(crate) use engine_sim::{SimulatedEngineSpec, StepTimeModel};

use engine_sim::{BatchingEngine, EngineRequest, EngineSequence, SequenceProgress};

/// Tokens of a block in the router's prefix index, and of a KV block in the engines of the
/// campaigns. vLLM's blocks have 16, as those of the race, which takes longer to simulate and
/// changes little there.
pub(crate) const BLOCK_TOKENS: usize = 64;

/// A request as an engine gets it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EngineJob<'w> {
    pub(crate) request: u32,
    /// Prompt tokens.
    pub(crate) prompt: u32,
    /// Output tokens, at least 1.
    pub(crate) output: u32,
    /// Hashes of the prompt's KV blocks.
    pub(crate) blocks: &'w [u64],
    /// Hashes of the prompt in a proxy's prefix index.
    pub(crate) hashes: &'w [u64],
    /// True if another engine computed the prompt and its KV, all but the last token, is here.
    pub(crate) prefilled: bool,
}

/// The progress of a request at the end of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StepEvent {
    /// The first token of the request was generated.
    First(u32),
    /// The request has all its output.
    Done(u32),
}

/// The work inside an engine, which only the oracle policy sees.
#[derive(Default)]
pub(crate) struct EngineInternals {
    /// Prompts not yet computed: tokens left, tokens done, output.
    pub(crate) prefills: Vec<(f64, f64, f64)>,
    /// Sequences that decode: tokens left, tokens of context.
    pub(crate) decodes: Vec<(f64, f64)>,
}

/// An engine, and the requests on their way to it.
#[derive(Clone, Debug)]
pub(crate) struct SimulatedEngine<'w> {
    engine: BatchingEngine<EngineJob<'w>>,
    /// Announced and not yet submitted.
    coming: Vec<EngineJob<'w>>,
}

impl EngineRequest for EngineJob<'_> {
    fn prompt_tokens(&self) -> u32 {
        self.prompt
    }

    fn output_tokens(&self) -> u32 {
        self.output
    }

    fn block_hashes(&self) -> &[u64] {
        self.blocks
    }

    fn is_prefilled(&self) -> bool {
        self.prefilled
    }
}

// === impl SimulatedEngine ===

impl<'w> SimulatedEngine<'w> {
    pub(crate) fn new(spec: SimulatedEngineSpec) -> Self {
        Self {
            engine: BatchingEngine::new(spec),
            coming: Vec::new(),
        }
    }

    pub(crate) fn spec(&self) -> &SimulatedEngineSpec {
        self.engine.spec()
    }

    /// Empties the prefix cache. Running requests continue.
    pub(crate) fn forget(&mut self) {
        self.engine.clear_cache();
    }

    /// Loses all requests and the cache, as a process that ends.
    pub(crate) fn fail(&mut self) {
        *self = Self::new(*self.engine.spec());
    }

    pub(crate) fn abort(&mut self, request: u32) {
        self.coming.retain(|job| job.request != request);
        let _ = self.engine.abort(|job| job.request == request); // one on its way is not there
    }

    /// Records that the request was sent here. It arrives after the API overhead.
    pub(crate) fn announce(&mut self, job: EngineJob<'w>) {
        self.coming.push(job);
    }

    pub(crate) fn submit(&mut self, job: EngineJob<'w>) {
        self.coming.retain(|other| other.request != job.request);
        self.engine.submit(job);
    }

    /// When the step in flight ends.
    pub(crate) fn busy_until(&self) -> Option<f64> {
        self.engine.step().map(|step| step.ends_ms)
    }

    /// The number of waiting and of running requests.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.engine.waiting().len(), self.engine.running().len())
    }

    pub(crate) fn kv_utilization(&self) -> f64 {
        self.engine.kv_utilization()
    }

    /// Calls `each` with every running request and the number of its tokens so far.
    pub(crate) fn progress(&self, mut each: impl FnMut(u32, u32)) {
        self.engine
            .running()
            .for_each(|sequence| each(sequence.request().request, sequence.generated()));
    }

    /// Starts the next step at `now`, if there is work, and returns when it ends. Calls `admitted`
    /// with each request that is admitted for the first time and its cached tokens.
    pub(crate) fn start(&mut self, now: f64, mut admitted: impl FnMut(u32, u32)) -> Option<f64> {
        self.engine
            .start(now, |job, cached| admitted(job.request, cached))
            .map(|step| step.ends_ms)
    }

    /// Ends the step in flight.
    pub(crate) fn end(&mut self, events: &mut Vec<StepEvent>) {
        self.engine.end(|job, progress| match progress {
            SequenceProgress::Token { number: 1 } => events.push(StepEvent::First(job.request)),
            SequenceProgress::Token { .. } => {}
            SequenceProgress::Ended => events.push(StepEvent::Done(job.request)),
        });
    }

    /// Tokens of the job's prompt that are cached here, or will be once the prompts ahead of it are
    /// computed. Only the oracle policy uses it.
    pub(crate) fn would_find(&self, job: &EngineJob<'w>) -> u32 {
        let cached = self.engine.cached_blocks(job.blocks);
        let longest = |blocks: &[u64]| {
            blocks
                .iter()
                .zip(job.blocks)
                .take_while(|(a, b)| a == b)
                .count()
        };
        let ahead = self
            .engine
            .waiting()
            .map(EngineSequence::request)
            .chain(&self.coming);
        let found = ahead
            .map(|other| longest(other.blocks))
            .max()
            .unwrap_or(0)
            .max(cached);
        u32::try_from(found * self.engine.spec().block_tokens)
            .unwrap_or(u32::MAX)
            .min(job.prompt.saturating_sub(1))
    }

    /// All work of the engine. Only the oracle policy uses it.
    pub(crate) fn inside(&self) -> EngineInternals {
        let mut inside = EngineInternals {
            prefills: Vec::new(),
            decodes: Vec::new(),
        };
        for sequence in self.engine.running() {
            let computed = sequence.computed();
            let target = sequence.target();
            let output = f64::from(sequence.request().output - sequence.generated());
            if sequence.generated() == 0 && computed < target {
                inside
                    .prefills
                    .push(((target - computed) as f64, computed as f64, output));
            } else {
                inside.decodes.push((output, computed as f64));
            }
        }
        let waiting = self
            .engine
            .waiting()
            .map(|sequence| (sequence.request(), sequence.target(), sequence.generated()));
        let coming = self.coming.iter().map(|job| (job, job.prompt as usize, 0));
        for (job, target, generated) in waiting.chain(coming) {
            let found = (self.engine.cached_blocks(job.blocks) * self.engine.spec().block_tokens)
                .min(target - 1);
            inside.prefills.push((
                (target - found) as f64,
                found as f64,
                f64::from(job.output - generated),
            ));
        }
        inside
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOB: EngineJob<'_> = EngineJob {
        request: 0,
        prompt: 640,
        output: 5,
        blocks: &[],
        hashes: &[],
        prefilled: false,
    };

    #[test]
    fn a_prompt_is_found_in_the_cache_and_in_prompts_ahead() {
        let blocks: Vec<u64> = (1..=10).collect();
        let job = EngineJob {
            blocks: &blocks,
            ..JOB
        };
        let mut engine = SimulatedEngine::new(crate::hardware::LLAMA_8B_H100);
        assert_eq!(engine.would_find(&job), 0);
        engine.announce(job);
        let other = EngineJob {
            request: 1,
            prompt: 700,
            ..job
        };
        assert_eq!(
            (engine.would_find(&job), engine.would_find(&other)),
            (639, 640),
            "on its way here"
        );
        engine.submit(job);
        assert_eq!(
            (engine.counts(), engine.would_find(&other)),
            ((1, 0), 640),
            "in the queue"
        );
        assert_eq!(engine.inside().prefills, [(640.0, 0.0, 5.0)]);
        engine.start(0.0, |_, _| ()).unwrap();
        assert_eq!(
            (engine.counts(), engine.would_find(&other)),
            ((0, 1), 640),
            "in the cache"
        );
        assert_eq!(engine.inside().decodes, [(5.0, 640.0)]);
    }

    #[test]
    fn a_request_has_one_first_token_and_one_end() {
        let mut engine = SimulatedEngine::new(crate::hardware::LLAMA_8B_H100);
        engine.submit(JOB);
        let mut now = 0.0;
        let mut events = Vec::new();
        while let Some(ends) = engine.start(now, |_, _| ()) {
            now = ends;
            assert_eq!(engine.busy_until(), Some(ends));
            engine.end(&mut events);
        }
        assert_eq!(events, [StepEvent::First(0), StepEvent::Done(0)]);
    }
}
