//! Reads a request body while it comes, so that at its last byte little is left but the pick.

use crate::body::BodyReader;
use crate::{Exchange, HashSettings, ParsedBody, PromptSums};

use super::RequestHost;

/// The fewest bytes that are read before the last piece: asking the host for a piece costs as much
/// as reading some kilobytes. A shorter body, or one that comes in one piece, is read at its end.
const READ_BYTES_MIN: usize = 32_768;

/// The body so far.
#[derive(Debug, Default)]
pub(super) struct BodyReading {
    /// The pool's settings when the headers came; `None` if it had no state.
    hashing: Option<HashSettings>,
    reader: Option<Box<BodyReader<PromptSums>>>,
    /// Whether the body is read only when it is whole.
    waits: bool,
}

// === impl BodyReading ===

impl BodyReading {
    pub(super) fn new(hashing: Option<HashSettings>) -> Self {
        Self { hashing, reader: None, waits: hashing.is_none() }
    }

    pub(super) fn hashing(&self) -> Option<HashSettings> {
        self.hashing
    }

    /// The memory of the reader, in bytes.
    pub(super) fn memory(&self) -> usize {
        let of = |reader: &BodyReader<PromptSums>| size_of_val(reader) + reader.bytes_kept() + reader.prompt().memory();
        self.reader.as_deref().map_or(0, of)
    }

    /// Reads what came of the body, `size` bytes so far, if it is enough.
    pub(super) fn read_some(&mut self, exchange: &Exchange, host: &impl RequestHost, size: usize) {
        let read = self.reader.as_ref().map_or(0, |reader| reader.bytes_read());
        if self.waits || size.saturating_sub(read) < READ_BYTES_MIN {
            return;
        }
        let begun = self.reader.take().or_else(|| exchange.reader(self.hashing?).map(Box::new));
        self.reader = begun.and_then(|mut reader| {
            reader.read(&host.body_piece(read, size - read));
            (!reader.keeps_too_much()).then_some(reader)
        });
        self.waits = self.reader.is_none();
    }

    /// Reads the rest of a body of `size` bytes. `None` if nothing was read before: then the host
    /// gives the whole body.
    pub(super) fn finish(&mut self, host: &impl RequestHost, size: usize) -> Option<ParsedBody> {
        let reader = self.reader.take()?;
        let read = reader.bytes_read();
        let rest = if read < size { host.body_piece(read, size - read) } else { Default::default() };
        Some(ParsedBody::of(reader.finish(&rest), size))
    }
}
