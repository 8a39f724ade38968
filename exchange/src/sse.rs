//! Reading a response as it passes: when the first token came, how many events carried content, and what the engine says it cost. The
//! response itself is neither held back nor altered.
//!
//! A stream is cut into events ([`Events`]) and each event read on its own ([`event`]). An unstreamed body is read once it has ended. What must
//! be remembered between chunks is [`Held`], which is bounded: of a longer body (embeddings, log probabilities) or event only the end is
//! kept, which is where every engine writes `usage`. A body with more than [`HELD_BYTES_MIN`] behind its `usage` reads as one without.

use crate::api::Api;
use crate::json::{JsonError, Reader};
pub use crate::usage::Usage;

mod event;
mod events;
mod held;
mod lines;

use events::Events;
use held::Held;
pub use held::{HELD_BYTES_MAX, HELD_BYTES_MIN};
pub(crate) use lines::{Lines, Part};

/// What one chunk brought.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// The first token of the response is in this chunk. Never for an unstreamed response, whose first token nobody sees alone.
    pub first_token: bool,
    /// Events in this chunk that carry generated content.
    pub events: u32,
}

/// Reads one response.
#[derive(Clone, Debug)]
pub struct ResponseReader {
    api: Api,
    source: Source,
    usage: Usage,
    events: u32,
}

#[derive(Clone, Debug)]
enum Source {
    Stream(Events),
    Body(Held),
}

// === impl ResponseReader ===

impl ResponseReader {
    /// A reader for a response of `api`; `streamed` if its content type is `text/event-stream`. It reads no compressed responses.
    #[must_use]
    pub fn new(api: Api, streamed: bool) -> Self {
        let source = if streamed { Source::Stream(Events::default()) } else { Source::Body(Held::default()) };
        Self { api, source, usage: Usage::default(), events: 0 }
    }

    /// Takes the next bytes, cut anywhere.
    pub fn chunk(&mut self, bytes: &[u8]) -> Progress {
        let before = self.events;
        match &mut self.source {
            Source::Stream(events) => events.feed(bytes, |data| self.events += u32::from(event::read(self.api, data, &mut self.usage))),
            Source::Body(held) => held.push(bytes),
        }
        Progress { first_token: before == 0 && self.events > 0, events: self.events - before }
    }

    /// What the whole response cost; also right for a response that was cut off.
    pub fn finish(&mut self) -> Usage {
        match &mut self.source {
            Source::Stream(events) => {
                events.finish(|data| self.events += u32::from(event::read(self.api, data, &mut self.usage)));
            }
            Source::Body(held) => read_body(self.api, held, &mut self.usage),
        }
        if self.usage.completion_tokens.is_none() && self.events > 0 {
            self.usage.completion_tokens = Some(self.events);
            self.usage.estimated = true;
        }
        self.usage
    }
}

fn read_body(api: Api, held: &Held, usage: &mut Usage) {
    if held.is_cut() {
        held.read_usage_at_end(1, usage);
        return;
    }
    let mut seen = *usage;
    if read_top_level(api, held.bytes(), &mut seen).is_ok() {
        *usage = seen;
    }
}

fn read_top_level(api: Api, body: &[u8], usage: &mut Usage) -> Result<(), JsonError> {
    let mut reader = Reader::new(body);
    reader.members(|reader, key| match (key.name().as_ref(), api) {
        (b"usage", _) | (b"meta_info", Api::SglangGenerate) => usage.read(reader),
        _ => reader.skip().map(drop),
    })?;
    reader.end()
}
