//! Model servers that do nothing: they read the request and answer at once, so that what is measured is the proxy.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use e2e::Result;
use e2e::process::Process;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

const REPLY: &str = r#"{"id":"1","object":"chat.completion","model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}"#;

const METRICS: &str = "vllm:num_requests_waiting 0\nvllm:num_requests_running 0\nvllm:kv_cache_usage_perc 0\n";

/// Starts this program as the servers at `addresses`, in a process of its own.
///
/// # Errors
/// If it cannot be run.
pub(crate) fn start(addresses: &[String], folder: &Path) -> Result<Process> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["sink", "--listen", &addresses.join(",")]);
    Process::spawn("sink", &mut command, folder)
}

/// Serves on every address until killed.
///
/// # Errors
/// If an address cannot be bound.
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
        tokio::spawn(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service_fn(answer)));
    }
}

async fn answer(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let text = if request.uri().path() == "/metrics" { METRICS } else { REPLY };
    let mut body = request.into_body();
    while let Some(Ok(_)) = body.frame().await {}
    let kind = if text == REPLY { "application/json" } else { "text/plain; version=0.0.4" };
    let mut response = Response::new(Full::new(Bytes::from_static(text.as_bytes())));
    response.headers_mut().insert("content-type", http::HeaderValue::from_static(kind));
    Ok(response)
}
