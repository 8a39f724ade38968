//! Reads a request body while it arrives, so that after its last byte little is left to do except
//! the pick.

use crate::body::BodyReader;
use crate::{Exchange, HashSettings, ParsedBody, PromptSums};

use super::RequestHost;

/// The minimum number of bytes that are read before the last piece. A request for a piece costs the
/// host as much as reading some kilobytes. A shorter body, or one that arrives in one piece, is
/// read at its end.
const READ_BYTES_MIN: usize = 32_768;

/// The maximum number of bytes that are read at once. A piece from a decompressor may be as long as
/// the longest body, and the memory of a host may never shrink.
const READ_BYTES_MAX: usize = 262_144;

type PromptReader = BodyReader<PromptSums>;

/// The part of the body read so far.
#[derive(Debug, Default)]
pub(super) struct BodyReading {
    /// The pool's settings when the headers arrived; `None` if it had no state.
    hashing: Option<HashSettings>,
    reader: Option<Box<PromptReader>>,
    /// Whether the body is read only when it is complete.
    waits: bool,
}

// === impl BodyReading ===

impl BodyReading {
    pub(super) fn new(hashing: Option<HashSettings>) -> Self {
        Self {
            hashing,
            reader: None,
            waits: hashing.is_none(),
        }
    }

    pub(super) fn hashing(&self) -> Option<HashSettings> {
        self.hashing
    }

    /// The memory of the reader, in bytes.
    pub(super) fn memory(&self) -> usize {
        let of = |reader: &PromptReader| {
            size_of_val(reader) + reader.bytes_kept() + reader.prompt().memory()
        };
        self.reader.as_deref().map_or(0, of)
    }

    /// Reads the part of the body that has arrived, `size` bytes so far, if it is long enough.
    pub(super) fn read_some(&mut self, exchange: &Exchange, host: &impl RequestHost, size: usize) {
        let read = self.reader.as_ref().map_or(0, |reader| reader.bytes_read());
        if self.waits || size.saturating_sub(read) < READ_BYTES_MIN {
            return;
        }
        let begun = self
            .reader
            .take()
            .or_else(|| exchange.reader(self.hashing?).map(Box::new));
        self.reader = begun.and_then(|reader| read_up_to(reader, host, size));
        self.waits = self.reader.is_none();
    }

    /// Reads the rest of a body of `size` bytes. `None` if the host must give the whole body,
    /// because no part was read before or the reader keeps too much.
    pub(super) fn finish(&mut self, host: &impl RequestHost, size: usize) -> Option<ParsedBody> {
        let reader = read_up_to(self.reader.take()?, host, size)?;
        Some(ParsedBody::from_read(reader.finish(&[]), size))
    }
}

/// Reads the first `size` bytes of the body, except those that were read before. `None` if the
/// reader keeps too much.
fn read_up_to(
    mut reader: Box<PromptReader>,
    host: &impl RequestHost,
    size: usize,
) -> Option<Box<PromptReader>> {
    while let Some(left) = size
        .checked_sub(reader.bytes_read())
        .filter(|&left| left > 0)
    {
        let piece = host.body_piece(reader.bytes_read(), left.min(READ_BYTES_MAX));
        if piece.is_empty() {
            break; // the host refused the call, and the body ends here
        }
        reader.read(&piece);
        if reader.keeps_too_much() {
            return None;
        }
    }
    Some(reader)
}
