//! Asks the VM for room for a request body that is not yet complete. All such bodies of a VM share
//! a limit.

use exchange::{FilterStatus, RequestDriver};

use super::filter_host::FilterHost;
use crate::host::Host;
use crate::vm::bodies::BodyRoom;

// === impl FilterHost ===

impl<H: Host> FilterHost<H> {
    /// Records that the body from this client has `size` bytes now. Returns whether there is room
    /// for it.
    pub(super) fn body_grows(&mut self, client: u64, size: usize) -> BodyRoom {
        let now = self.proxy.now();
        let body = self.body.take().unwrap_or_else(|| {
            self.with_vm(|vm| {
                let bodies = &mut vm.watched().bodies;
                bodies.begin(client, self.stream.clone(), now)
            })
        });
        let bytes_max = self
            .config
            .bodies_in_progress_bytes
            .max(self.config.settings.body_limit_bytes);
        let room = self.with_vm(|vm| {
            let room = vm.watched().bodies.grow(&body, size, bytes_max, now);
            if room == BodyRoom::AfterRefusals {
                vm.run_root_soon();
            }
            room
        });
        self.body = Some(body);
        room
    }

    /// Records that the body is complete or refused, or that the stream has ended.
    pub(super) fn body_ends(&mut self) {
        if let Some(body) = self.body.take() {
            self.with_vm(|vm| vm.watched().bodies.remove(&body));
        }
    }

    /// Refuses the request because there is no room for its body.
    pub(super) fn refuse_body(&mut self, driver: &mut RequestDriver<Self>) -> FilterStatus {
        let now = self.proxy.now();
        let is_slow = self.body.as_ref().is_some_and(|body| body.is_slow(now));
        self.body_ends();
        driver.refuse_body(self, is_slow)
    }
}
