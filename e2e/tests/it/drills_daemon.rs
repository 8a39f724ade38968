//! Failure drills of the daemon and of the leader VM. `daemon_faults` has the drills of a daemon
//! that is killed, pauses or restarts often.

use std::collections::BTreeSet;
use std::time::Duration;

use e2e::explain::{ExplainedDecision, pool_is};
use e2e::ledger_metrics;
use proto::state::daemon_message::Message;
use serde_json::{Value, json};
use testbed::load::LoadGenerator;
use testbed::stack::Stack;
use testbed::{Result, drill, wait_for};

use crate::partition::partitioned_for;
use crate::played::{PlayedDaemon, message, pool_update};
use crate::{echo, transports};

const LIMIT: Duration = Duration::from_secs(60);

/// Waits until the proxy has a connection to a daemon (1) or has none (0).
pub(crate) async fn connected(stack: &Stack, wanted: i64) -> Result<()> {
    stack
        .envoy
        .picker_stat_until(
            "switchpoint_state_connected",
            |connected| connected == wanted,
            LIMIT,
        )
        .await
        .map(drop)
}

#[tokio::test]
async fn a_partition_is_survived_by_stream() -> Result<()> {
    partitioned_for(Duration::from_secs(3), "grpc").await
}

#[tokio::test]
async fn a_partition_is_survived_by_calls() -> Result<()> {
    partitioned_for(Duration::from_secs(3), "http").await
}

#[tokio::test]
async fn a_daemon_killed_behind_calls_is_found_again() -> Result<()> {
    let mut stack = transports::by("http")
        .servers(4)
        .concurrency(2)
        .start()
        .await?;
    let load = LoadGenerator::start(stack.address(), 4);
    for round in 0..3 {
        stack.daemon()?.process().kill()?;
        connected(&stack, 0).await?;
        let indices = [round, round + 1];
        stack.set_pool(&indices)?;
        load.wait_for_more(30, LIMIT).await?;
        stack.daemon()?.start_again()?;
        connected(&stack, 1).await?;
        pool_is(&stack, &indices).await?;
    }
    ledger_metrics::close("daemon killed three times, by calls", load, &stack).await?;
    Ok(())
}

#[tokio::test]
async fn a_daemon_with_an_empty_memory_is_a_new_life() -> Result<()> {
    let mut stack = Stack::builder()
        .servers(4)
        .concurrency(2)
        .picker(json!({"explain": true}))
        .envoy_in_turn()
        .start()
        .await?;
    stack.set_pool(&[0, 1, 2])?;
    pool_is(&stack, &[0, 1, 2]).await?;
    let load = LoadGenerator::start(stack.address(), 4);
    load.wait_for_more(20, LIMIT).await?;
    let before = stack.daemon()?.admin("/debug/state").await?.json()?["term"].as_u64();
    stack.daemon()?.process().kill()?;
    std::fs::remove_file(stack.folder().join("snapshot"))?;
    stack.set_pool(&[1, 2, 3])?;
    stack.daemon()?.start_again()?;
    pool_is(&stack, &[1, 2, 3]).await?;
    assert!(
        stack.daemon()?.admin("/debug/state").await?.json()?["term"].as_u64() > before,
        "the term of a daemon without a snapshot comes from its clock"
    );
    // Block hashes have a new key now: old placements are unknown, new placements are found.
    let prompt = "A prompt to be found again. ".repeat(100);
    let home = ExplainedDecision::ask(stack.address(), &prompt)
        .await?
        .picked[0]
        .clone();
    let found = || async {
        (ExplainedDecision::ask(stack.address(), &prompt)
            .await
            .ok()?
            .picked[0]
            == home)
            .then_some(())
    };
    wait_for(LIMIT, "a prompt to be found by its new hash", found).await?;
    load.wait_for_more(50, LIMIT).await?;
    ledger_metrics::close("daemon restarted with an empty memory", load, &stack).await?;
    Ok(())
}

#[tokio::test]
async fn a_daemon_of_another_version_in_its_place_is_not_obeyed() -> Result<()> {
    let mut stack = Stack::builder()
        .servers(4)
        .concurrency(2)
        .picker(json!({"explain": true}))
        .start()
        .await?;
    stack.set_pool(&[0, 1, 2])?;
    pool_is(&stack, &[0, 1, 2]).await?;
    let load = LoadGenerator::start(stack.address(), 4);
    let hosts: Vec<_> = stack
        .servers
        .iter()
        .map(testbed::model_server::ModelServer::addr)
        .collect();
    stack.daemon()?.process().kill()?;
    let other = PlayedDaemon::start_at(stack.daemon()?.settings().state.address()).await?;
    for schema in [proto::SCHEMA + 1, proto::SCHEMA_MIN - 1] {
        other.rehearse(
            schema,
            vec![message(Message::PoolUpdate(pool_update(
                u64::MAX,
                1,
                &hosts[..1],
            )))],
        );
        other.leave();
        let streams = stack
            .envoy
            .picker_stat("switchpoint_state_streams_total")
            .await?;
        // Waits until the proxy has tried twice more to open a stream.
        stack
            .envoy
            .picker_stat_until(
                "switchpoint_state_streams_total",
                |now| now >= streams + 2,
                LIMIT,
            )
            .await?;
        assert_eq!(
            stack
                .envoy
                .picker_stat("switchpoint_state_connected")
                .await?,
            0,
            "{schema}"
        );
        load.wait_for_more(50, LIMIT).await?;
        let known = ExplainedDecision::ask(stack.address(), "who is there?")
            .await?
            .endpoints();
        assert_eq!(
            known,
            hosts[..3]
                .iter()
                .map(ToString::to_string)
                .collect::<BTreeSet<_>>(),
            "the proxy applies no message of version {schema}"
        );
    }
    assert!(
        stack
            .envoy
            .process()
            .stderr()
            .contains("run both of one release"),
        "the log says what to do"
    );
    drop(other);
    stack.set_pool(&[1, 2, 3])?;
    stack.daemon()?.start_again()?;
    pool_is(&stack, &[1, 2, 3]).await?;
    ledger_metrics::close(
        "daemon of a newer, then of an older message version",
        load,
        &stack,
    )
    .await?;
    Ok(())
}

/// Returns an endpoints file with these servers, each with the label `note`.
fn labelled(stack: &Stack, indices: &[usize], label: &str) -> String {
    let row = |index: &usize| {
        let address = stack.servers[*index].addr();
        json!({"name": format!("server-{index}"), "address": "127.0.0.1", "port": address.port(), "labels": {"note": label}})
    };
    json!({"endpoints": indices.iter().map(row).collect::<Vec<Value>>()}).to_string()
}

/// Returns the start time of the proxy's connection.
async fn connection(stack: &Stack) -> Option<String> {
    let state = stack
        .daemon
        .as_ref()?
        .admin("/debug/state")
        .await
        .ok()?
        .json()
        .ok()?;
    Some(state["proxies"][0]["since"].as_str()?.to_owned())
}

/// `make e2e-long` runs these tests.
mod slow {
    use super::*;

    #[tokio::test]
    async fn a_leader_that_stands_still_beyond_its_lease_is_followed_and_rolls_nothing_back()
    -> Result<()> {
        let builder = Stack::builder()
            .envoy_config(drill::envoy_config()?)
            .picker(json!({"explain": true, "lease_ms": 500}));
        let mut stack = builder.servers(3).concurrency(2).start().await?;
        let first = connection(&stack).await.ok_or("a connection")?;
        let load = LoadGenerator::start(stack.address(), 4);
        load.wait_for_more(20, LIMIT).await?;
        // The main thread's VM receives the message and stalls for four seconds. Envoy's admin port
        // stalls with this VM. Meanwhile a worker's VM leads.
        let stalling = labelled(&stack, &[0, 1, 2], drill::STALL);
        stack.daemon()?.settings().write_endpoints_file(&stalling)?;
        let another = || async {
            connection(&stack)
                .await
                .filter(|since| *since != first)
                .map(drop)
        };
        wait_for(LIMIT, "another VM of the process to connect", another).await?;
        stack.set_pool(&[0, 1])?;
        pool_is(&stack, &[0, 1]).await?;
        stack
            .envoy
            .picker_stat_until(
                "switchpoint_state_leaders_total",
                |leaders| leaders >= 2,
                LIMIT,
            )
            .await?;
        load.wait_for_more(100, LIMIT).await?;
        pool_is(&stack, &[0, 1]).await?;
        assert!(
            stack
                .envoy
                .process()
                .stderr()
                .contains("a drill makes this VM stand still"),
            "the VM did not stall"
        );
        connected(&stack, 1).await?;
        assert_eq!(
            stack
                .post("/v1/chat/completions", &echo::chat("x"))
                .await?
                .status,
            200
        );
        ledger_metrics::close(
            "main-thread leader stalled 4 s beyond a lease of 0.5 s",
            load,
            &stack,
        )
        .await?;
        Ok(())
    }
}
