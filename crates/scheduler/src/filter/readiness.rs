//! Keeps endpoints that are ready.

use crate::candidates::Candidates;
use crate::endpoint::Readiness;
use crate::plugin::{Context, Filter};
use crate::rng::Rng;

/// `ready`: keeps endpoints that are ready. The picker must check readiness, because Envoy ignores
/// the health of hosts that the picker names.
#[derive(Debug)]
pub(crate) struct ReadinessFilter;

impl Filter for ReadinessFilter {
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates, _: &mut Rng) {
        if context.table.all_ready() {
            return;
        }
        candidates.retain(|index| {
            context
                .table
                .endpoint(index)
                .is_some_and(|e| e.readiness == Readiness::Ready)
        });
    }
}
