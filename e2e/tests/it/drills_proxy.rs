//! Failure drills of the proxy: a VM that traps while many streams run, and one of two proxies
//! killed. `config_updates`, `lifecycle` and `vm_faults` have the drills of the proxy's
//! configuration, drain and recovery.

use std::collections::BTreeMap;
use std::time::Duration;

use e2e::explain::ExplainedDecision;
use e2e::ledger_metrics;
use serde_json::json;
use testbed::load::LoadGenerator;
use testbed::stack::Stack;
use testbed::{Result, drill, wait_for};

use crate::echo;
use crate::pools::SecondEnvoy;
use crate::streams::{self, slow};

const LIMIT: Duration = Duration::from_secs(60);

/// Scores by load only, so that requests counted after their end would be visible.
const CONFIG: &str = "apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: active-request-scorer
";

/// Returns the connections of each worker: `of` is "total" (accepted so far) or "active" (open
/// now).
async fn connections(stack: &Stack, of: &str) -> Result<BTreeMap<String, i64>> {
    let stats = stack
        .envoy
        .stats(&format!(
            "^listener\\..*worker_[0-9]+\\.downstream_cx_{of}$"
        ))
        .await?;
    let worker = |name: String| {
        name.split('.')
            .find(|part| part.starts_with("worker_"))
            .map(str::to_owned)
    };
    Ok(stats
        .into_iter()
        .filter_map(|(name, value)| Some((worker(name)?, value)))
        .collect())
}

/// Waits until a proxy counts the same load at all endpoints, so that it counts no request that has
/// ended.
async fn no_ghosts(proxy: std::net::SocketAddr) -> Result<()> {
    let calm = || async {
        let decision = ExplainedDecision::ask(proxy, "who is busy?").await.ok()?;
        (!decision.scores("active-request-scorer").is_empty()
            && !decision.distinguishes("active-request-scorer"))
        .then_some(())
    };
    wait_for(LIMIT, "the proxy to count no ended requests", calm).await
}

#[tokio::test]
async fn one_of_two_proxies_killed_leaves_no_ghosts_at_the_other() -> Result<()> {
    const STREAMS: usize = 20;
    let config = tempfile::NamedTempFile::new()?;
    std::fs::write(config.path(), CONFIG)?;
    let builder = Stack::builder()
        .picker(json!({"explain": true}))
        .daemon_arguments(&["--config", &config.path().to_string_lossy()]);
    let stack = builder
        .servers_like(4, &slow(50))
        .concurrency(2)
        .start()
        .await?;
    let mut second = SecondEnvoy::start(&stack, "another", 2).await?;
    let theirs = streams::open(second.envoy.listener(), 3, 2_000).await?;
    let busy = || async {
        ExplainedDecision::ask(stack.address(), "who is busy?")
            .await
            .ok()?
            .distinguishes("active-request-scorer")
            .then_some(())
    };
    wait_for(LIMIT, "one proxy to count the streams of the other", busy).await?;
    let more = streams::open(second.envoy.listener(), STREAMS - theirs.len(), 2_000).await?;
    let ours = streams::open(stack.address(), STREAMS, 60).await?;
    let load = LoadGenerator::start(stack.address(), 4);
    let their_load = LoadGenerator::start(second.envoy.listener(), 2);
    load.wait_for_more(30, LIMIT).await?;
    their_load.wait_for_more(10, LIMIT).await?;
    second.envoy.process().kill()?;
    let (whole, broken) = streams::ends(theirs.into_iter().chain(more).collect()).await;
    assert_eq!(
        (whole, broken),
        (0, STREAMS),
        "all streams of the killed proxy break"
    );
    drop(their_load);
    assert_eq!(
        streams::ends(ours).await,
        (STREAMS, 0),
        "no stream of the other proxy breaks"
    );
    load.wait_for_more(60, LIMIT).await?;
    ledger_metrics::close("SIGKILL of one of two proxies", load, &stack).await?;
    ledger_metrics::note(
        "SIGKILL of one of two proxies",
        &format!("its own {broken} streams broke; all {STREAMS} of the other were complete"),
    );
    no_ghosts(stack.address()).await
}

/// `make e2e-long` runs these tests.
mod slow {
    use super::*;

    #[tokio::test]
    async fn a_vm_that_traps_among_a_hundred_streams_fails_its_own_and_no_other() -> Result<()> {
        const STREAMS: usize = 100;
        const CLIENTS: usize = 4;
        let config = tempfile::NamedTempFile::new()?;
        std::fs::write(config.path(), CONFIG)?;
        let builder = Stack::builder()
            .envoy_config(drill::envoy_config()?)
            .picker(json!({"explain": true}));
        let builder = builder.daemon_arguments(&["--config", &config.path().to_string_lossy()]);
        let stack = builder
            .servers_like(4, &slow(200))
            .concurrency(4)
            .start()
            .await?;
        // No other client connects during the test, so the differences are the streams of each
        // worker.
        let before = connections(&stack, "total").await?;
        let running = streams::open(stack.address(), STREAMS, 200).await?;
        let after = connections(&stack, "total").await?;
        let held: BTreeMap<&String, i64> = after
            .iter()
            .map(|(worker, total)| (worker, total - before.get(worker).unwrap_or(&0)))
            .collect();
        assert_eq!(held.values().sum::<i64>(), STREAMS as i64, "{held:?}");

        let load = LoadGenerator::start(stack.address(), CLIENTS);
        load.wait_for_more(10, LIMIT).await?;
        let reply = stack
            .send(echo::post(
                "/v1/chat/completions",
                &[(drill::TRAP, "1")],
                echo::chat("trap").to_string(),
            )?)
            .await?;
        assert_eq!(reply.status, 503);
        load.wait_for_more(60, LIMIT).await?;
        // All streams of the worker that trapped have ended.
        let lost = || async {
            let open = connections(&stack, "active").await.ok()?;
            held.iter()
                .find(|(worker, held)| {
                    **held > 0 && open.get(**worker).is_none_or(|open| open < *held)
                })
                .map(|(_, held)| *held)
        };
        let lost = wait_for(LIMIT, "a worker to have lost its streams", lost).await?;
        let (whole, broken) = streams::ends(running).await;
        assert_eq!(
            (whole, broken),
            (STREAMS - lost as usize, lost as usize),
            "exactly the streams of one worker broke: {held:?}"
        );
        let outcome = ledger_metrics::close_but(
            "a VM traps among 100 streams",
            load,
            &stack,
            drill::is_of_a_trap,
        )
        .await?;
        // Each client loses at most the request that it had at the trapped worker at that moment,
        // or while the worker's VM recovered. Envoy's log also has the request that trapped, and
        // the streams.
        assert!(outcome.failures.len() <= CLIENTS, "{:?}", outcome.failures);
        ledger_metrics::agree(
            &stack,
            outcome.failures.len() + 1 + broken,
            drill::is_lost_to_a_trap,
        )
        .await?;
        ledger_metrics::note(
            "a VM traps among 100 streams",
            &format!("{broken} broke, all at the worker that trapped; {whole} were complete"),
        );
        no_ghosts(stack.address()).await
    }
}
