//! The replies of a plain engine: JSON and server-sent events of each API.

use std::time::Duration;

use axum::body::{Body, Bytes};
use futures::{StreamExt as _, stream};
use http::{HeaderValue, Response, header};
use serde_json::{Map, Value, json};
use tokio::time::sleep;

use super::{MODEL, PlainAnswer, PlainBehaviour, RunningGuard, UsageReporting};

/// The number of tokens of a reply if the request sets no limit.
const TOKENS_DEFAULT: u32 = 16;

/// The maximum number of tokens of a reply, whatever limit the request sets.
const TOKENS_MAX: u32 = 4096;

/// The number of bytes of a prompt that count as one token.
const TOKEN_BYTES: usize = 4;

/// The text and the id of one output token.
const TOKEN: &str = "word ";
const TOKEN_ID: u32 = 7;

/// The time for which a connection stays open before the engine cuts the connection, so that the
/// client receives the bytes that were written.
const FLUSH: Duration = Duration::from_millis(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PlainApi {
    Chat,
    Completions,
    /// Anthropic's API.
    Messages,
    Responses,
    Embeddings,
    Rerank,
    /// SGLang's own API.
    Generate,
    /// vLLM's API with token ids. Its replies report no usage in streams.
    TokenIds,
}

pub(super) const PATHS: &[(&str, PlainApi)] = &[
    ("/v1/chat/completions", PlainApi::Chat),
    ("/v1/completions", PlainApi::Completions),
    ("/v1/messages", PlainApi::Messages),
    ("/v1/responses", PlainApi::Responses),
    ("/v1/embeddings", PlainApi::Embeddings),
    ("/v1/rerank", PlainApi::Rerank),
    ("/generate", PlainApi::Generate),
    ("/inference/v1/generate", PlainApi::TokenIds),
    // The engine takes each body there for a chat.
    ("/invocations", PlainApi::Chat),
];

/// The parts of a request that determine the reply.
#[derive(Debug)]
pub(super) struct PlainRequest {
    /// The position of the path in [`PATHS`].
    pub(super) path: usize,
    api: PlainApi,
    pub(super) prompt_tokens: u32,
    tokens: u32,
    stream: bool,
    finish_reason: &'static str,
    /// The number of prompts, if the request has an array of prompts. The reply is then an array
    /// too, as in SGLang.
    prompts: Option<usize>,
}

/// The data of a stream's events.
#[derive(Debug)]
struct PlainEvents {
    /// The events before the first token.
    head: Vec<String>,
    tokens: Vec<String>,
    /// The events after the last token.
    tail: Vec<String>,
}

// === impl PlainApi ===

impl PlainApi {
    fn generates(self) -> bool {
        !matches!(self, Self::Embeddings | Self::Rerank)
    }
}

// === impl PlainRequest ===

impl PlainRequest {
    /// Parses a request. Returns `None` if the engine does not serve the path.
    pub(super) fn parse(path: &str, body: &[u8]) -> Option<Self> {
        let path = PATHS.iter().position(|(known, _)| *known == path)?;
        let (_, api) = *PATHS.get(path)?;
        let fields: Map<String, Value> = serde_json::from_slice(body).unwrap_or_default();
        let limit = ["max_tokens", "max_completion_tokens", "max_output_tokens"]
            .iter()
            .find_map(|field| fields.get(*field)?.as_u64());
        let tokens = limit.map_or(TOKENS_DEFAULT, |limit| {
            u32::try_from(limit).unwrap_or(TOKENS_MAX)
        });
        let prompts = fields.get("text").and_then(Value::as_array);
        Some(Self {
            path,
            api,
            prompt_tokens: u32::try_from(body.len() / TOKEN_BYTES).unwrap_or(u32::MAX),
            tokens: if api.generates() {
                tokens.clamp(1, TOKENS_MAX)
            } else {
                0
            },
            stream: api.generates() && fields.get("stream") == Some(&Value::Bool(true)),
            finish_reason: "length",
            prompts: prompts.filter(|_| api == PlainApi::Generate).map(Vec::len),
        })
    }

    /// Changes the request so that its reply has no tokens, like the reply of an engine that
    /// generates nothing.
    pub(super) fn aborted(self) -> Self {
        Self {
            tokens: 0,
            finish_reason: "abort",
            ..self
        }
    }

    /// Returns the token counts, by the names that the API uses.
    fn usage(&self) -> Value {
        let prompt = self.prompt_tokens;
        let output = self.tokens;
        let total = u64::from(prompt) + u64::from(output);
        match self.api {
            PlainApi::Messages => json!({"input_tokens": prompt, "output_tokens": output}),
            PlainApi::Responses => {
                json!({"input_tokens": prompt, "output_tokens": output, "total_tokens": total})
            }
            _ => {
                json!({"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": total})
            }
        }
    }

    fn to_json(&self) -> Value {
        let text = TOKEN.repeat(self.tokens as usize);
        // These APIs leave out the text of a reply without tokens.
        let content = |kind: &str| match self.tokens {
            0 => json!([]),
            _ => json!([{"type": kind, "text": text}]),
        };
        match self.api {
            PlainApi::Chat => json!({
                "id": "chatcmpl-0", "object": "chat.completion", "created": 0, "model": MODEL,
                "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": self.finish_reason}],
            }),
            PlainApi::Completions => json!({
                "id": "cmpl-0", "object": "text_completion", "created": 0, "model": MODEL,
                "choices": [{"index": 0, "text": text, "finish_reason": self.finish_reason}],
            }),
            PlainApi::Messages => json!({
                "id": "msg_0", "type": "message", "role": "assistant", "model": MODEL,
                "content": content("text"), "stop_reason": "end_turn",
            }),
            PlainApi::Responses => {
                let output = match self.tokens {
                    0 => json!([]),
                    _ => json!([{"type": "message", "content": content("output_text")}]),
                };
                json!({"id": "resp_0", "object": "response", "status": "incomplete", "model": MODEL, "output": output})
            }
            PlainApi::Embeddings => json!({
                "object": "list", "model": MODEL, "data": [{"object": "embedding", "index": 0, "embedding": [0.5, -0.25, 0.125]}],
            }),
            PlainApi::Rerank => {
                json!({"id": "rerank-0", "model": MODEL, "results": [{"index": 0, "relevance_score": 0.5}]})
            }
            PlainApi::Generate => {
                json!({"text": text, "meta_info": {"finish_reason": {"type": self.finish_reason}}})
            }
            PlainApi::TokenIds => {
                let ids = vec![TOKEN_ID; self.tokens as usize];
                json!({"request_id": "0", "choices": [{"index": 0, "token_ids": ids, "finish_reason": self.finish_reason}]})
            }
        }
    }

    fn event(&self, choices: &Value) -> Value {
        let object = if self.api == PlainApi::Chat {
            "chat.completion.chunk"
        } else {
            "text_completion"
        };
        json!({"id": "0", "object": object, "created": 0, "model": MODEL, "choices": choices})
    }

    /// Returns the stream event of the token with this number, beginning with 1. A reply without
    /// tokens has one such event, which has no text.
    fn token(&self, number: u32, usage: UsageReporting) -> Value {
        let is_last = number >= self.tokens;
        let finish_reason = is_last.then_some(self.finish_reason);
        let tokens = number.min(self.tokens);
        let text = if tokens > 0 { TOKEN } else { "" };
        match self.api {
            PlainApi::Chat => self.event(
                &json!([{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}]),
            ),
            PlainApi::Messages => {
                json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}})
            }
            PlainApi::Responses => json!({"type": "response.output_text.delta", "delta": text}),
            PlainApi::TokenIds => {
                let ids = vec![TOKEN_ID; usize::from(tokens > 0)];
                json!({"choices": [{"index": 0, "token_ids": ids, "finish_reason": finish_reason}]})
            }
            // Each event repeats the text before it.
            PlainApi::Generate => {
                let reason = finish_reason.map(|reason| json!({"type": reason}));
                let mut meta = json!({"finish_reason": reason});
                if usage == UsageReporting::Reported {
                    meta["prompt_tokens"] = json!(self.prompt_tokens);
                    meta["completion_tokens"] = json!(tokens);
                }
                json!({"text": TOKEN.repeat(tokens as usize), "meta_info": meta})
            }
            PlainApi::Completions | PlainApi::Embeddings | PlainApi::Rerank => {
                self.event(&json!([{"index": 0, "text": text, "finish_reason": finish_reason}]))
            }
        }
    }

    fn events(&self, usage: UsageReporting) -> PlainEvents {
        let counts = (usage == UsageReporting::Reported).then(|| self.usage());
        let done = || "[DONE]".to_owned();
        let tokens = (1..=self.tokens.max(1)).map(|number| self.token(number, usage).to_string());
        let mut events = PlainEvents {
            head: Vec::new(),
            tokens: tokens.collect(),
            tail: Vec::new(),
        };
        match self.api {
            PlainApi::Messages => {
                // The engine writes these counts before it generates.
                let begun = counts
                    .as_ref()
                    .map(|_| json!({"input_tokens": self.prompt_tokens, "output_tokens": 1}));
                let message = json!({"id": "msg_0", "type": "message", "role": "assistant", "model": MODEL, "content": [], "usage": begun});
                let block = json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}});
                let delta = json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": counts});
                events.head = vec![
                    json!({"type": "message_start", "message": message}).to_string(),
                    block.to_string(),
                ];
                events.tail = vec![
                    json!({"type": "content_block_stop", "index": 0}).to_string(),
                    delta.to_string(),
                    json!({"type": "message_stop"}).to_string(),
                ];
            }
            PlainApi::Responses => {
                let event = |kind: &str, status: &str, usage: Option<&Value>| {
                    let response = json!({"id": "resp_0", "object": "response", "status": status, "model": MODEL, "output": [], "usage": usage});
                    json!({"type": kind, "response": response}).to_string()
                };
                events.head = vec![event("response.created", "in_progress", None)];
                events.tail = vec![event("response.completed", "completed", counts.as_ref())];
            }
            PlainApi::Generate | PlainApi::TokenIds => events.tail = vec![done()],
            PlainApi::Chat | PlainApi::Completions | PlainApi::Embeddings | PlainApi::Rerank => {
                let last = counts.map(|counts| {
                    let mut event = self.event(&json!([]));
                    event["usage"] = counts;
                    event.to_string()
                });
                events.tail = last.into_iter().chain([done()]).collect();
            }
        }
        events
    }
}

/// Builds the reply. `next` is the time between two tokens. `running` is dropped when the reply
/// ends.
pub(super) async fn reply(
    asked: &PlainRequest,
    behaviour: &PlainBehaviour,
    next: Duration,
    running: RunningGuard,
) -> Response<Body> {
    let cut = behaviour.answer == PlainAnswer::CutAfterFirstToken;
    if asked.stream {
        return streamed(asked, behaviour.usage, next, cut, running);
    }
    sleep(next * asked.tokens.saturating_sub(1)).await;
    let mut whole = asked.to_json();
    if behaviour.usage == UsageReporting::Reported {
        match whole.get_mut("meta_info").and_then(Value::as_object_mut) {
            Some(meta) => meta.extend(asked.usage().as_object().cloned().unwrap_or_default()),
            None => whole["usage"] = asked.usage(),
        }
    }
    if let Some(prompts) = asked.prompts {
        whole = Value::Array(vec![whole; prompts]);
    }
    if !cut {
        return json(&whole);
    }
    let text = whole.to_string();
    let half = Bytes::copy_from_slice(text.as_bytes().get(..text.len() / 2).unwrap_or_default());
    let mut response = Response::new(cut_after(stream::iter([half])));
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    response
        .headers_mut()
        .insert(header::CONTENT_LENGTH, HeaderValue::from(text.len()));
    response
}

fn streamed(
    asked: &PlainRequest,
    usage: UsageReporting,
    next: Duration,
    cut: bool,
    running: RunningGuard,
) -> Response<Body> {
    let PlainEvents { head, tokens, tail } = asked.events(usage);
    let first = head.len();
    let end = first + tokens.len();
    let all = head.iter().chain(&tokens).chain(&tail);
    let mut events: Vec<Bytes> = all.map(|data| event(data)).collect();
    if cut {
        events.truncate(first + 1);
    }
    let paced = stream::iter(events.into_iter().enumerate()).then(move |(at, event)| {
        let _counted = &running;
        async move {
            if (first + 1..end).contains(&at) && !next.is_zero() {
                sleep(next).await;
            }
            event
        }
    });
    let body = if cut {
        cut_after(paced)
    } else {
        Body::from_stream(paced.map(Ok::<_, std::io::Error>))
    };
    let mut response = Response::new(body);
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/event-stream; charset=utf-8"),
    );
    response
}

/// Returns a body that sends these pieces and then fails, which closes the connection.
fn cut_after(pieces: impl futures::Stream<Item = Bytes> + Send + 'static) -> Body {
    let end = stream::once(async {
        sleep(FLUSH).await;
        Err(std::io::Error::other("cut, as ordered"))
    });
    Body::from_stream(pieces.map(Ok).chain(end))
}

fn event(data: &str) -> Bytes {
    Bytes::from(format!("data: {data}\n\n"))
}

pub(super) fn json(value: &Value) -> Response<Body> {
    let mut response = Response::new(Body::from(value.to_string()));
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    response
}
