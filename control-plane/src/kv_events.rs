//! Receives the KV-cache events of engines (vLLM, SGLang), which publish them by ZeroMQ.
//!
//! ```text
//!  views ──▶ subscriber ──▶ a subscription for each engine ── cache empty ──▶ pool: new generation
//!                              │ zmtp: frames, within limits
//!                              ▼
//!                           batch (pure): counts ──▶ follower (pure): gaps, restarts ──▶ stats
//! ```
//! Events show at once that an engine restarted or cleared its cache. The endpoint then gets a new
//! generation, as after a restart that a scrape shows, so proxies forget what they believe about
//! its cache, and also their requests in flight there, its failures and its learned speed. After a
//! clear, its metrics stay. The number and size of blocks are only shown, because engines also
//! report these in their metrics. A publisher that sends invalid or too many messages costs only
//! the precision of its own engine.

pub mod batch;
pub mod follower;
pub mod msgpack;
mod stats;
mod subscriber;
mod subscription;
mod target;
pub mod zmtp;

pub use stats::{KvEventCounts, KvEventRow, KvEventStats, PublisherLink};
pub use subscriber::KvEventSubscriber;
pub use target::{KvEventPorts, KvEventTarget, PORT_LABEL, REPLAY_PORT_LABEL};

/// The maximum number of reports of empty caches that wait: one for each endpoint of a full pool.
pub const EMPTIED_MAX: usize = 1024;
