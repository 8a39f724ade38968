//! A request body that is held until it is complete, and the pieces in which it is sent back.
//!
//! The body is contiguous, so that reading it needs no copy; the ends of its pieces are kept
//! separately. A body that came in one piece is not copied.

use exchange::rewrite::BodyEdit;

/// A body, and the ends of its pieces.
#[derive(Debug, Default)]
pub struct HeldBody {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

/// The pieces of a body, one after another.
#[derive(Debug)]
pub struct BodyPieces {
    body: HeldBody,
    /// The index of the next end in `body.ends`.
    index: usize,
    /// How many bytes of the body were taken.
    taken: usize,
    piece_bytes_max: usize,
    /// The changes of the body, in their order.
    changes: Vec<BodyEdit>,
}

#[derive(Debug, PartialEq, Eq)]
pub struct BodyPiece {
    /// The bytes of the piece.
    pub bytes: Vec<u8>,
    /// Whether the bytes differ from those that came.
    pub changed: bool,
    pub last: bool,
}

// === impl HeldBody ===

impl AsRef<[u8]> for HeldBody {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl HeldBody {
    /// Appends the next piece.
    pub fn push(&mut self, mut piece: Vec<u8>) {
        if self.bytes.is_empty() {
            piece.shrink_to_fit();
            self.bytes = piece;
        } else {
            // The buffer grows by a quarter and does not double, because unused bytes count as
            // held.
            let len = self.bytes.len() + piece.len();
            if len > self.bytes.capacity() {
                self.bytes.reserve_exact(len + len / 4 - self.bytes.len());
            }
            self.bytes.extend_from_slice(&piece);
        }
        self.ends.push(self.bytes.len());
    }

    /// The length of the body so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The memory of the body, in bytes.
    #[must_use]
    pub fn memory(&self) -> usize {
        self.bytes.capacity() + self.ends.capacity() * size_of::<usize>()
    }

    /// Takes the body out, changed by `splice`; `None` if no part of a body has arrived.
    pub fn take(&mut self, splice: Option<BodyEdit>) -> Option<BodyPiece> {
        let Self { mut bytes, ends } = std::mem::take(self);
        ends.last()?;
        let changed = splice.is_some();
        for BodyEdit {
            range, replacement, ..
        } in parts(splice).into_iter().rev()
        {
            bytes.splice(range, replacement);
        }
        Some(BodyPiece {
            bytes,
            changed,
            last: true,
        })
    }

    /// Takes the body out in the pieces in which it came. No piece is longer than
    /// `piece_bytes_max`, except by the bytes that `splice` adds.
    pub fn take_pieces(&mut self, splice: Option<BodyEdit>, piece_bytes_max: usize) -> BodyPieces {
        BodyPieces {
            body: std::mem::take(self),
            index: 0,
            taken: 0,
            piece_bytes_max,
            changes: parts(splice),
        }
    }
}

fn parts(edit: Option<BodyEdit>) -> Vec<BodyEdit> {
    edit.map(BodyEdit::parts).unwrap_or_default()
}

// === impl BodyPieces ===

impl BodyPieces {
    #[must_use]
    pub fn from_bytes(bytes: Vec<u8>, piece_bytes_max: usize) -> Self {
        let mut held = HeldBody::default();
        held.push(bytes);
        held.take_pieces(None, piece_bytes_max)
    }

    /// The memory of the pieces, in bytes.
    #[must_use]
    pub fn memory(&self) -> usize {
        self.body.memory()
    }
}

impl Iterator for BodyPieces {
    type Item = BodyPiece;

    fn next(&mut self) -> Option<BodyPiece> {
        let start = self.taken;
        let piece_end = *self.body.ends.get(self.index)?;
        let end = piece_end.min(start.saturating_add(self.piece_bytes_max));
        self.taken = end;
        self.index += usize::from(end == piece_end);
        let part = |from: usize, to: usize| self.body.bytes.get(from..to).unwrap_or_default();
        let last = self.index == self.body.ends.len();
        let mut bytes = Vec::new();
        let mut changed = false;
        let mut copied = start;
        for edit in &mut self.changes {
            let from = edit.range.start.clamp(start, end);
            let to = edit.range.end.clamp(start, end);
            if from < to {
                bytes.extend_from_slice(part(copied, from));
                // The first piece with any of the replaced bytes gets the whole replacement.
                bytes.append(&mut edit.replacement);
                copied = to;
                changed = true;
            }
        }
        bytes.extend_from_slice(part(copied, end));
        Some(BodyPiece {
            bytes,
            changed,
            last,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn held(pieces: &[&[u8]]) -> HeldBody {
        let mut held = HeldBody::default();
        pieces.iter().for_each(|piece| held.push(piece.to_vec()));
        held
    }

    #[test]
    fn a_name_cut_in_two_is_replaced_once() {
        let splice = BodyEdit::new(2..6, b"XY".to_vec());
        let pieces = held(&[b"ab", b"", b"cd", b"ef", b"gh"]).take_pieces(Some(splice), 9);
        let pieces: Vec<_> = pieces
            .map(|piece| (piece.bytes, piece.changed, piece.last))
            .collect();
        let expected = [
            ("ab", false, false),
            ("", false, false),
            ("XY", true, false),
            ("", true, false),
            ("gh", false, true),
        ];
        assert_eq!(
            pieces,
            expected.map(|(bytes, changed, last)| (bytes.as_bytes().to_vec(), changed, last))
        );
    }

    #[test]
    fn a_long_piece_goes_in_shorter_ones() {
        let pieces = held(&[b"abcde", b"", b"f"]).take_pieces(None, 2);
        let pieces: Vec<_> = pieces
            .map(|piece| (String::from_utf8(piece.bytes).unwrap(), piece.last))
            .collect();
        assert_eq!(
            pieces,
            [
                ("ab", false),
                ("cd", false),
                ("e", false),
                ("", false),
                ("f", true)
            ]
            .map(|(p, last)| (p.to_owned(), last))
        );
    }

    #[test]
    fn nothing_has_no_piece_and_an_empty_body_has_one() {
        assert_eq!(held(&[]).take(None), None);
        assert_eq!(held(&[]).take_pieces(None, 9).count(), 0);
        assert_eq!(
            held(&[b""]).take(None),
            Some(BodyPiece {
                bytes: vec![],
                changed: false,
                last: true
            })
        );
        assert_eq!(held(&[b""]).take_pieces(None, 9).count(), 1);
    }

    proptest! {
        #[test]
        fn however_it_is_cut_the_whole_changes_alike(
            body in prop::collection::vec(any::<u8>(), 1..60), cuts: Vec<u8>, a: u8, b: u8, new: Vec<u8>, max in 1_usize..60,
        ) {
            let a = usize::from(a) % body.len();
            let b = usize::from(b) % body.len();
            let splice = BodyEdit::new(a.min(b)..a.max(b) + 1, new);
            let mut whole = body.clone();
            whole.splice(splice.range.clone(), splice.replacement.iter().copied());
            let mut cuts: Vec<usize> = cuts.iter().map(|c| usize::from(*c) % body.len()).chain([0, body.len()]).collect();
            cuts.sort_unstable();
            let cut = || {
                let mut held = HeldBody::default();
                cuts.windows(2).for_each(|w| held.push(body[w[0]..w[1]].to_vec()));
                held
            };
            let whole_before = cut();
            prop_assert_eq!(whole_before.len(), body.len());
            prop_assert_eq!(whole_before.as_ref(), &body[..]);
            prop_assert_eq!(cut().take(Some(splice.clone())).unwrap().bytes, whole.clone());
            let pieces: Vec<BodyPiece> = cut().take_pieces(Some(splice), max).collect();
            prop_assert_eq!(pieces.iter().map(|piece| piece.last).rposition(|last| last), Some(pieces.len() - 1));
            prop_assert_eq!(pieces.iter().filter(|piece| piece.last).count(), 1);
            prop_assert_eq!(pieces.into_iter().flat_map(|piece| piece.bytes).collect::<Vec<u8>>(), whole);
        }
    }
}
