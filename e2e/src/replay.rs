//! Replays a trace against an OpenAI endpoint, open loop: requests are sent when they are due, whatever became of those before.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use serde_json::Value;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::trace::Arrival;

/// Requests under way at once. The trace never needs so many unless the servers fall far behind; then more would only exhaust sockets.
const CONCURRENCY_MAX: usize = 2_000;

/// How long one request may take: past this the run is hopeless anyway.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(300);

/// Where and how fast to replay.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The whole URL requests are posted to.
    pub url: String,
    /// Model they ask for.
    pub model: String,
    /// Headers on each.
    pub headers: Vec<(String, String)>,
    /// How much faster than recorded.
    pub rate: f64,
}

/// What one request saw.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// HTTP status; 0 when there was none.
    pub status: u16,
    /// Send to first token.
    pub ttft: Option<Duration>,
    /// Send to end.
    pub duration: Duration,
    /// Tokens of the prompt, as the engine counted.
    pub prompt_tokens: u64,
    /// How many of them it had cached.
    pub cached_tokens: u64,
}

/// Replays `arrivals` and returns what each saw, in no order.
///
/// # Errors
/// When no HTTP client can be made.
pub async fn run(plan: &Plan, arrivals: &[Arrival]) -> reqwest::Result<Vec<Seen>> {
    let client = reqwest::Client::builder().timeout(REQUEST_TIMEOUT).build()?;
    let permits = Arc::new(Semaphore::new(CONCURRENCY_MAX));
    let start = Instant::now();
    let mut running = JoinSet::new();
    for arrival in arrivals {
        let body = arrival.chat_body(&plan.model);
        tokio::time::sleep_until((start + arrival.at.div_f64(plan.rate)).into()).await;
        let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { break };
        let mut request = client.post(&plan.url).header("content-type", "application/json").body(body);
        for (name, value) in &plan.headers {
            request = request.header(name, value);
        }
        running.spawn(async move {
            let _permit = permit;
            let sent = Instant::now();
            let mut seen = one(request, sent).await;
            seen.duration = sent.elapsed();
            seen
        });
    }
    Ok(running.join_all().await)
}

async fn one(request: reqwest::RequestBuilder, sent: Instant) -> Seen {
    let mut seen = Seen::default();
    let Ok(response) = request.send().await else { return seen };
    seen.status = response.status().as_u16();
    let (mut stream, mut pending) = (response.bytes_stream(), Vec::new());
    while let Some(Ok(bytes)) = stream.next().await {
        pending.extend_from_slice(&bytes);
        while let Some(end) = pending.windows(2).position(|w| w == b"\n\n") {
            let event: Vec<u8> = pending.drain(..end + 2).collect();
            seen.read(&event, sent);
        }
    }
    seen
}

// === impl Seen ===

impl Seen {
    fn read(&mut self, event: &[u8], sent: Instant) {
        let Some(data) = event.strip_prefix(b"data: ") else { return };
        let Ok(value) = serde_json::from_slice::<Value>(data) else { return };
        if self.ttft.is_none() && value.pointer("/choices/0/delta/content").and_then(Value::as_str).is_some_and(|text| !text.is_empty()) {
            self.ttft = Some(sent.elapsed());
        }
        if let Some(tokens) = value.pointer("/usage/prompt_tokens").and_then(Value::as_u64) {
            self.prompt_tokens = tokens;
            self.cached_tokens = value.pointer("/usage/prompt_tokens_details/cached_tokens").and_then(Value::as_u64).unwrap_or(0);
        }
    }
}

/// The `share` quantile (0 to 1) of sorted `values`, nearest rank; `None` of none.
#[must_use]
pub fn quantile(values: &[Duration], share: f64) -> Option<Duration> {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "an index into the slice")]
    let rank = ((values.len() as f64 * share).ceil() as usize).saturating_sub(1);
    values.get(rank.min(values.len().saturating_sub(1))).copied()
}
