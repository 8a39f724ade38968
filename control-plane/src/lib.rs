//! switchpointd: discovers, scrapes and pushes state to the filters.
//!
//! ```text
//!  endpoints file ─▶ discovery ─▶ pool ◀─ scrape ◀─ model servers
//!                                  │ one writer; whole views by watch channel
//!              ┌───────────┬───────┴──┬──────────┐
//!            push         eds       admin     persist
//!              │           │
//!           filters      Envoys   (an endpoint reaches a filter's roster only once its Envoy acknowledged it by EDS)
//! ```
//! [`run`] is the wiring; [`args`] the only place with defaults.
#![forbid(unsafe_code)]

pub mod args;
pub mod run;

pub mod counters;
pub mod eds;
pub mod feed;
pub mod pool;
pub mod push;
pub mod scrape;
pub mod shared;

pub mod admin;
pub mod logging;
pub mod shutdown;
