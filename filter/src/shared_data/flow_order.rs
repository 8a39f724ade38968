//! The order of the requests that all VMs of the process hold for one pool
//! ([`scheduler::flow::SharedOrder`]), in one value of shared data.

use exchange::{ManagedPool, Timestamp};
use pool_state::queues::FlowTurn;
use proto::backlog;
use proto::shared_data::flow_order;
use scheduler::flow::SharedOrder;

use crate::host::{Host, HostError, WriteCondition};

/// The order of held requests at this VM's last reading.
#[derive(Debug)]
pub struct FlowOrder {
    key: String,
    order: SharedOrder,
    /// The condition for the next write (the token of the last reading); `None` after a write.
    read: Option<WriteCondition>,
}

// === impl FlowOrder ===

impl FlowOrder {
    /// Creates an empty order for `pool`, a name from the filter's configuration.
    #[must_use]
    pub fn new(pool: &str) -> Self {
        Self {
            key: super::pool_key(pool, "held"),
            order: SharedOrder::default(),
            read: None,
        }
    }

    /// Reads the order. Returns false if the proxy refuses the read.
    fn read<H: Host>(&mut self, host: &H) -> bool {
        let Ok(shared) = host.shared(&self.key) else {
            return false;
        };
        let order = shared
            .as_ref()
            .and_then(|shared| flow_order::read(&shared.bytes));
        self.read = Some(shared.map_or(WriteCondition::Absent, |shared| {
            WriteCondition::Token(shared.token)
        }));
        self.order = order.unwrap_or_default();
        true
    }

    /// Reads the requests that the other VMs hold, before this VM decides whether a request must
    /// wait.
    pub fn read_into<H: Host>(
        &mut self,
        host: &H,
        pool: &mut ManagedPool,
        vm: u64,
        now: Timestamp,
    ) {
        if self.read(host) {
            pool.read_order(&self.order, vm, now);
        }
    }

    /// Adds up the requests that all VMs of the process hold, and encodes the sums for the other
    /// proxies. Makes no host call if no VM holds requests.
    pub fn backlog<H: Host>(
        &mut self,
        host: &H,
        pool: &ManagedPool,
        vm: u64,
        now: Timestamp,
    ) -> Vec<u8> {
        let mut sum = pool.queues().queued_by_band();
        if !pool.queues().any_queued() || !self.read(host) {
            return Vec::new();
        }
        for band in self.order.rivals(vm, now).flat_map(|row| &row.bands) {
            backlog::add(&mut sum, &[band.queued]);
        }
        backlog::write(&sum)
    }

    /// Reads the order and decides on the next step of this VM. `may_resume` says whether the VM
    /// may resume a request now.
    pub fn turn<H: Host>(
        &mut self,
        host: &H,
        pool: &mut ManagedPool,
        vm: u64,
        may_resume: bool,
        now: Timestamp,
    ) -> FlowTurn {
        if self.read(host) {
            return pool.flow_turn(&mut self.order, vm, may_resume, now);
        }
        // The VM gives up this attempt, and the next tick tries the reading again.
        pool.queues_mut().rest();
        FlowTurn::Rest
    }

    /// Writes the requests that this VM holds now into the order. Returns the VM that must be woken
    /// after the order is written.
    pub fn put(&mut self, pool: &mut ManagedPool, vm: u64, now: Timestamp) -> Option<u64> {
        pool.write_order(&mut self.order, vm, now)
    }

    /// Writes the changes of [`Self::turn`] or [`Self::put`]. Returns false if another VM has
    /// written the order since this VM read it.
    pub fn write<H: Host>(&mut self, host: &H, pool: &mut ManagedPool) -> bool {
        let write = |expect| host.share(&self.key, &flow_order::write(&self.order), expect);
        // If the proxy refuses the write for another reason, this VM continues without the other
        // VMs.
        let is_first = self
            .read
            .take()
            .is_some_and(|expect| write(expect) != Err(HostError::CONFLICT));
        pool.queues_mut().order_written(is_first);
        is_first
    }
}
