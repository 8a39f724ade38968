//! Filters, weighted scorers and one picker: how the requests of a pool are scheduled.

use std::fmt;

use crate::decision::RANKED_MAX;
use crate::picker;
use crate::plugin::{self, Filter, InvalidParameter, PLUGINS, Parameters, Picker, Plugin, Scorer, Value};

/// A profile as configuration says it: plain data, in the order written.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProfileSpec {
    /// Its name.
    pub name: String,
    /// Its plugins: filters run in this order, scorers add up, exactly one picker (none: max-score).
    pub plugins: Vec<PluginSpec>,
    /// Endpoints in the ranked list, 1 to [`crate::RANKED_MAX`].
    pub ranked_max: u32,
}

/// One plugin of a profile.
#[derive(Clone, Debug, PartialEq)]
pub struct PluginSpec {
    /// Its `type`: a row of [`crate::plugin::PLUGINS`].
    pub plugin_type: String,
    /// The name explanations call it by; the type when not given.
    pub name: String,
    /// Weight of a scorer, 0 or more; ignored for others.
    pub weight: f64,
    /// Given parameters.
    pub parameters: Vec<(String, Value)>,
}

/// A profile ready to work. Validated once, when built.
#[derive(Debug)]
pub struct Profile {
    pub(crate) filters: Vec<(Box<str>, Box<dyn Filter>)>,
    pub(crate) scorers: Vec<(Box<str>, f32, Box<dyn Scorer>)>,
    pub(crate) picker: Box<dyn Picker>,
    pub(crate) ranked_max: usize,
}

/// Why a profile was refused. Whoever wrote the configuration is at fault.
#[derive(Clone, Debug, PartialEq)]
pub enum InvalidProfile {
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
    /// More than one picker.
    TwoPickers(String, String),
    /// `ranked_max` is not in 1..=[`crate::RANKED_MAX`].
    RankedMax(u32),
    /// More plugins than [`PLUGINS_MAX`].
    TooManyPlugins(usize),
}

/// The most plugins a profile may hold: each is paid for by every request.
pub const PLUGINS_MAX: usize = 64;

/// The greatest weight of a scorer. A total is an f32: beside a greater weight it no longer tells two scores of a scorer of weight 1 apart.
pub const WEIGHT_MAX: f64 = 1e6;

// === impl ProfileSpec ===

impl ProfileSpec {
    /// The profile of a pool whose operator configured none.
    #[must_use]
    pub fn default_profile() -> Self {
        let plugin = |plugin_type: &str, weight| PluginSpec {
            plugin_type: plugin_type.to_owned(),
            name: plugin_type.to_owned(),
            weight,
            parameters: Vec::new(),
        };
        Self {
            name: "default".to_owned(),
            plugins: vec![
                plugin("queue-scorer", 2.0),
                plugin("kv-cache-utilization-scorer", 2.0),
                plugin("prefix-cache-scorer", 3.0),
                plugin("active-request-scorer", 2.0),
                plugin("max-score-picker", 1.0),
            ],
            ranked_max: 3,
        }
    }

    fn ranked_max(&self) -> Result<usize, InvalidProfile> {
        let ranked_max = usize::try_from(self.ranked_max).unwrap_or(usize::MAX);
        if (1..=RANKED_MAX).contains(&ranked_max) { Ok(ranked_max) } else { Err(InvalidProfile::RankedMax(self.ranked_max)) }
    }
}

// === impl PluginSpec ===

impl PluginSpec {
    fn name(&self) -> &str {
        if self.name.is_empty() { &self.plugin_type } else { &self.name }
    }

    fn build(&self) -> Result<(Plugin, Parameters<'_>), InvalidProfile> {
        let plugin_type = plugin::lookup(&self.plugin_type).ok_or_else(|| InvalidProfile::UnknownPlugin(self.plugin_type.clone()))?;
        let parameters = Parameters::check(plugin_type.parameters, &self.parameters).map_err(|error| self.refuse(error))?;
        let built = (plugin_type.build)(&parameters).map_err(|error| self.refuse(error))?;
        Ok((built, parameters))
    }

    fn refuse(&self, error: InvalidParameter) -> InvalidProfile {
        InvalidProfile::Parameter { plugin: self.name().to_owned(), error }
    }

    fn weight(&self) -> Result<f32, InvalidProfile> {
        if !(0.0..=WEIGHT_MAX).contains(&self.weight) {
            return Err(InvalidProfile::Weight { plugin: self.name().to_owned() });
        }
        #[expect(clippy::cast_possible_truncation, reason = "a weight has no more digits than an f32")]
        let weight = self.weight as f32;
        Ok(weight)
    }
}

// === impl Profile ===

impl Profile {
    /// Looks every plugin up, checks its parameters and makes it.
    ///
    /// # Errors
    /// [`InvalidProfile`] names the first thing wrong. The configuration is at fault; the same will fail the same.
    pub fn build(spec: &ProfileSpec) -> Result<Self, InvalidProfile> {
        if spec.plugins.len() > PLUGINS_MAX {
            return Err(InvalidProfile::TooManyPlugins(spec.plugins.len()));
        }
        let ranked_max = spec.ranked_max()?;
        let mut profile = Self { filters: Vec::new(), scorers: Vec::new(), picker: Box::new(picker::max_score::MaxScore), ranked_max };
        let mut picker_name: Option<&str> = None;
        for plugin in &spec.plugins {
            let name = plugin.name();
            let (built, parameters) = plugin.build()?;
            match built {
                Plugin::Filter(filter) => profile.filters.push((name.into(), filter)),
                Plugin::Scorer(scorer) => profile.scorers.push((name.into(), plugin.weight()?, scorer)),
                Plugin::Picker(picker) => {
                    if let Some(first) = picker_name.replace(name) {
                        return Err(InvalidProfile::TwoPickers(first.to_owned(), name.to_owned()));
                    }
                    profile.picker = picker;
                    let given = picker::list_length(&parameters).map_err(|error| plugin.refuse(error))?;
                    profile.ranked_max = given.unwrap_or(ranked_max);
                }
            }
        }
        Ok(profile)
    }

    /// The most endpoints a ranked list of this profile holds.
    #[must_use]
    pub fn ranked_max(&self) -> usize {
        self.ranked_max
    }
}

// === impl InvalidProfile ===

impl fmt::Display for InvalidProfile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownPlugin(name) => {
                write!(f, "unknown plugin type `{name}`")?;
                plugin::write_known(f, name, PLUGINS.iter().map(|plugin| plugin.name))
            }
            Self::Parameter { plugin, error } => write!(f, "plugin `{plugin}`: {error}"),
            Self::Weight { plugin } => write!(f, "plugin `{plugin}`: a weight is a number from 0 to {WEIGHT_MAX}"),
            Self::TwoPickers(first, second) => write!(f, "two pickers, `{first}` and `{second}`: a profile has one"),
            Self::RankedMax(length) => write!(f, "a ranked list of {length} endpoints: allowed are 1 to {RANKED_MAX}"),
            Self::TooManyPlugins(count) => write!(f, "{count} plugins, at most {PLUGINS_MAX} are allowed"),
        }
    }
}

impl std::error::Error for InvalidProfile {
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

    fn spec(plugins: Vec<PluginSpec>) -> ProfileSpec {
        ProfileSpec { name: "test".to_owned(), plugins, ranked_max: 3 }
    }

    fn plugin(plugin_type: &str, name: &str, weight: f64, parameters: &[(&str, f64)]) -> PluginSpec {
        let parameters = parameters.iter().map(|&(name, value)| (name.to_owned(), Value::Number(value))).collect();
        PluginSpec { plugin_type: plugin_type.to_owned(), name: name.to_owned(), weight, parameters }
    }

    fn refusal(spec: &ProfileSpec) -> String {
        Profile::build(spec).unwrap_err().to_string()
    }

    #[test]
    fn the_default_profile_builds() {
        let profile = Profile::build(&ProfileSpec::default_profile()).unwrap();
        let scorers: Vec<_> = profile.scorers.iter().map(|(name, weight, _)| (&**name, *weight)).collect();
        let expected =
            [("queue-scorer", 2.0), ("kv-cache-utilization-scorer", 2.0), ("prefix-cache-scorer", 3.0), ("active-request-scorer", 2.0)];
        assert_eq!(scorers, expected);
        assert_eq!(profile.ranked_max(), 3);
    }

    #[test]
    fn names_weights_and_the_missing_picker() {
        let profile = Profile::build(&spec(vec![plugin("queue-scorer", "", 0.0, &[]), plugin("queue-scorer", "again", 1e6, &[])])).unwrap();
        let scorers: Vec<_> = profile.scorers.iter().map(|(name, weight, _)| (&**name, *weight)).collect();
        assert_eq!(scorers, [("queue-scorer", 0.0), ("again", 1e6)], "without a name it goes by its type");
        assert_eq!(format!("{:?}", profile.picker), "MaxScore");
    }

    #[test]
    fn a_pickers_list_length_stands_over_the_profiles() {
        let length = |given| {
            let picker = plugin("random-picker", "", 1.0, &[("maxNumOfEndpoints", given)]);
            Profile::build(&spec(vec![picker])).map(|profile| profile.ranked_max())
        };
        assert_eq!(length(1.0), Ok(1));
        assert_eq!(length(8.0), Ok(8));
        assert_eq!(length(0.0), Ok(3));
        assert_eq!(
            length(9.0).unwrap_err().to_string(),
            "plugin `random-picker`: parameter `maxNumOfEndpoints` is out of range: endpoints in the ranked list, a whole number from 1 to 8; 0 leaves it to the profile"
        );
    }

    #[test]
    fn refusals_name_the_thing_and_what_is_allowed() {
        assert!(
            refusal(&spec(vec![plugin("queue-score", "", 1.0, &[])]))
                .starts_with("unknown plugin type `queue-score`; did you mean `queue-scorer`?; known: `queue-scorer`, ")
        );
        assert_eq!(
            refusal(&spec(vec![plugin("token-load-scorer", "load", 1.0, &[("threshold", 1.0)])])),
            "plugin `load`: unknown parameter `threshold`; known: `queueThresholdTokens`"
        );
        let error = Profile::build(&spec(vec![plugin("token-load-scorer", "load", 1.0, &[("threshold", 1.0)])])).unwrap_err();
        let cause = std::error::Error::source(&error).map(ToString::to_string);
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
        assert!(Profile::build(&spec(vec![plugin("queue-scorer", "", 1.0, &[]); 64])).is_ok());
        assert_eq!(refusal(&spec(vec![plugin("queue-scorer", "", 1.0, &[]); 65])), "65 plugins, at most 64 are allowed");
        for ranked_max in [0, 9] {
            let spec = ProfileSpec { ranked_max, ..ProfileSpec::default_profile() };
            assert_eq!(refusal(&spec), format!("a ranked list of {ranked_max} endpoints: allowed are 1 to 8"));
        }
    }

    #[test]
    fn the_weight_of_what_is_no_scorer_is_ignored() {
        assert!(Profile::build(&spec(vec![plugin("random-picker", "", f64::NAN, &[])])).is_ok());
    }
}
