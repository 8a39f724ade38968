//! Real Envoy, real filter, real daemon, simulated model servers; the demo and the benches.

pub mod model_server;
