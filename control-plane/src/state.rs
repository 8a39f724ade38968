//! What the daemon's tasks share, and what of it a restart keeps.

pub mod counters;
pub mod peer;
pub mod peer_relay;
pub mod shared;
pub mod snapshot_file;
