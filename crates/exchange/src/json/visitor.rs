//! Receives the parts of a JSON text.

use super::{JsonKind, JsonStr};

/// The form in which a visitor gets a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// Only that the value is valid.
    Nothing,
    /// A complete string, number or literal: [`JsonVisitor::string`] or [`JsonVisitor::scalar`].
    Whole,
    /// All of its bytes in parts: [`JsonVisitor::raw`]. For a string, without the quotes.
    Raw,
    /// The members or elements of a container.
    Inside,
}

/// Receives the parts of a text, in their order.
pub(crate) trait JsonVisitor {
    /// The key of the next value. Called only for objects whose content is wanted.
    fn key(&mut self, key: &JsonStr<'_>);
    /// A value begins. For an array, `first` is the byte after the bracket and white space.
    fn begin(&mut self, kind: JsonKind, first: Option<u8>) -> Wanted;
    /// A string that was wanted whole.
    fn string(&mut self, string: &JsonStr<'_>);
    /// A number or literal that was wanted whole, and its start in the input.
    fn scalar(&mut self, text: &[u8], start: usize);
    /// Some bytes of a value that was wanted raw.
    fn raw(&mut self, bytes: &[u8]);
    /// The end of that value. `numbers` is the number of its elements that are numbers.
    fn raw_end(&mut self, numbers: u32);
    /// The end of a container whose content was wanted.
    fn close(&mut self);
}
