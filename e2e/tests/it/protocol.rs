//! The Endpoint Picker Protocol, clause by clause: destination, subset, statuses.

use std::collections::BTreeSet;
use std::time::Duration;

use http::Request;
use serde_json::{Value, json};
use testbed::envoy::subset_hint_filter;
use testbed::stack::{Stack, StackBuilder};
use testbed::{Result, wait_for};

use crate::echo;

const LIMIT: Duration = Duration::from_secs(10);

fn hinted() -> StackBuilder {
    Stack::builder().servers(3).filter_before_picker(subset_hint_filter())
}

/// Adds the `envoy.lb` metadata to the access log, the only place where a test can see it.
fn log_metadata(config: &mut Value) {
    let format = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/access_log/0/typed_config/log_format/json_format";
    if let Some(fields) = config.pointer_mut(format).and_then(Value::as_object_mut) {
        for key in ["x-gateway-destination-endpoint", "x-gateway-destination-endpoint-fallback", "x-gateway-destination-endpoint-served"] {
            fields.insert(format!("lb:{key}"), format!("%DYNAMIC_METADATA(envoy.lb:{key})%").into());
        }
    }
}

#[tokio::test]
async fn header_and_metadata_are_the_same_bytes() -> Result<()> {
    let stack = Stack::builder().servers(3).envoy_config(log_metadata).start().await?;
    let reply = stack.send(echo::post("/v1/chat/completions", &[("x-request-id", "same")], echo::chat("hi").to_string())?).await?;
    let ranked = echo::ranked(&reply)?;
    assert_eq!(ranked.len(), 3, "a ranked list by default");
    let line = stack.envoy.access_log_of("same", LIMIT).await?;
    assert_eq!(line["lb:x-gateway-destination-endpoint"], ranked.join(","));
    assert_eq!(line["lb:x-gateway-destination-endpoint-served"], ranked[0]);
    assert_eq!(line["lb:x-gateway-destination-endpoint-fallback"], Value::Null);
    Ok(())
}

#[tokio::test]
async fn the_older_text_is_one_destination_and_one_fallback() -> Result<()> {
    let stack = Stack::builder().servers(3).picker(json!({"destination_format": "single"})).envoy_config(log_metadata).start().await?;
    let reply = stack.send(echo::post("/v1/chat/completions", &[("x-request-id", "old")], echo::chat("hi").to_string())?).await?;
    let echo = reply.json()?;
    let [destination] = echo::header(&echo, "x-gateway-destination-endpoint")[..] else { return Err(reply.text().into()) };
    let [fallback] = echo::header(&echo, "x-gateway-destination-endpoint-fallback")[..] else { return Err(reply.text().into()) };
    assert!(!destination.contains(',') && !fallback.contains(',') && destination != fallback, "{destination} {fallback}");
    assert_eq!(reply.header("x-served-by"), destination);
    let line = stack.envoy.access_log_of("old", LIMIT).await?;
    assert_eq!(line["lb:x-gateway-destination-endpoint"], destination);
    assert_eq!(line["lb:x-gateway-destination-endpoint-fallback"], fallback);
    Ok(())
}

#[tokio::test]
async fn only_the_subset_is_picked_from() -> Result<()> {
    let stack = hinted().start().await?;
    let address = |i: usize| stack.servers[i].addr().to_string();
    let (a, b, c) = (address(0), address(1), address(2));
    let cases: [(&str, String, BTreeSet<String>); 8] = [
        ("x-test-subset-list", a.clone(), [a.clone()].into()),
        ("x-test-subset-list", format!("{b},{c}"), [b.clone(), c.clone()].into()),
        ("x-test-subset-list", format!("{c},{c},{c}"), [c.clone()].into()),
        ("x-test-subset", b.clone(), [b.clone()].into()),
        ("x-test-subset", format!("{a}, {c}"), [a.clone(), c.clone()].into()),
        ("x-test-subset-list", "127.0.0.1".into(), [a.clone(), b.clone(), c.clone()].into()),
        ("x-test-subset-list", format!("127.0.0.1:1,[2001:db8::1]:8000,{a}"), [a.clone()].into()),
        ("x-test-subset-list", format!("nonsense,{b}"), [b.clone()].into()),
    ];
    for (header, hint, expected) in cases {
        // Every kind of request honours the hint, with a body or without.
        for request in [
            echo::post("/v1/chat/completions", &[(header, &hint)], echo::chat(&hint).to_string())?,
            echo::post("/v1/rerank", &[(header, &hint)], "opaque")?,
            echo::get("/v1/models", &[(header, &hint)])?,
        ] {
            let path = request.uri().path().to_owned();
            let reply = stack.send(request).await?;
            let ranked = BTreeSet::from_iter(echo::ranked(&reply)?);
            assert_eq!(ranked, expected, "{path} with {header}: {hint}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn absent_differs_from_empty() -> Result<()> {
    let stack = hinted().start().await?;
    let absent = stack.send(echo::get("/v1/models", &[])?).await?;
    assert_eq!(echo::ranked(&absent)?.len(), 3);
    for (header, hint) in [("x-test-subset-list", ""), ("x-test-subset", ""), ("x-test-subset", ","), ("x-test-subset-list", "10.9.9.9:1")]
    {
        for request in [
            echo::get("/v1/models", &[(header, hint)])?,
            echo::post("/v1/completions", &[(header, hint)], r#"{"model":"demo","prompt":"x"}"#)?,
        ] {
            let reply = stack.send(request).await?;
            assert_eq!(reply.status, 503, "{header}: {hint:?}: {}", reply.text());
            assert_eq!(reply.header("x-llm-d-request-dropped-reason"), "rejected-no-endpoints");
            assert_eq!(reply.json()?["error"]["code"], "no_eligible_endpoint");
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_client_cannot_hint() -> Result<()> {
    let stack = Stack::start(2).await?;
    let only = stack.servers[1].addr().to_string();
    for _ in 0..5 {
        let reply = stack.send(echo::get("/v1/models", &[("x-gateway-destination-endpoint-subset", &only)])?).await?;
        assert_eq!(echo::ranked(&reply)?.len(), 2, "a header does not count as a hint");
    }
    Ok(())
}

#[tokio::test]
async fn no_ready_endpoint_is_503_in_the_shape_of_the_api() -> Result<()> {
    let mut stack = Stack::start(1).await?;
    stack.set_pool(&[])?;
    let reply = wait_for(LIMIT, "the pool to be empty", || async {
        let reply = stack.post("/v1/chat/completions", &echo::chat("x")).await.ok()?;
        (reply.status == 503).then_some(reply)
    })
    .await?;
    assert_eq!(reply.json()?["error"]["code"], "no_ready_endpoint", "{}", reply.text());
    assert_eq!(reply.header("x-llm-d-request-dropped-reason"), "rejected-no-endpoints");
    let anthropic = stack.post("/v1/messages", &json!({"model": "demo", "max_tokens": 1, "messages": []})).await?;
    assert_eq!((anthropic.status, &anthropic.json()?["type"]), (503, &json!("error")), "{}", anthropic.text());
    let bodyless = stack.get("/v1/models").await?;
    assert_eq!(bodyless.status, 503, "also without a body");
    Ok(())
}

#[tokio::test]
async fn namespaces_and_keys_can_be_named_otherwise() -> Result<()> {
    fn other_names(config: &mut Value) {
        // The test harness's Lua filter writes the default names; replace them by other names.
        let text = config
            .to_string()
            .replace("envoy.lb.subset_hint\\\"", "my.ns\\\"")
            .replace("x-gateway-destination-endpoint-subset\\\", value", "my-key\\\", value");
        if let Ok(changed) = serde_json::from_str(&text) {
            *config = changed;
        }
    }
    let stack = hinted().picker(json!({"subset_namespace": "my.ns", "subset_key": "my-key"})).envoy_config(other_names).start().await?;
    let only = stack.servers[2].addr().to_string();
    let reply = stack.send(echo::get("/v1/models", &[("x-test-subset-list", &only)])?).await?;
    assert_eq!(echo::ranked(&reply)?, [only]);
    Ok(())
}

#[tokio::test]
async fn upgrades_and_connect_do_not_hang() -> Result<()> {
    let stack = Stack::start(2).await?;
    let mut raw = testbed::client::RawConnection::connect(stack.address()).await?;
    raw.write("GET /v1/realtime HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n").await?;
    let reply = raw.read_reply().await?;
    assert!(reply.status > 0, "the upgrade gets an answer");
    let mut raw = testbed::client::RawConnection::connect(stack.address()).await?;
    raw.write("CONNECT example:443 HTTP/1.1\r\nhost: example:443\r\n\r\n").await?;
    let reply = raw.read_reply().await?;
    assert!((400..600).contains(&reply.status), "CONNECT has no route and is refused at once: {}", reply.status);
    Ok(())
}

#[tokio::test]
async fn reasons_are_given_only_if_allowed() -> Result<()> {
    let ask = || echo::get("/v1/models", &[("x-switchpoint-explain", "1")]);
    let stack = Stack::start(2).await?;
    assert_eq!(stack.send(ask()?).await?.header("x-switchpoint-decision"), "", "not by default");
    drop(stack);
    let stack = Stack::builder().servers(2).picker(json!({"explain": true})).start().await?;
    let reply = stack.send(ask()?).await?;
    let decision: Value = serde_json::from_str(reply.header("x-switchpoint-decision"))?;
    assert_eq!(decision["picked"], json!(echo::ranked(&reply)?));
    assert_eq!(decision["candidates"].as_array().map(Vec::len), Some(2));
    let silent = stack.send(Request::get("/v1/models").body(testbed::client::empty())?).await?;
    assert_eq!(silent.header("x-switchpoint-decision"), "", "only on request");
    Ok(())
}
