//! Server-sent events: the data of each event of a stream that is cut anywhere.
//!
//! Several data lines of one event are one text with line feeds in between. An event ends with an
//! empty line, or (which the standard does not allow) with the stream.

use super::held_event::HeldEvent;
use super::lines::{LineSplitter, StreamPiece};

/// State between chunks.
#[derive(Clone, Debug, Default)]
pub(super) struct EventSplitter {
    lines: LineSplitter,
    data: HeldEvent,
}

// === impl EventSplitter ===

impl EventSplitter {
    /// Takes the next bytes, and calls `event` with the data of each event that ends in them.
    pub(super) fn feed(&mut self, bytes: &[u8], mut event: impl FnMut(&HeldEvent)) {
        let data = &mut self.data;
        self.lines.feed(bytes, |part| match part {
            StreamPiece::Data(bytes) => data.push(bytes),
            StreamPiece::EndOfLine => data.push(b"\n"),
            StreamPiece::EndOfEvent => end_of_event(data, &mut event),
            StreamPiece::Other(_) => {}
        });
    }

    /// Handles the end of the stream.
    pub(super) fn finish(&mut self, mut event: impl FnMut(&HeldEvent)) {
        end_of_event(&mut self.data, &mut event);
    }
}

fn end_of_event(data: &mut HeldEvent, event: &mut impl FnMut(&HeldEvent)) {
    if !data.bytes().is_empty() {
        event(data);
        data.clear();
    }
}
