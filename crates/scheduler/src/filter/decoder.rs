//! Keeps endpoints that can serve the decode stage.

use crate::candidates::Candidates;
use crate::endpoint::Endpoint;
use crate::plugin::{Context, Filter};
use crate::rng::Rng;

/// `role`: if requests are split by role, an endpoint that serves only earlier stages is not in the
/// proxy's cluster.
#[derive(Debug)]
pub(crate) struct DecoderFilter;

impl Filter for DecoderFilter {
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates, _: &mut Rng) {
        candidates.retain(|index| context.table.endpoint(index).is_some_and(Endpoint::decodes));
    }
}
