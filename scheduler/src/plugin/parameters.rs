//! Parameters of a plugin: what is given over what the table says.
//!
//! A plugin reads each by name with the type and range it needs; a name it never declared is an error like any other, so a plugin and
//! its table cannot drift apart unseen. Messages take the allowed range from the parameter's own line of documentation.

use std::fmt;
use std::ops::RangeInclusive;

use crate::plugin::closest;

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
#[derive(Clone, Copy, Debug, PartialEq)]
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

/// Why a parameter was refused. Whoever wrote the configuration is at fault.
#[derive(Clone, Debug, PartialEq)]
pub enum InvalidParameter {
    /// The plugin has no such parameter.
    Unknown {
        /// The name given.
        name: String,
        /// What the plugin has.
        known: &'static [Parameter],
    },
    /// It is given more than once.
    Duplicate(String),
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

/// A default or a given value, for reading.
enum Found<'a> {
    Number(f64),
    Flag(bool),
    Text(&'a str),
}

// === impl Parameters ===

impl<'a> Parameters<'a> {
    /// Given parameters that are all known, each once and of its type. Ranges are checked as they are read.
    ///
    /// # Errors
    /// [`InvalidParameter`] names the first that is not.
    pub fn check(known: &'static [Parameter], given: &'a [(String, Value)]) -> Result<Self, InvalidParameter> {
        for (at, (name, value)) in given.iter().enumerate() {
            let parameter = find(known, name)?;
            if given.iter().skip(at + 1).any(|(other, _)| other == name) {
                return Err(InvalidParameter::Duplicate(name.clone()));
            }
            match (value, parameter.default) {
                (Value::Number(_), Default::Number(_)) | (Value::Flag(_), Default::Flag(_)) | (Value::Text(_), Default::Text(_)) => {}
                (_, Default::Number(_)) => return Err(wrong_type(name, "a number")),
                (_, Default::Flag(_)) => return Err(wrong_type(name, "true or false")),
                (_, Default::Text(_)) => return Err(wrong_type(name, "text")),
            }
        }
        Ok(Self { known, given })
    }

    /// A number within `range`.
    ///
    /// # Errors
    /// [`InvalidParameter`] when it is outside, or the parameter is no number.
    pub fn number(&self, name: &str, range: RangeInclusive<f64>) -> Result<f64, InvalidParameter> {
        match self.find(name)? {
            (_, Found::Number(number)) if range.contains(&number) => Ok(number),
            (parameter, Found::Number(_)) => Err(out_of_range(parameter)),
            _ => Err(wrong_type(name, "a number")),
        }
    }

    /// A whole number within `range`.
    ///
    /// # Errors
    /// [`InvalidParameter`] when it is outside or not whole, or the parameter is no number.
    pub fn integer(&self, name: &str, range: RangeInclusive<u32>) -> Result<u32, InvalidParameter> {
        let number = self.number(name, f64::from(*range.start())..=f64::from(*range.end()))?;
        if number.fract() > 0.0 {
            return Err(wrong_type(name, "a whole number"));
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "whole, and within a range of u32")]
        let whole = number as u32;
        Ok(whole)
    }

    /// true or false.
    ///
    /// # Errors
    /// [`InvalidParameter`] when the parameter is no flag.
    pub fn flag(&self, name: &str) -> Result<bool, InvalidParameter> {
        match self.find(name)? {
            (_, Found::Flag(flag)) => Ok(flag),
            _ => Err(wrong_type(name, "true or false")),
        }
    }

    /// Text.
    ///
    /// # Errors
    /// [`InvalidParameter`] when the parameter is no text.
    pub fn text(&self, name: &str) -> Result<&'a str, InvalidParameter> {
        match self.find(name)? {
            (_, Found::Text(text)) => Ok(text),
            _ => Err(wrong_type(name, "text")),
        }
    }

    /// What one of a few words stands for.
    ///
    /// # Errors
    /// [`InvalidParameter`] when it is none of them, or the parameter is no text.
    pub fn choice<T: Copy>(&self, name: &str, choices: &[(&str, T)]) -> Result<T, InvalidParameter> {
        let (parameter, _) = self.find(name)?;
        let text = self.text(name)?;
        choices.iter().find(|(word, _)| *word == text).map(|(_, meaning)| *meaning).ok_or_else(|| out_of_range(parameter))
    }

    fn find(&self, name: &str) -> Result<(&'static Parameter, Found<'a>), InvalidParameter> {
        let parameter = find(self.known, name)?;
        let found = match self.given.iter().find(|(given, _)| given == name).map(|(_, value)| value) {
            Some(Value::Number(number)) => Found::Number(*number),
            Some(Value::Flag(flag)) => Found::Flag(*flag),
            Some(Value::Text(text)) => Found::Text(text),
            None => match parameter.default {
                Default::Number(number) => Found::Number(number),
                Default::Flag(flag) => Found::Flag(flag),
                Default::Text(text) => Found::Text(text),
            },
        };
        Ok((parameter, found))
    }
}

fn find(known: &'static [Parameter], name: &str) -> Result<&'static Parameter, InvalidParameter> {
    known.iter().find(|p| p.name == name).ok_or_else(|| InvalidParameter::Unknown { name: name.to_owned(), known })
}

fn wrong_type(name: &str, expected: &'static str) -> InvalidParameter {
    InvalidParameter::WrongType { name: name.to_owned(), expected }
}

fn out_of_range(parameter: &Parameter) -> InvalidParameter {
    InvalidParameter::OutOfRange { name: parameter.name.to_owned(), allowed: parameter.doc }
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
            Self::WrongType { name, expected } => write!(f, "parameter `{name}` takes {expected}"),
            Self::OutOfRange { name, allowed } => write!(f, "parameter `{name}` is out of range: {allowed}"),
        }
    }
}

impl std::error::Error for InvalidParameter {}

/// Says after an unknown name what was probably meant, and what there is.
pub(crate) fn write_known(f: &mut fmt::Formatter<'_>, name: &str, known: impl Iterator<Item = &'static str> + Clone) -> fmt::Result {
    if let Some(near) = closest(name, known.clone()) {
        write!(f, "; did you mean `{near}`?")?;
    }
    let mut known = known.peekable();
    if known.peek().is_none() {
        return f.write_str("; it has none");
    }
    f.write_str("; known:")?;
    known.enumerate().try_for_each(|(at, name)| write!(f, "{} `{name}`", if at == 0 { "" } else { "," }))
}

impl fmt::Display for Default {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::Flag(flag) => flag.fmt(f),
            Self::Text(text) => text.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: &[Parameter] = &[
        Parameter { name: "threshold", default: Default::Number(4.0), doc: "requests, 0 to 10" },
        Parameter { name: "strict", default: Default::Flag(true), doc: "true or false" },
        Parameter { name: "strategy", default: Default::Text("least"), doc: "least or most" },
    ];

    fn given(name: &str, value: Value) -> Vec<(String, Value)> {
        vec![(name.to_owned(), value)]
    }

    fn refusal<T: fmt::Debug>(result: Result<T, InvalidParameter>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn defaults_where_nothing_is_given() {
        let parameters = Parameters::check(KNOWN, &[]).unwrap();
        assert_eq!(parameters.number("threshold", 0.0..=10.0), Ok(4.0));
        assert_eq!(parameters.integer("threshold", 0..=10), Ok(4));
        assert_eq!(parameters.flag("strict"), Ok(true));
        assert_eq!(parameters.text("strategy"), Ok("least"));
        assert_eq!(parameters.choice("strategy", &[("most", 1), ("least", 2)]), Ok(2));
    }

    #[test]
    fn what_is_given_stands_over_the_default() {
        let all = [
            ("threshold".to_owned(), Value::Number(10.0)),
            ("strict".to_owned(), Value::Flag(false)),
            ("strategy".to_owned(), Value::Text("most".to_owned())),
        ];
        let parameters = Parameters::check(KNOWN, &all).unwrap();
        assert_eq!(parameters.integer("threshold", 0..=10), Ok(10));
        assert_eq!(parameters.flag("strict"), Ok(false));
        assert_eq!(parameters.choice("strategy", &[("most", 1), ("least", 2)]), Ok(1));
    }

    #[test]
    fn unknown_names_say_what_was_meant_and_what_there_is() {
        let check = |name| refusal(Parameters::check(KNOWN, &given(name, Value::Flag(true))));
        assert_eq!(check("treshold"), "unknown parameter `treshold`; did you mean `threshold`?; known: `threshold`, `strict`, `strategy`");
        assert_eq!(check("colour"), "unknown parameter `colour`; known: `threshold`, `strict`, `strategy`");
        let given = given("threshold", Value::Flag(true));
        assert_eq!(refusal(Parameters::check(&[], &given)), "unknown parameter `threshold`; it has none");
    }

    #[test]
    fn given_twice_is_refused() {
        let twice = [given("strict", Value::Flag(true)), given("strict", Value::Flag(true))].concat();
        assert_eq!(refusal(Parameters::check(KNOWN, &twice)), "parameter `strict` is given twice");
    }

    #[test]
    fn wrong_types_are_refused_when_checked() {
        let check = |name, value| refusal(Parameters::check(KNOWN, &given(name, value)));
        assert_eq!(check("threshold", Value::Text("4".to_owned())), "parameter `threshold` takes a number");
        assert_eq!(check("strict", Value::Number(1.0)), "parameter `strict` takes true or false");
        assert_eq!(check("strategy", Value::Flag(false)), "parameter `strategy` takes text");
    }

    #[test]
    fn ranges_hold_at_both_ends() {
        let number = |value| {
            let given = given("threshold", Value::Number(value));
            Parameters::check(KNOWN, &given).unwrap().number("threshold", 0.0..=10.0)
        };
        assert_eq!((number(0.0), number(10.0)), (Ok(0.0), Ok(10.0)));
        for bad in [-0.001, 10.001, f64::NAN, f64::INFINITY] {
            assert_eq!(refusal(number(bad)), "parameter `threshold` is out of range: requests, 0 to 10");
        }
    }

    #[test]
    fn whole_numbers_and_choices() {
        let given = [given("threshold", Value::Number(3.5)), given("strategy", Value::Text("some".to_owned()))].concat();
        let parameters = Parameters::check(KNOWN, &given).unwrap();
        assert_eq!(refusal(parameters.integer("threshold", 0..=10)), "parameter `threshold` takes a whole number");
        assert_eq!(refusal(parameters.choice("strategy", &[("most", 1)])), "parameter `strategy` is out of range: least or most");
    }

    #[test]
    fn a_plugin_that_reads_what_it_never_declared_is_told() {
        let parameters = Parameters::check(KNOWN, &[]).unwrap();
        assert!(refusal(parameters.flag("undeclared")).starts_with("unknown parameter `undeclared`"));
        assert_eq!(refusal(parameters.flag("threshold")), "parameter `threshold` takes true or false");
        assert_eq!(refusal(parameters.text("strict")), "parameter `strict` takes text");
        assert_eq!(refusal(parameters.number("strict", 0.0..=1.0)), "parameter `strict` takes a number");
    }
}
