//! Envoy Gateway's own translator turns our manifest into Envoy's configuration, and a real Envoy
//! runs it.

use e2e::manifests::{self, envoy_gateway};
use http::Request;
use serde_json::{Value, json};
use testbed::certificates::{self, Authority};
use testbed::stack::Stack;
use testbed::{Result, client};

use crate::cluster;

fn filters(config: &Value) -> Vec<String> {
    let path = "/listeners/0/defaultFilterChain/filters/0/typedConfig/httpFilters";
    let filters = config
        .pointer(path)
        .and_then(Value::as_array)
        .into_iter()
        .flatten();
    filters
        .filter_map(|filter| filter["name"].as_str())
        .map(str::to_owned)
        .collect()
}

#[tokio::test]
async fn what_envoy_gateway_makes_of_the_manifest_picks() -> Result<()> {
    let Some(translator) = envoy_gateway::translator() else {
        cluster::skipped(
            "there is no egctl; `.ci/cluster_tools.py envoy-gateway` builds it where Go is installed",
        );
        return Ok(());
    };
    let folder = Authority::new()?.folder(manifests::DAEMON)?;
    let path = folder.path().to_owned();
    let arguments = certificates::daemon_arguments(folder.path());
    let builder = Stack::builder()
        .servers(3)
        .daemon_arguments(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    let builder = builder.envoy_config(move |config| {
        let local = manifests::local(config, &path).expect("the shipped file");
        let made = envoy_gateway::translated(&translator, &local).expect("a translation");
        assert_eq!(
            filters(&made.config),
            [
                "gunzip",
                "switchpoint",
                "header_to_metadata",
                "envoy.filters.http.router"
            ]
        );
        *config = made.deliver(&path).expect("a folder that can be written");
    });
    let stack = builder.start().await?;
    // The body is larger than the manifest's original buffer limit of 64 KiB, which a patch of the
    // manifest raises.
    let body = json!({"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "lorem ".repeat(50_000)}]}).to_string();
    for _ in 0..5 {
        let request = Request::post("/v1/chat/completions")
            .header("x-echo", "1")
            .header("x-gateway-destination-endpoint", "192.0.2.1:1");
        let reply = stack
            .send(request.body(client::full(body.clone()))?)
            .await?;
        let echo = reply.json()?;
        assert_eq!(
            (reply.status, &echo["body_bytes"]),
            (200, &json!(body.len())),
            "{}",
            reply.text()
        );
        let headers = echo["headers"].as_array().into_iter().flatten();
        let ranked: Vec<&str> = headers
            .filter(|pair| pair[0] == "x-gateway-destination-endpoint")
            .filter_map(|pair| pair[1].as_str())
            .collect();
        let [ranked] = ranked[..] else {
            return Err(reply.text().into());
        };
        assert_eq!(
            (ranked.split(',').count(), ranked.split(',').next()),
            (3, Some(reply.header("x-served-by"))),
            "{}",
            reply.text()
        );
    }
    let bad = client::post(stack.address(), "/v1/chat/completions", "{").await?;
    assert_eq!(
        (bad.status, &bad.json()?["error"]["code"]),
        (400, &json!("invalid_json")),
        "{}",
        bad.text()
    );
    assert_eq!(stack.get("/v1/models").await?.status, 200);
    assert_eq!(
        client::post(stack.address(), "/sleep", "").await?.status,
        404,
        "a control path of the engine must not be reachable"
    );
    let refused = stack.envoy.stats("\\.update_rejected$").await?;
    assert!(refused.values().all(|count| *count == 0), "{refused:?}");
    Ok(())
}
