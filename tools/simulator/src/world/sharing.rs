//! The data that proxies publish to each other.

use super::{SharingMode, Simulation, WorldEvent};

impl Simulation<'_> {
    /// Publishes the changes of `proxy` to the other proxies. With flow control, the proxy
    /// publishes the end of a request together with the start of the request that takes its room,
    /// because a real proxy collects changes for 5 ms.
    pub(super) fn publish(&mut self, proxy: usize, now: f64) {
        match self.routers.get_mut(proxy).filter(|_| self.policy.holds()) {
            Some(router) => router.publishes = true,
            None => self.publish_now(proxy, now),
        }
    }

    /// Publishes the changes of all proxies that wait for the end of this time step.
    pub(super) fn publish_all(&mut self, now: f64) {
        for proxy in 0..self.routers.len() {
            if self
                .routers
                .get_mut(proxy)
                .is_some_and(|router| std::mem::take(&mut router.publishes))
            {
                self.publish_now(proxy, now);
            }
        }
    }

    fn publish_now(&mut self, proxy: usize, now: f64) {
        let (SharingMode::After(delay), Some(router)) =
            (self.setting.sharing, self.routers.get_mut(proxy))
        else {
            return;
        };
        let update = router.publish(now);
        self.events.plan(
            now + delay,
            WorldEvent::Published {
                from: proxy,
                update,
            },
        );
    }
}
