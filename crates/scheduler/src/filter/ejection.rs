//! Drops ejected endpoints.

use crate::candidates::Candidates;
use crate::plugin::{Context, Filter};
use crate::rng::Rng;

/// `ejected`: drops ejected endpoints. If a profile has no endpoint left, [`crate::schedule()`]
/// runs it again without this filter. An ejection is a guess from a few failures, so to try an
/// ejected endpoint is better than to refuse the request.
#[derive(Debug)]
pub(crate) struct EjectionFilter;

impl Filter for EjectionFilter {
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates, _: &mut Rng) {
        candidates.retain(|index| !context.local.ejected(index));
    }
}
