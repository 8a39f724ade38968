//! switchpointd: discovers, scrapes and pushes state to the filters.
//!
//! ```text
//!  endpoints file ─▶ discovery ─▶ pool ◀─ scrape ◀─ model servers
//!                                  │ one writer; whole views by watch channel
//!              ┌───────────┬───────┴──┬──────────┐
//!            push ──┐     eds       admin     persist
//!              │  ext_proc │
//!           filters      Envoys   (an endpoint reaches a filter's pool update only once its Envoy acknowledged it by EDS)
//! ```
//! [`daemon`] is the wiring; [`cli::args`] the only place with defaults.
#![forbid(unsafe_code)]

pub mod cli;
pub mod config;
pub mod daemon;
pub mod error;
pub mod learn;
pub mod pool;
pub mod scrape;
pub mod serve;
pub mod shutdown;
pub mod state;
