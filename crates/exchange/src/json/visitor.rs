//! Receives the parts of a JSON text.

use super::{JsonKind, JsonStr};

/// The form in which a visitor gets a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// Nothing but that it is valid.
    Nothing,
    /// A string, number or literal in one: [`JsonVisitor::string`] or [`JsonVisitor::scalar`].
    Whole,
    /// All of its bytes in parts; for a string, without the quotes: [`JsonVisitor::raw`].
    Raw,
    /// The members or elements of a container.
    Inside,
}

/// Receives the parts of a text, in their order.
pub(crate) trait JsonVisitor {
    /// The key of the next value. Only of objects whose inside is wanted.
    fn key(&mut self, key: &JsonStr<'_>);
    /// A value begins. Of an array, `first` is the byte after the bracket and white space.
    fn begin(&mut self, kind: JsonKind, first: Option<u8>) -> Wanted;
    /// A string that was wanted whole.
    fn string(&mut self, string: &JsonStr<'_>);
    /// A number or literal that was wanted whole, and where it begins in the input.
    fn scalar(&mut self, text: &[u8], start: usize);
    /// Some bytes of a value that was wanted raw.
    fn raw(&mut self, bytes: &[u8]);
    /// The end of that value. `numbers` are its elements that are numbers.
    fn raw_end(&mut self, numbers: u32);
    /// The end of a container whose inside was wanted.
    fn close(&mut self);
}
