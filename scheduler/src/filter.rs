//! Filters: who may be picked at all.
//!
//! Four are structural, [`Ready`], [`Subset`], [`ServesModel`] and [`Ejected`]: [`crate::schedule()`] applies them to every request, before the profile's own, and no configuration
//! can leave them out. What they promise (never an endpoint that is not ready, never one outside the subset hint, never one that serves other models) is promised
//! to the proxy, not to the operator.

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

pub(crate) use decoder::Decoder;
pub(crate) use ejection::Ejected;
pub(crate) use model::ServesModel;
pub(crate) use readiness::Ready;
pub(crate) use subset::Subset;

use crate::candidates::Candidates;
use crate::endpoint::EndpointIndex;

/// Keeps whom `passes` accepts; with `fall_back` all, where it accepts nobody.
pub(crate) fn keep(candidates: &mut Candidates, fall_back: bool, passes: impl Fn(EndpointIndex) -> bool) {
    if !fall_back || candidates.indices().iter().any(|&endpoint| passes(endpoint)) {
        candidates.retain(passes);
    }
}
