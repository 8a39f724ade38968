//! What a run asks of an engine, whoever wrote it. Times in ms of virtual time.

use super::{EngineInternals, EngineJob, SimulatedEngineSpec, StepEvent};

/// An engine that steps when it is told to. What a step computed is known at its end.
pub(crate) trait EngineSimulator<'w> {
    fn spec(&self) -> &SimulatedEngineSpec;

    /// From now on its steps take so many times as long as its spec says.
    fn slow_down(&mut self, times: f64);

    /// Everything cached is gone; what runs goes on.
    fn forget(&mut self);

    /// The request was sent here and arrives after its API overhead.
    fn announce(&mut self, job: EngineJob<'w>);

    /// The request is here.
    fn submit(&mut self, job: EngineJob<'w>, now: f64) -> Result<(), String>;

    /// When the step in flight ends.
    fn busy_until(&self) -> Option<f64>;

    /// Requests that wait, and those that run.
    fn counts(&self) -> (usize, usize);

    fn kv_utilization(&self) -> f64;

    /// LoRA adapters in use, and those of requests that wait.
    fn adapters(&self) -> (Vec<u16>, Vec<u16>) {
        (Vec::new(), Vec::new())
    }

    /// Calls `each` with every request that runs and how many tokens it put out.
    fn progress(&self, each: &mut dyn FnMut(u32, u32));

    /// Starts the next step at `now`, if there is anything to do; when it ends. `admitted` is told of each request's first admission and what
    /// was cached of it.
    fn start(&mut self, now: f64, admitted: &mut dyn FnMut(u32, u32)) -> Result<Option<f64>, String>;

    /// Ends the step in flight.
    fn end(&mut self, events: &mut Vec<StepEvent>) -> Result<(), String>;

    /// Tokens of the job's prompt that it would find here: in the cache, or of prompts ahead of it. What only the oracle asks.
    fn would_find(&self, _job: &EngineJob<'w>) -> u32 {
        0
    }

    /// All that is under way. What only the oracle asks.
    fn inside(&self) -> EngineInternals {
        EngineInternals::default()
    }
}
