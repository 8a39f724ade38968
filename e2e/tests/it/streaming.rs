//! Replies pass through unchanged while tokens are counted, and the in-flight ledger is released
//! whichever way a request ends.

use std::time::Duration;

use http::Request;
use serde_json::{Value, json};
use testbed::client::{self, EventStream, Http2Client};
use testbed::model_server::{FaultMode, ModelServerOptions, ServerFault};
use testbed::stack::Stack;
use testbed::{Result, wait_for};

use crate::echo;

const LIMIT: Duration = Duration::from_secs(10);

fn streamed(tokens: u32) -> Value {
    let mut body = echo::chat("tell me more");
    body["stream"] = true.into();
    body["stream_options"] = json!({"include_usage": true});
    body["max_tokens"] = tokens.into();
    body["ignore_eos"] = true.into();
    body
}

/// Returns the options of a server that pauses before each write of a stream.
fn slow(chunk_delay_ms: u64) -> ModelServerOptions {
    ModelServerOptions {
        models: vec!["demo".into()],
        speed: 0.0,
        chunk_delay_ms,
        ..ModelServerOptions::default()
    }
}

/// Waits until no worker of the proxy counts a request in flight, according to the reports that the
/// daemon gets every second.
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

#[tokio::test]
async fn a_stream_arrives_as_the_engine_sent_it_and_is_counted() -> Result<()> {
    let stack = Stack::builder()
        .servers_like(1, &slow(10))
        .envoy_in_turn()
        .start()
        .await?;
    let direct = client::post(
        stack.servers[0].addr(),
        "/v1/chat/completions",
        streamed(20).to_string(),
    )
    .await?;
    let through = stack.post("/v1/chat/completions", &streamed(20)).await?;
    let contents = |reply: &client::ClientReply| reply.text().matches("\"content\"").count();
    assert_eq!(contents(&direct), contents(&through));
    assert!(
        through.text().ends_with("data: [DONE]\n\n"),
        "{}",
        through.text()
    );
    let counted = || async {
        let stats = stack.envoy.prometheus().await.ok()?;
        stats
            .lines()
            .any(|line| {
                line.starts_with("switchpoint_completion_tokens_total") && line.ends_with(" 20")
            })
            .then_some(())
    };
    wait_for(LIMIT, "20 completion tokens in /stats/prometheus", counted).await?;
    nothing_in_flight(&stack).await
}

#[tokio::test]
async fn events_come_one_by_one() -> Result<()> {
    let stack = Stack::builder()
        .servers_like(1, &slow(30))
        .shared_envoy()
        .start()
        .await?;
    let request =
        Request::post("/v1/chat/completions").body(client::full(streamed(10).to_string()))?;
    let mut events = EventStream::new(client::start(stack.address(), request).await?);
    let first = events.next().await?.ok_or("no event")?;
    let rest = events.rest().await?;
    let last = rest.last().ok_or("one event only")?;
    assert!(
        last.at - first.at >= Duration::from_millis(150),
        "the events were held back until the end"
    );
    Ok(())
}

#[tokio::test]
async fn the_engines_load_report_is_asked_for_and_kept_from_the_client() -> Result<()> {
    let stack = Stack::start_shared(1).await?;
    let reply = stack
        .send(echo::post(
            "/v1/chat/completions",
            &[],
            echo::chat("x").to_string(),
        )?)
        .await?;
    assert_eq!(
        echo::header(&reply.json()?, "endpoint-load-metrics-format"),
        ["TEXT"]
    );
    let reply = stack.post("/v1/chat/completions", &echo::chat("x")).await?;
    assert_eq!(
        (
            reply.status,
            reply.headers.contains_key("endpoint-load-metrics")
        ),
        (200, false),
        "{:?}",
        reply.headers
    );
    Ok(())
}

#[tokio::test]
async fn released_when_the_engine_breaks_off() -> Result<()> {
    let stack = Stack::builder()
        .servers_like(1, &slow(10))
        .shared_envoy()
        .start()
        .await?;
    stack.servers[0]
        .fault(ServerFault {
            after_chunks: Some(3),
            ..ServerFault::new(FaultMode::ResetMidStream)
        })
        .await;
    let reply = stack.post("/v1/chat/completions", &streamed(50)).await;
    assert!(reply.is_err(), "the client sees that the stream broke");
    let connection = Http2Client::connect(stack.address()).await?;
    let request =
        Request::post("/v1/chat/completions").body(client::full(streamed(50).to_string()))?;
    assert!(
        connection.send(request).await.is_err(),
        "an HTTP/2 client sees it too"
    );
    nothing_in_flight(&stack).await
}

#[tokio::test]
async fn released_when_no_endpoint_answers() -> Result<()> {
    let stack = Stack::start_shared(2).await?;
    for server in &stack.servers {
        server.fault(ServerFault::new(FaultMode::Refuse)).await;
    }
    for _ in 0..5 {
        assert_eq!(
            stack
                .post("/v1/chat/completions", &echo::chat("x"))
                .await?
                .status,
            503
        );
    }
    nothing_in_flight(&stack).await
}
