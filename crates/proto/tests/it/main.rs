//! The wire formats: the generated code matches state.proto, encoding and decoding lose nothing,
//! and no bytes cause a panic.

#![cfg(test)] // With this attribute, lints treat helpers outside #[test] functions as test code.

mod any_bytes;
mod compatibility;
mod generated;
mod golden;
mod golden_values;
mod observation;
mod round_trip;
mod strategies;
