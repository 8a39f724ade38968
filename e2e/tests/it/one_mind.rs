//! Several workers pick as one: each knows what the others have under way, whom they saw fail, and who was given which prompt.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use e2e::model_server::{Fault, FaultMode, Options};
use e2e::stack::Stack;
use e2e::{Result, client};
use futures::future::join_all;
use serde_json::json;

use crate::echo;
use crate::pools::Second;

const WORKERS: u32 = 4;

/// A burst as the goal names it.
const BURST: usize = 64;
const BURST_SERVERS: usize = 16;
const BURST_TIME: Duration = Duration::from_millis(200);
const BURST_MAX: usize = 5;

/// Every worker has served: connections are spread by chance, so that one got none of a hundred is one chance in 10^12.
async fn warm(stack: &Stack) -> Result<()> {
    for reply in join_all((0..100).map(|_| stack.get("/v1/models"))).await {
        assert_eq!(reply?.status, 200);
    }
    Ok(())
}

/// How many attempts a refusing endpoint costs within its first ejection, all workers together.
async fn attempts_at_a_dead_endpoint(sharing: bool) -> Result<i64> {
    let stack = Stack::builder().servers(4).concurrency(WORKERS).picker(json!({"sharing": sharing})).start().await?;
    warm(&stack).await?;
    stack.servers[0].fault(Fault::new(FaultMode::Refuse)).await;
    let failed = || stack.envoy.picker_stat("switchpoint_failed_attempts_total");
    while failed().await? == 0 {
        assert_eq!(stack.get("/v1/models").await?.status, 200);
    }
    // The others have 2 ms to hear of it; the ejection is for a second.
    tokio::time::sleep(Duration::from_millis(2)).await;
    let (before, end) = (failed().await?, Instant::now() + Duration::from_millis(600));
    while Instant::now() < end {
        for reply in join_all((0..8).map(|_| stack.get("/v1/models"))).await {
            assert_eq!(reply?.status, 200);
        }
    }
    assert_eq!(before, 1, "one request at a time found out");
    failed().await
}

#[tokio::test]
async fn what_fails_at_one_worker_costs_no_other_a_try() -> Result<()> {
    assert_eq!(attempts_at_a_dead_endpoint(true).await?, 1);
    Ok(())
}

#[tokio::test]
async fn without_sharing_every_worker_pays_for_the_same_failure() -> Result<()> {
    assert!(attempts_at_a_dead_endpoint(false).await? > 1, "what the test above holds would fail");
    Ok(())
}

/// So many workers of each of so many proxies.
#[derive(Clone, Copy, Debug)]
struct Shape {
    proxies: u32,
    workers: u32,
}

/// The most of a burst of distinct cold long prompts that any of many idle servers gets.
async fn fullest_after_a_burst(shape: Shape, sharing: bool, seed: usize) -> Result<usize> {
    // A second of wait before the first write: none of the burst ends within it.
    let slow = Options { models: vec!["demo".into()], speed: 0.0, chunk_delay_ms: 1_000, ..Options::default() };
    let builder = Stack::builder().servers_like(BURST_SERVERS, &slow).concurrency(shape.workers).picker(json!({"sharing": sharing}));
    let stack = builder.start().await?;
    let mut seconds = Vec::new();
    for proxy in 1..shape.proxies {
        seconds.push(Second::start(&stack, &format!("proxy-{proxy}"), shape.workers).await?);
    }
    if shape.proxies > 1 {
        // The daemon tells each proxy that there is another: the first looks at that every 10 ms from then on.
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    let proxies: Vec<SocketAddr> = seconds.iter().map(|second| second.envoy.listener()).chain([stack.address()]).collect();
    let began = Instant::now();
    let requests = (0..BURST).map(|i| {
        let prompt = format!("{seed} {i} is how this prompt begins. {}", "It goes on for long. ".repeat(1_000));
        let body = json!({"model": "demo", "max_tokens": 2, "stream": true, "messages": [{"role": "user", "content": prompt}]});
        let address = proxies[i % proxies.len()];
        async move {
            tokio::time::sleep(BURST_TIME.mul_f64(i as f64 / BURST as f64)).await;
            client::post(address, "/v1/chat/completions", body.to_string()).await
        }
    });
    let replies = join_all(requests).await;
    assert!(began.elapsed() > BURST_TIME);
    let mut by_server = BTreeMap::new();
    for reply in replies {
        *by_server.entry(stack.server_of(&reply?)?).or_default() += 1;
    }
    Ok(by_server.into_values().max().unwrap_or(0))
}

async fn check_spread(shape: Shape, seeds: std::ops::Range<usize>) -> Result<()> {
    for seed in seeds {
        let fullest = fullest_after_a_burst(shape, true, seed).await?;
        assert!(fullest <= BURST_MAX, "seed {seed}, {shape:?}: {fullest} of {BURST} at one of {BURST_SERVERS}");
    }
    Ok(())
}

/// That the check can fail. Few workers that know nothing of each other each take a round over the servers, which looks like a spread; many do
/// not get round.
async fn check_pile(shape: Shape) -> Result<()> {
    for seed in 0..10 {
        let fullest = fullest_after_a_burst(shape, false, seed).await?;
        if fullest > BURST_MAX {
            return Ok(());
        }
    }
    Err(format!("{shape:?}: without sharing it was spread as well").into())
}

#[tokio::test]
async fn a_burst_of_cold_prompts_is_spread_over_all_by_all_workers() -> Result<()> {
    check_spread(Shape { proxies: 1, workers: 4 }, 0..2).await?;
    check_spread(Shape { proxies: 1, workers: 8 }, 2..3).await
}

#[tokio::test]
async fn without_sharing_a_burst_piles_up() -> Result<()> {
    check_pile(Shape { proxies: 1, workers: 8 }).await
}

#[tokio::test]
async fn a_burst_of_cold_prompts_is_spread_by_all_proxies() -> Result<()> {
    check_spread(Shape { proxies: 2, workers: 2 }, 0..2).await?;
    check_spread(Shape { proxies: 2, workers: 4 }, 2..3).await
}

#[tokio::test]
async fn proxies_that_do_not_share_pile_up_a_burst() -> Result<()> {
    check_pile(Shape { proxies: 2, workers: 4 }).await
}

#[tokio::test]
async fn a_prompt_finds_its_endpoint_again_through_any_worker() -> Result<()> {
    let stack = Stack::builder().servers(6).concurrency(WORKERS).start().await?;
    warm(&stack).await?;
    for round in 0..10 {
        let prompt = format!("{round} conversations. {}", "They go on and on. ".repeat(200));
        let first = stack.server_of(&stack.post("/v1/chat/completions", &echo::chat(&prompt)).await?)?;
        tokio::time::sleep(Duration::from_millis(10)).await;
        for turn in 0..12 {
            let reply = stack.post("/v1/chat/completions", &echo::chat(&format!("{prompt} {turn}"))).await?;
            assert_eq!(stack.server_of(&reply)?, first, "round {round}, turn {turn}");
        }
    }
    assert_eq!(stack.envoy.picker_stat("switchpoint_placements_lost_total").await?, 0);
    Ok(())
}
