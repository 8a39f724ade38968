//! Profile handlers: which profiles a request runs, and what becomes of their picks.

pub(crate) mod data_parallel;
pub(crate) mod disagg;
pub(crate) mod header;
pub(crate) mod single;
pub(crate) mod slo_aware;
