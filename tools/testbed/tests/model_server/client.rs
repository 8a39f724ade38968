//! A small HTTP client and helpers that the tests share.

use std::net::SocketAddr;
use std::time::Duration;

use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use testbed::model_server::{ModelServer, ModelServerOptions};

/// The time limit of each wait. The limit is far longer than a successful wait in these tests, and
/// a test that hangs fails instead of blocking the run.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Starts a server that answers immediately.
pub fn instant() -> ModelServer {
    with(ModelServerOptions {
        speed: 0.0,
        ..ModelServerOptions::default()
    })
}

pub fn with(options: ModelServerOptions) -> ModelServer {
    ModelServer::start(ModelServerOptions {
        models: vec!["demo".into()],
        ..options
    })
    .unwrap()
}

pub struct ModelServerReply {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl ModelServerReply {
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    /// Returns the server-sent events of the answer as (name, data).
    pub fn events(&self) -> Vec<(String, Value)> {
        assert_eq!(
            self.headers["content-type"],
            "text/event-stream; charset=utf-8"
        );
        let event = |event: &str| {
            let field = |name: &str| {
                event
                    .lines()
                    .find_map(|line| line.strip_prefix(name))
                    .unwrap_or_default()
                    .to_owned()
            };
            let data = field("data: ");
            (
                field("event: "),
                if data == "[DONE]" {
                    json!(data)
                } else {
                    serde_json::from_str(&data).unwrap()
                },
            )
        };
        self.text().split_terminator("\n\n").map(event).collect()
    }
}

/// Sends a request and returns when the response headers arrive.
pub async fn open(
    address: SocketAddr,
    request: http::request::Builder,
    body: &str,
) -> Result<Response<Incoming>, String> {
    let request: Request<Full<Bytes>> = request.body(Full::from(body.to_owned())).unwrap();
    let client = Client::builder(TokioExecutor::new())
        .http2_only(request.version() == http::Version::HTTP_2)
        .build_http();
    assert_eq!(request.uri().port_u16(), Some(address.port()));
    tokio::time::timeout(PATIENCE, client.request(request))
        .await
        .unwrap()
        .map_err(|error| format!("{error:?}"))
}

pub fn request(address: SocketAddr, method: &str, path: &str) -> http::request::Builder {
    Request::builder()
        .method(method)
        .uri(format!("http://{address}{path}"))
}

pub async fn finish(response: Response<Incoming>) -> ModelServerReply {
    let (parts, body) = response.into_parts();
    let body = tokio::time::timeout(PATIENCE, body.collect())
        .await
        .unwrap()
        .unwrap()
        .to_bytes();
    ModelServerReply {
        status: parts.status,
        headers: parts.headers,
        body,
    }
}

pub async fn get(address: SocketAddr, path: &str) -> ModelServerReply {
    finish(
        open(address, request(address, "GET", path), "")
            .await
            .unwrap(),
    )
    .await
}

pub async fn post(address: SocketAddr, path: &str, body: &Value) -> ModelServerReply {
    finish(
        open(address, request(address, "POST", path), &body.to_string())
            .await
            .unwrap(),
    )
    .await
}

/// Returns a chat request for exactly `tokens` tokens, with the fields of `with`.
pub fn chat(text: &str, tokens: u32, with: &Value) -> Value {
    let mut body = json!({
        "model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "ignore_eos": true,
    });
    body.as_object_mut()
        .unwrap()
        .extend(with.as_object().unwrap().clone());
    body
}

/// Waits until `holds` is true of the server's state.
pub async fn until(server: &ModelServer, holds: impl Fn(&Value) -> bool) -> Value {
    let wait = async {
        loop {
            let state = server.state().await.unwrap();
            if holds(&state) {
                return state;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    match tokio::time::timeout(PATIENCE, wait).await {
        Ok(state) => state,
        Err(_) => panic!(
            "the state never came about: {}",
            server.state().await.unwrap()
        ),
    }
}
