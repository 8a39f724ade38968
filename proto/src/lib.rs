//! The wire between daemon and filter.
