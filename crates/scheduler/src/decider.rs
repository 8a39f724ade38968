//! Deciders: decide whether a stage of this request runs on a separate model server.

pub(crate) mod always;
pub(crate) mod prefix_based;
