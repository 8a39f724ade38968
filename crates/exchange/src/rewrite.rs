//! Replaces the model's name and the salt of the prefix cache in a request to the engine.
//! [`crate::restore`] undoes the change of the name in the reply.
//!
//! If fields are duplicated, engines read the last one, so only its value is replaced.

use std::ops::Range;

use crate::api::RequestApi;
use crate::body::{ParsedRequest, SaltPlace};
use crate::json::write::JsonWriter;
use crate::restore::ModelNames;

/// A change to a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BodyEdit {
    /// The bytes that are replaced.
    pub range: Range<usize>,
    /// The bytes that replace them.
    pub replacement: Vec<u8>,
    /// A further change at a later place in the body.
    pub then: Option<Box<Self>>,
}

/// Returns the change that makes a body (JSON or a form) name `target`, and the names for undoing
/// the change in the reply. `None` if the model in the body cannot be replaced.
pub(crate) fn model<P>(
    parsed: &ParsedRequest<P>,
    target: &str,
    is_form: bool,
) -> Option<(BodyEdit, ModelNames)> {
    let range = parsed.model_span.clone()?;
    let requested = parsed.model_literal().into();
    let edit = if is_form {
        BodyEdit::new(range, target.into())
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

/// Returns the change that makes the engine use `salt`, whatever the client wrote. The new salt
/// replaces the client's salt, or becomes the first member. `None` for a body without members.
pub(crate) fn salt<P>(parsed: &ParsedRequest<P>, api: RequestApi, salt: &str) -> Option<BodyEdit> {
    match &parsed.salt {
        SaltPlace::At(range) => Some(BodyEdit::string(range.clone(), salt)),
        SaltPlace::Absent => Some(BodyEdit::new(
            parsed.object_start..parsed.object_start + 1,
            ["{\"", api.salt_name(), "\":\"", salt, "\","]
                .concat()
                .into(),
        )),
        SaltPlace::NoMember | SaltPlace::Unwritable => None,
    }
}

// === impl BodyEdit ===

impl BodyEdit {
    /// Makes an edit that replaces the JSON string at `range` by `text` as a JSON string.
    #[must_use]
    pub fn string(range: Range<usize>, text: &str) -> Self {
        let mut literal = JsonWriter::default();
        literal.string(text);
        Self::new(range, literal.finish().into_bytes())
    }

    #[must_use]
    pub fn new(range: Range<usize>, replacement: Vec<u8>) -> Self {
        Self {
            range,
            replacement,
            then: None,
        }
    }

    /// Joins two changes at different places.
    pub(crate) fn join(first: Option<Self>, second: Option<Self>) -> Option<Self> {
        match (first, second) {
            (Some(a), Some(b)) => {
                let is_sorted = a.range.start <= b.range.start;
                let (before, behind) = if is_sorted { (a, b) } else { (b, a) };
                Some(Self {
                    then: Some(Box::new(behind)),
                    ..before
                })
            }
            (first, second) => first.or(second),
        }
    }

    /// The end of the last change.
    #[must_use]
    pub fn end(&self) -> usize {
        self.then.as_ref().map_or(self.range.end, |then| then.end())
    }

    /// The changes one by one.
    #[must_use]
    pub fn parts(mut self) -> Vec<Self> {
        let then = self.then.take();
        let mut parts = vec![self];
        parts.extend(then.into_iter().flat_map(|then| then.parts()));
        parts
    }

    /// Returns the new length of a body of `bytes` bytes.
    #[must_use]
    pub fn length(&self, bytes: usize) -> usize {
        let bytes = bytes
            .saturating_sub(self.range.len())
            .saturating_add(self.replacement.len());
        self.then.as_ref().map_or(bytes, |then| then.length(bytes))
    }

    /// Returns the bytes that replace the first [`Self::end`] bytes of a body. Proxies can replace
    /// only the beginning of a body. The bytes after it stay in place and are not copied.
    #[must_use]
    pub fn beginning(&self, mut body: Vec<u8>) -> Vec<u8> {
        let rest = self.then.as_ref().map(|then| {
            body = then.beginning(std::mem::take(&mut body));
            body.split_off(self.range.end.min(body.len()))
        });
        body.truncate(self.range.start);
        body.extend_from_slice(&self.replacement);
        body.extend(rest.unwrap_or_default());
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

    #[test]
    fn two_changes_are_made_in_either_order() {
        let name = || Some(BodyEdit::new(1..3, b"NAME".to_vec()));
        let salt = || Some(BodyEdit::new(5..6, b"".to_vec()));
        for edit in [
            BodyEdit::join(name(), salt()),
            BodyEdit::join(salt(), name()),
        ] {
            let edit = edit.unwrap();
            assert_eq!(edit.end(), 6);
            let body = [&edit.beginning(b"012345".to_vec()), &b"67"[..]].concat();
            assert_eq!(String::from_utf8_lossy(&body), "0NAME3467");
            assert_eq!(edit.length(8), body.len());
        }
    }
}
