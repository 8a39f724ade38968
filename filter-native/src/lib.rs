//! The picker as a native dynamic module of Envoy 1.40 (experimental). It runs [`exchange`] in
//! Envoy's own threads, with one pool for all workers of the process.
//!
//! ```text
//!  worker threads: abi::hooks ──► stream ──► exchange::RequestDriver ──► stream_host ──► Envoy
//!                                                │ one step under the pool's lock
//!                                              pool ◄── link ◄──► the daemon, through Envoy
//!                                                         │
//!  main thread:    abi::hooks ──► process: ticks and events of the link
//! ```
//! A body is parsed and hashed outside the lock, and a piece of a streamed reply takes no lock
//! except at the first token, every 50 ms and at the end. A held request is woken by an event that
//! any thread may send to its worker ([`waker`]).
//!
//! A panic ends no thread of Envoy: each hook catches it, counts it and answers as `failure_mode`
//! says. After three panics the pools are made again, because one of them may be damaged.
//!
//! Only [`abi`] has unsafe code.
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

mod abi;
mod grpc_frames;
mod link;
mod logger;
mod metrics;
mod module_config;
mod node_id;
mod panics;
mod pool;
mod process;
mod stream;
mod stream_host;
mod ticker;
mod waker;
mod worker;
