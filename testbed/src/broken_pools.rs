//! Pools in which one engine of four is broken: it answers at once, looks fine by its metrics, and is not worth any traffic.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::time::sleep;

use crate::plain_engine::{AnswerDelay, PlainAnswer, PlainBehaviour};
use crate::plain_pools::{PlainPool, PlainPools};
use crate::stack::StackBuilder;
use crate::{Result, wait_for};

/// Clients of each pool.
const CLIENTS: usize = 32;

/// A working engine's reply.
const REPLY: Duration = Duration::from_millis(500);

/// Engines must notice within a second; as much again is left for a machine that does other things as well.
const SETTLING: Duration = Duration::from_secs(2);

/// How long requests are counted.
const MEASURED: Duration = Duration::from_secs(6);

/// How long working engines may take to begin.
const LIMIT: Duration = Duration::from_secs(30);

/// Requests that show a mended engine serves: probes alone would be one in five seconds.
const SERVED: u64 = 10;

/// Requests of one client, however long a caller that forgot to stop goes on.
const REQUESTS_MAX: u64 = 20_000;

/// One pool for each fault, its first engine broken, with clients at work.
#[derive(Debug)]
pub struct BrokenPools {
    world: PlainPools,
    over: Arc<AtomicBool>,
}

/// What one pool's engines were sent.
#[derive(Clone, Debug)]
pub struct PoolRequests {
    /// The fault, by name.
    pub fault: String,
    /// Requests to each engine; the first is broken.
    pub requests: Vec<u64>,
}

/// Each fault by name, and what the broken engine does.
fn faults() -> Vec<(&'static str, PlainBehaviour)> {
    let error = |code: u16| json!({"error": {"message": "CUDA error", "type": "InternalServerError", "code": code}}).to_string();
    vec![
        ("status-500", PlainBehaviour::with_status(500, &error(500))),
        ("status-404", PlainBehaviour::with_status(404, &error(404))),
        ("status-401", PlainBehaviour::with_status(401, &error(401))),
        ("status-502", PlainBehaviour::with_status(502, "bad gateway")),
        ("empty-200", PlainBehaviour::with_status(200, "")),
        ("error-in-200", PlainBehaviour::with_status(200, &error(500))),
        ("cut-stream", PlainBehaviour { answer: PlainAnswer::CutAfterFirstToken, ..PlainBehaviour::default() }),
    ]
}

fn works() -> PlainBehaviour {
    PlainBehaviour::with_delay(AnswerDelay::Constant(REPLY))
}

// === impl BrokenPools ===

impl BrokenPools {
    /// Starts the pools behind one proxy of so many workers.
    ///
    /// # Errors
    /// If any part does not start.
    pub async fn start(workers: u32) -> Result<Self> {
        Self::start_with(|builder| builder.concurrency(workers)).await
    }

    /// The same; `change` sets what else the stack should be like.
    ///
    /// # Errors
    /// If any part does not start.
    pub async fn start_with(change: impl FnOnce(StackBuilder) -> StackBuilder) -> Result<Self> {
        let mut pools = Vec::new();
        for (name, fault) in faults() {
            pools.push(PlainPool::start(name, [fault, works(), works(), works()]).await?);
        }
        let world = PlainPools::start(pools, change).await?;
        Ok(Self { world, over: Arc::default() })
    }

    /// The daemon and the proxy.
    #[must_use]
    pub fn world(&self) -> &PlainPools {
        &self.world
    }

    /// Clients begin to ask, by these proxies in turn, and what engines are sent is counted once the first seconds are over.
    pub async fn count(&self, proxies: &[SocketAddr]) -> Vec<PoolRequests> {
        for pool in &self.world.pools {
            let numbers = Arc::new(AtomicU64::new(0));
            for (client, proxy) in (0..CLIENTS).zip(proxies.iter().cycle()) {
                tokio::spawn(ask(pool.clone(), *proxy, client, numbers.clone(), self.over.clone()));
            }
        }
        // On a busy machine the first replies take their time, and before them nothing shows that it could be done better.
        let serve =
            || async { self.world.pools.iter().all(|pool| pool.requests().iter().skip(1).all(|sent| *sent >= SERVED)).then_some(()) };
        let _ = wait_for(LIMIT, "every working engine to serve", serve).await; // what did not is seen in what is counted
        sleep(SETTLING).await;
        let before: Vec<Vec<u64>> = self.world.pools.iter().map(|pool| pool.requests()).collect();
        sleep(MEASURED).await;
        let sent = |(pool, before): (&Arc<PlainPool>, &Vec<u64>)| PoolRequests {
            fault: pool.name.clone(),
            requests: pool.requests().iter().zip(before).map(|(now, before)| now - before).collect(),
        };
        self.world.pools.iter().zip(&before).map(sent).collect()
    }

    /// Mends every broken engine, and says after how long each serves as others do.
    ///
    /// # Errors
    /// If one does not within `limit`.
    pub async fn mend(&self, limit: Duration) -> Result<Vec<Duration>> {
        let mended = Instant::now();
        let serve = self.world.pools.iter().map(|pool| async move {
            let broken = pool.engines.first().ok_or("a pool without engines")?;
            broken.behave(works());
            let before = broken.requests();
            let serves = || async { (broken.requests() >= before + SERVED).then_some(()) };
            wait_for(limit, &format!("the mended engine of {} to serve", pool.name), serves).await?;
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
    /// The broken engine's share, 0 to 1.
    #[must_use]
    pub fn share_of_broken(&self) -> f64 {
        self.requests.first().copied().unwrap_or(0) as f64 / self.requests.iter().sum::<u64>().max(1) as f64
    }
}

/// A client with one request under way at a time; every other prompt is one of four that come again and again.
async fn ask(pool: Arc<PlainPool>, proxy: SocketAddr, client: usize, numbers: Arc<AtomicU64>, over: Arc<AtomicBool>) {
    for _ in 0..REQUESTS_MAX {
        if over.load(Ordering::Relaxed) {
            return;
        }
        let number = numbers.fetch_add(1, Ordering::Relaxed);
        let prompt = if number.is_multiple_of(2) { format!("{number} is distinct. ") } else { format!("{} of four. ", client % 4) };
        let body = json!({"model": "demo", "stream": true, "max_tokens": 4, "messages": [{"role": "user", "content": prompt.repeat(40)}]});
        let _ = pool.post(proxy, "/v1/chat/completions", &body).await; // a broken engine's reply is an error, and meant to be
    }
}
