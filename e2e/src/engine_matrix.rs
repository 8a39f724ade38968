//! Engines that are nothing like the simulated ones, on a real Envoy under the default configuration: is load spread, and do prompts return?
//!
//! Each engine is a pool of plain engines; all pools stand behind one proxy. `exchange/tests/engines` has the same in virtual time with many seeds.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::future::{join_all, try_join_all};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::Result;
use crate::plain_engine::{Behaviour, Delay, Metrics, Usage};
use crate::plain_pools::{PlainPool, PlainPools};
use crate::second::Second;

/// A burst of long distinct prompts over idle servers, within [`BURST_TIME`].
const BURST: usize = 64;
const BURST_SERVERS: usize = 16;
const BURST_TIME: Duration = Duration::from_millis(200);

/// Conversations, one after another.
const PREFIXES: usize = 16;
const TURNS: usize = 6;
const SERVERS: usize = 8;

/// A steady load of distinct prompts.
const REQUESTS: usize = 1_000;
const CONCURRENCY: usize = 32;

/// The most of a burst that one server may get.
pub const BURST_MAX: usize = 5;
/// The least share of turns that return to the server of the first turn.
pub const RETURNED_MIN: f64 = 0.97;
/// The least servers that the conversations use.
pub const SERVERS_USED_MIN: usize = 6;
/// The most that the busiest server may get of a steady load, against the mean.
pub const BUSIEST_MAX: f64 = 1.3;

/// What one engine made of the load; `null` where it does not apply.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Row {
    /// The engine, or the fault of the one broken engine of a pool.
    pub engine: String,
    /// Workers of each proxy.
    pub workers: u32,
    /// Proxies.
    pub proxies: u32,
    /// The run.
    pub seed: u64,
    /// The most of a burst of 64 prompts at one of 16 servers.
    pub worst_burst: Option<usize>,
    /// Servers of 8 that 16 conversations use.
    pub servers_used: Option<usize>,
    /// Share of the turns that return to the server of the first.
    pub returned: Option<f64>,
    /// Requests at the busiest of 8 servers against the mean.
    pub busiest_over_mean: Option<f64>,
    /// Share of requests that a broken engine, one of four, gets after the first seconds.
    pub share_of_broken: Option<f64>,
}

/// A kind of engine.
struct Kind {
    name: &'static str,
    behaviour: Behaviour,
    api: Api,
}

#[derive(Clone, Copy)]
enum Api {
    Chat,
    Embeddings,
}

fn kinds() -> Vec<Kind> {
    let ms = Duration::from_millis;
    let per_token = Delay::PerToken { first: ms(50), next: ms(5) };
    let kind = |name, behaviour| Kind { name, behaviour, api: Api::Chat };
    let steady = || Behaviour::with_delay(per_token);
    vec![
        kind("at-once", Behaviour::default()),
        kind("constant", Behaviour::with_delay(Delay::Constant(ms(300)))),
        kind("per-token", steady()),
        kind("no-metrics", Behaviour { metrics: Metrics::Missing, ..steady() }),
        kind("frozen-metrics", Behaviour { metrics: Metrics::Frozen, ..steady() }),
        kind("no-usage", Behaviour { usage: Usage::Untold, ..steady() }),
        Kind { name: "embeddings", behaviour: Behaviour::with_delay(Delay::Constant(ms(20))), api: Api::Embeddings },
        kind("grows-with-prompt", Behaviour::with_delay(Delay::PerPromptToken(Duration::from_micros(40)))),
        kind("four-at-once", Behaviour::with_delay(Delay::Slots { slots: 4, each: ms(60) })),
    ]
}

fn prompt(number: usize, tokens: usize) -> String {
    format!("{number:>7} times there was a prompt like no other. ") + &"It goes on. ".repeat(tokens / 3)
}

/// Sends prompts to a pool, by its proxies in turn, and says which server answered.
struct Asker {
    pool: Arc<PlainPool>,
    proxies: Vec<SocketAddr>,
    api: Api,
    turn: AtomicUsize,
}

// === impl Asker ===

impl Asker {
    async fn ask(&self, prompt: String) -> Result<String> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let proxy = self.proxies.get(turn % self.proxies.len().max(1)).copied().ok_or("no proxy")?;
        let (path, body): (&str, Value) = match self.api {
            Api::Chat => {
                let messages = json!([{"role": "user", "content": prompt}]);
                ("/v1/chat/completions", json!({"model": "demo", "stream": true, "max_tokens": 4, "messages": messages}))
            }
            Api::Embeddings => ("/v1/embeddings", json!({"model": "demo", "input": prompt})),
        };
        let reply = self.pool.post(proxy, path, &body).await?;
        if reply.status != 200 {
            return Err(format!("{}: {} {}", self.pool.name, reply.status, reply.text()).into());
        }
        Ok(reply.header("x-served-by").to_owned())
    }

    /// The most of a burst at one server.
    async fn worst_burst(&self) -> Result<usize> {
        let one = |number: usize| async move {
            sleep(BURST_TIME * u32::try_from(number).unwrap_or(0) / BURST as u32).await;
            self.ask(prompt(number, 1_500)).await
        };
        let served = try_join_all((0..BURST).map(one)).await?;
        Ok(tally(&served).into_values().max().unwrap_or(0))
    }

    /// The busiest of a steady load, against the mean.
    async fn busiest_over_mean(&self) -> Result<f64> {
        let served = try_join_all((0..CONCURRENCY).map(|client| self.ask_steadily(client))).await?.concat();
        Ok(tally(&served).into_values().max().unwrap_or(0) as f64 / (REQUESTS as f64 / SERVERS as f64))
    }

    async fn ask_steadily(&self, client: usize) -> Result<Vec<String>> {
        let mut served = Vec::new();
        for number in (client..REQUESTS).step_by(CONCURRENCY) {
            served.push(self.ask(prompt(1_000 + number, 300)).await?);
        }
        Ok(served)
    }

    /// A steady load, then conversations with engines that are known by then.
    async fn steady(&self) -> Result<(f64, f64, usize)> {
        let busiest = self.busiest_over_mean().await?;
        let (returned, servers_used) = self.returned().await?;
        Ok((busiest, returned, servers_used))
    }

    /// Which share of turns returned, and how many servers the first turns used.
    async fn returned(&self) -> Result<(f64, usize)> {
        let (mut homes, mut back) = (BTreeSet::new(), 0);
        for prefix in 0..PREFIXES {
            let mut home = String::new();
            for turn in 0..TURNS {
                let served = self.ask(prompt(1_000_000 + prefix, 1_500 + 60 * turn)).await?;
                match turn {
                    0 => home = served,
                    _ => back += usize::from(served == home),
                }
            }
            homes.insert(home);
        }
        Ok((back as f64 / (PREFIXES * (TURNS - 1)) as f64, homes.len()))
    }
}

fn tally(served: &[String]) -> BTreeMap<&str, usize> {
    served.iter().fold(BTreeMap::new(), |mut tally, server| {
        *tally.entry(server.as_str()).or_default() += 1;
        tally
    })
}

/// All engines behind so many workers and proxies, once.
///
/// # Errors
/// If any part does not start, or a request is not answered with 200.
pub async fn run(workers: u32, proxies: u32) -> Result<Vec<Row>> {
    let mut pools = Vec::new();
    for kind in kinds() {
        pools.push(PlainPool::start(&format!("{}-16", kind.name), vec![kind.behaviour.clone(); BURST_SERVERS]).await?);
        pools.push(PlainPool::start(&format!("{}-8", kind.name), vec![kind.behaviour; SERVERS]).await?);
    }
    let world = PlainPools::start(pools, |builder| builder.concurrency(workers)).await?;
    let second = if proxies > 1 { Some(Second::start(&world.stack, "second", workers).await?) } else { None };
    let addresses: Vec<SocketAddr> =
        std::iter::once(world.stack.address()).chain(second.as_ref().map(|second| second.envoy.listener())).collect();
    let asker = |pool: &Arc<PlainPool>, api| Asker { pool: pool.clone(), proxies: addresses.clone(), api, turn: AtomicUsize::new(0) };
    let mut rows = Vec::new();
    let mut steady = Vec::new();
    // One burst after another: each must find idle servers and an idle machine.
    for (kind, pools) in kinds().iter().zip(world.pools.chunks(2)) {
        let [idle, loaded] = pools else { continue };
        let worst_burst = asker(idle, kind.api).worst_burst().await?;
        rows.push(Row { engine: kind.name.to_owned(), workers, proxies, worst_burst: Some(worst_burst), ..Row::default() });
        steady.push(asker(loaded, kind.api));
    }
    let measured = join_all(steady.iter().map(Asker::steady)).await;
    for (row, measured) in rows.iter_mut().zip(measured) {
        let (busiest, returned, servers_used) = measured?;
        (row.busiest_over_mean, row.returned, row.servers_used) = (Some(busiest), Some(returned), Some(servers_used));
    }
    Ok(rows)
}

// === impl Row ===

impl Row {
    /// Which bounds it breaks, in words; those of conversations with as many servers as `servers_used_min`.
    #[must_use]
    pub fn broken_bounds(&self, servers_used_min: usize) -> Vec<String> {
        let mut broken = Vec::new();
        let mut hold = |holds: bool, what: String| {
            if !holds {
                broken.push(format!("{}: {what}", self.engine));
            }
        };
        hold(self.worst_burst.is_none_or(|most| most <= BURST_MAX), format!("burst {:?}", self.worst_burst));
        hold(self.returned.is_none_or(|share| share >= RETURNED_MIN), format!("returned {:?}", self.returned));
        hold(self.servers_used.is_none_or(|servers| servers >= servers_used_min), format!("servers used {:?}", self.servers_used));
        hold(self.busiest_over_mean.is_none_or(|busiest| busiest <= BUSIEST_MAX), format!("busiest {:?}", self.busiest_over_mean));
        broken
    }
}
