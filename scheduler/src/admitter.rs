//! Admitters: may refuse a request that could be served.

pub(crate) mod probabilistic;
