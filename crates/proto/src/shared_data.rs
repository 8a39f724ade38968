//! The values that the VMs of one proxy process exchange through Envoy's shared data.
//!
//! Each value consists of [`crate::words`], with two exceptions. In the snapshot store, a stamp
//! precedes a message from the daemon. The counters of a VM are a serialized
//! [`crate::state::VmCounters`]. The filter defines the keys and uses the values. A reader treats a
//! value that it cannot parse as missing.

pub mod flow_order;
pub mod room_ask;

mod leader;
pub use leader::{CRASH_DIGESTS_MAX, CrashRecord, DecodingMark, LeaseValue};

mod rings;
pub use rings::{
    OBSERVATION_SEGMENT_ROWS, PlacementEntry, RECORD_BLOCKS_MAX, RingPosition, SEGMENT_HEAD_BYTES,
    SegmentHead,
};

mod snapshot_head;
pub use snapshot_head::{MessageStamp, SnapshotHead};

mod vms;
pub use vms::{RemotePeers, VmEntry};
