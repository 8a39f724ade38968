//! The parameters of a plugin. Configured values replace the defaults in the plugin's table of
//! parameters.
//!
//! A plugin reads each parameter by name, with the type and range that it needs. To read a name
//! that is not in the table is an error, so a plugin reads no parameter that its table lacks. Error
//! texts take the allowed range from the parameter's documentation.
//!
//! A map inside a structured value is read in the same way, with a separate table
//! ([`Parameters::nested`], [`Parameters::each`]). So a field three levels down is checked as
//! strictly as a field at the top, and the error for a field names the path to the field.

use std::fmt;
use std::ops::RangeInclusive;

use crate::text::readable;

mod bounds;
mod invalid;
pub use invalid::InvalidParameter;
pub(crate) use invalid::write_known;
use invalid::{out_of_range, within, wrong_type};

/// The value of a parameter in configuration and on the wire.
#[derive(Clone, Debug, PartialEq)]
pub enum ParameterValue {
    /// A number. The plugin that reads the number checks the range, and whether the number must be
    /// whole.
    Number(f64),
    Flag(bool),
    Text(String),
    List(Vec<ParameterValue>),
    /// A map from names to values, in the order in which the configuration has them.
    Map(Vec<(String, ParameterValue)>),
}

/// The maximum depth of nested lists and maps. The deepest parameter is a list of maps of lists.
/// The depth is limited because the reader is recursive.
pub const VALUE_DEPTH_MAX: usize = 8;

/// The maximum number of values in one parameter, over all levels. A selector or a table of
/// thresholds has a few values, and each value costs time for every request.
pub const VALUES_MAX: usize = 256;

/// One parameter of a plugin, for validation and for the printed reference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parameter {
    /// The name of the parameter, as in llm-d's configuration files.
    pub name: &'static str,
    /// The value if the configuration has none.
    pub default: ParameterDefault,
    /// The meaning, the unit and the range of the parameter, in one line.
    pub doc: &'static str,
}

/// The default of a parameter, as a constant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ParameterDefault {
    Number(f64),
    Flag(bool),
    Text(&'static str),
    /// A text without a default. The file must contain a text that is not empty.
    Required,
    /// A number without a default. The file must contain the number.
    RequiredNumber,
    /// A list or map without a default, which may be absent. The text is the shape that the
    /// reference prints.
    Structured(&'static str),
}

/// The parameters of one plugin: the configured parameters, and the defaults of the plugin's type
/// for the others.
#[derive(Clone, Copy, Debug)]
pub struct Parameters<'a> {
    known: &'static [Parameter],
    given: &'a [(String, ParameterValue)],
}

/// The value of a parameter: the configured value, or the default.
enum ParameterSource<'a> {
    Number(f64),
    Flag(bool),
    Text(&'a str),
    Structured(Option<&'a ParameterValue>),
}

// === impl Parameter ===

impl Parameter {
    const fn new(name: &'static str, default: ParameterDefault, doc: &'static str) -> Self {
        Self {
            name,
            default,
            doc: readable(doc),
        }
    }

    pub(crate) const fn number(name: &'static str, default: f64, doc: &'static str) -> Self {
        Self::new(name, ParameterDefault::Number(default), doc)
    }

    pub(crate) const fn required_number(name: &'static str, doc: &'static str) -> Self {
        Self::new(name, ParameterDefault::RequiredNumber, doc)
    }

    pub(crate) const fn flag(name: &'static str, default: bool, doc: &'static str) -> Self {
        Self::new(name, ParameterDefault::Flag(default), doc)
    }

    pub(crate) const fn text(name: &'static str, default: &'static str, doc: &'static str) -> Self {
        Self::new(name, ParameterDefault::Text(default), doc)
    }

    pub(crate) const fn required(name: &'static str, doc: &'static str) -> Self {
        Self::new(name, ParameterDefault::Required, doc)
    }

    pub(crate) const fn structured(
        name: &'static str,
        shape: &'static str,
        doc: &'static str,
    ) -> Self {
        Self::new(name, ParameterDefault::Structured(shape), doc)
    }
}

// === impl Parameters ===

impl<'a> Parameters<'a> {
    /// Checks that the plugin knows each configured parameter, and that each occurs once and has a
    /// value of the right type. Ranges are checked when a plugin reads the parameters.
    ///
    /// # Errors
    /// Returns [`InvalidParameter`] for the first parameter that is wrong.
    pub fn check(
        known: &'static [Parameter],
        given: &'a [(String, ParameterValue)],
    ) -> Result<Self, InvalidParameter> {
        for (at, (name, value)) in given.iter().enumerate() {
            let parameter = find(known, name)?;
            if given.iter().skip(at + 1).any(|(other, _)| other == name) {
                return Err(InvalidParameter::Duplicate(name.clone()));
            }
            if !value.within_bounds() {
                return Err(InvalidParameter::TooLarge(name.clone()));
            }
            match (value, parameter.default) {
                (ParameterValue::Text(text), ParameterDefault::Required) if text.is_empty() => {
                    return Err(InvalidParameter::Missing(name.clone()));
                }
                (
                    ParameterValue::Number(_),
                    ParameterDefault::Number(_) | ParameterDefault::RequiredNumber,
                )
                | (ParameterValue::Flag(_), ParameterDefault::Flag(_))
                | (
                    ParameterValue::Text(_),
                    ParameterDefault::Text(_) | ParameterDefault::Required,
                )
                | (
                    ParameterValue::List(_) | ParameterValue::Map(_),
                    ParameterDefault::Structured(_),
                ) => {}
                (_, ParameterDefault::Number(_) | ParameterDefault::RequiredNumber) => {
                    return Err(wrong_type(name, "a number"));
                }
                (_, ParameterDefault::Flag(_)) => return Err(wrong_type(name, "true or false")),
                (_, ParameterDefault::Text(_) | ParameterDefault::Required) => {
                    return Err(wrong_type(name, "text"));
                }
                (_, ParameterDefault::Structured(shape)) => return Err(wrong_type(name, shape)),
            }
        }
        Ok(Self { known, given })
    }

    /// Reads a number within `range`.
    ///
    /// # Errors
    /// Returns [`InvalidParameter`] if the number is outside `range`, or the parameter is not a
    /// number.
    #[inline(never)] // many callers, and the wasm module should be small
    pub fn number(&self, name: &str, range: RangeInclusive<f64>) -> Result<f64, InvalidParameter> {
        match self.find(name)? {
            (_, ParameterSource::Number(number)) if range.contains(&number) => Ok(number),
            (parameter, ParameterSource::Number(_)) => Err(out_of_range(parameter)),
            _ => Err(wrong_type(name, "a number")),
        }
    }

    /// Reads a number, which may be every finite `f32`, like a metric.
    ///
    /// # Errors
    /// Returns [`InvalidParameter`] if the number is not finite or too large, or the parameter is
    /// not a number.
    #[inline(never)] // many callers, and the wasm module should be small
    pub fn finite(&self, name: &str) -> Result<f32, InvalidParameter> {
        let max = f64::from(f32::MAX);
        // The cast is exact enough, because the number is within the range of an f32.
        self.number(name, -max..=max).map(|number| number as f32)
    }

    /// Reads a whole number within `range`.
    ///
    /// # Errors
    /// Returns [`InvalidParameter`] if the number is outside `range` or not whole, or the parameter
    /// is not a number.
    #[inline(never)] // many callers, and the wasm module should be small
    pub fn integer(&self, name: &str, range: RangeInclusive<u32>) -> Result<u32, InvalidParameter> {
        let number = self.number(name, f64::from(*range.start())..=f64::from(*range.end()))?;
        if number.fract() > 0.0 {
            return Err(wrong_type(name, "a whole number"));
        }
        // The cast changes nothing, because the number is whole and within a range of u32.
        let whole = number as u32;
        Ok(whole)
    }

    /// Reads a flag (true or false).
    ///
    /// # Errors
    /// Returns [`InvalidParameter`] if the parameter is not a flag.
    #[inline(never)] // many callers, and the wasm module should be small
    pub fn flag(&self, name: &str) -> Result<bool, InvalidParameter> {
        match self.find(name)? {
            (_, ParameterSource::Flag(flag)) => Ok(flag),
            _ => Err(wrong_type(name, "true or false")),
        }
    }

    /// Reads a text.
    ///
    /// # Errors
    /// Returns [`InvalidParameter`] if the parameter is not text.
    #[inline(never)] // many callers, and the wasm module should be small
    pub fn text(&self, name: &str) -> Result<&'a str, InvalidParameter> {
        match self.find(name)? {
            (_, ParameterSource::Text(text)) => Ok(text),
            _ => Err(wrong_type(name, "text")),
        }
    }

    /// Reads the name of a header, and returns it lower-case.
    ///
    /// # Errors
    /// Returns [`InvalidParameter`] if the text is empty, or the parameter is not text.
    #[inline(never)] // many callers, and the wasm module should be small
    pub fn header(&self, name: &str) -> Result<Box<str>, InvalidParameter> {
        let header = self.text(name)?.trim().to_ascii_lowercase();
        if header.is_empty() {
            Err(self.out_of_range(name))
        } else {
            Ok(header.into())
        }
    }

    /// Reads a text that must be one of a few words, and returns what the word stands for.
    ///
    /// # Errors
    /// Returns [`InvalidParameter`] if the text is not one of these words, or the parameter is not
    /// text.
    pub fn choice<T: Copy>(
        &self,
        name: &str,
        choices: &[(&str, T)],
    ) -> Result<T, InvalidParameter> {
        let text = self.text(name)?;
        choices
            .iter()
            .find(|(word, _)| *word == text)
            .map(|(_, meaning)| *meaning)
            .ok_or_else(|| self.out_of_range(name))
    }

    /// Returns a list or map as configured; `None` if the configuration has none.
    ///
    /// # Errors
    /// Returns [`InvalidParameter`] if the parameter is not structured.
    #[inline(never)] // many callers, and the wasm module should be small
    pub fn structured(&self, name: &str) -> Result<Option<&'a ParameterValue>, InvalidParameter> {
        match self.find(name)? {
            (_, ParameterSource::Structured(value)) => Ok(value),
            _ => Err(wrong_type(name, "a list or map")),
        }
    }

    /// Returns the entries of a map, in the order of the configuration; empty if the configuration
    /// has no map.
    ///
    /// # Errors
    /// Returns [`InvalidParameter`] if the parameter is not a map.
    #[inline(never)] // many callers, and the wasm module should be small
    pub fn map(&self, name: &str) -> Result<&'a [(String, ParameterValue)], InvalidParameter> {
        match self.structured(name)? {
            Some(ParameterValue::Map(entries)) => Ok(entries),
            None => Ok(&[]),
            Some(_) => Err(wrong_type(name, self.shape(name))),
        }
    }

    /// Returns the values of a list; empty if the configuration has no list.
    ///
    /// # Errors
    /// Returns [`InvalidParameter`] if the parameter is not a list.
    #[inline(never)] // many callers, and the wasm module should be small
    pub fn list(&self, name: &str) -> Result<&'a [ParameterValue], InvalidParameter> {
        match self.structured(name)? {
            Some(ParameterValue::List(values)) => Ok(values),
            None => Ok(&[]),
            Some(_) => Err(wrong_type(name, self.shape(name))),
        }
    }

    /// Reads a list of texts; empty if the configuration has no list.
    ///
    /// # Errors
    /// Returns [`InvalidParameter`] if the parameter is not a list, or contains anything but text.
    pub fn texts(&self, name: &str) -> Result<Vec<&'a str>, InvalidParameter> {
        let text = |value: &'a ParameterValue| {
            if let ParameterValue::Text(text) = value {
                Ok(text.as_str())
            } else {
                Err(wrong_type(name, self.shape(name)))
            }
        };
        self.list(name)?.iter().map(text).collect()
    }

    /// Reads a map of text to text, in the order written; empty if the configuration has no map.
    ///
    /// # Errors
    /// Returns [`InvalidParameter`] if the parameter is not a map, contains anything but text, or
    /// has a key twice.
    pub fn text_map(&self, name: &str) -> Result<Vec<(&'a str, &'a str)>, InvalidParameter> {
        let entries = self.map(name)?;
        let entry = |(at, (key, value)): (usize, &'a (String, ParameterValue))| {
            if entries.iter().skip(at + 1).any(|(other, _)| other == key) {
                return Err(within(
                    name.to_owned(),
                    InvalidParameter::Duplicate(key.clone()),
                ));
            }
            if let ParameterValue::Text(text) = value {
                Ok((key.as_str(), text.as_str()))
            } else {
                Err(wrong_type(name, self.shape(name)))
            }
        };
        entries.iter().enumerate().map(entry).collect()
    }

    /// Reads a map with `read`. The map may have the parameters `known`. Returns `None` if the
    /// configuration has no map.
    ///
    /// # Errors
    /// Returns [`InvalidParameter`] if the parameter is not a map, if [`Self::check`] refuses an
    /// entry, or if `read` fails.
    pub fn nested<T>(
        &self,
        name: &str,
        known: &'static [Parameter],
        read: impl FnOnce(&Parameters<'a>) -> Result<T, InvalidParameter>,
    ) -> Result<Option<T>, InvalidParameter> {
        if self.structured(name)?.is_none() {
            return Ok(None);
        }
        let read = Self::check(known, self.map(name)?).and_then(|nested| read(&nested));
        read.map(Some)
            .map_err(|error| within(name.to_owned(), error))
    }

    /// Does [`Self::nested`] for a map that the configuration must have.
    ///
    /// # Errors
    /// Returns [`InvalidParameter`] if the configuration has no map, or as [`Self::nested`] does.
    pub fn require<T>(
        &self,
        name: &str,
        known: &'static [Parameter],
        read: impl FnOnce(&Parameters<'a>) -> Result<T, InvalidParameter>,
    ) -> Result<T, InvalidParameter> {
        self.nested(name, known, read)?
            .ok_or_else(|| InvalidParameter::Missing(name.to_owned()))
    }

    /// Reads a list of maps, and each map as [`Self::nested`] does. Returns an empty list if the
    /// configuration has none.
    ///
    /// # Errors
    /// Returns [`InvalidParameter`] for the first item that is wrong, as [`Self::nested`] does.
    pub fn each<T>(
        &self,
        name: &str,
        known: &'static [Parameter],
        read: impl Fn(&Parameters<'a>) -> Result<T, InvalidParameter>,
    ) -> Result<Vec<T>, InvalidParameter> {
        let item = |(at, value): (usize, &'a ParameterValue)| {
            let ParameterValue::Map(entries) = value else {
                return Err(wrong_type(name, self.shape(name)));
            };
            Self::check(known, entries)
                .and_then(|nested| read(&nested))
                .map_err(|error| within(format!("{name}[{at}]"), error))
        };
        self.list(name)?.iter().enumerate().map(item).collect()
    }

    /// Returns the error for a value that is not allowed together with the other values.
    pub fn out_of_range(&self, name: &str) -> InvalidParameter {
        find(self.known, name).map_or_else(|unknown| unknown, out_of_range)
    }

    /// Returns the shape of the parameter's value, for error texts.
    fn shape(&self, name: &str) -> &'static str {
        match self
            .known
            .iter()
            .find(|parameter| parameter.name == name)
            .map(|parameter| parameter.default)
        {
            Some(ParameterDefault::Structured(shape)) => shape,
            _ => "a list or map",
        }
    }

    fn find(
        &self,
        name: &str,
    ) -> Result<(&'static Parameter, ParameterSource<'a>), InvalidParameter> {
        let parameter = find(self.known, name)?;
        let found = match self
            .given
            .iter()
            .find(|(given, _)| given == name)
            .map(|(_, value)| value)
        {
            Some(ParameterValue::Number(number)) => ParameterSource::Number(*number),
            Some(ParameterValue::Flag(flag)) => ParameterSource::Flag(*flag),
            Some(ParameterValue::Text(text)) => ParameterSource::Text(text),
            Some(value @ (ParameterValue::List(_) | ParameterValue::Map(_))) => {
                ParameterSource::Structured(Some(value))
            }
            None => match parameter.default {
                ParameterDefault::Number(number) => ParameterSource::Number(number),
                ParameterDefault::Flag(flag) => ParameterSource::Flag(flag),
                ParameterDefault::Text(text) => ParameterSource::Text(text),
                ParameterDefault::Required | ParameterDefault::RequiredNumber => {
                    return Err(InvalidParameter::Missing(name.to_owned()));
                }
                ParameterDefault::Structured(_) => ParameterSource::Structured(None),
            },
        };
        Ok((parameter, found))
    }
}

fn find(known: &'static [Parameter], name: &str) -> Result<&'static Parameter, InvalidParameter> {
    known
        .iter()
        .find(|p| p.name == name)
        .ok_or_else(|| InvalidParameter::Unknown {
            name: name.to_owned(),
            known,
        })
}

impl fmt::Display for ParameterDefault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::Flag(flag) => flag.fmt(f),
            Self::Text(text) => text.fmt(f),
            Self::Required | Self::RequiredNumber => f.write_str("required"),
            Self::Structured(shape) => write!(f, "none; {shape}"),
        }
    }
}

#[cfg(test)]
mod tests;
