//! Deciders: is a stage of this request worth a model server of its own?

pub(crate) mod always;
pub(crate) mod prefix_based;
