//! Reads the data that picking needs from the body of an inference request. One pass also checks
//! that the body is JSON, or finds the model of a form ([`form`]). The body may come in pieces.
//! [`BodyReader`] reads each piece as it arrives, and keeps only the state between two bytes.
//!
//! **Lenient.** The engine checks its own fields. The only errors are: the body is not JSON or not
//! an object, or it has no model although the API needs one ([`RequestApi::needs_model`]). Any
//! other field of an unexpected type counts as absent. Unknown fields are skipped.
//!
//! **Like engines.** If a top-level key is duplicated, the last one is used. Names may have escapes
//! (`"mod\u0065l"`).
//!
//! **The prompt** goes to a [`PromptSink`] in pieces: tools, system and turns separately, because
//! templates have them in this order and bodies in any order. Within one message, the client's
//! order is kept. Pieces are the body's own bytes, still escaped. They need not be unescaped,
//! because they are only hashed to find requests with a common start, and a client always escapes
//! in the same way. Clients that escape differently share no prefix, which only costs a cache hit.
//! Fields that differ between turns without changing the prompt (`cache_control`, ids) are left
//! out.

use crate::api::RequestApi;
use crate::json::push::JsonPush;
use crate::json::{DEPTH_MAX, JsonError};
use std::fmt;
use std::ops::Range;

mod fields;
pub mod form;
mod grpc;
mod prompt_sink;

use fields::{BodyFields, ModelField, ModelName};
use form::{FormReader, InvalidForm};
pub use prompt_sink::{PromptPiece, PromptPieces, PromptSection, PromptSink};

/// The maximum number of bytes kept of a token whose end has not arrived. Real keys and model names
/// are much shorter. A body with a longer token is read when it is complete.
const KEPT_BYTES_MAX: usize = 16_384;

/// The fields of a request body that routing and accounting read.
#[derive(Clone, Debug)]
pub struct ParsedRequest<P> {
    /// The requested model, unescaped. The name is empty only if the API does not need a model.
    pub model: String,
    /// The position of the model's JSON string in the body, quotes included. `None` without a
    /// model, and in protobuf, because replacing a string there would change the lengths around it.
    pub model_span: Option<Range<usize>>,
    /// Whether the client wants a stream of events.
    pub stream: bool,
    /// Whether the body names an object that an engine may have stored: an earlier response, a
    /// conversation or a prompt.
    pub names_id: bool,
    /// Whether the client wants a last event with `usage` (`stream_options.include_usage`).
    pub include_usage: bool,
    /// Maximum number of tokens that the engine may generate for each output, clamped to `u32`.
    pub max_tokens: Option<u32>,
    /// Whether one reply may have several outputs.
    pub several_outputs: bool,
    /// Contents of `cache_salt`, still escaped. Empty if the body has none.
    pub cache_salt: Vec<u8>,
    pub(crate) salt: SaltPlace,
    /// The position where the object begins.
    pub(crate) object_start: usize,
    /// Images, videos, audio clips and files in the prompt.
    pub media_items: u32,
    /// Bytes of text in the prompt, as the body spells them, without media and token ids.
    pub prompt_bytes: usize,
    /// Token ids in the prompt, if the client sent ids instead of text.
    pub prompt_token_ids: u32,
    /// The text of the prompt.
    pub prompt: P,
    /// The hash of the id of the stored answer that the request continues (`previous_response_id`,
    /// `conversation`); 0 if it names none.
    pub stored_id: u64,
    model_escaped: Option<Box<[u8]>>,
}

/// Where a body has the `cache_salt` value that the engine reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SaltPlace {
    /// The body has no such member.
    NoMember,
    Absent,
    At(Range<usize>),
    /// The value is an object or an array. Such a value cannot contain another client's salt,
    /// because no client knows one.
    Unwritable,
}

/// Reads a body that comes in pieces.
#[derive(Debug)]
pub struct BodyReader<P> {
    api: RequestApi,
    json: JsonPush,
    /// The reader of a form; `None` for JSON.
    form: Option<FormReader>,
    fields: BodyFields<P>,
    /// The reason why the body is refused, whatever follows.
    error: Option<BodyError>,
    read: usize,
    /// The length of the white space before the object.
    object_start: usize,
}

/// The reasons why a body is refused. The client caused each of these errors. Sending the same body
/// again does not help.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BodyError {
    /// The body is not a gRPC message with JSON in it.
    NotGrpc,
    /// The body is not JSON.
    InvalidJson {
        /// The first invalid byte, in bytes from the start of the body.
        offset: usize,
    },
    /// The `content-type` names a form, but the body is not a form.
    InvalidForm(InvalidForm),
    /// The body is JSON, but not an object.
    NotAnObject,
    /// The body has no `model`.
    MissingModel,
    /// `model` is not a string.
    ModelNotAString,
    /// `model` is the empty string.
    EmptyModel,
    /// The body is nested deeper than the reader accepts.
    TooDeep {
        /// The greatest depth that is read.
        max: u32,
    },
}

/// Reads `body` as a request to `api`. Do not call it for [`RequestApi::Other`], whose body is
/// opaque.
///
/// # Errors
/// Returns [`BodyError`] if the body cannot be read, or if its model is missing or unusable.
/// Invalid JSON has precedence over the model.
pub fn parse<P: PromptSink>(
    api: RequestApi,
    body: &[u8],
    prompt: P,
) -> Result<ParsedRequest<P>, BodyError> {
    BodyReader::new(api, prompt).finish(unwrapped(api, body)?)
}

/// The JSON in a body.
pub(crate) fn unwrapped(api: RequestApi, body: &[u8]) -> Result<&[u8], BodyError> {
    if api.is_grpc() {
        grpc::json(body).ok_or(BodyError::NotGrpc)
    } else {
        Ok(body)
    }
}

// === impl ParsedRequest ===

impl<P> ParsedRequest<P> {
    /// The JSON string of the model as it is in the body, quotes included.
    #[must_use]
    pub fn model_literal(&self) -> Vec<u8> {
        [
            b"\"",
            self.model_escaped
                .as_deref()
                .unwrap_or(self.model.as_bytes()),
            b"\"",
        ]
        .concat()
    }
}

// === impl BodyReader ===

impl<P: PromptSink> BodyReader<P> {
    /// Begins to read a request to `api`. Do not call it for APIs whose body is not JSON itself
    /// ([`RequestApi::is_grpc`]).
    pub fn new(api: RequestApi, prompt: P) -> Self {
        Self {
            api,
            json: JsonPush::new(),
            form: None,
            fields: BodyFields::new(api, prompt),
            error: None,
            read: 0,
            object_start: 0,
        }
    }

    /// Reads the body as a form with this boundary: a request to [`RequestApi::Task`].
    #[must_use]
    pub fn with_boundary(mut self, boundary: &[u8]) -> Self {
        self.form = Some(FormReader::new(boundary));
        self
    }

    /// Reads a piece that is not the last one.
    pub fn read(&mut self, piece: &[u8]) {
        self.push(piece, false);
    }

    /// Bytes that were read.
    #[must_use]
    pub fn bytes_read(&self) -> usize {
        self.read
    }

    /// The number of bytes kept of a token whose end has not arrived.
    #[must_use]
    pub fn bytes_kept(&self) -> usize {
        self.form
            .as_ref()
            .map_or(self.json.kept_bytes(), FormReader::bytes_kept)
    }

    /// The prompt so far.
    #[must_use]
    pub fn prompt(&self) -> &P {
        &self.fields.prompt
    }

    /// Whether the reader keeps too much of the body. In that case the host drops the reader, and
    /// reads the body when it is complete.
    #[must_use]
    pub fn keeps_too_much(&self) -> bool {
        self.bytes_kept() > KEPT_BYTES_MAX
    }

    /// Reads the last piece.
    ///
    /// # Errors
    /// Returns [`BodyError`] if the body cannot be read, or if its model is missing or unusable.
    /// Invalid JSON has precedence over the model.
    #[inline(never)] // several callers, and the wasm module should be small
    pub fn finish(mut self, piece: &[u8]) -> Result<ParsedRequest<P>, BodyError> {
        self.push(piece, true);
        if let Some(error) = self.error {
            return Err(error);
        }
        let mut fields = self.fields;
        if let Some(form) = self.form {
            fields.is_object = true;
            fields.model = form
                .into_model()
                .map_or(ModelField::Missing, |(text, span)| {
                    ModelField::Named(ModelName::of_form(text, span))
                });
        }
        if !fields.is_object {
            return Err(BodyError::NotAnObject);
        }
        let model = match std::mem::replace(&mut fields.model, ModelField::Missing) {
            ModelField::Named(model) if !model.text.is_empty() => Some(model),
            _ if !self.api.needs_model() => None,
            ModelField::Named(_) => return Err(BodyError::EmptyModel),
            ModelField::NotAString => return Err(BodyError::ModelNotAString),
            ModelField::Missing => return Err(BodyError::MissingModel),
        };
        let counts = fields.counts();
        let (model, model_span, model_escaped) = model
            .map(|model| (model.text, Some(model.span), model.escaped))
            .unwrap_or_default();
        Ok(ParsedRequest {
            model,
            model_span: model_span.filter(|_| !self.api.is_grpc()),
            model_escaped,
            stream: fields.flags.stream,
            names_id: fields.flags.names_id,
            include_usage: fields.flags.include_usage,
            several_outputs: fields.flags.several_outputs,
            max_tokens: fields.max_completion_tokens.or(fields.max_tokens),
            cache_salt: fields.cache_salt,
            salt: fields.salt,
            object_start: self.object_start,
            media_items: counts.media_items,
            prompt_bytes: counts.text_bytes,
            prompt_token_ids: counts.token_ids,
            prompt: fields.prompt,
            stored_id: fields.stored_id,
        })
    }

    #[inline(never)] // several callers, and the wasm module should be small
    fn push(&mut self, piece: &[u8], last: bool) {
        if self.object_start == self.read {
            self.object_start += piece
                .iter()
                .take_while(|byte| byte.is_ascii_whitespace())
                .count();
        }
        self.read += piece.len();
        if self.error.is_none() {
            self.error = match &mut self.form {
                Some(form) => form.push(piece, last).err().map(BodyError::InvalidForm),
                None => self
                    .json
                    .push(&mut self.fields, piece, last)
                    .err()
                    .map(BodyError::from),
            };
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
            Self::NotGrpc => write!(
                f,
                "the request body is not one uncompressed gRPC message with an `http_body`"
            ),
            Self::InvalidJson { offset } => {
                write!(f, "the request body is not valid JSON (at byte {offset})")
            }
            Self::InvalidForm(InvalidForm { offset, expected }) => {
                write!(
                    f,
                    "the request body is not a form that is read here: at byte {offset}, {expected} is expected"
                )
            }
            Self::NotAnObject => write!(f, "the request body must be a JSON object"),
            Self::MissingModel => write!(f, "the request body has no `model`"),
            Self::ModelNotAString => write!(f, "`model` must be a string"),
            Self::EmptyModel => write!(f, "`model` must not be empty"),
            Self::TooDeep { max } => {
                write!(f, "the request body is nested deeper than {max} levels")
            }
        }
    }
}

impl std::error::Error for BodyError {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::steps;

    /// Reads bodies for which a careless reader takes quadratic time, each at a size and at four
    /// times that size.
    #[test]
    fn work_grows_with_the_body_and_no_faster() {
        for (before, repeated, after) in [
            (r#"{"#, r#""some_key":1,"#, r#""model":"m"}"#),
            (r#"{"#, r#""mod\u0065l":"\u006d","#, r#""model":"m"}"#),
            (
                r#"{"#,
                r#""messages":[{"role":"user","content":"x"}],"#,
                r#""model":"m"}"#,
            ),
            (
                r#"{"model":"m","messages":["#,
                r#"{"role":"user","content":"x"},"#,
                r#"{}]}"#,
            ),
            (r#"{"model":"m","messages":["#, r#"1,"#, r#"1]}"#),
            (
                r#"{"model":"m","messages":["#,
                r#"[[[[[[[1]]]]]]],"#,
                r#"1]}"#,
            ),
            (r#"{"model":"m","messages":""#, r#"\n"#, r#""}"#),
            (r#"{"model":"m","messages":""#, r#"\\"#, r#""}"#),
        ] {
            let work = |times: usize| {
                let body = [before, &repeated.repeat(times), after].concat();
                let (parsed, steps) =
                    steps::count(|| parse(RequestApi::ChatCompletions, body.as_bytes(), ()));
                assert_eq!(
                    parsed.map(|parsed| parsed.model),
                    Ok("m".to_owned()),
                    "{repeated}"
                );
                steps as f64
            };
            let once = work(10_000);
            let fourfold = work(40_000);
            assert!(
                (3.0..4.1).contains(&(fourfold / once)),
                "{repeated}: {once} steps, then {fourfold}"
            );
        }
    }
}
