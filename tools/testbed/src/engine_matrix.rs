//! Measures whether the default configuration spreads load over engines that differ from the
//! simulated model server, and whether a conversation's turns return to the same server.
//!
//! Each engine has two pools behind one Envoy. A pool of 16 servers gets bursts. A pool of 8
//! servers gets a steady load, then conversations, and finally a ninth server.
//! `crates/exchange/tests/engines` has the same workloads in virtual time.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::sleep;

mod bounds;
mod engines;
pub use bounds::{BOUNDS, BUSIEST_MAX, MatrixBounds, MatrixResult};
pub use engines::{MatrixEngine, engines};

use engines::MatrixApi;

use crate::client::ClientReply;
use crate::plain_pools::{PlainPool, PlainPools};
use crate::stack::Stack;
use crate::{Result, wait_for};

/// The number of requests in a burst of different long prompts to idle servers. In an even spread,
/// each server gets 4.
const BURST: u64 = 64;
const BURST_SERVERS: usize = 16;
const BURST_TIME: Duration = Duration::from_millis(200);
/// The number of bursts. Before the first burst the daemon knows nothing about the engine; before
/// the second burst the daemon has learned from the first.
const BURSTS: u64 = 2;
/// The idle time before the next burst. After this time, the daemon has published what the daemon
/// learned from the previous burst.
const BURST_PAUSE: Duration = Duration::from_millis(1_500);

/// The number of servers in the pool for the steady load and the conversations.
const SERVERS: usize = 8;

/// The number of conversations, which run one after another.
const PREFIXES: u64 = 16;
const TURNS: u64 = 6;
/// The time from the end of a turn to the next turn. No real client is faster, and other workers
/// learn of a turn within milliseconds.
const TURN_PAUSE: Duration = Duration::from_millis(20);

/// The number of requests of the steady load. All requests have different prompts.
const REQUESTS: u64 = 1_000;
const CONCURRENCY: u64 = 32;

/// The number of tokens of a prompt: in bursts and conversations, and (below) in the steady load.
const LONG_TOKENS: usize = 1_500;
const SHORT_TOKENS: usize = 300;
/// The number of tokens that a turn of a conversation adds to the prompt.
const TURN_TOKENS: usize = 60;
/// The time limit until a new endpoint is picked. The page of results demands a second, and the
/// test waits ten times as long.
const NEW_LIMIT: Duration = Duration::from_secs(10);

/// The number of pools of slow engines that may be under load at the same time. Slow engines only
/// wait, so the machine is mostly idle. All other workloads run alone.
const SHARES: u32 = 6;

/// The pools of all engines behind one proxy.
#[derive(Debug)]
pub struct EngineMatrix {
    world: PlainPools,
    engines: Vec<MatrixEngine>,
    /// A semaphore with [`SHARES`] permits. A workload that must run alone takes all permits.
    shares: Semaphore,
    /// The seed of the run. Runs with different seeds send different prompts.
    seed: u64,
}

/// One engine's pools under test.
struct MatrixBench<'a> {
    matrix: &'a EngineMatrix,
    engine: &'a MatrixEngine,
    burst_pool: &'a Arc<PlainPool>,
    pool: &'a Arc<PlainPool>,
    proxies: &'a [SocketAddr],
}

// === impl EngineMatrix ===

impl EngineMatrix {
    /// Starts all pools behind one proxy with `workers` worker threads.
    ///
    /// # Errors
    /// Fails if any part does not start.
    pub async fn start(workers: u32, seed: u64) -> Result<Self> {
        let engines = engines();
        let mut pools = Vec::new();
        for engine in &engines {
            let like = |count| std::iter::repeat_n(engine.behaviour.clone(), count);
            pools.push(
                PlainPool::start(&format!("{}-burst", engine.name), like(BURST_SERVERS)).await?,
            );
            pools.push(PlainPool {
                listed: SERVERS,
                ..PlainPool::start(engine.name, like(SERVERS + 1)).await?
            });
        }
        let world =
            PlainPools::start(pools, |builder| builder.concurrency(workers).quiet()).await?;
        Ok(Self {
            world,
            engines,
            shares: Semaphore::new(SHARES as usize),
            seed,
        })
    }

    /// Returns the daemon and the proxy.
    #[must_use]
    pub fn stack(&self) -> &Stack {
        &self.world.stack
    }

    /// Runs every workload on every engine, through these proxies in rotation.
    ///
    /// # Errors
    /// Fails if a reply is not 200, or a file cannot be written.
    pub async fn measure(&self, proxies: &[SocketAddr]) -> Result<Vec<MatrixResult>> {
        let measure = self
            .engines
            .iter()
            .zip(self.world.pools.chunks_exact(2))
            .filter_map(|(engine, pools)| {
                let [burst_pool, pool] = pools else {
                    return None;
                };
                let bench = MatrixBench {
                    matrix: self,
                    engine,
                    burst_pool,
                    pool,
                    proxies,
                };
                Some(Box::pin(async move {
                    bench
                        .measure()
                        .await
                        .map_err(|error| format!("{}: {error}", engine.name).into())
                }))
            });
        futures::future::join_all(measure)
            .await
            .into_iter()
            .collect()
    }
}

// === impl MatrixBench ===

impl MatrixBench<'_> {
    async fn measure(&self) -> Result<MatrixResult> {
        // The steady loads run first, and those of slow engines run at the same time. A burst
        // between steady loads would have to wait until all steady loads end.
        let busiest_over_mean = self.load().await?;
        let conversations = async {
            // If prompts are not read, conversations cannot return to a server.
            let conversations = if self.engine.api == MatrixApi::Rerank {
                None
            } else {
                Some(self.converse().await?)
            };
            Ok((conversations, self.grow().await?))
        };
        let bursts = self.worst_burst();
        let (worst_burst, (conversations, new_after)) =
            futures::future::try_join(Box::pin(bursts), Box::pin(conversations)).await?;
        let (returned, servers_used) = conversations.unzip();
        Ok(MatrixResult {
            engine: self.engine.name,
            worst_burst,
            servers_used,
            returned,
            busiest_over_mean,
            new_after,
        })
    }

    /// Waits until this bench may use the machine alone.
    async fn alone(&self) -> Result<SemaphorePermit<'_>> {
        Ok(self.matrix.shares.acquire_many(SHARES).await?)
    }

    /// Waits for the permits that a steady load of this engine needs.
    async fn enough(&self) -> Result<SemaphorePermit<'_>> {
        Ok(self
            .matrix
            .shares
            .acquire_many(if self.engine.slow { 1 } else { SHARES })
            .await?)
    }

    /// Sends a request. `number` selects the proxy.
    async fn ask(&self, pool: &PlainPool, number: u64, prompt: &str) -> Result<ClientReply> {
        let proxy = self
            .proxies
            .iter()
            .cycle()
            .nth(number as usize % self.proxies.len())
            .ok_or("no proxy")?;
        let reply = pool
            .post(
                *proxy,
                self.engine.api.path(),
                &self.engine.api.body(prompt),
            )
            .await?;
        if reply.status == 200 {
            Ok(reply)
        } else {
            Err(format!("{}: {}", reply.status, reply.text()).into())
        }
    }

    fn prompt(&self, number: u64, tokens: usize) -> String {
        format!(
            "{number:>7} times in {} there was a prompt like no other. ",
            self.matrix.seed
        ) + &"It goes on. ".repeat(tokens / 3)
    }

    /// Sends the bursts. Returns the largest number of requests that one server got in one burst.
    async fn worst_burst(&self) -> Result<u64> {
        let mut worst = 0;
        for round in 0..BURSTS {
            let machine = self.alone().await?;
            let before = self.burst_pool.requests();
            let begun = tokio::time::Instant::now();
            let requests = (0..BURST).map(|at| async move {
                tokio::time::sleep_until(begun + BURST_TIME * at as u32 / BURST as u32).await;
                self.ask(
                    self.burst_pool,
                    at,
                    &self.prompt(round * BURST + at, LONG_TOKENS),
                )
                .await
                .map(drop)
            });
            futures::future::try_join_all(requests).await?;
            let sent = self
                .burst_pool
                .requests()
                .into_iter()
                .zip(before)
                .map(|(now, before)| now - before);
            worst = worst.max(sent.max().unwrap_or(0));
            drop(machine);
            sleep(BURST_PAUSE).await;
        }
        Ok(worst)
    }

    /// Sends the steady load. Returns the number of requests at the busiest server, divided by the
    /// mean of all servers.
    async fn load(&self) -> Result<f64> {
        let _machine = self.enough().await?;
        let next = AtomicU64::new(0);
        let client = |_| async {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= REQUESTS {
                    return Ok::<(), crate::Error>(());
                }
                self.ask(self.pool, number, &self.prompt(number, SHORT_TOKENS))
                    .await?;
            }
        };
        futures::future::try_join_all((0..CONCURRENCY).map(client)).await?;
        Ok(
            self.pool.requests().into_iter().max().unwrap_or(0) as f64 * SERVERS as f64
                / REQUESTS as f64,
        )
    }

    /// Plays the conversations. Returns the share of later turns that went to the server of the
    /// first turn, and the number of servers that got a first turn.
    async fn converse(&self) -> Result<(f64, usize)> {
        let mut homes = BTreeSet::new();
        let mut back = 0_u64;
        for prefix in 0..PREFIXES {
            let mut home = None;
            for turn in 0..TURNS {
                let prompt = self.prompt(
                    1_000_000 + prefix,
                    LONG_TOKENS + TURN_TOKENS * turn as usize,
                );
                let reply = self.ask(self.pool, prefix * TURNS + turn, &prompt).await?;
                sleep(TURN_PAUSE).await;
                let served_by = reply.header("x-served-by").to_owned();
                match &home {
                    None => home = Some(served_by),
                    Some(home) => back += u64::from(*home == served_by),
                }
            }
            homes.extend(home);
        }
        Ok((back as f64 / (PREFIXES * (TURNS - 1)) as f64, homes.len()))
    }

    /// Adds a server to the pool under load. Returns the time until the new server is picked, or
    /// `None` if it is not picked within [`NEW_LIMIT`].
    async fn grow(&self) -> Result<Option<Duration>> {
        let _machine = self.enough().await?;
        let over = AtomicBool::new(false);
        let next = AtomicU64::new(REQUESTS);
        let client = |_| async {
            while !over.load(Ordering::Relaxed) {
                let number = next.fetch_add(1, Ordering::Relaxed);
                self.ask(self.pool, number, &self.prompt(number, SHORT_TOKENS))
                    .await?;
            }
            Ok::<(), crate::Error>(())
        };
        let picked = async {
            let new = self.pool.engines.last().ok_or("a pool without engines")?;
            self.matrix.world.list(self.pool, SERVERS + 1)?;
            let begun = Instant::now();
            let is_picked = || async { (new.requests() > 0).then(|| begun.elapsed()) };
            let after = wait_for(NEW_LIMIT, "the new server to be picked", is_picked)
                .await
                .ok();
            over.store(true, Ordering::Relaxed);
            Ok::<_, crate::Error>(after)
        };
        let load = futures::future::try_join_all((0..CONCURRENCY).map(client));
        let (after, _) = futures::future::try_join(Box::pin(picked), Box::pin(load)).await?;
        Ok(after)
    }
}
