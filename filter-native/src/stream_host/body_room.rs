//! Asks the worker for room for a request body that is not yet complete. All such bodies of a
//! worker share a limit.

use std::mem;

use exchange::bodies::{AwaitedBody, BodyRoom, STREAM_WITHOUT_LENGTH_BYTES, cost_bytes};
use exchange::{FilterStatus, RequestDriver};

use super::StreamHost;
use crate::panics::lock;
use crate::waker::WakeReason;

// === impl StreamHost ===

impl StreamHost {
    /// Begins to await the body. Returns whether there is room for it.
    pub(crate) fn body_begins(&mut self, driver: &RequestDriver<Self>) -> BodyRoom {
        self.body_ends(); // a proxy that begins twice must not leave the first one counted
        if lock(&self.worker).bodies.await_uncounted() {
            self.body = AwaitedBody::Uncounted;
            return BodyRoom::Free;
        }
        self.body_grows(driver, 0)
    }

    /// Records that the body has `size` bytes now. Returns whether there is room for it.
    pub(crate) fn body_grows(&mut self, driver: &RequestDriver<Self>, size: usize) -> BodyRoom {
        let now = self.process.now();
        let stream = self.waker();
        let config = &self.module.config;
        let longest = config
            .settings
            .body_limit_bytes
            .saturating_add(STREAM_WITHOUT_LENGTH_BYTES);
        let bytes_max = config.bodies_in_progress_bytes.max(longest);
        let bytes = cost_bytes(size, driver.declared_bytes().is_some());
        let mut worker = lock(&self.worker);
        let body = match mem::take(&mut self.body) {
            AwaitedBody::Counted(body) => body,
            uncounted => {
                worker.bodies.end(uncounted);
                worker.bodies.begin(driver.client(), stream, now)
            }
        };
        let room = worker.bodies.grow(&body, bytes, bytes_max, now);
        self.body = AwaitedBody::Counted(body);
        while let Some(refused) = worker.bodies.next_refused() {
            if let Some(refused) = refused.upgrade() {
                refused.wake(WakeReason::RefuseBody);
            }
        }
        room
    }

    /// Records that the body is complete or refused, or that the stream has ended.
    pub(crate) fn body_ends(&mut self) {
        let body = mem::take(&mut self.body);
        if !matches!(body, AwaitedBody::None) {
            lock(&self.worker).bodies.end(body);
        }
    }

    /// Refuses the request because there is no room for its body.
    pub(crate) fn refuse_body(&mut self, driver: &mut RequestDriver<Self>) -> FilterStatus {
        let is_slow = lock(&self.worker)
            .bodies
            .is_slow(&self.body, self.process.now());
        self.body_ends();
        driver.refuse_body(self, is_slow)
    }
}
