//! Handles one request to a model server: faults first, then echo, pages, and inference.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io::Write as _;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::{Body, Bytes};
use axum::extract::Query;
use futures::{StreamExt as _, stream};
use http::request::Parts;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Version, header,
};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::driver::{GenerationHandle, OutputKind, SequenceOutput};
use super::engine::{FinishReason, ModelSequence};
use super::faults::{FaultMode, ServerFault};
use super::reply::{ModelReply, ReplyChoice};
use super::request::{ApiError, InferenceRequest, ModelApi};
use super::socket::ServedConnection;
use super::stats::RequestParameters;
use super::text::{self, TextRng};
use super::{ModelServerState, admin, metrics};

/// Larger than the largest body that a filter forwards (a prompt of 1M tokens is 4 to 8 MB), and
/// small enough for the machine.
const BODY_BYTES_MAX: usize = 128 << 20;
/// Largest body that an echo returns as text; of larger ones it returns the digest.
const ECHO_BYTES_MAX: usize = 64 << 10;
/// Requests kept for `/admin/state`, enough for one test.
const RECORDS_MAX: usize = 256;
/// Time for written bytes to reach the socket before a reset discards them.
const FLUSH: Duration = Duration::from_millis(10);

const EVENT_STREAM: &str = "text/event-stream; charset=utf-8";

/// Time between the pieces of a split stream, long enough for a reader to see each alone.
const PIECE_DELAY: Duration = Duration::from_millis(1);

/// Half of the head of an HTTP/1 response.
const PARTIAL_HEAD: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-str";
/// A HEADERS frame on stream 1 that announces 64 bytes and has three.
const PARTIAL_FRAME: &[u8] = &[0, 0, 64, 1, 4, 0, 0, 0, 1, 0x88, 0x5f, 0x8b];

/// A request that reached the engine.
#[derive(Clone, Debug)]
pub(super) struct LoggedRequest {
    pub method: Method,
    pub path: String,
    pub version: Version,
    pub headers: HeaderMap,
    pub body_bytes: usize,
}

/// The log of the HTTP side.
#[derive(Debug, Default)]
pub(super) struct RequestLog {
    pub records: VecDeque<LoggedRequest>,
    pub requests: u64,
    pub scrapes: u64,
}

impl RequestLog {
    fn note(&mut self, parts: &Parts, body_bytes: usize) {
        if parts.uri.path() == "/metrics" {
            self.scrapes += 1;
            return;
        }
        self.requests += 1;
        if self.records.len() == RECORDS_MAX {
            self.records.pop_front();
        }
        self.records.push_back(LoggedRequest {
            method: parts.method.clone(),
            path: parts
                .uri
                .path_and_query()
                .map_or_else(String::new, ToString::to_string),
            version: parts.version,
            headers: parts.headers.clone(),
            body_bytes,
        });
    }
}

pub(super) async fn handle(
    server: Arc<ModelServerState>,
    connection: Arc<ServedConnection>,
    request: Request<Incoming>,
) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let Ok(body) = Limited::new(body, BODY_BYTES_MAX).collect().await else {
        return status_reply(
            StatusCode::PAYLOAD_TOO_LARGE,
            &format!("The body was cut off, or is over {BODY_BYTES_MAX} bytes."),
        );
    };
    let trailers = body.trailers().cloned();
    let body = body.to_bytes();
    let path = parts.uri.path();
    if let Some(action) = path.strip_prefix("/admin/") {
        return admin::handle(&server, action, &parts.method, &body, Some(connection.id)).await;
    }
    server.log().note(&parts, body.len());
    let fault = server.faults().hit(path, Instant::now());
    let mut cut_after = None;
    if let Some(fault) = fault {
        if fault.mode == FaultMode::ResetMidStream {
            cut_after = Some(fault.after_chunks.unwrap_or(1));
        } else if let Some(reply) = fail(&fault, &connection, parts.version).await {
            return served_by(&server, reply);
        }
    }
    let exchange = ServerExchange {
        server: server.clone(),
        connection,
        trailers,
        cut_after,
    };
    let reply = Box::pin(exchange.answer(&parts, body)).await;
    let wants_gzip = parts
        .headers
        .get("x-gzip")
        .is_some_and(|value| value == "1");
    served_by(
        &server,
        if wants_gzip {
            gzipped(reply).await
        } else {
            reply
        },
    )
}

/// Acts as the fault says. Returns the answer, or `None` if the mode does not apply to requests.
async fn fail(
    fault: &ServerFault,
    connection: &ServedConnection,
    version: Version,
) -> Option<Response<Body>> {
    match fault.mode {
        FaultMode::None | FaultMode::Refuse | FaultMode::ResetMidStream => return None,
        FaultMode::Hang => {}
        FaultMode::ResetBeforeHeaders => connection.reset(b""),
        FaultMode::ResetMidHeaders => connection.reset(if version == Version::HTTP_2 {
            PARTIAL_FRAME
        } else {
            PARTIAL_HEAD
        }),
        FaultMode::Status => return Some(fault_reply(fault)),
    }
    std::future::pending().await
}

fn fault_reply(fault: &ServerFault) -> Response<Body> {
    let status = fault
        .status
        .and_then(|status| StatusCode::from_u16(status).ok())
        .unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
    let mut reply = match &fault.body {
        Some(body) => with_status(status, Response::new(Body::from(body.clone()))),
        None => status_reply(status, "A fault was ordered."),
    };
    if let Some(retry_after) = fault.retry_after {
        reply
            .headers_mut()
            .insert(header::RETRY_AFTER, HeaderValue::from(retry_after));
    }
    reply
}

/// Compresses the reply, whatever the client accepts, to test replies that the picker cannot read.
async fn gzipped(reply: Response<Body>) -> Response<Body> {
    let (mut parts, body) = reply.into_parts();
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    let written = body
        .collect()
        .await
        .ok()
        .and_then(|body| encoder.write_all(&body.to_bytes()).ok());
    let Some(bytes) = written.and_then(|()| encoder.finish().ok()) else {
        return status_reply(StatusCode::INTERNAL_SERVER_ERROR, "The reply broke off.");
    };
    parts.headers.remove(header::CONTENT_LENGTH);
    parts
        .headers
        .insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    Response::from_parts(parts, bytes.into())
}

fn served_by(server: &ModelServerState, mut reply: Response<Body>) -> Response<Body> {
    if let Ok(address) = HeaderValue::from_str(&server.address.to_string()) {
        reply
            .headers_mut()
            .insert(HeaderName::from_static("x-served-by"), address);
    }
    reply
}

fn with_status(status: StatusCode, mut reply: Response<Body>) -> Response<Body> {
    *reply.status_mut() = status;
    reply
}

pub(super) fn status_reply(status: StatusCode, message: &str) -> Response<Body> {
    let error = ApiError {
        status,
        message: message.to_owned(),
        param: None,
    };
    with_status(status, json_reply(&error.body(ModelApi::Chat)))
}

pub(super) fn json_reply(value: &Value) -> Response<Body> {
    typed("application/json", value.to_string().into())
}

fn typed(content_type: &'static str, body: Body) -> Response<Body> {
    let mut reply = Response::new(body);
    reply
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    reply
}

/// One request until its answer.
struct ServerExchange {
    server: Arc<ModelServerState>,
    connection: Arc<ServedConnection>,
    /// Trailers of the request.
    trailers: Option<HeaderMap>,
    /// Chunks after which the connection is reset.
    cut_after: Option<u32>,
}

impl ServerExchange {
    async fn answer(self, parts: &Parts, body: Bytes) -> Response<Body> {
        let wants_echo = parts
            .headers
            .get("x-echo")
            .is_some_and(|value| value == "1");
        match (&parts.method, parts.uri.path()) {
            _ if wants_echo => self.echo(parts, &body).await,
            (&Method::GET, "/health") => Response::new(Body::empty()),
            (&Method::GET, "/metrics") => self.server.metrics(&wanted(parts)).await,
            (&Method::GET, "/v1/models") => json_reply(&self.server.models()),
            (&Method::POST, path)
                if self.server.options.bare
                    && let Some(api) = ModelApi::of(path) =>
            {
                self.infer_bare(api, &body).await
            }
            (&Method::POST, path)
                if ModelApi::of(path).is_some()
                    && let Some(answer) = self.server.sidecar(parts, &body).await =>
            {
                answer
            }
            (&Method::POST, path) if let Some(api) = ModelApi::of(path) => {
                match InferenceRequest::parse(api, &body, &self.server.served) {
                    Ok(inference) => self.infer(parts, inference).await,
                    Err(error) => with_status(error.status, json_reply(&error.body(api))),
                }
            }
            _ => self.echo(parts, &body).await,
        }
    }

    /// Answers with the request as it arrived.
    async fn echo(self, parts: &Parts, body: &Bytes) -> Response<Body> {
        let digest = ring::digest::digest(&ring::digest::SHA256, body);
        let digest: String = digest
            .as_ref()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let text = std::str::from_utf8(body)
            .ok()
            .filter(|text| text.len() <= ECHO_BYTES_MAX);
        let echo = json!({
            "method": parts.method.as_str(),
            "path": parts.uri.path_and_query().map_or("", |path| path.as_str()),
            "version": format!("{:?}", parts.version),
            "authority": parts.uri.authority().map(http::uri::Authority::as_str),
            "headers": header_pairs(&parts.headers),
            "trailers": self.trailers.as_ref().map(header_pairs),
            "body_bytes": body.len(),
            "body_sha256": digest,
            "body": text,
        });
        self.unstreamed(echo, HeaderMap::new()).await
    }

    async fn infer(self, parts: &Parts, inference: InferenceRequest) -> Response<Body> {
        let (reply, sequences) = self.server.plan(&inference);
        if inference.api == ModelApi::CountTokens {
            return json_reply(&reply.to_json());
        }
        let asked = RequestParameters {
            n: inference.n,
            max_tokens: inference.max_tokens.unwrap_or(self.server.served.model_len),
        };
        let mut generation = self.server.engine.submit(sequences, asked);
        // vLLM reports load on these two endpoints only.
        let reports = matches!(inference.api, ModelApi::Chat | ModelApi::Completions);
        let orca = parts
            .headers
            .get("endpoint-load-metrics-format")
            .filter(|_| reports)
            .and_then(|format| format.to_str().ok());
        if inference.stream && inference.api != ModelApi::Embeddings {
            let load = orca.filter(|_| self.server.options.orca_on_streams);
            let headers = self.server.orca_headers(load);
            return self.streamed(reply, generation, headers);
        }
        let mut reply = reply;
        while let Some(output) = generation.next().await {
            reply.absorb(output);
        }
        if !generation.is_over() {
            return self.lost().await;
        }
        let headers = self.server.orca_headers(orca);
        self.unstreamed(reply.to_json(), headers).await
    }

    /// Answers any prompt with the same reply, without an engine.
    async fn infer_bare(self, api: ModelApi, body: &[u8]) -> Response<Body> {
        let tokens = self.server.options.output_tokens_mean;
        let mut text = Vec::new();
        text::write_tokens(&mut TextRng(self.server.options.seed), tokens, &mut text);
        let choice = ReplyChoice::new(
            text::token_count(body.len()),
            String::from_utf8_lossy(&text).into_owned(),
        );
        let mut reply = self.server.empty_reply(api, vec![choice]);
        reply.include_usage = true;
        let kinds = std::iter::repeat_n(OutputKind::Token, tokens as usize)
            .chain([OutputKind::Finished(FinishReason::Length)]);
        let outputs = kinds.map(|kind| SequenceOutput { index: 0, kind });
        if !wants_stream(body) {
            outputs.for_each(|output| reply.absorb(output));
            return self.unstreamed(reply.to_json(), HeaderMap::new()).await;
        }
        let mut chunks = Vec::new();
        for output in outputs {
            let mut out = Vec::new();
            reply.stream(output, &mut out);
            chunks.push(Ok::<_, Infallible>(Bytes::from(out)));
        }
        let mut out = Vec::new();
        reply.close(&mut out);
        chunks.push(Ok(out.into()));
        typed(EVENT_STREAM, Body::from_stream(stream::iter(chunks)))
    }

    /// Resets the connection: the engine was restarted during the request, so its process counts as
    /// gone.
    async fn lost(&self) -> Response<Body> {
        self.connection.reset(b"");
        std::future::pending().await
    }

    async fn unstreamed(self, value: Value, headers: HeaderMap) -> Response<Body> {
        let bytes = Bytes::from(value.to_string());
        let mut reply = if self.cut_after.is_some() {
            let length = bytes.len();
            let half = stream::iter([Ok::<_, Infallible>(bytes.slice(..length / 2))]);
            let connection = self.connection;
            let cut = stream::once(async move { reset_after_flush(&connection).await });
            let mut reply = typed(
                "application/json",
                Body::from_stream(stream::StreamExt::chain(half, cut)),
            );
            reply
                .headers_mut()
                .insert(header::CONTENT_LENGTH, HeaderValue::from(length));
            reply
        } else {
            typed("application/json", bytes.into())
        };
        reply.headers_mut().extend(headers);
        reply
    }

    fn streamed(
        self,
        reply: ModelReply,
        generation: GenerationHandle,
        headers: HeaderMap,
    ) -> Response<Body> {
        let events = ReplyEvents {
            reply,
            generation,
            connection: self.connection,
            cut_after: self.cut_after,
            // The first token does not wait for more: engines that bundle tokens send it at once.
            chunks_wanted: 1,
            chunks_per_write: self.server.options.chunks_per_write.max(1),
            chunk_delay: Duration::from_millis(self.server.options.chunk_delay_ms),
            closed: false,
        };
        let chunks = stream::unfold(events, |mut events| async move {
            Some((events.next().await?, events))
        });
        let body = match self.server.options.bytes_per_write {
            0 => Body::from_stream(chunks.map(Ok::<_, Infallible>)),
            bytes => Body::from_stream(
                chunks
                    .flat_map(move |chunk| stream::iter(pieces(&chunk, bytes)))
                    .then(async |piece| {
                        tokio::time::sleep(PIECE_DELAY).await;
                        Ok::<_, Infallible>(piece)
                    }),
            ),
        };
        let mut reply = typed(EVENT_STREAM, body);
        reply.headers_mut().extend(headers);
        reply
    }
}

fn pieces(chunk: &Bytes, bytes: usize) -> Vec<Bytes> {
    (0..chunk.len())
        .step_by(bytes)
        .map(|start| chunk.slice(start..chunk.len().min(start + bytes)))
        .collect()
}

async fn reset_after_flush<T>(connection: &ServedConnection) -> T {
    tokio::time::sleep(FLUSH).await;
    connection.reset(b"");
    std::future::pending().await
}

/// The body of a streamed reply.
struct ReplyEvents {
    reply: ModelReply,
    generation: GenerationHandle,
    connection: Arc<ServedConnection>,
    cut_after: Option<u32>,
    /// Chunks of the next write.
    chunks_wanted: u32,
    chunks_per_write: u32,
    chunk_delay: Duration,
    closed: bool,
}

impl ReplyEvents {
    async fn next(&mut self) -> Option<Bytes> {
        if self.closed {
            return None;
        }
        if self.cut_after == Some(0) {
            return reset_after_flush(&self.connection).await;
        }
        let mut out = Vec::new();
        let mut chunks = 0;
        let wanted = std::mem::replace(&mut self.chunks_wanted, self.chunks_per_write);
        while chunks < wanted {
            match self.generation.next().await {
                Some(output) => chunks += u32::from(self.reply.stream(output, &mut out)),
                None if self.generation.is_over() => {
                    self.reply.close(&mut out);
                    self.closed = true;
                    break;
                }
                None => return reset_after_flush(&self.connection).await, // the engine restarted
            }
        }
        if !self.chunk_delay.is_zero() {
            tokio::time::sleep(self.chunk_delay).await;
        }
        self.cut_after = self.cut_after.map(|left| left - 1);
        Some(out.into())
    }
}

/// The names of `?name[]=a&name[]=b`.
fn wanted(parts: &Parts) -> Vec<String> {
    let Ok(Query(pairs)) = Query::<Vec<(String, String)>>::try_from_uri(&parts.uri) else {
        return Vec::new();
    };
    pairs
        .into_iter()
        .filter(|(key, _)| key == "name[]")
        .map(|(_, name)| name)
        .collect()
}

/// True if the body has `"stream": true`, found by a search instead of a parse.
fn wants_stream(body: &[u8]) -> bool {
    const KEY: &[u8] = b"\"stream\"";
    memchr::memmem::find(body, KEY).is_some_and(|at| {
        let rest = body[at + KEY.len()..].trim_ascii_start();
        rest.strip_prefix(b":")
            .is_some_and(|rest| rest.trim_ascii_start().starts_with(b"true"))
    })
}

/// Headers as pairs in order of arrival, with every value of a name.
pub(super) fn header_pairs(headers: &HeaderMap) -> Value {
    headers
        .iter()
        .map(|(name, value)| json!([name.as_str(), String::from_utf8_lossy(value.as_bytes())]))
        .collect()
}

impl ModelServerState {
    async fn metrics(&self, wanted: &[String]) -> Response<Body> {
        let Some(report) = self.engine.report().await else {
            return status_reply(StatusCode::INTERNAL_SERVER_ERROR, "The engine has stopped.");
        };
        let wanted = if self.options.no_name_filter {
            &[]
        } else {
            wanted
        };
        let page = metrics::page(&self.page_options(), &report, &self.overrides(), wanted);
        typed("text/plain; version=0.0.4; charset=utf-8", page.into())
    }

    fn models(&self) -> Value {
        let base = self.served.models.first();
        let model = |name: &String, root: Option<&String>, parent: Option<&String>| {
            json!({
                "id": name, "object": "model", "created": unix_seconds(), "owned_by": "vllm", "root": root, "parent": parent,
                "max_model_len": self.served.model_len,
            })
        };
        let models = self
            .served
            .models
            .iter()
            .map(|name| model(name, base, None));
        let adapters = self
            .served
            .adapters
            .iter()
            .map(|name| model(name, Some(name), base));
        json!({"object": "list", "data": models.chain(adapters).collect::<Vec<_>>()})
    }

    /// The ORCA header `endpoint-load-metrics`, if the request has a format for it.
    fn orca_headers(&self, format: Option<&str>) -> HeaderMap {
        let load = self.engine.load();
        let value = format.and_then(|format| {
            metrics::orca(format, load.kv_usage, load.waiting, &self.overrides())
        });
        value
            .and_then(|value| HeaderValue::from_str(&value).ok())
            .map(|value| (HeaderName::from_static("endpoint-load-metrics"), value))
            .into_iter()
            .collect()
    }

    /// The empty reply, and the sequences whose output fills it.
    fn plan(&self, inference: &InferenceRequest) -> (ModelReply, Vec<ModelSequence>) {
        let adapter_name = inference
            .adapter
            .and_then(|adapter| self.served.adapters.get(adapter));
        let salt = text::hash(0, adapter_name.map_or("", String::as_str).as_bytes());
        let salt = text::hash(salt, inference.cache_salt.as_bytes());
        let mut choices = Vec::new();
        let mut sequences = Vec::new();
        for prompt in &inference.prompts {
            let prompt_tokens = text::token_count(prompt.len());
            let mut rng = TextRng(text::hash(self.options.seed, prompt));
            for _ in 0..inference.n {
                let (output_tokens, finish) =
                    if matches!(inference.api, ModelApi::Embeddings | ModelApi::CountTokens) {
                        (0, FinishReason::Stop)
                    } else {
                        inference.output(
                            prompt_tokens,
                            &mut rng,
                            self.options.output_tokens_mean,
                            self.served.model_len,
                        )
                    };
                let mut all =
                    Vec::with_capacity(prompt.len() + output_tokens as usize * text::TOKEN_BYTES);
                all.extend_from_slice(prompt);
                text::write_tokens(&mut rng, output_tokens, &mut all);
                let hashes = text::block_hashes(salt, &all);
                let said = String::from_utf8_lossy(&all[prompt.len()..]).into_owned();
                choices.push(ReplyChoice::new(prompt_tokens, said));
                sequences.push(ModelSequence {
                    prompt_tokens,
                    output_tokens,
                    finish,
                    hashes,
                    adapter: inference.adapter,
                });
            }
        }
        let mut reply = self.empty_reply(inference.api, choices);
        reply.model.clone_from(&inference.model);
        reply.n = inference.n;
        reply.include_usage = inference.include_usage;
        reply.continuous_usage = inference.continuous_usage;
        (reply, sequences)
    }

    fn empty_reply(&self, api: ModelApi, choices: Vec<ReplyChoice>) -> ModelReply {
        ModelReply {
            api,
            id: self.reply_id(api),
            created: unix_seconds(),
            model: self.served.models.first().cloned().unwrap_or_default(),
            n: 1,
            include_usage: false,
            continuous_usage: false,
            choices,
        }
    }
}

fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs()
}
