//! Tests of the exchange as its hosts see it.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking, in its helpers too"
)]
#![allow(
    clippy::disallowed_methods,
    reason = "tests read files and the environment; the crate under test does not"
)]

mod blame;
mod bodies;
mod broken_engines;
mod cache_estimate;
mod captured;
#[cfg(not(target_arch = "wasm32"))] // This module reads a folder that the wasm build cannot reach.
mod docs;
mod golden;
mod hosts;
mod json;
mod memory_host;
mod missed;
mod observed;
mod pieces;
mod plans;
mod policy;
mod pool;
mod queued;
mod record;
mod release;
mod responses;
mod restore;
mod script;
mod shared_streak;
mod sharing_workers;
mod slo;
mod tasks;
mod tenants;
mod tpot;
mod unread;
mod workers;
