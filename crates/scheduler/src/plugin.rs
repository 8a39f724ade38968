//! The plugin traits, their parameters, and the state that a plugin reads.
//!
//! A plugin is one file with its formula and source, its parameters with their defaults, its `impl`
//! and its tests. The table of all plugins is [`crate::registry::PLUGINS`]. The trait of profile
//! handlers, [`crate::ProfileHandler`], is beside the code that runs profiles.

mod closest;
mod context;
mod parameters;
mod references;
pub(crate) mod session_affinity;
mod show;
mod state;

pub use crate::text::readable;
pub use closest::closest;
pub use context::Context;
pub(crate) use parameters::write_known;
pub use parameters::{
    InvalidParameter, Parameter, ParameterDefault, ParameterValue, Parameters, VALUE_DEPTH_MAX,
    VALUES_MAX,
};
pub(crate) use references::{METRICS_EXTRACTOR, attribute_key, producer_name};
pub(crate) use show::{PluginDebug, debug_by_show};
pub use state::RequiredState;

use crate::candidates::Candidates;
use crate::decision::{CostTerms, RankedList, Route};
use crate::endpoint::{Endpoint, EndpointIndex};
use crate::flow::RoomLimits;
use crate::rng::Rng;

/// Narrows the candidates.
pub trait Filter: PluginDebug + Send + Sync {
    /// Drops endpoints that must not or should not serve the request.
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates, rng: &mut Rng);
}

/// Gives each candidate a score.
pub trait Scorer: PluginDebug + Send + Sync {
    /// Writes one score in 0..=1 for each of `endpoints` into `scores`, which has the same order
    /// and is filled with 0. A higher score is better.
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]);

    /// Returns the terms from which each endpoint's score is computed, for `explain`; the list is
    /// empty for a scorer without terms.
    fn cost_terms(&self, _context: &Context<'_>, _endpoints: &[EndpointIndex]) -> Vec<CostTerms> {
        Vec::new()
    }
}

/// Applies SLOs to a profile. In a profile with a shedder, endpoints that would be too slow are
/// ranked behind all others, whatever their score.
pub trait Shedder: PluginDebug + Send + Sync {
    /// Whether to shed the request instead of sending it to one of `endpoints`.
    fn sheds(&self, context: &Context<'_>, endpoints: &[EndpointIndex]) -> bool;
}

/// Makes the ranked list from the scored candidates.
pub trait Picker: PluginDebug + Send + Sync {
    /// Returns the best `max` candidates, best first; `None` only when there are no candidates.
    fn pick(&self, candidates: &Candidates, max: usize, rng: &mut Rng) -> Option<RankedList>;

    /// Whether the picker draws at random by score, so that an endpoint with a low score is
    /// sometimes first.
    fn draws(&self) -> bool {
        false
    }
}

/// Decides whether a stage (prefill, encode) of a request runs on another endpoint.
pub trait Decider: PluginDebug + Send + Sync {
    /// Whether the stage runs on another endpoint if the endpoint `decode` serves the rest of the
    /// request.
    fn disaggregates(&self, context: &Context<'_>, decode: EndpointIndex) -> bool;
}

/// Measures how full the pool is. In a profile, a detector is a filter: it drops full endpoints,
/// unless all endpoints are full.
pub trait Detector: Filter {
    /// Returns the saturation of `endpoints`; 1 or more means full. Endpoints with unknown load are
    /// left out, and the saturation is 0 if the load of all endpoints is unknown.
    fn saturation(&self, context: &Context<'_>, endpoints: &[EndpointIndex]) -> f64;

    /// Returns the maximum number of requests that one endpoint may have at the same time, if the
    /// detector limits this number.
    fn requests_max(&self) -> Option<f64> {
        None
    }

    /// Whether flow control may send the request to the endpoints of `route` now. By default, flow
    /// control may send the request if the saturation of the pool is below the limit, as in llm-d.
    /// If some endpoints do not decode, the saturation of the fuller stage is used. A pool without
    /// requests has room, whatever the engines' last reports say.
    fn has_room(&self, context: &Context<'_>, _route: &Route, limits: RoomLimits) -> bool {
        let decodes = |endpoint: &EndpointIndex| {
            context
                .table
                .endpoint(*endpoint)
                .is_some_and(Endpoint::decodes)
        };
        let stages: (Vec<_>, Vec<_>) = context.table.indices().partition(decodes);
        let saturation = || {
            self.saturation(context, &stages.0)
                .max(self.saturation(context, &stages.1))
        };
        context
            .table
            .indices()
            .all(|endpoint| context.requests(endpoint) == 0)
            || saturation() < limits.ceiling.at(|| saturation() / limits.share) * limits.share
    }

    /// Whether [`Self::has_room`] checks only the endpoints of the route, and not the pool.
    fn is_per_endpoint(&self) -> bool {
        false
    }
}

/// May refuse a request that could be served.
pub trait Admitter: PluginDebug + Send + Sync {
    /// Whether the admitter admits the request, if `endpoints` could serve it.
    fn admits(&self, context: &Context<'_>, endpoints: &[EndpointIndex], rng: &mut Rng) -> bool;
}

debug_by_show!(Admitter, Decider, Detector, Filter, Picker, Scorer, Shedder);
