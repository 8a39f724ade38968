//! Code that only the e2e tests need. Code that other tools also need is in `testbed`.

pub mod explain;
pub mod ledger_metrics;
pub mod manifests;
pub mod queued_requests;
pub mod slo;
