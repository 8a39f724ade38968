//! Receives the parts of a JSON text.

use super::{JsonKind, JsonStr};

/// The form in which a visitor gets a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// No bytes: the value is only validated.
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
    /// Receives the key of the next value. Called only for objects whose content is wanted.
    fn key(&mut self, key: &JsonStr<'_>);
    /// Called when a value begins. For an array, `first` is the byte after the bracket and white
    /// space.
    fn begin(&mut self, kind: JsonKind, first: Option<u8>) -> Wanted;
    /// Receives a string that was wanted whole.
    fn string(&mut self, string: &JsonStr<'_>);
    /// Receives a number or literal that was wanted whole, and its start in the input.
    fn scalar(&mut self, text: &[u8], start: usize);
    /// Receives some bytes of a value that was wanted raw.
    fn raw(&mut self, bytes: &[u8]);
    /// Ends a value that was wanted raw. `numbers` is the number of its elements that are numbers.
    fn raw_end(&mut self, numbers: u32);
    /// Ends a container whose content was wanted.
    fn close(&mut self);
}
