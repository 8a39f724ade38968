//! An engine that answers chat requests immediately, and batch requests only when its gate opens.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, Uri};
use axum::response::{IntoResponse, Response};
use futures::stream;
use tokio::net::TcpListener;
use tokio::sync::watch;

use testbed::Result;

/// The request header by which a batch request gets its response headers immediately.
pub const BEGIN: &str = "x-test-begin";

const REPLY: &str = r#"{"object":"chat.completion","choices":[{"message":{"role":"assistant","content":"x"}}],
    "usage":{"prompt_tokens":100,"completion_tokens":100,"total_tokens":200}}"#;

#[derive(Clone)]
pub struct GatedEngine {
    pub address: SocketAddr,
    gate: Arc<watch::Sender<bool>>,
    counts: Arc<Mutex<Counts>>,
}

/// The numbers of batch requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// The number of requests that wait at the gate.
    pub running: usize,
    /// The number of requests whose connection the proxy closed before the answer.
    pub broken_off: usize,
}

/// A batch request that the engine has not answered yet.
struct Running {
    engine: GatedEngine,
    answered: bool,
}

// === impl Running ===

impl Running {
    fn new(engine: GatedEngine) -> Self {
        engine.change(|counts| counts.running += 1);
        Self {
            engine,
            answered: false,
        }
    }

    async fn wait(mut self) -> std::result::Result<&'static str, std::io::Error> {
        // The sender is in the engine, so the channel cannot be closed.
        let _ = self.engine.gate.subscribe().wait_for(|open| *open).await;
        self.answered = true;
        Ok(REPLY)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.engine.change(|counts| {
            counts.running -= 1;
            counts.broken_off += usize::from(!self.answered);
        });
    }
}

// === impl GatedEngine ===

impl GatedEngine {
    pub async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let engine = Self {
            address: listener.local_addr()?,
            gate: Arc::new(watch::Sender::new(false)),
            counts: Arc::default(),
        };
        let app = Router::new().fallback(answer).with_state(engine.clone());
        tokio::spawn(async move { axum::serve(listener, app).await });
        Ok(engine)
    }

    /// Opens the gate: the engine answers all batch requests, now and later.
    pub fn open(&self) {
        self.gate.send_replace(true);
    }

    pub fn counts(&self) -> Counts {
        self.change(|counts| *counts)
    }

    fn change<R>(&self, act: impl FnOnce(&mut Counts) -> R) -> R {
        act(&mut self.counts.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

async fn answer(State(engine): State<GatedEngine>, uri: Uri, headers: HeaderMap) -> Response {
    match uri.path() {
        "/v1/chat/completions" => {}
        "/v1/models" => {
            return r#"{"object":"list","data":[{"id":"demo","object":"model"}]}"#.into_response();
        }
        _ => return axum::http::StatusCode::NOT_FOUND.into_response(),
    }
    let json = [("content-type", "application/json")];
    if headers
        .get("x-test-objective")
        .is_none_or(|objective| objective != "batch")
    {
        return (json, REPLY).into_response();
    }
    let running = Running::new(engine);
    if headers.contains_key(BEGIN) {
        return (json, Body::from_stream(stream::once(running.wait()))).into_response();
    }
    match running.wait().await {
        Ok(reply) => (json, reply).into_response(),
        Err(_) => axum::http::StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}
