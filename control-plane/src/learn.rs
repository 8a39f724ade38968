//! Models that the daemon learns from finished requests.

pub mod directory;
pub mod latency;
pub mod learned_pools;
