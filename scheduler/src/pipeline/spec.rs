//! A pipeline as configuration says it, and why one is refused.

use std::fmt;

use crate::decision::RANKED_MAX;
use crate::plugin::{InvalidParameter, ParameterValue, Parameters, write_known};
use crate::registry::{PLUGINS, Plugin, lookup};

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
    /// Its `type`: a row of [`crate::registry::PLUGINS`].
    pub plugin_type: String,
    /// The name it is referred to and explained by; the type when empty.
    pub name: String,
    /// Given parameters.
    pub parameters: Vec<(String, ParameterValue)>,
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

    pub(super) fn build(&self) -> Result<(Plugin, Parameters<'_>), InvalidPipeline> {
        let plugin_type = lookup(&self.plugin_type).ok_or_else(|| InvalidPipeline::UnknownPlugin(self.plugin_type.clone()))?;
        let parameters = Parameters::check(plugin_type.parameters, &self.parameters).map_err(|error| self.refuse(error))?;
        let built = (plugin_type.build)(&parameters).map_err(|error| self.refuse(error))?;
        Ok((built, parameters))
    }

    pub(super) fn refuse(&self, error: InvalidParameter) -> InvalidPipeline {
        InvalidPipeline::Parameter { plugin: self.name().to_owned(), error }
    }
}

pub(super) fn check_size(spec: &PipelineSpec) -> Result<(), InvalidPipeline> {
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

pub(super) fn no_such(kind: &'static str, name: &str, by: &str) -> InvalidPipeline {
    InvalidPipeline::NoSuch { kind, name: name.to_owned(), by: by.to_owned() }
}

// === impl InvalidPipeline ===

impl fmt::Display for InvalidPipeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownPlugin(name) => {
                write!(f, "unknown plugin type `{name}`")?;
                write_known(f, name, PLUGINS.iter().map(|plugin| plugin.name))
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
