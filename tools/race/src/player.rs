//! The load generator. The load generator plays sessions at one or two addresses, and records what
//! the sessions' clients see.
//!
//! A session is sent from its first turn to its last, and no time limit ends a session. So a faster
//! router gets the same requests as a slower one. A turn is sent after the end of the previous
//! reply and the turn's recorded pause.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use http::{Request, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use race_cells::RaceSession;
use serde_json::{Value, json};
use testbed::Result;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep_until, timeout};

use crate::record::{RequestRecord, RequestTokens};

/// The maximum time of a request. A request that has not ended by then counts as failed, and all
/// its times are set to this maximum.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);

/// The bytes before a token's text in an event of a chat stream. An empty text, as in the event
/// with the role, is not a token.
const TOKEN: &[u8] = b"\"content\":\"";

type HttpClient = Client<HttpConnector, Full<Bytes>>;

#[derive(Clone, Debug)]
pub struct SessionPlayer {
    client: HttpClient,
    /// The addresses of the gateways. A session uses the gateway at its number modulo the number of
    /// gateways.
    addresses: Vec<SocketAddr>,
    model: String,
    start: Instant,
}

#[derive(Debug)]
pub struct SessionPlan {
    /// The sessions in order of arrival.
    pub sessions: Vec<RaceSession>,
    /// The number of sessions, counted from the first, that count as sessions with cold caches.
    pub cold: usize,
    /// The number of sessions that run at the same time, if a session begins only when another
    /// ends.
    pub clients: Option<usize>,
}

#[derive(Debug)]
struct PlayedReply {
    first_token: Instant,
    last_token: Instant,
    end: Instant,
    text: String,
    usage: Value,
}

// === impl PlayedReply ===

impl PlayedReply {
    /// Returns the reply if it has all `asked` tokens. A router may end the stream of a dead engine
    /// without an error, as if the reply were complete, but without `usage`.
    fn check_complete(self, asked: u32) -> Result<Self> {
        let tokens = self.usage["completion_tokens"].as_u64().unwrap_or(0);
        if tokens == u64::from(asked) {
            Ok(self)
        } else {
            Err(format!("the reply was cut: its usage has {tokens} of {asked} tokens").into())
        }
    }
}

// === impl SessionPlayer ===

impl SessionPlayer {
    /// Creates a player. The time of the run starts with this call.
    #[must_use]
    pub fn new(addresses: Vec<SocketAddr>, model: &str) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let client = Client::builder(TokioExecutor::new()).build(connector);
        Self {
            client,
            addresses,
            model: model.to_owned(),
            start: Instant::now(),
        }
    }

    #[must_use]
    pub fn start(&self) -> Instant {
        self.start
    }

    /// Plays all sessions to their ends. Returns records in the order of sessions and turns.
    pub async fn play(&self, plan: SessionPlan) -> Vec<RequestRecord> {
        let clients = Arc::new(Semaphore::new(plan.clients.unwrap_or(plan.sessions.len())));
        let all = plan
            .sessions
            .into_iter()
            .enumerate()
            .map(|(index, session)| {
                let player = self.clone();
                let clients = Arc::clone(&clients);
                let cold = index < plan.cold;
                tokio::spawn(async move {
                    let _client = clients.acquire().await;
                    let due = player.start + Duration::from_secs_f64(session.start_ms / 1e3);
                    player
                        .session(Arc::new(session), due.max(Instant::now()), cold)
                        .await
                })
            });
        join_all(all)
            .await
            .into_iter()
            .flatten()
            .flatten()
            .collect()
    }

    /// Plays a session whose first request is due at `due`. Returns a record of each request.
    async fn session(
        &self,
        session: Arc<RaceSession>,
        mut due: Instant,
        cold: bool,
    ) -> Vec<RequestRecord> {
        let (mut replies, mut records): (Vec<String>, Vec<RequestRecord>) =
            (Vec::new(), Vec::new());
        for (turn, said) in session.turns.iter().enumerate() {
            due += Duration::from_secs_f64(said.pause_ms / 1e3);
            // The body is made before the request is due, so that making the body delays nothing.
            let body = self.body(&session, turn, &replies);
            sleep_until(due).await;
            let sent = Instant::now();
            let reply = match timeout(REQUEST_TIMEOUT, self.send(&session, body)).await {
                Ok(reply) => reply
                    .and_then(|reply| reply.check_complete(said.output_tokens))
                    .map_err(|error| error.to_string()),
                Err(_) => Err("timeout".to_owned()),
            };
            let mut record = self.record(&session, turn, sent, due, &reply);
            record.cold = cold;
            records.push(record);
            due = reply
                .as_ref()
                .map_or_else(|_| Instant::now(), |reply| reply.end);
            replies.push(reply.map(|reply| reply.text).unwrap_or_default());
        }
        records
    }

    fn body(&self, session: &RaceSession, turn: usize, replies: &[String]) -> Bytes {
        let messages = session.messages(turn, replies);
        let messages = messages
            .iter()
            .map(|message| json!({"role": message.role.name(), "content": message.text}));
        let tokens = session.turns.get(turn).map_or(1, |said| said.output_tokens);
        let body = json!({
            "model": self.model, "messages": messages.collect::<Vec<_>>(), "max_tokens": tokens, "min_tokens": tokens,
            "stream": true, "stream_options": {"include_usage": true},
        });
        body.to_string().into()
    }

    async fn send(&self, session: &RaceSession, body: Bytes) -> Result<PlayedReply> {
        let address = self
            .addresses
            .get(session.id as usize % self.addresses.len().max(1))
            .ok_or("there is no gateway")?;
        let request = Request::post(format!("http://{address}/v1/chat/completions"))
            .header(header::CONTENT_TYPE, "application/json");
        let reply = self.client.request(request.body(Full::new(body))?).await?;
        let status = reply.status();
        let mut body = reply.into_body();
        let mut bytes = Vec::new();
        let mut first = None;
        let mut last = None;
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame?.into_data() else {
                continue;
            };
            if status.is_success() && has_token(&data) {
                let now = Instant::now();
                first.get_or_insert(now);
                last = Some(now);
            }
            bytes.extend_from_slice(&data);
        }
        let end = Instant::now();
        if !status.is_success() {
            return Err(format!(
                "{status}: {}",
                String::from_utf8_lossy(bytes.get(..200).unwrap_or(&bytes))
            )
            .into());
        }
        let (text, usage) = read_events(&bytes)?;
        let first_token = first.ok_or("the reply has no token")?;
        Ok(PlayedReply {
            first_token,
            last_token: last.unwrap_or(first_token),
            end,
            text,
            usage,
        })
    }

    fn record(
        &self,
        session: &RaceSession,
        turn: usize,
        sent: Instant,
        due: Instant,
        reply: &Result<PlayedReply, String>,
    ) -> RequestRecord {
        let timeout_ms = ms(REQUEST_TIMEOUT);
        let usage = |pointer| {
            reply
                .as_ref()
                .ok()
                .and_then(|reply| reply.usage.pointer(pointer))
                .and_then(Value::as_u64)
                .unwrap_or(0)
        };
        let output_tokens = usage("/completion_tokens");
        let since = |at: &dyn Fn(&PlayedReply) -> Instant| {
            reply
                .as_ref()
                .map_or(timeout_ms, |reply| ms(at(reply) - sent))
        };
        let gaps = output_tokens.saturating_sub(1);
        let tpot = |reply: &PlayedReply| {
            (gaps > 0).then(|| ms(reply.last_token - reply.first_token) / gaps as f64)
        };
        RequestRecord {
            session: session.id,
            turn: u32::try_from(turn).unwrap_or(u32::MAX),
            cold: false,
            class: session.class.name().to_owned(),
            sent_ms: ms(sent - self.start),
            late_ms: ms(sent.saturating_duration_since(due)),
            ttft_ms: since(&|reply| reply.first_token),
            e2e_ms: since(&|reply| reply.end),
            tpot_ms: reply.as_ref().ok().and_then(tpot),
            tokens: RequestTokens {
                prompt: usage("/prompt_tokens"),
                cached: usage("/prompt_tokens_details/cached_tokens"),
                output: output_tokens,
            },
            failure: reply.as_ref().err().cloned(),
        }
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Whether a piece of a chat stream has the text of at least one token.
fn has_token(data: &[u8]) -> bool {
    data.windows(TOKEN.len() + 1)
        .any(|window| window.starts_with(TOKEN) && window.last() != Some(&b'"'))
}

/// Returns the text and the usage of a chat stream.
///
/// # Errors
/// Fails if the stream has no `[DONE]`, or if an event is not JSON.
fn read_events(bytes: &[u8]) -> Result<(String, Value)> {
    let mut text = String::new();
    let mut usage = Value::Null;
    let mut done = false;
    for data in std::str::from_utf8(bytes)?
        .lines()
        .filter_map(|line| line.strip_prefix("data:"))
        .map(str::trim)
    {
        if data == "[DONE]" {
            done = true;
            continue;
        }
        let mut event: Value = serde_json::from_str(data)?;
        text.push_str(
            event
                .pointer("/choices/0/delta/content")
                .and_then(Value::as_str)
                .unwrap_or_default(),
        );
        if event["usage"].is_object() {
            usage = event["usage"].take();
        }
    }
    if done {
        Ok((text, usage))
    } else {
        Err("the stream ended early".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = concat!(
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"the \"}}]}\n\n",
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"sky \"}}]}\n\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7}}\n\ndata: [DONE]\n\n",
    );

    #[test]
    fn the_event_with_the_role_is_no_token() {
        let events: Vec<_> = STREAM
            .split_inclusive("\n\n")
            .map(|event| has_token(event.as_bytes()))
            .collect();
        assert_eq!(events, [false, true, true, false, false]);
    }

    #[test]
    fn a_reply_without_all_its_tokens_has_failed() {
        let now = Instant::now();
        let reply = |usage: Value| PlayedReply {
            first_token: now,
            last_token: now,
            end: now,
            text: String::new(),
            usage,
        };
        assert!(
            reply(json!({"completion_tokens": 30}))
                .check_complete(30)
                .is_ok()
        );
        assert!(
            reply(json!({"completion_tokens": 29}))
                .check_complete(30)
                .is_err()
        );
        assert!(reply(Value::Null).check_complete(30).is_err(), "no usage");
    }

    #[test]
    fn a_stream_has_text_and_usage_and_an_end() {
        let (text, usage) = read_events(STREAM.as_bytes()).expect("a whole stream");
        assert_eq!(
            (text.as_str(), &usage["prompt_tokens"]),
            ("the sky ", &json!(7))
        );
        assert!(
            read_events(STREAM.replace("[DONE]", "{}").as_bytes()).is_err(),
            "cut before its end"
        );
    }
}
