//! The state of one pool in one VM of a proxy, and the operations that change the state: pick,
//! record, place, eject, count, apply the daemon's messages, share with other proxies.
//!
//! A host (the wasm filter, the ext_proc server) owns one [`ManagedPool`] for each pool and each
//! VM. This crate has no I/O and no HTTP. Time and randomness are arguments, a refused pick is a
//! [`PickRefusal`], and the meaning of an endpoint's answer is a [`Verdict`].
#![deny(clippy::indexing_slicing, clippy::string_slice)]
#![forbid(unsafe_code)]

mod apply;
pub use apply::{Applied, AppliedVersions, DaemonUpdate, RejectedMessage, wire_version};

pub mod peers;
pub use peers::{LocalPeer, PeerReport, ProxyPeers};

mod pool;
pub use pool::*;
pub use proto::load_report::LoadReportHead;
pub use proto::observation::{EncodedObservation, OBSERVATIONS_MAX};

pub mod queues;

mod refusal;
pub use refusal::PickRefusal;

pub use scheduler::Timestamp;

mod usage;
pub use usage::TokenUsage;

pub mod verdict;
pub use verdict::Verdict;
