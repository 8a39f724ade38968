//! The values in the proxy's shared data, which have fixed keys. All VMs of a process use these
//! values. The layouts of the bytes of these values are in [`proto::shared_data`].

pub mod counters;
pub mod crash_guard;
pub mod flow_order;
pub mod lease;
pub mod load_sharing;
pub mod observation_ring;
pub mod placement_ring;
pub mod snapshot_store;
pub mod vm_table;

/// Returns the key of a value that the VMs of a process share for a pool.
#[inline(never)] // several callers, and the module should be small
fn pool_key(pool: &str, value: &str) -> String {
    format!("switchpoint/1/pool/{pool}/{value}")
}

/// Returns the key of a value that the VM in `vm_slot` writes for a pool.
#[inline(never)] // several callers, and the module should be small
fn slot_key(pool: &str, value: &str, vm_slot: u16) -> String {
    format!("switchpoint/1/pool/{pool}/{value}/{vm_slot}")
}

/// Returns the key of a segment of a ring that the VM in `vm_slot` writes for a pool.
#[inline(never)] // several callers, and the module should be small
fn segment_key(pool: &str, ring: &str, vm_slot: u16, segment: u64) -> String {
    format!("switchpoint/1/pool/{pool}/{ring}/{vm_slot}/{segment}")
}

/// The VM that writes a ring, and the ring's pool.
#[derive(Clone, Copy, Debug)]
pub struct RingOwner<'p> {
    pub pool: &'p str,
    pub vm_slot: u16,
    /// The VM's random number.
    pub vm: u64,
}
