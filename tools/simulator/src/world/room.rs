//! Checks whether an engine had room for a request, given the requests of all proxies at that time.
//! The proxies themselves learn of each other's requests one sharing delay later.

use pool_state::LedgerHold;
use scheduler::flow::RoomLimits;
use scheduler::in_flight::InFlight;
use scheduler::{LocalState, RankedList, Request, Route};

use super::Simulation;
use crate::engine::EngineJob;

impl Simulation<'_> {
    /// Whether the engine had room for the request just before the request was sent. Decides by the
    /// rule of flow control, given all requests that the proxies had sent to the engine. Without
    /// flow control every engine has room.
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
