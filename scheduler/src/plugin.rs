//! The plugin traits, their parameters, and the one table of plugins.
//!
//! A plugin is one file: a doc with its formula and source, its parameters with their defaults, its `impl`, its tests. [`PLUGINS`] lists
//! them all; look-up, validation and the printed reference come from it, so each default appears once.

mod closest;
mod parameters;
mod reference;
mod show;
mod state;

pub use crate::producer::Producer;
pub use closest::closest;
pub(crate) use parameters::write_known;
pub use parameters::{Default, InvalidParameter, Parameter, Parameters, VALUE_DEPTH_MAX, VALUES_MAX, Value};
pub use reference::reference_markdown;
pub use state::State;

use crate::admitter::{latency_slo, probabilistic};
use crate::candidates::Candidates;
use crate::decider::{always, prefix_based};
use crate::decision::{CostTerms, Decision, Ranked};
use crate::detector::concurrency;
use crate::filter::{by_label, label_selector, prefix_cache_affinity, role, slo_headroom_tier, utilization};
use crate::handler::{data_parallel, disagg, header, single, slo_aware};
use crate::in_flight::Load;
use crate::local::Local;
use crate::parser;
use crate::picker::{max_score, random, weighted_random};
use crate::pipeline::{Reference, Stage};
use crate::producer::{agent_identity, approx_prefix_cache, inflight_load, predicted_latency, token};
use crate::prospects::{Prospect, Prospects};
use crate::request::Request;
use crate::rng::Rng;
use crate::schedule::Run;
use crate::scorer::{
    active_request, context_length_aware, endpoint_attribute, header_label_affinity, kv_cache_utilization, load_aware, lora_affinity,
    marginal_cost, no_hit_lru, prefix_cache, queue, running_requests_size, session_affinity, token_load,
};
use crate::session::SessionToken;
use crate::snapshot::{EndpointIndex, EndpointMetrics, Snapshot};
use show::Show;

/// All a plugin may look at.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The pool.
    pub snapshot: &'a Snapshot,
    /// The request.
    pub request: &'a Request<'a>,
    /// The proxy's own state.
    pub local: Local<'a>,
    /// What the request would see at each endpoint, once somebody asks.
    pub prospects: &'a Prospects,
    /// See [`Self::drawing_blocks`]; parallel to the snapshot's endpoints.
    pub(crate) drawing: &'a [u32],
    /// Is it a stage before decode that is picked for, where nothing is put out?
    pub(crate) early_stage: bool,
}

/// Narrows the candidates.
pub trait Filter: Show + Send + Sync {
    /// Drops whom the request must not or should not go to.
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates, rng: &mut Rng);

    /// Names of the request headers it reads.
    fn headers(&self) -> &[Box<str>] {
        &[]
    }

    /// The response header that its clients send back, if it has one.
    fn session_token(&self) -> Option<&SessionToken> {
        None
    }
}

/// Rates the candidates.
pub trait Scorer: Show + Send + Sync {
    /// Writes one score in 0..=1 for each of `endpoints` into `scores`, which runs parallel and comes filled with 0. More is better.
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]);

    /// The terms that each endpoint's score was computed from, for `explain`; empty for a scorer without terms.
    fn cost_terms(&self, _context: &Context<'_>, _endpoints: &[EndpointIndex]) -> Vec<CostTerms> {
        Vec::new()
    }

    /// Do endpoints that would be late stand behind all others of the list, whatever they score?
    fn puts_late_last(&self) -> bool {
        false
    }

    /// Is the request to be shed rather than sent to any of `endpoints`?
    fn sheds(&self, _context: &Context<'_>, _endpoints: &[EndpointIndex]) -> bool {
        false
    }

    /// Names of the request headers it reads.
    fn headers(&self) -> &[Box<str>] {
        &[]
    }

    /// The response header that its clients send back, if it has one.
    fn session_token(&self) -> Option<&SessionToken> {
        None
    }
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

/// Chooses the profiles a request runs and makes one decision of their picks.
pub trait ProfileHandler: Show + Send + Sync {
    /// What it refers to by name; checked when the pipeline is built.
    fn references(&self) -> Vec<Reference<'_>>;

    /// May it split a request among endpoints of several roles? Then those that never decode are no destination of the proxy's.
    fn disaggregates(&self) -> bool {
        false
    }

    /// Must every inference request have an SLO, where latency is predicted?
    fn demands_slo(&self) -> bool {
        false
    }

    /// What part of a request the profile of this name picks for.
    fn stage_of(&self, _profile: &str) -> Stage {
        Stage::Serving
    }

    /// Runs profiles and decides.
    fn route(&self, run: &mut Run<'_>) -> Decision;

    /// Names of the request headers it reads.
    fn headers(&self) -> &[Box<str>] {
        &[]
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
    /// Has the requests of an API read; its type.
    Parser(&'static str),
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
    /// [`Plugin::Parser`].
    Parser,
}

/// Words that only people read: where nobody does, in the module inside the proxy, they take no memory.
#[must_use]
pub const fn for_people(words: &'static str) -> &'static str {
    if cfg!(target_arch = "wasm32") { "" } else { words }
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
    /// The state it looks at; of one whose parameters choose, all that it may.
    pub needs: &'static [State],
    /// Makes one from checked parameters; callers outside go through [`PluginType::build`].
    pub build: fn(&Parameters<'_>) -> Result<Plugin, InvalidParameter>,
}

/// A reference from a plugin to who produces what it reads. There is one of each kind here, declared or not, so the name changes nothing.
pub(crate) const PRODUCER_NAME: Parameter =
    Parameter { name: "", default: Default::Text(""), doc: for_people("no effect: each producer exists once, declared or not") };

/// Who produces an endpoint's attributes.
pub(crate) const METRICS_EXTRACTOR: Parameter = Parameter {
    name: "producer",
    default: Default::Text(""),
    doc: for_people("core-metrics-extractor or empty: no other plugin produces attributes"),
};

/// The key of an attribute. With a slash it is the older spelling `KEY/PRODUCER`, which would match nothing, unless the producer is given.
pub(crate) fn attribute_key(parameters: &Parameters<'_>, name: &str) -> Result<Box<str>, InvalidParameter> {
    let said = parameters.choice(METRICS_EXTRACTOR.name, &[("", false), ("core-metrics-extractor", true)])?;
    let key = parameters.text(name)?;
    if key.contains('/') && !said { Err(parameters.out_of_range(name)) } else { Ok(key.into()) }
}

/// Every plugin there is, in the order they are explained. The structural filters are none of them: nobody can leave those out.
pub static PLUGINS: &[PluginType] = &[
    queue::PLUGIN,
    kv_cache_utilization::PLUGIN,
    running_requests_size::PLUGIN,
    active_request::PLUGIN,
    token_load::PLUGIN,
    prefix_cache::PLUGIN,
    marginal_cost::PLUGIN,
    lora_affinity::PLUGIN,
    load_aware::PLUGIN,
    no_hit_lru::PLUGIN,
    context_length_aware::PLUGIN,
    session_affinity::PLUGIN,
    header_label_affinity::PLUGIN,
    crate::scorer::latency::LATENCY,
    crate::scorer::latency::SLO,
    endpoint_attribute::PLUGIN,
    label_selector::PLUGIN,
    label_selector::BY_LABEL_SELECTOR,
    by_label::PLUGIN,
    role::DECODE,
    role::PREFILL,
    role::ENCODE,
    prefix_cache_affinity::PLUGIN,
    slo_headroom_tier::PLUGIN,
    utilization::PLUGIN,
    crate::filter::endpoint_attribute::PLUGIN,
    crate::filter::session_affinity::PLUGIN,
    max_score::PLUGIN,
    weighted_random::PLUGIN,
    random::PLUGIN,
    single::PLUGIN,
    header::PLUGIN,
    disagg::PLUGIN,
    data_parallel::PLUGIN,
    slo_aware::PLUGIN,
    prefix_based::PLUGIN,
    always::PREFILL,
    always::MULTIMODAL,
    crate::detector::utilization::PLUGIN,
    concurrency::PLUGIN,
    probabilistic::PLUGIN,
    latency_slo::PLUGIN,
    approx_prefix_cache::PLUGIN,
    inflight_load::PLUGIN,
    token::PLUGIN,
    predicted_latency::PLUGIN,
    predicted_latency::TRACKER,
    agent_identity::PLUGIN,
    parser::OPENAI,
    parser::ANTHROPIC,
    parser::VLLM_HTTP,
    parser::VLLM_GRPC,
    parser::SGLANG_HTTP,
    parser::VERTEX_AI,
    parser::PASSTHROUGH,
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
            Self::Picker(_) | Self::Decider(_) | Self::Detector(_) | Self::Admitter(_) | Self::Producer(_) | Self::Parser(_) => &[],
        }
    }

    /// The response header that its clients send back, if it has one.
    #[must_use]
    pub fn session_token(&self) -> Option<&SessionToken> {
        match self {
            Self::Filter(filter) => filter.session_token(),
            Self::Scorer(scorer) => scorer.session_token(),
            _ => None,
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
            Self::Parser(_) => Kind::Parser,
        }
    }
}

// === impl Context ===

impl<'a> Context<'a> {
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

    /// A number that the metrics extractor was told to read; `None` when unknown, stale or not finite.
    #[must_use]
    pub fn attribute(&self, endpoint: EndpointIndex, key: &str) -> Option<f32> {
        self.metrics(endpoint)?.attribute(key).filter(|value| value.is_finite())
    }

    /// The value of a label of the endpoint.
    #[must_use]
    pub fn label(&self, endpoint: EndpointIndex, key: &str) -> Option<&str> {
        self.snapshot.endpoint(endpoint)?.label(key)
    }

    /// What tells this agent's session from others: the first of the headers that agent-identity reads, not blank.
    #[must_use]
    pub fn agent_identity(&self) -> Option<&str> {
        let headers = &self.snapshot.pipeline().production().identity.headers;
        headers.iter().filter_map(|name| self.request.header(name)).map(str::trim).find(|value| !value.is_empty())
    }

    /// What the proxy has outstanding there.
    #[must_use]
    pub fn load(&self, endpoint: EndpointIndex) -> Load {
        self.snapshot.id(endpoint).map(|id| self.local.in_flight.load(id)).unwrap_or_default()
    }

    /// How many requests that is.
    #[must_use]
    pub fn requests(&self, endpoint: EndpointIndex) -> u32 {
        self.snapshot.id(endpoint).map(|id| self.local.in_flight.requests(id)).unwrap_or_default()
    }

    /// Prompt tokens of the request that the endpoint is not believed to hold already.
    #[must_use]
    pub fn uncached_tokens(&self, endpoint: EndpointIndex) -> u32 {
        self.tokens_without(self.local.matched_blocks(endpoint))
    }

    /// Blocks of the request's prefix that draw it to the endpoint: what it is believed to hold, and of its home what others may have put there.
    /// For those who weigh caches; what is computed, and how long that takes, goes by what is believed.
    #[must_use]
    pub fn drawing_blocks(&self, endpoint: EndpointIndex) -> u32 {
        self.drawing.get(endpoint.get()).copied().unwrap_or(0)
    }

    /// Prompt tokens of the request beyond those.
    #[must_use]
    pub fn tokens_not_drawing(&self, endpoint: EndpointIndex) -> u32 {
        self.tokens_without(self.drawing_blocks(endpoint))
    }

    fn tokens_without(&self, blocks: u32) -> u32 {
        self.request.prompt_tokens.saturating_sub(blocks.saturating_mul(self.request.prefix_block_tokens))
    }

    /// What the request would see there; `None` where nothing is predicted, or the model abstains.
    #[must_use]
    pub fn prospect(&self, endpoint: EndpointIndex) -> Option<&'a Prospect> {
        self.prospects.get(self).get(endpoint.get())?.as_ref().ok()
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
            match plugin.build(&[]) {
                Ok(built) => assert_eq!(built.kind(), plugin.kind, "{}", plugin.name),
                Err(error) => assert!(matches!(error, InvalidParameter::Missing(_)), "{}: {error}", plugin.name),
            }
        }
    }

    #[test]
    fn every_parameter_refuses_what_is_no_number_of_its_range() {
        for (plugin, parameter) in PLUGINS.iter().flat_map(|p| p.parameters.iter().map(move |parameter| (p, parameter))) {
            if !matches!(parameter.default, Default::Number(_)) {
                continue;
            }
            for bad in [f64::NAN, f64::INFINITY, -1.0, 1e300] {
                let error = plugin.build(&[(parameter.name.to_owned(), Value::Number(bad))]).unwrap_err();
                assert_eq!(error, InvalidParameter::OutOfRange { name: parameter.name.to_owned(), allowed: parameter.doc });
            }
        }
    }
}
