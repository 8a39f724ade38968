//! Checks whether an engine had room for a request, given the requests of all proxies at that time.
//! The proxies get each other's load reports only after the sharing delay.

use pool_state::LedgerHold;
use scheduler::flow::RoomLimits;
use scheduler::in_flight::InFlight;
use scheduler::{LocalState, RankedList, Request, Route};

use super::Simulation;
use crate::engine::EngineJob;

impl Simulation<'_> {
    /// Whether the engine had room for the request just before a proxy sent the request. The rule
    /// is that of flow control, applied to all requests that all proxies had sent to the engine.
    /// Without flow control every engine has room.
    pub(super) fn has_room(&self, job: &EngineJob<'_>, engine: usize, hold: &LedgerHold) -> bool {
        let class = self.workload.class(job.request);
        let Some((index, endpoint)) = self
            .snapshot
            .indices()
            .nth(engine)
            .zip(self.endpoint(engine))
        else {
            return true;
        };
        let mut before = InFlight::default();
        before.others_mut().start(&[endpoint]);
        self.routers
            .iter()
            .for_each(|router| before.others_mut().add(endpoint, router.own_load(endpoint)));
        before.others_mut().subtract(endpoint, hold.load());
        let critical = class.priority >= self.workload.highest_priority || hold.is_owed();
        let request = Request {
            prompt_tokens: self.policy.prompt_tokens(job, class),
            ..Request::default()
        };
        let limits = RoomLimits {
            critical,
            ..RoomLimits::ALL
        };
        let route = RankedList::new([index]).map(Route::to);
        route.is_none_or(|route| {
            scheduler::has_room(
                &self.snapshot,
                &request,
                LocalState::new(&before),
                &route,
                limits,
            )
        })
    }
}
