//! Keeps endpoints that serve the model.

use crate::candidates::Candidates;
use crate::plugin::{Context, Filter};
use crate::rng::Rng;

/// `model`: an endpoint that says which models it serves is asked for those and for the adapters that its engine reports; one that says nothing is asked
/// for any. A target that no endpoint names may be asked for anywhere: metadata names base models, adapters come and go without it.
///
/// Source: the model to instance map of Dynamo's frontend, which sends a request only to instances registered for its model.
#[derive(Debug)]
pub(crate) struct ServesModelFilter;

impl Filter for ServesModelFilter {
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates, _: &mut Rng) {
        if context.table.names_models() {
            let (table, model) = (context.table, context.request.model);
            let anywhere = table.serves_anywhere(model);
            candidates.retain(|index| anywhere || table.serves(index, model));
        }
    }
}
