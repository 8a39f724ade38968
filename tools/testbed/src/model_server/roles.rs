//! The stages of a request that a server serves, and the sidecar that calls the other stages.
//!
//! If requests are split into stages, each server has a sidecar in front of its engine. Headers
//! name encode and prefill servers. The sidecar of a decode server calls these servers first, and
//! then its own engine. A sidecar in front of several data-parallel ranks forwards a request to the
//! rank that a header names. If a header names a server for a stage that the server does not serve,
//! the server answers with an error. The calling sidecar then answers with an error too, so that
//! the test fails.
//!
//! No KV cache is transferred. A decode server computes the prompt again, at the cost of its own
//! engine, so tests only check which servers are called.

use axum::body::{Body, Bytes};
use http::request::Parts;
use http::{HeaderName, HeaderValue, Request, Response, StatusCode, header};
use serde_json::{Value, json};

use super::ModelServerState;
use super::response::status_reply;
use crate::client;

/// The stages of a request that a server serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum ServerRole {
    /// All stages.
    #[default]
    Both,
    /// Encodes images, videos and audio clips for others.
    Encode,
    /// Computes prompts for others.
    Prefill,
    /// Generates the answer, and calls other servers for earlier stages if headers name them.
    Decode,
}

const PREFILLER: &str = "x-prefiller-host-port";
const ENCODERS: &str = "x-encoder-hosts-ports";
const RANK: &str = "x-data-parallel-host-port";

/// The header that names the stage that a sidecar requests. Clients never send it.
const STAGE: &str = "x-stage";

// === impl ModelServerState ===

impl ModelServerState {
    /// Returns the sidecar's answer, if the sidecar answers in place of the engine.
    pub(super) async fn sidecar(&self, parts: &Parts, body: &Bytes) -> Option<Response<Body>> {
        let named = |name: &str| {
            parts
                .headers
                .get(name)
                .and_then(|value| value.to_str().ok())
                .map(str::to_owned)
        };
        if let Some(rank) = named(RANK).filter(|rank| *rank != self.address.to_string()) {
            return Some(self.pass_on(&rank, parts, body).await);
        }
        if let Some(wrong) = self.not_mine(named(STAGE).as_deref()) {
            return Some(status_reply(StatusCode::MISDIRECTED_REQUEST, &wrong));
        }
        if self.options.role != ServerRole::Decode {
            return None;
        }
        let encoders = named(ENCODERS).into_iter().flat_map(|list| {
            list.split(',')
                .map(|host| (host.to_owned(), "encode"))
                .collect::<Vec<_>>()
        });
        let stages: Vec<(String, &str)> = encoders
            .chain(named(PREFILLER).map(|host| (host, "prefill")))
            .collect();
        for (host, stage) in stages {
            match self.ask(&host, stage, parts, body).await {
                Ok(reply) if reply.status == 200 => {}
                // If the request caused the error, the client gets the error. If the called server
                // failed, this server does the stage itself.
                Ok(reply) if reply.status < 500 => {
                    let status =
                        StatusCode::from_u16(reply.status).unwrap_or(StatusCode::BAD_GATEWAY);
                    return Some(status_reply(
                        status,
                        &format!("{stage} by {host}: {}", reply.text()),
                    ));
                }
                Ok(_) | Err(_) => {}
            }
        }
        None
    }

    /// Returns the error text if this server does not serve the stage.
    fn not_mine(&self, stage: Option<&str>) -> Option<String> {
        let right = match (self.options.role, stage) {
            (ServerRole::Both, _) | (ServerRole::Decode, None) => true,
            (ServerRole::Prefill, stage) => stage == Some("prefill"),
            (ServerRole::Encode, stage) => stage == Some("encode"),
            (ServerRole::Decode, Some(_)) => false,
        };
        let asked = stage.map_or_else(
            || "a whole request".to_owned(),
            |stage| format!("a request to {stage}"),
        );
        (!right).then(|| {
            format!(
                "{asked} reached a server with the role {:?}",
                self.options.role
            )
        })
    }

    async fn ask(
        &self,
        host: &str,
        stage: &str,
        parts: &Parts,
        body: &Bytes,
    ) -> crate::Result<client::ClientReply> {
        let mut asked: Value = serde_json::from_slice(body)?;
        asked["max_tokens"] = json!(1);
        asked["stream"] = json!(false);
        let request = Request::post(parts.uri.path())
            .header(header::CONTENT_TYPE, "application/json")
            .header(STAGE, stage);
        client::send(
            host.parse()?,
            request.body(client::full(asked.to_string()))?,
        )
        .await
    }

    /// Forwards the request to the data-parallel rank, and returns its answer.
    async fn pass_on(&self, rank: &str, parts: &Parts, body: &Bytes) -> Response<Body> {
        let passed = async {
            let mut request = Request::builder()
                .method(parts.method.clone())
                .uri(parts.uri.clone());
            let framing = [
                header::TRANSFER_ENCODING,
                header::CONTENT_LENGTH,
                HeaderName::from_static(RANK),
            ];
            for (name, value) in parts
                .headers
                .iter()
                .filter(|(name, _)| !framing.contains(name))
            {
                request = request.header(name, value);
            }
            client::send(rank.parse()?, request.body(client::full(body.clone()))?).await
        };
        match passed.await {
            Ok(reply) => {
                let mut answer = Response::new(Body::from(reply.body));
                *answer.status_mut() =
                    StatusCode::from_u16(reply.status).unwrap_or(StatusCode::BAD_GATEWAY);
                for name in [
                    header::CONTENT_TYPE,
                    HeaderName::from_static("endpoint-load-metrics"),
                ] {
                    if let Some(value) = reply.headers.get(&name) {
                        answer.headers_mut().insert(name, value.clone());
                    }
                }
                let rank =
                    HeaderValue::from_str(rank).unwrap_or(HeaderValue::from_static("unknown"));
                answer
                    .headers_mut()
                    .insert(HeaderName::from_static("x-served-by-rank"), rank);
                answer
            }
            Err(error) => status_reply(StatusCode::BAD_GATEWAY, &format!("rank {rank}: {error}")),
        }
    }
}
