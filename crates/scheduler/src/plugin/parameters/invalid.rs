//! The reasons why a parameter was refused. The text of each reason also says what to change.

use std::fmt;

use super::super::closest::closest;
use super::{Parameter, VALUE_DEPTH_MAX, VALUES_MAX};

/// The reason why a parameter was refused. The parameter is refused until the configuration
/// changes.
#[derive(Clone, Debug, PartialEq)]
pub enum InvalidParameter {
    /// The plugin has no parameter with this name.
    Unknown {
        name: String,
        /// The parameters that the plugin has.
        known: &'static [Parameter],
    },
    /// The configuration has the parameter more than once.
    Duplicate(String),
    /// The parameter has no default, and the configuration does not have it.
    Missing(String),
    /// The value is nested deeper than [`VALUE_DEPTH_MAX`], or has more than [`VALUES_MAX`] values.
    TooLarge(String),
    /// The error is in a value inside a structured parameter.
    Within {
        /// The path to the wrong value, such as `conditions[1]`.
        path: String,
        error: Box<InvalidParameter>,
    },
    /// The value does not have the type of the parameter.
    WrongType {
        name: String,
        /// The type that the parameter must have.
        expected: &'static str,
    },
    /// The value is not finite, or outside the range of the parameter.
    OutOfRange { name: String, allowed: &'static str },
}

/// Returns the error for a value of the wrong type.
pub(super) fn wrong_type(name: &str, expected: &'static str) -> InvalidParameter {
    InvalidParameter::WrongType {
        name: name.to_owned(),
        expected,
    }
}

/// Returns the error for a value inside a structured value.
pub(super) fn within(path: String, error: InvalidParameter) -> InvalidParameter {
    InvalidParameter::Within {
        path,
        error: Box::new(error),
    }
}

/// Returns the error for a number out of range.
pub(super) fn out_of_range(parameter: &Parameter) -> InvalidParameter {
    InvalidParameter::OutOfRange {
        name: parameter.name.to_owned(),
        allowed: parameter.doc,
    }
}

// === impl InvalidParameter ===

impl fmt::Display for InvalidParameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown { name, known } => {
                write!(f, "unknown parameter `{name}`")?;
                write_known(f, name, known.iter().map(|parameter| parameter.name))
            }
            Self::Duplicate(name) => write!(f, "parameter `{name}` is given twice"),
            Self::Missing(name) => write!(f, "parameter `{name}` must be given"),
            Self::TooLarge(name) => {
                write!(
                    f,
                    "parameter `{name}` is too large: {VALUES_MAX} values in {VALUE_DEPTH_MAX} levels are allowed"
                )
            }
            Self::Within { path, error } => write!(f, "in `{path}`: {error}"),
            Self::WrongType { name, expected } => write!(f, "parameter `{name}` takes {expected}"),
            Self::OutOfRange { name, allowed } => {
                write!(f, "parameter `{name}` is out of range: {allowed}")
            }
        }
    }
}

impl std::error::Error for InvalidParameter {}

/// Writes the most similar known name and all known names, as help after an unknown name.
pub(crate) fn write_known(
    f: &mut fmt::Formatter<'_>,
    name: &str,
    known: impl Iterator<Item = &'static str> + Clone,
) -> fmt::Result {
    if let Some(near) = closest(name, known.clone()) {
        write!(f, "; did you mean `{near}`?")?;
    }
    let mut known = known.peekable();
    if known.peek().is_none() {
        return f.write_str("; it has none");
    }
    f.write_str("; known:")?;
    known
        .enumerate()
        .try_for_each(|(at, name)| write!(f, "{} `{name}`", if at == 0 { "" } else { "," }))
}
