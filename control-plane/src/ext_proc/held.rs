//! A request body held until it is whole, as the pieces it came in.
//!
//! It is read in one piece and sent back in several. Pieces move in and out; the one copy is what puts them together for the reader, and a body
//! that came in one piece is not copied at all.

use std::borrow::Cow;

use exchange::rewrite::Splice;

/// Pieces of a body.
#[derive(Debug, Default)]
pub struct Held {
    pieces: Vec<Vec<u8>>,
    bytes: usize,
}

// === impl Held ===

impl Held {
    /// The next piece.
    pub fn push(&mut self, piece: Vec<u8>) {
        self.bytes = self.bytes.saturating_add(piece.len());
        self.pieces.push(piece);
    }

    /// How long the body is so far.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// In one piece.
    #[must_use]
    pub fn whole(&self) -> Cow<'_, [u8]> {
        match self.pieces.as_slice() {
            [] => Cow::Borrowed(&[]),
            [only] => Cow::Borrowed(only),
            pieces => Cow::Owned(pieces.concat()),
        }
    }

    /// Takes the pieces out, changed by `splice`, each with whether it was changed.
    pub fn take(&mut self, splice: Option<&Splice>) -> Vec<(Vec<u8>, bool)> {
        self.bytes = 0;
        let pieces = std::mem::take(&mut self.pieces);
        let Some(Splice { range, replacement }) = splice else { return pieces.into_iter().map(|piece| (piece, false)).collect() };
        let (mut start, mut replacement) = (0, Some(replacement));
        let change = |mut piece: Vec<u8>| {
            let end = start + piece.len();
            let (from, to) = (range.start.clamp(start, end) - start, range.end.clamp(start, end) - start);
            start = end;
            if from < to {
                // The first piece that has any of it gets all that comes in its place.
                piece.splice(from..to, replacement.take().into_iter().flatten().copied());
            }
            (piece, from < to)
        };
        pieces.into_iter().map(change).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn held(pieces: &[&[u8]]) -> Held {
        let mut held = Held::default();
        pieces.iter().for_each(|piece| held.push(piece.to_vec()));
        held
    }

    #[test]
    fn one_piece_is_lent_and_not_copied() {
        assert!(matches!(held(&[b"abc"]).whole(), Cow::Borrowed(b"abc")));
        assert!(matches!(held(&[b"a", b"", b"bc"]).whole(), Cow::Owned(whole) if whole == b"abc"));
        assert_eq!(held(&[]).whole(), &b""[..]);
    }

    #[test]
    fn a_name_cut_in_two_is_replaced_once() {
        let splice = Splice { range: 2..6, replacement: b"XY".to_vec() };
        let pieces = held(&[b"ab", b"", b"cd", b"ef", b"gh"]).take(Some(&splice));
        let expected: Vec<(Vec<u8>, bool)> =
            [(&b"ab"[..], false), (b"", false), (b"XY", true), (b"", true), (b"gh", false)].map(|(p, c)| (p.to_vec(), c)).into();
        assert_eq!(pieces, expected);
    }

    proptest! {
        #[test]
        fn however_it_is_cut_the_whole_changes_alike(body in prop::collection::vec(any::<u8>(), 1..60), cuts: Vec<u8>, a: u8, b: u8, new: Vec<u8>) {
            let (a, b) = (usize::from(a) % body.len(), usize::from(b) % body.len());
            let splice = Splice { range: a.min(b)..a.max(b) + 1, replacement: new };
            let mut whole = body.clone();
            whole.splice(splice.range.clone(), splice.replacement.iter().copied());
            let mut cuts: Vec<usize> = cuts.iter().map(|c| usize::from(*c) % body.len()).chain([0, body.len()]).collect();
            cuts.sort_unstable();
            let mut held = Held::default();
            cuts.windows(2).for_each(|w| held.push(body[w[0]..w[1]].to_vec()));
            prop_assert_eq!(held.bytes(), body.len());
            prop_assert_eq!(&*held.whole(), &body[..]);
            let taken = held.take(Some(&splice));
            prop_assert_eq!(taken.into_iter().flat_map(|(piece, _)| piece).collect::<Vec<u8>>(), whole);
        }
    }
}
