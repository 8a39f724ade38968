//! How the requests of a pool are scheduled: every plugin declared, the profiles made of them, and who chooses among those.

use std::fmt;

use crate::decision::{RANKED_MAX, Shed};
use crate::detector::utilization::Utilization;
use crate::handler::single;
use crate::plugin::{
    self, Admitter, Context, Decider, Detector, InvalidParameter, Kind, PLUGINS, Parameters, Plugin, ProfileHandler, Value,
};
use crate::producer::Production;
use crate::rng::Rng;
use crate::session::SessionToken;
use crate::snapshot::EndpointIndex;

mod profile;
pub(crate) use profile::Profile;

/// A pipeline as configuration says it: plain data, in the order written.
#[derive(Clone, Debug, PartialEq)]
pub struct PipelineSpec {
    /// Every plugin declared. Names are unique.
    pub plugins: Vec<PluginSpec>,
    /// What they are put together to; at least one, names unique.
    pub profiles: Vec<ProfileSpec>,
    /// Name of the plugin that runs the profiles; empty: single-profile-handler.
    pub profile_handler: String,
    /// Name of the plugin that says how full the pool is; empty: utilization-detector with its defaults.
    pub saturation_detector: String,
    /// Endpoints in the ranked list where a picker does not say, 1 to [`crate::RANKED_MAX`].
    pub ranked_max: u32,
    /// Is latency predicted? Without, SLOs and what asks for them change nothing.
    pub latency_prediction: bool,
}

/// One declared plugin.
#[derive(Clone, Debug, PartialEq)]
pub struct PluginSpec {
    /// Its `type`: a row of [`crate::plugin::PLUGINS`].
    pub plugin_type: String,
    /// The name it is referred to and explained by; the type when empty.
    pub name: String,
    /// Given parameters.
    pub parameters: Vec<(String, Value)>,
}

/// Filters, weighted scorers and a picker, run one after another.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProfileSpec {
    /// Its name.
    pub name: String,
    /// Its plugins: filters run in this order, scorers add up, at most one picker (none: max-score).
    pub plugins: Vec<ProfilePlugin>,
}

/// A declared plugin's part in a profile.
#[derive(Clone, Debug, PartialEq)]
pub struct ProfilePlugin {
    /// Name of the plugin.
    pub name: String,
    /// Weight of a scorer, 0 or more; ignored for others.
    pub weight: f64,
}

/// A pipeline ready to work. Validated once, when built.
#[derive(Debug)]
pub struct Pipeline {
    profiles: Vec<Profile>,
    handler: Box<dyn ProfileHandler>,
    deciders: Vec<(Box<str>, Box<dyn Decider>)>,
    detector: Box<dyn Detector>,
    admitters: Vec<Box<dyn Admitter>>,
    production: Production,
    headers: Vec<Box<str>>,
    session_tokens: Vec<SessionToken>,
    predicts: bool,
    /// Types of the parsers declared.
    parsers: Vec<&'static str>,
}

/// Something that a plugin refers to by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reference<'a> {
    /// The only profile: there must be no other.
    OnlyProfile,
    /// A profile.
    Profile(&'a str),
    /// A profile, unless there is only one, which then stands for it.
    ProfileOfSeveral(&'a str),
    /// A plugin of kind decider.
    Decider(&'a str),
}

/// What part of a request a profile picks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Answering it.
    Serving,
    /// Working through its prompt first.
    Prefill,
    /// Encoding its images, videos and audio clips first.
    Encode,
}

/// Why a pipeline was refused. Whoever wrote the configuration is at fault.
#[derive(Clone, Debug, PartialEq)]
pub enum InvalidPipeline {
    /// No such plugin type.
    UnknownPlugin(String),
    /// A parameter of the named plugin.
    Parameter {
        /// The plugin's name.
        plugin: String,
        /// What is wrong with it.
        error: InvalidParameter,
    },
    /// A weight that is negative, not finite or above [`WEIGHT_MAX`].
    Weight {
        /// The plugin's name.
        plugin: String,
    },
    /// More than one picker in a profile.
    TwoPickers(String, String),
    /// Two plugins, or two profiles, of one name.
    Duplicate(String),
    /// A name that nothing of that kind has.
    NoSuch {
        /// What was looked for: `plugin`, `profile`, `decider` ...
        kind: &'static str,
        /// The name.
        name: String,
        /// Who refers to it.
        by: String,
    },
    /// The pipeline has this many profiles, and its handler runs the only one.
    NotOneProfile(usize),
    /// `ranked_max` is not in 1..=[`crate::RANKED_MAX`].
    RankedMax(u32),
    /// More plugins than [`PLUGINS_MAX`], declared or in one profile.
    TooManyPlugins(usize),
    /// More profiles than [`PROFILES_MAX`].
    TooManyProfiles(usize),
}

/// The most plugins that may be declared, or be in one profile: each is paid for by every request.
pub const PLUGINS_MAX: usize = 64;

/// The header by which people know a request: queues of running requests show it.
pub const REQUEST_ID: &str = "x-request-id";

/// The most profiles a pipeline may have. A request runs three at most; a coordinator names one of a few.
pub const PROFILES_MAX: usize = 32;

/// The greatest weight of a scorer. A total is an f32: beside a greater weight it no longer tells two scores of a scorer of weight 1 apart.
pub const WEIGHT_MAX: f64 = 1e6;

/// Endpoints in the ranked list of the default pipeline: two retries have somewhere good to go.
const RANKED_DEFAULT: u32 = 3;

// === impl PipelineSpec ===

impl PipelineSpec {
    /// A pipeline of one profile: these plugins, each with its weight there.
    #[must_use]
    pub fn of_one_profile(name: &str, plugins: Vec<(PluginSpec, f64)>, ranked_max: u32) -> Self {
        let part = |(plugin, weight): &(PluginSpec, f64)| ProfilePlugin { name: plugin.name().to_owned(), weight: *weight };
        let profile = ProfileSpec { name: name.to_owned(), plugins: plugins.iter().map(part).collect() };
        Self {
            plugins: plugins.into_iter().map(|(plugin, _)| plugin).collect(),
            profiles: vec![profile],
            profile_handler: String::new(),
            saturation_detector: String::new(),
            ranked_max,
            latency_prediction: false,
        }
    }
}

impl Default for PipelineSpec {
    /// The pipeline of a pool whose operator configured none.
    fn default() -> Self {
        let plugins = ["marginal-cost-scorer", "max-score-picker"].map(|plugin_type| (PluginSpec::of_type(plugin_type), 1.0)).into();
        Self::of_one_profile("default", plugins, RANKED_DEFAULT)
    }
}

// === impl PluginSpec ===

impl PluginSpec {
    /// A plugin of this type, named after it, with its defaults.
    #[must_use]
    pub fn of_type(plugin_type: &str) -> Self {
        Self { plugin_type: plugin_type.to_owned(), name: plugin_type.to_owned(), parameters: Vec::new() }
    }

    /// What it is referred to by.
    #[must_use]
    pub fn name(&self) -> &str {
        if self.name.is_empty() { &self.plugin_type } else { &self.name }
    }

    fn build(&self) -> Result<(Plugin, Parameters<'_>), InvalidPipeline> {
        let plugin_type = plugin::lookup(&self.plugin_type).ok_or_else(|| InvalidPipeline::UnknownPlugin(self.plugin_type.clone()))?;
        let parameters = Parameters::check(plugin_type.parameters, &self.parameters).map_err(|error| self.refuse(error))?;
        let built = (plugin_type.build)(&parameters).map_err(|error| self.refuse(error))?;
        Ok((built, parameters))
    }

    fn refuse(&self, error: InvalidParameter) -> InvalidPipeline {
        InvalidPipeline::Parameter { plugin: self.name().to_owned(), error }
    }
}

// === impl Pipeline ===

impl Pipeline {
    /// Looks every plugin up, checks its parameters, makes it and resolves all references.
    ///
    /// # Errors
    /// [`InvalidPipeline`] names the first thing wrong. The configuration is at fault; the same will fail the same.
    pub fn build(spec: &PipelineSpec) -> Result<Self, InvalidPipeline> {
        check_size(spec)?;
        let built_in = |error| InvalidPipeline::Parameter { plugin: "built in".to_owned(), error };
        let mut pipeline = Self {
            profiles: spec.profiles.iter().map(|profile| Profile::build(profile, spec)).collect::<Result<_, _>>()?,
            handler: Box::new(single::SingleProfile),
            deciders: Vec::new(),
            detector: Box::new(Utilization::with_defaults().map_err(built_in)?),
            admitters: Vec::new(),
            production: Production::with_defaults().map_err(built_in)?,
            headers: Vec::new(),
            session_tokens: Vec::new(),
            predicts: spec.latency_prediction,
            parsers: Vec::new(),
        };
        for plugin in &spec.plugins {
            pipeline.declare(plugin.name(), plugin.build()?.0, spec);
        }
        let identity = pipeline.production.identity.headers.clone();
        pipeline.read_headers(&identity);
        if spec.latency_prediction {
            pipeline.read_headers(&[REQUEST_ID.into()]);
        }
        pipeline.check_references(spec)?;
        Ok(pipeline)
    }

    /// Takes what is in force by being declared or named by the pipeline; profiles have instances of their own.
    fn declare(&mut self, name: &str, built: Plugin, spec: &PipelineSpec) {
        self.read_headers(built.headers());
        if let Some(token) = built.session_token().filter(|token| !self.session_tokens.contains(token)) {
            self.session_tokens.push(token.clone());
        }
        match built {
            Plugin::ProfileHandler(handler) if name == spec.profile_handler => self.handler = handler,
            Plugin::Detector(detector) if name == spec.saturation_detector => self.detector = detector,
            Plugin::Decider(decider) => self.deciders.push((name.into(), decider)),
            Plugin::Admitter(admitter) => self.admitters.push(admitter),
            Plugin::Producer(producer) => self.production.set(producer),
            Plugin::Parser(parser) => self.parsers.push(parser),
            _ => {}
        }
    }

    /// Are requests of the API read that this type of parser is for? All are where no parser is declared.
    #[must_use]
    pub fn reads(&self, parser: &str) -> bool {
        self.parsers.is_empty() || self.parsers.contains(&parser)
    }

    /// Names, in lower case, of the request headers that its plugins read: [`crate::Request::headers`] need hold no others.
    #[must_use]
    pub fn headers(&self) -> &[Box<str>] {
        &self.headers
    }

    /// What producers set, declared or by default.
    #[must_use]
    pub fn production(&self) -> &Production {
        &self.production
    }

    /// Response headers that name an endpoint to the client, who sends them back.
    #[must_use]
    pub fn session_tokens(&self) -> &[SessionToken] {
        &self.session_tokens
    }

    /// Is latency predicted? Without, SLOs change nothing.
    #[must_use]
    pub fn predicts(&self) -> bool {
        self.predicts
    }

    /// Must every inference request have an SLO?
    #[must_use]
    pub fn demands_slo(&self) -> bool {
        self.predicts && self.handler.demands_slo()
    }

    /// May a request be split among endpoints of several roles? Then those that never decode are no destination of the proxy's.
    #[must_use]
    pub fn disaggregates(&self) -> bool {
        self.handler.disaggregates()
    }

    /// What part of a request the profile of this name picks for.
    #[must_use]
    pub fn stage_of(&self, profile: &str) -> Stage {
        self.handler.stage_of(profile)
    }

    /// How many profiles there are.
    pub(crate) fn profiles(&self) -> usize {
        self.profiles.len()
    }

    pub(crate) fn profile(&self, name: &str) -> Option<&Profile> {
        self.profiles.iter().find(|profile| *profile.name == *name)
    }

    pub(crate) fn only_profile(&self) -> Option<&Profile> {
        self.profiles.first()
    }

    pub(crate) fn decider(&self, name: &str) -> Option<&dyn Decider> {
        self.deciders.iter().find(|(decider, _)| **decider == *name).map(|(_, decider)| &**decider)
    }

    pub(crate) fn handler(&self) -> &dyn ProfileHandler {
        &*self.handler
    }

    /// Is the request to be shed, given who could serve it?
    pub(crate) fn sheds(&self, context: &Context<'_>, candidates: &[EndpointIndex], rng: &mut Rng) -> Option<Shed> {
        let sheddable = context.request.priority < 0;
        if sheddable && self.detector.saturation(context, candidates) >= 1.0 {
            return Some(Shed::Saturated);
        }
        self.admitters.iter().any(|admitter| !admitter.admits(context, candidates, rng)).then_some(Shed::Admitter)
    }

    fn read_headers(&mut self, names: &[Box<str>]) {
        for name in names {
            let name = name.to_ascii_lowercase();
            if !self.headers.iter().any(|known| **known == *name) {
                self.headers.push(name.into());
            }
        }
    }

    fn check_references(&self, spec: &PipelineSpec) -> Result<(), InvalidPipeline> {
        let is = |name: &str, kind| {
            let declared = spec.plugins.iter().find(|plugin| plugin.name() == name);
            name.is_empty() || declared.and_then(|plugin| plugin::lookup(&plugin.plugin_type)).is_some_and(|row| row.kind == kind)
        };
        if !is(&spec.profile_handler, Kind::ProfileHandler) {
            return Err(no_such("profile handler", &spec.profile_handler, "the pipeline"));
        }
        if !is(&spec.saturation_detector, Kind::Detector) {
            return Err(no_such("saturation detector", &spec.saturation_detector, "the pipeline"));
        }
        let count = self.profiles();
        for reference in self.handler.references() {
            match reference {
                Reference::OnlyProfile if count != 1 => return Err(InvalidPipeline::NotOneProfile(count)),
                Reference::ProfileOfSeveral(_) if count == 1 => {}
                Reference::Profile(name) | Reference::ProfileOfSeveral(name) if self.profile(name).is_none() => {
                    return Err(no_such("profile", name, "the profile handler"));
                }
                Reference::Decider(name) if self.decider(name).is_none() => return Err(no_such("decider", name, "the profile handler")),
                _ => {}
            }
        }
        Ok(())
    }
}

fn check_size(spec: &PipelineSpec) -> Result<(), InvalidPipeline> {
    if spec.plugins.len() > PLUGINS_MAX {
        return Err(InvalidPipeline::TooManyPlugins(spec.plugins.len()));
    }
    if spec.profiles.len() > PROFILES_MAX {
        return Err(InvalidPipeline::TooManyProfiles(spec.profiles.len()));
    }
    if usize::try_from(spec.ranked_max).is_ok_and(|ranked_max| !(1..=RANKED_MAX).contains(&ranked_max)) {
        return Err(InvalidPipeline::RankedMax(spec.ranked_max));
    }
    only_once(spec.plugins.iter().map(PluginSpec::name))?;
    only_once(spec.profiles.iter().map(|profile| profile.name.as_str()))
}

fn only_once<'n>(names: impl Iterator<Item = &'n str> + Clone) -> Result<(), InvalidPipeline> {
    let mut rest = names.clone();
    for name in names {
        rest.next();
        if rest.clone().any(|other| other == name) {
            return Err(InvalidPipeline::Duplicate(name.to_owned()));
        }
    }
    Ok(())
}

fn no_such(kind: &'static str, name: &str, by: &str) -> InvalidPipeline {
    InvalidPipeline::NoSuch { kind, name: name.to_owned(), by: by.to_owned() }
}

// === impl InvalidPipeline ===

impl fmt::Display for InvalidPipeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownPlugin(name) => {
                write!(f, "unknown plugin type `{name}`")?;
                plugin::write_known(f, name, PLUGINS.iter().map(|plugin| plugin.name))
            }
            Self::Parameter { plugin, error } => write!(f, "plugin `{plugin}`: {error}"),
            Self::Weight { plugin } => write!(f, "plugin `{plugin}`: a weight is a number from 0 to {WEIGHT_MAX}"),
            Self::TwoPickers(first, second) => write!(f, "two pickers, `{first}` and `{second}`: a profile has one"),
            Self::Duplicate(name) => write!(f, "the name `{name}` is taken twice"),
            Self::NoSuch { kind, name, by } => write!(f, "{by} refers to `{name}`, which is no {kind}"),
            Self::NotOneProfile(count) => write!(f, "{count} profiles, and a profile handler that runs the only one"),
            Self::RankedMax(length) => write!(f, "a ranked list of {length} endpoints: allowed are 1 to {RANKED_MAX}"),
            Self::TooManyPlugins(count) => write!(f, "{count} plugins, at most {PLUGINS_MAX} are allowed"),
            Self::TooManyProfiles(count) => write!(f, "{count} profiles, at most {PROFILES_MAX} are allowed"),
        }
    }
}

impl std::error::Error for InvalidPipeline {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Parameter { error, .. } => Some(error),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(plugins: Vec<(PluginSpec, f64)>) -> PipelineSpec {
        PipelineSpec::of_one_profile("test", plugins, 3)
    }

    fn plugin(plugin_type: &str, name: &str, weight: f64, parameters: &[(&str, f64)]) -> (PluginSpec, f64) {
        let parameters = parameters.iter().map(|&(name, value)| (name.to_owned(), Value::Number(value))).collect();
        (PluginSpec { plugin_type: plugin_type.to_owned(), name: name.to_owned(), parameters }, weight)
    }

    fn refusal(spec: &PipelineSpec) -> String {
        Pipeline::build(spec).unwrap_err().to_string()
    }

    fn scorers(pipeline: &Pipeline) -> Vec<(&str, f32)> {
        pipeline.only_profile().unwrap().scorers.iter().map(|(name, weight, _)| (&**name, *weight)).collect()
    }

    #[test]
    fn the_default_pipeline_builds() {
        let pipeline = Pipeline::build(&PipelineSpec::default()).unwrap();
        assert_eq!(scorers(&pipeline), [("marginal-cost-scorer", 1.0)]);
        assert_eq!(pipeline.only_profile().unwrap().ranked_max, 3);
        assert_eq!(pipeline.production(), &Production::with_defaults().unwrap());
        assert!(pipeline.session_tokens().is_empty() && !pipeline.disaggregates());
    }

    #[test]
    fn names_weights_and_the_missing_picker() {
        let pipeline =
            Pipeline::build(&spec(vec![plugin("queue-scorer", "", 0.0, &[]), plugin("queue-scorer", "again", 1e6, &[])])).unwrap();
        assert_eq!(scorers(&pipeline), [("queue-scorer", 0.0), ("again", 1e6)], "without a name it goes by its type");
        assert_eq!(format!("{:?}", pipeline.only_profile().unwrap().picker), "MaxScore");
    }

    #[test]
    fn a_pickers_list_length_stands_over_the_pipelines() {
        let length = |given| {
            let picker = plugin("random-picker", "", 1.0, &[("maxNumOfEndpoints", given)]);
            Pipeline::build(&spec(vec![picker])).map(|pipeline| pipeline.only_profile().unwrap().ranked_max)
        };
        assert_eq!(length(1.0).unwrap(), 1);
        assert_eq!(length(8.0).unwrap(), 8);
        assert_eq!(length(0.0).unwrap(), 3);
        assert_eq!(
            length(9.0).unwrap_err().to_string(),
            "plugin `random-picker`: parameter `maxNumOfEndpoints` is out of range: length of the ranked list, a whole number from 1 to 8; 0: as the profile says"
        );
    }

    #[test]
    fn refusals_name_the_thing_and_what_is_allowed() {
        assert!(
            refusal(&spec(vec![plugin("queue-score", "", 1.0, &[])]))
                .starts_with("unknown plugin type `queue-score`; did you mean `queue-scorer`?; known: `queue-scorer`, ")
        );
        let threshold = spec(vec![plugin("token-load-scorer", "load", 1.0, &[("threshold", 1.0)])]);
        assert_eq!(refusal(&threshold), "plugin `load`: unknown parameter `threshold`; known: `queueThresholdTokens`");
        let cause = std::error::Error::source(&Pipeline::build(&threshold).unwrap_err()).map(ToString::to_string);
        assert_eq!(cause.as_deref(), Some("unknown parameter `threshold`; known: `queueThresholdTokens`"));
        for weight in [-1.0, f64::NAN, f64::INFINITY, 1e6 + 1.0] {
            assert_eq!(
                refusal(&spec(vec![plugin("queue-scorer", "q", weight, &[])])),
                "plugin `q`: a weight is a number from 0 to 1000000"
            );
        }
        assert_eq!(
            refusal(&spec(vec![plugin("random-picker", "a", 1.0, &[]), plugin("max-score-picker", "b", 1.0, &[])])),
            "two pickers, `a` and `b`: a profile has one"
        );
        for ranked_max in [0, 9] {
            let spec = PipelineSpec { ranked_max, ..PipelineSpec::default() };
            assert_eq!(refusal(&spec), format!("a ranked list of {ranked_max} endpoints: allowed are 1 to 8"));
        }
    }

    #[test]
    fn no_more_than_there_may_be() {
        let queues = |count: usize| spec((0..count).map(|at| plugin("queue-scorer", &format!("q{at}"), 1.0, &[])).collect());
        assert!(Pipeline::build(&queues(64)).is_ok());
        assert_eq!(refusal(&queues(65)), "65 plugins, at most 64 are allowed");
        let mut often = queues(1);
        often.profiles[0].plugins = vec![ProfilePlugin { name: "q0".to_owned(), weight: 1.0 }; 65];
        assert_eq!(refusal(&often), "65 plugins, at most 64 are allowed");
        let profile = |at| ProfileSpec { name: format!("p{at}"), plugins: Vec::new() };
        let many = PipelineSpec { profiles: (0..33).map(profile).collect(), ..queues(1) };
        assert_eq!(refusal(&many), "33 profiles, at most 32 are allowed");
    }

    #[test]
    fn names_are_taken_once_and_found() {
        assert_eq!(
            refusal(&spec(vec![plugin("queue-scorer", "", 1.0, &[]), plugin("random-picker", "queue-scorer", 1.0, &[])])),
            "the name `queue-scorer` is taken twice"
        );
        let mut twice = PipelineSpec::default();
        twice.profiles.push(twice.profiles[0].clone());
        assert_eq!(refusal(&twice), "the name `default` is taken twice");
        let mut absent = PipelineSpec::default();
        absent.profiles[0].plugins.push(ProfilePlugin { name: "absent".to_owned(), weight: 1.0 });
        assert_eq!(refusal(&absent), "profile `default` refers to `absent`, which is no plugin");
        let mut picker = PipelineSpec { profile_handler: "max-score-picker".to_owned(), ..PipelineSpec::default() };
        assert_eq!(refusal(&picker), "the pipeline refers to `max-score-picker`, which is no profile handler");
        picker.profile_handler.clear();
        picker.saturation_detector = "absent".to_owned();
        assert_eq!(refusal(&picker), "the pipeline refers to `absent`, which is no saturation detector");
        let none = PipelineSpec { profiles: Vec::new(), ..PipelineSpec::default() };
        assert_eq!(refusal(&none), "0 profiles, and a profile handler that runs the only one");
    }

    #[test]
    fn requests_are_read_by_the_parsers_declared_or_by_all() {
        let reads = |parsers: &[&str]| {
            let plugins = parsers.iter().map(|parser| plugin(parser, "", 1.0, &[])).chain([plugin("random-picker", "", 1.0, &[])]);
            let mut spec = spec(plugins.collect());
            spec.profiles[0].plugins.retain(|part| part.name == "random-picker");
            let pipeline = Pipeline::build(&spec).unwrap();
            ["openai-parser", "anthropic-parser"].map(|parser| pipeline.reads(parser))
        };
        assert_eq!(reads(&[]), [true, true]);
        assert_eq!(reads(&["anthropic-parser", "passthrough-parser"]), [false, true]);
        assert_eq!(reads(&["passthrough-parser"]), [false, false]);
    }

    #[test]
    fn the_weight_of_what_is_no_scorer_is_ignored() {
        assert!(Pipeline::build(&spec(vec![plugin("random-picker", "", f64::NAN, &[])])).is_ok());
    }
}
