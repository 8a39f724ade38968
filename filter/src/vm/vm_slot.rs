//! The slot of a VM among the VMs of its process, and the heartbeats of the VM.

use exchange::Timestamp;
use proto::shared_data::VmEntry;

use super::VmState;
use crate::host::Host;
use crate::shared_data::counters;
use crate::shared_data::vm_table::{EXPIRY_MS, HEARTBEAT_MS, VM_SLOTS_MAX, VmTable};

/// The VM's slot among the VMs of the process, and the VM's queue and table of VMs.
#[derive(Debug, Default)]
pub(super) struct VmSlot {
    pub(super) slot: Option<u16>,
    pub(super) queue: u32,
    /// The root context that the VM's queue wakes.
    pub(super) root: u32,
    heartbeat: Option<Timestamp>,
    pub(super) vm_table: VmTable,
}

// === impl VmState ===

impl<H: Host> VmState<H> {
    /// Writes the heartbeat of this VM, and registers the VM's queue for the root context of this
    /// tick.
    pub(super) fn keep_vm_slot(&mut self, root: u32, now: Timestamp) {
        let due = self
            .vm_slot
            .heartbeat
            .is_none_or(|heartbeat| now.ms_since(heartbeat) >= HEARTBEAT_MS);
        if due {
            self.host.follow_log_level();
            self.write_heartbeat(now);
            self.write_counters();
        } else if let Ok(vm_table) = VmTable::read(&self.host) {
            // With this table, the VM knows a new VM immediately, and not only after this VM's next
            // heartbeat.
            self.vm_slot.vm_table = vm_table;
        }
        if let (Some(slot), true) = (self.vm_slot.slot, self.vm_slot.root != root) {
            match self
                .host
                .queue_register(&format!("switchpoint/1/wake/{slot}"))
            {
                Ok(queue) => {
                    self.vm_slot.root = root;
                    if std::mem::replace(&mut self.vm_slot.queue, queue) != queue {
                        self.write_heartbeat(now);
                    }
                }
                Err(error) => self.host_error("a queue", error),
            }
        }
    }

    pub(super) fn write_heartbeat(&mut self, now: Timestamp) {
        let row = VmEntry {
            vm: self.id,
            heartbeat: now,
            queue: self.vm_slot.queue,
            serves: self.serves,
        };
        let before = self.vm_slot.slot;
        let known = self.vm_slot.heartbeat.is_some();
        match VmTable::write_heartbeat(&self.host, row) {
            Some((slot, vm_table)) => {
                self.vm_slot = VmSlot {
                    slot,
                    vm_table,
                    heartbeat: Some(now),
                    ..std::mem::take(&mut self.vm_slot)
                };
                if slot.is_none() && (before.is_some() || !known) {
                    let vm_slots = VM_SLOTS_MAX;
                    log::warn!(
                        "no VM slot is free, of {vm_slots}: VM {:016x} shares no state with other workers until a slot is free",
                        self.id
                    );
                }
            }
            // If the write failed, the next tick writes the heartbeat again. No other VM takes the
            // slot before the last heartbeat expires.
            None if self
                .vm_slot
                .heartbeat
                .is_some_and(|heartbeat| now.ms_since(heartbeat) < EXPIRY_MS) => {}
            None => self.vm_slot.slot = None,
        }
        if self.vm_slot.slot != before {
            // The queue must be registered again, because a new slot has a new queue.
            self.vm_slot.queue = 0;
            self.vm_slot.root = 0;
        }
    }

    /// Counts the VMs of the process without a VM slot, according to the table that this VM read
    /// last.
    #[must_use]
    pub fn without_vm_slot(&self) -> usize {
        self.vm_slot.vm_table.without_vm_slot(self.host.now())
    }

    pub(super) fn write_counters(&self) {
        if let Some(slot) = self.vm_slot.slot {
            for replica in &self.replicas {
                counters::write(&self.host, self.id, slot, &mut replica.borrow_mut());
            }
        }
    }
}
