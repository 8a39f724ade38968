//! The messages between the daemon and the proxies, their limits, and conversions from and to the
//! scheduler's types.
//!
//! Wire types are not domain types: only this crate builds a snapshot from bytes, and it refuses a
//! message that breaks a rule as a whole, by the name of the field. The tonic service is behind
//! feature `grpc`, so that the filter does not contain it.

/// Generated from `state.proto` and committed; a test regenerates and compares.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, reason = "generated code")]
pub mod state {
    include!("gen/switchpoint.state.v1.rs");
}

mod decode;
pub use decode::{InvalidState, PoolUpdate, metrics, pool_update};

pub mod frames;

pub mod placements;

mod learned;
pub use learned::{LEARNED_BYTES_MAX, LearnedModels, encode_learned, learned};

mod objects;

mod encode;
pub use encode::{PoolState, encode_metrics, encode_pool_update};

/// The wire schema spoken here. Daemon and filter with different schemas refuse each other by name.
pub const SCHEMA: u32 = 3;

/// The largest message either side accepts, in bytes: 1,024 endpoints with 1 KiB of labels each, four times over.
pub const MESSAGE_BYTES_MAX: usize = 4 << 20;

/// The largest message a proxy sends, in bytes: the daemon reads hundreds of streams at once, and each may hold so much of a message that never ends.
pub const PROXY_MESSAGE_BYTES_MAX: usize = 512 << 10;

/// A daemon sends metrics at least this often, changed or not: silence is how a filter learns that it is gone.
pub const METRICS_INTERVAL_MAX_MS: u64 = 500;

/// Upper bounds of the buckets of every latency histogram in milliseconds (of `pick_us`: microseconds); a last bucket is unbounded.
pub const HISTOGRAM_BOUNDS: [f64; 20] = [
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0, 2_000.0, 5_000.0, 10_000.0, 15_000.0, 20_000.0, 30_000.0, 60_000.0,
    120_000.0, 300_000.0, 600_000.0,
];

/// What another proxy told counts for this long unless it is told again: two seconds of silence is a proxy, or a way to it, that is gone.
pub const SHARE_EXPIRY_MS: u64 = 2_000;

/// The most placements in one message to a proxy, in bytes: 3,000 blocks. What is more waits for the next, 5 ms later: at that pace the ring of the VM
/// that leads, 1 MB, lasts 200 ms, and workers that serve nobody read it every 100.
pub const PLACEMENTS_BYTES_MAX: usize = 24 << 10;
