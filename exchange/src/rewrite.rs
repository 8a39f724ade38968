//! The model's name in a request, replaced on its way to the engine; [`crate::restore`] undoes it on the way back.
//!
//! Of duplicate fields engines read the last: that one's value is replaced, and not a byte besides.

use std::ops::Range;

use crate::body::ParsedRequest;
use crate::json::write::JsonWriter;
use crate::restore::ModelNames;

/// A change to a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BodyEdit {
    /// Bytes that go.
    pub range: Range<usize>,
    /// The bytes that replace them.
    pub replacement: Vec<u8>,
}

/// The change to `body`, which was read as `parsed`, so that it names `target`; and the change back
/// in the reply. `None` if its model cannot be replaced.
pub(crate) fn model(body: &[u8], parsed: &ParsedRequest<'_>, target: &str) -> Option<(BodyEdit, ModelNames)> {
    let range = parsed.model_span.clone()?;
    let asked = body.get(range.clone())?.into();
    Some((BodyEdit::string(range, target), ModelNames { sent: target.into(), requested: asked }))
}

// === impl BodyEdit ===

impl BodyEdit {
    /// Replaces the JSON string at `range` by the text as a JSON string.
    #[must_use]
    pub fn string(range: Range<usize>, text: &str) -> Self {
        let mut literal = JsonWriter::default();
        literal.string(text);
        Self { range, replacement: literal.finish().into_bytes() }
    }

    /// The new length of a body of `bytes` bytes.
    #[must_use]
    pub fn length(&self, bytes: usize) -> usize {
        bytes.saturating_sub(self.range.len()).saturating_add(self.replacement.len())
    }

    /// The bytes that replace the first `range.end` bytes of a body. Proxies can replace only the
    /// beginning of a body; what follows the name stays in place and is not copied.
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
        assert_eq!(String::from_utf8_lossy(&body), "[\"a\\\"\\\\\\n\u{e9}\u{7f}\"]");
        assert_eq!(splice.length(5), body.len());
    }
}
