//! The endpoints file suffers what happens to real files: it is half written, deleted, or changed
//! all the time. The last valid set of endpoints stays in use.

use std::time::Duration;

use e2e::explain::pool_is;
use e2e::ledger_metrics;
use serde_json::Value;
use testbed::load::LoadGenerator;
use testbed::stack::Stack;
use testbed::{Result, wait_for};

const LIMIT: Duration = Duration::from_secs(30);

fn explained(servers: usize, workers: u32) -> testbed::stack::StackBuilder {
    Stack::builder()
        .servers(servers)
        .concurrency(workers)
        .picker(serde_json::json!({"explain": true}))
}

/// Returns the error of discovery that `/debug/state` reports.
async fn discovery_error(stack: &Stack) -> Option<Value> {
    let state = stack
        .daemon
        .as_ref()?
        .admin("/debug/state")
        .await
        .ok()?
        .json()
        .ok()?;
    Some(state["pools"][0]["discovery"]["error"].clone())
}

async fn source_ok(stack: &Stack) -> Option<bool> {
    let page = stack.daemon.as_ref()?.admin("/metrics").await.ok()?.text();
    let line = page.lines().find(|line| {
        line.starts_with("switchpoint_source_ok{") && line.contains("\"discovery\"")
    })?;
    Some(line.ends_with(" 1") || line.ends_with(" 1.0"))
}

#[tokio::test]
async fn a_file_that_cannot_be_read_leaves_the_last_good_set_and_says_why() -> Result<()> {
    let mut stack = explained(3, 1).shared_envoy().start().await?;
    let file = stack.folder().join("endpoints.yaml");
    let good = std::fs::read_to_string(&file)?;
    assert_eq!(source_ok(&stack).await, Some(true));
    let load = LoadGenerator::start(stack.address(), 2);
    let duplicate = format!(
        "{{\"endpoints\": [{0}, {0}]}}",
        r#"{"name": "a", "address": "127.0.0.1", "port": 1}"#
    );
    let named = r#"{"endpoints": [{"name": "a", "address": "localhost", "port": 1}]}"#;
    let misspelt =
        r#"{"endpoints": [{"name": "a", "address": "127.0.0.1", "port": 1, "lables": {}}]}"#;
    let drills = [
        (&good[..good.len() / 2], "endpoints.yaml"),
        ("\u{0}\u{1}\u{2} not YAML: [", "endpoints.yaml"),
        ("[]", "endpoints.yaml"),
        (&duplicate, "a"),
        (named, "localhost"),
        (misspelt, "lables"),
    ];
    for (text, why) in drills {
        stack.daemon()?.settings().write_endpoints_file(text)?;
        let reported = || async {
            discovery_error(&stack)
                .await?
                .as_str()
                .filter(|error| error.contains(why))
                .map(drop)
        };
        wait_for(
            LIMIT,
            &format!("/debug/state to name {why:?} in {text:?}"),
            reported,
        )
        .await?;
        assert_eq!(
            source_ok(&stack).await,
            Some(false),
            "the metric reports it too"
        );
        pool_is(&stack, &[0, 1, 2]).await?;
        assert_eq!(
            stack.daemon()?.admin("/readyz").await?.status,
            200,
            "the daemon still has a set of endpoints"
        );
        stack.set_pool(&[0, 1, 2])?;
        wait_for(LIMIT, "a good file to be taken", || async {
            discovery_error(&stack).await?.is_null().then_some(())
        })
        .await?;
    }
    load.stop().await?.check_all_served()
}

#[tokio::test]
async fn a_file_that_is_gone_for_a_while_is_not_missed() -> Result<()> {
    let mut stack = explained(3, 1).shared_envoy().start().await?;
    let load = LoadGenerator::start(stack.address(), 2);
    std::fs::remove_file(stack.folder().join("endpoints.yaml"))?;
    wait_for(LIMIT, "the loss to be reported", || async {
        discovery_error(&stack).await?.is_string().then_some(())
    })
    .await?;
    load.wait_for_more(100, LIMIT).await?;
    pool_is(&stack, &[0, 1, 2]).await?;
    // The last valid set stays in use even after a restart, because the daemon has its last state
    // on disk.
    stack.daemon()?.process().kill()?;
    stack.daemon()?.start_again()?;
    let again = || async {
        (stack.daemon.as_ref()?.admin("/readyz").await.ok()?.status == 200).then_some(())
    };
    wait_for(LIMIT, "the daemon to be ready by its snapshot", again).await?;
    load.wait_for_more(100, LIMIT).await?;
    pool_is(&stack, &[0, 1, 2]).await?;
    stack.set_pool(&[1, 2])?;
    pool_is(&stack, &[1, 2]).await?;
    load.stop().await?.check_all_served()
}

#[tokio::test]
async fn endpoints_leave_under_load_and_no_request_notices() -> Result<()> {
    let mut stack = explained(4, 2).envoy_in_turn().start().await?;
    let load = LoadGenerator::start(stack.address(), 6);
    for round in 0..8 {
        let removed = round % 4;
        let rest: Vec<usize> = (0..4).filter(|index| *index != removed).collect();
        stack.set_pool(&rest)?;
        pool_is(&stack, &rest).await?;
        load.wait_for_more(30, LIMIT).await?;
        stack.set_pool(&[0, 1, 2, 3])?;
        pool_is(&stack, &[0, 1, 2, 3]).await?;
    }
    ledger_metrics::close("endpoints removed and added eight times", load, &stack)
        .await
        .map(drop)
}

#[tokio::test]
async fn endpoints_that_come_under_load_are_never_named_before_envoy_knows_them() -> Result<()> {
    const ADDED: usize = 20;
    let mut stack = explained(ADDED + 1, 2).shared_envoy().start().await?;
    stack.set_pool(&[0])?;
    pool_is(&stack, &[0]).await?;
    let load = LoadGenerator::start(stack.address(), 6);
    for count in 2..=ADDED + 1 {
        let indices: Vec<usize> = (0..count).collect();
        stack.set_pool(&indices)?;
        pool_is(&stack, &indices).await?;
    }
    load.wait_for_more(300, LIMIT).await?;
    let outcome = load.stop().await?;
    outcome.check_all_served()?;
    assert!(
        outcome.served.len() > ADDED / 2,
        "the new endpoints serve: {:?}",
        outcome.served
    );
    Ok(())
}
