//! Asks the VM for room for a request body that is not yet complete. All such bodies of a VM share
//! a limit.

use std::mem;

use exchange::bodies::{AwaitedBody, BodyRoom, STREAM_WITHOUT_LENGTH_BYTES, cost_bytes};
use exchange::{FilterStatus, RequestDriver};

use super::filter_host::FilterHost;
use crate::host::Host;

// === impl FilterHost ===

impl<H: Host> FilterHost<H> {
    /// Begins to await the body. Returns whether there is room for it.
    pub(super) fn body_begins(&mut self, driver: &RequestDriver<Self>) -> BodyRoom {
        self.body_ends(); // a proxy that begins twice must not leave the first one counted
        if self.with_vm(|vm| vm.watched().bodies.await_uncounted()) {
            self.body = AwaitedBody::Uncounted;
            return BodyRoom::Free;
        }
        self.body_grows(driver, 0)
    }

    /// Records that the body has `size` bytes now. Returns whether there is room for it.
    pub(super) fn body_grows(&mut self, driver: &RequestDriver<Self>, size: usize) -> BodyRoom {
        let now = self.proxy.now();
        let body = match mem::take(&mut self.body) {
            AwaitedBody::Counted(body) => body,
            uncounted => self.with_vm(|vm| {
                let bodies = &mut vm.watched().bodies;
                bodies.end(uncounted);
                bodies.begin(driver.client(), self.stream.clone(), now)
            }),
        };
        let settings = &self.config.settings;
        let longest = settings
            .body_limit_bytes
            .saturating_add(STREAM_WITHOUT_LENGTH_BYTES);
        let bytes_max = self.config.bodies_in_progress_bytes.max(longest);
        let bytes = cost_bytes(size, driver.declared_bytes().is_some());
        let room = self.with_vm(|vm| {
            let room = vm.watched().bodies.grow(&body, bytes, bytes_max, now);
            if room == BodyRoom::AfterRefusals {
                vm.wake_self();
            }
            room
        });
        self.body = AwaitedBody::Counted(body);
        room
    }

    /// Records that the body is complete or refused, or that the stream has ended.
    #[inline(never)] // several callers, and the wasm module should be small
    pub(super) fn body_ends(&mut self) {
        let body = mem::take(&mut self.body);
        if !matches!(body, AwaitedBody::None) {
            self.with_vm(|vm| vm.watched().bodies.end(body));
        }
    }

    /// Refuses the request because there is no room for its body.
    pub(super) fn refuse_body(&mut self, driver: &mut RequestDriver<Self>) -> FilterStatus {
        let now = self.proxy.now();
        let is_slow = self.with_vm(|vm| vm.watched().bodies.is_slow(&self.body, now));
        self.body_ends();
        driver.refuse_body(self, is_slow)
    }
}
