//! A JSON writer that appends to a text. For the few lines that are written here, `serde_json`
//! would add a tree, maps and their sorting to the wasm module.

use std::fmt::{Display, Write as _};

use crate::number;

/// JSON text that is being written. Write values in the order of the text. The writer adds the
/// commas.
#[derive(Debug, Default)]
pub struct JsonWriter(String);

/// A value whose `Display` is valid JSON. Floats are left out, because the standard library's
/// printing of floats adds 14 KB to the module.
pub trait JsonScalar: Copy + Display {}

// === impl bool ===

impl JsonScalar for bool {}
impl JsonScalar for u8 {}
impl JsonScalar for u16 {}
impl JsonScalar for u32 {}
impl JsonScalar for u64 {}
impl JsonScalar for usize {}
impl JsonScalar for i32 {}

// === impl JsonWriter ===

impl JsonWriter {
    /// Writes an object with the members that `members` writes.
    pub fn object(&mut self, members: impl FnOnce(&mut Self)) {
        self.container('{', members, '}');
    }

    /// Writes an array with the elements that `elements` writes.
    pub fn array(&mut self, elements: impl FnOnce(&mut Self)) {
        self.container('[', elements, ']');
    }

    /// Writes the name of the member whose value is written next.
    #[inline(never)]
    pub fn name(&mut self, name: &str) -> &mut Self {
        self.string(name);
        self.0.push(':');
        self
    }

    #[inline(never)] // as for the two below: with inlining, a record alone was 13 KB of code
    pub fn string(&mut self, text: &str) {
        self.comma();
        self.0.push('"');
        for c in text.chars() {
            match c {
                '"' => self.0.push_str("\\\""),
                '\\' => self.0.push_str("\\\\"),
                '\n' => self.0.push_str("\\n"),
                '\0'..='\u{1f}' => drop(write!(self.0, "\\u{:04x}", u32::from(c))),
                _ => self.0.push(c),
            }
        }
        self.0.push('"');
    }

    /// Writes a float, which must be finite, with enough digits that reading it gives the same
    /// value.
    #[inline(never)]
    pub fn float(&mut self, value: f32) {
        self.comma();
        number::write(&mut self.0, value);
    }

    /// Writes a float, which must be finite, to four decimal places.
    #[inline(never)]
    pub fn rounded(&mut self, value: f32) {
        self.comma();
        number::write_rounded(&mut self.0, value, 4);
    }

    /// Writes a whole number, `true` or `false`.
    pub fn plain(&mut self, value: impl JsonScalar) {
        self.display(&value);
    }

    pub fn null(&mut self) {
        self.display(&"null");
    }

    /// Writes `null`, or calls `some` to write the value.
    pub fn option<T>(&mut self, value: Option<T>, some: impl FnOnce(&mut Self, T)) {
        match value {
            Some(value) => some(self, value),
            None => self.null(),
        }
    }

    /// Writes an array of strings.
    pub fn strings<'s>(&mut self, texts: impl IntoIterator<Item = &'s str>) {
        self.array(|w| texts.into_iter().for_each(|text| w.string(text)));
    }

    /// The number of bytes that are written so far.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.len()
    }

    /// Returns the written text.
    #[must_use]
    pub fn finish(self) -> String {
        self.0
    }

    #[inline(never)]
    fn display(&mut self, value: &dyn Display) {
        self.comma();
        let _ = write!(self.0, "{value}"); // writing to a String cannot fail
    }

    fn container(&mut self, open: char, content: impl FnOnce(&mut Self), close: char) {
        self.comma();
        self.0.push(open);
        content(self);
        self.0.push(close);
    }

    fn comma(&mut self) {
        if !matches!(self.0.as_bytes().last(), None | Some(b'{' | b'[' | b':')) {
            self.0.push(',');
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    #[test]
    fn commas_stand_between_and_nowhere_else() {
        let mut w = JsonWriter::default();
        w.object(|w| {
            w.name("a").array(|_| {});
            w.name("b").strings(["x:", "{", ""]);
            w.name("c").object(|w| w.name("d").float(-1.5));
            w.name("e").option(None::<u8>, |w, n| w.plain(n));
            w.name("f").option(Some(true), |w, flag| w.plain(flag));
        });
        assert_eq!(
            w.finish(),
            r#"{"a":[],"b":["x:","{",""],"c":{"d":-1.5},"e":null,"f":true}"#
        );
    }

    #[test]
    fn no_byte_that_text_may_hold_breaks_it() {
        let text: String = ('\0'..='\u{7f}').collect();
        let mut w = JsonWriter::default();
        w.string(&text);
        assert_eq!(
            serde_json::from_str::<Value>(&w.finish()).unwrap(),
            json!(text)
        );
    }

    proptest! {
        #[test]
        fn any_text_and_number_is_read_back(texts in prop::collection::vec(any::<String>(), 0..4), number in any::<f32>()) {
            let number = if number.is_finite() { number } else { 0.0 };
            let mut w = JsonWriter::default();
            w.array(|w| {
                texts.iter().for_each(|text| w.string(text));
                w.float(number);
            });
            let read: Value = serde_json::from_str(&w.finish()).unwrap();
            prop_assert_eq!(&read.as_array().unwrap()[..texts.len()], &texts.iter().map(|t| json!(t)).collect::<Vec<_>>()[..]);
            prop_assert_eq!(read[texts.len()].as_f64().unwrap() as f32, number);
        }
    }
}
