//! Keeps endpoints that serve the model.

use crate::candidates::Candidates;
use crate::plugin::{Context, Filter};
use crate::rng::Rng;

/// `model`: an endpoint whose metadata names models gets requests for these models and for the
/// adapters that its engine reports. An endpoint without named models gets requests for all models.
/// If no metadata names the target model of an object, all endpoints may serve that model, because
/// metadata names base models, and adapters come and go without a change of the metadata.
///
/// Source: the model to instance map of Dynamo's frontend, which sends a request only to instances
/// registered for its model.
#[derive(Debug)]
pub(crate) struct ServesModelFilter;

impl Filter for ServesModelFilter {
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates, _: &mut Rng) {
        if context.table.names_models() {
            let table = context.table;
            let model = context.request.model;
            let anywhere = table.serves_anywhere(model);
            candidates.retain(|index| anywhere || table.serves(index, model));
        }
    }
}
