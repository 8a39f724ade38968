//! Slow drills on a real Envoy: a lease expires, the proxy waits for the end of a pause, a process
//! drains. `make e2e-long` runs these drills.

#![allow(clippy::expect_used, reason = "a test fails at the first error")]
#![allow(clippy::print_stdout, reason = "a skipped test prints why")]

mod api_server;
mod broken_engines;
#[path = "../../../crates/discovery/tests/it/cluster.rs"]
mod cluster;
mod engines;
mod flow_control;
mod hot_restart;
mod leader_lost;
mod one_party;
mod partition;
mod slo;
mod soak;
mod translated;
