//! The basic path: daemon, snapshot, filter, pick, Envoy.

use std::collections::BTreeSet;
use std::time::Duration;

use http::Request;
use serde_json::{Value, json};
use testbed::stack::Stack;
use testbed::{Result, client};

/// The maximum time from a change in the endpoints file to its effect on picks. The product
/// promises 50 ms.
const EFFECT_LIMIT: Duration = Duration::from_secs(10);

fn chat(prompt: &str) -> Value {
    json!({"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": prompt}]})
}

/// Returns a chat request that the engine echoes.
fn echoed_chat(prompt: &str, id: &str) -> Result<Request<client::Body>> {
    let request = Request::post("/v1/chat/completions").header("content-type", "application/json");
    Ok(request
        .header("x-echo", "1")
        .header("x-request-id", id)
        .body(client::full(chat(prompt).to_string()))?)
}

fn header_of<'a>(echo: &'a Value, name: &str) -> Vec<&'a str> {
    let pairs = echo["headers"].as_array().into_iter().flatten();
    pairs
        .filter(|pair| pair[0] == name)
        .filter_map(|pair| pair[1].as_str())
        .collect()
}

#[tokio::test]
async fn a_request_is_picked_and_served() -> Result<()> {
    let stack = Stack::start_shared(3).await?;
    let reply = stack.send(echoed_chat("hello", "spine-1")?).await?;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let echo = reply.json()?;
    let by = stack.servers[stack.server_of(&reply)?].addr().to_string();

    let destination = header_of(&echo, "x-gateway-destination-endpoint");
    assert_eq!(destination.len(), 1, "one header line: {echo}");
    let ranked = destination[0].split(',').map(str::trim).collect::<Vec<_>>();
    assert_eq!(
        ranked.first(),
        Some(&by.as_str()),
        "the first endpoint of the list serves"
    );
    let pool = BTreeSet::from_iter(stack.servers.iter().map(|server| server.addr().to_string()));
    assert!(
        ranked.iter().all(|address| pool.contains(*address)),
        "{ranked:?} are endpoints of the pool"
    );
    assert_eq!(
        BTreeSet::from_iter(&ranked).len(),
        ranked.len(),
        "{ranked:?} has no endpoint twice"
    );
    assert_eq!(
        echo["body"],
        chat("hello").to_string(),
        "the body reaches the engine byte for byte"
    );

    let line = stack.envoy.access_log_of("spine-1", EFFECT_LIMIT).await?;
    assert_eq!(line["destination"], destination[0]);
    assert_eq!(
        (&line["endpoint"], &line["attempts"]),
        (&json!(by), &json!(1))
    );
    assert_eq!(
        (&line["pool"], &line["status"]),
        (&json!("default"), &json!(200))
    );
    assert_eq!(line["drop_reason"], Value::Null);
    Ok(())
}
