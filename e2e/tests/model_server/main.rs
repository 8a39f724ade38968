//! The simulated model server as its clients and its operators see it.
