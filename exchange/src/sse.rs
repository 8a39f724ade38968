//! Reads a response as it passes: when the first token came, how many events had content, and the
//! usage that the engine reports. The response is neither held back nor changed.
//!
//! A stream is cut into events ([`EventSplitter`]) and each event is read on its own ([`event`]).
//! An unstreamed body is read at its end. Between chunks only [`HeldEvent`] is kept, which is
//! bounded: if a body (embeddings, log probabilities) or event is longer, only its end is kept,
//! where every engine writes `usage`. A body with more than [`HELD_BYTES_MIN`] after its `usage`
//! counts as a body without `usage`.

use crate::api::RequestApi;
use crate::json::{JsonError, JsonKind, JsonReader};
pub use crate::usage::{self, TokenUsage};
use pool_state::verdict::ErrorBody;

mod event;
mod events;
mod held_event;
mod lines;

use events::EventSplitter;
use held_event::HeldEvent;
pub use held_event::{HELD_BYTES_MAX, HELD_BYTES_MIN};
pub(crate) use lines::{LineSplitter, StreamPiece};

/// The tokens and events of one chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChunkProgress {
    /// Whether the chunk has the first token of the response. Always false for an unstreamed
    /// response, whose first token cannot be seen.
    pub first_token: bool,
    /// Events in this chunk that carry generated content.
    pub events: u32,
}

/// Reads one response.
#[derive(Clone, Debug)]
pub struct ResponseReader {
    api: RequestApi,
    source: ResponseFormat,
    facts: ResponseFacts,
    events: u32,
}

/// The facts read so far, besides content.
#[derive(Clone, Copy, Debug, Default)]
struct ResponseFacts {
    usage: TokenUsage,
    /// Whether there was an event, or a byte of an unstreamed body.
    any: bool,
    /// Whether the mark came that ends streams of the API.
    finished: bool,
    /// Whether there was a finish reason, or a member that replies of the API have.
    explained: bool,
    /// The error object, if there was one, with the HTTP status that it names, if any.
    error: Option<Option<u16>>,
}

#[derive(Clone, Debug)]
enum ResponseFormat {
    Stream(EventSplitter),
    Buffered(HeldEvent),
}

// === impl ResponseReader ===

impl ResponseReader {
    /// Makes a reader for a response of `api`; `streamed` if its content type is
    /// `text/event-stream`. It cannot read compressed responses.
    #[must_use]
    pub fn new(api: RequestApi, streamed: bool) -> Self {
        let source =
            if streamed { ResponseFormat::Stream(EventSplitter::default()) } else { ResponseFormat::Buffered(HeldEvent::default()) };
        Self { api, source, facts: ResponseFacts::default(), events: 0 }
    }

    /// Takes the next bytes, cut anywhere.
    pub fn chunk(&mut self, bytes: &[u8]) -> ChunkProgress {
        let before = self.events;
        match &mut self.source {
            ResponseFormat::Stream(events) => {
                events.feed(bytes, |data| self.events += u32::from(event::read(self.api, data, &mut self.facts)));
            }
            ResponseFormat::Buffered(held) => {
                self.facts.any |= !bytes.is_empty();
                held.push(bytes);
            }
        }
        ChunkProgress { first_token: before == 0 && self.events > 0, events: self.events - before }
    }

    /// Returns the usage of the whole response; also valid for a response that was cut off.
    pub fn finish(&mut self) -> TokenUsage {
        match &mut self.source {
            ResponseFormat::Stream(events) => {
                events.finish(|data| self.events += u32::from(event::read(self.api, data, &mut self.facts)));
            }
            ResponseFormat::Buffered(held) => read_body(self.api, held, &mut self.facts),
        }
        let usage = &mut self.facts.usage;
        if usage.completion_tokens.is_none() && self.events > 0 {
            usage.completion_tokens = Some(self.events);
            usage.estimated = true;
        }
        *usage
    }

    /// Classifies the body of the whole response. Call it after [`Self::finish`].
    #[must_use]
    pub fn says(&self) -> ErrorBody {
        let streamed = matches!(self.source, ResponseFormat::Stream(_));
        // Some engines end a stream with the usage and send no mark.
        let has_usage = self.facts.usage.completion_tokens.is_some() && !self.facts.usage.estimated;
        match self.facts {
            ResponseFacts { error: Some(status), .. } => ErrorBody::Error(status),
            ResponseFacts { any: false, .. } => ErrorBody::Empty,
            ResponseFacts { finished: false, .. } if streamed && !has_usage && self.api.generates() => ErrorBody::Unfinished,
            ResponseFacts { explained: false, .. } if self.events == 0 && !has_usage && (!streamed || self.api.generates()) => {
                ErrorBody::Strange
            }
            _ => ErrorBody::Reply,
        }
    }
}

fn read_body(api: RequestApi, held: &HeldEvent, seen: &mut ResponseFacts) {
    if held.is_cut() {
        seen.explained = true; // the body is too long to be read, so it must not count as strange
        held.read_usage_at_end(1, &mut seen.usage);
        return;
    }
    let mut read = *seen;
    if read_top_level(api, held.bytes(), &mut read).is_ok() {
        *seen = read;
    }
}

/// Members that identify a reply of any of the APIs; engines leave out many of them.
const REPLY: [&[u8]; 12] = [
    b"choices",
    b"data",
    b"results",
    b"output",
    b"outputs",
    b"content",
    b"text",
    b"embedding",
    b"embeddings",
    b"input_tokens",
    b"id",
    b"model",
];

fn read_top_level(api: RequestApi, body: &[u8], seen: &mut ResponseFacts) -> Result<(), JsonError> {
    let mut reader = JsonReader::new(body);
    let (mut is_error, mut code) = (false, None);
    reader.members(|reader, key| match (key.name().as_ref(), api) {
        (b"usage", _) | (b"meta_info", RequestApi::SglangGenerate) => usage::read(&mut seen.usage, reader),
        (b"error", _) => read_error(reader, &mut seen.error),
        // Older engines, and SGLang: `{"object": "error", "message": ..., "code": 400}`.
        (b"object", _) => {
            is_error |= reader.string()?.is_some_and(|kind| kind.raw() == b"error");
            Ok(())
        }
        (b"code", _) => status(reader, &mut code),
        // FastAPI's shape.
        (b"detail", _) => read_error(reader, &mut seen.error),
        (name, _) => {
            seen.explained |= REPLY.contains(&name);
            reader.skip().map(drop)
        }
    })?;
    if is_error {
        seen.error = Some(code);
    }
    reader.end()
}

/// Reads the value of `error`: an object or a text; `null` is no error.
fn read_error(reader: &mut JsonReader<'_>, error: &mut Option<Option<u16>>) -> Result<(), JsonError> {
    if reader.peek()? == JsonKind::Null {
        return reader.skip().map(drop);
    }
    let mut code = None;
    reader.members(|reader, key| match key.name().as_ref() {
        b"code" | b"status" => status(reader, &mut code),
        _ => reader.skip().map(drop),
    })?;
    *error = Some(code);
    Ok(())
}

/// Reads a number that may be an HTTP status. Codes in words are ignored.
fn status(reader: &mut JsonReader<'_>, code: &mut Option<u16>) -> Result<(), JsonError> {
    let number = reader.count()?;
    *code = number.and_then(|number| u16::try_from(number).ok()).or(*code);
    Ok(())
}
