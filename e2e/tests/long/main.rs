//! Drills on a real Envoy that take their time: a lease runs out, a pause is kept, a process drains. `make e2e-long` runs them.

#![allow(clippy::expect_used, reason = "a test stops where it cannot go on")]
#![allow(clippy::print_stdout, reason = "a skipped test says so")]

mod api_server;
mod broken_engines;
#[path = "../../../discovery/tests/it/cluster.rs"]
mod cluster;
mod engines;
mod hot_restart;
mod leader_lost;
mod partition;
mod slo;
mod soak;
mod translated;
