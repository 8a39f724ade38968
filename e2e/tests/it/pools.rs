//! Several pools in one proxy do not affect each other, and neither do several proxies on one
//! daemon.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use e2e::explain::ExplainedDecision;
use http::Request;
use serde_json::{Value, json};
use tempfile::TempDir;
use testbed::client::{Body, ClientReply};
use testbed::envoy::subset_hint_filter;
use testbed::load::LoadGenerator;
use testbed::model_server::{self, ModelServer};
pub(crate) use testbed::second_envoy::SecondEnvoy;
use testbed::stack::{Stack, StackBuilder};
use testbed::{Result, wait_for};

use crate::echo;

const LIMIT: Duration = Duration::from_secs(30);

/// A daemon with the pools `default` (from a file) and `qwen` (a list), and a proxy. The header
/// `x-to` chooses the route: to `default` or `qwen` by cluster, to `qwen` by route metadata, or to
/// a pool that the daemon does not have.
pub(crate) struct TwoPools {
    pub(crate) stack: Stack,
    default: [ModelServer; 2],
    qwen: [ModelServer; 2],
    folder: TempDir,
}

impl TwoPools {
    fn servers() -> Result<[ModelServer; 2]> {
        let server = || {
            ModelServer::start(model_server::ModelServerOptions {
                models: vec!["demo".into()],
                speed: 0.0,
                ..Default::default()
            })
        };
        Ok([server()?, server()?])
    }

    pub(crate) async fn start(change: impl FnOnce(StackBuilder) -> StackBuilder) -> Result<Self> {
        let default = Self::servers()?;
        let qwen = Self::servers()?;
        let folder = tempfile::tempdir()?;
        let pools = write_pools(folder.path(), &default, &qwen)?;
        let builder = Stack::builder().daemon_arguments(&["--pools", &pools]).envoy_config(routes).picker(json!({
            "explain": true,
            "cold_start_wait_ms": 500,
            "pools": [{"name": "default", "clusters": ["inference-pool"]}, {"name": "qwen", "clusters": ["qwen-pool"]}],
        }));
        let stack = change(builder).start().await?;
        Ok(Self {
            stack,
            default,
            qwen,
            folder,
        })
    }

    async fn to(&self, route: &str, prompt: &str) -> Result<ClientReply> {
        self.stack.send(chat_to(route, prompt)?).await
    }
}

fn chat_to(route: &str, prompt: &str) -> Result<Request<Body>> {
    echo::post(
        "/v1/chat/completions",
        &[("x-to", route), ("x-switchpoint-explain", "1")],
        echo::chat(prompt).to_string(),
    )
}

fn addresses(servers: &[ModelServer]) -> BTreeSet<String> {
    servers
        .iter()
        .map(|server| server.addr().to_string())
        .collect()
}

fn write_pools(folder: &Path, default: &[ModelServer], qwen: &[ModelServer]) -> Result<String> {
    let row = |server: &ModelServer| json!({"name": format!("d-{}", server.addr().port()), "address": "127.0.0.1", "port": server.addr().port()});
    let pools = folder.join("pools.yaml");
    let endpoints = folder.join("default.yaml");
    std::fs::write(
        &endpoints,
        json!({"endpoints": default.iter().map(row).collect::<Vec<_>>()}).to_string(),
    )?;
    let qwen = qwen
        .iter()
        .map(|server| server.addr().to_string())
        .collect::<Vec<_>>();
    let file = json!({"pools": [{"name": "default", "endpointsFile": endpoints}, {"name": "qwen", "endpoints": qwen}]});
    std::fs::write(&pools, file.to_string())?;
    Ok(pools.display().to_string())
}

/// Makes the edit that an operator makes for a second pool: a cluster like the first with another
/// service name, and routes.
fn routes(config: &mut Value) {
    let clusters = config
        .pointer_mut("/static_resources/clusters")
        .and_then(Value::as_array_mut)
        .expect("clusters");
    for (name, pool) in [
        ("qwen-pool", "qwen"),
        ("twin-of-qwen-pool", "qwen"),
        ("unknown-pool", "unknown"),
    ] {
        let mut cluster = clusters[0].clone();
        cluster["name"] = json!(name);
        cluster["eds_cluster_config"]["service_name"] = json!(pool);
        clusters.push(cluster);
    }
    let path = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/route_config/virtual_hosts/0/routes";
    let routes = config
        .pointer_mut(path)
        .and_then(Value::as_array_mut)
        .expect("routes");
    let plain = routes[0].clone();
    let mut add = |to: &str, cluster: &str, pool: &str| {
        let mut route = plain.clone();
        route["match"] =
            json!({"prefix": "/", "headers": [{"name": "x-to", "string_match": {"exact": to}}]});
        route["route"]["cluster"] = json!(cluster);
        route["metadata"]["filter_metadata"]["switchpoint"]["pool"] = json!(pool);
        routes.insert(0, route);
    };
    add("qwen", "qwen-pool", "qwen");
    add("qwen-by-metadata", "twin-of-qwen-pool", "qwen");
    add("unknown", "unknown-pool", "unknown");
}

#[tokio::test]
async fn each_route_goes_to_its_pool_and_to_no_other() -> Result<()> {
    let two = TwoPools::start(|builder| builder.concurrency(2).shared_envoy()).await?;
    let pools = [
        ("default", addresses(&two.default)),
        ("qwen", addresses(&two.qwen)),
        ("qwen-by-metadata", addresses(&two.qwen)),
    ];
    // The test sends one prompt to all pools. It is long enough for the prefix index: a shared
    // index would name the other pool's endpoint.
    let prompt = "One prompt for all of them. ".repeat(50);
    for round in 0..10 {
        for (route, pool) in &pools {
            let reply = two.to(route, &prompt).await?;
            assert_eq!(reply.status, 200, "{round} {route}: {}", reply.text());
            assert!(
                pool.contains(reply.header("x-served-by")),
                "{route}: {}",
                reply.header("x-served-by")
            );
            assert!(
                echo::ranked(&reply)?
                    .iter()
                    .all(|address| pool.contains(address)),
                "{route}: {:?}",
                echo::ranked(&reply)?
            );
            let decision: ExplainedDecision =
                serde_json::from_str(reply.header("x-switchpoint-decision"))?;
            assert_eq!(&decision.endpoints(), pool, "{route}");
        }
    }
    let counted = || async {
        let rows = two.stack.daemon.as_ref()?.endpoints().await.ok()?;
        let picked = |pool: &str| {
            rows.iter()
                .filter(|row| row["pool"] == pool)
                .filter_map(|row| row["picked"].as_u64())
                .sum::<u64>()
        };
        (picked("default") == 10 && picked("qwen") == 20).then_some(())
    };
    wait_for(LIMIT, "each pool's picks to be counted as its own", counted).await
}

#[tokio::test]
async fn a_subset_hint_does_not_reach_into_another_pool() -> Result<()> {
    let two = TwoPools::start(|builder| {
        builder
            .filter_before_picker(subset_hint_filter())
            .shared_envoy()
    })
    .await?;
    let elsewhere = two.qwen[0].addr().to_string();
    let hinted = |route: &str| {
        echo::post(
            "/v1/chat/completions",
            &[("x-to", route), ("x-test-subset-list", &elsewhere)],
            echo::chat("x").to_string(),
        )
    };
    let reply = two.stack.send(hinted("default")?).await?;
    assert_eq!(
        (reply.status, &reply.json()?["error"]["code"]),
        (503, &json!("no_eligible_endpoint")),
        "{}",
        reply.text()
    );
    let reply = two.stack.send(hinted("qwen")?).await?;
    assert_eq!(
        (reply.status, reply.header("x-served-by")),
        (200, elsewhere.as_str())
    );
    Ok(())
}

#[tokio::test]
async fn a_pool_follows_its_own_file_alone() -> Result<()> {
    let two = TwoPools::start(StackBuilder::shared_envoy).await?;
    let load = LoadGenerator::start(two.stack.address(), 2);
    write_pools(two.folder.path(), &two.default[..1], &two.qwen)?;
    let shrunk = || async {
        let reply = two.to("default", "who?").await.ok()?;
        (echo::ranked(&reply).ok()? == [two.default[0].addr().to_string()]).then_some(())
    };
    wait_for(LIMIT, "the first pool to shrink", shrunk).await?;
    assert_eq!(
        echo::ranked(&two.to("qwen", "who?").await?)?.len(),
        2,
        "the other pool does not change"
    );
    load.stop().await?.check_all_served()
}

#[tokio::test]
async fn a_route_of_a_pool_that_the_filter_does_not_have_reaches_no_endpoint() -> Result<()> {
    let two = TwoPools::start(|builder| builder).await?;
    let reply = two.to("unknown", "hello?").await?;
    assert_eq!(reply.status, 503, "{}", reply.text());
    assert_eq!(
        two.stack
            .envoy
            .picker_stat("switchpoint_passed_total")
            .await?,
        1,
        "the picker lets the unknown pool pass"
    );
    assert_eq!(two.to("default", "hello?").await?.status, 200);
    Ok(())
}

#[tokio::test]
async fn a_pool_that_the_daemon_does_not_have_is_reported_and_harms_no_other() -> Result<()> {
    let pools = json!({"pools": [{"name": "default", "clusters": ["inference-pool"]}, {"name": "unknown", "clusters": ["unknown-pool"]}]});
    let mut two = TwoPools::start(|builder| builder.picker(pools).without_waiting()).await?;
    let served = || async { (two.to("default", "hello?").await.ok()?.status == 200).then_some(()) };
    wait_for(LIMIT, "the known pool to be served", served).await?;
    let reply = two.to("unknown", "hello?").await?;
    assert_eq!(
        (reply.status, &reply.json()?["error"]["code"]),
        (503, &json!("not_ready")),
        "{}",
        reply.text()
    );
    assert_eq!(
        two.stack.get("/switchpoint/ready").await?.status,
        503,
        "not all pools of the configuration have state"
    );
    let proxy = two.stack.envoy.process().stderr();
    let daemon = two.stack.daemon()?.process().stderr();
    assert!(
        proxy.contains("does not know these pools of the filter's configuration: unknown"),
        "the proxy's log"
    );
    assert!(
        daemon.contains("a proxy requests pools that are not configured here"),
        "the daemon's log"
    );
    Ok(())
}

// === Several proxies ===

/// Runs one daemon with this many threads, one proxy with one worker and one with four. `node` is
/// the second proxy's node id.
async fn two_proxies(node: &str, daemon_threads: u32) -> Result<()> {
    let mut stack = Stack::builder()
        .servers(3)
        .daemon_threads(daemon_threads)
        .picker(json!({"explain": true}))
        .start()
        .await?;
    let second = SecondEnvoy::start(&stack, node, 4).await?;
    let loads = [
        LoadGenerator::start(stack.address(), 3),
        LoadGenerator::start(second.envoy.listener(), 3),
    ];
    for indices in [&[0, 1][..], &[2], &[0, 1, 2]] {
        stack.set_pool(indices)?;
        let wanted = indices
            .iter()
            .map(|index| stack.servers[*index].addr().to_string())
            .collect::<BTreeSet<_>>();
        for proxy in [stack.address(), second.envoy.listener()] {
            let look = || async {
                (ExplainedDecision::ask(proxy, "who is there?")
                    .await
                    .ok()?
                    .endpoints()
                    == wanted)
                    .then_some(())
            };
            wait_for(LIMIT, &format!("{proxy} to know {wanted:?}"), look).await?;
        }
    }
    let state = stack.daemon()?.admin("/debug/state").await?.json()?;
    let proxies = state["proxies"].as_array().cloned().unwrap_or_default();
    let distinct = |key: &str| {
        proxies
            .iter()
            .filter_map(|proxy| proxy[key].as_str())
            .collect::<BTreeSet<_>>()
            .len()
    };
    assert_eq!((proxies.len(), distinct("process_id")), (2, 2), "{state}");
    for load in loads {
        load.stop().await?.check_all_served()?;
    }
    // One proxy ends. The daemon forgets the ended proxy, and the other proxy is not affected.
    drop(second);
    let one = || async {
        (stack
            .daemon
            .as_ref()?
            .admin("/debug/state")
            .await
            .ok()?
            .json()
            .ok()?["proxies"]
            .as_array()?
            .len()
            == 1)
            .then_some(())
    };
    wait_for(LIMIT, "the daemon to forget the proxy that is gone", one).await?;
    assert_eq!(
        stack
            .post("/v1/chat/completions", &echo::chat("still there?"))
            .await?
            .status,
        200
    );
    Ok(())
}

#[tokio::test]
async fn two_proxies_hear_the_same_daemon() -> Result<()> {
    two_proxies("another", 1).await
}

/// Two proxies have the same node id, as when the operator sets none. The proxies may learn of
/// endpoints later, but never get wrong state.
#[tokio::test]
async fn two_proxies_of_one_name_share_one_daemon() -> Result<()> {
    two_proxies("switchpoint-standalone", 4).await
}
