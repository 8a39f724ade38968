//! A row of the plugin table, and the plugins that it builds.

use crate::flow::{FairnessPolicy, FlowSettings, OrderingPolicy, UsageLimitPolicy};
use crate::plugin::{
    Admitter, Decider, Detector, Filter, InvalidParameter, Parameter, ParameterValue, Parameters,
    Picker, RequiredState, Scorer, Shedder,
};
use crate::run::ProfileHandler;
use crate::session::SessionToken;
use crate::settings::ProducerSetting;

/// A plugin that was built from its configuration.
#[derive(Debug)]
pub enum Plugin {
    Filter(Box<dyn Filter>),
    Scorer(Box<dyn Scorer>),
    /// Narrows the candidates, and gives each candidate a score.
    FilteringScorer(Box<dyn Filter>, Box<dyn Scorer>),
    /// Gives each candidate a score, and sheds requests that would be late at every endpoint.
    SheddingScorer(Box<dyn Scorer>, Box<dyn Shedder>),
    Picker(Box<dyn Picker>),
    ProfileHandler(Box<dyn ProfileHandler>),
    Decider(Box<dyn Decider>),
    Detector(Box<dyn Detector>),
    Admitter(Box<dyn Admitter>),
    Fairness(Box<dyn FairnessPolicy>),
    Ordering(Box<dyn OrderingPolicy>),
    UsageLimit(Box<dyn UsageLimitPolicy>),
    FlowControl(Box<FlowSettings>),
    Producer(ProducerSetting),
    /// Selects an API whose requests are read. The text is the type of the plugin.
    Parser(&'static str),
    /// A plugin of another variant, with the client headers that it uses.
    WithHeaders(ClientHeaders, Box<Plugin>),
}

/// The headers that a plugin exchanges with clients.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientHeaders {
    /// The names of the request headers that the plugin reads.
    pub read: Vec<Box<str>>,
    /// The response header that clients send back to the plugin, if the plugin has a session token.
    pub session_token: Option<SessionToken>,
}

/// The phase in which a plugin works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PluginKind {
    Filter,
    Scorer,
    Picker,
    ProfileHandler,
    Decider,
    Detector,
    Admitter,
    Fairness,
    Ordering,
    UsageLimit,
    /// [`Plugin::FlowControl`], which configuration files do not declare.
    FlowControl,
    Producer,
    Parser,
}

/// One row of [`crate::registry::PLUGINS`].
#[derive(Debug)]
pub struct PluginType {
    /// The `type` of the plugin in a configuration file.
    pub name: &'static str,
    /// The phase in which the plugin works.
    pub kind: PluginKind,
    /// The formula of the plugin, in one line for the printed reference.
    pub doc: &'static str,
    /// The source of the formula.
    pub source: &'static str,
    pub parameters: &'static [Parameter],
    /// The state that the plugin reads, or reads only with certain parameters.
    pub needs: &'static [RequiredState],
    /// Builds the plugin from checked parameters. Other crates call [`PluginType::build`].
    pub build: fn(&Parameters<'_>) -> Result<Plugin, InvalidParameter>,
}

// === impl PluginType ===

impl PluginType {
    /// Builds the plugin from the given parameters and the defaults.
    ///
    /// # Errors
    /// Returns [`InvalidParameter`] if a parameter is unknown, given twice, has another type, or is
    /// out of range.
    pub fn build(&self, given: &[(String, ParameterValue)]) -> Result<Plugin, InvalidParameter> {
        (self.build)(&Parameters::check(self.parameters, given)?)
    }
}

// === impl Plugin ===

impl Plugin {
    /// Returns the plugin with the request headers that it reads.
    #[must_use]
    pub fn with_headers(self, headers: ClientHeaders) -> Self {
        Self::WithHeaders(headers, Box::new(self))
    }

    /// Returns the plugin and the request headers that it reads.
    #[must_use]
    pub fn split(self) -> (Self, ClientHeaders) {
        if let Self::WithHeaders(headers, plugin) = self {
            (*plugin, headers)
        } else {
            (self, ClientHeaders::default())
        }
    }
}
