//! Filters, weighted scorers and one picker: how the requests of a pool are scheduled.

use crate::plugin::{Filter, InvalidParameter, Picker, Scorer, Value};

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
    /// A weight that is negative or not finite.
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
}
