//! Replaces the model's name in a request on its way to the engine; [`crate::restore`] undoes the
//! change in the reply.
//!
//! Engines read the last of duplicate fields, so only the value of the last one is replaced.

use std::ops::Range;

use crate::body::ParsedRequest;
use crate::json::write::JsonWriter;
use crate::restore::ModelNames;

/// A change to a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BodyEdit {
    /// The bytes that are replaced.
    pub range: Range<usize>,
    /// The bytes that replace them.
    pub replacement: Vec<u8>,
}

/// Returns the change that makes a body, JSON or a form, name `target`, and the names for the
/// change back in the reply. `None` if the model in the body cannot be replaced.
pub(crate) fn model<P>(
    parsed: &ParsedRequest<P>,
    target: &str,
    is_form: bool,
) -> Option<(BodyEdit, ModelNames)> {
    let range = parsed.model_span.clone()?;
    let requested = parsed.model_literal().into();
    let edit = if is_form {
        BodyEdit {
            range,
            replacement: target.into(),
        }
    } else {
        BodyEdit::string(range, target)
    };
    Some((
        edit,
        ModelNames {
            sent: target.into(),
            requested,
        },
    ))
}

// === impl BodyEdit ===

impl BodyEdit {
    /// Makes an edit that replaces the JSON string at `range` by `text` as a JSON string.
    #[must_use]
    pub fn string(range: Range<usize>, text: &str) -> Self {
        let mut literal = JsonWriter::default();
        literal.string(text);
        Self {
            range,
            replacement: literal.finish().into_bytes(),
        }
    }

    /// Returns the new length of a body of `bytes` bytes.
    #[must_use]
    pub fn length(&self, bytes: usize) -> usize {
        bytes
            .saturating_sub(self.range.len())
            .saturating_add(self.replacement.len())
    }

    /// Returns the bytes that replace the first `range.end` bytes of a body. Proxies can replace
    /// only the beginning of a body; the bytes after the name stay in place and are not copied.
    #[must_use]
    pub fn beginning(&self, mut body: Vec<u8>) -> Vec<u8> {
        body.truncate(self.range.start);
        body.extend_from_slice(&self.replacement);
        body
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_range_changes() {
        let splice = BodyEdit::string(1..4, "a\"\\\n\u{e9}\u{7f}");
        let mut body = splice.beginning(b"[old]".to_vec());
        body.extend_from_slice(b"]");
        assert_eq!(
            String::from_utf8_lossy(&body),
            "[\"a\\\"\\\\\\n\u{e9}\u{7f}\"]"
        );
        assert_eq!(splice.length(5), body.len());
    }
}
