//! switchpointd: discovers and scrapes model servers, and sends their state to the filters.
//!
//! ```text
//!  endpoints file ─▶ discovery ─▶ pool ◀─ scrape ◀─ model servers
//!                                  │ one writer; whole views by watch channel
//!              ┌───────────┬───────┴──┬──────────┐
//!            push ──┐     eds       admin     persist
//!              │  ext_proc │
//!           filters      Envoys
//! ```
//! EDS comes first: a pool update names an endpoint to a filter only after the filter's Envoy has
//! acknowledged that endpoint by EDS.
//!
//! [`daemon`] connects the parts. Only [`cli::args`] has default values.
#![forbid(unsafe_code)]

pub mod cli;
pub mod config;
pub mod daemon;
pub mod error;
pub mod kv_events;
pub mod learn;
pub mod network;
pub mod pool;
pub mod scaling;
pub mod scrape;
pub mod serve;
pub mod shutdown;
pub mod state;
