//! Measures whether several workers of several proxies in front of the same servers pick as well as
//! one picker would.
//!
//! Two kinds of load show the difference. In conversations, each turn repeats all earlier turns. A
//! worker that does not know where other workers sent the earlier turns picks a server that has
//! nothing cached. In a burst of long uncached prompts to idle servers, a worker that does not know
//! other workers' requests sends too many to one server.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::pin::pin;
use std::time::{Duration, Instant};

use futures::future::{join_all, try_join_all};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

use crate::model_server::{ModelServer, ModelServerOptions};
use crate::replay::{self, ReplayPlan};
use crate::second_envoy::SecondEnvoy;
use crate::stack::Stack;
use crate::trace::Arrival;
use crate::{Result, client, wait_for};

/// The number of requests in a burst. All requests have different prompts, and the servers are idle
/// before the burst.
pub const BURST: usize = 64;
/// The time within which a burst arrives.
pub const BURST_TIME: Duration = Duration::from_millis(200);
pub const BURST_SERVERS: usize = 16;
/// The maximum number of requests in a burst that one server may get. In an even spread, each
/// server gets 4 requests.
pub const BURST_MAX: usize = 5;

/// The number of tokens of each reply in a burst: so many that no reply ends before the last
/// request arrives.
const BURST_TOKENS: u32 = 32;

const MODEL: &str = "demo";
/// The time between two samples of the number of running requests.
const LOOK: Duration = Duration::from_millis(50);
/// Time limit for a burst to end.
const LIMIT: Duration = Duration::from_secs(20);

/// The number of proxies, and of workers per proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FleetShape {
    pub proxies: u32,
    pub workers: u32,
}

/// Proxies of one daemon, and the model servers behind the proxies.
#[derive(Debug)]
pub struct Fleet {
    /// The first proxy, the daemon and the servers.
    pub stack: Stack,
    pub seconds: Vec<SecondEnvoy>,
}

/// The conversations that a load consists of.
#[derive(Clone, Copy, Debug)]
pub struct ConversationPlan {
    pub count: usize,
    /// The number of turns per conversation. The first prompt has 1,536 tokens, and each further
    /// turn adds 512.
    pub turns: usize,
    /// All conversations begin within this time. Each turn follows one to two seconds after the
    /// previous one.
    pub begin_within: Duration,
    pub seed: u64,
}

#[derive(Clone, Copy, Debug)]
pub struct FleetOutcome {
    pub requests: usize,
    /// The ratio of cached prompt tokens to all prompt tokens.
    pub hit_rate: f64,
    /// The standard deviation of running requests over the servers, divided by their mean. The test
    /// samples the ratio every 50 ms, and weights each sample by the mean.
    pub running_cv: f64,
    /// The mean number of running requests per server.
    pub running: f64,
}

// === impl FleetShape ===

impl FleetShape {
    /// One worker, which sees all requests.
    pub const ONE: Self = Self {
        proxies: 1,
        workers: 1,
    };
    /// Four workers of one proxy.
    pub const FOUR_WORKERS: Self = Self {
        proxies: 1,
        workers: 4,
    };
    pub const TWO_BY_TWO: Self = Self {
        proxies: 2,
        workers: 2,
    };
    pub const TWO_BY_FOUR: Self = Self {
        proxies: 2,
        workers: 4,
    };
}

// === impl Fleet ===

impl Fleet {
    /// Starts a fleet with `servers` servers that have the options `server`.
    ///
    /// # Errors
    /// Fails if a part does not start.
    pub async fn start(
        shape: FleetShape,
        sharing: bool,
        servers: usize,
        server: &ModelServerOptions,
    ) -> Result<Self> {
        let server = ModelServerOptions {
            models: vec![MODEL.into()],
            ..server.clone()
        };
        let picker = json!({"sharing": sharing});
        let builder = Stack::builder().servers_like(servers, &server);
        let stack = builder
            .concurrency(shape.workers)
            .picker(picker)
            .quiet()
            .start()
            .await?;
        let mut fleet = Self {
            stack,
            seconds: Vec::new(),
        };
        for proxy in 1..shape.proxies {
            fleet.seconds.push(
                SecondEnvoy::start(&fleet.stack, &format!("proxy-{proxy}"), shape.workers).await?,
            );
        }
        // After these requests every worker counts as serving, and the proxies know each other.
        for address in fleet.addresses() {
            join_all((0..50 * shape.workers).map(|_| client::get(address, "/v1/models")))
                .await
                .into_iter()
                .collect::<Result<Vec<_>>>()?;
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
        Ok(fleet)
    }

    /// Starts a fleet for bursts. No server ends a request before the whole burst has arrived.
    ///
    /// # Errors
    /// Fails if a part does not start.
    pub async fn for_bursts(shape: FleetShape, sharing: bool) -> Result<Self> {
        Self::start(
            shape,
            sharing,
            BURST_SERVERS,
            &ModelServerOptions::default(),
        )
        .await
    }

    #[must_use]
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.seconds
            .iter()
            .map(|second| second.envoy.listener())
            .chain([self.stack.address()])
            .collect()
    }

    /// Sends a burst of different long prompts that no server has cached. Waits until the servers
    /// are idle again, and returns the largest number of requests that one server got.
    ///
    /// # Errors
    /// Fails if a request fails.
    pub async fn burst(&self, seed: usize) -> Result<usize> {
        let proxies = self.addresses();
        let began = Instant::now();
        let requests = (0..BURST).map(|i| {
            let prompt = format!("{seed} {i} is how this prompt begins. {}", "It goes on for long. ".repeat(1_000));
            let body =
                json!({"model": MODEL, "max_tokens": BURST_TOKENS, "stream": true, "messages": [{"role": "user", "content": prompt}]});
            let address = proxies[i % proxies.len()];
            async move {
                tokio::time::sleep(BURST_TIME.mul_f64(i as f64 / BURST as f64)).await;
                client::post(address, "/v1/chat/completions", body.to_string()).await
            }
        });
        let replies = try_join_all(requests).await?;
        if began.elapsed() < BURST_TIME {
            return Err("some of the burst ended before the rest began".into());
        }
        let mut by_server = BTreeMap::<usize, usize>::new();
        for reply in replies {
            *by_server.entry(self.stack.server_of(&reply)?).or_default() += 1;
        }
        wait_for(LIMIT, "idle servers", || async {
            (running(&self.stack.servers).await.iter().sum::<f64>() == 0.0).then_some(())
        })
        .await?;
        tokio::time::sleep(Duration::from_millis(100)).await;
        Ok(by_server.into_values().max().unwrap_or(0))
    }

    /// Plays the conversations through all proxies in rotation.
    ///
    /// # Errors
    /// Fails if a request fails.
    pub async fn converse(&self, conversations: ConversationPlan) -> Result<FleetOutcome> {
        let proxies = self.addresses();
        let arrivals = conversations.arrivals();
        let replays = proxies.iter().enumerate().map(|(at, &target)| {
            let mine: Vec<Arrival> = arrivals
                .iter()
                .skip(at)
                .step_by(proxies.len())
                .cloned()
                .collect();
            async move {
                replay::run(
                    &ReplayPlan {
                        target,
                        model: MODEL.into(),
                        headers: Vec::new(),
                        rate: 1.0,
                    },
                    &mine,
                )
                .await
            }
        });
        let mut replays = pin!(try_join_all(replays));
        let mut deviations = 0.0;
        let mut means = 0.0;
        let mut looks = 0.0;
        let seen = loop {
            tokio::select! {
                seen = &mut replays => break seen?.concat(),
                () = tokio::time::sleep(LOOK) => {
                    let running = running(&self.stack.servers).await;
                    let mean = running.iter().sum::<f64>() / running.len() as f64;
                    deviations += (running.iter().map(|count| (count - mean).powi(2)).sum::<f64>() / running.len() as f64).sqrt();
                    means += mean;
                    looks += 1.0;
                }
            }
        };
        let failed = seen.iter().filter(|seen| seen.status != 200).count();
        if failed > 0 {
            return Err(format!("{failed} of {} requests were not served", seen.len()).into());
        }
        let sum = |of: fn(&replay::ReplayResult) -> u64| seen.iter().map(of).sum::<u64>() as f64;
        let hit_rate = sum(|seen| seen.cached_tokens) / sum(|seen| seen.prompt_tokens);
        Ok(FleetOutcome {
            requests: seen.len(),
            hit_rate,
            running_cv: deviations / means,
            running: means / looks,
        })
    }
}

// === impl ConversationPlan ===

impl ConversationPlan {
    /// Returns the requests in order of arrival. The prompt of a conversation begins with the
    /// system prompt of its kind, one of four.
    fn arrivals(self) -> Vec<Arrival> {
        let mut rng = SmallRng::seed_from_u64(self.seed);
        let mut arrivals = Vec::new();
        for conversation in 0..self.count as u64 {
            let kind = conversation % 4;
            let mut at = self.begin_within.mul_f64(rng.random());
            for turn in 0..self.turns as u64 {
                let said = (0..=turn).map(|turn| (1 + conversation) << 16 | self.seed << 40 | turn);
                let blocks: Vec<u64> = [2 * kind, 2 * kind + 1]
                    .map(|block| self.seed << 40 | block)
                    .into_iter()
                    .chain(said)
                    .collect();
                arrivals.push(Arrival {
                    at,
                    prompt_tokens: blocks.len() * 512,
                    output_tokens: rng.random_range(16..48),
                    blocks,
                });
                at += Duration::from_secs(1) + Duration::from_secs(1).mul_f64(rng.random());
            }
        }
        arrivals.sort_by_key(|arrival| arrival.at);
        arrivals
    }
}

async fn running(servers: &[ModelServer]) -> Vec<f64> {
    let state = |state: std::io::Result<Value>| {
        let state = state.unwrap_or_default();
        ["running", "waiting"]
            .iter()
            .filter_map(|key| state[*key].as_f64())
            .sum()
    };
    join_all(servers.iter().map(ModelServer::state))
        .await
        .into_iter()
        .map(state)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_begins_with_all_that_was_said_before() {
        let conversations = ConversationPlan {
            count: 6,
            turns: 3,
            begin_within: Duration::from_secs(5),
            seed: 7,
        };
        let arrivals = conversations.arrivals();
        assert_eq!(arrivals.len(), 18);
        assert!(arrivals.windows(2).all(|pair| pair[0].at <= pair[1].at));
        for arrival in arrivals.iter().filter(|arrival| arrival.blocks.len() > 3) {
            let before = &arrival.blocks[..arrival.blocks.len() - 1];
            assert!(
                arrivals
                    .iter()
                    .any(|earlier| earlier.at < arrival.at && earlier.blocks == before)
            );
        }
        let other = ConversationPlan {
            seed: 8,
            ..conversations
        }
        .arrivals();
        assert!(
            other
                .iter()
                .all(|a| arrivals.iter().all(|b| a.blocks[0] != b.blocks[0])),
            "another seed, other prompts"
        );
    }
}
