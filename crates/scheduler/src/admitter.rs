//! Admitters may refuse a request that could be served.

pub(crate) mod latency_slo;
pub(crate) mod probabilistic;
