//! Bytes kept between chunks. If they become too many, only their end is kept.

use crate::json::{JsonError, JsonReader};
use crate::usage::{self, TokenUsage};

/// The maximum number of bytes kept of one event or body: four full wasm body chunks of 16 KiB.
/// Chat replies are shorter and are read whole.
pub const HELD_BYTES_MAX: usize = 65_536;

/// The number of bytes that are kept after more than [`HELD_BYTES_MAX`] arrived. `usage` takes 300
/// bytes, and engines write little after it.
pub const HELD_BYTES_MIN: usize = 16_384;

/// The maximum number of occurrences of a `usage` key that are tried, from the end. No engine
/// writes more than a few.
const CANDIDATES_MAX: usize = 8;

const KEY: &[u8] = b"\"usage\"";

/// The number of first bytes that are kept of an event longer than [`HELD_BYTES_MAX`]. The number
/// is enough for the type and the id, which engines write first.
const HEAD_BYTES: usize = 256;

#[derive(Clone, Debug, Default)]
pub(super) struct HeldEvent {
    bytes: Vec<u8>,
    /// The first bytes, once they are dropped from `bytes`.
    head: Vec<u8>,
    cut: bool,
}

// === impl HeldEvent ===

impl HeldEvent {
    pub(super) fn push(&mut self, mut bytes: &[u8]) {
        if self.bytes.len() + bytes.len() > HELD_BYTES_MAX {
            if !self.cut {
                for piece in [self.bytes.as_slice(), bytes] {
                    let room = HEAD_BYTES - self.head.len();
                    self.head
                        .extend_from_slice(piece.get(..room).unwrap_or(piece));
                }
            }
            self.cut = true;
            bytes = bytes
                .last_chunk::<HELD_BYTES_MIN>()
                .map_or(bytes, |end| end);
            let kept = self.bytes.len().min(HELD_BYTES_MIN - bytes.len());
            self.bytes.drain(..self.bytes.len() - kept);
        }
        self.bytes.extend_from_slice(bytes);
    }

    pub(super) fn clear(&mut self) {
        self.bytes.clear();
        self.head.clear();
        self.cut = false;
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The first bytes, if the event is cut.
    pub(super) fn head(&self) -> &[u8] {
        &self.head
    }

    /// Whether the beginning was dropped.
    pub(super) fn is_cut(&self) -> bool {
        self.cut
    }

    /// Finds the `usage` object `levels` deep in a JSON object whose beginning is missing. The
    /// search covers only the last [`HELD_BYTES_MIN`] bytes. How many more are held depends on how
    /// the response was cut into chunks, and the result must not depend on that.
    ///
    /// No string can look like the `"usage"` key, because a quote in a string has a backslash
    /// before it. After the right `usage`, exactly `levels` objects close before the end. This
    /// condition excludes a deeper `usage`.
    pub(super) fn read_usage_at_end(&self, levels: u32, usage: &mut TokenUsage) {
        let end = self
            .bytes
            .last_chunk::<HELD_BYTES_MIN>()
            .map_or(self.bytes(), |end| end);
        for at in memchr::memmem::rfind_iter(end, KEY).take(CANDIDATES_MAX) {
            let mut seen = *usage;
            if read_usage(end.get(at..).unwrap_or_default(), levels, &mut seen).is_ok() {
                *usage = seen;
                return;
            }
        }
    }
}

/// Reads a `usage` object. `bytes` start at its key, and end with the object that is `levels`
/// further out.
fn read_usage(bytes: &[u8], levels: u32, usage: &mut TokenUsage) -> Result<(), JsonError> {
    let mut reader = JsonReader::new(bytes);
    reader.key()?;
    usage::read(usage, &mut reader)?;
    (0..levels).try_for_each(|_| reader.rest_of_object())?;
    reader.end()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_longer_fits_leaves_the_last_bytes() {
        for last in [1, 1_000, HELD_BYTES_MIN, HELD_BYTES_MAX + 1] {
            let mut held = HeldEvent::default();
            held.push(&vec![b'a'; HELD_BYTES_MAX]);
            assert!(!held.is_cut() && held.bytes().len() == HELD_BYTES_MAX);
            held.push(&vec![b'b'; last]);
            let kept = [
                vec![b'a'; HELD_BYTES_MIN - last.min(HELD_BYTES_MIN)],
                vec![b'b'; last.min(HELD_BYTES_MIN)],
            ]
            .concat();
            assert!(held.is_cut() && held.bytes() == kept, "{last}");
        }
    }
}
