//! The state that the daemon's tasks share, and the part of this state that survives a restart.

pub mod backlog_sum;
pub mod client_names;
pub mod counters;
pub mod decision_log;
pub mod eds_streams;
mod kept_placements;
pub mod life;
pub mod log_limits;
#[cfg(test)]
mod one_certificate;
mod origin_totals;
pub mod peer;
pub mod peer_relay;
mod placement_shares;
pub mod pool_views;
pub mod proxies;
mod relay_process;
pub mod reports;
pub mod shared;
pub mod snapshot_file;
pub mod traffic;
