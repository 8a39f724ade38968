//! One event of a stream: whether it has generated content, and its usage.
//!
//! | API | content is | usage is in |
//! |---|---|---|
//! | chat completions | `choices[].delta`: a non-empty text, reasoning or tool call | `usage` |
//! | completions | a non-empty `choices[].text` | `usage` |
//! | responses | a non-empty string `delta` | `response.usage` |
//! | vLLM generate | non-empty `choices[].token_ids` | `usage` |
//! | SGLang generate | a non-empty `text` or `output_ids` | `meta_info` |
//! | messages | `delta` with text, thinking or a piece of a tool call; a `content_block` that opens with any of them | `message.usage`, `usage` |
//!
//! Chats, completions and generations end with `[DONE]` or a `finish_reason`; messages with
//! `message_stop`; responses with `response.completed`, `.incomplete` or `.failed`. An event with
//! an `error` has the error instead of content.
//!
//! An opening event (only a role, `message_start`, `ping`) has no content, and neither has `[DONE]`
//! or anything that is not JSON.

use super::held_event::HeldEvent;
use super::{ResponseFacts, read_error, status};
use crate::api::RequestApi;
use crate::json::{JsonError, JsonKind, JsonReader};
use crate::usage::{self, TokenUsage};

/// The end mark of most APIs' streams, instead of JSON.
const DONE: &[u8] = b"[DONE]";

/// Types of the events that end the other APIs' streams.
const LAST: [&[u8]; 3] = [b"message_stop", b"response.completed", b"response.incomplete"];

/// Type of the event that reports a failed engine instead.
const FAILED: &[u8] = b"response.failed";

/// Reads `data`; true if it has content. If the event is too long to be held, only the usage is
/// read. Only the closing event of the Responses API grows so long, because it repeats the whole
/// response.
pub(super) fn read(api: RequestApi, data: &HeldEvent, seen: &mut ResponseFacts) -> bool {
    seen.any = true;
    if data.is_cut() {
        let closing = api == RequestApi::Responses;
        data.read_usage_at_end(if closing { 2 } else { 1 }, &mut seen.usage);
        seen.finished |= closing;
        seen.explained |= closing;
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

fn read_json(api: RequestApi, data: &[u8], seen: &mut ResponseFacts) -> Result<bool, JsonError> {
    let mut content = false;
    let mut reader = JsonReader::new(data);
    let ResponseFacts { usage, finished, explained, error, .. } = seen;
    let (mut is_error, mut code) = (false, None);
    reader.members(|reader, key| match (key.name().as_ref(), api) {
        (b"usage", _) | (b"meta_info", RequestApi::SglangGenerate) => usage::read(usage, reader),
        (b"text" | b"output_ids", RequestApi::SglangGenerate) => value_with_content(reader, &mut content),
        (b"type", RequestApi::Messages | RequestApi::Responses) => {
            let kind = reader.string()?;
            let is_last = kind.is_some_and(|kind| LAST.contains(&kind.raw()));
            *finished |= is_last;
            *explained |= is_last;
            is_error |= kind.is_some_and(|kind| kind.raw() == FAILED);
            Ok(())
        }
        (b"object", _) => {
            is_error |= reader.string()?.is_some_and(|kind| kind.raw() == b"error");
            Ok(())
        }
        (b"code", _) => status(reader, &mut code),
        (b"error", _) => read_error(reader, error),
        (b"delta", RequestApi::Responses) => string_with_content(reader, &mut content),
        (b"response", RequestApi::Responses) => nested_usage(reader, usage),
        (b"delta" | b"content_block", RequestApi::Messages) => object_with_content(reader, &mut content),
        (b"message", RequestApi::Messages) => {
            // Its count of generated tokens is from the moment when the stream opened.
            let completion_tokens = usage.completion_tokens;
            nested_usage(reader, usage)?;
            usage.completion_tokens = completion_tokens;
            Ok(())
        }
        (b"choices", _) => reader.elements(|reader| {
            reader.members(|reader, key| match key.name().as_ref() {
                b"delta" => object_with_content(reader, &mut content),
                b"text" => string_with_content(reader, &mut content),
                b"finish_reason" => {
                    let is_last = reader.peek()? != JsonKind::Null;
                    *finished |= is_last;
                    *explained |= is_last;
                    reader.skip().map(drop)
                }
                b"token_ids" if api == RequestApi::VllmGenerate => value_with_content(reader, &mut content),
                _ => reader.skip().map(drop),
            })
        }),
        _ => reader.skip().map(drop),
    })?;
    if is_error {
        *error = Some(code);
    }
    reader.end()?;
    Ok(content)
}

fn nested_usage(reader: &mut JsonReader<'_>, usage: &mut TokenUsage) -> Result<(), JsonError> {
    reader.members(|reader, key| match key.name().as_ref() {
        b"usage" => usage::read(usage, reader),
        _ => reader.skip().map(drop),
    })
}

fn object_with_content(reader: &mut JsonReader<'_>, content: &mut bool) -> Result<(), JsonError> {
    reader.members(|reader, key| match key.name().as_ref() {
        b"content" | b"reasoning_content" | b"reasoning" | b"refusal" | b"tool_calls" | b"function_call" | b"audio" | b"text"
        | b"thinking" | b"partial_json" | b"name" => value_with_content(reader, content),
        _ => reader.skip().map(drop),
    })
}

fn string_with_content(reader: &mut JsonReader<'_>, content: &mut bool) -> Result<(), JsonError> {
    *content |= reader.string()?.is_some_and(|text| !text.raw().is_empty());
    Ok(())
}

/// Sets `content` if the next value is a string, array or object that is not empty.
fn value_with_content(reader: &mut JsonReader<'_>, content: &mut bool) -> Result<(), JsonError> {
    match reader.peek()? {
        JsonKind::String => string_with_content(reader, content),
        JsonKind::Array => reader.elements(|reader| {
            *content = true;
            reader.skip().map(drop)
        }),
        JsonKind::Object => reader.members(|reader, _| {
            *content = true;
            reader.skip().map(drop)
        }),
        JsonKind::Number | JsonKind::Boolean | JsonKind::Null => reader.skip().map(drop),
    }
}
