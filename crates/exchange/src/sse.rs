//! Reads a response as it passes: the time of the first token, the number of events with content,
//! and the usage that the engine reports. The response is neither held back nor changed.
//!
//! A stream is cut into events ([`EventSplitter`]) and each event is read on its own ([`event`]).
//! An unstreamed body is read at its end. Between chunks only [`HeldEvent`] is kept, which is
//! bounded. Of a longer body (embeddings, log probabilities) or event only the end is kept, where
//! every engine writes `usage`. If more than [`HELD_BYTES_MIN`] follow the `usage`, the body is
//! read as if it had no `usage`.

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

/// How many tokens of a reply may become no text, such as its end and the marks around tool calls.
const MARKUP_TOKENS: u32 = 16;

/// The tokens and events of one chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChunkProgress {
    /// Whether the chunk has the first token of the response. Always false for an unstreamed
    /// response, whose first token cannot be seen.
    pub first_token: bool,
    /// Events in this chunk that carry generated content.
    pub events: u32,
}

/// The maximum number of ids remembered for one answer: the answer's own, and its conversation's.
/// An engine that names a new id in each event must not displace the answers of other engines.
const STORED_IDS_MAX: u8 = 2;

#[derive(Clone, Debug)]
pub struct ResponseReader {
    api: RequestApi,
    source: ResponseFormat,
    facts: ResponseFacts,
    events: u32,
    /// The hash of the id that [`Self::take_stored_id`] returned last, or 0 before the first.
    stored_id_taken: u64,
    /// How many ids [`Self::take_stored_id`] has returned.
    stored_ids: u8,
}

/// The facts read from the response so far, except its content.
#[derive(Clone, Copy, Debug, Default)]
struct ResponseFacts {
    usage: TokenUsage,
    /// Whether there was an event, or a byte of an unstreamed body.
    any: bool,
    /// Whether the mark that ends streams of the API has arrived.
    finished: bool,
    /// Whether there was a member that replies of the API have.
    explained: bool,
    /// Whether there was generated content, or another result.
    generated: bool,
    /// Bytes of generated content, in the spelling of the reply.
    content_bytes: u32,
    /// Whether the engine stopped before the end.
    aborted: bool,
    /// Whether the body is not a JSON object, but may be a reply, or announce a later one.
    unclear: bool,
    /// The hash of the answer's id; 0 if no id has arrived.
    stored_id: u64,
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
    /// Creates a reader for a response of `api`. `streamed` means that its content type is
    /// `text/event-stream`. The reader cannot read compressed responses.
    #[must_use]
    pub fn new(api: RequestApi, streamed: bool) -> Self {
        let source = if streamed {
            ResponseFormat::Stream(EventSplitter::default())
        } else {
            ResponseFormat::Buffered(HeldEvent::default())
        };
        Self {
            api,
            source,
            facts: ResponseFacts::default(),
            events: 0,
            stored_id_taken: 0,
            stored_ids: 0,
        }
    }

    /// Takes the next bytes, which may be cut anywhere.
    pub fn chunk(&mut self, bytes: &[u8]) -> ChunkProgress {
        let before = self.events;
        match &mut self.source {
            ResponseFormat::Stream(events) => {
                events.feed(bytes, |data| {
                    self.events += u32::from(event::read(self.api, data, &mut self.facts));
                });
            }
            ResponseFormat::Buffered(held) => {
                self.facts.any |= !bytes.is_empty();
                held.push(bytes);
            }
        }
        ChunkProgress {
            first_token: before == 0 && self.events > 0,
            events: self.events - before,
        }
    }

    /// Returns the usage of the whole response. The usage is also valid for a response that was cut
    /// off.
    pub fn finish(&mut self) -> TokenUsage {
        match &mut self.source {
            ResponseFormat::Stream(events) => {
                events.finish(|data| {
                    self.events += u32::from(event::read(self.api, data, &mut self.facts));
                });
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

    /// Returns `tokens`, limited by the content if there is any, because a token has at least one
    /// byte.
    #[must_use]
    pub fn possible_tokens(&self, tokens: u32) -> u32 {
        let bytes = self.facts.content_bytes;
        if bytes == 0 {
            return tokens;
        }
        let most = bytes.saturating_add(MARKUP_TOKENS);
        tokens.min(most)
    }

    /// Returns the hash of the answer's id once the id has arrived. The id of an unstreamed
    /// response is known after [`Self::finish`].
    pub fn take_stored_id(&mut self) -> Option<u64> {
        let id = self.facts.stored_id;
        if id == self.stored_id_taken || self.stored_ids >= STORED_IDS_MAX {
            return None;
        }
        self.stored_id_taken = id;
        self.stored_ids += 1;
        Some(id)
    }

    /// Whether the engine has worked on the request to its end, as far as the response shows. Call
    /// this after [`Self::finish`].
    #[must_use]
    #[inline(never)] // several callers, and the wasm module should be small
    pub fn has_generated(&self) -> bool {
        let generated = self.facts.generated
            || self
                .facts
                .usage
                .completion_tokens
                .is_some_and(|tokens| tokens > 0);
        !self.facts.aborted && (generated || !self.api.generates())
    }

    /// Classifies the body of the whole response. `wants_output` means that the client wants at
    /// least one token. Call this after [`Self::finish`].
    #[must_use]
    pub fn says(&self, wants_output: bool) -> ErrorBody {
        let generates = self.api.generates();
        let streamed = matches!(self.source, ResponseFormat::Stream(_));
        // Some engines end a stream with the usage and send no mark.
        let has_usage = self.facts.usage.completion_tokens.is_some() && !self.facts.usage.estimated;
        match self.facts {
            ResponseFacts {
                error: Some(status),
                ..
            } => ErrorBody::Error(status),
            ResponseFacts { any: false, .. } => ErrorBody::Empty,
            ResponseFacts {
                finished: false, ..
            } if streamed && generates && !has_usage => ErrorBody::Unfinished,
            _ if self.has_generated()
                && (generates || streamed || has_usage || self.facts.explained) =>
            {
                ErrorBody::Reply
            }
            ResponseFacts { unclear: true, .. } => ErrorBody::Unclear,
            ResponseFacts {
                explained: true,
                aborted: false,
                ..
            } if !wants_output => ErrorBody::Unclear,
            _ => ErrorBody::Strange,
        }
    }
}

fn read_body(api: RequestApi, held: &HeldEvent, seen: &mut ResponseFacts) {
    if held.is_cut() {
        // The body is too long to be read, so it counts as a reply.
        seen.explained = true;
        seen.generated = true;
        seen.content_bytes = u32::MAX;
        read_first_id(held.head(), &mut seen.stored_id);
        held.read_usage_at_end(1, &mut seen.usage);
        return;
    }
    let mut read = *seen;
    match event::read_json(api, held.bytes(), &mut read) {
        Ok(_) => *seen = read,
        // APIs that generate nothing may answer in other formats. Error pages are HTML.
        Err(_) => {
            seen.unclear =
                !api.generates() && held.bytes().trim_ascii_start().first() != Some(&b'<');
        }
    }
}

/// Reads the id of a response or conversation from the first bytes of a text that is cut. No other
/// id comes before it.
fn read_first_id(head: &[u8], id: &mut u64) {
    let from = memchr::memmem::find(head, b"\"id\"")
        .and_then(|at| head.get(at..))
        .unwrap_or_default();
    let mut reader = JsonReader::new(from);
    if reader.key().is_ok() {
        let _ = read_id(&mut reader, id); // it may be cut, too
    }
}

fn read_id(reader: &mut JsonReader<'_>, id: &mut u64) -> Result<(), JsonError> {
    *id = reader
        .string()?
        .map_or(*id, |text| scheduler::name_hash(&text.text()));
    Ok(())
}

/// Reads the value of `error`, which is an object or a text. `null` means no error.
#[inline(never)] // several callers, and the wasm module should be small
fn read_error(
    reader: &mut JsonReader<'_>,
    error: &mut Option<Option<u16>>,
) -> Result<(), JsonError> {
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

/// Reads a number that may be an HTTP status. Codes that are words are ignored.
#[inline(never)] // several callers, and the wasm module should be small
fn status(reader: &mut JsonReader<'_>, code: &mut Option<u16>) -> Result<(), JsonError> {
    let number = reader.count()?;
    *code = number
        .and_then(|number| u16::try_from(number).ok())
        .or(*code);
    Ok(())
}
