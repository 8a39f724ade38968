//! The formats of all bytes that cross processes or VMs: the messages between the daemon and the
//! proxies with their limits, load reports, observations, and the values that the VMs of one
//! process share. This crate also converts messages from and to the scheduler's types.
//!
//! Wire types are not domain types: only this crate builds a snapshot from bytes. If a message
//! breaks a rule, the crate refuses the whole message and names the field. The tonic service is
//! behind feature `grpc`, so that the filter does not contain this service. `tests/golden` has
//! bytes of each format, and later versions must be able to read these bytes.

/// The code that was generated from `state.proto` and committed. A test compares this code with
/// newly generated code.
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::all,
    clippy::pedantic,
    reason = "generated code"
)]
pub mod state {
    include!("gen/switchpoint.state.v1.rs");
}

/// The code that was generated from `externalscaler.proto` and committed. A test compares this code
/// with newly generated code.
#[cfg(feature = "grpc")]
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::all,
    clippy::pedantic,
    reason = "generated code"
)]
pub mod external_scaler {
    include!("gen/externalscaler.rs");
}

pub mod backlog;
mod decode;
pub use decode::{InvalidState, PoolUpdate, daemon_message, metrics, pool_update, proxy_message};

pub mod frames;

pub mod load_report;

pub mod observation;

pub mod placements;

pub mod shared_data;

pub mod words;

pub mod terms;

pub mod wire_limits;

#[cfg(feature = "grpc")]
pub mod limited_codec;

mod learned;
pub use learned::{LEARNED_BYTES_MAX, LearnedModels, encode_learned, learned};

mod objects;

mod encode;
pub use encode::{PoolState, encode_metrics, encode_pool_update};

/// The newest wire schema that this release supports. The number rises with each change that an
/// older reader would misunderstand.
pub const SCHEMA: u32 = 3;

/// The oldest wire schema that this release supports. This schema must not be newer than [`SCHEMA`]
/// of the previous release, so that a daemon and a filter of two successive releases understand
/// each other.
pub const SCHEMA_MIN: u32 = 3;

/// Returns the schema that this release uses with a peer whose newest schema is `peer`: the older
/// of the two newest schemas. Returns `None` if this release no longer supports that schema.
#[must_use]
pub fn common_schema(peer: u32) -> Option<u32> {
    let common = peer.min(SCHEMA);
    (common >= SCHEMA_MIN).then_some(common)
}

/// The largest message that either side accepts, in bytes: four times the size of 1,024 endpoints
/// with 1 KiB of labels each.
pub const MESSAGE_BYTES_MAX: usize = 4 << 20;

/// The largest message that a proxy sends, in bytes. The limit is lower than for the daemon,
/// because the daemon reads hundreds of streams at the same time, and on each stream an unfinished
/// message can occupy this much memory.
pub const PROXY_MESSAGE_BYTES_MAX: usize = 512 << 10;

/// The maximum number of bytes of the messages of one HTTP call, if HTTP calls replace the stream.
/// The largest message from a proxy and the message's frame fit exactly.
pub const CALL_BYTES_MAX: usize = PROXY_MESSAGE_BYTES_MAX + 4;

/// The maximum interval at which a daemon sends metrics, changed or not, in ms. A filter that gets
/// no metrics for longer knows that the daemon is gone.
pub const METRICS_INTERVAL_MAX_MS: u64 = 500;

/// The upper bounds of the buckets of every latency histogram in milliseconds (microseconds for
/// `pick_us`). The last bucket has no bound.
pub const HISTOGRAM_BOUNDS: [f64; 20] = [
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0, 2_000.0, 5_000.0, 10_000.0,
    15_000.0, 20_000.0, 30_000.0, 60_000.0, 120_000.0, 300_000.0, 600_000.0,
];

/// The time for which a load report from another proxy is used unless the proxy repeats the report,
/// in ms. After two seconds of silence, the other proxy or the connection to it is gone.
pub const SHARE_EXPIRY_MS: u64 = 2_000;

/// The maximum size of placements in one message to a proxy, in bytes: 3,000 blocks. Further
/// placements wait for the next message, 5 ms later. If the leader writes so many placements every
/// 5 ms, its ring of 1 MB is overwritten after 200 ms. Even workers without requests read the ring
/// every 100 ms.
pub const PLACEMENTS_BYTES_MAX: usize = 24 << 10;
