//! The basic path: daemon, snapshot, filter, pick, Envoy.

use std::collections::BTreeSet;
use std::time::Duration;

use http::Request;
use serde_json::{Value, json};
use testbed::stack::Stack;
use testbed::{Result, client, wait_for};

/// Longest time from a change in the endpoints file to its effect on picks; the product promises 50
/// ms.
const EFFECT_LIMIT: Duration = Duration::from_secs(10);

fn chat(prompt: &str) -> Value {
    json!({"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": prompt}]})
}

/// A chat request that the engine echoes.
fn echoed_chat(prompt: &str, id: &str) -> Result<Request<client::Body>> {
    let request = Request::post("/v1/chat/completions").header("content-type", "application/json");
    Ok(request.header("x-echo", "1").header("x-request-id", id).body(client::full(chat(prompt).to_string()))?)
}

fn header_of<'a>(echo: &'a Value, name: &str) -> Vec<&'a str> {
    let pairs = echo["headers"].as_array().into_iter().flatten();
    pairs.filter(|pair| pair[0] == name).filter_map(|pair| pair[1].as_str()).collect()
}

#[tokio::test]
async fn a_request_is_picked_and_served() -> Result<()> {
    let stack = Stack::start(3).await?;
    let reply = stack.send(echoed_chat("hello", "spine-1")?).await?;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let echo = reply.json()?;
    let by = stack.servers[stack.server_of(&reply)?].addr().to_string();

    let destination = header_of(&echo, "x-gateway-destination-endpoint");
    assert_eq!(destination.len(), 1, "one header line: {echo}");
    let ranked = destination[0].split(',').map(str::trim).collect::<Vec<_>>();
    assert_eq!(ranked.first(), Some(&by.as_str()), "the first endpoint of the list serves");
    let pool = BTreeSet::from_iter(stack.servers.iter().map(|server| server.addr().to_string()));
    assert!(ranked.iter().all(|address| pool.contains(*address)), "{ranked:?} are endpoints of the pool");
    assert_eq!(BTreeSet::from_iter(&ranked).len(), ranked.len(), "{ranked:?} has no endpoint twice");
    assert_eq!(echo["body"], chat("hello").to_string(), "the body reaches the engine byte for byte");

    let line = stack.envoy.access_log_of("spine-1", EFFECT_LIMIT).await?;
    assert_eq!(line["destination"], destination[0]);
    assert_eq!((&line["endpoint"], &line["attempts"]), (&json!(by), &json!(1)));
    assert_eq!((&line["pool"], &line["status"]), (&json!("default"), &json!(200)));
    assert_eq!(line["drop_reason"], Value::Null);
    Ok(())
}

#[tokio::test]
async fn every_worker_picks() -> Result<()> {
    let stack = Stack::builder().servers(3).concurrency(4).start().await?;
    // Many connections, so that each of the four workers gets some; different prompts, so that no
    // cached prefix affects the picks.
    let requests = (0..80).map(|number| {
        let (address, body) = (stack.address(), chat(&format!("{number} is a number")).to_string());
        async move { client::post(address, "/v1/chat/completions", body).await }
    });
    let mut served = [0; 3];
    for reply in futures::future::join_all(requests).await {
        let reply = reply?;
        served[stack.server_of(&reply)?] += 1;
    }
    assert!(served.iter().all(|count| *count > 0), "idle servers share the load: {served:?}");
    let workers = stack.envoy.stats("worker_[0-9]+\\.downstream_cx_total").await?;
    assert_eq!(workers.len(), 4, "{workers:?}");
    Ok(())
}

#[tokio::test]
async fn the_pool_follows_the_endpoints_file() -> Result<()> {
    let mut stack = Stack::start(3).await?;
    stack.set_pool(&[1])?;
    let only_one = || async {
        let ranked = destination(&stack, "which?").await.ok()?;
        (ranked == [stack.servers[1].addr().to_string()]).then_some(())
    };
    wait_for(EFFECT_LIMIT, "the removed endpoints to leave the picks", only_one).await?;

    stack.set_pool(&[0, 1])?;
    let both = || async {
        let ranked = destination(&stack, "and now?").await.ok()?;
        (ranked.len() == 2).then_some(ranked)
    };
    let ranked = wait_for(EFFECT_LIMIT, "the added endpoint to join the picks", both).await?;
    assert!(ranked.contains(&stack.servers[0].addr().to_string()), "{ranked:?}");
    Ok(())
}

/// The ranked list that a request gets; an error if it gets none.
async fn destination(stack: &Stack, prompt: &str) -> Result<Vec<String>> {
    let reply = stack.send(echoed_chat(prompt, "any")?).await?;
    assert_eq!(reply.status, 200, "no request fails while the pool changes: {}", reply.text());
    let echo = reply.json()?;
    let list = header_of(&echo, "x-gateway-destination-endpoint").first().copied().ok_or("no destination")?;
    Ok(list.split(',').map(|address| address.trim().to_owned()).collect())
}

#[tokio::test]
async fn not_ready_without_state() -> Result<()> {
    let stack = Stack::builder().servers(1).without_daemon().start().await?;
    let reply = stack.get("/switchpoint/ready").await?;
    assert_eq!(reply.status, 503, "{}", reply.text());
    Ok(())
}
