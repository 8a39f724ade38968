//! The native module in a real Envoy with two workers, which share one pool.

use std::time::Duration;

use ring::digest;
use serde_json::json;
use testbed::client::{self, ClientReply};
use testbed::load::LoadGenerator;
use testbed::model_server::ModelServerOptions;
use testbed::second_envoy::SecondEnvoy;
use testbed::stack::{PickerMode, Stack};
use testbed::{Result, wait_for};

use crate::drills_daemon::connected;
use crate::echo;

const LIMIT: Duration = Duration::from_secs(30);

async fn stack(servers: usize) -> Result<Stack> {
    Stack::builder()
        .front(PickerMode::Native)
        .servers(servers)
        .concurrency(2)
        .start()
        .await
}

/// Waits until the daemon knows of no request in flight.
async fn nothing_in_flight(stack: &Stack) -> Result<()> {
    let idle = || async {
        let endpoints = stack.daemon.as_ref()?.endpoints().await.ok()?;
        endpoints
            .iter()
            .all(|endpoint| endpoint["in_flight"] == 0)
            .then_some(())
    };
    wait_for(LIMIT, "the ledger to be empty", idle).await
}

async fn chat(stack: &Stack, prompt: &str) -> Result<ClientReply> {
    stack
        .post("/v1/chat/completions", &echo::chat(prompt))
        .await
}

#[tokio::test]
async fn both_workers_of_the_native_module_pick_in_one_pool() -> Result<()> {
    let mut stack = stack(3).await?;
    // Each request has a connection of its own, so both workers get some.
    let prompt = "a long prompt that all requests have ".repeat(100);
    let mut served = std::collections::BTreeSet::new();
    for _ in 0..20 {
        let reply = chat(&stack, &prompt).await?;
        assert_eq!(reply.status, 200, "{}", reply.text());
        served.insert(stack.server_of(&reply)?);
    }
    assert_eq!(
        served.len(),
        1,
        "the prefix is known to both workers: {served:?}"
    );
    let envoy = &stack.envoy;
    envoy
        .picker_stat_until("switchpoint_picked_total", |count| count == 20, LIMIT)
        .await?;
    assert_eq!(
        envoy.picker_stat("switchpoint_native_panics_total").await?,
        0
    );
    nothing_in_flight(&stack).await?;

    stack.set_pool(&[0])?;
    let moved = || async {
        let reply = chat(&stack, "and now?").await.ok()?;
        (stack.server_of(&reply).ok()? == 0).then_some(())
    };
    wait_for(LIMIT, "requests to follow the pool", moved).await
}

#[tokio::test]
async fn the_native_module_picks_on_without_its_daemon_and_finds_it_again() -> Result<()> {
    let mut stack = stack(2).await?;
    let load = LoadGenerator::start(stack.address(), 4);
    for _ in 0..2 {
        stack.daemon()?.process().kill()?;
        connected(&stack, 0).await?;
        load.wait_for_more(30, LIMIT).await?;
        stack.daemon()?.start_again()?;
        connected(&stack, 1).await?;
    }
    load.stop().await?.check_all_served()?;
    nothing_in_flight(&stack).await
}

#[tokio::test]
async fn the_native_module_streams_replies_and_passes_a_long_body() -> Result<()> {
    let slow = ModelServerOptions {
        models: vec!["demo".into()],
        speed: 0.0,
        chunk_delay_ms: 10,
        ..ModelServerOptions::default()
    };
    let stack = Stack::builder()
        .front(PickerMode::Native)
        .servers_like(1, &slow)
        .start()
        .await?;
    let mut body = echo::chat("tell me more");
    body["stream"] = true.into();
    body["stream_options"] = json!({"include_usage": true});
    body["max_tokens"] = 20.into();
    let reply = stack.post("/v1/chat/completions", &body).await?;
    assert!(
        reply.text().ends_with("data: [DONE]\n\n"),
        "{}",
        reply.text()
    );
    let tokens = "switchpoint_completion_tokens_total";
    let counted = stack
        .envoy
        .picker_stat_until(tokens, |count| count > 0, LIMIT);
    counted.await?;

    // A body that Envoy reads in pieces.
    let long = echo::chat(&"word ".repeat(60_000)).to_string();
    let sent = digest::digest(&digest::SHA256, long.as_bytes());
    let sent: String = sent
        .as_ref()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let json_type = [("content-type", "application/json")];
    let reply = stack
        .send(echo::post("/v1/chat/completions", &json_type, long)?)
        .await?;
    assert_eq!(reply.json()?["body_sha256"], json!(sent), "byte for byte");
    nothing_in_flight(&stack).await
}

#[tokio::test]
async fn a_native_module_and_a_wasm_filter_share_their_load() -> Result<()> {
    let slow = ModelServerOptions {
        models: vec!["demo".into()],
        speed: 1.0,
        ..ModelServerOptions::default()
    };
    let stack = Stack::builder()
        .front(PickerMode::Native)
        .servers_like(2, &slow)
        .start()
        .await?;
    let beside = SecondEnvoy::start_as(PickerMode::Filter, &stack, "beside").await?;
    // The wasm filter must see the request that runs through the native module, and avoid it.
    let mut body = echo::chat("first");
    body["max_tokens"] = 400.into();
    body["ignore_eos"] = true.into();
    let address = stack.address();
    let long = body.to_string();
    let running =
        tokio::spawn(async move { client::post(address, "/v1/chat/completions", long).await });
    let seen = || async {
        let page = stack.daemon.as_ref()?.endpoints().await.ok()?;
        page.iter()
            .any(|endpoint| endpoint["in_flight"] == 1)
            .then_some(())
    };
    wait_for(LIMIT, "the daemon to know of the request", seen).await?;
    let other = client::post(
        beside.envoy.listener(),
        "/v1/chat/completions",
        echo::chat("second").to_string(),
    )
    .await?;
    let first = running.await??;
    assert_ne!(stack.server_of(&other)?, stack.server_of(&first)?);
    Ok(())
}
