//! The picker for gateways that speak the Endpoint Picker Protocol over Envoy's external processing
//! service.
//!
//! ```text
//!  gateway ── one gRPC stream a request ──▶ ExtProcStream ──▶ exchange::RequestDriver ──▶ scheduler
//!                                               │ one step under its lock
//!                                          ExtProcServer ◀── messages from the daemon
//! ```
//! The wasm filter has the same driver and scheduler: no rule of the protocol is written
//! here. This crate translates Envoy's messages into events, and the driver's calls into answers.
//!
//! The daemon owns the sockets and the state. The daemon passes messages to
//! [`ExtProcServer::apply`], calls [`ServedPoolState::tick`], and reads what the pools counted.
#![forbid(unsafe_code)]

mod answers;
mod counts;
mod ext_proc_stream;
mod framing;
mod gateway_connection;
mod held_body;
mod memory;
mod open_streams;
mod refusal;
mod retry_copies;
mod server;
mod service;
mod session;
mod span;
mod wire;

pub use counts::StreamCounts;
pub use ext_proc_stream::{ExtProcStream, StreamAction};
pub use framing::{ENVELOPE_BYTES_MAX, MESSAGE_BYTES_MAX};
pub use memory::{HELD_BYTES_MAX, MemoryAccount, MemoryExceeded, STREAMS_MAX, StreamMemory};
pub use open_streams::ExpiringStream;
pub use server::{ExtProcServer, ServedPool, ServedPoolState, ServiceDirectory};
pub use service::{
    CONNECTION_WINDOW_BYTES, DESTINATION_FORMAT, ExtProcService, METADATA_BYTES_MAX, POOL,
    STREAM_WINDOW_BYTES, STREAMS_PER_CONNECTION_MAX,
};
pub use session::{BODY_MS_MAX, SILENCE_MS_MAX, SessionAction, StreamSession};
pub use span::{RequestSpan, SpanCounts, SpanQueue};
