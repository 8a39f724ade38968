//! The three plugin traits, their parameters, and the one table of plugins.
//!
//! A plugin is one file: a doc with its formula and source, its parameters with their defaults, its `impl`, its tests. [`PLUGINS`] lists
//! them all; look-up, validation and the printed reference come from it, so each default appears once.

use crate::candidates::Candidates;
use crate::decision::Ranked;
use crate::local::Local;
use crate::request::Request;
use crate::rng::Rng;
use crate::snapshot::{EndpointIndex, Snapshot};

/// All a plugin may look at.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The pool.
    pub snapshot: &'a Snapshot,
    /// The request.
    pub request: &'a Request<'a>,
    /// The proxy's own state.
    pub local: Local<'a>,
}

/// Narrows the candidates.
pub trait Filter: std::fmt::Debug + Send + Sync {
    /// Drops whom the request must not or should not go to.
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates);
}

/// Rates the candidates.
pub trait Scorer: std::fmt::Debug + Send + Sync {
    /// Writes one score in 0..=1 for each of `endpoints` into `scores`, which runs parallel and comes filled with 0. More is better.
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]);
}

/// Draws the ranked list.
pub trait Picker: std::fmt::Debug + Send + Sync {
    /// The best `max` of the candidates, best first; `None` only when there are none.
    fn pick(&self, candidates: &Candidates, max: usize, rng: &mut Rng) -> Option<Ranked>;
}

/// A plugin ready to work.
#[derive(Debug)]
pub enum Plugin {
    /// Narrows.
    Filter(Box<dyn Filter>),
    /// Rates.
    Scorer(Box<dyn Scorer>),
    /// Draws.
    Picker(Box<dyn Picker>),
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
}

/// The value of a parameter, as configuration and wire carry it.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A number; whether it must be whole or bounded, the plugin says.
    Number(f64),
    /// true or false.
    Flag(bool),
    /// Text.
    Text(String),
}

/// One parameter of a plugin, for validation and for the printed reference.
#[derive(Clone, Copy, Debug)]
pub struct Parameter {
    /// Its name, as in the reference's configuration files.
    pub name: &'static str,
    /// What it has when not given.
    pub default: Default,
    /// Meaning, unit and range, in one line.
    pub doc: &'static str,
}

/// A default that can stand in a static table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Default {
    /// A number.
    Number(f64),
    /// true or false.
    Flag(bool),
    /// Text.
    Text(&'static str),
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
    /// Makes one from checked parameters.
    pub build: fn(&Parameters<'_>) -> Result<Plugin, InvalidParameter>,
}

/// Why a parameter was refused. Whoever wrote the configuration is at fault.
#[derive(Clone, Debug, PartialEq)]
pub enum InvalidParameter {
    /// The plugin has no such parameter.
    Unknown(String),
    /// It has, but of another type.
    WrongType {
        /// The parameter.
        name: String,
        /// What it takes.
        expected: &'static str,
    },
    /// Not finite, or outside its range.
    OutOfRange {
        /// The parameter.
        name: String,
        /// What it allows.
        allowed: &'static str,
    },
}

/// Given parameters over the defaults of a plugin type.
#[derive(Clone, Copy, Debug)]
pub struct Parameters<'a> {
    known: &'static [Parameter],
    given: &'a [(String, Value)],
}
