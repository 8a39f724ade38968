//! Starting and stopping: what the shipped scripts promise for running requests.

use std::time::{Duration, Instant};

use e2e::ledger_metrics;
use http::Request;
use rustix::process::Signal;
use serde_json::json;
use testbed::client::{self, EventStream};
use testbed::load::LoadGenerator;
use testbed::model_server::ModelServerOptions;
use testbed::stack::Stack;
use testbed::{Result, wait_for};

const LIMIT: Duration = Duration::from_secs(30);

#[tokio::test]
async fn the_start_script_stops_without_cutting_a_stream() -> Result<()> {
    let slow = ModelServerOptions {
        models: vec!["demo".into()],
        speed: 0.0,
        chunk_delay_ms: 100,
        ..ModelServerOptions::default()
    };
    let mut stack = Stack::builder()
        .servers_like(1, &slow)
        .start_script(5)
        .start()
        .await?;
    let chat = json!({"model": "demo", "stream": true, "max_tokens": 80, "ignore_eos": true, "messages": [{"role": "user", "content": "hello"}]});
    let request = Request::post("/v1/chat/completions").header("content-type", "application/json");
    let mut stream = EventStream::new(
        client::start(
            stack.address(),
            request.body(client::full(chat.to_string()))?,
        )
        .await?,
    );
    stream.next().await?.ok_or("the stream begins")?;

    let load = LoadGenerator::start(stack.address(), 3);
    load.wait_for_more(10, LIMIT).await?;
    let asked = Instant::now();
    stack.envoy.process().signal(Signal::TERM)?;
    let envoy = stack.envoy.process();
    let draining =
        || std::future::ready(envoy.stderr().contains("start.sh: draining").then_some(()));
    wait_for(LIMIT, "the drain to begin", draining).await?;
    load.wait_for_more(3, LIMIT).await?; // new requests are served while it drains
    let outcome = load.stop().await?;
    outcome.check_all_served()?;
    ledger_metrics::note(
        "Envoy drained by the start script",
        &format!("{} served, 0 failed", outcome.total()),
    );
    let events = stream.rest().await?;
    assert_eq!(
        events.last().map(|event| event.data.as_str()),
        Some("[DONE]"),
        "the stream ended normally"
    );
    assert!(
        asked.elapsed() > Duration::from_secs(2),
        "the stream ended well after the drain began"
    );

    let address = stack.address();
    let is_closed = || async move {
        client::get(address, "/v1/models")
            .await
            .is_err()
            .then_some(())
    };
    wait_for(Duration::from_secs(10), "the listener to close", is_closed).await?;
    let status = stack.envoy.process().wait(Duration::from_secs(10)).await?;
    assert!(status.success(), "{status}");
    Ok(())
}
