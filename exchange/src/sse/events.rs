//! Server-sent events: the data of each event of a stream that arrives cut anywhere.
//!
//! Several data lines of one event are one text with line feeds between. An event ends with an empty line, or (leniently) with the stream.

use super::held::Held;
use super::lines::{Lines, Part};

/// State between chunks.
#[derive(Clone, Debug, Default)]
pub(super) struct Events {
    lines: Lines,
    data: Held,
}

// === impl Events ===

impl Events {
    /// Takes the next bytes; `event` is given the data of each event that ends in them.
    pub(super) fn feed(&mut self, bytes: &[u8], mut event: impl FnMut(&Held)) {
        let data = &mut self.data;
        self.lines.feed(bytes, |part| match part {
            Part::Data(bytes) => data.push(bytes),
            Part::EndOfLine => data.push(b"\n"),
            Part::EndOfEvent => end_of_event(data, &mut event),
            Part::Other(_) => {}
        });
    }

    /// The stream has ended.
    pub(super) fn finish(&mut self, mut event: impl FnMut(&Held)) {
        end_of_event(&mut self.data, &mut event);
    }
}

fn end_of_event(data: &mut Held, event: &mut impl FnMut(&Held)) {
    if !data.bytes().is_empty() {
        event(data);
        data.clear();
    }
}
