//! The proxy-wasm filter: a thin adapter of exchange and a replica of the daemon state.
#![deny(clippy::indexing_slicing, clippy::string_slice, clippy::arithmetic_side_effects)]

pub mod config;
#[cfg(test)]
mod fake;
pub mod host;
pub mod metrics;
pub mod pairs;
pub mod state;
mod stream;
