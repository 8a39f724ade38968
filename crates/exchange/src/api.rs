//! Finds the inference API of a request by its path. The API decides how the body is read, and
//! which shape errors have.
//!
//! A path is matched by its end, because gateways mount these APIs below a prefix
//! (`/myapp/v1/chat/completions`). The longest match wins. The body is read only if the path has a
//! match in [`APIS`] or is below one of [`STORES`]. Percent-escapes are resolved first, as engines
//! do. Otherwise only the engine would treat `/v1/chat/%63ompletions` as a chat.

mod members;

use std::borrow::Cow;
use std::fmt::Write as _;

use scheduler::plugin::readable;

use members::{CHAT, COMMON, MEDIA, Members, SYSTEM, TOOLS, TURNS};
pub(crate) use members::{Field, SamplingLimit};

/// The family of APIs, which decides the shape of errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ApiFamily {
    /// `{"error":{"message","type","param","code"}}`
    OpenAi,
    /// `{"type":"error","error":{"type","message"}}`
    Anthropic,
}

/// The salt of the prefix cache in the OpenAI APIs of vLLM, SGLang and TensorRT-LLM.
const CACHE_SALT: &str = "cache_salt";

/// The properties of an API, except how its events are read.
#[derive(Debug)]
pub(crate) struct ApiRow {
    /// The maker of the engine or API, and the end of the path.
    paths: &'static [(&'static str, &'static str)],
    /// The place of the prompt in the body; empty if there is none.
    prompt: &'static str,
    /// The member of the body with the salt of the prefix cache.
    salt: &'static str,
    /// The members of the body that are read, except those of all APIs. An API whose prompt the
    /// engine does not cache, or caches in an unknown form, has no member of the prompt here.
    members: Members,
    /// The type of the parser plugin for its requests.
    parser: &'static str,
    family: ApiFamily,
    /// Whether the body is a gRPC message.
    is_grpc: bool,
    /// Whether the API generates tokens, so that a stream has tokens and ends with a mark.
    generates: bool,
    /// Whether the body must name a model. The other APIs have one model per engine, or name the
    /// model elsewhere.
    needs_model: bool,
    /// Whether the engine may keep the answer in memory, for requests that name its id.
    stores: bool,
    /// Whether the prompt may be an array of several prompts.
    pub(crate) several_prompts: bool,
}

/// An API that generates nothing from a JSON body with a `model`.
const OPENAI: ApiRow = ApiRow {
    paths: &[],
    prompt: "",
    salt: CACHE_SALT,
    members: &[],
    parser: "openai-parser",
    family: ApiFamily::OpenAi,
    is_grpc: false,
    generates: false,
    needs_model: true,
    stores: false,
    several_prompts: false,
};

const ANTHROPIC: ApiRow = ApiRow {
    parser: "anthropic-parser",
    family: ApiFamily::Anthropic,
    ..OPENAI
};

const VERTEX: ApiRow = ApiRow {
    parser: "vertexai-parser",
    is_grpc: true,
    needs_model: false,
    ..OPENAI
};

/// The row of [`RequestApi::Other`].
static UNKNOWN: ApiRow = ApiRow {
    needs_model: false,
    ..OPENAI
};

/// Defines the APIs: the variant of [`RequestApi`], the origins and ends of paths, the place of the
/// prompt in the body (empty if there is none), the member with the salt, the other members that
/// are read, and the other columns.
macro_rules! apis {
    ($($(#[$about:meta])* $api:ident: $($whose:literal [$($end:literal),*])*, $prompt:literal, $salt:expr, $members:expr, { $($columns:tt)* })*) => {
        /// An API whose bodies are read.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum RequestApi {
            $($(#[$about])* $api,)*
            /// Any other path. The body of such a request is opaque, but the picker picks an
            /// endpoint.
            Other {
                /// The shape its errors must have.
                family: ApiFamily,
            },
        }

        static APIS: &[(RequestApi, ApiRow)] = &[$((
            RequestApi::$api,
            ApiRow {
                paths: &[$($((readable($whose), $end)),*),*],
                prompt: readable($prompt),
                salt: $salt,
                members: $members,
                $($columns)*
            },
        )),*];
    };
}

apis! {
    /// OpenAI `/v1/chat/completions`.
    ChatCompletions: "OpenAI" ["/chat/completions"],
        "`tools`, `messages`", CACHE_SALT, CHAT, { generates: true, ..OPENAI }
    /// OpenAI `/v1/completions`.
    Completions: "OpenAI" ["/completions"],
        "`prompt`", CACHE_SALT, &[("prompt", TURNS), ("max_tokens", Field::MaxTokens)],
        { generates: true, several_prompts: true, ..OPENAI }
    /// OpenAI `/v1/responses`.
    Responses: "OpenAI" ["/responses"],
        "`tools`, `instructions`, `input`", CACHE_SALT,
        &[
            ("tools", TOOLS),
            ("instructions", SYSTEM),
            ("input", TURNS),
            ("prompt", Field::StoredPrompt),
            ("max_output_tokens", Field::MaxTokens),
            ("previous_response_id", Field::StoredId),
            ("conversation", Field::StoredId),
        ],
        { generates: true, stores: true, ..OPENAI }
    /// OpenAI `/v1/conversations`.
    Conversations: "OpenAI" ["/conversations"],
        "`items`", CACHE_SALT, &[("items", TURNS)], { stores: true, ..OPENAI }
    /// OpenAI `/v1/embeddings`.
    Embeddings: "OpenAI" ["/embeddings"],
        "`input` or `messages`", CACHE_SALT, &[("input", TURNS), ("messages", TURNS)], { ..OPENAI }
    /// OpenAI `/v1/images/generations`.
    Images: "OpenAI" ["/images/generations"],
        "`prompt`", CACHE_SALT, &[("prompt", TURNS)], { ..OPENAI }
    /// vLLM `…/completions/render`: applies the chat template and generates nothing.
    Render: "vLLM" ["/chat/completions/render", "/completions/render"],
        "", CACHE_SALT, &[], { ..OPENAI }
    /// Anthropic `/v1/messages`.
    Messages: "Anthropic" ["/messages"],
        "`tools`, `system`, `messages`", CACHE_SALT,
        &[
            ("tools", TOOLS),
            ("system", SYSTEM),
            ("messages", TURNS),
            ("max_tokens", Field::MaxTokens),
        ],
        { generates: true, ..ANTHROPIC }
    /// Anthropic `/v1/messages/count_tokens`: generates nothing.
    CountTokens: "Anthropic" ["/messages/count_tokens"],
        "", CACHE_SALT, &[], { needs_model: false, ..ANTHROPIC }
    /// vLLM `/inference/v1/generate`: tokens in, tokens out.
    VllmGenerate: "vLLM" ["/inference/v1/generate"],
        "`features`, `token_ids`", CACHE_SALT,
        &[
            ("features", MEDIA),
            ("token_ids", TURNS),
            ("sampling_params", Field::SamplingParams(SamplingLimit::MaxTokens)),
        ],
        { parser: "vllmhttp-parser", generates: true, ..OPENAI }
    /// vLLM `/invocations`, SageMaker's name for all APIs: a chat, a completion or an embedding,
    /// depending on the body.
    Invocations: "vLLM" ["/invocations"],
        "`tools`, `messages` or `prompt` or `input`", CACHE_SALT,
        &[
            ("tools", TOOLS),
            ("messages", TURNS),
            ("prompt", TURNS),
            ("input", TURNS),
            ("max_completion_tokens", Field::MaxCompletionTokens),
            ("max_tokens", Field::MaxTokens),
        ],
        { generates: true, needs_model: false, several_prompts: true, ..OPENAI }
    SglangGenerate: "SGLang" ["/generate"],
        "`image_data`, `video_data`, `audio_data`, `text` or `input_ids`", "extra_key",
        &[
            ("image_data", MEDIA),
            ("video_data", MEDIA),
            ("audio_data", MEDIA),
            ("text", TURNS),
            ("input_ids", TURNS),
            ("sampling_params", Field::SamplingParams(SamplingLimit::MaxNewTokens)),
        ],
        { parser: "sglanghttp-parser", generates: true, needs_model: false, several_prompts: true, ..OPENAI }
    /// Vertex AI's gRPC method for chats: OpenAI JSON inside protobuf.
    VertexChat: "Vertex AI" ["PredictionService/ChatCompletions"],
        "as OpenAI chats, inside protobuf", CACHE_SALT, CHAT, { ..VERTEX }
    /// Vertex AI's gRPC methods for raw predictions: OpenAI responses inside protobuf.
    VertexPredict: "Vertex AI" ["PredictionService/RawPredict", "PredictionService/StreamRawPredict"],
        "as OpenAI responses, inside protobuf", CACHE_SALT,
        &[
            ("tools", TOOLS),
            ("instructions", SYSTEM),
            ("input", TURNS),
            ("max_output_tokens", Field::MaxTokens),
        ],
        { ..VERTEX }
    /// Only the `model` of the body is read, and the id of a stored answer. The body is a JSON
    /// object or a form ([`crate::body::form`]).
    Task:
        "OpenAI" ["/audio/speech", "/audio/transcriptions", "/audio/translations", "/images/edits"]
        "vLLM" ["/tokenize", "/detokenize", "/pooling", "/classify", "/score", "/rerank"],
        "not read", CACHE_SALT,
        &[("previous_response_id", Field::StoredId), ("conversation", Field::StoredId)],
        { needs_model: false, ..OPENAI }
}

/// The paths below which engines keep their answers in memory. The answer's id is the next part of
/// the path.
const STORES: [&[u8]; 2] = [b"/responses/", b"/conversations/"];

/// The common part of all paths of Anthropic's API (`/v1/messages/batches`).
const ANTHROPIC_PATH: &[u8] = b"/v1/messages";

impl RequestApi {
    /// Returns the API of `method` and `path` (`:path`, with or without a query).
    #[must_use]
    pub fn for_request(method: &[u8], path: &[u8]) -> Self {
        let path = plain(path);
        let trimmed = path.strip_suffix(b"/").unwrap_or(&path);
        let mut longest = 0;
        let mut api = Self::Other {
            family: ApiFamily::of_path(&path),
        };
        if method != b"POST" {
            return api;
        }
        for (known, row) in APIS {
            for (_, end) in row.paths {
                if end.len() > longest && trimmed.ends_with(end.as_bytes()) {
                    longest = end.len();
                    api = *known;
                }
            }
        }
        if longest == 0 && stored_id(&path).is_some() {
            api = Self::Task;
        }
        api
    }

    /// Returns all APIs whose bodies are read.
    pub fn all() -> impl Iterator<Item = Self> {
        APIS.iter().map(|(api, _)| *api)
    }

    #[inline(never)] // several callers, and the wasm module should be small
    pub(crate) fn row(self) -> &'static ApiRow {
        let known = APIS.iter().find(|(api, _)| *api == self);
        known.map_or(&UNKNOWN, |(_, row)| row)
    }

    /// A number of the API, the same for all its paths; 0 for [`Self::Other`].
    pub(crate) fn number(self) -> u8 {
        (1..)
            .zip(APIS)
            .find(|(_, (api, _))| *api == self)
            .map_or(0, |(number, _)| number)
    }

    /// Whether the body is read. A body that is read must be valid.
    #[must_use]
    pub fn reads_body(self) -> bool {
        !matches!(self, Self::Other { .. })
    }

    /// Whether prompt and reply are read too, so that the reply shows the state of the endpoint.
    #[must_use]
    pub fn is_inference(self) -> bool {
        self.reads_body() && self != Self::Task
    }

    /// Whether a path of the API may name a stored answer. This check saves the search for most
    /// requests.
    pub(crate) fn may_name_stored(self) -> bool {
        !self.is_inference()
    }

    /// Whether the engine may keep the answer in memory, for requests that name its id.
    #[must_use]
    pub fn stores(self) -> bool {
        self.row().stores
    }

    /// Whether the API generates tokens, so that a stream has tokens and ends with a mark.
    #[must_use]
    pub fn generates(self) -> bool {
        self.row().generates
    }

    /// Whether the body must name a model.
    #[must_use]
    pub fn needs_model(self) -> bool {
        self.row().needs_model
    }

    /// The member of the body with the salt of the prefix cache.
    #[must_use]
    pub fn salt_name(self) -> &'static str {
        self.row().salt
    }

    /// Whether the body is a gRPC message.
    #[must_use]
    pub fn is_grpc(self) -> bool {
        self.row().is_grpc
    }

    /// The type of the parser plugin for requests of this API; `None` for [`Self::Other`].
    #[must_use]
    pub fn parser(self) -> Option<&'static str> {
        self.reads_body().then(|| self.row().parser)
    }

    /// The family whose error shape applies.
    #[must_use]
    pub fn error_family(self) -> ApiFamily {
        match self {
            Self::Other { family } => family,
            api => api.row().family,
        }
    }
}

// === impl ApiRow ===

impl ApiRow {
    /// The meaning of a top-level member of the body.
    #[inline(never)] // several callers, and the wasm module should be small
    pub(crate) fn field(&self, name: &[u8]) -> Field {
        if name == self.salt.as_bytes() {
            return Field::CacheSalt;
        }
        let mut known = COMMON.iter().chain(self.members);
        known
            .find(|(member, _)| member.as_bytes() == name)
            .map_or(Field::Other, |(_, field)| *field)
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
    for (_, row) in APIS {
        let model = if row.needs_model {
            "required"
        } else {
            "optional"
        };
        let prompt = if row.prompt.is_empty() {
            "none: no generation"
        } else {
            row.prompt
        };
        for (whose, end) in row.paths {
            let _ = writeln!(out, "| `{end}` | {whose} | {model} | {prompt} |"); // writing to a String cannot fail
        }
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
            assert_eq!(
                RequestApi::for_request(b"POST", path.as_bytes()),
                api,
                "{path}"
            );
        }
    }

    #[test]
    fn only_post_has_a_body_we_read() {
        for method in ["GET", "HEAD", "PUT", "post", ""] {
            assert!(
                !RequestApi::for_request(method.as_bytes(), b"/v1/completions").is_inference(),
                "{method}"
            );
        }
    }

    #[test]
    fn errors_take_the_shape_the_client_of_that_path_reads() {
        assert_eq!(
            RequestApi::for_request(b"POST", b"/v1/messages").error_family(),
            ApiFamily::Anthropic
        );
        assert_eq!(
            RequestApi::for_request(b"POST", b"/v1/messages/count_tokens").error_family(),
            ApiFamily::Anthropic
        );
        assert_eq!(
            RequestApi::for_request(b"GET", b"/a/v1/messages/batches").error_family(),
            ApiFamily::Anthropic
        );
        assert_eq!(
            RequestApi::for_request(b"POST", b"/v1/completions").error_family(),
            ApiFamily::OpenAi
        );
        assert_eq!(
            RequestApi::for_request(b"POST", b"/generate").error_family(),
            ApiFamily::OpenAi
        );
        assert_eq!(
            RequestApi::for_request(b"GET", b"/health?q=/v1/messages").error_family(),
            ApiFamily::OpenAi
        );
    }

    #[test]
    fn every_api_is_read_by_the_parser_of_whoever_made_it() {
        for (api, _) in APIS {
            let expected = match api {
                RequestApi::Messages | RequestApi::CountTokens => "anthropic-parser",
                RequestApi::VllmGenerate => "vllmhttp-parser",
                RequestApi::SglangGenerate => "sglanghttp-parser",
                RequestApi::VertexChat | RequestApi::VertexPredict => "vertexai-parser",
                _ => "openai-parser",
            };
            assert_eq!(api.parser(), Some(expected), "{api:?}");
            let kind = scheduler::registry::lookup(expected).map(|parser| parser.kind);
            assert_eq!(
                kind,
                Some(scheduler::registry::PluginKind::Parser),
                "{expected}"
            );
        }
        assert_eq!(OTHER.parser(), None);
    }

    #[test]
    fn every_api_reads_the_members_that_its_documentation_names_as_the_prompt() {
        for (api, row) in APIS {
            let prompt = row.members.iter().filter(|(_, field)| {
                matches!(field, Field::Text(_) | Field::Content(..) | Field::Media(_))
            });
            let read: Vec<&str> = prompt.map(|(name, _)| *name).collect();
            let named: Vec<&str> = row.prompt.split('`').skip(1).step_by(2).collect();
            if row.prompt.starts_with("as ") {
                assert!(!read.is_empty(), "{api:?}");
            } else {
                assert_eq!(read, named, "{api:?}");
            }
        }
    }
}
