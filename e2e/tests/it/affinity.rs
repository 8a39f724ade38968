//! Requests that should go to certain endpoints: by session, by label, by LoRA adapter.

use std::collections::BTreeSet;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt, stream};
use http::Request;
use rand::SeedableRng;
use rand::distr::Distribution;
use rand::distr::weighted::WeightedIndex;
use rand::rngs::StdRng;
use serde_json::{Value, json};
use tempfile::NamedTempFile;
use testbed::client::ClientReply;
use testbed::model_server::{ModelServer, ModelServerOptions};
use testbed::stack::{Stack, StackBuilder};
use testbed::{Result, client, wait_for};

use crate::echo;

/// The maximum wait for a start, and for a change without a promised time.
const LIMIT: Duration = Duration::from_secs(30);

const CHAT: &str = "/v1/chat/completions";

/// Writes a configuration with these plugins to a file.
fn config(plugins: &str) -> Result<NamedTempFile> {
    let file = NamedTempFile::new()?;
    std::fs::write(
        file.path(),
        format!("apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n{plugins}"),
    )?;
    Ok(file)
}

fn builder(config: &NamedTempFile) -> Result<StackBuilder> {
    let config = config.path().to_str().ok_or("a path of text")?;
    // Starts two workers, because both must send a session to the same endpoint.
    Ok(Stack::builder()
        .concurrency(2)
        .daemon_arguments(&["--config", config]))
}

/// Sends `requests` requests, and returns the servers that answered. Each request uses a separate
/// connection, so that both workers get requests.
async fn servers_of(
    stack: &Stack,
    headers: &[(&str, &str)],
    requests: usize,
) -> Result<BTreeSet<usize>> {
    let mut servers = BTreeSet::new();
    for number in 0..requests {
        let reply = stack
            .send(echo::post(
                CHAT,
                headers,
                echo::chat(&format!("{number} bottles")).to_string(),
            )?)
            .await?;
        servers.insert(stack.server_of(&reply)?);
    }
    Ok(servers)
}

/// Returns the base64 of a server's name. The values are written out, so that they do not depend on
/// the tested code.
fn token_of(server: usize) -> &'static str {
    [
        "c2VydmVyLTA=",
        "c2VydmVyLTE=",
        "c2VydmVyLTI=",
        "c2VydmVyLTM=",
    ][server]
}

#[tokio::test]
async fn a_session_token_brings_its_bearer_back() -> Result<()> {
    let config = config("- type: session-affinity-filter\n- type: random-picker\n")?;
    let stack = builder(&config)?.servers(4).shared_envoy().start().await?;
    let mut seen = BTreeSet::new();
    for number in 0..12 {
        let first: ClientReply = stack
            .send(echo::post(
                CHAT,
                &[],
                echo::chat(&format!("hello {number}")).to_string(),
            )?)
            .await?;
        let server = stack.server_of(&first)?;
        let token = first.header("x-session-token").to_owned();
        assert_eq!(
            token,
            token_of(server),
            "the session token names the served endpoint"
        );
        assert_eq!(
            servers_of(&stack, &[("x-session-token", &token)], 4).await?,
            BTreeSet::from([server])
        );
        seen.insert(server);
    }
    assert!(seen.len() > 1, "sessions begin anywhere: {seen:?}");
    // A token of an unknown endpoint and an invalid token are ignored.
    for token in ["bm9ib2R5", "!!!", ""] {
        let reply = stack
            .send(echo::post(
                CHAT,
                &[("x-session-token", token)],
                echo::chat("hello").to_string(),
            )?)
            .await?;
        assert_eq!(
            (reply.status, reply.header("x-session-token")),
            (200, token_of(stack.server_of(&reply)?))
        );
    }
    Ok(())
}

#[tokio::test]
async fn a_session_whose_endpoint_left_continues_elsewhere() -> Result<()> {
    let config = config("- type: session-affinity-filter\n- type: random-picker\n")?;
    let mut stack = builder(&config)?.servers(3).shared_envoy().start().await?;
    let headers = [("x-session-token", token_of(1))];
    assert_eq!(servers_of(&stack, &headers, 4).await?, BTreeSet::from([1]));
    stack.set_pool(&[0, 2])?;
    let moved =
        || async { (!servers_of(&stack, &headers, 4).await.ok()?.contains(&1)).then_some(()) };
    wait_for(LIMIT, "the session to leave with its endpoint", moved).await
}

#[tokio::test]
async fn a_session_id_is_at_one_endpoint_for_every_worker() -> Result<()> {
    let config = config(
        "- type: session-affinity-scorer\n  parameters: {strategy: session_id}\n- type: max-score-picker\n",
    )?;
    let stack = builder(&config)?.servers(4).envoy_in_turn().start().await?;
    let mut seen = BTreeSet::new();
    for session in 0..12 {
        let id = format!("session-{session}");
        let servers = servers_of(&stack, &[("x-session-id", &id)], 8).await?;
        assert_eq!(servers.len(), 1, "{id} is at {servers:?}");
        seen.extend(servers);
        let reply = stack
            .send(echo::post(
                CHAT,
                &[("x-session-id", &id)],
                echo::chat("hello").to_string(),
            )?)
            .await?;
        assert_eq!(
            reply.header("x-session-token"),
            "",
            "no token is sent to a client that sends a session id"
        );
    }
    assert!(seen.len() > 1, "sessions spread: {seen:?}");
    let workers = stack
        .envoy
        .stats("worker_[0-9]+\\.downstream_cx_total")
        .await?;
    assert!(
        workers.len() == 2 && workers.values().all(|connections| *connections > 0),
        "{workers:?}"
    );
    assert!(
        servers_of(&stack, &[], 24).await?.len() > 1,
        "without a session id, requests spread"
    );
    Ok(())
}

/// Returns an endpoints file whose labels name a tier: gold, silver, silver, none.
fn labelled(servers: &[ModelServer]) -> String {
    let labels = [
        "{tier: gold, zone: a}",
        "{tier: silver, zone: a}",
        "{tier: silver, zone: b}",
        "{}",
    ];
    let row = |(at, (server, labels)): (usize, (&ModelServer, &str))| {
        let address = server.addr();
        format!(
            "- {{name: server-{at}, address: {}, port: {}, labels: {labels}}}\n",
            address.ip(),
            address.port()
        )
    };
    format!(
        "endpoints:\n{}",
        servers
            .iter()
            .zip(labels)
            .enumerate()
            .map(row)
            .collect::<String>()
    )
}

async fn start_labelled(config: &NamedTempFile) -> Result<Stack> {
    let mut stack = builder(config)?
        .servers(4)
        .without_waiting()
        .shared_envoy()
        .start()
        .await?;
    let text = labelled(&stack.servers);
    stack.daemon()?.settings().write_endpoints_file(&text)?;
    stack.wait_until_ready().await?;
    Ok(stack)
}

#[tokio::test]
async fn a_header_finds_the_label_it_asks_for() -> Result<()> {
    let config = config(
        "- type: header-label-affinity-scorer\n  parameters: {headerName: X-Tier, labelKey: tier}\n- type: max-score-picker\n",
    )?;
    let stack = start_labelled(&config).await?;
    let gold = || async {
        (servers_of(&stack, &[("x-tier", "gold")], 6).await.ok()? == BTreeSet::from([0]))
            .then_some(())
    };
    wait_for(LIMIT, "the labels to be known", gold).await?;
    assert_eq!(
        servers_of(&stack, &[("X-Tier", "silver")], 24).await?,
        BTreeSet::from([1, 2]),
        "endpoints with the same label share the requests"
    );
    assert!(
        servers_of(&stack, &[("x-tier", "bronze")], 24).await?.len() > 2,
        "a label that no endpoint has restricts nothing"
    );
    Ok(())
}

#[tokio::test]
async fn a_selector_keeps_the_selected_endpoints() -> Result<()> {
    let selector = "{matchLabels: {tier: silver}, matchExpressions: [{key: zone, operator: NotIn, values: [b]}]}";
    let config = config(&format!(
        "- type: label-selector-filter\n  parameters: {selector}\n- type: random-picker\n"
    ))?;
    let stack = start_labelled(&config).await?;
    let known =
        || async { (servers_of(&stack, &[], 6).await.ok()? == BTreeSet::from([1])).then_some(()) };
    wait_for(LIMIT, "the labels to be known", known).await?;
    assert_eq!(
        servers_of(&stack, &[("x-session-token", token_of(0))], 8).await?,
        BTreeSet::from([1]),
        "a session token cannot leave the selection"
    );
    Ok(())
}

const ADAPTERS: u32 = 20;
const SLOTS: usize = 4;
const REQUESTS: usize = 1_000;

/// Adds a cluster with the same servers and Envoy's least-request balancer, for requests with
/// `x-policy: least-request`. The picker ignores that cluster.
fn add_least_request(config: &mut Value) {
    let routes = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/route_config/virtual_hosts/0/routes";
    let routes = config
        .pointer_mut(routes)
        .and_then(Value::as_array_mut)
        .expect("the config has routes");
    let by_header = json!({"prefix": "/", "headers": [{"name": "x-policy", "string_match": {"exact": "least-request"}}]});
    routes.insert(
        0,
        json!({"match": by_header, "route": {"cluster": "least-request", "timeout": "0s"}}),
    );
    let clusters = config
        .pointer_mut("/static_resources/clusters")
        .and_then(Value::as_array_mut)
        .expect("the config has clusters");
    let mut cluster = clusters
        .iter()
        .find(|cluster| cluster["name"] == "inference-pool")
        .expect("the pool is a cluster")
        .clone();
    let least_request = json!({
        "name": "envoy.load_balancing_policies.least_request",
        "typed_config": {"@type": "type.googleapis.com/envoy.extensions.load_balancing_policies.least_request.v3.LeastRequest"},
    });
    cluster["name"] = json!("least-request");
    cluster["load_balancing_policy"] =
        json!({"policies": [{"typed_extension_config": least_request}]});
    clusters.push(cluster);
}

/// Sends a fixed Zipf mix of adapters, with 12 requests in flight. Returns how many adapters the
/// servers loaded meanwhile.
async fn adapter_loads(stack: &Stack, policy: &str) -> Result<u64> {
    let before = loads(stack).await?;
    let zipf = WeightedIndex::new((1..=ADAPTERS).map(|rank| 1.0 / f64::from(rank)))?;
    let mut rng = StdRng::seed_from_u64(7);
    let requests: Vec<usize> = (0..REQUESTS).map(|_| zipf.sample(&mut rng)).collect();
    let send = |(number, adapter): (usize, usize)| async move {
        let body = json!({"model": format!("adapter-{adapter}"), "max_tokens": 8, "prompt": format!("request {number}")});
        let request = Request::post("/v1/completions")
            .header("content-type", "application/json")
            .header("x-policy", policy);
        let reply = stack
            .send(request.body(client::full(body.to_string()))?)
            .await?;
        assert_eq!(reply.status, 200, "{}", reply.text());
        Result::<()>::Ok(())
    };
    stream::iter(requests.into_iter().enumerate())
        .map(send)
        .buffer_unordered(12)
        .try_collect::<()>()
        .await?;
    Ok(loads(stack).await? - before)
}

async fn loads(stack: &Stack) -> Result<u64> {
    let mut loads = 0;
    for server in &stack.servers {
        loads += server.state().await?["lora_loads"]
            .as_u64()
            .ok_or("the simulated server reports no lora_loads")?;
    }
    Ok(loads)
}

#[tokio::test]
async fn adapters_stay_where_they_are_loaded() -> Result<()> {
    let plugins = "- type: lora-affinity-scorer\n- type: load-aware-scorer\n- type: token-load-scorer\n  parameters: {queueThresholdTokens: 4096}\n- type: max-score-picker\n";
    let config = config(plugins)?;
    let options = ModelServerOptions {
        models: vec!["demo".to_owned()],
        loras: (0..ADAPTERS)
            .map(|number| format!("adapter-{number}"))
            .collect(),
        max_lora: SLOTS,
        speed: 10.0,
        ..ModelServerOptions::default()
    };
    let stack = builder(&config)?
        .servers_like(4, &options)
        .envoy_config(add_least_request)
        .envoy_in_turn()
        .start()
        .await?;
    let least_request = adapter_loads(&stack, "least-request").await?;
    for server in &stack.servers {
        server.restart(None).await;
    }
    stack.get("/v1/models").await?;
    let ours = adapter_loads(&stack, "ours").await?;
    assert!(
        ours * 3 <= least_request,
        "{ADAPTERS} adapters by Zipf on 4 servers of {SLOTS}: {ours} loads in {REQUESTS} requests, least-request {least_request}"
    );
    Ok(())
}
