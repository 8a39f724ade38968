//! The wire: what is committed is what state.proto says, nothing is lost on the way, and no bytes can hurt.

#![cfg(test)] // so that the lints know helpers outside #[test] functions for tests too

mod any_bytes;
mod generated;
mod golden;
mod observation;
mod round_trip;
mod strategies;
