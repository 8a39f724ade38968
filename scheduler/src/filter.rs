//! Filters: who may be picked at all.
//!
//! The three here are structural: [`crate::schedule()`] applies them to every request, before the profile's own, and no configuration
//! can leave them out. What they promise (never an endpoint that is not ready, never one outside the subset hint) is promised to the
//! proxy, not to the operator.

mod ejection;
mod readiness;
mod subset;

pub(crate) use ejection::Ejected;
pub(crate) use readiness::Ready;
pub(crate) use subset::Subset;
