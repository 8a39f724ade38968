//! A plain engine: an HTTP server with an OpenAI API and without simulated step times, like a mock
//! server, an echo server or a proxy of another provider. A test can make the plain engine fail in
//! the ways in which real engines fail.
//!
//! [`PlainBehaviour`] sets what an engine does. The behaviour can change while the engine runs, so
//! that a broken engine can recover. Every reply has `x-served-by`.

mod reply;

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock};
use std::time::Duration;

use axum::body::Body;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Limited};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;

use reply::{PATHS, PlainRequest};

/// The name of the engine's model. The engine accepts requests for any model.
pub const MODEL: &str = "demo";

/// The maximum size of a request body, in bytes. A proxy forwards no body of this size.
const BODY_BYTES_MAX: usize = 64 << 20;

/// The maximum number of streams of an HTTP/2 connection. With hyper's default of 200, a burst
/// would queue in the proxy.
const STREAMS_MAX: u32 = 4096;

/// The behaviour of a plain engine. By default the engine is healthy and answers immediately.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlainBehaviour {
    pub answer: PlainAnswer,
    pub delay: AnswerDelay,
    pub metrics: PlainMetrics,
    /// Whether replies report token counts.
    pub usage: UsageReporting,
}

/// The answer to an inference request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PlainAnswer {
    /// The regular reply of the requested API.
    #[default]
    Reply,
    /// A reply with this status and JSON body. The reply is never a stream, and takes as long as a
    /// complete reply.
    Fixed(StatusCode, String),
    /// The regular reply, except that a request whose body contains `mark` immediately gets this
    /// status and JSON body.
    ReplyUnless {
        mark: &'static str,
        status: StatusCode,
        body: &'static str,
    },
    /// A reply with status 200 and without tokens, like the reply of an engine that sleeps or shuts
    /// down. The `finish_reason` is `abort` in the APIs that have one.
    NoWork,
    /// A reply whose connection is closed after the first token. If the reply is not streamed, the
    /// connection is closed in the middle of the body.
    CutAfterFirstToken,
}

/// How long a reply takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AnswerDelay {
    #[default]
    AtOnce,
    /// Every request waits for this time, and then gets the complete reply.
    Constant(Duration),
    /// A reply takes the time `first` until the first token, and the time `next` for each further
    /// token.
    PerToken { first: Duration, next: Duration },
    /// A request waits for this time per prompt token (of four bytes), however many requests run.
    PerPromptToken(Duration),
    /// The engine runs at most `slots` requests at the same time, for the time `each`. Further
    /// requests wait in a queue.
    Slots { slots: usize, each: Duration },
}

/// The answer to `GET /metrics`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PlainMetrics {
    /// A page with the current gauges, with vLLM's names.
    #[default]
    Live,
    /// Always the page of an idle engine, even under load.
    Frozen,
    /// A reply with status 404.
    Missing,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UsageReporting {
    #[default]
    Reported,
    Untold,
}

/// A running plain engine. Dropping this value closes the engine's socket and all connections.
#[derive(Debug)]
pub struct PlainEngine {
    shared: Arc<PlainEngineState>,
    task: JoinHandle<()>,
}

#[derive(Debug)]
struct PlainEngineState {
    address: SocketAddr,
    served_by: http::HeaderValue,
    manner: RwLock<SlottedBehaviour>,
    /// The requests to each path, in the order of [`PATHS`].
    requests: [AtomicU64; PATHS.len()],
    running: watch::Sender<u64>,
}

/// A behaviour, with the slots for requests that the behaviour needs.
#[derive(Clone, Debug)]
struct SlottedBehaviour {
    behaviour: PlainBehaviour,
    slots: Option<Arc<Semaphore>>,
}

/// A running request, which occupies its slot until this value is dropped.
#[derive(Debug)]
struct RunningGuard {
    shared: Arc<PlainEngineState>,
    _slot: Option<OwnedSemaphorePermit>,
}

/// Returns the paths that engines serve.
pub fn paths() -> impl Iterator<Item = &'static str> {
    PATHS.iter().map(|(path, _)| *path)
}

// === impl PlainBehaviour ===

impl PlainBehaviour {
    /// Returns a healthy behaviour with this delay.
    #[must_use]
    pub fn with_delay(delay: AnswerDelay) -> Self {
        Self {
            delay,
            ..Self::default()
        }
    }

    /// Creates the behaviour of a healthy engine that answers every inference request immediately
    /// with this status and body. A number that is not a status is replaced by 500.
    #[must_use]
    pub fn with_status(status: u16, body: &str) -> Self {
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        Self {
            answer: PlainAnswer::Fixed(status, body.to_owned()),
            ..Self::default()
        }
    }
}

// === impl PlainEngine ===

impl PlainEngine {
    /// Starts an engine; port 0 takes a free port. The caller must be in a tokio runtime.
    ///
    /// # Errors
    /// Fails if the address cannot be bound.
    pub async fn start(listen: SocketAddr, behaviour: PlainBehaviour) -> io::Result<Self> {
        let listener = TcpListener::bind(listen).await?;
        let address = listener.local_addr()?;
        let served_by =
            http::HeaderValue::from_str(&address.to_string()).map_err(io::Error::other)?;
        let shared = Arc::new(PlainEngineState {
            address,
            served_by,
            manner: RwLock::new(SlottedBehaviour::from_behaviour(behaviour)),
            requests: std::array::from_fn(|_| AtomicU64::new(0)),
            running: watch::Sender::new(0),
        });
        let task = tokio::spawn(serve(listener, shared.clone()));
        Ok(Self { shared, task })
    }

    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.shared.address
    }

    /// Changes the behaviour from the next request on.
    pub fn behave(&self, behaviour: PlainBehaviour) {
        *self
            .shared
            .manner
            .write()
            .unwrap_or_else(std::sync::PoisonError::into_inner) =
            SlottedBehaviour::from_behaviour(behaviour);
    }

    #[must_use]
    pub fn requests(&self) -> u64 {
        self.requests_by_path().iter().sum()
    }

    /// Counts the requests to each path, in the order of [`paths`].
    #[must_use]
    pub fn requests_by_path(&self) -> Vec<u64> {
        let counts = self.shared.requests.iter();
        counts.map(|count| count.load(Ordering::Relaxed)).collect()
    }

    /// Counts the requests that run or wait now.
    #[must_use]
    pub fn running(&self) -> u64 {
        *self.shared.running.borrow()
    }
}

impl Drop for PlainEngine {
    fn drop(&mut self) {
        self.task.abort();
    }
}

// === impl SlottedBehaviour ===

impl SlottedBehaviour {
    fn from_behaviour(behaviour: PlainBehaviour) -> Self {
        let slots = if let AnswerDelay::Slots { slots, .. } = behaviour.delay {
            Some(Arc::new(Semaphore::new(slots)))
        } else {
            None
        };
        Self { behaviour, slots }
    }
}

// === impl PlainEngineState ===

impl PlainEngineState {
    fn manner(&self) -> SlottedBehaviour {
        self.manner
            .read()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .clone()
    }
}

// === impl RunningGuard ===

impl RunningGuard {
    /// Counts a request to the path at this position in [`PATHS`].
    fn count(shared: &Arc<PlainEngineState>, path: usize) -> Self {
        if let Some(requests) = shared.requests.get(path) {
            requests.fetch_add(1, Ordering::Relaxed);
        }
        shared.running.send_modify(|running| *running += 1);
        Self {
            shared: shared.clone(),
            _slot: None,
        }
    }
}

impl Drop for RunningGuard {
    fn drop(&mut self) {
        self.shared.running.send_modify(|running| *running -= 1);
    }
}

async fn serve(listener: TcpListener, shared: Arc<PlainEngineState>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else { continue };
                let _ = stream.set_nodelay(true); // an error costs only latency
                let shared = shared.clone();
                connections.spawn(async move {
                    let service = hyper::service::service_fn(|request| {
                        let shared = shared.clone();
                        async move { Ok::<_, Infallible>(answer(&shared, request).await) }
                    });
                    let mut builder = auto::Builder::new(TokioExecutor::new());
                    builder.http2().max_concurrent_streams(STREAMS_MAX);
                    let _ = pin!(builder.serve_connection(TokioIo::new(stream), service)).await; // the client sees how the connection ended
                });
            }
        }
    }
}

async fn answer(shared: &Arc<PlainEngineState>, request: Request<Incoming>) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let body = match Limited::new(body, BODY_BYTES_MAX).collect().await {
        Ok(body) => body.to_bytes(),
        Err(_) => return with_status(StatusCode::PAYLOAD_TOO_LARGE),
    };
    let mut response = match (&parts.method, parts.uri.path()) {
        (&Method::GET, "/metrics") => metrics_page(shared),
        (&Method::GET, "/v1/models") => reply::json(
            &serde_json::json!({"object": "list", "data": [{"id": MODEL, "object": "model"}]}),
        ),
        (&Method::GET, _) => Response::default(),
        (_, path) => match PlainRequest::parse(path, &body) {
            Some(asked) => infer(shared, asked, &body).await,
            None => with_status(StatusCode::NOT_FOUND),
        },
    };
    response
        .headers_mut()
        .insert("x-served-by", shared.served_by.clone());
    response
}

async fn infer(shared: &Arc<PlainEngineState>, asked: PlainRequest, body: &[u8]) -> Response<Body> {
    let mut running = RunningGuard::count(shared, asked.path);
    let SlottedBehaviour { behaviour, slots } = shared.manner();
    if let PlainAnswer::ReplyUnless {
        mark,
        status,
        body: refusal,
    } = behaviour.answer
        && String::from_utf8_lossy(body).contains(mark)
    {
        return fixed(status, refusal.to_owned());
    }
    match behaviour.delay {
        AnswerDelay::AtOnce => {}
        AnswerDelay::Constant(all) => sleep(all).await,
        AnswerDelay::PerToken { first, .. } => sleep(first).await,
        AnswerDelay::PerPromptToken(each) => sleep(each * asked.prompt_tokens).await,
        AnswerDelay::Slots { each, .. } => {
            running._slot = match slots {
                Some(slots) => slots.acquire_owned().await.ok(),
                None => None,
            };
            sleep(each).await;
        }
    }
    match &behaviour.answer {
        PlainAnswer::Fixed(status, body) => fixed(*status, body.clone()),
        PlainAnswer::Reply
        | PlainAnswer::ReplyUnless { .. }
        | PlainAnswer::NoWork
        | PlainAnswer::CutAfterFirstToken => {
            let asked = if behaviour.answer == PlainAnswer::NoWork {
                asked.aborted()
            } else {
                asked
            };
            let next = if let AnswerDelay::PerToken { next, .. } = behaviour.delay {
                next
            } else {
                Duration::ZERO
            };
            reply::reply(&asked, &behaviour, next, running).await
        }
    }
}

fn fixed(status: StatusCode, body: String) -> Response<Body> {
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        http::HeaderValue::from_static("application/json"),
    );
    response
}

fn metrics_page(shared: &PlainEngineState) -> Response<Body> {
    let manner = shared.manner();
    let running = match manner.behaviour.metrics {
        PlainMetrics::Missing => return with_status(StatusCode::NOT_FOUND),
        PlainMetrics::Frozen => 0,
        PlainMetrics::Live => *shared.running.borrow(),
    };
    let slots = if let AnswerDelay::Slots { slots, .. } = manner.behaviour.delay {
        slots as u64
    } else {
        u64::MAX
    };
    let gauge = |name: &str, value: u64| {
        format!("# TYPE {name} gauge\n{name}{{model_name=\"{MODEL}\"}} {value}\n")
    };
    let page = [
        gauge("vllm:num_requests_running", running.min(slots)),
        gauge("vllm:num_requests_waiting", running.saturating_sub(slots)),
        gauge("vllm:kv_cache_usage_perc", 0),
    ];
    let mut response = Response::new(Body::from(page.concat()));
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        http::HeaderValue::from_static("text/plain; version=0.0.4"),
    );
    response
}

fn with_status(status: StatusCode) -> Response<Body> {
    let mut response = Response::default();
    *response.status_mut() = status;
    response
}
