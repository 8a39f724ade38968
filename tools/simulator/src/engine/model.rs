//! The interface of an engine in a run. Times are ms of virtual time.

use super::{EngineInternals, EngineJob, SimulatedEngineSpec, StepEvent};

/// An engine whose steps the run starts and ends. The tokens of a step are generated at its end.
pub(crate) trait EngineSimulator<'w> {
    fn spec(&self) -> &SimulatedEngineSpec;

    /// Makes the following steps take `times` as long as now.
    fn slow_down(&mut self, times: f64);

    /// Empties the prefix cache. Running requests continue.
    fn forget(&mut self);

    /// Loses all requests and the cache, as a process that ends.
    ///
    /// # Errors
    /// When the model cannot do that.
    fn fail(&mut self) -> Result<(), String> {
        Err("this model of an engine cannot fail".to_owned())
    }

    /// Drops a request whose client has left, if the model can; else it is computed to its end.
    fn abort(&mut self, _request: u32) {}

    /// Records that the request was sent here. It arrives after the API overhead.
    fn announce(&mut self, job: EngineJob<'w>);

    /// Adds the request to the queue.
    fn submit(&mut self, job: EngineJob<'w>, now: f64) -> Result<(), String>;

    /// When the step in flight ends.
    fn busy_until(&self) -> Option<f64>;

    /// The number of waiting and of running requests.
    fn counts(&self) -> (usize, usize);

    fn kv_utilization(&self) -> f64;

    /// LoRA adapters of running requests, and further ones of waiting requests.
    fn adapters(&self) -> (Vec<u16>, Vec<u16>) {
        (Vec::new(), Vec::new())
    }

    /// Calls `each` with every running request and the number of its tokens so far.
    fn progress(&self, each: &mut dyn FnMut(u32, u32));

    /// Starts the next step at `now`, if there is work, and returns when it ends. Calls `admitted`
    /// with each request that is admitted for the first time and its cached tokens.
    fn start(
        &mut self,
        now: f64,
        admitted: &mut dyn FnMut(u32, u32),
    ) -> Result<Option<f64>, String>;

    /// Ends the step in flight.
    fn end(&mut self, events: &mut Vec<StepEvent>) -> Result<(), String>;

    /// Tokens of the job's prompt that are cached here, or will be once the prompts ahead of it are
    /// computed. Only the oracle policy uses it.
    fn would_find(&self, _job: &EngineJob<'w>) -> u32 {
        0
    }

    /// All work of the engine. Only the oracle policy uses it.
    fn inside(&self) -> EngineInternals {
        EngineInternals::default()
    }
}
