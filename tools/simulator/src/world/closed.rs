//! Closed sessions: a client sends its next request some time after the reply to its last request.

use super::{Simulation, WorldEvent};
use crate::workload::{Sampler, mix};

impl Simulation<'_> {
    /// Returns the requests whose times of arrival do not depend on other requests, each with its
    /// time: all requests of an open workload, and the first request of each closed session.
    pub(super) fn arrivals(&self) -> Vec<(f64, u32)> {
        let requests = self.workload.requests().iter().zip(0..);
        requests
            .filter(|(request, _)| request.pause_ms.is_none())
            .map(|(request, number)| (request.at, number))
            .collect()
    }

    /// Returns the proxy at which a request arrives: a random proxy, or for closed sessions each
    /// proxy in turn.
    pub(super) fn proxy_of_arrival(&self, arrival: usize, dice: &mut Sampler) -> usize {
        match self.setting.proxies {
            0 | 1 => 0,
            proxies if self.workload.is_closed => arrival % proxies,
            proxies => dice.below(proxies),
        }
    }

    /// Returns the proxy for a later request of a session: the proxy of the session's previous
    /// request, or a random proxy if sessions roam.
    pub(super) fn proxy_of_turn(&self, request: u32) -> usize {
        if self.workload.roams {
            return (mix(u64::from(request), 31) % self.setting.proxies.max(1) as u64) as usize;
        }
        request
            .checked_sub(1)
            .and_then(|before| self.records.get(before as usize))
            .map_or(0, |before| before.proxy)
    }

    /// Plans the next request of a closed session, after a reply has ended.
    pub(super) fn plan_next_turn(&mut self, request: u32, now: f64) {
        let next = request.saturating_add(1);
        if let Some(pause_ms) = self
            .workload
            .requests()
            .get(next as usize)
            .and_then(|next| next.pause_ms)
        {
            self.events
                .plan(now + pause_ms, WorldEvent::Sends { request: next });
        }
    }
}
