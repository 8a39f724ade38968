//! Engines unlike the simulated ones, under the default configuration: is load spread over them, and do prompts find their servers again?
//!
//! Each engine has two pools behind the one Envoy: one of 16 servers that is sent bursts, and one of 8 that is sent a steady load, then
//! conversations, and at last gets a ninth server. `exchange/tests/engines` has the same workloads in virtual time.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::sleep;

use crate::client::ClientReply;
use crate::plain_engine::{AnswerDelay, PlainBehaviour, PlainMetrics, UsageReporting};
use crate::plain_pools::{PlainPool, PlainPools};
use crate::stack::Stack;
use crate::{Result, wait_for};

/// A burst of distinct long prompts over idle servers; 4 for each server would be even.
const BURST: u64 = 64;
const BURST_SERVERS: usize = 16;
const BURST_TIME: Duration = Duration::from_millis(200);
/// A burst at first sight of the engine, and one when it is known.
const BURSTS: u64 = 2;
/// So long a pool is idle before its next burst: the daemon has published what it learned by then.
const BURST_PAUSE: Duration = Duration::from_millis(1_500);

/// Servers of the other workloads.
const SERVERS: usize = 8;

/// Conversations, one after another.
const PREFIXES: u64 = 16;
const TURNS: u64 = 6;
/// From the end of a turn to the next: no client is faster, and other workers know of a turn milliseconds after it.
const TURN_PAUSE: Duration = Duration::from_millis(20);

/// A steady load of distinct prompts.
const REQUESTS: u64 = 1_000;
const CONCURRENCY: u64 = 32;

/// Tokens of a prompt of bursts and conversations, and of one of the load.
const LONG_TOKENS: usize = 1_500;
const SHORT_TOKENS: usize = 300;
/// Tokens that a turn adds.
const TURN_TOKENS: usize = 60;
/// Tokens of a reply.
const OUTPUT_TOKENS: u64 = 6;

/// A new endpoint is to be picked within a second; ten times that is waited.
const NEW_LIMIT: Duration = Duration::from_secs(10);

/// Pools of slow engines that may be under load at the same time: their servers wait, so the machine is idle. Everything else has it for itself.
const SHARES: u32 = 6;

/// How an engine behaves, and how it is asked.
#[derive(Clone, Debug)]
pub struct MatrixEngine {
    /// Its name in tables, which is the name of its pool as well.
    pub name: &'static str,
    behaviour: PlainBehaviour,
    api: MatrixApi,
    /// Requests take so long that 32 at a time are no work for the machine.
    slow: bool,
}

/// The APIs that engines are asked by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MatrixApi {
    Chat,
    Embeddings,
    Rerank,
}

/// What was measured of one engine.
#[derive(Clone, Debug)]
pub struct MatrixResult {
    /// Its name.
    pub engine: &'static str,
    /// The most requests of one burst that one server was sent.
    pub worst_burst: u64,
    /// Servers that had the first turn of a conversation. `None` where prompts are not read.
    pub servers_used: Option<usize>,
    /// Share of later turns that came to the server of the first, 0 to 1. `None` where prompts are not read.
    pub returned: Option<f64>,
    /// Requests of the load at the busiest server, over the mean.
    pub busiest_over_mean: f64,
    /// From the change of the endpoints file to the first request at the new server; `None` if there was none within 10 s.
    pub new_after: Option<Duration>,
}

/// What engines are held to. The load ([`BUSIEST_MAX`]) has one bound for all.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MatrixBounds {
    /// The most requests of a burst at one server.
    pub burst_max: u64,
    /// The fewest servers that conversations use.
    pub servers_used_min: usize,
    /// The smallest share of later turns that come to the server of the first.
    pub returned_min: f64,
}

/// What is asked for every engine.
pub const BOUNDS: MatrixBounds = MatrixBounds { burst_max: 5, servers_used_min: 6, returned_min: 0.97 };

/// Requests of the load at the busiest server over the mean, at most.
pub const BUSIEST_MAX: f64 = 1.3;

/// Engines that do not keep a bound on a busy machine, and what they do keep there: tests run beside others. On a quiet one (docs/reference/engines.md) all
/// conversations are spread; what answers at once is over its burst there, too, a known fault: it is never seen busy, so only the order of past picks tells
/// servers apart, and workers learn of each other's picks a little late.
const OPEN: [(&str, MatrixBounds); 5] = [
    ("constant-per-token", MatrixBounds { servers_used_min: 2, ..BOUNDS }),
    ("no-metrics", MatrixBounds { servers_used_min: 2, ..BOUNDS }),
    ("frozen-metrics", MatrixBounds { servers_used_min: 2, ..BOUNDS }),
    ("no-usage", MatrixBounds { servers_used_min: 2, ..BOUNDS }),
    ("at-once", MatrixBounds { burst_max: 7, ..BOUNDS }),
];

/// What any engine keeps where requests go through two proxies in turn, on a busy machine. Proxies learn of each other's requests through the daemon, later
/// than workers of one do, so a turn 20 ms after its predecessor may come to a proxy that does not know of it yet. On a quiet one all turns return.
const OPEN_OF_TWO_PROXIES: MatrixBounds = MatrixBounds { burst_max: 7, servers_used_min: 2, returned_min: 0.75 };

/// The pools of all engines behind one proxy.
#[derive(Debug)]
pub struct EngineMatrix {
    world: PlainPools,
    engines: Vec<MatrixEngine>,
    /// The machine.
    shares: Semaphore,
    /// Makes prompts of each seed distinct from those of others.
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

/// The matrix.
#[must_use]
pub fn engines() -> Vec<MatrixEngine> {
    let ms = Duration::from_millis;
    let per_token = PlainBehaviour::with_delay(AnswerDelay::PerToken { first: ms(150), next: ms(20) });
    let chat = |name, behaviour, slow| MatrixEngine { name, behaviour, api: MatrixApi::Chat, slow };
    let of = |name, api| MatrixEngine { name, behaviour: PlainBehaviour::with_delay(AnswerDelay::Constant(ms(20))), api, slow: false };
    vec![
        chat("constant-0.3-s", PlainBehaviour::with_delay(AnswerDelay::Constant(ms(300))), true),
        chat("constant-per-token", per_token.clone(), true),
        chat("no-metrics", PlainBehaviour { metrics: PlainMetrics::Missing, ..per_token.clone() }, true),
        chat("frozen-metrics", PlainBehaviour { metrics: PlainMetrics::Frozen, ..per_token.clone() }, true),
        chat("no-usage", PlainBehaviour { usage: UsageReporting::Untold, ..per_token }, true),
        chat("four-at-once", PlainBehaviour::with_delay(AnswerDelay::Slots { slots: 4, each: ms(200) }), true),
        chat("grows-with-prompt", PlainBehaviour::with_delay(AnswerDelay::PerPromptToken(Duration::from_micros(100))), false),
        chat("at-once", PlainBehaviour::default(), false),
        of("embeddings", MatrixApi::Embeddings),
        of("rerank", MatrixApi::Rerank),
    ]
}

// === impl MatrixResult ===

impl MatrixResult {
    /// Is it within the bounds of its engine, behind so many proxies? A new server has ten times what it should take.
    #[must_use]
    pub fn is_good(&self, proxies: u32) -> bool {
        let of_one = OPEN.iter().find(|(open, _)| *open == self.engine).map_or(BOUNDS, |(_, bounds)| *bounds);
        let bounds = if proxies > 1 { OPEN_OF_TWO_PROXIES } else { of_one };
        self.worst_burst <= bounds.burst_max
            && self.returned.is_none_or(|returned| returned >= bounds.returned_min)
            && self.servers_used.is_none_or(|used| used >= bounds.servers_used_min)
            && self.busiest_over_mean <= BUSIEST_MAX
            && self.new_after.is_some()
    }
}

// === impl MatrixApi ===

impl MatrixApi {
    fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Embeddings => "/v1/embeddings",
            Self::Rerank => "/v1/rerank",
        }
    }

    fn body(self, prompt: &str) -> Value {
        match self {
            Self::Chat => json!({
                "model": "demo", "stream": true, "max_tokens": OUTPUT_TOKENS, "messages": [{"role": "user", "content": prompt}],
            }),
            Self::Embeddings => json!({"model": "demo", "input": prompt}),
            Self::Rerank => json!({"model": "demo", "query": "q", "documents": [prompt]}),
        }
    }
}

// === impl EngineMatrix ===

impl EngineMatrix {
    /// Starts all pools behind one proxy of so many workers.
    ///
    /// # Errors
    /// If any part does not start.
    pub async fn start(workers: u32, seed: u64) -> Result<Self> {
        let engines = engines();
        let mut pools = Vec::new();
        for engine in &engines {
            let like = |count| std::iter::repeat_n(engine.behaviour.clone(), count);
            pools.push(PlainPool::start(&format!("{}-burst", engine.name), like(BURST_SERVERS)).await?);
            pools.push(PlainPool { listed: SERVERS, ..PlainPool::start(engine.name, like(SERVERS + 1)).await? });
        }
        let world = PlainPools::start(pools, |builder| builder.concurrency(workers).quiet()).await?;
        Ok(Self { world, engines, shares: Semaphore::new(SHARES as usize), seed })
    }

    /// The daemon and the proxy.
    #[must_use]
    pub fn stack(&self) -> &Stack {
        &self.world.stack
    }

    /// Runs every workload on every engine, through these proxies in turn.
    ///
    /// # Errors
    /// If a request is not answered 200, or a file cannot be written.
    pub async fn measure(&self, proxies: &[SocketAddr]) -> Result<Vec<MatrixResult>> {
        let measure = self.engines.iter().zip(self.world.pools.chunks_exact(2)).filter_map(|(engine, pools)| {
            let [burst_pool, pool] = pools else { return None };
            let bench = MatrixBench { matrix: self, engine, burst_pool, pool, proxies };
            Some(Box::pin(async move { bench.measure().await.map_err(|error| format!("{}: {error}", engine.name).into()) }))
        });
        futures::future::join_all(measure).await.into_iter().collect()
    }
}

// === impl MatrixBench ===

impl MatrixBench<'_> {
    async fn measure(&self) -> Result<MatrixResult> {
        // Loads first: those of slow engines run at the same time, and a burst between two of them would make each wait for the other.
        let busiest_over_mean = self.load().await?;
        let conversations = async {
            // A prompt that is not read cannot return.
            let conversations = if self.engine.api == MatrixApi::Rerank { None } else { Some(self.converse().await?) };
            Ok((conversations, self.grow().await?))
        };
        let bursts = self.worst_burst();
        let (worst_burst, (conversations, new_after)) = futures::future::try_join(Box::pin(bursts), Box::pin(conversations)).await?;
        let (returned, servers_used) = conversations.unzip();
        Ok(MatrixResult { engine: self.engine.name, worst_burst, servers_used, returned, busiest_over_mean, new_after })
    }

    /// The machine for itself.
    async fn alone(&self) -> Result<SemaphorePermit<'_>> {
        Ok(self.matrix.shares.acquire_many(SHARES).await?)
    }

    /// As much of the machine as a load of this engine needs.
    async fn enough(&self) -> Result<SemaphorePermit<'_>> {
        Ok(self.matrix.shares.acquire_many(if self.engine.slow { 1 } else { SHARES }).await?)
    }

    /// `number` also says which proxy is asked.
    async fn ask(&self, pool: &PlainPool, number: u64, prompt: &str) -> Result<ClientReply> {
        let proxy = self.proxies.iter().cycle().nth(number as usize % self.proxies.len()).ok_or("no proxy")?;
        let reply = pool.post(*proxy, self.engine.api.path(), &self.engine.api.body(prompt)).await?;
        if reply.status == 200 { Ok(reply) } else { Err(format!("{}: {}", reply.status, reply.text()).into()) }
    }

    fn prompt(&self, number: u64, tokens: usize) -> String {
        format!("{number:>7} times in {} there was a prompt like no other. ", self.matrix.seed) + &"It goes on. ".repeat(tokens / 3)
    }

    /// The most of a burst at one server.
    async fn worst_burst(&self) -> Result<u64> {
        let mut worst = 0;
        for round in 0..BURSTS {
            let machine = self.alone().await?;
            let before = self.burst_pool.requests();
            let begun = tokio::time::Instant::now();
            let requests = (0..BURST).map(|at| async move {
                tokio::time::sleep_until(begun + BURST_TIME * at as u32 / BURST as u32).await;
                self.ask(self.burst_pool, at, &self.prompt(round * BURST + at, LONG_TOKENS)).await.map(drop)
            });
            futures::future::try_join_all(requests).await?;
            let sent = self.burst_pool.requests().into_iter().zip(before).map(|(now, before)| now - before);
            worst = worst.max(sent.max().unwrap_or(0));
            drop(machine);
            sleep(BURST_PAUSE).await;
        }
        Ok(worst)
    }

    /// Requests at the busiest server over the mean.
    async fn load(&self) -> Result<f64> {
        let _machine = self.enough().await?;
        let next = AtomicU64::new(0);
        let client = |_| async {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= REQUESTS {
                    return Ok::<(), crate::Error>(());
                }
                self.ask(self.pool, number, &self.prompt(number, SHORT_TOKENS)).await?;
            }
        };
        futures::future::try_join_all((0..CONCURRENCY).map(client)).await?;
        Ok(self.pool.requests().into_iter().max().unwrap_or(0) as f64 * SERVERS as f64 / REQUESTS as f64)
    }

    /// Which part of the later turns came to the server of the first turn, and how many servers had a first turn.
    async fn converse(&self) -> Result<(f64, usize)> {
        let (mut homes, mut back) = (BTreeSet::new(), 0_u64);
        for prefix in 0..PREFIXES {
            let mut home = None;
            for turn in 0..TURNS {
                let prompt = self.prompt(1_000_000 + prefix, LONG_TOKENS + TURN_TOKENS * turn as usize);
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

    /// Adds a server to the pool under load: after how long is it picked?
    async fn grow(&self) -> Result<Option<Duration>> {
        let _machine = self.enough().await?;
        let (over, next) = (AtomicBool::new(false), AtomicU64::new(REQUESTS));
        let client = |_| async {
            while !over.load(Ordering::Relaxed) {
                let number = next.fetch_add(1, Ordering::Relaxed);
                self.ask(self.pool, number, &self.prompt(number, SHORT_TOKENS)).await?;
            }
            Ok::<(), crate::Error>(())
        };
        let picked = async {
            let new = self.pool.engines.last().ok_or("a pool without engines")?;
            self.matrix.world.list(self.pool, SERVERS + 1)?;
            let begun = Instant::now();
            let is_picked = || async { (new.requests() > 0).then(|| begun.elapsed()) };
            let after = wait_for(NEW_LIMIT, "the new server to be picked", is_picked).await.ok();
            over.store(true, Ordering::Relaxed);
            Ok::<_, crate::Error>(after)
        };
        let load = futures::future::try_join_all((0..CONCURRENCY).map(client));
        let (after, _) = futures::future::try_join(Box::pin(picked), Box::pin(load)).await?;
        Ok(after)
    }
}
