//! The set of shared-data keys is bounded: the proxy never frees a key, so the VMs must reuse their
//! keys in all cases. A test-only build counts the keys in a gauge.

use std::time::{Duration, Instant};

use futures::future::join_all;
use testbed::stack::Stack;
use testbed::{Result, drill};

use crate::echo;

const LIMIT: Duration = Duration::from_secs(120);

/// The maximum number of keys. Each of two workers has keys for the rings of placements and
/// observations, and some other keys. The VM of the main thread has keys too.
const KEYS_MAX: i64 = 2 * 200 + 50;

/// The number of times that the endpoints change, each time with a new generation. If each
/// generation added a key, both workers would add one key each time.
const ROUNDS: usize = 8;

async fn keys(stack: &Stack) -> Result<i64> {
    stack.envoy.picker_stat("switchpoint_drill_keys").await
}

/// Sends `prompts` new prompts of about `bytes` bytes each, spread over all workers.
async fn ask(stack: &Stack, salt: &str, prompts: usize, bytes: usize) -> Result<()> {
    let prompt = |number: usize| {
        echo::chat(&format!(
            "{salt} {number} {}",
            "and so on ".repeat(bytes / 10)
        ))
    };
    for reply in join_all(
        (0..prompts).map(async |number| stack.post("/v1/chat/completions", &prompt(number)).await),
    )
    .await
    {
        assert_eq!(reply?.status, 200);
    }
    Ok(())
}

#[tokio::test]
async fn keys_of_shared_data_are_a_fixed_set() -> Result<()> {
    let mut stack = Stack::builder()
        .envoy_config(drill::envoy_config()?)
        .servers(4)
        .concurrency(2)
        .start()
        .await?;
    // Long prompts fill the placement rings of both workers; many prompts fill the observation
    // rings.
    let began = Instant::now();
    let mut full = keys(&stack).await?;
    let mut rounds_without = 0;
    while rounds_without < 3 {
        assert!(
            began.elapsed() < LIMIT,
            "the number of keys still grows: {full}"
        );
        ask(&stack, &format!("{:?}", began.elapsed()), 8, 500_000).await?;
        ask(&stack, &format!("{:?}", began.elapsed()), 150, 300).await?;
        let before = std::mem::replace(&mut full, keys(&stack).await?);
        rounds_without = if full == before {
            rounds_without + 1
        } else {
            0
        };
    }
    assert!((100..KEYS_MAX).contains(&full), "{full} keys");
    // Each round uses other endpoints, other generations, other prompts and other clients.
    for round in 0..ROUNDS {
        stack.set_pool(&[round % 4, (round + 1) % 4, (round + 2) % 4])?;
        stack.servers[round % 4].restart(None).await;
        let asked = async |number: usize| stack.get(&format!("/v1/models?{round}.{number}")).await;
        join_all((0..20).map(asked)).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        ask(&stack, &format!("again {round}"), 30, 100 << round).await?;
    }
    // A ring may have had one unused segment, so a few keys may be added.
    let after = keys(&stack).await?;
    assert!(after < full + ROUNDS as i64, "{full} keys became {after}");
    Ok(())
}
