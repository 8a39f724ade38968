//! A real cluster.
