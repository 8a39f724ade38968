//! The segments of the two rings that each VM writes: the ring of placements and the ring of
//! observations.
//!
//! ```text
//!  segment      VM | number, then entries
//!  placement    slot . kind . generation | blocks, known blocks: 32 bits each | block hashes, one word each
//!  observation  as in `observation`
//! ```

use scheduler::EndpointRef;

use crate::placements::PlacementKind;
use crate::words::{self, WORD, pair, unpair};

/// The size of the head of a segment, in bytes.
pub const SEGMENT_HEAD_BYTES: usize = 2 * WORD;

/// The maximum number of blocks of a placement in a ring. A longer prompt has several placements.
pub const RECORD_BLOCKS_MAX: usize = 1_000;

/// The number of observations in a segment, which has 3 to 4 KB. The VM rewrites the segment at the
/// end of each request, which takes about 1 µs and delays no request.
pub const OBSERVATION_SEGMENT_ROWS: u64 = 32;

/// The number of bits in the word of a [`RingPosition`] that hold its number of bytes.
const BYTES_BITS: u32 = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentHead {
    pub vm: u64,
    /// The number that orders the segments of a ring: in the ring of placements, the number of the
    /// segment; in the ring of observations, the number of the segment's first observation.
    pub number: u64,
}

/// The position up to which a ring of placements is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct RingPosition {
    /// The number of the newest segment, from 1; 0 if there is no segment yet.
    pub segment: u64,
    /// The number of bytes written in the newest segment.
    pub bytes: u32,
}

/// The bit of an encoded [`RingPosition`] that is set while the VM holds requests.
const HOLDS_FLAG: u64 = 1 << 63;

/// A placement in a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacementEntry<'s> {
    pub kind: PlacementKind,
    pub endpoint: EndpointRef,
    /// The block hashes of the prompt, as words.
    pub blocks: &'s [[u8; WORD]],
    /// The estimated number of blocks, from the first, that the endpoint had already cached.
    pub known: u32,
}

// === impl SegmentHead ===

impl SegmentHead {
    pub fn append(self, segment: &mut Vec<u8>) {
        words::append(segment, &[self.vm, self.number]);
    }

    /// Splits a segment into its head and the entries after it.
    #[must_use]
    pub fn split(segment: &[u8]) -> Option<(Self, &[u8])> {
        let ([vm, number], entries) = words::split(segment)?;
        Some((Self { vm, number }, entries))
    }
}

// === impl RingPosition ===

impl RingPosition {
    /// Encodes the position as one word: 16 bits for the bytes of a segment, the rest for the
    /// segment's number, which never overflows.
    #[must_use]
    pub fn to_word(self) -> u64 {
        u64::from(self.bytes) | self.segment << BYTES_BITS
    }

    /// Encodes the position as a word, with a mark if the VM holds requests.
    #[must_use]
    pub fn to_marked_word(self, holds: bool) -> u64 {
        self.to_word() | if holds { HOLDS_FLAG } else { 0 }
    }

    #[must_use]
    pub fn is_marked(word: u64) -> bool {
        word & HOLDS_FLAG != 0
    }

    /// Decodes a position, whether or not the word has the mark. Every word is valid.
    #[must_use]
    pub fn of_word(word: u64) -> Self {
        let word = word & !HOLDS_FLAG;
        let segment = word >> BYTES_BITS;
        Self {
            segment,
            bytes: unpair(word & !(segment << BYTES_BITS)).0,
        }
    }
}

// === impl PlacementEntry ===

impl<'s> PlacementEntry<'s> {
    /// Returns the number of bytes of a placement with this many blocks.
    #[must_use]
    pub fn bytes(blocks: usize) -> usize {
        blocks.saturating_add(2).saturating_mul(WORD)
    }

    /// Appends a placement of at most [`RECORD_BLOCKS_MAX`] blocks.
    pub fn append(
        segment: &mut Vec<u8>,
        kind: PlacementKind,
        endpoint: EndpointRef,
        blocks: &[u64],
        known: u32,
    ) {
        let count = u32::try_from(blocks.len()).unwrap_or(u32::MAX);
        words::append(
            segment,
            &[
                words::of_endpoint(endpoint, kind.number()),
                pair(count, known),
            ],
        );
        words::append(segment, blocks);
    }

    /// Splits off the first placement from the entries after it; `None` if the placement is
    /// incomplete or invalid.
    #[must_use]
    pub fn split(entries: &'s [u8]) -> Option<(Self, &'s [u8])> {
        let ([at, counts], rest) = words::split(entries)?;
        let (count, known) = unpair(counts);
        let count = usize::try_from(count)
            .ok()
            .filter(|count| *count <= RECORD_BLOCKS_MAX)?;
        let (blocks, rest) = rest.split_at_checked(count.checked_mul(WORD)?)?;
        let (endpoint, kind) = words::endpoint(at)?;
        Some((
            Self {
                kind: PlacementKind::of_number(kind)?,
                endpoint,
                blocks: blocks.as_chunks().0,
                known,
            },
            rest,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_come_back_from_their_words() {
        for position in [
            RingPosition::default(),
            RingPosition {
                segment: 3,
                bytes: 8_192,
            },
            RingPosition {
                segment: 1 << 46,
                bytes: 0xffff,
            },
        ] {
            assert_eq!(RingPosition::of_word(position.to_word()), position);
        }
    }
}
