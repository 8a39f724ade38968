//! The filter's own additions to the Endpoint Picker Protocol. `picker_modes` tests the protocol.

use http::Request;
use serde_json::{Value, json};
use testbed::Result;
use testbed::envoy::subset_hint_filter;
use testbed::stack::Stack;

use crate::echo;

#[tokio::test]
async fn namespaces_and_keys_can_be_named_otherwise() -> Result<()> {
    fn other_names(config: &mut Value) {
        // The Lua filter of the test harness writes the default names. This edit replaces them by
        // other names.
        let text = config
            .to_string()
            .replace("envoy.lb.subset_hint\\\"", "my.ns\\\"")
            .replace(
                "x-gateway-destination-endpoint-subset\\\", value",
                "my-key\\\", value",
            );
        if let Ok(changed) = serde_json::from_str(&text) {
            *config = changed;
        }
    }
    let hinted = Stack::builder()
        .servers(3)
        .filter_before_picker(subset_hint_filter());
    let stack = hinted
        .picker(json!({"subset_namespace": "my.ns", "subset_key": "my-key"}))
        .envoy_config(other_names)
        .start()
        .await?;
    let only = stack.servers[2].addr().to_string();
    let reply = stack
        .send(echo::get("/v1/models", &[("x-test-subset-list", &only)])?)
        .await?;
    assert_eq!(echo::ranked(&reply)?, [only]);
    Ok(())
}

#[tokio::test]
async fn upgrades_and_connect_do_not_hang() -> Result<()> {
    let stack = Stack::start_shared(2).await?;
    let mut raw = testbed::client::RawConnection::connect(stack.address()).await?;
    raw.write("GET /v1/realtime HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n").await?;
    let reply = raw.read_reply().await?;
    assert!(reply.status > 0, "the upgrade gets an answer");
    let mut raw = testbed::client::RawConnection::connect(stack.address()).await?;
    raw.write("CONNECT example:443 HTTP/1.1\r\nhost: example:443\r\n\r\n")
        .await?;
    let reply = raw.read_reply().await?;
    assert!(
        (400..600).contains(&reply.status),
        "CONNECT has no route and is refused at once: {}",
        reply.status
    );
    Ok(())
}

#[tokio::test]
async fn reasons_are_given_only_if_allowed() -> Result<()> {
    let ask = || echo::get("/v1/models", &[("x-switchpoint-explain", "1")]);
    let stack = Stack::start_shared(2).await?;
    assert_eq!(
        stack.send(ask()?).await?.header("x-switchpoint-decision"),
        "",
        "not by default"
    );
    drop(stack);
    let stack = Stack::builder()
        .servers(2)
        .picker(json!({"explain": true}))
        .shared_envoy()
        .start()
        .await?;
    let reply = stack.send(ask()?).await?;
    let decision: Value = serde_json::from_str(reply.header("x-switchpoint-decision"))?;
    assert_eq!(decision["picked"], json!(echo::ranked(&reply)?));
    assert_eq!(decision["candidates"].as_array().map(Vec::len), Some(2));
    let silent = stack
        .send(Request::get("/v1/models").body(testbed::client::empty())?)
        .await?;
    assert_eq!(
        silent.header("x-switchpoint-decision"),
        "",
        "only on request"
    );
    Ok(())
}
