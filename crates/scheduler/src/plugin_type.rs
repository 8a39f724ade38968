//! A row of the plugin table, and what it builds.

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
    /// Narrows the candidates.
    Filter(Box<dyn Filter>),
    /// Rates the candidates.
    Scorer(Box<dyn Scorer>),
    /// Narrows the candidates, and rates them.
    FilteringScorer(Box<dyn Filter>, Box<dyn Scorer>),
    /// Rates candidates, and sheds requests that would be late at every endpoint.
    SheddingScorer(Box<dyn Scorer>, Box<dyn Shedder>),
    /// Draws the ranked list.
    Picker(Box<dyn Picker>),
    /// Chooses the profiles that run, and combines their results.
    ProfileHandler(Box<dyn ProfileHandler>),
    /// Decides whether a stage runs on another endpoint.
    Decider(Box<dyn Decider>),
    /// Measures how full the pool is.
    Detector(Box<dyn Detector>),
    /// Admits or refuses a request.
    Admitter(Box<dyn Admitter>),
    /// Chooses among the flows of a band.
    Fairness(Box<dyn FairnessPolicy>),
    /// Orders the requests of a flow.
    Ordering(Box<dyn OrderingPolicy>),
    /// Says how much of the pool a band may fill.
    UsageLimit(Box<dyn UsageLimitPolicy>),
    FlowControl(Box<FlowSettings>),
    Producer(ProducerSetting),
    /// Selects an API whose requests are read; its type.
    Parser(&'static str),
    /// One of the other plugins, with the client headers that it uses.
    WithHeaders(ClientHeaders, Box<Plugin>),
}

/// The headers that a plugin exchanges with clients.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientHeaders {
    /// Names of the request headers it reads.
    pub read: Vec<Box<str>>,
    /// The response header that its clients send back, if it has one.
    pub session_token: Option<SessionToken>,
}

/// The phase in which a plugin works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PluginKind {
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
    /// [`FairnessPolicy`].
    Fairness,
    /// [`OrderingPolicy`].
    Ordering,
    /// [`UsageLimitPolicy`].
    UsageLimit,
    /// [`Plugin::FlowControl`]; no file declares it.
    FlowControl,
    /// [`ProducerSetting`].
    Producer,
    /// [`Plugin::Parser`].
    Parser,
}

/// One row of [`crate::registry::PLUGINS`].
#[derive(Debug)]
pub struct PluginType {
    /// The `type` of the plugin in a configuration file.
    pub name: &'static str,
    /// The phase in which the plugin works.
    pub kind: PluginKind,
    /// One line for the printed reference: the formula.
    pub doc: &'static str,
    /// Where the formula comes from.
    pub source: &'static str,
    pub parameters: &'static [Parameter],
    /// The state that the plugin reads; if its parameters choose, all state that it may read.
    pub needs: &'static [RequiredState],
    /// Builds the plugin from checked parameters. Other crates call [`PluginType::build`].
    pub build: fn(&Parameters<'_>) -> Result<Plugin, InvalidParameter>,
}

// === impl PluginType ===

impl PluginType {
    /// Builds the plugin from the given parameters and the defaults.
    ///
    /// # Errors
    /// Returns [`InvalidParameter`] if a parameter is unknown, given twice, of another type or out
    /// of range.
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

    /// The plugin and the request headers it reads.
    #[must_use]
    pub fn split(self) -> (Self, ClientHeaders) {
        if let Self::WithHeaders(headers, plugin) = self {
            (*plugin, headers)
        } else {
            (self, ClientHeaders::default())
        }
    }
}
