//! switchpointd: discovers, scrapes and pushes state to the filters.
//!
//! ```text
//!  endpoints file ─▶ discovery ─▶ pool ◀─ scrape ◀─ model servers
//!                                  │ one writer; whole views by watch channel
//!              ┌───────────┬───────┴──┬──────────┐
//!            push ──┐     eds       admin     persist
//!              │  ext_proc │
//!           filters      Envoys   (an endpoint reaches a filter's roster only once its Envoy acknowledged it by EDS)
//! ```
//! [`run`] is the wiring; [`args`] the only place with defaults.
#![forbid(unsafe_code)]

pub mod args;
pub mod run;

pub mod check;
pub mod config;
pub mod discovered;
pub mod objects;
pub mod pools_file;
pub mod registration;
pub mod sources;

pub mod feed;
pub mod pool;
pub mod pool_task;
pub mod scrape;
pub mod shared;

pub mod counters;
pub mod eds;
pub mod etcd_access;
pub mod explain;
pub mod ext_proc;
pub mod health;
pub mod latency;
pub mod lease;
pub mod peer;
pub mod push;
pub mod relay;

pub mod admin;
pub mod metrics;
pub mod monitoring;
pub mod ports;
pub mod token;

pub mod http_client;
pub mod listen;
pub mod logging;
pub mod persist;
pub mod shutdown;
pub mod signals;
