//! Leaves out endpoints that failed just now, as long as another is left.

use crate::candidates::Candidates;
use crate::plugin::{Context, Filter};

/// `ejected`: never drops the last. An ejection is a guess from a few failures; when it would leave nobody, trying beats refusing.
#[derive(Debug)]
pub(crate) struct Ejected;

impl Filter for Ejected {
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates) {
        if candidates.indices().iter().any(|&index| !context.local.ejected(index)) {
            candidates.retain(|index| !context.local.ejected(index));
        }
    }
}
