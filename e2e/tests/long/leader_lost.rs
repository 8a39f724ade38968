//! The leader VM is lost, by a message from the daemon and without one. The module is a test build
//! that traps on demand.

use std::cell::Cell;
use std::time::Duration;

use e2e::explain::pool_is;
use e2e::ledger_metrics;
use http::Request;
use rustix::process::Signal;
use serde_json::json;
use testbed::client;
use testbed::load::LoadGenerator;
use testbed::stack::{Stack, StackBuilder};
use testbed::{Result, drill, wait_for};

/// The maximum wait for a new leader. A leader's lease is 3 s, and a VM waits 10 s after a loss
/// before it connects to the daemon again.
const LIMIT: Duration = Duration::from_secs(60);

fn trappable() -> Result<StackBuilder> {
    Ok(Stack::builder()
        .envoy_config(drill::envoy_config()?)
        .picker(json!({"explain": true})))
}

/// Returns an endpoints file with these servers, each with the label `note`.
fn labelled(stack: &Stack, indices: &[usize], label: &str) -> String {
    let row = |index: &usize| {
        let address = stack.servers[*index].addr();
        json!({"name": format!("server-{index}"), "address": "127.0.0.1", "port": address.port(), "labels": {"note": label}})
    };
    json!({"endpoints": indices.iter().map(row).collect::<Vec<_>>()}).to_string()
}

#[tokio::test]
async fn a_message_that_kills_costs_one_vm_once() -> Result<()> {
    let mut stack = trappable()?.servers(3).concurrency(4).start().await?;
    let load = LoadGenerator::start(stack.address(), 4);
    // The daemon sends the update again and again, each time with another version and other ages
    // but the same content.
    let poison = labelled(&stack, &[0, 1], drill::TRAP);
    stack.daemon()?.settings().write_endpoints_file(&poison)?;
    stack
        .envoy
        .picker_stat_until(
            "switchpoint_state_crash_guarded_total",
            |poisoned| poisoned == 1,
            LIMIT,
        )
        .await?;
    stack
        .envoy
        .picker_stat_until(
            "switchpoint_state_leaders_total",
            |leaders| leaders == 2,
            LIMIT,
        )
        .await?;
    let refused = stack
        .envoy
        .picker_stat("switchpoint_state_refused_total")
        .await?;
    stack
        .envoy
        .picker_stat_until(
            "switchpoint_state_refused_total",
            |now| now > refused,
            LIMIT,
        )
        .await?;
    pool_is(&stack, &[0, 1, 2]).await?;
    load.wait_for_more(200, LIMIT).await?;
    assert_eq!(
        stack
            .envoy
            .picker_stat("switchpoint_state_crash_guarded_total")
            .await?,
        1,
        "once"
    );
    assert_eq!(
        stack
            .envoy
            .picker_stat("switchpoint_state_leaders_total")
            .await?,
        2
    );
    // The main thread's VM, which was lost, serves no requests, so no client noticed.
    ledger_metrics::close("a message that traps its decoder", load, &stack).await?;

    let cured = labelled(&stack, &[0, 1], "harmless");
    stack.daemon()?.settings().write_endpoints_file(&cured)?;
    pool_is(&stack, &[0, 1]).await
}

#[tokio::test]
async fn a_leader_that_serves_is_lost_and_replaced() -> Result<()> {
    const CLIENTS: usize = 4;
    let mut stack = trappable()?.servers(3).concurrency(4).start().await?;
    // The test first loses the main thread's VM, as above, so that a worker's VM becomes the
    // leader.
    let poison = labelled(&stack, &[0, 1, 2], drill::TRAP);
    stack.daemon()?.settings().write_endpoints_file(&poison)?;
    stack
        .envoy
        .picker_stat_until(
            "switchpoint_state_leaders_total",
            |leaders| leaders == 2,
            LIMIT,
        )
        .await?;
    stack.set_pool(&[0, 1, 2])?;
    stack
        .envoy
        .picker_stat_until(
            "switchpoint_state_connected",
            |connected| connected == 1,
            LIMIT,
        )
        .await?;

    // The test traps the worker that happens to get the connection, and repeats this until a
    // trapped worker was the leader.
    let load = LoadGenerator::start(stack.address(), CLIENTS);
    let traps = Cell::new(0);
    let replaced = || async {
        traps.set(traps.get() + 1);
        let request = Request::post("/v1/chat/completions")
            .header(drill::TRAP, "1")
            .body(client::full("{}"))
            .ok()?;
        stack.send(request).await.ok()?;
        tokio::time::sleep(Duration::from_millis(500)).await;
        (stack
            .envoy
            .picker_stat("switchpoint_state_leaders_total")
            .await
            .ok()?
            > 2)
        .then_some(())
    };
    wait_for(LIMIT, "a leader to be lost and replaced", replaced).await?;
    stack.set_pool(&[1, 2])?;
    pool_is(&stack, &[1, 2]).await?;
    load.wait_for_more(100, LIMIT).await?;
    let outcome =
        ledger_metrics::close_but("leader lost", load, &stack, drill::is_of_a_trap).await?;
    let failed = outcome.failures.len();
    let traps = traps.get();
    assert!(
        failed <= CLIENTS * traps,
        "{traps} traps: {:?}",
        outcome.failures
    );
    ledger_metrics::agree(&stack, failed + traps, drill::is_lost_to_a_trap).await?;
    ledger_metrics::note(
        "leader lost",
        &format!("{traps} traps until the leader was hit"),
    );
    assert_eq!(
        stack
            .envoy
            .picker_stat("switchpoint_state_connected")
            .await?,
        1
    );
    Ok(())
}

/// Tests a proxy that was stopped for a long time, as when a machine sleeps: leases expire and
/// streams time out while no process can notice.
#[tokio::test]
async fn a_proxy_that_was_stopped_for_long_goes_on() -> Result<()> {
    let mut stack = Stack::builder()
        .servers(3)
        .concurrency(4)
        .picker(json!({"explain": true}))
        .start()
        .await?;
    stack.envoy.process().signal(Signal::STOP)?;
    stack.set_pool(&[0, 1])?;
    tokio::time::sleep(Duration::from_secs(8)).await;
    stack.envoy.process().signal(Signal::CONT)?;
    let load = LoadGenerator::start(stack.address(), 4);
    pool_is(&stack, &[0, 1]).await?;
    stack.set_pool(&[1, 2])?;
    pool_is(&stack, &[1, 2]).await?;
    load.wait_for_more(100, LIMIT).await?;
    ledger_metrics::close("Envoy stopped for 8 s by SIGSTOP", load, &stack).await?;
    stack
        .envoy
        .picker_stat_until(
            "switchpoint_state_connected",
            |connected| connected == 1,
            LIMIT,
        )
        .await?;
    Ok(())
}
