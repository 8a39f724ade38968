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

/// The text of one output token.
const TOKEN: &str = "word ";

/// The time for which a connection stays open before the engine cuts the connection, so that the
/// client receives the bytes that were written.
const FLUSH: Duration = Duration::from_millis(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PlainApi {
    Chat,
    Completions,
    Embeddings,
    Rerank,
    /// SGLang's own API, without streams.
    Generate,
}

const PATHS: &[(&str, PlainApi)] = &[
    ("/v1/chat/completions", PlainApi::Chat),
    ("/v1/completions", PlainApi::Completions),
    ("/v1/embeddings", PlainApi::Embeddings),
    ("/v1/rerank", PlainApi::Rerank),
    ("/generate", PlainApi::Generate),
];

/// The parts of a request that determine the reply.
#[derive(Debug)]
pub(super) struct PlainRequest {
    api: PlainApi,
    pub(super) prompt_tokens: u32,
    tokens: u32,
    stream: bool,
    finish_reason: &'static str,
}

// === impl PlainRequest ===

impl PlainRequest {
    /// Parses a request. Returns `None` if the engine does not serve the path.
    pub(super) fn parse(path: &str, body: &[u8]) -> Option<Self> {
        let (_, api) = *PATHS.iter().find(|(known, _)| *known == path)?;
        let fields: Map<String, Value> = serde_json::from_slice(body).unwrap_or_default();
        let limit = ["max_tokens", "max_completion_tokens"]
            .iter()
            .find_map(|field| fields.get(*field)?.as_u64());
        let tokens = limit.map_or(TOKENS_DEFAULT, |limit| {
            u32::try_from(limit).unwrap_or(TOKENS_MAX)
        });
        let streams = matches!(api, PlainApi::Chat | PlainApi::Completions);
        Some(Self {
            api,
            prompt_tokens: u32::try_from(body.len() / TOKEN_BYTES).unwrap_or(u32::MAX),
            tokens: if streams || api == PlainApi::Generate {
                tokens.clamp(1, TOKENS_MAX)
            } else {
                0
            },
            stream: streams && fields.get("stream") == Some(&Value::Bool(true)),
            finish_reason: "length",
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

    fn usage(&self) -> Value {
        let prompt = self.prompt_tokens;
        let output = self.tokens;
        json!({"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": u64::from(prompt) + u64::from(output)})
    }

    fn to_json(&self) -> Value {
        let text = || TOKEN.repeat(self.tokens as usize);
        match self.api {
            PlainApi::Chat => json!({
                "id": "chatcmpl-0", "object": "chat.completion", "created": 0, "model": MODEL,
                "choices": [{"index": 0, "message": {"role": "assistant", "content": text()}, "finish_reason": self.finish_reason}],
            }),
            PlainApi::Completions => json!({
                "id": "cmpl-0", "object": "text_completion", "created": 0, "model": MODEL,
                "choices": [{"index": 0, "text": text(), "finish_reason": self.finish_reason}],
            }),
            PlainApi::Embeddings => json!({
                "object": "list", "model": MODEL, "data": [{"object": "embedding", "index": 0, "embedding": [0.5, -0.25, 0.125]}],
            }),
            PlainApi::Rerank => {
                json!({"id": "rerank-0", "model": MODEL, "results": [{"index": 0, "relevance_score": 0.5}]})
            }
            PlainApi::Generate => {
                json!({"text": text(), "meta_info": {"finish_reason": {"type": self.finish_reason}}})
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

    /// Returns the stream event of one token, or the last event of a reply without tokens.
    fn token(&self, last: bool) -> Value {
        let finish_reason = if last {
            json!(self.finish_reason)
        } else {
            Value::Null
        };
        let text = if self.tokens > 0 { TOKEN } else { "" };
        match self.api {
            PlainApi::Chat => self.event(
                &json!([{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}]),
            ),
            _ => self.event(&json!([{"index": 0, "text": text, "finish_reason": finish_reason}])),
        }
    }

    /// Returns the stream event after the last token.
    fn last_usage(&self) -> Value {
        let mut event = self.event(&json!([]));
        event["usage"] = self.usage();
        event
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
    let mut events: Vec<Bytes> = (1..=asked.tokens.max(1))
        .map(|at| event(&asked.token(at >= asked.tokens).to_string()))
        .collect();
    if cut {
        events.truncate(1);
    } else {
        events.extend(
            (usage == UsageReporting::Reported).then(|| event(&asked.last_usage().to_string())),
        );
        events.push(event("[DONE]"));
    }
    let tokens = asked.tokens as usize;
    let paced = stream::iter(events.into_iter().enumerate()).then(move |(at, event)| {
        let _counted = &running;
        async move {
            if (1..tokens).contains(&at) && !next.is_zero() {
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
