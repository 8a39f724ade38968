//! Profile handlers decide which profiles run for a request, and combine the picks of these
//! profiles into one decision.

pub(crate) mod data_parallel;
pub(crate) mod disagg;
pub(crate) mod header;
pub(crate) mod single;
pub(crate) mod slo_aware;
