//! Requests that are split over several servers: prefill and decode, encode, data-parallel ranks
//! behind one port. The simulated servers play their roles and refuse requests of other roles.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use testbed::client::ClientReply;
use testbed::model_server::{FaultMode, ModelServer, ModelServerOptions, ServerFault, ServerRole};
use testbed::stack::Stack;
use testbed::{Result, wait_for};

use crate::echo;

const LIMIT: Duration = Duration::from_secs(30);

/// A stack with a pool whose servers have roles.
struct DisaggregatedStack {
    stack: Stack,
    servers: Vec<(ServerRole, ModelServer)>,
    folder: TempDir,
}

/// The plugins and profiles of a pool that splits requests. `DECIDERS` is replaced by the deciders.
const BY_ROLE: &str = "apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: decode-filter
- type: prefill-filter
- type: encode-filter
- type: queue-scorer
- type: prefix-cache-scorer
- type: active-request-scorer
- {type: prefix-based-pd-decider, parameters: {nonCachedTokens: 64}}
- type: always-disagg-pd-decider
- type: always-disagg-multimodal-decider
- {type: disagg-profile-handler, parameters: {deciders: DECIDERS}}
schedulingProfiles:
- {name: decode, plugins: [{pluginRef: decode-filter}, {pluginRef: queue-scorer}, {pluginRef: prefix-cache-scorer}]}
- {name: prefill, plugins: [{pluginRef: prefill-filter}, {pluginRef: active-request-scorer}]}
- {name: encode, plugins: [{pluginRef: encode-filter}, {pluginRef: queue-scorer}]}
";

impl DisaggregatedStack {
    async fn start(deciders: &str, roles: &[ServerRole]) -> Result<Self> {
        Self::start_with(roles, |_| BY_ROLE.replace("DECIDERS", deciders)).await
    }

    async fn start_with(
        roles: &[ServerRole],
        config: impl FnOnce(&[(ServerRole, ModelServer)]) -> String,
    ) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let server = |role: &ServerRole| {
            let options = ModelServerOptions {
                models: vec!["demo".into()],
                speed: 0.0,
                role: *role,
                ..ModelServerOptions::default()
            };
            Ok((*role, ModelServer::start(options)?))
        };
        let servers = roles.iter().map(server).collect::<Result<Vec<_>>>()?;
        let pools = folder.path().join("pools.yaml");
        let endpoints = folder.path().join("endpoints.yaml");
        let file = folder.path().join("config.yaml");
        write_endpoints(&endpoints, &servers)?;
        std::fs::write(&file, config(&servers))?;
        std::fs::write(
            &pools,
            json!({"pools": [{"name": "default", "endpointsFile": endpoints, "config": file}]})
                .to_string(),
        )?;
        let pools = pools.to_str().ok_or("a path of text")?;
        let stack = Stack::builder()
            .servers(0)
            .daemon_arguments(&["--pools", pools])
            .picker(json!({"explain": true}))
            .shared_envoy()
            .start()
            .await?;
        Ok(Self {
            stack,
            servers,
            folder,
        })
    }

    async fn ask(&self, body: Value) -> Result<ClientReply> {
        let reply = self.stack.post("/v1/chat/completions", &body).await?;
        assert_eq!(reply.status, 200, "{}", reply.text());
        Ok(reply)
    }

    fn servers(&self, role: ServerRole) -> impl Iterator<Item = &ModelServer> {
        self.servers
            .iter()
            .filter(move |(other, _)| *other == role)
            .map(|(_, server)| server)
    }

    /// Returns the inference requests that reached each server of a role, with their headers.
    async fn requests(&self, role: ServerRole) -> Result<Vec<Vec<Value>>> {
        let mut requests = Vec::new();
        for server in self.servers(role) {
            requests.push(
                server.state().await?["requests"]
                    .as_array()
                    .cloned()
                    .unwrap_or_default(),
            );
        }
        Ok(requests)
    }

    async fn request_count(&self, role: ServerRole) -> Result<usize> {
        Ok(self.requests(role).await?.iter().map(Vec::len).sum())
    }

    fn addresses(&self, role: ServerRole) -> Vec<String> {
        self.servers(role)
            .map(|server| server.addr().to_string())
            .collect()
    }
}

fn write_endpoints(file: &Path, servers: &[(ServerRole, ModelServer)]) -> Result<()> {
    let row = |(index, (role, server)): (usize, &(ServerRole, ModelServer))| {
        let name = format!("server-{index}");
        let role = format!("{role:?}").to_lowercase();
        let labels = if role == "whole" {
            json!({})
        } else {
            json!({"llm-d.ai/role": role})
        };
        json!({"name": name, "address": server.addr().ip(), "port": server.addr().port().to_string(), "labels": labels})
    };
    let draft = file.with_extension("draft");
    std::fs::write(
        &draft,
        json!({"endpoints": servers.iter().enumerate().map(row).collect::<Vec<_>>()}).to_string(),
    )?;
    Ok(std::fs::rename(draft, file)?)
}

/// Returns a prompt of about 640 tokens that shares no prefix with other requests.
fn long(number: usize) -> Value {
    echo::chat(&format!(
        "Request {number} begins in its own way. {}",
        "And goes on for long. ".repeat(116)
    ))
}

fn with_image() -> Value {
    json!({"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": [
        {"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": "http://images/1.png"}}]}]})
}

const TWO_AND_TWO: [ServerRole; 4] = [
    ServerRole::Prefill,
    ServerRole::Prefill,
    ServerRole::Decode,
    ServerRole::Decode,
];

#[tokio::test]
async fn a_long_prompt_is_worked_through_elsewhere_until_the_decode_server_has_it() -> Result<()> {
    let split =
        DisaggregatedStack::start("{prefill: prefix-based-pd-decider}", &TWO_AND_TWO).await?;
    let reply = split.ask(long(1)).await?;
    let server = reply.header("x-served-by").to_owned();
    assert!(
        split.addresses(ServerRole::Decode).contains(&server),
        "{server}"
    );
    let asked = split.requests(ServerRole::Prefill).await?.concat();
    assert_eq!(asked.len(), 1, "{asked:?}");
    assert_eq!(
        echo::header(&asked[0], "x-stage"),
        ["prefill"],
        "the decode server's sidecar sent the request, not the proxy"
    );
    let decoded = split.requests(ServerRole::Decode).await?.concat();
    let named = echo::header(&decoded[0], "x-prefiller-host-port");
    assert!(
        split
            .addresses(ServerRole::Prefill)
            .iter()
            .any(|address| named == [address.as_str()]),
        "{named:?}"
    );
    // A short prompt is not worth a separate prefill, and neither is a prompt that the decode
    // server has cached.
    split.ask(echo::chat("short")).await?;
    assert_eq!(split.request_count(ServerRole::Prefill).await?, 1);
    for _ in 0..5 {
        assert_eq!(split.ask(long(1)).await?.header("x-served-by"), server);
    }
    assert_eq!(split.request_count(ServerRole::Prefill).await?, 1);
    Ok(())
}

#[tokio::test]
async fn the_always_decider_spreads_prefills_and_a_client_cannot_name_a_server() -> Result<()> {
    let split =
        DisaggregatedStack::start("{prefill: always-disagg-pd-decider}", &TWO_AND_TWO).await?;
    let decode = &split.addresses(ServerRole::Decode)[0];
    for number in 0..40 {
        // If the proxy forwarded this header, the decode server would refuse to prefill, and the
        // reply would show it.
        let request = echo::post(
            "/v1/chat/completions",
            &[("x-prefiller-host-port", decode), ("x-echo", "0")],
            long(number).to_string(),
        )?;
        let (mut parts, body) = request.into_parts();
        parts.headers.remove("x-echo");
        let reply = split
            .stack
            .send(http::Request::from_parts(parts, body))
            .await?;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    let asked = split.requests(ServerRole::Prefill).await?;
    assert_eq!(asked.iter().map(Vec::len).sum::<usize>(), 40);
    // Equal servers are chosen at random: once in 24,000 runs one of two gets fewer than 8 of 40.
    assert!(
        asked.iter().all(|requests| requests.len() >= 8),
        "{:?}",
        asked.iter().map(Vec::len).collect::<Vec<_>>()
    );
    assert!(
        asked
            .concat()
            .iter()
            .all(|request| echo::header(request, "x-stage") == ["prefill"])
    );
    Ok(())
}

#[tokio::test]
async fn without_a_prefill_server_decode_does_all_of_it() -> Result<()> {
    let mut split = DisaggregatedStack::start(
        "{prefill: always-disagg-pd-decider}",
        &[ServerRole::Prefill, ServerRole::Decode],
    )
    .await?;
    split.ask(long(0)).await?;
    assert_eq!(split.request_count(ServerRole::Prefill).await?, 1);
    // While the prefill server fails, the decode server also prefills.
    let fault = |mode| ServerFault {
        mode,
        ..serde_json::from_value(json!({"mode": "none"})).expect("a fault")
    };
    split.servers[0].1.fault(fault(FaultMode::Status)).await;
    split.ask(long(1)).await?;
    // The prefill server leaves the pool, so the picker no longer names it.
    let removed = split.servers.remove(0);
    write_endpoints(&split.folder.path().join("endpoints.yaml"), &split.servers)?;
    let unnamed = || async {
        split.ask(long(2)).await.ok()?;
        let last = split
            .requests(ServerRole::Decode)
            .await
            .ok()?
            .concat()
            .pop()?;
        echo::header(&last, "x-prefiller-host-port")
            .is_empty()
            .then_some(())
    };
    wait_for(LIMIT, "decode alone", unnamed).await?;
    drop(removed);
    for number in 3..10 {
        split.ask(long(number)).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_prefill_server_is_no_host_of_the_proxy_and_serves_no_whole_request() -> Result<()> {
    let mut split = DisaggregatedStack::start(
        "{prefill: always-disagg-pd-decider, encode: always-disagg-multimodal-decider}",
        &TWO_AND_TWO,
    )
    .await?;
    let hosts = split.stack.envoy.hosts("inference-pool").await?;
    let is_host = |address: &String| hosts.contains(address);
    assert!(
        split.addresses(ServerRole::Decode).iter().all(is_host),
        "{hosts:?}"
    );
    assert!(
        !split.addresses(ServerRole::Prefill).iter().any(is_host),
        "{hosts:?}"
    );
    split
        .servers
        .retain(|(role, _)| *role == ServerRole::Prefill);
    write_endpoints(&split.folder.path().join("endpoints.yaml"), &split.servers)?;
    let refused = || async {
        let reply = split
            .stack
            .post("/v1/chat/completions", &long(0))
            .await
            .ok()?;
        (reply.status == 503
            && reply.header("x-llm-d-request-dropped-reason") == "rejected-no-endpoints")
            .then_some(())
    };
    wait_for(LIMIT, "503 where only prefill servers are left", refused).await
}

#[tokio::test]
async fn an_image_is_encoded_elsewhere_and_text_is_not() -> Result<()> {
    let roles = [ServerRole::Encode, ServerRole::Prefill, ServerRole::Decode];
    let deciders = "{encode: always-disagg-multimodal-decider, prefill: prefix-based-pd-decider}";
    let split = DisaggregatedStack::start(deciders, &roles).await?;
    split.ask(echo::chat("no image")).await?;
    assert_eq!(
        (
            split.request_count(ServerRole::Encode).await?,
            split.request_count(ServerRole::Prefill).await?
        ),
        (0, 0)
    );
    split.ask(with_image()).await?;
    let encoded = split.requests(ServerRole::Encode).await?.concat();
    assert_eq!(encoded.len(), 1);
    assert_eq!(echo::header(&encoded[0], "x-stage"), ["encode"]);
    assert_eq!(
        split.request_count(ServerRole::Prefill).await?,
        1,
        "an image counts as 225 tokens, more than the threshold of 64"
    );
    Ok(())
}

#[tokio::test]
async fn a_rank_is_reached_by_its_pods_first_port() -> Result<()> {
    let config = |servers: &[(ServerRole, ModelServer)]| {
        format!(
            "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n- type: active-request-scorer\n- type: random-picker\n\
             - {{type: data-parallel-profile-handler, parameters: {{primaryPort: {}}}}}\n",
            servers[0].1.addr().port()
        )
    };
    let split = DisaggregatedStack::start_with(&[ServerRole::Both; 3], config).await?;
    let entrance = split.servers[0].1.addr().to_string();
    for number in 0..30 {
        let reply = split.ask(long(number)).await?;
        assert_eq!(
            reply.header("x-served-by"),
            entrance,
            "all requests go to the first port"
        );
    }
    let asked: Vec<usize> = split
        .requests(ServerRole::Both)
        .await?
        .iter()
        .map(Vec::len)
        .collect();
    assert_eq!(asked[0], 30);
    assert!(
        asked[1] >= 3 && asked[2] >= 3,
        "every rank gets requests: {asked:?}"
    );
    Ok(())
}
