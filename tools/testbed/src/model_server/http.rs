//! Handles one request to a model server: first faults, then echo, pages and inference.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io::Write as _;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::{Body, Bytes};
use axum::extract::Query;
use futures::stream;
use http::request::Parts;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Version, header,
};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use serde_json::{Value, json};
use tokio::time::Instant;

mod failing;
mod streaming;
use failing::fail;
use streaming::reset_after_flush;

use super::driver::{OutputKind, SequenceOutput};
use super::engine::{FinishReason, ModelSequence};
use super::faults::FaultMode;
use super::reply::{ModelReply, ReplyChoice};
use super::request::{InferenceRequest, ModelApi};
use super::response::{EVENT_STREAM, header_pairs, json_reply, status_reply, typed, with_status};
use super::socket::ServedConnection;
use super::stats::RequestParameters;
use super::text::{self, TextRng};
use super::{ModelServerState, admin, metrics};

/// The maximum size of a body, in bytes. The limit is more than a filter forwards (a prompt of 1M
/// tokens is 4 to 8 MB), and fits into the machine's memory.
const BODY_BYTES_MAX: usize = 128 << 20;
/// The largest body that an echo returns as text, in bytes. For a larger body the echo returns only
/// the digest.
const ECHO_BYTES_MAX: usize = 64 << 10;
/// The maximum number of requests kept for `/admin/state`, enough for one test.
const RECORDS_MAX: usize = 256;
/// A request that reached the engine.
#[derive(Clone, Debug)]
pub(super) struct LoggedRequest {
    pub method: Method,
    pub path: String,
    pub version: Version,
    pub headers: HeaderMap,
    pub body_bytes: usize,
}

/// The log of the requests that arrived.
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

/// The state of one request until the server has answered the request.
struct ServerExchange {
    server: Arc<ModelServerState>,
    connection: Arc<ServedConnection>,
    trailers: Option<HeaderMap>,
    /// The number of chunks after which the connection is reset.
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
                    && let Some(api) = ModelApi::from_path(path) =>
            {
                self.infer_bare(api, &body).await
            }
            (&Method::POST, path)
                if ModelApi::from_path(path).is_some()
                    && let Some(answer) = self.server.sidecar(parts, &body).await =>
            {
                answer
            }
            (&Method::POST, path) if let Some(api) = ModelApi::from_path(path) => {
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
        // vLLM reports load only in replies of these two APIs.
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

    /// Resets the connection, as if the process of the engine had ended. Called when the engine was
    /// restarted during the request.
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
}

/// Returns the names in `?name[]=a&name[]=b`.
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

/// Whether the body has `"stream": true`. A search finds the field, because a parser would need
/// more CPU time.
fn wants_stream(body: &[u8]) -> bool {
    const KEY: &[u8] = b"\"stream\"";
    memchr::memmem::find(body, KEY).is_some_and(|at| {
        let rest = body[at + KEY.len()..].trim_ascii_start();
        rest.strip_prefix(b":")
            .is_some_and(|rest| rest.trim_ascii_start().starts_with(b"true"))
    })
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

    /// Returns the ORCA header `endpoint-load-metrics`, if the request names a format for this
    /// header.
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

    /// Returns the empty reply, and the sequences whose output fills the reply.
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
