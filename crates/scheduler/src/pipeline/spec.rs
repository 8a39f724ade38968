//! The configuration of a pipeline, and the reasons to refuse a pipeline.

use std::fmt;

use crate::decision::RANKED_MAX;
use crate::plugin::{InvalidParameter, ParameterValue, Parameters, write_known};
use crate::registry::{PLUGINS, Plugin, lookup};

/// A pipeline as plain data, in the order of the configuration file.
#[derive(Clone, Debug, PartialEq)]
pub struct PipelineSpec {
    /// The declared plugins. The names of plugins are unique.
    pub plugins: Vec<PluginSpec>,
    /// The profiles of the pipeline. A pipeline has at least one profile, and the names of profiles
    /// are unique.
    pub profiles: Vec<ProfileSpec>,
    /// The name of the profile handler; an empty name means single-profile-handler.
    pub profile_handler: String,
    /// The name of the saturation detector; an empty name means utilization-detector with its
    /// defaults.
    pub saturation_detector: String,
    /// The length of the ranked list if a picker does not set the length, from 1 to
    /// [`crate::RANKED_MAX`].
    pub ranked_max: u32,
    /// Whether latency is predicted. Without predictions, SLOs and the plugins that use SLOs have
    /// no effect.
    pub latency_prediction: bool,
}

/// One declared plugin.
#[derive(Clone, Debug, PartialEq)]
pub struct PluginSpec {
    /// The `type` of the plugin: a row of [`crate::registry::PLUGINS`].
    pub plugin_type: String,
    /// The name that profiles and `explain` use; an empty name means the type.
    pub name: String,
    pub parameters: Vec<(String, ParameterValue)>,
}

/// A profile: filters, weighted scorers and a picker, which run one after another.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProfileSpec {
    pub name: String,
    /// The plugins of the profile. Filters run in this order, and scores are added up. At most one
    /// plugin is a picker (default: max-score-picker).
    pub plugins: Vec<ProfilePlugin>,
}

/// The use of a declared plugin in a profile.
#[derive(Clone, Debug, PartialEq)]
pub struct ProfilePlugin {
    pub name: String,
    /// The weight of a scorer, 0 or more; ignored for other plugins.
    pub weight: f64,
}

/// The reason why a pipeline was refused. The pipeline is refused until the configuration changes.
#[derive(Clone, Debug, PartialEq)]
pub enum InvalidPipeline {
    /// The registry has no plugin type with this name.
    UnknownPlugin(String),
    /// A parameter of the named plugin is invalid.
    Parameter {
        /// The plugin's name.
        plugin: String,
        error: InvalidParameter,
    },
    /// A weight is negative, not finite or above [`WEIGHT_MAX`].
    Weight {
        /// The plugin's name.
        plugin: String,
    },
    /// A profile has more than one picker.
    TwoPickers(String, String),
    /// Two plugins, or two profiles, have the same name.
    Duplicate(String),
    /// The configuration refers to a plugin or profile that does not exist.
    NoSuch {
        /// The kind of the missing item, such as `plugin`, `profile` or `decider`.
        kind: &'static str,
        name: String,
        /// The part of the configuration that refers to the name.
        by: String,
    },
    /// The pipeline has this many profiles, but its handler needs exactly one profile.
    NotOneProfile(usize),
    /// `ranked_max` is not in 1..=[`crate::RANKED_MAX`].
    RankedMax(u32),
    /// More than [`PLUGINS_MAX`] plugins are declared, or are in one profile.
    TooManyPlugins(usize),
    /// There are more than [`PROFILES_MAX`] profiles.
    TooManyProfiles(usize),
}

/// The maximum number of plugins that are declared, or are in one profile. The number is limited,
/// because every request runs all plugins of a profile.
pub const PLUGINS_MAX: usize = 64;

/// The maximum number of profiles in a pipeline. A request runs at most three profiles, and a
/// coordinator chooses among a few profiles by header.
pub const PROFILES_MAX: usize = 32;

/// The maximum weight of a scorer. With a greater weight, the total score (an f32) would be too
/// inexact to include the scores of a scorer with weight 1.
pub const WEIGHT_MAX: u32 = 1_000_000;

/// The length of the ranked list in the default pipeline: the pick and two retries.
const RANKED_DEFAULT: u32 = 3;

// === impl PipelineSpec ===

impl PipelineSpec {
    /// Returns a pipeline with one profile of these plugins and their weights.
    #[must_use]
    pub fn of_one_profile(name: &str, plugins: Vec<(PluginSpec, f64)>, ranked_max: u32) -> Self {
        let part = |(plugin, weight): &(PluginSpec, f64)| ProfilePlugin {
            name: plugin.name().to_owned(),
            weight: *weight,
        };
        let profile = ProfileSpec {
            name: name.to_owned(),
            plugins: plugins.iter().map(part).collect(),
        };
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
    /// Returns the pipeline of a pool without a configuration.
    fn default() -> Self {
        let plugins = ["marginal-cost-scorer", "max-score-picker"]
            .map(|plugin_type| (PluginSpec::of_type(plugin_type), 1.0))
            .into();
        Self::of_one_profile("default", plugins, RANKED_DEFAULT)
    }
}

// === impl PluginSpec ===

impl PluginSpec {
    /// Returns a plugin of this type with the default parameters. The name of the plugin is its
    /// type.
    #[must_use]
    pub fn of_type(plugin_type: &str) -> Self {
        Self {
            plugin_type: plugin_type.to_owned(),
            name: plugin_type.to_owned(),
            parameters: Vec::new(),
        }
    }

    /// Returns the name by which profiles refer to the plugin.
    pub fn name(&self) -> &str {
        if self.name.is_empty() {
            &self.plugin_type
        } else {
            &self.name
        }
    }

    pub(super) fn build(&self) -> Result<(Plugin, Parameters<'_>), InvalidPipeline> {
        let plugin_type = lookup(&self.plugin_type)
            .ok_or_else(|| InvalidPipeline::UnknownPlugin(self.plugin_type.clone()))?;
        let parameters = Parameters::check(plugin_type.parameters, &self.parameters)
            .map_err(|error| self.refuse(error))?;
        let built = (plugin_type.build)(&parameters).map_err(|error| self.refuse(error))?;
        Ok((built, parameters))
    }

    pub(super) fn refuse(&self, error: InvalidParameter) -> InvalidPipeline {
        InvalidPipeline::Parameter {
            plugin: self.name().to_owned(),
            error,
        }
    }
}

pub(super) fn check_size(spec: &PipelineSpec) -> Result<(), InvalidPipeline> {
    if spec.plugins.len() > PLUGINS_MAX {
        return Err(InvalidPipeline::TooManyPlugins(spec.plugins.len()));
    }
    if spec.profiles.len() > PROFILES_MAX {
        return Err(InvalidPipeline::TooManyProfiles(spec.profiles.len()));
    }
    if usize::try_from(spec.ranked_max)
        .is_ok_and(|ranked_max| !(1..=RANKED_MAX).contains(&ranked_max))
    {
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
    InvalidPipeline::NoSuch {
        kind,
        name: name.to_owned(),
        by: by.to_owned(),
    }
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
            Self::Weight { plugin } => write!(
                f,
                "plugin `{plugin}`: a weight is a number from 0 to {WEIGHT_MAX}"
            ),
            Self::TwoPickers(first, second) => write!(
                f,
                "two pickers, `{first}` and `{second}`: a profile has one"
            ),
            Self::Duplicate(name) => write!(f, "the name `{name}` is used twice"),
            Self::NoSuch { kind, name, by } => {
                write!(f, "{by} refers to `{name}`, which is not a {kind}")
            }
            Self::NotOneProfile(count) => write!(
                f,
                "there are {count} profiles, but the profile handler needs exactly one"
            ),
            Self::RankedMax(length) => write!(
                f,
                "a ranked list of {length} endpoints; 1 to {RANKED_MAX} are allowed"
            ),
            Self::TooManyPlugins(count) => {
                write!(f, "{count} plugins, at most {PLUGINS_MAX} are allowed")
            }
            Self::TooManyProfiles(count) => {
                write!(f, "{count} profiles, at most {PROFILES_MAX} are allowed")
            }
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
