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

/// The VM that writes a ring, and the ring's pool.
#[derive(Clone, Copy, Debug)]
pub struct RingOwner<'p> {
    pub pool: &'p str,
    pub vm_slot: u16,
    /// The VM's random number.
    pub vm: u64,
}
