//! The fields of a request body. The API's row in [`crate::api`] says which top-level members are
//! read, and which belong to the prompt.
//!
//! Every API nests the same items in a different way: text, media, and objects (messages, parts,
//! items, tool calls) that contain more of these. So one function reads all prompts: a string is
//! text, and the items of an array are read in turn. [`content_of`] gives the meaning of an
//! object's field by its name.

use std::ops::Range;

use super::SaltPlace;
use super::prompt_sink::{PromptSection, PromptSink};
use crate::api::{ApiRow, Field, RequestApi, SamplingLimit};
use crate::json::visitor::{JsonVisitor, Wanted};
use crate::json::write::JsonWriter;
use crate::json::{JsonKind, JsonStr};
use crate::number;

/// The maximum number of levels of nested objects (message, part, tool result, its part) that are
/// read by field. Anything deeper is one piece of text.
const LEVELS_MAX: u8 = 4;

/// The fields seen so far. A later duplicate replaces an earlier one.
#[derive(Debug)]
pub(super) struct BodyFields<P> {
    api: &'static ApiRow,
    /// The containers whose content is read, the innermost last.
    walked: Vec<Walked>,
    /// The meaning of the next value of an object.
    next: Field,
    /// The piece whose bytes are arriving.
    raw: RawPiece,
    pub(super) is_object: bool,
    pub(super) model: ModelField,
    pub(super) flags: BodyFlags,
    pub(super) max_completion_tokens: Option<u32>,
    pub(super) max_tokens: Option<u32>,
    pub(super) cache_salt: Vec<u8>,
    /// The place where the engine reads the salt.
    pub(super) salt: SaltPlace,
    /// The hash of the id of the stored answer that the request continues; 0 if it names none.
    pub(super) stored_id: u64,
    counts: [SectionCounts; 3],
    pub(super) prompt: P,
}

/// Members of the body that are on or off.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BodyFlags {
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    /// Whether the body names an object that an engine may have stored.
    pub(super) names_id: bool,
    /// Whether one reply may have several outputs, each as long as `max_tokens` allows.
    pub(super) several_outputs: bool,
}

#[derive(Debug)]
pub(super) enum ModelField {
    Missing,
    NotAString,
    Named(ModelName),
}

#[derive(Debug)]
pub(super) struct ModelName {
    pub(super) text: String,
    /// The position of its JSON string, quotes included; in a form, that of the name.
    pub(super) span: Range<usize>,
    /// The contents of the JSON string, if they differ from the text.
    pub(super) escaped: Option<Box<[u8]>>,
}

// === impl ModelName ===

impl ModelName {
    /// A name from a form, which is not escaped there.
    pub(super) fn of_form(text: String, span: Range<usize>) -> Self {
        let mut literal = JsonWriter::default();
        literal.string(&text);
        let literal = literal.finish().into_bytes();
        let escaped = literal
            .strip_prefix(b"\"")
            .and_then(|rest| rest.strip_suffix(b"\""))
            .unwrap_or_default();
        let escaped = (escaped != text.as_bytes()).then(|| escaped.into());
        Self {
            text,
            span,
            escaped,
        }
    }
}

/// Sums over the pieces of a section.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SectionCounts {
    pub(super) media_items: u32,
    pub(super) text_bytes: usize,
    pub(super) token_ids: u32,
}

/// A container whose content is read.
#[derive(Clone, Copy, Debug)]
enum Walked {
    Body,
    Conversation,
    StreamOptions,
    SamplingParams(SamplingLimit),
    /// A message, part or item.
    Object(PromptSection, u8),
    Array(PromptSection, u8),
}

#[derive(Clone, Copy, Debug)]
enum RawPiece {
    Text(PromptSection),
    Media(PromptSection),
    TokenIds(PromptSection),
}

// === impl BodyFields ===

impl<P: PromptSink> BodyFields<P> {
    pub(super) fn new(api: RequestApi, prompt: P) -> Self {
        Self {
            api: api.row(),
            walked: Vec::new(),
            next: Field::Body,
            raw: RawPiece::Text(PromptSection::Turns),
            is_object: false,
            model: ModelField::Missing,
            flags: BodyFlags::default(),
            max_completion_tokens: None,
            max_tokens: None,
            cache_salt: Vec::new(),
            salt: SaltPlace::NoMember,
            stored_id: 0,
            counts: [SectionCounts::default(); 3],
            prompt,
        }
    }

    /// The sums over all sections.
    pub(super) fn counts(&self) -> SectionCounts {
        self.counts
            .iter()
            .fold(SectionCounts::default(), |sum, section| SectionCounts {
                media_items: sum.media_items.saturating_add(section.media_items),
                text_bytes: sum.text_bytes.saturating_add(section.text_bytes),
                token_ids: sum.token_ids.saturating_add(section.token_ids),
            })
    }

    fn count(&mut self, section: PromptSection, count: impl FnOnce(&mut SectionCounts)) {
        if let Some(counts) = self.counts.get_mut(section as usize) {
            count(counts);
        }
    }

    /// Returns the meaning of a top-level field. A field of the prompt starts its section again.
    fn field(&mut self, name: &[u8]) -> Field {
        if self.salt == SaltPlace::NoMember {
            self.salt = SaltPlace::Absent;
        }
        let field = self.api.field(name);
        if let Field::Text(section) | Field::Content(section, _) = field {
            self.prompt.clear(section);
            self.count(section, |counts| *counts = SectionCounts::default());
        }
        field
    }

    /// Forgets the earlier value of a field that the body repeats, as engines do. The fact that the
    /// body names an id stays, because several fields may name an id.
    fn reset(&mut self, field: Field, kind: JsonKind) {
        match field {
            Field::Body => self.is_object = kind == JsonKind::Object,
            Field::Model => self.model = ModelField::NotAString,
            Field::Stream => self.flags.stream = false,
            Field::StreamOptions | Field::IncludeUsage => self.flags.include_usage = false,
            Field::MaxCompletionTokens => self.max_completion_tokens = None,
            Field::MaxTokens | Field::SamplingParams(_) => self.max_tokens = None,
            Field::CacheSalt => {
                self.cache_salt.clear();
                self.salt = SaltPlace::Unwritable;
            }
            Field::StoredId | Field::StoredPrompt => {
                self.flags.names_id |= kind != JsonKind::Null;
            }
            // An array may be several prompts.
            Field::Content(_, 0) => {
                self.flags.several_outputs |= kind == JsonKind::Array && self.api.several_prompts;
            }
            Field::Outputs
            | Field::Content(..)
            | Field::Text(_)
            | Field::Media(_)
            | Field::Other => {}
        }
    }

    fn walk(&mut self, container: Walked) -> Wanted {
        self.walked.push(container);
        Wanted::Inside
    }

    fn text(&mut self, kind: JsonKind, section: PromptSection) -> Wanted {
        self.piece(kind, RawPiece::Text(section))
    }

    /// `null` is not a piece, because clients write it for fields they leave out.
    fn piece(&mut self, kind: JsonKind, piece: RawPiece) -> Wanted {
        self.raw = piece;
        if kind == JsonKind::Null {
            Wanted::Nothing
        } else {
            Wanted::Raw
        }
    }

    /// Reads a prompt: a string, or an array of strings, objects and token ids. Any other value is
    /// not a prompt. An array that begins with a number is a list of token ids and one piece,
    /// because no API mixes ids and text.
    fn content(
        &mut self,
        kind: JsonKind,
        first: Option<u8>,
        section: PromptSection,
        level: u8,
    ) -> Wanted {
        match kind {
            _ if level >= LEVELS_MAX => self.text(kind, section),
            JsonKind::String => self.text(kind, section),
            JsonKind::Object => self.walk(Walked::Object(section, level + 1)),
            JsonKind::Array if first.is_some_and(|byte| byte == b'-' || byte.is_ascii_digit()) => {
                self.piece(kind, RawPiece::TokenIds(section))
            }
            JsonKind::Array => self.walk(Walked::Array(section, level)),
            JsonKind::Number | JsonKind::Boolean | JsonKind::Null => Wanted::Nothing,
        }
    }
}

impl<P: PromptSink> JsonVisitor for BodyFields<P> {
    #[inline(never)] // several callers, and the wasm module should be small
    fn key(&mut self, key: &JsonStr<'_>) {
        let name = key.name();
        self.next = match (self.walked.last(), name.as_ref()) {
            (Some(Walked::Body), name) => self.field(name),
            (Some(Walked::StreamOptions), b"include_usage") => Field::IncludeUsage,
            (Some(Walked::Conversation), b"id") => Field::StoredId,
            (Some(Walked::SamplingParams(SamplingLimit::MaxTokens)), b"max_tokens")
            | (Some(Walked::SamplingParams(SamplingLimit::MaxNewTokens)), b"max_new_tokens") => {
                Field::MaxTokens
            }
            (Some(Walked::SamplingParams(_)), b"n") => Field::Outputs,
            (Some(&Walked::Object(section, level)), name) => content_of(name, section, level),
            _ => Field::Other,
        };
    }

    #[inline(never)] // several callers, and the wasm module should be small
    fn begin(&mut self, kind: JsonKind, first: Option<u8>) -> Wanted {
        let field = match self.walked.last() {
            // An array inside an array: one prompt of several, or a list where no API has one. An
            // array is one level too, so brackets alone cannot nest deeper than objects.
            Some(&Walked::Array(section, level)) => {
                Field::Content(section, level + u8::from(kind == JsonKind::Array))
            }
            _ => self.next,
        };
        self.reset(field, kind);
        match field {
            Field::Body if kind == JsonKind::Object => self.walk(Walked::Body),
            Field::StreamOptions if kind == JsonKind::Object => self.walk(Walked::StreamOptions),
            Field::SamplingParams(limit) if kind == JsonKind::Object => {
                self.walk(Walked::SamplingParams(limit))
            }
            Field::StoredId if kind == JsonKind::Object => self.walk(Walked::Conversation),
            Field::Model | Field::StoredId if kind == JsonKind::String => Wanted::Whole,
            Field::Stream | Field::IncludeUsage if kind == JsonKind::Boolean => Wanted::Whole,
            Field::CacheSalt if !matches!(kind, JsonKind::Object | JsonKind::Array) => {
                Wanted::Whole
            }
            Field::MaxCompletionTokens | Field::MaxTokens | Field::Outputs
                if kind == JsonKind::Number =>
            {
                Wanted::Whole
            }
            Field::Content(section, level) => self.content(kind, first, section, level),
            Field::Text(section) => self.text(kind, section),
            Field::Media(section) => self.piece(kind, RawPiece::Media(section)),
            _ => Wanted::Nothing,
        }
    }

    fn string(&mut self, string: &JsonStr<'_>) {
        match self.next {
            Field::Model => {
                let text = string.text().into_owned();
                let escaped = (text.as_bytes() != string.raw()).then(|| string.raw().into());
                self.model = ModelField::Named(ModelName {
                    text,
                    span: string.literal_span(),
                    escaped,
                });
            }
            Field::CacheSalt => {
                self.cache_salt = string.raw().to_vec();
                self.salt = SaltPlace::At(string.literal_span());
            }
            Field::StoredId => self.stored_id = scheduler::name_hash(&string.text()),
            _ => {}
        }
    }

    fn scalar(&mut self, text: &[u8], start: usize) {
        // A count is the integer part of a number, clamped. `as` saturates, which is the intended
        // clamp; an exponent beyond f64 reads as infinity.
        let count = || {
            number::parse(text)
                .filter(|value| !value.is_sign_negative())
                .map(|value| value as u32)
        };
        match self.next {
            Field::Stream => self.flags.stream = text == b"true",
            Field::IncludeUsage => self.flags.include_usage = text == b"true",
            Field::MaxCompletionTokens => self.max_completion_tokens = count(),
            Field::MaxTokens => self.max_tokens = count(),
            Field::CacheSalt => self.salt = SaltPlace::At(start..start + text.len()),
            Field::Outputs => self.flags.several_outputs |= count() != Some(1),
            _ => {}
        }
    }

    #[inline(never)] // several callers, and the wasm module should be small
    fn raw(&mut self, bytes: &[u8]) {
        match self.raw {
            RawPiece::Text(section) => {
                self.count(section, |counts| counts.text_bytes += bytes.len());
                self.prompt.text(section, bytes);
            }
            RawPiece::TokenIds(section) => self.prompt.text(section, bytes),
            RawPiece::Media(section) => self.prompt.media(section, bytes),
        }
    }

    #[inline(never)] // several callers, and the wasm module should be small
    fn raw_end(&mut self, numbers: u32) {
        match self.raw {
            RawPiece::Text(section) => self.prompt.text_end(section),
            RawPiece::TokenIds(section) => {
                self.count(section, |counts| {
                    counts.token_ids = counts.token_ids.saturating_add(numbers);
                });
                self.prompt.text_end(section);
            }
            RawPiece::Media(section) => {
                self.count(section, |counts| {
                    counts.media_items = counts.media_items.saturating_add(1);
                });
                self.prompt.media_end(section);
            }
        }
    }

    fn close(&mut self) {
        self.walked.pop();
    }
}

/// Returns the meaning of a field in a message, part or item of any API. The function leaves out
/// some fields on purpose: ids, `type`, `status`, `cache_control`, `signature`, `detail`.
fn content_of(name: &[u8], section: PromptSection, level: u8) -> Field {
    match name {
        b"content" | b"output" | b"summary" => Field::Content(section, level),
        b"role" | b"name" | b"text" | b"refusal" | b"reasoning" | b"reasoning_content"
        | b"thinking" | b"tool_calls" | b"function_call" | b"arguments" | b"input" => {
            Field::Text(section)
        }
        b"image_url" | b"input_image" | b"image" | b"video_url" | b"video" | b"audio_url"
        | b"input_audio" | b"audio" | b"file" | b"file_data" | b"file_url" | b"file_id"
        | b"image_embeds" | b"source" => Field::Media(section),
        _ => Field::Other,
    }
}
