//! An engine in a run, which is a [`BatchingEngine`] of the crate `engine-sim`. Times are in ms of
//! virtual time.

pub(crate) use engine_sim::{SimulatedEngineSpec, StepTimeModel};

use engine_sim::{BatchingEngine, EngineRequest, SequenceProgress};

/// The tokens in a block of the router's prefix index, and in a KV block of engines outside the
/// race. vLLM's blocks and the blocks of the race have 16 tokens. Blocks of 16 tokens take longer
/// to simulate and change the results little.
pub(crate) const BLOCK_TOKENS: usize = 64;

/// A request that an engine serves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EngineJob<'w> {
    pub(crate) request: u32,
    pub(crate) prompt: u32,
    /// The number of output tokens, at least 1.
    pub(crate) output: u32,
    /// The hashes of the prompt's KV blocks.
    pub(crate) blocks: &'w [u64],
    /// The hashes with which a proxy finds the prompt in its prefix index.
    pub(crate) hashes: &'w [u64],
    /// Whether another engine computed the prompt and transferred the KV (without the last token)
    /// to this engine.
    pub(crate) prefilled: bool,
}

/// The progress of a request at the end of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StepEvent {
    /// The first token of the request was generated.
    First(u32),
    /// The engine has generated all tokens of the request's output.
    Done(u32),
}

#[derive(Clone, Debug)]
pub(crate) struct SimulatedEngine<'w> {
    engine: BatchingEngine<EngineJob<'w>>,
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
        }
    }

    pub(crate) fn spec(&self) -> &SimulatedEngineSpec {
        self.engine.spec()
    }

    /// Empties the prefix cache. Running requests continue.
    pub(crate) fn forget(&mut self) {
        self.engine.clear_cache();
    }

    /// Loses all requests and the cache, like a process that ends.
    pub(crate) fn fail(&mut self) {
        *self = Self::new(*self.engine.spec());
    }

    pub(crate) fn abort(&mut self, request: u32) {
        let _ = self.engine.abort(|job| job.request == request); // the request may still be on its way
    }

    pub(crate) fn submit(&mut self, job: EngineJob<'w>) {
        self.engine.submit(job);
    }

    /// Returns the time when the running step ends, or `None` if no step runs.
    pub(crate) fn busy_until(&self) -> Option<f64> {
        self.engine.step().map(|step| step.ends_ms)
    }

    /// Returns the number of waiting requests and the number of running requests.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.engine.waiting().len(), self.engine.running().len())
    }

    pub(crate) fn kv_utilization(&self) -> f64 {
        self.engine.kv_utilization()
    }

    /// Calls `each` with the number of each running request and the number of tokens that it has so
    /// far.
    pub(crate) fn progress(&self, mut each: impl FnMut(u32, u32)) {
        self.engine
            .running()
            .for_each(|sequence| each(sequence.request().request, sequence.generated()));
    }

    /// Starts the next step at `now` if the engine has work. Returns the time when the step ends.
    /// Calls `admitted` with each request that is admitted for the first time, and with the
    /// request's cached tokens.
    pub(crate) fn start(&mut self, now: f64, mut admitted: impl FnMut(u32, u32)) -> Option<f64> {
        self.engine
            .start(now, |job, cached| admitted(job.request, cached))
            .map(|step| step.ends_ms)
    }

    /// Ends the running step, and appends the progress of requests to `events`.
    pub(crate) fn end(&mut self, events: &mut Vec<StepEvent>) {
        self.engine.end(|job, progress| match progress {
            SequenceProgress::Token { number: 1 } => events.push(StepEvent::First(job.request)),
            SequenceProgress::Token { .. } => {}
            SequenceProgress::Ended => events.push(StepEvent::Done(job.request)),
        });
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
