//! Leaves out endpoints that failed just now.

use crate::candidates::Candidates;
use crate::plugin::{Context, Filter};
use crate::rng::Rng;

/// `ejected`: when a profile would have nobody left for it, [`crate::schedule()`] runs the profile without. An ejection is a guess from a
/// few failures; trying beats refusing.
#[derive(Debug)]
pub(crate) struct EjectionFilter;

impl Filter for EjectionFilter {
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates, _: &mut Rng) {
        candidates.retain(|index| !context.local.ejected(index));
    }
}
