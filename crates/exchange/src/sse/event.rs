//! Reads one event of a stream, or a whole body: whether it has generated content, and its usage.
//!
//! | API | content is | usage is in |
//! |---|---|---|
//! | chat completions | `choices[].delta` or `.message`: a non-empty text, reasoning or tool call | `usage` |
//! | completions | a non-empty `choices[].text` | `usage` |
//! | responses | a non-empty string `delta`; `output[]` with any of these | `response.usage`, `usage` |
//! | vLLM generate | non-empty `choices[].token_ids` | `usage` |
//! | SGLang generate | a non-empty `text` or `output_ids`; Triton: `text_output` | `meta_info` |
//! | messages | `delta` with text, thinking or a piece of a tool call; a `content_block`, or one of `content[]`, with any of them | `message.usage`, `usage` |
//! | others | a non-empty `data`, `results`, `outputs`, `embedding` | `usage` |
//!
//! Chats, completions and generations end with `[DONE]` or a `finish_reason`. Messages end with
//! `message_stop`, and responses with `response.completed`, `.incomplete` or `.failed`. An event
//! with an `error` has the error instead of content.
//!
//! An opening event (only a role, `message_start`, `ping`) has no content. Neither `[DONE]` nor
//! anything that is not JSON has content. A body may be an array of replies, which is SGLang's
//! answer to an array of prompts. The reader skips the usage of such an array, because it is not
//! the usage of one prompt.

use super::held_event::HeldEvent;
use super::{ResponseFacts, read_error, read_first_id, read_id, status};
use crate::api::RequestApi;
use crate::json::{JsonError, JsonKind, JsonReader};
use crate::usage;

/// The end mark of most APIs' streams, instead of JSON.
const DONE: &[u8] = b"[DONE]";

/// Types of the events that end the other APIs' streams.
const LAST: [&[u8]; 3] = [
    b"message_stop",
    b"response.completed",
    b"response.incomplete",
];

/// Type of the event that ends a stream if the engine failed.
const FAILED: &[u8] = b"response.failed";

/// The reasons that an engine gives if it did not generate to the end: it sleeps, shuts down, or
/// lost the request.
const ABORTED: [&[u8]; 3] = [b"abort", b"cancelled", b"error"];

/// The states of a response that the engine will generate later.
const LATER: [&[u8]; 2] = [b"queued", b"in_progress"];

/// Members that identify a reply of any of the APIs, in addition to members with content. Engines
/// leave out many of them.
const REPLY: [&[u8]; 3] = [b"id", b"model", b"input_tokens"];

/// Reads `data`. Returns true if it has content. If the event is too long to be held, only the
/// usage is read. Only the closing event of the Responses API grows so long, because it repeats the
/// whole response.
pub(super) fn read(api: RequestApi, data: &HeldEvent, seen: &mut ResponseFacts) -> bool {
    seen.any = true;
    if data.is_cut() {
        read_first_id(data.head(), &mut seen.stored_id);
        let closing = api == RequestApi::Responses;
        data.read_usage_at_end(if closing { 2 } else { 1 }, &mut seen.usage);
        seen.finished |= closing;
        seen.generated |= !closing;
        seen.content_bytes = if closing {
            seen.content_bytes
        } else {
            u32::MAX
        };
        return !closing;
    }
    if data.bytes().trim_ascii() == DONE {
        seen.finished = true;
        return false;
    }
    let mut read = *seen;
    match read_json(api, data.bytes(), &mut read) {
        Ok(content) => {
            *seen = read;
            content
        }
        Err(_) => false,
    }
}

/// Reads the members of an event or body.
struct EventReader<'s> {
    api: RequestApi,
    seen: &'s mut ResponseFacts,
    content: bool,
    /// Whether a member says that it is an error, and the HTTP status in another member.
    is_error: bool,
    code: Option<u16>,
}

/// Reads an object, or an array of objects. Returns true if any has content. Any other value is not
/// read.
pub(super) fn read_json(
    api: RequestApi,
    data: &[u8],
    seen: &mut ResponseFacts,
) -> Result<bool, JsonError> {
    let mut reader = JsonReader::new(data);
    let mut event = EventReader {
        api,
        seen,
        content: false,
        is_error: false,
        code: None,
    };
    match reader.peek()? {
        JsonKind::Object => event.object(&mut reader)?,
        JsonKind::Array => {
            let usage = event.seen.usage;
            reader.elements(|reader| event.object(reader))?;
            event.seen.usage = usage;
            event.seen.unclear = !event.seen.explained;
        }
        _ => {
            event.seen.unclear = true;
            reader.skip().map(drop)?;
        }
    }
    reader.end()?;
    event.seen.generated |= event.content;
    Ok(event.content)
}

// === impl EventReader ===

impl EventReader<'_> {
    #[inline(never)] // several callers, and the wasm module should be small
    fn object(&mut self, reader: &mut JsonReader<'_>) -> Result<(), JsonError> {
        self.is_error = false;
        self.code = None;
        reader.members(|reader, key| self.member(reader, &key.name()))?;
        if self.is_error {
            self.seen.error = Some(self.code);
        }
        Ok(())
    }

    fn member(&mut self, reader: &mut JsonReader<'_>, name: &[u8]) -> Result<(), JsonError> {
        let known = self.seen.explained;
        self.seen.explained = true;
        match (name, self.api) {
            (b"usage", _) => usage::read(&mut self.seen.usage, reader),
            (
                b"text" | b"output_ids" | b"generated_text" | b"text_output",
                RequestApi::SglangGenerate,
            )
            | (b"data" | b"results" | b"outputs" | b"embedding" | b"embeddings", _) => {
                self.value_with_content(reader)
            }
            (b"meta_info", RequestApi::SglangGenerate) => {
                reader
                    .clone()
                    .members(|reader, key| match key.name().as_ref() {
                        b"finish_reason" => self.reason(reader),
                        _ => reader.skip().map(drop),
                    })?;
                usage::read(&mut self.seen.usage, reader)
            }
            (b"type", RequestApi::Messages | RequestApi::Responses) => {
                let kind = reader.string()?;
                self.seen.finished |= kind.is_some_and(|kind| LAST.contains(&kind.raw()));
                self.is_error |= kind.is_some_and(|kind| kind.raw() == FAILED);
                Ok(())
            }
            (b"id", RequestApi::Responses | RequestApi::Conversations) => {
                read_id(reader, &mut self.seen.stored_id)
            }
            (b"choices", _) => reader.elements(|reader| self.choice(reader)),
            (b"status" | b"output" | b"delta" | b"response", RequestApi::Responses) => {
                self.responses_member(reader, name)
            }
            (b"content" | b"delta" | b"content_block" | b"message", RequestApi::Messages) => {
                self.messages_member(reader, name)
            }
            _ => {
                self.seen.explained = known || REPLY.contains(&name);
                match name {
                    // Older engines, and SGLang: `{"object": "error", ..., "code": 400}`.
                    b"object" => {
                        self.is_error |=
                            reader.string()?.is_some_and(|kind| kind.raw() == b"error");
                        Ok(())
                    }
                    b"code" => status(reader, &mut self.code),
                    // The second is FastAPI's name.
                    b"error" | b"detail" => read_error(reader, &mut self.seen.error),
                    _ => reader.skip().map(drop),
                }
            }
        }
    }

    fn responses_member(
        &mut self,
        reader: &mut JsonReader<'_>,
        name: &[u8],
    ) -> Result<(), JsonError> {
        match name {
            b"status" => {
                let status = reader.string()?;
                self.seen.unclear |= status.is_some_and(|status| LATER.contains(&status.raw()));
                Ok(())
            }
            b"output" => reader.elements(|reader| {
                reader.members(|reader, key| match key.name().as_ref() {
                    b"content" => reader.elements(|reader| self.object_with_content(reader)),
                    b"name" | b"summary" | b"result" => self.value_with_content(reader),
                    _ => reader.skip().map(drop),
                })
            }),
            b"delta" => self.string_with_content(reader),
            _ => self.nested_facts(reader),
        }
    }

    fn messages_member(
        &mut self,
        reader: &mut JsonReader<'_>,
        name: &[u8],
    ) -> Result<(), JsonError> {
        match name {
            b"content" => reader.elements(|reader| self.object_with_content(reader)),
            b"message" => {
                // This object was written when the stream opened, so its count of generated tokens
                // is not the final one.
                let completion_tokens = self.seen.usage.completion_tokens;
                self.nested_facts(reader)?;
                self.seen.usage.completion_tokens = completion_tokens;
                Ok(())
            }
            _ => self.object_with_content(reader),
        }
    }

    fn choice(&mut self, reader: &mut JsonReader<'_>) -> Result<(), JsonError> {
        reader.members(|reader, key| match key.name().as_ref() {
            b"delta" | b"message" => self.object_with_content(reader),
            b"text" => self.string_with_content(reader),
            b"finish_reason" => self.reason(reader),
            b"token_ids" if self.api == RequestApi::VllmGenerate => self.value_with_content(reader),
            _ => reader.skip().map(drop),
        })
    }

    /// Reads a finish reason: a text, or SGLang's object with the text in `type`.
    #[inline(never)] // several callers, and the wasm module should be small
    fn reason(&mut self, reader: &mut JsonReader<'_>) -> Result<(), JsonError> {
        let mut reason = |reader: &mut JsonReader<'_>| {
            let reason = reader.string()?;
            self.seen.aborted |= reason.is_some_and(|reason| ABORTED.contains(&reason.raw()));
            Ok(())
        };
        match reader.peek()? {
            JsonKind::Null => return reader.skip().map(drop),
            JsonKind::Object => reader.members(|reader, key| match key.name().as_ref() {
                b"type" => reason(reader),
                _ => reader.skip().map(drop),
            })?,
            _ => reason(reader)?,
        }
        self.seen.finished = true;
        Ok(())
    }

    #[inline(never)] // several callers, and the wasm module should be small
    fn nested_facts(&mut self, reader: &mut JsonReader<'_>) -> Result<(), JsonError> {
        reader.members(|reader, key| match key.name().as_ref() {
            b"usage" => usage::read(&mut self.seen.usage, reader),
            b"id" => read_id(reader, &mut self.seen.stored_id),
            _ => reader.skip().map(drop),
        })
    }

    #[inline(never)] // several callers, and the wasm module should be small
    fn object_with_content(&mut self, reader: &mut JsonReader<'_>) -> Result<(), JsonError> {
        reader.members(|reader, key| match key.name().as_ref() {
            b"content" | b"reasoning_content" | b"reasoning" | b"refusal" | b"tool_calls"
            | b"function_call" | b"audio" | b"text" | b"thinking" | b"partial_json" | b"name" => {
                self.value_with_content(reader)
            }
            _ => reader.skip().map(drop),
        })
    }

    #[inline(never)] // several callers, and the wasm module should be small
    fn string_with_content(&mut self, reader: &mut JsonReader<'_>) -> Result<(), JsonError> {
        let bytes = reader.string()?.map_or(0, |text| text.raw().len());
        self.has_content(bytes);
        Ok(())
    }

    /// Records this many bytes of content.
    fn has_content(&mut self, bytes: usize) {
        self.content |= bytes > 0;
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        self.seen.content_bytes = self.seen.content_bytes.saturating_add(bytes);
    }

    /// Records content if the next value is a string, array or object that is not empty.
    #[inline(never)] // several callers, and the wasm module should be small
    fn value_with_content(&mut self, reader: &mut JsonReader<'_>) -> Result<(), JsonError> {
        match reader.peek()? {
            JsonKind::String => self.string_with_content(reader),
            JsonKind::Array => reader.elements(|reader| {
                self.has_content(reader.skip()?.len());
                Ok(())
            }),
            JsonKind::Object => reader.members(|reader, _| {
                self.has_content(reader.skip()?.len());
                Ok(())
            }),
            JsonKind::Number | JsonKind::Boolean | JsonKind::Null => reader.skip().map(drop),
        }
    }
}
