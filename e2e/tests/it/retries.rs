//! The picked endpoint fails before it answers. Envoy tries the next endpoint of the ranked list
//! immediately, and the failed endpoint is ejected for some time.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testbed::Result;
use testbed::client::RawConnection;
use testbed::model_server::{FaultMode, ServerFault};
use testbed::stack::Stack;

use crate::echo;

const LIMIT: Duration = Duration::from_secs(10);

/// Sends chat requests until the first endpoint of a request's list is `index`. Returns the result
/// of that request.
async fn picked_first(stack: &Stack, index: usize, tag: &str) -> Result<Value> {
    let wanted = stack.servers[index].addr().to_string();
    for attempt in 0..100 {
        let id = format!("{tag}-{attempt}");
        let body = echo::chat(&format!("{id} is not like any other prompt")).to_string();
        let reply = stack
            .send(echo::post(
                "/v1/chat/completions",
                &[("x-request-id", &id)],
                body,
            )?)
            .await?;
        let line = stack.envoy.access_log_of(&id, LIMIT).await?;
        if line["destination"]
            .as_str()
            .is_some_and(|list| list.starts_with(&wanted))
        {
            return Ok(
                json!({"status": reply.status, "line": line, "body": reply.text(), "by": reply.header("x-served-by")}),
            );
        }
        assert_eq!(reply.status, 200, "an endpoint without a fault serves");
    }
    Err(format!("{wanted} was never picked first").into())
}

#[tokio::test]
async fn every_early_failure_goes_to_the_next_of_the_list() -> Result<()> {
    let modes = [
        FaultMode::Refuse,
        FaultMode::ResetBeforeHeaders,
        FaultMode::ResetMidHeaders,
        FaultMode::Status,
    ];
    // Each fault has a separate engine, because an engine that has failed is ejected for some time.
    let stack = Stack::start_shared(modes.len() + 1).await?;
    for (index, mode) in modes.into_iter().enumerate() {
        stack.servers[index].fault(ServerFault::new(mode)).await;
        let seen = picked_first(&stack, index, &format!("early-{index}")).await?;
        stack.servers[index]
            .fault(ServerFault::new(FaultMode::None))
            .await;
        let list: Vec<&str> = seen["line"]["destination"]
            .as_str()
            .unwrap_or_default()
            .split(',')
            .collect();
        assert_eq!(seen["status"], 200, "{mode:?}: {seen}");
        assert_eq!(seen["line"]["attempts"], 2, "{mode:?}: {seen}");
        assert_eq!(
            seen["by"], list[1],
            "{mode:?}: the second of the list serves: {seen}"
        );
        assert_eq!(seen["line"]["endpoint"], list[1], "{mode:?}");
    }
    Ok(())
}

#[tokio::test]
async fn two_dead_of_three_is_still_an_answer() -> Result<()> {
    let stack = Stack::start_shared(3).await?;
    stack.servers[0]
        .fault(ServerFault::new(FaultMode::Refuse))
        .await;
    stack.servers[1]
        .fault(ServerFault::new(FaultMode::ResetBeforeHeaders))
        .await;
    for i in 0..30 {
        let reply = stack
            .post("/v1/chat/completions", &echo::chat(&format!("{i} prompts")))
            .await?;
        assert_eq!(
            (reply.status, stack.server_of(&reply)?),
            (200, 2),
            "{}",
            reply.text()
        );
    }
    Ok(())
}

#[tokio::test]
async fn a_failed_endpoint_is_left_out_and_comes_back() -> Result<()> {
    let stack = Stack::start_shared(3).await?;
    stack.servers[0]
        .fault(ServerFault::new(FaultMode::Refuse))
        .await;
    picked_first(&stack, 0, "fails").await?;
    let failed = stack.servers[0].addr().to_string();
    // No request reaches the endpoint within the second of its ejection.
    let end = Instant::now() + Duration::from_millis(600);
    while Instant::now() < end {
        let reply = stack.send(echo::get("/v1/models", &[])?).await?;
        assert!(!echo::ranked(&reply)?.contains(&failed), "ejected");
    }
    stack.servers[0]
        .fault(ServerFault::new(FaultMode::None))
        .await;
    let seen = picked_first_after(&stack, 0).await?;
    assert_eq!(seen, stack.servers[0].addr().to_string());
    Ok(())
}

async fn picked_first_after(stack: &Stack, index: usize) -> Result<String> {
    let wanted = stack.servers[index].addr().to_string();
    testbed::wait_for(LIMIT, "the mended endpoint to serve again", || async {
        let reply = stack.send(echo::get("/v1/models", &[]).ok()?).await.ok()?;
        (reply.header("x-served-by") == wanted).then(|| wanted.clone())
    })
    .await
}

#[tokio::test]
async fn the_engines_own_503_reaches_the_client_when_no_endpoint_is_left() -> Result<()> {
    let stack = Stack::start_shared(2).await?;
    for server in &stack.servers {
        let fault = ServerFault {
            body: Some(r#"{"mine":true}"#.into()),
            retry_after: Some(7),
            ..ServerFault::new(FaultMode::Status)
        };
        server.fault(fault).await;
    }
    let reply = stack.post("/v1/chat/completions", &echo::chat("x")).await?;
    assert_eq!(
        (
            reply.status,
            reply.text().as_str(),
            reply.header("retry-after")
        ),
        (503, r#"{"mine":true}"#, "7")
    );
    Ok(())
}

#[tokio::test]
async fn a_429_of_an_engine_is_the_clients_to_see() -> Result<()> {
    let stack = Stack::start_shared(2).await?;
    for server in &stack.servers {
        server
            .fault(ServerFault {
                status: Some(429),
                retry_after: Some(3),
                ..ServerFault::new(FaultMode::Status)
            })
            .await;
    }
    let reply = stack.post("/v1/chat/completions", &echo::chat("x")).await?;
    assert_eq!(
        (reply.status, reply.header("retry-after")),
        (429, "3"),
        "not retried: {}",
        reply.text()
    );
    Ok(())
}

#[tokio::test]
async fn a_hanging_endpoint_is_left_by_the_per_try_timeout_of_streams() -> Result<()> {
    let stack = Stack::builder()
        .servers(2)
        .picker(json!({"per_try_timeout_ms": 300}))
        .shared_envoy()
        .start()
        .await?;
    stack.servers[0]
        .fault(ServerFault::new(FaultMode::Hang))
        .await;
    let mut streamed = echo::chat("x");
    streamed["stream"] = true.into();
    for i in 0..6 {
        streamed["messages"][0]["content"] = format!("{i}").into();
        let reply = stack.post("/v1/chat/completions", &streamed).await?;
        assert_eq!(
            (reply.status, stack.server_of(&reply)?),
            (200, 1),
            "{}",
            reply.text()
        );
    }
    Ok(())
}

#[tokio::test]
async fn a_large_body_is_sent_again_whole() -> Result<()> {
    let stack = Stack::start_shared(2).await?;
    stack.servers[0]
        .fault(ServerFault::new(FaultMode::Status))
        .await;
    for i in 0..4 {
        let body = echo::chat(&format!("{i} {}", "lorem ipsum ".repeat(200_000))).to_string();
        let reply = stack
            .send(echo::post("/v1/chat/completions", &[], body.clone())?)
            .await?;
        assert_eq!(
            (reply.status, &reply.json()?["body_bytes"]),
            (200, &json!(body.len()))
        );
        assert_eq!(stack.server_of(&reply)?, 1);
    }
    Ok(())
}

/// Envoy does not repeat work that takes minutes, because repeating it costs too much. Envoy does
/// not repeat requests to other paths, because repeating them may do harm.
#[tokio::test]
async fn long_work_and_other_paths_are_not_sent_again_once_an_engine_had_them() -> Result<()> {
    let stack = Stack::start_shared(2).await?;
    for server in &stack.servers {
        server
            .fault(ServerFault::new(FaultMode::ResetBeforeHeaders))
            .await;
    }
    let long = echo::chat(&"lorem ipsum ".repeat(200_000)).to_string();
    for (path, body) in [
        ("/v1/chat/completions", long),
        ("/v1/images/edits", "{}".to_owned()),
    ] {
        let reply = stack
            .send(echo::post(path, &[("x-request-id", path)], body)?)
            .await?;
        assert_eq!(reply.status, 503, "{path}: {}", reply.text());
        assert_eq!(
            stack.envoy.access_log_of(path, LIMIT).await?["attempts"],
            1,
            "{path}"
        );
    }
    Ok(())
}

#[tokio::test]
async fn many_at_once_survive_one_dead_engine() -> Result<()> {
    let stack = Stack::builder()
        .servers(3)
        .concurrency(4)
        .envoy_in_turn()
        .start()
        .await?;
    stack.servers[1]
        .fault(ServerFault::new(FaultMode::Refuse))
        .await;
    let requests = (0..120).map(|i| {
        let address = stack.address();
        let body = echo::chat(&format!("{i} of many")).to_string();
        async move { testbed::client::post(address, "/v1/chat/completions", body).await }
    });
    for reply in futures::future::join_all(requests).await {
        let reply = reply?;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    Ok(())
}

#[tokio::test]
async fn a_clients_own_fault_is_not_held_against_an_endpoint() -> Result<()> {
    let stack = Stack::builder().servers(2).envoy_in_turn().start().await?;
    for server in &stack.servers {
        // The engine hangs, because otherwise it might answer before the body breaks.
        server.fault(ServerFault::new(FaultMode::Hang)).await;
    }
    for _ in 0..6 {
        let mut raw = RawConnection::connect(stack.address()).await?;
        raw.write("POST /v2/models/demo/infer HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\nthis is no chunk\r\n")
            .await?;
        let reply = raw.read_reply().await?;
        assert_eq!(
            reply.status,
            400,
            "Envoy's own reply, after a host was chosen: {}",
            reply.text()
        );
    }
    for server in &stack.servers {
        server.fault(ServerFault::new(FaultMode::None)).await;
    }
    let reply = stack.send(echo::get("/v1/models", &[])?).await?;
    assert_eq!(echo::ranked(&reply)?.len(), 2, "no endpoint is ejected");
    assert_eq!(
        stack
            .envoy
            .picker_stat("switchpoint_failed_attempts_total")
            .await?,
        0
    );
    Ok(())
}
