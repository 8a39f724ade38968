//! Placements in a `LoadReport` and in a `PeerLoad`: an endpoint got a prompt of these blocks,
//! first block first. Blocks that the endpoint had cached already may be left out.
//!
//! ```text
//!  slot . generation | count | blocks      16, 16 and 32 bits, then words of 64 bits
//! ```
//! Placements follow each other without a frame, so that the daemon can forward the bytes
//! unchanged: the placements of one proxy go to all the others some hundred times a second.

use scheduler::EndpointRef;

use crate::words::{self, WORD};

/// The endpoint and the blocks of a placement, and the bytes behind it.
type PlacementHead<'a> = (EndpointRef, &'a [[u8; WORD]], &'a [u8]);

/// Appends a placement.
pub fn push(placements: &mut Vec<u8>, endpoint: EndpointRef, blocks: &[u64]) {
    words::append(
        placements,
        &[words::of_endpoint(endpoint, 0), blocks.len() as u64],
    );
    words::append(placements, blocks);
}

/// The endpoint and the blocks of the first placement, and the bytes behind it; `None` if it is
/// incomplete.
#[must_use]
pub fn take(placements: &[u8]) -> Option<PlacementHead<'_>> {
    let ([at, count], rest) = words::split(placements)?;
    let bytes = usize::try_from(count).ok()?.checked_mul(WORD)?;
    let (blocks, rest) = rest.split_at_checked(bytes)?;
    let (endpoint, _) = words::endpoint(at)?;
    Some((endpoint, blocks.as_chunks().0, rest))
}

/// All placements, up to the first invalid one.
pub fn each(mut placements: &[u8]) -> impl Iterator<Item = (EndpointRef, Vec<u64>)> {
    std::iter::from_fn(move || {
        let (endpoint, blocks, rest) = take(placements)?;
        placements = rest;
        Some((
            endpoint,
            blocks
                .iter()
                .map(|block| u64::from_le_bytes(*block))
                .collect(),
        ))
    })
}

/// Splits the bytes into pieces of complete placements, none longer than `bytes_max`, each with its
/// number of placements. A placement that is longer is left out, and so are all bytes behind an
/// invalid one.
pub fn pieces(mut placements: &[u8], bytes_max: usize) -> impl Iterator<Item = (&[u8], u64)> {
    std::iter::from_fn(move || {
        let mut length = 0;
        let mut count = 0;
        while let Some((_, _, rest)) = placements.get(length..).and_then(take) {
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
