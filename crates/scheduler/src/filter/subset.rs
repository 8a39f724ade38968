//! Keeps endpoints that the proxy allows for this request.

use crate::candidates::Candidates;
use crate::plugin::{Context, Filter};
use crate::rng::Rng;

/// `subset`: a request without a subset hint may use the whole pool, and a request with an empty
/// hint may use no endpoint.
///
/// Source: Gateway API Inference Extension, proposal 004 (endpoint picker protocol), subset hint.
#[derive(Debug)]
pub(crate) struct SubsetFilter;

impl Filter for SubsetFilter {
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates, _: &mut Rng) {
        if let Some(hint) = context.request.subset {
            candidates.retain(|index| {
                context
                    .table
                    .socket(index)
                    .is_some_and(|socket| hint.allows_socket(socket))
            });
        }
    }
}
