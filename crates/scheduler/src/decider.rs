//! Deciders say whether a stage of a request (prefill, encode) runs on a separate model server.

pub(crate) mod always;
pub(crate) mod prefix_based;
