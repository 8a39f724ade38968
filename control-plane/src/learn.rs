//! What the daemon learns from finished requests.

pub mod latency;
