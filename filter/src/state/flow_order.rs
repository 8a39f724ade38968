//! The order of the requests that all VMs of the process hold for one pool
//! ([`scheduler::flow::SharedOrder`]), in one value of shared data.

use std::rc::Rc;

use exchange::{ManagedPool, Timestamp};
use pool_state::queues::FlowTurn;
use proto::backlog;
use proto::shared_data::flow_order;
use scheduler::flow::SharedOrder;

use super::VmState;
use super::load_sharing::SharingOccasion;
use super::parked_request::ParkedRequest;
use super::replica::PoolReplica;
use crate::host::{Host, HostError, WriteCondition};

/// The most looks at the order of held requests in a row without one to resume.
const TURNS_MAX: usize = 64;

/// The order, as this VM last read it.
#[derive(Debug)]
pub struct FlowOrder {
    key: String,
    order: SharedOrder,
    /// The condition of the next write; `None` after a write.
    read: Option<WriteCondition>,
}

// === impl FlowOrder ===

impl FlowOrder {
    /// Makes the order of `pool`, a name from the filter's configuration.
    #[must_use]
    pub fn new(pool: &str) -> Self {
        Self { key: format!("switchpoint/1/pool/{pool}/held"), order: SharedOrder::default(), read: None }
    }

    /// Reads the order. False if the proxy refuses.
    fn read<H: Host>(&mut self, host: &H) -> bool {
        let Ok(shared) = host.shared(&self.key) else { return false };
        let order = shared.as_ref().and_then(|shared| flow_order::read(&shared.bytes));
        self.read = Some(shared.map_or(WriteCondition::Absent, |shared| WriteCondition::Token(shared.token)));
        self.order = order.unwrap_or_default();
        true
    }

    /// Reads what the other VMs hold, before a request that may have to be held.
    pub fn read_into<H: Host>(&mut self, host: &H, pool: &mut ManagedPool, vm: u64, now: Timestamp) {
        if self.read(host) {
            pool.read_order(&self.order, vm, now);
        }
    }

    /// Sums up the requests that all VMs of the process hold, in the bytes that other proxies get.
    /// Makes no call if none holds any.
    pub fn backlog<H: Host>(&mut self, host: &H, pool: &ManagedPool, vm: u64, now: Timestamp) -> Vec<u8> {
        let mut sum = pool.queues().held_by_band();
        if !pool.queues().any_held() || !self.read(host) {
            return Vec::new();
        }
        self.order.rivals(vm, now).for_each(|row| backlog::add(&mut sum, &row.bands));
        backlog::write(&sum)
    }

    /// Reads the order and decides on the next step of this VM.
    pub fn turn<H: Host>(&mut self, host: &H, pool: &mut ManagedPool, vm: u64, now: Timestamp) -> FlowTurn {
        if self.read(host) {
            return pool.flow_turn(&mut self.order, vm, now);
        }
        // The next tick tries again.
        pool.rest();
        FlowTurn::Rest
    }

    /// Writes what [`Self::turn`] changed. False if another VM wrote first.
    pub fn write<H: Host>(&mut self, host: &H, pool: &mut ManagedPool) -> bool {
        let write = |expect| host.share(&self.key, &flow_order::write(&self.order), expect);
        // If the proxy refuses for another reason, this VM goes on without the others.
        let is_first = self.read.take().is_some_and(|expect| write(expect) != Err(HostError::CONFLICT));
        pool.order_written(is_first);
        is_first
    }

    /// Writes the requests that this VM holds now, unless another VM wrote since the order was
    /// read.
    pub fn write_own<H: Host>(&mut self, host: &H, pool: &mut ManagedPool, vm: u64, now: Timestamp) -> bool {
        pool.write_order(&mut self.order, vm, now);
        self.write(host, pool)
    }
}

// === impl VmState ===

impl<H: Host> VmState<H> {
    /// The next one of a pool: while VMs share an order, only if it is this VM's turn.
    pub(super) fn next_held_of(&self, replica: &mut PoolReplica, now: Timestamp) -> Option<Rc<dyn ParkedRequest>> {
        let Some(me) = self.vm_context().filter(|_| replica.pool.queues().is_shared()) else { return replica.next_held(now) };
        for _ in 0..TURNS_MAX {
            let turn = replica.flow_order.turn(&self.host, &mut replica.pool, me.vm, now);
            match turn {
                FlowTurn::Rest => return None,
                FlowTurn::Write(wake) => {
                    let is_written = replica.flow_order.write(&self.host, &mut replica.pool);
                    wake.filter(|_| is_written).into_iter().for_each(|vm| self.wake(vm, now));
                }
                FlowTurn::Resume(number) | FlowTurn::Try(number) => {
                    if let Some(stream) = replica.held_stream(number) {
                        // The loads are read after the order: see there.
                        self.receive_loads(replica, now, SharingOccasion::Claim);
                        return Some(stream);
                    }
                }
            }
        }
        None
    }

    /// Wakes another VM, which holds the request that goes next.
    fn wake(&self, vm: u64, now: Timestamp) {
        let row = self.vm_slot.vm_table.alive(now).map(|(_, row)| row).find(|row| row.vm == vm && row.queue != 0);
        if let Some(Err(error)) = row.map(|row| self.host.queue_push(row.queue, b"held")) {
            self.host_error("a wake-up", error);
        }
    }

    /// Reads what the other VMs hold, if one of them holds any.
    pub fn read_order(&self, replica: &mut PoolReplica, now: Timestamp) {
        if let Some(me) = self.vm_context().filter(|_| replica.pool.queues().is_shared()) {
            replica.flow_order.read_into(&self.host, &mut replica.pool, me.vm, now);
        }
    }

    /// Writes what this VM holds, and the claim of a pick. False if another VM wrote meanwhile.
    pub fn claim(&self, replica: &mut PoolReplica, now: Timestamp) -> bool {
        match self.vm_context().filter(|_| replica.pool.queues().has_flow_peers()) {
            None => true,
            Some(me) => replica.flow_order.write_own(&self.host, &mut replica.pool, me.vm, now),
        }
    }

    /// Has the orders of all pools read soon.
    pub(super) fn look_at_orders(&self) {
        self.replicas.iter().for_each(|replica| replica.borrow_mut().pool.look_at_order());
    }
}
