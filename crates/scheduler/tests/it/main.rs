//! Tests of the scheduler through its public API alone.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod again;
mod case;
mod golden;
mod laws;
mod objects;
mod oracle;
mod parameters;
mod pipelines;
mod pools;
mod snapshot;
mod wasm;
