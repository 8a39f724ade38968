//! The wire: the generated code is that of state.proto, nothing is lost on the way, and no bytes
//! can hurt.

#![cfg(test)] // so that the lints know helpers outside #[test] functions for tests too

mod any_bytes;
mod generated;
mod golden;
mod golden_values;
mod observation;
mod round_trip;
mod strategies;
