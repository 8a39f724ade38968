//! A row of the plugin table, and what it builds.

use crate::plugin::{Admitter, Decider, Detector, Filter, InvalidParameter, Parameter, Parameters, Picker, Scorer, Shedder, State, Value};
use crate::run::ProfileHandler;
use crate::session::SessionToken;
use crate::settings::Producer;

/// A plugin ready to work.
#[derive(Debug)]
pub enum Plugin {
    /// Narrows.
    Filter(Box<dyn Filter>),
    /// Rates.
    Scorer(Box<dyn Scorer>),
    /// Narrows first, rates later.
    FilteringScorer(Box<dyn Filter>, Box<dyn Scorer>),
    /// Rates, and sheds what would be late everywhere.
    SheddingScorer(Box<dyn Scorer>, Box<dyn Shedder>),
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
    /// One of the others that goes by headers of clients.
    WithHeaders(ClientHeaders, Box<Plugin>),
}

/// What a plugin exchanges with clients by headers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientHeaders {
    /// Names of the request headers it reads.
    pub read: Vec<Box<str>>,
    /// The response header that its clients send back, if it has one.
    pub session_token: Option<SessionToken>,
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

/// One row of [`crate::registry::PLUGINS`].
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
    /// The same, going by these headers of clients.
    #[must_use]
    pub fn with_headers(self, headers: ClientHeaders) -> Self {
        Self::WithHeaders(headers, Box::new(self))
    }

    /// The plugin itself, and the headers of clients it goes by.
    #[must_use]
    pub fn split(self) -> (Self, ClientHeaders) {
        if let Self::WithHeaders(headers, plugin) = self { (*plugin, headers) } else { (self, ClientHeaders::default()) }
    }

    /// The phase it works in.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            Self::Filter(_) => Kind::Filter,
            Self::Scorer(_) | Self::FilteringScorer(..) | Self::SheddingScorer(..) => Kind::Scorer,
            Self::Picker(_) => Kind::Picker,
            Self::ProfileHandler(_) => Kind::ProfileHandler,
            Self::Decider(_) => Kind::Decider,
            Self::Detector(_) => Kind::Detector,
            Self::Admitter(_) => Kind::Admitter,
            Self::Producer(_) => Kind::Producer,
            Self::Parser(_) => Kind::Parser,
            Self::WithHeaders(_, plugin) => plugin.kind(),
        }
    }
}
