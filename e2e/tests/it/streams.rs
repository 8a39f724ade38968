//! Opens many streams at the same time, to see which streams a drill breaks.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::future::join_all;
use http::Request;
use serde_json::{Value, json};
use testbed::Result;
use testbed::client::{self, EventStream, Http2Client};
use testbed::model_server::ModelServerOptions;

/// A stream whose first event has arrived.
pub(crate) struct RunningStream {
    /// The endpoint that serves the stream.
    pub(crate) by: String,
    events: EventStream,
}

/// Returns the options of a server that pauses this long between two events.
pub(crate) fn slow(chunk_delay_ms: u64) -> ModelServerOptions {
    ModelServerOptions {
        models: vec!["demo".into()],
        speed: 0.0,
        chunk_delay_ms,
        ..ModelServerOptions::default()
    }
}

/// Returns a request for a stream of this many events. `tag` makes its prompt unique.
pub(crate) fn chat(tag: &str, tokens: u32) -> Value {
    json!({"model": "demo", "stream": true, "max_tokens": tokens, "ignore_eos": true, "messages": [{"role": "user", "content": tag}]})
}

pub(crate) fn request(tag: &str, tokens: u32) -> Result<Request<client::Body>> {
    // No stream can miss this SLO. The SLO is set to check that the proxy forgets it at the end.
    Ok(Request::post("/v1/chat/completions")
        .header("x-slo-tpot-ms", "60000")
        .body(client::full(chat(tag, tokens).to_string()))?)
}

async fn begin(
    address: SocketAddr,
    request: Request<client::Body>,
    http2: bool,
) -> Result<RunningStream> {
    let response = if http2 {
        Http2Client::connect(address).await?.start(request).await?
    } else {
        client::start(address, request).await?
    };
    let by = response
        .headers()
        .get("x-served-by")
        .ok_or_else(|| format!("not served: {}", response.status()))?
        .to_str()?
        .to_owned();
    let mut events = EventStream::new(response);
    events.next().await?.ok_or("no event")?;
    Ok(RunningStream { by, events })
}

/// Opens this many streams, each on a separate connection and every second one by HTTP/2. Returns
/// when all have begun.
pub(crate) async fn open(
    address: SocketAddr,
    count: usize,
    tokens: u32,
) -> Result<Vec<RunningStream>> {
    static NUMBERS: AtomicUsize = AtomicUsize::new(0);
    let all = (0..count).map(|i| {
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        async move {
            begin(
                address,
                request(
                    &format!("{number} is the number of this stream and of no other"),
                    tokens,
                )?,
                i % 2 == 1,
            )
            .await
        }
    });
    join_all(all).await.into_iter().collect()
}

/// Waits for all streams to end. Returns how many were complete and how many broke off with an
/// error.
pub(crate) async fn ends(streams: Vec<RunningStream>) -> (usize, usize) {
    let ends = join_all(streams.into_iter().map(|running| running.events.rest())).await;
    let whole = ends
        .iter()
        .filter(|end| {
            end.as_ref()
                .is_ok_and(|events| events.last().is_some_and(|event| event.data == "[DONE]"))
        })
        .count();
    (whole, ends.len() - whole)
}
