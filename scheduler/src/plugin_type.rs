//! A row of the plugin table, and what it builds.

use crate::plugin::{Admitter, Decider, Detector, Filter, InvalidParameter, Parameter, Parameters, Picker, Scorer, State, Value};
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
