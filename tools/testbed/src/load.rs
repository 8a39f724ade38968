//! A steady background load for drills, which counts failures and measures no latency.
//!
//! Each client has one request in flight. Each request uses a new connection, so that every worker
//! of Envoy gets requests. Each request also has a different prompt, so that no cached prefix
//! attracts the request to a server. Every second request has an SLO that every server meets:
//! drills check at the end that the records of these SLOs are gone. A client pauses briefly after a
//! failure.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::{Request, header};
use serde_json::json;
use tokio::task::JoinHandle;

use crate::{Result, client, wait_for};

/// The pause between two requests of a client, so that the load does not use the whole machine.
const PAUSE: Duration = Duration::from_millis(5);

/// The pause of a client after a failure. A worker recovers sooner, so a client loses at most one
/// request in each short outage.
const REST: Duration = Duration::from_secs(2);

/// The maximum number of requests of one client, in case a test forgets to stop its load.
const REQUESTS_MAX: usize = 20_000;

#[derive(Debug)]
pub struct LoadGenerator {
    shared: Arc<LoadState>,
    clients: Vec<JoinHandle<()>>,
}

#[derive(Clone, Debug, Default)]
pub struct LoadOutcome {
    /// The number of requests that were answered with 200, by server.
    pub served: BTreeMap<String, usize>,
    /// The error texts of the other requests.
    pub failures: Vec<String>,
}

#[derive(Debug, Default)]
struct LoadState {
    over: AtomicBool,
    numbers: AtomicUsize,
    outcome: Mutex<LoadOutcome>,
}

// === impl LoadGenerator ===

impl LoadGenerator {
    /// Starts `clients` clients of the proxy at `address`. The caller must be in a tokio runtime.
    pub fn start(address: SocketAddr, clients: usize) -> Self {
        Self::with_mode(address, clients, false)
    }

    /// Like [`Self::start`], but with streamed replies.
    pub fn of_streams(address: SocketAddr, clients: usize) -> Self {
        Self::with_mode(address, clients, true)
    }

    fn with_mode(address: SocketAddr, clients: usize, stream: bool) -> Self {
        let shared = Arc::new(LoadState::default());
        let clients = (0..clients)
            .map(|_| tokio::spawn(run(address, shared.clone(), stream)))
            .collect();
        Self { shared, clients }
    }

    /// Waits until `count` more requests are served.
    ///
    /// # Errors
    /// Fails if fewer requests are served within `limit`. The error has the failures since the
    /// call.
    pub async fn wait_for_more(&self, count: usize, limit: Duration) -> Result<()> {
        let before = self.shared.snapshot().total();
        let served = || async { (self.shared.snapshot().total() >= before + count).then_some(()) };
        let what = format!("{count} requests to be served");
        wait_for(limit, &what, served)
            .await
            .map_err(|error| format!("{error}: {:?}", self.shared.snapshot().failures).into())
    }

    pub fn so_far(&self) -> LoadOutcome {
        self.shared.snapshot()
    }

    /// Stops the clients, after their requests in flight end.
    ///
    /// # Errors
    /// Fails if a client panicked.
    pub async fn stop(mut self) -> Result<LoadOutcome> {
        self.shared.over.store(true, Ordering::Relaxed);
        for client in std::mem::take(&mut self.clients) {
            client.await?;
        }
        Ok(self.shared.snapshot())
    }
}

impl Drop for LoadGenerator {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
    }
}

// === impl LoadState ===

impl LoadState {
    fn snapshot(&self) -> LoadOutcome {
        self.outcome
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Records a reply. Returns true if the request was served.
    fn note(&self, reply: Result<client::ClientReply>) -> bool {
        let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        match reply {
            Ok(reply) if reply.status == 200 => {
                *outcome
                    .served
                    .entry(reply.header("x-served-by").to_owned())
                    .or_default() += 1;
                return true;
            }
            Ok(reply) => outcome
                .failures
                .push(format!("{} {}", reply.status, reply.text())),
            Err(error) => outcome.failures.push(error.to_string()),
        }
        false
    }
}

// === impl LoadOutcome ===

impl LoadOutcome {
    pub fn total(&self) -> usize {
        self.served.values().sum()
    }

    /// Checks that requests were sent, and that all were served.
    ///
    /// # Errors
    /// Fails if a request failed, or if no request was sent. The error has the first failures.
    pub fn check_all_served(&self) -> Result<()> {
        match (self.total(), self.failures.len()) {
            (0, 0) => Err("no request was sent".into()),
            (_, 0) => Ok(()),
            (served, failed) => Err(format!(
                "{failed} of {} failed, first {:?}",
                served + failed,
                &self.failures[..failed.min(5)]
            )
            .into()),
        }
    }
}

fn request(body: String, has_slo: bool) -> Result<Request<client::Body>> {
    let builder =
        Request::post("/v1/chat/completions").header(header::CONTENT_TYPE, "application/json");
    let builder = if has_slo {
        builder
            .header("x-slo-ttft-ms", "60000")
            .header("x-slo-tpot-ms", "60000")
    } else {
        builder
    };
    Ok(builder.body(client::full(body))?)
}

async fn run(address: SocketAddr, shared: Arc<LoadState>, stream: bool) {
    for _ in 0..REQUESTS_MAX {
        if shared.over.load(Ordering::Relaxed) {
            return;
        }
        let number = shared.numbers.fetch_add(1, Ordering::Relaxed);
        let prompt = format!("{number} is the number of this request and of no other");
        let tokens = if stream { 8 } else { 2 };
        let body = json!({"model": "demo", "stream": stream, "max_tokens": tokens, "messages": [{"role": "user", "content": prompt}]});
        let request = request(body.to_string(), number.is_multiple_of(2));
        let reply = async { client::send(address, request?).await };
        let served = shared.note(reply.await);
        tokio::time::sleep(if served { PAUSE } else { REST }).await;
    }
}
