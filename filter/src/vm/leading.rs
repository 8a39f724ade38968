//! The work of a leader: a leader keeps the lease, and drives the link to the daemon.

use std::rc::Rc;

use exchange::Timestamp;
use proto::shared_data::VmEntry;

use super::VmState;
use super::parked_request::ParkedRequest;
use crate::host::{BodyBuffer, Host};
use crate::metrics::Stat;
use crate::shared_data::load_sharing::VmContext;
use crate::shared_data::snapshot_store::PublishError;
use crate::state_link::{CallResponse, LeaderContext, StateLink};
use front::config::FilterConfig;

// === impl VmState ===

impl<H: Host> VmState<H> {
    /// Handles a message on a stream.
    pub fn on_stream_message(
        &mut self,
        root: u32,
        stream: u32,
        size: usize,
    ) -> Vec<Rc<dyn ParkedRequest>> {
        self.watched.begin_callback();
        let now = self.host.now();
        if !self.link.is(stream) {
            return Vec::new();
        }
        let bytes = match self.host.buffer(BodyBuffer::StreamMessage, 0, size) {
            Ok(bytes) => bytes,
            Err(error) => {
                self.host_error("a message from the daemon", error);
                return Vec::new();
            }
        };
        let outcome = self.with_leader(root, now, |link, leader| link.on_message(leader, &bytes));
        if matches!(outcome, None | Some(Err(PublishError::Superseded))) {
            self.step_down(root);
        }
        self.take_due(now)
    }

    /// Handles a stream that the daemon or the network closed.
    pub fn on_stream_closed(&mut self, root: u32, stream: u32, why: &str) {
        let now = self.host.now();
        if !self.link.is(stream) {
            let _ = self.host.stream_cancel(stream);
        } else if self
            .with_leader(root, now, |link, leader| link.on_closed(leader, why))
            .is_none()
        {
            self.step_down(root);
        }
    }

    /// Handles the response to a call, which may be a call to the daemon.
    pub fn on_call_response(
        &mut self,
        root: u32,
        call: u32,
        answer: CallResponse,
    ) -> Vec<Rc<dyn ParkedRequest>> {
        self.watched.begin_callback();
        let now = self.host.now();
        let outcome = self.with_leader(root, now, |link, leader| {
            link.on_response(leader, call, answer)
        });
        if matches!(outcome, None | Some(Err(PublishError::Superseded))) {
            self.step_down(root);
        }
        self.take_due(now)
    }

    /// Tries to take or keep the lease, and does the leader's work while this VM leads.
    pub(super) fn contend_for_leader(&mut self, root: u32, config: &FilterConfig, now: Timestamp) {
        let before = self.epoch;
        self.epoch = self
            .lease
            .poll(&self.host, self.serves, config.lease_ms, now);
        if self.epoch.is_none() && before.is_some() {
            self.step_down(root);
        } else if self.epoch != before {
            self.metrics.count(Stat::LeadersElected);
            log::debug!("VM {:016x} leads", self.id);
            self.with_leader(root, now, |link, leader| link.begin(leader));
        }
        let successor = self.successor(now);
        if let (Some(successor), true) = (successor, self.epoch.is_some()) {
            self.lease
                .hand_over(&self.host, successor.vm, config.lease_ms, now);
            self.step_down(root);
            let _ = self.host.queue_push(successor.queue, b"leader");
        }
        self.with_leader(root, now, |link, leader| link.drive(leader));
    }

    /// Returns the VM that this leader should hand over to. A leader that serves requests hands
    /// over to a VM that serves no requests.
    fn successor(&self, now: Timestamp) -> Option<VmEntry> {
        if !self.serves || !self.lease.can_hand_over(now) {
            return None;
        }
        self.vm_slot
            .vm_table
            .alive(now)
            .map(|(_, row)| row)
            .find(|row| row.vm != self.id && !row.serves && row.queue != 0)
    }

    fn step_down(&mut self, root: u32) {
        self.epoch = None;
        self.link.close(&self.host, root);
    }

    /// Calls `act` as the leader. Returns `None` if this VM does not lead.
    pub(super) fn with_leader<R>(
        &mut self,
        root: u32,
        now: Timestamp,
        act: impl FnOnce(&mut StateLink, &mut LeaderContext<'_, H>) -> R,
    ) -> Option<R> {
        let (Some(epoch), Some(newest)) = (
            self.epoch.filter(|_| self.lease.holds(now)),
            self.roots.last(),
        ) else {
            return None;
        };
        let me = self
            .vm_slot
            .slot
            .filter(|_| newest.config.sharing)
            .map(|vm_slot| VmContext {
                vm: self.id,
                vm_slot,
                vm_table: &self.vm_slot.vm_table,
            });
        let mut replicas: Vec<_> = self
            .replicas
            .iter()
            .map(|replica| replica.borrow_mut())
            .collect();
        let mut leader = LeaderContext {
            host: &self.host,
            vm: self.id,
            root,
            epoch,
            now,
            config: &newest.config,
            replicas: replicas.iter_mut().map(|replica| &mut **replica).collect(),
            me,
            vm_table: &self.vm_slot.vm_table,
            metrics: &self.metrics,
        };
        Some(act(&mut self.link, &mut leader))
    }
}
