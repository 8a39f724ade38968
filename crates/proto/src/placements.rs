//! Placements in a `LoadReport` and in a `PeerLoad`. A placement says that an endpoint got a prompt
//! with the listed blocks, in the order of the prompt. Blocks that the endpoint already had cached
//! may be left out.
//!
//! ```text
//!  slot . kind . generation | count | blocks      16, 16 and 32 bits, then words of 64 bits
//! ```
//! The messages have one field for confirmed placements, and another field for all other kinds
//! ([`PlacementKind`]), so that a release that knows only confirmed placements finds these. In the
//! field of confirmed placements, the kind is 0.
//!
//! Placements follow each other without a frame, because the daemon forwards the bytes unchanged,
//! about a hundred times a second.

use scheduler::EndpointRef;

use crate::words::{self, WORD};

/// The evidence for a placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlacementKind {
    /// The endpoint's reply showed that the endpoint processed the prompt.
    Confirmed,
    /// The endpoint was picked and has not answered.
    Unconfirmed,
    /// The endpoint refused the prompt, so the unconfirmed placement of these blocks is void.
    Withdrawn,
    /// A peer says that the placement is confirmed, but the peer reports more placements than its
    /// share.
    OverShare,
    /// A peer's [`Self::Withdrawn`]. Only workers of one process send this kind to each other.
    PeerWithdrawn,
}

/// A placement, and the bytes after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodedPlacement<'a> {
    pub endpoint: EndpointRef,
    pub kind: u16,
    /// The block hashes, as words.
    pub blocks: &'a [[u8; WORD]],
    pub rest: &'a [u8],
}

pub fn push(placements: &mut Vec<u8>, endpoint: EndpointRef, blocks: &[u64]) {
    push_claim(placements, PlacementKind::Confirmed, endpoint, blocks);
}

pub fn push_claim(
    claims: &mut Vec<u8>,
    kind: PlacementKind,
    endpoint: EndpointRef,
    blocks: &[u64],
) {
    let head = words::of_endpoint(endpoint, kind.number());
    words::append(claims, &[head, blocks.len() as u64]);
    words::append(claims, blocks);
}

/// Decodes the first placement; `None` if the placement is incomplete.
#[must_use]
pub fn take(placements: &[u8]) -> Option<EncodedPlacement<'_>> {
    let ([at, count], rest) = words::split(placements)?;
    let bytes = usize::try_from(count).ok()?.checked_mul(WORD)?;
    let (blocks, rest) = rest.split_at_checked(bytes)?;
    let (endpoint, kind) = words::endpoint(at)?;
    Some(EncodedPlacement {
        endpoint,
        kind,
        blocks: blocks.as_chunks().0,
        rest,
    })
}

/// Returns all placements before the first invalid placement. The kind of a placement depends on
/// the field of the message that has the placement.
pub fn each(placements: &[u8]) -> impl Iterator<Item = (EndpointRef, Vec<u64>)> {
    split(placements).map(|placement| (placement.endpoint, placement.hashes()))
}

/// Returns all placements that have a kind other than confirmed, before the first invalid
/// placement.
pub fn each_claim(claims: &[u8]) -> impl Iterator<Item = (PlacementKind, EndpointRef, Vec<u64>)> {
    split(claims).filter_map(|claim| {
        let kind = PlacementKind::of_number(claim.kind)
            .filter(|kind| *kind != PlacementKind::Confirmed)?;
        Some((kind, claim.endpoint, claim.hashes()))
    })
}

/// Returns all placements in their encoded form, before the first invalid placement.
pub fn split(mut placements: &[u8]) -> impl Iterator<Item = EncodedPlacement<'_>> {
    std::iter::from_fn(move || {
        let first = take(placements)?;
        placements = first.rest;
        Some(first)
    })
}

/// Splits the bytes into pieces of complete placements. No piece is longer than `bytes_max`, and
/// each piece comes with its number of placements. A placement longer than `bytes_max` is left out,
/// and so are all bytes from an invalid placement on.
pub fn pieces(mut placements: &[u8], bytes_max: usize) -> impl Iterator<Item = (&[u8], u64)> {
    std::iter::from_fn(move || {
        let mut length = 0;
        let mut count = 0;
        while let Some(EncodedPlacement { rest, .. }) = placements.get(length..).and_then(take) {
            let end = placements.len().saturating_sub(rest.len());
            if end > bytes_max && count > 0 {
                break;
            }
            (placements, length, count) = if end > bytes_max {
                (rest, 0, 0)
            } else {
                (placements, end, count + 1)
            };
        }
        let (piece, rest) = placements.split_at_checked(length)?;
        placements = rest;
        (count > 0).then_some((piece, count))
    })
}

// === impl PlacementKind ===

impl PlacementKind {
    /// Returns the number of this kind in messages and in shared data.
    #[must_use]
    pub fn number(self) -> u16 {
        match self {
            Self::Confirmed => 0,
            Self::Unconfirmed => 1,
            Self::Withdrawn => 2,
            Self::OverShare => 3,
            Self::PeerWithdrawn => 4,
        }
    }

    /// Returns the kind with this number; `None` for a kind of a newer release.
    #[must_use]
    pub fn of_number(number: u16) -> Option<Self> {
        [
            Self::Confirmed,
            Self::Unconfirmed,
            Self::Withdrawn,
            Self::OverShare,
            Self::PeerWithdrawn,
        ]
        .into_iter()
        .find(|kind| kind.number() == number)
    }
}

// === impl EncodedPlacement ===

impl EncodedPlacement<'_> {
    #[must_use]
    pub fn hashes(&self) -> Vec<u64> {
        let words = self.blocks.iter();
        words.map(|block| u64::from_le_bytes(*block)).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use scheduler::{Generation, Slot};

    const HEAD: usize = 2 * WORD;

    fn at(slot: u16) -> EndpointRef {
        EndpointRef {
            slot: Slot(slot),
            generation: Generation(u32::MAX - 1),
        }
    }

    fn bytes(placements: &[(u16, Vec<u64>)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        placements
            .iter()
            .for_each(|(slot, blocks)| push(&mut bytes, at(*slot), blocks));
        bytes
    }

    fn placements() -> impl Strategy<Value = Vec<(u16, Vec<u64>)>> {
        prop::collection::vec(
            (0..1024_u16, prop::collection::vec(any::<u64>(), 0..20)),
            0..12,
        )
    }

    proptest! {
        #[test]
        fn pushed_placements_are_read_back(placed in placements()) {
            let read: Vec<_> = each(&bytes(&placed)).collect();
            let expected: Vec<_> = placed.into_iter().map(|(slot, blocks)| (at(slot), blocks)).collect();
            prop_assert_eq!(read, expected);
        }

        #[test]
        fn pieces_are_all_that_fits_in_order(placed in placements(), bytes_max in 0..400_usize) {
            let whole = bytes(&placed);
            let pieces: Vec<_> = pieces(&whole, bytes_max).collect();
            let fits = |(_, blocks): &&(u16, Vec<u64>)| HEAD + blocks.len() * WORD <= bytes_max;
            let expected: Vec<_> = placed.iter().filter(fits).cloned().collect();
            prop_assert_eq!(pieces.iter().map(|(piece, _)| *piece).collect::<Vec<_>>().concat(), bytes(&expected));
            for (piece, count) in pieces {
                prop_assert!(piece.len() <= bytes_max && each(piece).count() as u64 == count && count > 0);
            }
        }

        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..100), bytes_max: usize) {
            each(&bytes).for_each(drop);
            prop_assert!(pieces(&bytes, bytes_max).map(|(piece, _)| piece.len()).sum::<usize>() <= bytes.len());
        }
    }

    #[test]
    fn claims_have_kinds_and_those_of_newer_releases_are_skipped() {
        let mut claims = Vec::new();
        push_claim(&mut claims, PlacementKind::Unconfirmed, at(3), &[1, 2]);
        push_claim(&mut claims, PlacementKind::Confirmed, at(4), &[3]);
        words::append(&mut claims, &[words::of_endpoint(at(5), 9), 0]);
        push_claim(&mut claims, PlacementKind::Withdrawn, at(3), &[2]);
        push_claim(&mut claims, PlacementKind::OverShare, at(6), &[]);
        assert_eq!(
            each_claim(&claims).collect::<Vec<_>>(),
            [
                (PlacementKind::Unconfirmed, at(3), vec![1, 2]),
                (PlacementKind::Withdrawn, at(3), vec![2]),
                (PlacementKind::OverShare, at(6), vec![])
            ]
        );
        assert_eq!(each(&claims).count(), 5);
    }

    #[test]
    fn an_invalid_placement_ends_the_reading() {
        let mut whole = bytes(&[(3, vec![1, 2])]);
        assert_eq!(each(&whole[..whole.len() - 1]).count(), 0, "cut short");
        push(&mut whole, at(1024), &[4]);
        push(&mut whole, at(5), &[6]);
        assert_eq!(
            each(&whole).collect::<Vec<_>>(),
            [(at(3), vec![1, 2])],
            "no snapshot has that slot"
        );
        let lies = [0_u64, u64::MAX].map(u64::to_le_bytes).concat();
        assert_eq!(take(&lies), None);
    }
}
