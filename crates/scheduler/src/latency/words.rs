//! The encoding of models as 32-bit words, for proxies and files. The reader checks every number,
//! so that no impossible number is accepted.
//!
//! The layout is not in the crate `proto`, because reading a model also checks its private fields.
//! The crate `proto` has golden files with the words of both models.

use std::fmt;
use std::ops::RangeInclusive;

/// The maximum number of words of an encoded model: 64 KB, because the daemon pushes whole models
/// to every proxy.
pub const WORDS_MAX: usize = 16_384;

/// The reason why words are not a valid model. The sender has caused the error, so a retry would
/// fail too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InvalidModel {
    /// The model has more than [`WORDS_MAX`] words.
    TooLong(usize),
    /// The number of words does not match the layout.
    Length(usize),
    /// This version of the code does not know the layout.
    Layout(u32),
    /// The word at this position is not a finite number, or is out of range.
    Word(usize),
}

/// A reader of the words of a model, in order.
pub(super) struct WordReader<'w> {
    words: &'w [u32],
    at: usize,
}

// === impl WordReader ===

impl<'w> WordReader<'w> {
    /// Reads a model whose first word must be `layout`.
    pub(super) fn new(words: &'w [u32], layout: u32) -> Result<Self, InvalidModel> {
        if words.len() > WORDS_MAX {
            return Err(InvalidModel::TooLong(words.len()));
        }
        match words.first() {
            Some(first) if *first == layout => Ok(Self { words, at: 1 }),
            first => Err(InvalidModel::Layout(first.copied().unwrap_or(0))),
        }
    }

    pub(super) fn ended(&self) -> bool {
        self.at >= self.words.len()
    }

    /// Returns the next word without a check.
    pub(super) fn word(&mut self) -> Result<u32, InvalidModel> {
        let word = self
            .words
            .get(self.at)
            .ok_or(InvalidModel::Length(self.words.len()))?;
        self.at += 1;
        Ok(*word)
    }

    /// Returns the next word as a count, at most `max`.
    pub(super) fn count(&mut self, max: usize) -> Result<usize, InvalidModel> {
        let at = self.at;
        usize::try_from(self.word()?)
            .ok()
            .filter(|count| *count <= max)
            .ok_or(InvalidModel::Word(at))
    }

    /// Returns the next word as a number within a range.
    pub(super) fn number(&mut self, range: &RangeInclusive<f32>) -> Result<f32, InvalidModel> {
        let at = self.at;
        Some(f32::from_bits(self.word()?))
            .filter(|number| range.contains(number))
            .ok_or(InvalidModel::Word(at))
    }

    /// Returns the next words as numbers within a range.
    pub(super) fn numbers<const N: usize>(
        &mut self,
        range: &RangeInclusive<f32>,
    ) -> Result<[f32; N], InvalidModel> {
        let mut numbers = [0.0; N];
        numbers
            .iter_mut()
            .try_for_each(|number| self.number(range).map(|read| *number = read))?;
        Ok(numbers)
    }
}

/// Appends numbers as words.
pub(super) fn put(words: &mut Vec<u32>, numbers: &[f32]) {
    words.extend(numbers.iter().map(|number| number.to_bits()));
}

// === impl InvalidModel ===

impl fmt::Display for InvalidModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong(count) => write!(
                f,
                "a model of {count} words, at most {WORDS_MAX} are allowed"
            ),
            Self::Length(count) => write!(f, "{count} words are no model"),
            Self::Layout(layout) => write!(f, "model layout {layout} is not known"),
            Self::Word(at) => write!(f, "word {at} of a model is not a number that it may be"),
        }
    }
}

impl std::error::Error for InvalidModel {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_words_are_readable() {
        assert_eq!(InvalidModel::Length(3).to_string(), "3 words are no model");
        assert_eq!(
            InvalidModel::Word(7).to_string(),
            "word 7 of a model is not a number that it may be"
        );
    }
}
