//! Resumes held requests. The VMs of a process take turns, in one shared order of requests.

use std::rc::Rc;

use exchange::Timestamp;
use pool_state::queues::FlowTurn;
use proto::shared_data::room_ask;
use scheduler::flow::RoomAsk;

use super::parked_request::ParkedRequest;
use super::replica::PoolReplica;
use super::{QueueRelease, VmState};
use crate::host::Host;
use crate::shared_data::load_sharing::SharingOccasion;

/// The maximum number of wake-ups that one callback takes from the queue. The next callback takes
/// the rest.
pub(super) const WAKES_MAX: usize = 1_024;
/// The message that wakes a VM whose held request is next.
pub(super) const QUEUED_WAKE: &[u8] = b"held";

/// The maximum number of consecutive checks of the order that find no request to resume.
const TURNS_MAX: usize = 64;

/// The maximum number of times, between two ticks, that a VM wakes itself without resuming a
/// request. A few such wake-ups are normal, because another VM may write the shared order of held
/// requests first. Envoy handles a wake-up of the same VM before anything else of the thread, so
/// without a limit a fault in this code would stop the thread.
const IDLE_RELEASES_MAX: u8 = 64;

// === impl VmState ===

impl<H: Host> VmState<H> {
    /// Begins to resume held requests. Returns false, without a host call, if no held request may
    /// be resumed now.
    pub fn begin_release(&mut self) -> bool {
        let due = self.is_release_due();
        self.releasing = if due {
            QueueRelease::Running
        } else {
            QueueRelease::Idle
        };
        due
    }

    /// Stops resuming held requests. Requests that are still due wait for a wake-up, which this
    /// function sends. After [`IDLE_RELEASES_MAX`] wake-ups that resumed nothing, the requests wait
    /// for the next tick.
    pub fn end_release(&mut self, resumed: bool) {
        self.releasing = QueueRelease::Idle;
        if !self.is_release_due() {
            return;
        }
        // A callback that used up its local replies on other requests does not count as idle.
        if !resumed && self.watched.may_reply() {
            self.ticks.idle_releases = self.ticks.idle_releases.saturating_add(1);
        }
        if self.ticks.idle_releases < IDLE_RELEASES_MAX {
            self.wake_self();
        }
    }

    /// Makes a root context resume held requests of the pool: in this VM, or in the VM whose
    /// request is next.
    pub fn release_soon(&mut self, replica: &mut PoolReplica) {
        if self.releasing == QueueRelease::Idle && !self.pass_turn(replica, self.host.now()) {
            self.wake_self();
        }
    }

    /// Wakes this VM, so that a root context resumes held requests. If this VM has no slot, its
    /// next tick resumes held requests.
    pub fn wake_self(&mut self) {
        if self.releasing == QueueRelease::Idle
            && self.vm_slot.slot.is_some()
            && self.vm_slot.queue != 0
        {
            match self.host.queue_push(self.vm_slot.queue, QUEUED_WAKE) {
                Ok(()) => self.releasing = QueueRelease::Woken,
                Err(error) => self.host_error("a wake-up", error),
            }
        }
    }

    /// Returns the next held request of a pool. While VMs share an order, returns a request only if
    /// it is this VM's turn.
    pub(super) fn next_queued_of(
        &self,
        replica: &mut PoolReplica,
        now: Timestamp,
    ) -> Option<Rc<dyn ParkedRequest>> {
        replica.pool.look_at_freed(now);
        let Some(me) = self
            .vm_context()
            .filter(|_| replica.pool.queues().is_shared())
        else {
            return replica.next_queued(now);
        };
        self.pass_asks(replica, now);
        for _ in 0..TURNS_MAX {
            if !replica.pool.queues().is_due() {
                return None;
            }
            match replica
                .flow_order
                .turn(&self.host, &mut replica.pool, me.vm, true, now)
            {
                FlowTurn::Rest | FlowTurn::WakeSelf => return None,
                FlowTurn::Write(wake) if self.write_order(replica, wake, now) => return None,
                FlowTurn::Write(_) => {}
                FlowTurn::Resume(number) | FlowTurn::Try(number) => {
                    if let Some(stream) = replica.queued_stream(number) {
                        // The loads must be read after the order (see `SharedOrder`).
                        self.receive_loads(replica, now, SharingOccasion::Claim);
                        return Some(stream);
                    }
                }
            }
        }
        None
    }

    /// Does this VM's next steps in the shared order, except resuming a request. Returns false if a
    /// root context must resume a request, because a request of this VM is next.
    pub(super) fn pass_turn(&self, replica: &mut PoolReplica, now: Timestamp) -> bool {
        let Some(me) = self
            .vm_context()
            .filter(|_| replica.pool.queues().is_shared())
        else {
            return false;
        };
        self.pass_asks(replica, now);
        for _ in 0..TURNS_MAX {
            if !replica.pool.queues().is_due() {
                return true;
            }
            match replica
                .flow_order
                .turn(&self.host, &mut replica.pool, me.vm, false, now)
            {
                FlowTurn::Rest => return true,
                FlowTurn::Write(wake) if self.write_order(replica, wake, now) => return true,
                FlowTurn::Write(_) => {}
                FlowTurn::Resume(_) | FlowTurn::Try(_) | FlowTurn::WakeSelf => return false,
            }
        }
        false
    }

    /// Checks the endpoints where requests made room ([`exchange::ManagedPool::look_at_freed`]),
    /// after this VM has published its load. If this VM knows of no room, it first reads the loads
    /// of the other VMs.
    pub fn look_at_freed(&self, replica: &mut PoolReplica, now: Timestamp) {
        let queues = replica.pool.queues();
        if queues.has_freed() && queues.is_shared() && !replica.pool.has_freed_room(now) {
            self.receive_loads(replica, now, SharingOccasion::Claim);
        }
        replica.pool.look_at_freed(now);
    }

    /// Writes the order, then wakes the VM `wake`. Returns false if another VM has written the
    /// order since this VM read it.
    fn write_order(&self, replica: &mut PoolReplica, wake: Option<u64>, now: Timestamp) -> bool {
        let is_written = replica.flow_order.write(&self.host, &mut replica.pool);
        wake.filter(|_| is_written)
            .into_iter()
            .for_each(|vm| self.wake(vm, now));
        is_written
    }

    /// Wakes another VM, because its held request is next.
    fn wake(&self, vm: u64, now: Timestamp) {
        let row = self
            .vm_slot
            .vm_table
            .alive(now)
            .map(|(_, row)| row)
            .find(|row| row.vm == vm && row.queue != 0);
        if let Some(Err(error)) = row.map(|row| self.host.queue_push(row.queue, QUEUED_WAKE)) {
            self.host_error("a wake-up", error);
        }
    }

    /// Asks other VMs to make the room that held requests of this VM need.
    fn pass_asks(&self, replica: &mut PoolReplica, now: Timestamp) {
        for ask in replica.pool.queues_mut().take_asks() {
            let others = self
                .vm_slot
                .vm_table
                .alive(now)
                .filter(|(_, row)| row.serves && row.vm != self.id)
                .count();
            self.pass_ask(
                &replica.name,
                ask,
                u32::try_from(others).unwrap_or(u32::MAX),
                now,
            );
        }
    }

    /// Asks the next VM of the table to make room. `left` is the number of VMs that may still be
    /// asked.
    fn pass_ask(&self, pool: &str, ask: RoomAsk, left: u32, now: Timestamp) {
        let Some(left) = left.checked_sub(1) else {
            return;
        };
        let own = self.vm_slot.slot;
        let others = || {
            self.vm_slot
                .vm_table
                .alive(now)
                .filter(|(_, row)| row.serves && row.queue != 0 && row.vm != self.id)
        };
        let next = others()
            .find(|(slot, _)| Some(*slot) > own)
            .or_else(|| others().next());
        let ask = |queue| {
            self.host
                .queue_push(queue, &room_ask::write(pool, ask, left))
        };
        if let Some(Err(error)) = next.map(|(_, row)| ask(row.queue)) {
            self.host_error("a message that asks for room", error);
        }
    }

    /// Handles another VM's message that asks for room: aborts a running request of low priority,
    /// or asks the next VM.
    pub(super) fn on_ask(
        &self,
        replica: &mut PoolReplica,
        ask: RoomAsk,
        left: u32,
        now: Timestamp,
    ) {
        // This reading also shows that the VM that asks holds requests, so this VM will wake that
        // VM.
        self.receive_loads(replica, now, SharingOccasion::Claim);
        if !replica.pool.queues_mut().give_room(ask, now) {
            self.pass_ask(&replica.name, ask, left, now);
        }
    }

    /// Reads the requests that the other VMs hold, if at least one VM holds requests.
    pub fn read_order(&self, replica: &mut PoolReplica, now: Timestamp) {
        if let Some(me) = self
            .vm_context()
            .filter(|_| replica.pool.queues().is_shared())
        {
            replica
                .flow_order
                .read_into(&self.host, &mut replica.pool, me.vm, now);
        }
    }

    /// Writes into the order the requests that this VM holds, and the load claimed by a pick.
    /// Returns false if another VM has written the order since this VM read it.
    pub fn claim(&self, replica: &mut PoolReplica, now: Timestamp) -> bool {
        match self
            .vm_context()
            .filter(|_| replica.pool.queues().has_flow_peers())
        {
            None => true,
            Some(me) => {
                let wake = replica.flow_order.put(&mut replica.pool, me.vm, now);
                self.write_order(replica, wake, now)
            }
        }
    }
}
