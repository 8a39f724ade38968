//! Replays a trace against an OpenAI endpoint in an open loop, which sends each request when it is
//! due, even if earlier requests have not ended.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use http::Request;
use serde_json::Value;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::Result;
use crate::client::{self, Body, EventStream};
use crate::trace::Arrival;

/// The maximum number of requests in flight. A trace reaches this number only if the servers fall
/// far behind. More requests would exhaust the sockets.
const CONCURRENCY_MAX: usize = 2_000;

/// Time limit of one request. A run with slower requests has no value.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(300);

/// The target and speed of a replay.
#[derive(Clone, Debug)]
pub struct ReplayPlan {
    pub target: SocketAddr,
    pub model: String,
    pub headers: Vec<(String, String)>,
    pub rate: f64,
}

#[derive(Clone, Debug, Default)]
pub struct ReplayResult {
    /// The arrival time in the trace.
    pub at: Duration,
    /// The delay with which the request was sent after it was due. A delay of more than a few
    /// milliseconds means that this machine is too slow for the rate.
    pub late: Duration,
    /// HTTP status; 0 if there was no reply.
    pub status: u16,
    /// The time from sending to the first token.
    pub ttft: Option<Duration>,
    /// The time from sending to the end.
    pub duration: Duration,
    pub prompt_tokens: u64,
    /// Cached prompt tokens, as reported by the engine.
    pub cached_tokens: u64,
}

/// The results of a replay so far, which another task may read while the replay runs.
#[derive(Clone, Debug, Default)]
pub struct ReplayProgress(Arc<Mutex<ProgressState>>);

#[derive(Debug, Default)]
struct ProgressState {
    sent: usize,
    results: Vec<ReplayResult>,
}

/// Replays `arrivals` as streamed chat requests. Returns one result per request, in no particular
/// order.
///
/// # Errors
/// Fails if a header of the plan is invalid.
pub async fn run(plan: &ReplayPlan, arrivals: &[Arrival]) -> Result<Vec<ReplayResult>> {
    let progress = ReplayProgress::default();
    run_observed(plan, arrivals, Instant::now(), &progress).await?;
    Ok(progress.results())
}

/// Like [`run`], with arrival times counted from `start`. Adds each result to `progress` when its
/// request ends.
///
/// # Errors
/// Fails if a header of the plan is invalid.
pub async fn run_observed(
    plan: &ReplayPlan,
    arrivals: &[Arrival],
    start: Instant,
    progress: &ReplayProgress,
) -> Result<()> {
    let permits = Arc::new(Semaphore::new(CONCURRENCY_MAX));
    let mut running = JoinSet::new();
    for arrival in arrivals {
        let mut request =
            Request::post("/v1/chat/completions").header("content-type", "application/json");
        for (name, value) in &plan.headers {
            request = request.header(name, value);
        }
        let target = plan.target;
        let at = arrival.at;
        let request = request.body(client::full(arrival.chat_body(&plan.model)))?;
        let due = start + arrival.at.div_f64(plan.rate);
        tokio::time::sleep_until(due.into()).await;
        let permit = Arc::clone(&permits).acquire_owned().await?;
        progress.state().sent += 1;
        let progress = progress.clone();
        running.spawn(async move {
            let _permit = permit;
            let sent = Instant::now();
            let mut seen = ReplayResult {
                at,
                late: sent.saturating_duration_since(due),
                ..ReplayResult::default()
            };
            // A failed request needs no error here, because the fields of later events stay unset.
            let _ = timeout(REQUEST_TIMEOUT, seen.watch(target, request, sent)).await;
            seen.duration = sent.elapsed();
            progress.state().results.push(seen);
        });
    }
    running.join_all().await;
    Ok(())
}

// === impl ReplayProgress ===

impl ReplayProgress {
    #[must_use]
    pub fn sent(&self) -> usize {
        self.state().sent
    }

    /// Returns the results of the requests that have ended.
    #[must_use]
    pub fn results(&self) -> Vec<ReplayResult> {
        self.state().results.clone()
    }

    fn state(&self) -> MutexGuard<'_, ProgressState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl ReplayResult ===

impl ReplayResult {
    async fn watch(
        &mut self,
        target: SocketAddr,
        request: Request<Body>,
        sent: Instant,
    ) -> Result<()> {
        let response = client::start_within(target, request, REQUEST_TIMEOUT).await?;
        self.status = response.status().as_u16();
        let mut events = EventStream::new(response);
        while let Some(event) = events.next().await? {
            self.read(&event.data, sent);
        }
        Ok(())
    }

    fn read(&mut self, data: &str, sent: Instant) {
        let Ok(value) = serde_json::from_str::<Value>(data) else {
            return;
        };
        if self.ttft.is_none()
            && value
                .pointer("/choices/0/delta/content")
                .and_then(Value::as_str)
                .is_some_and(|text| !text.is_empty())
        {
            self.ttft = Some(sent.elapsed());
        }
        if let Some(tokens) = value
            .pointer("/usage/prompt_tokens")
            .and_then(Value::as_u64)
        {
            self.prompt_tokens = tokens;
            self.cached_tokens = value
                .pointer("/usage/prompt_tokens_details/cached_tokens")
                .and_then(Value::as_u64)
                .unwrap_or(0);
        }
    }
}

/// Returns the `share` quantile (0 to 1) of sorted `values`, by nearest rank; `None` if there are
/// no values.
#[must_use]
pub fn quantile(values: &[Duration], share: f64) -> Option<Duration> {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "an index into the slice"
    )]
    let rank = ((values.len() as f64 * share).ceil() as usize).saturating_sub(1);
    values
        .get(rank.min(values.len().saturating_sub(1)))
        .copied()
}
