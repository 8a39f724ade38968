//! Which inference API a request uses, by its path. The API decides how the body is read and which
//! shape errors have.
//!
//! A path is matched by its end, because gateways mount these APIs below a prefix
//! (`/myapp/v1/chat/completions`); the longest match wins. A path without a match in [`APIS`], and
//! not below one of [`STORES`], passes unread. Percent-escapes are resolved first, as engines do:
//! otherwise `/v1/chat/%63ompletions` would be a chat for the engine only.

use std::borrow::Cow;
use std::fmt::Write as _;

/// An API whose bodies are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RequestApi {
    /// OpenAI `/v1/chat/completions`.
    ChatCompletions,
    /// OpenAI `/v1/completions`.
    Completions,
    /// OpenAI `/v1/responses`.
    Responses,
    /// OpenAI `/v1/conversations`.
    Conversations,
    /// OpenAI `/v1/embeddings`.
    Embeddings,
    /// OpenAI `/v1/images/generations`.
    Images,
    /// vLLM `/invocations`, SageMaker's name for all APIs: a chat, a completion or an embedding,
    /// depending on the body.
    Invocations,
    /// vLLM `…/completions/render`: applies the chat template and generates nothing.
    Render,
    /// Anthropic `/v1/messages`.
    Messages,
    /// Anthropic `/v1/messages/count_tokens`: generates nothing.
    CountTokens,
    /// vLLM `/inference/v1/generate`: tokens in, tokens out.
    VllmGenerate,
    SglangGenerate,
    /// Vertex AI's gRPC method for chats: OpenAI JSON inside protobuf.
    VertexChat,
    /// Vertex AI's gRPC methods for raw predictions: OpenAI responses inside protobuf.
    VertexPredict,
    /// Only the `model` of its body is read: a JSON object or a form ([`crate::body::form`]).
    Task,
    /// Any other path: its body is opaque, but an endpoint is picked for it.
    Other {
        /// The shape its errors must have.
        family: ApiFamily,
    },
}

/// The family of APIs, which decides the shape of errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ApiFamily {
    /// `{"error":{"message","type","param","code"}}`
    OpenAi,
    /// `{"type":"error","error":{"type","message"}}`
    Anthropic,
}

/// A known path.
struct ApiRow {
    /// The end of the path.
    suffix: &'static str,
    api: RequestApi,
    whose: &'static str,
    /// Where the prompt is in the body; empty where there is none.
    prompt: &'static str,
}

/// All known paths. [`RequestApi::needs_model`] says which need a `model`.
const APIS: [ApiRow; 26] = [
    row(
        "/chat/completions",
        RequestApi::ChatCompletions,
        "OpenAI",
        "`tools`, `messages`",
    ),
    row(
        "/completions",
        RequestApi::Completions,
        "OpenAI",
        "`prompt`",
    ),
    row(
        "/responses",
        RequestApi::Responses,
        "OpenAI",
        "`tools`, `instructions`, `input`",
    ),
    row(
        "/conversations",
        RequestApi::Conversations,
        "OpenAI",
        "`items`",
    ),
    row(
        "/embeddings",
        RequestApi::Embeddings,
        "OpenAI",
        "`input` or `messages`",
    ),
    row(
        "/images/generations",
        RequestApi::Images,
        "OpenAI",
        "`prompt`",
    ),
    row("/chat/completions/render", RequestApi::Render, "vLLM", ""),
    row("/completions/render", RequestApi::Render, "vLLM", ""),
    row(
        "/messages",
        RequestApi::Messages,
        "Anthropic",
        "`tools`, `system`, `messages`",
    ),
    row(
        "/messages/count_tokens",
        RequestApi::CountTokens,
        "Anthropic",
        "",
    ),
    row(
        "/inference/v1/generate",
        RequestApi::VllmGenerate,
        "vLLM",
        "`features`, `token_ids`",
    ),
    row(
        "/invocations",
        RequestApi::Invocations,
        "vLLM",
        "`tools`, `messages` or `prompt` or `input`",
    ),
    row(
        "/generate",
        RequestApi::SglangGenerate,
        "SGLang",
        "`image_data`, `video_data`, `audio_data`, `text` or `input_ids`",
    ),
    row(
        "PredictionService/ChatCompletions",
        RequestApi::VertexChat,
        "Vertex AI",
        "as OpenAI chats, inside protobuf",
    ),
    row(
        "PredictionService/RawPredict",
        RequestApi::VertexPredict,
        "Vertex AI",
        "as OpenAI responses, inside protobuf",
    ),
    row(
        "PredictionService/StreamRawPredict",
        RequestApi::VertexPredict,
        "Vertex AI",
        "as OpenAI responses, inside protobuf",
    ),
    row("/audio/speech", RequestApi::Task, "OpenAI", "not read"),
    row(
        "/audio/transcriptions",
        RequestApi::Task,
        "OpenAI",
        "not read",
    ),
    row(
        "/audio/translations",
        RequestApi::Task,
        "OpenAI",
        "not read",
    ),
    row("/images/edits", RequestApi::Task, "OpenAI", "not read"),
    row("/tokenize", RequestApi::Task, "vLLM", "not read"),
    row("/detokenize", RequestApi::Task, "vLLM", "not read"),
    row("/pooling", RequestApi::Task, "vLLM", "not read"),
    row("/classify", RequestApi::Task, "vLLM", "not read"),
    row("/score", RequestApi::Task, "vLLM", "not read"),
    row("/rerank", RequestApi::Task, "vLLM", "not read"),
];

/// Where engines keep what they answered, in memory: the answer's id is the next part of the path.
const STORES: [&[u8]; 2] = [b"/responses/", b"/conversations/"];

const fn row(
    suffix: &'static str,
    api: RequestApi,
    whose: &'static str,
    prompt: &'static str,
) -> ApiRow {
    ApiRow {
        suffix,
        api,
        whose,
        prompt,
    }
}

/// The common part of all paths of Anthropic's API (`/v1/messages/batches`).
const ANTHROPIC_PATH: &[u8] = b"/v1/messages";

impl RequestApi {
    /// Returns the API of `method` and `path` (`:path`, with or without a query).
    #[must_use]
    pub fn of(method: &[u8], path: &[u8]) -> Self {
        let path = plain(path);
        let trimmed = path.strip_suffix(b"/").unwrap_or(&path);
        let fitting = APIS
            .iter()
            .filter(|row| method == b"POST" && trimmed.ends_with(row.suffix.as_bytes()));
        match fitting.max_by_key(|row| row.suffix.len()) {
            Some(row) => row.api,
            None if method == b"POST" && stored_id(&path).is_some() => Self::Task,
            None => Self::Other {
                family: ApiFamily::of_path(&path),
            },
        }
    }

    /// A number of the API, the same for all its paths.
    pub(crate) fn number(self) -> u8 {
        (1..)
            .zip(&APIS)
            .find(|(_, row)| row.api == self)
            .map_or(0, |(number, _)| number)
    }

    /// Whether the body is read, and so must be valid.
    #[must_use]
    pub fn reads_body(self) -> bool {
        !matches!(self, Self::Other { .. })
    }

    /// Whether prompt and reply are read, too, and the reply says how the endpoint does.
    #[must_use]
    pub fn is_inference(self) -> bool {
        self.reads_body() && self != Self::Task
    }

    /// Whether a path of the API may name a stored answer. Most requests are spared the search.
    pub(crate) fn may_name_stored(self) -> bool {
        matches!(self, Self::Task | Self::Other { .. })
    }

    /// Whether the engine may keep the answer in memory, for requests that name its id.
    #[must_use]
    pub fn stores(self) -> bool {
        matches!(self, Self::Responses | Self::Conversations)
    }

    /// Whether the API generates tokens, so that a stream has tokens and ends with a mark.
    #[must_use]
    pub fn generates(self) -> bool {
        matches!(
            self,
            Self::ChatCompletions
                | Self::Completions
                | Self::Responses
                | Self::Invocations
                | Self::Messages
                | Self::VllmGenerate
                | Self::SglangGenerate
        )
    }

    /// Whether the body must name a model. The other APIs have one model for each engine, or name
    /// the model elsewhere.
    #[must_use]
    pub fn needs_model(self) -> bool {
        self.is_inference()
            && !self.is_grpc()
            && !matches!(
                self,
                Self::CountTokens | Self::SglangGenerate | Self::Invocations
            )
    }

    /// Whether the body is a gRPC message.
    #[must_use]
    pub fn is_grpc(self) -> bool {
        matches!(self, Self::VertexChat | Self::VertexPredict)
    }

    /// The type of the parser plugin for requests of this API; `None` for [`Self::Other`].
    #[must_use]
    pub fn parser(self) -> Option<&'static str> {
        Some(match self {
            Self::Messages | Self::CountTokens => "anthropic-parser",
            Self::VllmGenerate => "vllmhttp-parser",
            Self::SglangGenerate => "sglanghttp-parser",
            Self::VertexChat | Self::VertexPredict => "vertexai-parser",
            Self::Other { .. } => return None,
            _ => "openai-parser",
        })
    }

    /// The family whose error shape applies.
    #[must_use]
    pub fn error_family(self) -> ApiFamily {
        match self {
            Self::Messages | Self::CountTokens => ApiFamily::Anthropic,
            Self::Other { family } => family,
            _ => ApiFamily::OpenAi,
        }
    }
}

/// The path without its query, and with its percent-escapes resolved.
#[inline(never)]
fn plain(path: &[u8]) -> Cow<'_, [u8]> {
    let path = path.split(|&byte| byte == b'?').next().unwrap_or_default();
    if path.contains(&b'%') {
        unescaped(path).into()
    } else {
        path.into()
    }
}

/// The id of the stored answer that a path names: `/v1/responses/ID/cancel`.
#[inline(never)]
fn stored_id(path: &[u8]) -> Option<&[u8]> {
    let after = STORES
        .iter()
        .find_map(|store| path.get(memchr::memmem::find(path, store)? + store.len()..))?;
    after
        .split(|&byte| byte == b'/')
        .next()
        .filter(|id| !id.is_empty())
}

/// The hash of the id of the stored answer that a path (`:path`) names; 0 if there is none.
#[inline(never)]
pub(crate) fn hash_of_stored_id(path: &[u8]) -> u64 {
    stored_id(&plain(path))
        .and_then(|id| std::str::from_utf8(id).ok())
        .map_or(0, scheduler::name_hash)
}

/// A path with its percent-escapes resolved once, as engines do; invalid escapes stay.
#[cold]
fn unescaped(path: &[u8]) -> Vec<u8> {
    let digit = |byte: u8| {
        char::from(byte)
            .to_digit(16)
            .and_then(|digit| u8::try_from(digit).ok())
    };
    let mut plain = Vec::with_capacity(path.len());
    let mut rest = path;
    while let [first, tail @ ..] = rest {
        let escaped = match rest {
            [b'%', high, low, tail @ ..] => digit(*high)
                .zip(digit(*low))
                .map(|(high, low)| (high << 4 | low, tail)),
            _ => None,
        };
        let (byte, left) = escaped.unwrap_or((*first, tail));
        plain.push(byte);
        rest = left;
    }
    plain
}

/// All paths whose bodies are read, as a Markdown table.
#[must_use]
pub fn reference() -> String {
    let mut out = "| path ends with | API | `model` | the prompt |\n|---|---|---|---|\n".to_owned();
    for row in &APIS {
        let model = if row.api.needs_model() {
            "required"
        } else {
            "optional"
        };
        let prompt = if row.prompt.is_empty() {
            "none: no generation"
        } else {
            row.prompt
        };
        let _ = writeln!(
            out,
            "| `{}` | {} | {model} | {prompt} |",
            row.suffix, row.whose
        ); // writing to a String cannot fail
    }
    out
}

impl ApiFamily {
    fn of_path(path: &[u8]) -> Self {
        if memchr::memmem::find(path, ANTHROPIC_PATH).is_some() {
            Self::Anthropic
        } else {
            Self::OpenAi
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OTHER: RequestApi = RequestApi::Other {
        family: ApiFamily::OpenAi,
    };

    #[test]
    fn a_path_names_its_api_whatever_stands_before_it_or_in_its_query() {
        for (path, api) in [
            ("/v1/chat/completions", RequestApi::ChatCompletions),
            ("/v1/completions", RequestApi::Completions),
            ("/v1/responses", RequestApi::Responses),
            ("/v1/conversations", RequestApi::Conversations),
            ("/v1/embeddings", RequestApi::Embeddings),
            ("/v1/images/generations", RequestApi::Images),
            ("/v1/messages", RequestApi::Messages),
            ("/v1/messages/count_tokens", RequestApi::CountTokens),
            ("/v1/chat/completions/render", RequestApi::Render),
            ("/v1/completions/render", RequestApi::Render),
            ("/inference/v1/generate", RequestApi::VllmGenerate),
            ("/generate", RequestApi::SglangGenerate),
            (
                "/google.cloud.aiplatform.v1beta1.PredictionService/ChatCompletions",
                RequestApi::VertexChat,
            ),
            (
                "/google.cloud.aiplatform.v1.PredictionService/RawPredict",
                RequestApi::VertexPredict,
            ),
            (
                "/google.cloud.aiplatform.v1.PredictionService/StreamRawPredict",
                RequestApi::VertexPredict,
            ),
            (
                "/google.cloud.aiplatform.v1.PredictionService/Predict",
                OTHER,
            ),
            (
                "/v1/projects/p/locations/l/endpoints/e/chat/completions",
                RequestApi::ChatCompletions,
            ),
            ("/myapp/v1/chat/completions", RequestApi::ChatCompletions),
            ("/chat/completions", RequestApi::ChatCompletions),
            (
                "/v1/chat/completions?api-version=1",
                RequestApi::ChatCompletions,
            ),
            ("/v1/chat/completions/", RequestApi::ChatCompletions),
            ("/v1/completions?next=/v1/messages", RequestApi::Completions),
            ("/v1/chat/completions//", OTHER),
            ("/v1/subcompletions", OTHER),
            ("/regenerate", OTHER),
            ("/generate/stream", OTHER),
            ("/v1/responses/resp_1/cancel", RequestApi::Task),
            ("/v1/responses/input_tokens", RequestApi::Task),
            ("/v1/conversations/conv_1/items", RequestApi::Task),
            ("/v1/responses/", RequestApi::Responses),
            ("/v1/responses//", OTHER),
            ("/v1/audio/transcriptions", RequestApi::Task),
            ("/v1/audio/translations", RequestApi::Task),
            ("/v1/audio/speech", RequestApi::Task),
            ("/v1/images/edits", RequestApi::Task),
            ("/tokenize", RequestApi::Task),
            ("/detokenize", RequestApi::Task),
            ("/pooling", RequestApi::Task),
            ("/classify", RequestApi::Task),
            ("/v1/score", RequestApi::Task),
            ("/v2/rerank", RequestApi::Task),
            ("/v1/files", OTHER),
            ("/V1/COMPLETIONS", OTHER),
            ("/invocations", RequestApi::Invocations),
            ("/v1/chat/%63ompletions", RequestApi::ChatCompletions),
            ("/v1/chat%2Fcompletions", RequestApi::ChatCompletions),
            ("/v1/chat%2fcompletion%73?%", RequestApi::ChatCompletions),
            ("/%69nvocations/", RequestApi::Invocations),
            ("/v1/%2563ompletions", OTHER),
            ("/v1/completions%", OTHER),
            ("/v1/completions%7", OTHER),
            ("/v1/%zzcompletions", OTHER),
            ("/v1/completions%3Fx", OTHER),
            ("", OTHER),
            ("/", OTHER),
            ("?/v1/completions", OTHER),
        ] {
            assert_eq!(RequestApi::of(b"POST", path.as_bytes()), api, "{path}");
        }
    }

    #[test]
    fn only_post_has_a_body_we_read() {
        for method in ["GET", "HEAD", "PUT", "post", ""] {
            assert!(
                !RequestApi::of(method.as_bytes(), b"/v1/completions").is_inference(),
                "{method}"
            );
        }
    }

    #[test]
    fn errors_take_the_shape_the_client_of_that_path_reads() {
        assert_eq!(
            RequestApi::of(b"POST", b"/v1/messages").error_family(),
            ApiFamily::Anthropic
        );
        assert_eq!(
            RequestApi::of(b"POST", b"/v1/messages/count_tokens").error_family(),
            ApiFamily::Anthropic
        );
        assert_eq!(
            RequestApi::of(b"GET", b"/a/v1/messages/batches").error_family(),
            ApiFamily::Anthropic
        );
        assert_eq!(
            RequestApi::of(b"POST", b"/v1/completions").error_family(),
            ApiFamily::OpenAi
        );
        assert_eq!(
            RequestApi::of(b"POST", b"/generate").error_family(),
            ApiFamily::OpenAi
        );
        assert_eq!(
            RequestApi::of(b"GET", b"/health?q=/v1/messages").error_family(),
            ApiFamily::OpenAi
        );
    }

    #[test]
    fn every_api_is_read_by_the_parser_of_whoever_made_it() {
        for row in &APIS {
            let expected = match row.api {
                RequestApi::Messages | RequestApi::CountTokens => "anthropic-parser",
                RequestApi::VllmGenerate => "vllmhttp-parser",
                RequestApi::SglangGenerate => "sglanghttp-parser",
                RequestApi::VertexChat | RequestApi::VertexPredict => "vertexai-parser",
                _ => "openai-parser",
            };
            assert_eq!(row.api.parser(), Some(expected), "{}", row.suffix);
            let kind = scheduler::registry::lookup(expected).map(|parser| parser.kind);
            assert_eq!(
                kind,
                Some(scheduler::registry::PluginKind::Parser),
                "{expected}"
            );
        }
        assert_eq!(OTHER.parser(), None);
    }
}
