//! The plugin traits, their parameters, and the one table of plugins.
//!
//! A plugin is one file: a doc with its formula and source, its parameters with their defaults, its `impl`, its tests. [`PLUGINS`] lists
//! them all; look-up, validation and the printed reference come from it, so each default appears once.

mod closest;
mod parameters;
mod reference;

pub use closest::closest;
pub(crate) use parameters::write_known;
pub use parameters::{Default, InvalidParameter, Parameter, Parameters, VALUE_DEPTH_MAX, VALUES_MAX, Value};
pub use reference::reference_markdown;

use crate::candidates::Candidates;
use crate::decision::{Decision, Ranked};
use crate::handler::single;
use crate::in_flight::Load;
use crate::local::Local;
use crate::picker::{max_score, random, weighted_random};
use crate::pipeline::Reference;
use crate::request::Request;
use crate::rng::Rng;
use crate::schedule::Run;
use crate::scorer::{active_request, kv_cache_utilization, lora_affinity, prefix_cache, queue, running_requests_size, token_load};
use crate::snapshot::{EndpointIndex, EndpointMetrics, Snapshot};

/// All a plugin may look at.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The pool.
    pub snapshot: &'a Snapshot,
    /// The request.
    pub request: &'a Request<'a>,
    /// The proxy's own state.
    pub local: Local<'a>,
}

/// Narrows the candidates.
pub trait Filter: std::fmt::Debug + Send + Sync {
    /// Drops whom the request must not or should not go to.
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates, rng: &mut Rng);

    /// Names of the request headers it reads.
    fn headers(&self) -> &[Box<str>] {
        &[]
    }
}

/// Rates the candidates.
pub trait Scorer: std::fmt::Debug + Send + Sync {
    /// Writes one score in 0..=1 for each of `endpoints` into `scores`, which runs parallel and comes filled with 0. More is better.
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]);

    /// Names of the request headers it reads.
    fn headers(&self) -> &[Box<str>] {
        &[]
    }
}

/// Draws the ranked list.
pub trait Picker: std::fmt::Debug + Send + Sync {
    /// The best `max` of the candidates, best first; `None` only when there are none.
    fn pick(&self, candidates: &Candidates, max: usize, rng: &mut Rng) -> Option<Ranked>;
}

/// Chooses the profiles a request runs and makes one decision of their picks.
pub trait ProfileHandler: std::fmt::Debug + Send + Sync {
    /// What it refers to by name; checked when the pipeline is built.
    fn references(&self) -> Vec<Reference<'_>>;

    /// Runs profiles and decides.
    fn route(&self, run: &mut Run<'_>) -> Decision;

    /// Names of the request headers it reads.
    fn headers(&self) -> &[Box<str>] {
        &[]
    }
}

/// Says whether a request is worth a stage of its own (prefill, encode) elsewhere.
pub trait Decider: std::fmt::Debug + Send + Sync {
    /// Is it, where `decode` would do the rest?
    fn disaggregates(&self, context: &Context<'_>, decode: EndpointIndex) -> bool;
}

/// Says how full the pool is. In a profile it is a filter: it drops who is full, unless all are.
pub trait Detector: Filter {
    /// Saturation of `endpoints`; 1 and more is full. An endpoint of which nothing is known does not count; 0 where nothing is known of any.
    fn saturation(&self, context: &Context<'_>, endpoints: &[EndpointIndex]) -> f32;
}

/// May refuse a request that could be served.
pub trait Admitter: std::fmt::Debug + Send + Sync {
    /// Is it admitted, when `endpoints` could serve it?
    fn admits(&self, context: &Context<'_>, endpoints: &[EndpointIndex], rng: &mut Rng) -> bool;
}

/// Settings of the facts a request comes with. What produces them is the proxy's own, whether declared or not.
#[derive(Clone, Debug, PartialEq)]
pub enum Producer {}

/// A plugin ready to work.
#[derive(Debug)]
pub enum Plugin {
    /// Narrows.
    Filter(Box<dyn Filter>),
    /// Rates.
    Scorer(Box<dyn Scorer>),
    /// Narrows first, rates later.
    FilteringScorer(Box<dyn Filter>, Box<dyn Scorer>),
    /// Draws.
    Picker(Box<dyn Picker>),
    /// Runs profiles.
    ProfileHandler(Box<dyn ProfileHandler>),
    /// Decides on a stage of its own.
    Decider(Box<dyn Decider>),
    /// Says how full the pool is.
    Detector(Box<dyn Detector>),
    /// Admits or refuses.
    Admitter(Box<dyn Admitter>),
    /// Sets how facts are produced.
    Producer(Producer),
}

/// Which phase a plugin works in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// [`Filter`].
    Filter,
    /// [`Scorer`].
    Scorer,
    /// [`Picker`].
    Picker,
    /// [`ProfileHandler`].
    ProfileHandler,
    /// [`Decider`].
    Decider,
    /// [`Detector`].
    Detector,
    /// [`Admitter`].
    Admitter,
    /// [`Producer`].
    Producer,
}

/// One row of [`PLUGINS`].
#[derive(Debug)]
pub struct PluginType {
    /// Its `type` in configuration files.
    pub name: &'static str,
    /// Its phase.
    pub kind: Kind,
    /// One line for the printed reference: the formula.
    pub doc: &'static str,
    /// Where the formula comes from.
    pub source: &'static str,
    /// Its parameters.
    pub parameters: &'static [Parameter],
    /// Makes one from checked parameters; callers outside go through [`PluginType::build`].
    pub build: fn(&Parameters<'_>) -> Result<Plugin, InvalidParameter>,
}

/// Every plugin there is, in the order they are explained. The structural filters are none of them: nobody can leave those out.
pub static PLUGINS: &[PluginType] = &[
    queue::PLUGIN,
    kv_cache_utilization::PLUGIN,
    running_requests_size::PLUGIN,
    active_request::PLUGIN,
    token_load::PLUGIN,
    prefix_cache::PLUGIN,
    lora_affinity::PLUGIN,
    max_score::PLUGIN,
    weighted_random::PLUGIN,
    random::PLUGIN,
    single::PLUGIN,
];

/// The plugin type of that name.
#[must_use]
pub fn lookup(plugin_type: &str) -> Option<&'static PluginType> {
    PLUGINS.iter().find(|plugin| plugin.name == plugin_type)
}

// === impl PluginType ===

impl PluginType {
    /// Makes one from the given parameters over its defaults.
    ///
    /// # Errors
    /// [`InvalidParameter`] when one is unknown, given twice, of another type or out of range.
    pub fn build(&self, given: &[(String, Value)]) -> Result<Plugin, InvalidParameter> {
        (self.build)(&Parameters::check(self.parameters, given)?)
    }
}

// === impl Plugin ===

impl Plugin {
    /// Names of the request headers it reads.
    #[must_use]
    pub fn headers(&self) -> &[Box<str>] {
        match self {
            Self::Filter(filter) => filter.headers(),
            Self::Scorer(scorer) | Self::FilteringScorer(_, scorer) => scorer.headers(),
            Self::ProfileHandler(handler) => handler.headers(),
            Self::Picker(_) | Self::Decider(_) | Self::Detector(_) | Self::Admitter(_) | Self::Producer(_) => &[],
        }
    }

    /// The phase it works in.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            Self::Filter(_) => Kind::Filter,
            Self::Scorer(_) | Self::FilteringScorer(..) => Kind::Scorer,
            Self::Picker(_) => Kind::Picker,
            Self::ProfileHandler(_) => Kind::ProfileHandler,
            Self::Decider(_) => Kind::Decider,
            Self::Detector(_) => Kind::Detector,
            Self::Admitter(_) => Kind::Admitter,
            Self::Producer(_) => Kind::Producer,
        }
    }
}

// === impl Context ===

impl Context<'_> {
    /// What the engine last said of itself; `None` when that is too old to go by.
    #[must_use]
    pub fn metrics(&self, endpoint: EndpointIndex) -> Option<&EndpointMetrics> {
        if self.local.metrics_stale { None } else { self.snapshot.metrics_of(endpoint) }
    }

    /// One number of it; `None` when unknown, stale, negative or not finite.
    #[must_use]
    pub fn metric(&self, endpoint: EndpointIndex, read: impl Fn(&EndpointMetrics) -> Option<f32>) -> Option<f32> {
        self.metrics(endpoint).and_then(read).filter(|value| value.is_finite() && *value >= 0.0)
    }

    /// What the proxy has outstanding there.
    #[must_use]
    pub fn load(&self, endpoint: EndpointIndex) -> Load {
        self.snapshot.endpoint(endpoint).map(|e| self.local.in_flight.load(e.id)).unwrap_or_default()
    }

    /// Prompt tokens of the request that the endpoint is not believed to hold already.
    #[must_use]
    pub fn uncached_tokens(&self, endpoint: EndpointIndex) -> u32 {
        let cached = self.local.matched_blocks(endpoint).saturating_mul(self.request.prefix_block_tokens);
        self.request.prompt_tokens.saturating_sub(cached)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_there_once_and_found() {
        for plugin in PLUGINS {
            assert_eq!(PLUGINS.iter().filter(|other| other.name == plugin.name).count(), 1, "{}", plugin.name);
            assert_eq!(lookup(plugin.name).map(|found| found.name), Some(plugin.name));
        }
        assert!(lookup("queue-scorer ").is_none());
    }

    #[test]
    fn every_plugin_accepts_its_own_defaults_and_is_of_its_kind() {
        for plugin in PLUGINS {
            let built = plugin.build(&[]).unwrap_or_else(|e| panic!("{}: {e}", plugin.name));
            assert_eq!(built.kind(), plugin.kind, "{}", plugin.name);
        }
    }

    #[test]
    fn every_parameter_refuses_what_is_no_number_of_its_range() {
        for (plugin, parameter) in PLUGINS.iter().flat_map(|p| p.parameters.iter().map(move |parameter| (p, parameter))) {
            assert!(matches!(parameter.default, Default::Number(_)), "a parameter of a new type needs its own case here");
            for bad in [f64::NAN, f64::INFINITY, -1.0, 1e300] {
                let error = plugin.build(&[(parameter.name.to_owned(), Value::Number(bad))]).unwrap_err();
                assert_eq!(error, InvalidParameter::OutOfRange { name: parameter.name.to_owned(), allowed: parameter.doc });
            }
        }
    }
}
