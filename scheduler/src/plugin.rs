//! The plugin traits, their parameters, and what a plugin may look at.
//!
//! A plugin is one file: a doc with its formula and source, its parameters with their defaults, its
//! `impl`, its tests. The table of all plugins is [`crate::registry::PLUGINS`]; profile handlers
//! have their trait beside what they run, [`crate::ProfileHandler`].

mod closest;
mod context;
mod parameters;
mod references;
pub(crate) mod session_affinity;
mod show;
mod state;

pub use crate::text::for_people;
pub use closest::closest;
pub use context::Context;
pub(crate) use parameters::write_known;
pub use parameters::{Default, InvalidParameter, Parameter, Parameters, VALUE_DEPTH_MAX, VALUES_MAX, Value};
pub(crate) use references::{METRICS_EXTRACTOR, PRODUCER_NAME, attribute_key};
pub(crate) use show::{Show, debug_by_show};
pub use state::State;

use crate::candidates::Candidates;
use crate::decision::{CostTerms, Ranked};
use crate::endpoint::EndpointIndex;
use crate::rng::Rng;

/// Narrows the candidates.
pub trait Filter: Show + Send + Sync {
    /// Drops whom the request must not or should not go to.
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates, rng: &mut Rng);
}

/// Rates the candidates.
pub trait Scorer: Show + Send + Sync {
    /// Writes one score in 0..=1 for each of `endpoints` into `scores`, which runs parallel and comes filled with 0. More is better.
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]);

    /// The terms that each endpoint's score was computed from, for `explain`; empty for a scorer without terms.
    fn cost_terms(&self, _context: &Context<'_>, _endpoints: &[EndpointIndex]) -> Vec<CostTerms> {
        Vec::new()
    }
}

/// Holds a profile to SLOs: where one is, endpoints that would be late stand behind all others of
/// the list, whatever they score.
pub trait Shedder: Show + Send + Sync {
    /// Is the request to be shed rather than sent to any of `endpoints`?
    fn sheds(&self, context: &Context<'_>, endpoints: &[EndpointIndex]) -> bool;
}

/// Draws the ranked list.
pub trait Picker: Show + Send + Sync {
    /// The best `max` of the candidates, best first; `None` only when there are none.
    fn pick(&self, candidates: &Candidates, max: usize, rng: &mut Rng) -> Option<Ranked>;

    /// Does it draw by weight, so that a small weight comes first now and then?
    fn draws(&self) -> bool {
        false
    }
}

/// Says whether a request is worth a stage of its own (prefill, encode) elsewhere.
pub trait Decider: Show + Send + Sync {
    /// Is it, where `decode` would do the rest?
    fn disaggregates(&self, context: &Context<'_>, decode: EndpointIndex) -> bool;
}

/// Says how full the pool is. In a profile it is a filter: it drops who is full, unless all are.
pub trait Detector: Filter {
    /// Saturation of `endpoints`; 1 and more is full. An endpoint of which nothing is known does not count; 0 where nothing is known of any.
    fn saturation(&self, context: &Context<'_>, endpoints: &[EndpointIndex]) -> f64;
}

/// May refuse a request that could be served.
pub trait Admitter: Show + Send + Sync {
    /// Is it admitted, when `endpoints` could serve it?
    fn admits(&self, context: &Context<'_>, endpoints: &[EndpointIndex], rng: &mut Rng) -> bool;
}

debug_by_show!(Admitter, Decider, Detector, Filter, Picker, Scorer, Shedder);
