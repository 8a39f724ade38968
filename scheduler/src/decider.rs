//! Deciders: whether a stage of this request runs on a model server of its own.

pub(crate) mod always;
pub(crate) mod prefix_based;
