//! Keeps endpoints that serve the model.

use crate::candidates::Candidates;
use crate::plugin::{Context, Filter};
use crate::rng::Rng;

/// `model`: an endpoint that says which models it serves is asked for no other; one that says nothing is asked for any.
///
/// Source: the model to instance map of Dynamo's frontend, which sends a request only to instances registered for its model.
#[derive(Debug)]
pub(crate) struct ServesModel;

impl Filter for ServesModel {
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates, _: &mut Rng) {
        if context.snapshot.names_models() {
            candidates.retain(|index| context.snapshot.endpoint(index).is_some_and(|e| e.serves(context.request.model)));
        }
    }
}
