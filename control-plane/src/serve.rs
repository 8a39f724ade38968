//! The listeners: state and EDS for proxies, ext_proc for gateways, admin pages, metrics and
//! health.

pub mod admin;
pub mod admin_token;
mod console;
pub mod eds;
pub mod exposure;
pub mod ext_proc;
pub mod health;
pub mod listen;
pub mod metrics;
pub mod monitoring;
pub mod state_stream;
