//! The simulated model server as its clients and its operators see it.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod api;
mod client;
mod faults;
mod metrics;
mod plain_engine;
