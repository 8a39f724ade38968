//! Requests that Switchpoint's flow control, or the queue of another router, holds.

use super::{Simulation, WorldEvent};
use crate::router::ProxyRequest;

impl Simulation<'_> {
    /// Sends the held requests for which the pool has room now.
    pub(super) fn release(&mut self, now: f64) -> Result<(), String> {
        for proxy in 0..self.routers.len() {
            while let Some(request) = self
                .routers
                .get_mut(proxy)
                .and_then(|router| router.next_queued(now))
            {
                let Some(job) = self.workload.job(request) else {
                    continue;
                };
                let from = ProxyRequest {
                    job: &job,
                    class: self.workload.class(request),
                };
                let Some(router) = self.routers.get_mut(proxy) else {
                    continue;
                };
                let picked = router.pick_queued(self.policy, from, &self.engines, now)?;
                picked.map_or(Ok(()), |picked| self.dispatch(job, proxy, picked, now))?;
            }
        }
        for (proxy, router) in self.routers.iter_mut().enumerate() {
            if let Some(ms) = router.begins_to_tick() {
                self.events
                    .plan(now.floor() + ms, WorldEvent::Tick { proxy });
            }
        }
        Ok(())
    }
}
