//! The product on a real Envoy, with the files that users mount. Each test starts its own stack.

#![allow(clippy::expect_used, reason = "a test fails at the first error")]

mod affinity;
mod apart;
mod bodies;
mod broken_engines;
mod client_faults;
mod clients;
#[path = "../../../crates/discovery/tests/it/cluster.rs"]
mod cluster;
mod config_updates;
mod daemon_faults;
mod daemon_link;
mod disaggregation;
mod discovered;
mod discovery_faults;
mod doors;
mod drills_daemon;
mod drills_proxy;
mod drills_requests;
mod echo;
mod engine;
mod engine_pages;
mod engines;
mod explain;
mod flow_control;
mod gateways;
mod grpc;
mod hermetic;
mod hot_reload;
mod inference_pools;
mod keys;
mod kubernetes;
mod latency;
mod lifecycle;
mod limits;
mod objectives;
mod partition;
mod picker_modes;
mod played;
mod policy;
mod pools;
mod protocol;
mod retries;
mod rewrite;
mod shared_state;
mod shipped_config;
mod slo;
mod spine;
mod state;
mod stored_answers;
mod streaming;
mod streams;
mod transports;
mod unread;
mod vm_faults;
