//! Keeps endpoints that can serve the decode stage.

use crate::candidates::Candidates;
use crate::endpoint::Endpoint;
use crate::plugin::{Context, Filter};
use crate::rng::Rng;

/// `role`: keeps endpoints that can serve the decode stage. If requests are split by role, the
/// proxy's cluster does not contain endpoints that serve only earlier stages.
#[derive(Debug)]
pub(crate) struct DecoderFilter;

impl Filter for DecoderFilter {
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates, _: &mut Rng) {
        candidates.retain(|index| context.table.endpoint(index).is_some_and(Endpoint::decodes));
    }
}
