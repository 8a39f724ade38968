//! Code that both pickers inside Envoy use, the wasm filter and the native module: the
//! configuration, the names of the metrics, the rows of counters, and the rules of the link to the
//! daemon. This crate has no I/O.
#![deny(
    clippy::indexing_slicing,
    clippy::string_slice,
    clippy::arithmetic_side_effects
)]
#![cfg_attr(
    test,
    allow(
        clippy::arithmetic_side_effects,
        clippy::unwrap_used,
        clippy::indexing_slicing,
        reason = "a test fails by panicking"
    )
)]
#![forbid(unsafe_code)]

pub mod config;
pub mod counter_rows;
pub mod daemon_rules;
pub mod metrics;
