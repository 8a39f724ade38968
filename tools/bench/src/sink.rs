//! Model servers that compute nothing. They read a request and answer immediately, so that only the
//! proxy is measured. With `?chunks=N&every_ms=M` a server streams N events, M ms apart. The
//! metrics page of a server is as long as an engine's page.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures::{StreamExt, stream};
use http::{Request, Response};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use testbed::Result;
use testbed::client::{self, Body};
use testbed::process::ChildProcess;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

const REPLY: &str = r#"{"id":"1","object":"chat.completion","model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}"#;

/// One event of a stream, as long as an event of vLLM.
const EVENT: &str = "data: {\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion.chunk\",\"created\":1750000000,\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"},\"finish_reason\":null}]}\n\n";

/// The length of a metrics page in bytes: as long as vLLM's page. Most of vLLM's page are
/// histograms that the daemon does not read.
const METRICS_BYTES: usize = 38_000;

/// The metrics page of an idle engine, and the metrics page of a busy engine.
static METRICS: LazyLock<[String; 2]> = LazyLock::new(|| [page(0), page(1)]);

/// The time for which an engine reports that it is busy, after a request on any path. Real engines
/// take longer to answer, and the daemon scrapes busy engines more often.
const BUSY: Duration = Duration::from_secs(1);
static BEGAN: LazyLock<Instant> = LazyLock::new(Instant::now);
/// The time of the last request at any of the servers, in ms, or 0 before the first request.
static WORKED_MS: AtomicU64 = AtomicU64::new(0);

fn page(running: u32) -> String {
    let mut page = format!(
        "vllm:num_requests_waiting 0\nvllm:num_requests_running {running}\nvllm:kv_cache_usage_perc 0\n"
    );
    for bucket in 0.. {
        let _ = writeln!(
            page,
            "vllm:e2e_request_latency_seconds_bucket{{engine=\"0\",le=\"{bucket}.0\",model_name=\"m\"}} 0.0"
        ); // writing to a String cannot fail
        if page.len() > METRICS_BYTES {
            break;
        }
    }
    page
}

fn now_ms() -> u64 {
    u64::try_from((BEGAN.elapsed() + BUSY).as_millis()).unwrap_or(u64::MAX)
}

fn metrics() -> &'static str {
    let busy = now_ms().saturating_sub(WORKED_MS.load(Ordering::Relaxed))
        < u64::try_from(BUSY.as_millis()).unwrap_or(u64::MAX);
    &METRICS[usize::from(busy)]
}

/// Starts the servers at `addresses` in a separate process of this program.
///
/// # Errors
/// Fails if the process cannot be started.
pub(crate) fn start(addresses: &[String], folder: &Path) -> Result<ChildProcess> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["sink", "--listen", &addresses.join(",")]);
    ChildProcess::spawn("sink", &mut command, folder)
}

/// Serves on every address until the process is killed.
///
/// # Errors
/// Fails if an address cannot be bound.
pub(crate) async fn serve(addresses: &[SocketAddr]) -> Result<()> {
    let mut listeners = JoinSet::new();
    for address in addresses {
        listeners.spawn(accept(TcpListener::bind(address).await?));
    }
    listeners.join_all().await;
    Ok(())
}

async fn accept(listener: TcpListener) {
    while let Ok((stream, _)) = listener.accept().await {
        let _ = stream.set_nodelay(true);
        tokio::spawn(
            hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service_fn(answer)),
        );
    }
}

async fn answer(request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
    let path = request.uri().path().to_owned();
    let number = |name: &str| -> Option<u64> {
        let query = request
            .uri()
            .query()?
            .split('&')
            .find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
        query?.parse().ok()
    };
    let streamed = number("chunks").zip(number("every_ms"));
    let destination = request
        .headers()
        .get("x-gateway-destination-endpoint")
        .cloned();
    let mut body = request.into_body();
    while let Some(Ok(_)) = body.frame().await {}
    let (kind, body) = match (path.as_str(), streamed) {
        ("/metrics", _) => ("text/plain; version=0.0.4", client::full(metrics())),
        (_, Some((chunks, every_ms))) => ("text/event-stream", events(chunks, every_ms)),
        _ => {
            WORKED_MS.store(now_ms(), Ordering::Relaxed);
            ("application/json", client::full(REPLY))
        }
    };
    let mut response = Response::new(body);
    response
        .headers_mut()
        .insert("content-type", http::HeaderValue::from_static(kind));
    if let Some(destination) = destination {
        response.headers_mut().insert("x-destination", destination);
    }
    Ok(response)
}

fn events(chunks: u64, every_ms: u64) -> Body {
    let event = move |_| async move {
        tokio::time::sleep(Duration::from_millis(every_ms)).await;
        WORKED_MS.store(now_ms(), Ordering::Relaxed);
        Ok(Frame::data(Bytes::from_static(EVENT.as_bytes())))
    };
    BodyExt::boxed(StreamBody::new(stream::iter(0..chunks).then(event)))
}
