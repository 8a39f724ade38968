//! Filters decide which endpoints may be picked at all.
//!
//! Four filters are structural: [`ReadinessFilter`], [`SubsetFilter`], [`ServesModelFilter`] and
//! [`EjectionFilter`]. [`crate::schedule()`] applies them to every request before the filters of
//! the profile, and no configuration can leave them out. So every picked endpoint is ready, is in
//! the subset hint, and serves the model.

pub(crate) mod by_label;
pub(crate) mod endpoint_attribute;
pub(crate) mod label_selector;
pub(crate) mod prefix_cache_affinity;
pub(crate) mod role;
pub(crate) mod session_affinity;
pub(crate) mod slo_headroom_tier;
pub(crate) mod utilization;

mod decoder;
mod ejection;
mod model;
mod readiness;
mod subset;

pub(crate) use decoder::DecoderFilter;
pub(crate) use ejection::EjectionFilter;
pub(crate) use model::ServesModelFilter;
pub(crate) use readiness::ReadinessFilter;
pub(crate) use subset::SubsetFilter;

use crate::candidates::Candidates;
use crate::endpoint::EndpointIndex;

/// Keeps the endpoints that `passes` accepts. With `fall_back`, keeps all endpoints if `passes`
/// accepts none.
pub(crate) fn keep(
    candidates: &mut Candidates,
    fall_back: bool,
    passes: impl Fn(EndpointIndex) -> bool,
) {
    if !fall_back
        || candidates
            .indices()
            .iter()
            .any(|&endpoint| passes(endpoint))
    {
        candidates.retain(passes);
    }
}
