//! An engine that answers after a fixed time, and counts how many requests it runs at the same
//! time.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use tokio::net::TcpListener;
use tokio::sync::watch;

use testbed::Result;

#[derive(Clone)]
pub struct SeatEngine {
    pub address: SocketAddr,
    delay: Duration,
    /// Whether the engine answers requests. If not, the requests wait.
    is_open: Arc<watch::Sender<bool>>,
    seen: Arc<Mutex<Seen>>,
}

/// The requests that the engine received.
#[derive(Debug, Default)]
struct Seen {
    running: usize,
    most: usize,
    /// The arrival time, the objective and the fairness id of each request, in order.
    arrivals: Vec<(Instant, String, String)>,
}

const REPLY: &str = r#"{"object":"chat.completion","choices":[{"message":{"role":"assistant","content":"x"}}],
    "usage":{"prompt_tokens":100,"completion_tokens":100,"total_tokens":200}}"#;

async fn answer(State(engine): State<SeatEngine>, uri: Uri, headers: HeaderMap) -> Response {
    match uri.path() {
        "/v1/chat/completions" => {}
        "/v1/models" => {
            return r#"{"object":"list","data":[{"id":"demo","object":"model"}]}"#.into_response();
        }
        "/health" => return StatusCode::OK.into_response(),
        _ => return StatusCode::NOT_FOUND.into_response(),
    }
    let text = |name: &str| {
        headers
            .get(name)
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default()
            .to_owned()
    };
    engine.change(|seen| {
        seen.running += 1;
        seen.most = seen.most.max(seen.running);
        seen.arrivals.push((
            Instant::now(),
            text("x-test-objective"),
            text("x-test-tenant"),
        ));
    });
    let mut gate = engine.is_open.subscribe();
    if gate.wait_for(|is_open| *is_open).await.is_err() {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    }
    tokio::time::sleep(engine.delay).await;
    // The count falls before the reply, because the proxy cannot send the next request earlier.
    engine.change(|seen| seen.running -= 1);
    ([("content-type", "application/json")], REPLY).into_response()
}

// === impl SeatEngine ===

impl SeatEngine {
    pub async fn start(delay: Duration) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let engine = Self {
            address: listener.local_addr()?,
            delay,
            is_open: Arc::new(watch::Sender::new(true)),
            seen: Arc::default(),
        };
        let app = Router::new().fallback(answer).with_state(engine.clone());
        tokio::spawn(async move { axum::serve(listener, app).await });
        Ok(engine)
    }

    fn change<R>(&self, act: impl FnOnce(&mut Seen) -> R) -> R {
        act(&mut self.seen.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Stops answering: requests that arrive wait until [`Self::open`].
    pub fn close(&self) {
        self.is_open.send_replace(false);
    }

    pub fn open(&self) {
        self.is_open.send_replace(true);
    }

    /// Returns the maximum number of requests at the same time since the last call.
    pub fn most(&self) -> usize {
        self.change(|seen| {
            let running = seen.running;
            std::mem::replace(&mut seen.most, running)
        })
    }

    /// Returns the requests so far in order: arrival time, objective, fairness id.
    pub fn arrivals(&self) -> Vec<(Instant, String, String)> {
        self.change(|seen| seen.arrivals.clone())
    }
}
