//! Pools with one broken engine of four. The broken engine answers immediately and has the metrics
//! of a healthy engine, but its answers are errors, or have no output.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::time::sleep;

use crate::plain_engine::{AnswerDelay, PlainAnswer, PlainBehaviour, paths};
use crate::plain_pools::{PlainPool, PlainPools};
use crate::stack::StackBuilder;
use crate::{Result, wait_for};

/// The number of clients of each pool.
const CLIENTS: usize = 32;

/// The time that a working engine takes for a reply.
const REPLY: Duration = Duration::from_millis(500);

/// The time before requests are counted. Proxies must notice a broken engine within a second; the
/// other second is for a busy machine.
const SETTLING: Duration = Duration::from_secs(2);

/// The time during which requests are counted. It exceeds the 10 s for which a proxy remembers
/// failures. All clients begin at the same time, so the proxy also forgets all failures that did
/// not eject the broken engine at about the same time. Then the broken engine gets a few requests
/// again.
const MEASURED: Duration = Duration::from_secs(12);

/// Time limit for the first replies of working engines.
const LIMIT: Duration = Duration::from_secs(30);

/// The number of requests that a repaired engine must get to count as serving again. An engine that
/// is still ejected gets only one probe every five seconds.
const SERVED: u64 = 10;

/// The maximum number of requests of one client, in case the caller forgets to stop the client.
const REQUESTS_MAX: u64 = 20_000;

/// The name of the pool whose clients alternate between SGLang's and vLLM's APIs of this name.
const NO_WORK_GENERATE: &str = "no-work-in-200-of-generate";

/// The name of the pool whose clients alternate between all other APIs that generate.
const NO_WORK: &str = "no-work-in-200";

/// One pool for each fault, with clients. The first engine of each pool is broken.
#[derive(Debug)]
pub struct BrokenPools {
    world: PlainPools,
    over: Arc<AtomicBool>,
}

/// The requests that the engines of one pool received.
#[derive(Clone, Debug)]
pub struct PoolRequests {
    pub fault: String,
    /// Requests to each engine. The first engine is broken.
    pub requests: Vec<u64>,
    /// The requests of each API that had some.
    pub by_path: Vec<PathRequests>,
}

/// The requests of one API that the engines of one pool received.
#[derive(Clone, Copy, Debug)]
pub struct PathRequests {
    pub path: &'static str,
    pub to_broken: u64,
    pub to_all: u64,
}

/// Returns the name of each fault, and the behaviour of its broken engine.
fn faults() -> Vec<(&'static str, PlainBehaviour)> {
    let error = |code: u16| {
        json!({"error": {"message": "CUDA error", "type": "InternalServerError", "code": code}})
            .to_string()
    };
    let no_work = PlainBehaviour {
        answer: PlainAnswer::NoWork,
        ..PlainBehaviour::default()
    };
    vec![
        (NO_WORK_GENERATE, no_work.clone()),
        (NO_WORK, no_work),
        ("status-400", PlainBehaviour::with_status(400, &error(400))),
        ("status-500", PlainBehaviour::with_status(500, &error(500))),
        ("status-404", PlainBehaviour::with_status(404, &error(404))),
        ("status-401", PlainBehaviour::with_status(401, &error(401))),
        (
            "status-502",
            PlainBehaviour::with_status(502, "bad gateway"),
        ),
        ("empty-200", PlainBehaviour::with_status(200, "")),
        (
            "error-in-200",
            PlainBehaviour::with_status(200, &error(500)),
        ),
        (
            "cut-stream",
            PlainBehaviour {
                answer: PlainAnswer::CutAfterFirstToken,
                ..PlainBehaviour::default()
            },
        ),
    ]
}

fn works() -> PlainBehaviour {
    PlainBehaviour::with_delay(AnswerDelay::Constant(REPLY))
}

// === impl BrokenPools ===

impl BrokenPools {
    /// Starts the pools behind one proxy with `workers` worker threads.
    ///
    /// # Errors
    /// Fails if any part does not start.
    pub async fn start(workers: u32) -> Result<Self> {
        Self::start_with(|builder| builder.concurrency(workers)).await
    }

    /// Like [`Self::start`], with further changes to the stack.
    ///
    /// # Errors
    /// Fails if any part does not start.
    pub async fn start_with(change: impl FnOnce(StackBuilder) -> StackBuilder) -> Result<Self> {
        let mut pools = Vec::new();
        for (name, fault) in faults() {
            pools.push(PlainPool::start(name, [fault, works(), works(), works()]).await?);
        }
        let world = PlainPools::start(pools, change).await?;
        Ok(Self {
            world,
            over: Arc::default(),
        })
    }

    /// Returns the pools with their daemon and proxy.
    #[must_use]
    pub fn world(&self) -> &PlainPools {
        &self.world
    }

    /// Starts the clients, spread over these proxies, and counts the requests that engines receive
    /// after the first seconds.
    pub async fn count(&self, proxies: &[SocketAddr]) -> Vec<PoolRequests> {
        for pool in &self.world.pools {
            let numbers = Arc::new(AtomicU64::new(0));
            for (client, proxy) in (0..CLIENTS).zip(proxies.iter().cycle()) {
                tokio::spawn(ask(
                    pool.clone(),
                    *proxy,
                    client,
                    numbers.clone(),
                    self.over.clone(),
                ));
            }
        }
        // Waits for the first replies, which take a while on a busy machine. Before the first
        // replies, no proxy knows that the broken engine is worse than the others.
        let serve = || async {
            self.world
                .pools
                .iter()
                .all(|pool| pool.requests().iter().skip(1).all(|sent| *sent >= SERVED))
                .then_some(())
        };
        let _ = wait_for(LIMIT, "every working engine to serve", serve).await; // if this fails, the counts show which engine did not serve
        sleep(SETTLING).await;
        let pools = || self.world.pools.iter();
        let before: Vec<_> = pools().map(|pool| pool.requests_by_path()).collect();
        sleep(MEASURED).await;
        let since = pools().zip(&before);
        since
            .map(|(pool, before)| PoolRequests::since(pool, before))
            .collect()
    }

    /// Repairs every broken engine. Returns the time until each engine served requests again.
    ///
    /// # Errors
    /// Fails if an engine does not serve within `limit`.
    pub async fn mend(&self, limit: Duration) -> Result<Vec<Duration>> {
        let mended = Instant::now();
        let serve = self.world.pools.iter().map(|pool| async move {
            let broken = pool.engines.first().ok_or("a pool without engines")?;
            broken.behave(works());
            let before = broken.requests();
            let serves = || async { (broken.requests() >= before + SERVED).then_some(()) };
            wait_for(
                limit,
                &format!("the mended engine of {} to serve", pool.name),
                serves,
            )
            .await?;
            Ok(mended.elapsed())
        });
        futures::future::join_all(serve).await.into_iter().collect()
    }
}

impl Drop for BrokenPools {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}

// === impl PoolRequests ===

impl PoolRequests {
    /// Counts the requests of a pool since [`PlainPool::requests_by_path`] was `before`.
    fn since(pool: &PlainPool, before: &[Vec<u64>]) -> Self {
        let new = |(now, before): (&Vec<u64>, &Vec<u64>)| -> Vec<u64> {
            let counts = now.iter().zip(before);
            counts.map(|(now, before)| now - before).collect()
        };
        let now = pool.requests_by_path();
        let sent: Vec<Vec<u64>> = now.iter().zip(before).map(new).collect();
        let by_path = paths().enumerate().map(|(at, path)| PathRequests {
            path,
            to_broken: sent.first().map_or(0, |broken| broken[at]),
            to_all: sent.iter().map(|engine| engine[at]).sum(),
        });
        Self {
            fault: pool.name.clone(),
            by_path: by_path.filter(|path| path.to_all > 0).collect(),
            requests: sent.iter().map(|engine| engine.iter().sum()).collect(),
        }
    }

    /// Returns the share of requests that the broken engine got, 0 to 1.
    #[must_use]
    pub fn share_of_broken(&self) -> f64 {
        share(
            self.requests.first().copied().unwrap_or(0),
            self.requests.iter().sum(),
        )
    }
}

// === impl PathRequests ===

impl PathRequests {
    /// Returns the share of this API's requests that the broken engine got, 0 to 1.
    #[must_use]
    pub fn share_of_broken(&self) -> f64 {
        share(self.to_broken, self.to_all)
    }
}

fn share(part: u64, all: u64) -> f64 {
    part as f64 / all.max(1) as f64
}

/// Runs a client with one request in flight at a time. Every second prompt is one of four fixed
/// prompts.
async fn ask(
    pool: Arc<PlainPool>,
    proxy: SocketAddr,
    client: usize,
    numbers: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
) {
    for _ in 0..REQUESTS_MAX {
        if over.load(Ordering::Relaxed) {
            return;
        }
        let number = numbers.fetch_add(1, Ordering::Relaxed);
        let prompt = if number.is_multiple_of(2) {
            format!("{number} is distinct. ")
        } else {
            format!("{} of four. ", client % 4)
        };
        let prompt = prompt.repeat(40);
        let (path, body) = request(&pool.name, number, &prompt);
        let _ = pool.post(proxy, path, &body).await; // a broken engine replies with an error on purpose
    }
}

/// Returns the path and the body of a request. Kinds of prompts, APIs and streams alternate
/// independently.
fn request(pool: &str, number: u64, prompt: &str) -> (&'static str, Value) {
    let paths: &[&'static str] = match pool {
        NO_WORK_GENERATE => &["/generate", "/inference/v1/generate"],
        NO_WORK => &[
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/messages",
            "/v1/responses",
            "/invocations",
        ],
        _ => &["/v1/chat/completions"],
    };
    let turn = number as usize / 2;
    let path = paths[turn % paths.len()];
    let is_streamed = paths.len() == 1 || (turn / paths.len()).is_multiple_of(2);
    let mut body = match path {
        "/v1/completions" => json!({"prompt": prompt}),
        "/v1/responses" => json!({"input": prompt}),
        "/generate" => json!({"text": prompt}),
        "/inference/v1/generate" => json!({"token_ids": prompt.as_bytes()}),
        _ => json!({"messages": [{"role": "user", "content": prompt}]}),
    };
    body["model"] = json!("demo");
    body["max_tokens"] = json!(4);
    body["stream"] = json!(is_streamed);
    (path, body)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[tokio::test]
    async fn requests_are_counted_by_engine_and_by_api() {
        let engines = [PlainBehaviour::default(), PlainBehaviour::default()];
        let pool = PlainPool::start(NO_WORK, engines).await.unwrap();
        let send = async |engine: usize, number| {
            let (path, body) = request(NO_WORK, number, "prompt");
            let to = pool.engines[engine].addr();
            pool.post(to, path, &body).await.unwrap();
        };
        send(0, 0).await;
        let before = pool.requests_by_path();
        send(0, 0).await;
        send(1, 0).await;
        send(1, 2).await;
        let sent = PoolRequests::since(&pool, &before);
        assert_eq!(sent.requests, [1, 2]);
        let by_path = sent.by_path.iter();
        let by_path: Vec<_> = by_path
            .map(|api| (api.path, api.to_broken, api.to_all))
            .collect();
        let expected = [("/v1/chat/completions", 1, 2), ("/v1/completions", 0, 1)];
        assert_eq!(by_path, expected);
    }

    #[test]
    fn each_api_is_sent_with_both_kinds_of_prompts_streamed_and_not() {
        for (pool, apis) in [(NO_WORK, 5), (NO_WORK_GENERATE, 2)] {
            let kinds: BTreeSet<(&str, bool, bool)> = (0..4 * apis)
                .map(|number| {
                    let (path, body) = request(pool, number, "prompt");
                    let is_streamed = body["stream"] == json!(true);
                    (path, is_streamed, number.is_multiple_of(2))
                })
                .collect();
            assert_eq!(kinds.len() as u64, 4 * apis, "{pool}: {kinds:?}");
        }
        let (path, body) = request("status-500", 1, "prompt");
        assert_eq!(
            (path, &body["stream"]),
            ("/v1/chat/completions", &json!(true))
        );
    }
}
