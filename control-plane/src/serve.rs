//! The listeners: state and EDS for proxies, ext_proc for gateways, admin pages, metrics, health,
//! and the scaler for KEDA.

pub mod admin;
pub mod admin_token;
mod console;
pub mod eds;
mod endpoint_rows;
pub mod explanations;
pub mod exposure;
pub mod ext_proc;
pub mod foreign_pages;
pub mod health;
pub mod listen;
pub mod metrics;
pub mod monitoring;
pub mod scaler;
mod scaling_page;
pub mod shown_state;
pub mod state_stream;
mod timestamp;
