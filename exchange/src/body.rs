//! Reads what picking needs from the body of an inference request, in one pass that also checks
//! that the body is JSON.
//!
//! **Lenient.** The engine checks its own fields. Errors here are only: not JSON, not an object, no
//! model where the API needs one ([`RequestApi::needs_model`]). Any other field of an unexpected
//! type counts as absent; unknown fields are skipped.
//!
//! **Like engines.** The last of duplicate top-level keys counts, and names may have escapes
//! (`"mod\u0065l"`).
//!
//! **The prompt** becomes [`PromptPiece`]s in the order of the engine's template: tools, system,
//! then the turns (within one message, the client's order). Pieces are the body's own bytes, still
//! escaped: they are only hashed, to find requests with the same start, and a client escapes the
//! same way each time. So clients that escape differently do not share a prefix, which costs a
//! cache hit and nothing else. Fields that differ between turns without changing the prompt
//! (`cache_control`, ids) are left out.

use crate::api::RequestApi;
use crate::json::{DEPTH_MAX, JsonError, JsonKind, JsonReader, JsonStr};
use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

mod grpc;
mod pieces;

pub use pieces::{PIECES_MAX, PromptPiece};
use pieces::{PromptPieces, PromptSection};

/// A request body, read.
#[derive(Clone, Debug)]
pub struct ParsedRequest<'b> {
    /// The requested model, unescaped; empty only where the API does not need one.
    pub model: Cow<'b, str>,
    /// The position of its JSON string in the body, quotes included. `None` without a model, and in
    /// protobuf, where replacing a string would change the lengths around it.
    pub model_span: Option<Range<usize>>,
    /// Whether the client wants a stream of events.
    pub stream: bool,
    /// Whether the client wants a last event with `usage` (`stream_options.include_usage`).
    pub include_usage: bool,
    /// Most tokens the engine may generate, clamped to `u32`.
    pub max_tokens: Option<u32>,
    /// Contents of `cache_salt`, still escaped; empty if absent.
    pub cache_salt: &'b [u8],
    /// Images, videos, audio clips and files in the prompt.
    pub media_items: u32,
    /// Bytes of text in the prompt, as the body spells them; media and token ids not included.
    pub prompt_bytes: usize,
    /// Token ids in the prompt, if the client sent ids instead of text.
    pub prompt_token_ids: u32,
    pieces: PromptPieces<'b>,
}

/// Why a body is refused. The client caused each of these errors; sending the same body again does
/// not help.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BodyError {
    /// Not a gRPC message with JSON in it.
    NotGrpc,
    /// Not JSON.
    InvalidJson {
        /// The first invalid byte, in bytes from the start of the body.
        offset: usize,
    },
    /// JSON, but no object.
    NotAnObject,
    /// No `model`.
    MissingModel,
    /// `model` is not a string.
    ModelNotAString,
    /// `model` is the empty string.
    EmptyModel,
    /// Nested deeper than the reader accepts.
    TooDeep {
        /// The greatest depth that is read.
        max: u32,
    },
}

/// Reads `body` as a request to `api`. Do not call it for [`RequestApi::Other`], whose body is
/// opaque.
///
/// # Errors
/// [`BodyError`]: invalid JSON first, wherever it is, then a missing or unusable model.
pub fn parse<'b>(api: RequestApi, body: &'b [u8]) -> Result<ParsedRequest<'b>, BodyError> {
    let body = if api.is_grpc() { grpc::json(body).ok_or(BodyError::NotGrpc)? } else { body };
    let mut reader = JsonReader::new(body);
    let object = reader.peek()? == JsonKind::Object;
    let mut fields = BodyFields::new(body);
    reader.members(|reader, key| fields.read(api, reader, &key))?;
    reader.end()?;
    if !object {
        return Err(BodyError::NotAnObject);
    }
    let model = match fields.model {
        ModelField::Named(model) if !model.raw().is_empty() => Some(model),
        _ if !api.needs_model() => None,
        ModelField::Named(_) => return Err(BodyError::EmptyModel),
        ModelField::NotAString => return Err(BodyError::ModelNotAString),
        ModelField::Missing => return Err(BodyError::MissingModel),
    };
    Ok(ParsedRequest {
        model: model.map_or_else(Cow::default, |model| model.text()),
        model_span: model.filter(|_| !api.is_grpc()).map(|model| model.literal_span()),
        stream: fields.stream,
        include_usage: fields.include_usage,
        max_tokens: fields.max_completion_tokens.or(fields.max_tokens),
        cache_salt: fields.cache_salt,
        media_items: fields.pieces.media_items(),
        prompt_bytes: fields.pieces.text_bytes(),
        prompt_token_ids: fields.pieces.token_ids(),
        pieces: fields.pieces,
    })
}

/// The top-level fields seen so far.
struct BodyFields<'b> {
    model: ModelField<'b>,
    stream: bool,
    include_usage: bool,
    max_completion_tokens: Option<u32>,
    max_tokens: Option<u32>,
    cache_salt: &'b [u8],
    pieces: PromptPieces<'b>,
}

enum ModelField<'b> {
    Missing,
    NotAString,
    Named(JsonStr<'b>),
}

// === impl ParsedRequest ===

impl<'b> ParsedRequest<'b> {
    /// The prompt, in the order the engine sees it. Hash a boundary after each piece, because
    /// `["ab","c"]` is not `["a","bc"]`.
    pub fn prompt(&self) -> impl Iterator<Item = PromptPiece<'b>> + '_ {
        self.pieces.iter()
    }
}

// === impl BodyFields ===

impl<'b> BodyFields<'b> {
    fn new(body: &'b [u8]) -> Self {
        Self {
            model: ModelField::Missing,
            stream: false,
            include_usage: false,
            max_completion_tokens: None,
            max_tokens: None,
            cache_salt: &[],
            pieces: PromptPieces::new(body),
        }
    }

    /// Reads the value of one top-level field. A later duplicate replaces an earlier one.
    fn read(&mut self, api: RequestApi, reader: &mut JsonReader<'b>, key: &JsonStr<'b>) -> Result<(), JsonError> {
        match (key.name().as_ref(), api) {
            (b"model", _) => self.model = reader.string()?.map_or(ModelField::NotAString, ModelField::Named),
            (b"stream", _) => self.stream = reader.boolean()?.unwrap_or(false),
            (b"stream_options", _) => {
                self.include_usage = false;
                return reader.members(|reader, key| match key.name().as_ref() {
                    b"include_usage" => reader.boolean().map(|value| self.include_usage = value.unwrap_or(false)),
                    _ => reader.skip().map(drop),
                });
            }
            (b"max_completion_tokens", RequestApi::ChatCompletions | RequestApi::VertexChat | RequestApi::Invocations) => {
                self.max_completion_tokens = reader.count()?;
            }
            (
                b"max_tokens",
                RequestApi::ChatCompletions
                | RequestApi::VertexChat
                | RequestApi::Completions
                | RequestApi::Messages
                | RequestApi::Invocations,
            ) => {
                self.max_tokens = reader.count()?;
            }
            (b"max_output_tokens", RequestApi::Responses | RequestApi::VertexPredict) => self.max_tokens = reader.count()?,
            (b"sampling_params", RequestApi::VllmGenerate | RequestApi::SglangGenerate) => {
                self.max_tokens = None;
                return reader.members(|reader, key| match (key.name().as_ref(), api) {
                    (b"max_tokens", RequestApi::VllmGenerate) | (b"max_new_tokens", RequestApi::SglangGenerate) => {
                        reader.count().map(|count| self.max_tokens = count)
                    }
                    _ => reader.skip().map(drop),
                });
            }
            (b"extra_key", RequestApi::SglangGenerate) | (b"cache_salt", _) => {
                self.cache_salt = reader.string()?.map_or(&[], |salt| salt.raw());
            }
            (name, _) => return self.read_prompt(name, api, reader),
        }
        Ok(())
    }

    /// Reads a field if it belongs to the prompt.
    fn read_prompt(&mut self, name: &[u8], api: RequestApi, reader: &mut JsonReader<'b>) -> Result<(), JsonError> {
        match (name, api) {
            (_, RequestApi::Render | RequestApi::CountTokens) => reader.skip().map(drop), // nothing is generated, so nothing is cached
            (b"tools", _) => self.pieces.raw(PromptSection::Tools, reader),
            (b"system", RequestApi::Messages) | (b"instructions", RequestApi::Responses | RequestApi::VertexPredict) => {
                self.pieces.content(PromptSection::System, reader)
            }
            (
                b"messages",
                RequestApi::ChatCompletions
                | RequestApi::VertexChat
                | RequestApi::Messages
                | RequestApi::Embeddings
                | RequestApi::Invocations,
            )
            | (b"prompt", RequestApi::Completions | RequestApi::Images | RequestApi::Invocations)
            | (b"input", RequestApi::Responses | RequestApi::VertexPredict | RequestApi::Embeddings | RequestApi::Invocations)
            | (b"items", RequestApi::Conversations)
            | (b"token_ids", RequestApi::VllmGenerate)
            | (b"text" | b"input_ids", RequestApi::SglangGenerate) => self.pieces.content(PromptSection::Turns, reader),
            // The prompt's tokens mark the places of media, with the same mark for all media. So
            // the media are hashed first.
            (b"features", RequestApi::VllmGenerate) | (b"image_data" | b"video_data" | b"audio_data", RequestApi::SglangGenerate) => {
                self.pieces.media(PromptSection::System, reader)
            }
            _ => reader.skip().map(drop),
        }
    }
}

// === impl BodyError ===

impl From<JsonError> for BodyError {
    fn from(error: JsonError) -> Self {
        match error {
            JsonError::Invalid { offset } => Self::InvalidJson { offset },
            JsonError::TooDeep => Self::TooDeep { max: DEPTH_MAX },
        }
    }
}

impl fmt::Display for BodyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotGrpc => write!(f, "the request body is not one uncompressed gRPC message with an `http_body`"),
            Self::InvalidJson { offset } => write!(f, "the request body is not valid JSON (at byte {offset})"),
            Self::NotAnObject => write!(f, "the request body must be a JSON object"),
            Self::MissingModel => write!(f, "the request body has no `model`"),
            Self::ModelNotAString => write!(f, "`model` must be a string"),
            Self::EmptyModel => write!(f, "`model` must not be empty"),
            Self::TooDeep { max } => write!(f, "the request body is nested deeper than {max} levels"),
        }
    }
}

impl std::error::Error for BodyError {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::steps;

    /// Reads bodies that make a careless reader quadratic, each at a size and at four times that
    /// size.
    #[test]
    fn work_grows_with_the_body_and_no_faster() {
        for (before, repeated, after) in [
            (r#"{"#, r#""some_key":1,"#, r#""model":"m"}"#),
            (r#"{"#, r#""mod\u0065l":"\u006d","#, r#""model":"m"}"#),
            (r#"{"#, r#""messages":[{"role":"user","content":"x"}],"#, r#""model":"m"}"#),
            (r#"{"model":"m","messages":["#, r#"{"role":"user","content":"x"},"#, r#"{}]}"#),
            (r#"{"model":"m","messages":["#, r#"1,"#, r#"1]}"#),
            (r#"{"model":"m","messages":["#, r#"[[[[[[[1]]]]]]],"#, r#"1]}"#),
            (r#"{"model":"m","messages":""#, r#"\n"#, r#""}"#),
            (r#"{"model":"m","messages":""#, r#"\\"#, r#""}"#),
        ] {
            let work = |times: usize| {
                let body = [before, &repeated.repeat(times), after].concat();
                let (parsed, steps) = steps::of(|| parse(RequestApi::ChatCompletions, body.as_bytes()));
                assert_eq!(parsed.map(|parsed| parsed.model.into_owned()), Ok("m".to_owned()), "{repeated}");
                steps as f64
            };
            let (once, fourfold) = (work(10_000), work(40_000));
            assert!((3.0..4.1).contains(&(fourfold / once)), "{repeated}: {once} steps, then {fourfold}");
        }
    }
}
