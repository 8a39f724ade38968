//! Tests clause P9 of `fronts.yaml`: after a failover to another pool, the picker of the pool that
//! answered learns which endpoint served.
//!
//! ```text
//!                 ┌ first try, at "default" ▶ the gateway ▶ picker of pool `default`, whose only server refuses ▶ 503
//! client ▶ ahead ─┤
//!                 └ then, at "second"       ▶ the gateway ▶ picker of pool `second`                             ▶ 200
//! ```

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Value, json};
use testbed::client;
use testbed::model_server::{self, FaultMode, ModelServer, ServerFault};
use testbed::ports::ReservedPort;
use testbed::stack::{PickerMode, Stack};
use testbed::{Result, wait_for};

use super::log_metadata;
use crate::echo;

const LIMIT: Duration = Duration::from_secs(20);

/// The pool of the shipped routes, and a second pool.
const POOLS: [&str; 2] = ["default", "second"];

/// Makes the edit that an operator makes for a second pool: a cluster, and a route by the request's
/// authority.
fn second_route(config: &mut Value, front: PickerMode) {
    let clusters = config
        .pointer_mut("/static_resources/clusters")
        .and_then(Value::as_array_mut)
        .expect("clusters");
    let mut cluster = clusters[0].clone();
    cluster["name"] = json!("second-pool");
    cluster["eds_cluster_config"]["service_name"] = json!("second");
    clusters.push(cluster);
    let path = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/route_config/virtual_hosts/0/routes";
    let routes = config
        .pointer_mut(path)
        .and_then(Value::as_array_mut)
        .expect("routes");
    let mut route = routes[0].clone();
    route["match"] = json!({"prefix": "/", "headers": [{"name": ":authority", "string_match": {"exact": "second"}}]});
    route["route"]["cluster"] = json!("second-pool");
    route["metadata"]["filter_metadata"]["switchpoint"]["pool"] = json!("second");
    if front == PickerMode::ExtProc {
        // The daemon receives the pool's name as gRPC metadata, which the route overrides.
        route["typed_per_filter_config"]["switchpoint"] = json!({
            "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
            "overrides": {"grpc_initial_metadata": [{"key": "x-switchpoint-pool", "value": "second"}]},
        });
    }
    routes.insert(0, route);
}

/// Adds the proxy in front. The proxy calls the gateway by the first name, and after a 5xx by the
/// second name.
fn ahead(config: &mut Value, listen: SocketAddr, gateway: u16) {
    let at = |address: &str, port: u16| json!({"socket_address": {"address": address, "port_value": port}});
    let tier = |(priority, pool): (usize, &&str)| json!({"priority": priority, "lb_endpoints": [{"endpoint": {"hostname": pool, "address": at("127.0.0.1", gateway)}}]});
    let tiers: Vec<Value> = POOLS.iter().enumerate().map(tier).collect();
    let retry = json!({
        "retry_on": "5xx", "num_retries": 1,
        "retry_priority": {"name": "envoy.retry_priorities.previous_priorities", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.retry.priority.previous_priorities.v3.PreviousPrioritiesConfig",
            "update_frequency": 1,
        }},
    });
    let hcm = json!({
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "ahead",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [{
            "match": {"prefix": "/"}, "route": {"cluster": "ahead", "auto_host_rewrite": true, "retry_policy": retry},
        }]}]},
        "http_filters": [{"name": "router", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router",
        }}],
    });
    let resources = &mut config["static_resources"];
    resources["listeners"]
        .as_array_mut()
        .expect("listeners")
        .push(json!({
            "name": "ahead", "address": at("127.0.0.1", listen.port()),
            "filter_chains": [{"filters": [{"name": "hcm", "typed_config": hcm}]}],
        }));
    resources["clusters"].as_array_mut().expect("clusters").push(json!({
        "name": "ahead", "type": "STATIC", "load_assignment": {"cluster_name": "ahead", "endpoints": tiers},
    }));
}

/// Returns how often the server of each pool was picked, and how often it served.
async fn counted(stack: &Stack, servers: &[ModelServer]) -> Option<Vec<(u64, u64)>> {
    let rows = stack.daemon.as_ref()?.endpoints().await.ok()?;
    let of = |server: &ModelServer| {
        let row = rows
            .iter()
            .find(|row| row["address"] == server.addr().to_string())?;
        Some((row["picked"].as_u64()?, row["served"].as_u64()?))
    };
    servers.iter().map(of).collect()
}

async fn the_served_endpoint_is_reported(front: PickerMode) -> Result<()> {
    let server = || {
        ModelServer::start(model_server::ModelServerOptions {
            models: vec!["demo".into()],
            speed: 0.0,
            ..Default::default()
        })
    };
    let servers = [server()?, server()?];
    let folder = tempfile::tempdir()?;
    let pools = folder.path().join("pools.yaml");
    let listed: Vec<Value> = POOLS
        .iter()
        .zip(&servers)
        .map(|(pool, server)| json!({"name": pool, "endpoints": [server.addr()]}))
        .collect();
    std::fs::write(&pools, json!({ "pools": listed }).to_string())?;
    let listen = ReservedPort::lease()?;
    let entry = listen.address();
    let builder = Stack::builder()
        .front(front)
        .daemon_arguments(&["--pools", &pools.display().to_string()]);
    let builder = match front {
        PickerMode::Filter | PickerMode::Native => builder.picker(json!({"pools": [
            {"name": "default", "clusters": ["inference-pool"]}, {"name": "second", "clusters": ["second-pool"]},
        ]})),
        PickerMode::ExtProc => builder,
    };
    let stack =
        builder
            .envoy_config(log_metadata)
            .envoy_config(move |config| {
                let port = &config["static_resources"]["listeners"][0]["address"]["socket_address"]
                    ["port_value"];
                let gateway = port
                    .as_u64()
                    .and_then(|port| u16::try_from(port).ok())
                    .expect("the gateway's port");
                second_route(config, front);
                ahead(config, entry, gateway);
            })
            .start()
            .await?;
    let ready = || async { (counted(&stack, &servers).await? == [(0, 0), (0, 0)]).then_some(()) };
    wait_for(LIMIT, "both pools to be known", ready).await?;
    servers[0].fault(ServerFault::new(FaultMode::Refuse)).await;
    let asked = || {
        echo::post(
            "/v1/chat/completions",
            &[("x-request-id", "failed-over")],
            echo::chat("hi").to_string(),
        )
    };
    let reply = client::send(entry, asked()?).await?;
    assert_eq!(reply.status, 200, "{front:?}: {}", reply.text());
    assert_eq!(
        reply.header("x-served-by"),
        servers[1].addr().to_string(),
        "{front:?}"
    );
    let both = || async { (counted(&stack, &servers).await? == [(1, 0), (1, 1)]).then_some(()) };
    wait_for(
        LIMIT,
        "only the second pool's picker to count a served request",
        both,
    )
    .await?;
    stack.envoy.access_log_of("failed-over", LIMIT).await?;
    let lines = stack.envoy.access_log();
    // Envoy writes the endpoint that it tried, whatever the result. For the pool that failed, this
    // endpoint is a server of the same pool, never of the other pool.
    let logged: Vec<(&Value, &Value)> = lines
        .iter()
        .filter(|line| line["request_id"] == "failed-over")
        .map(|line| {
            (
                &line["pool"],
                &line["lb:x-gateway-destination-endpoint-served"],
            )
        })
        .collect();
    let [first, second] = servers.map(|server| json!(server.addr().to_string()));
    assert_eq!(
        logged,
        [(&json!("default"), &first), (&json!("second"), &second)],
        "{front:?}"
    );
    Ok(())
}

#[tokio::test]
async fn after_a_failover_the_filter_of_the_pool_that_answered_gets_the_served_endpoint()
-> Result<()> {
    the_served_endpoint_is_reported(PickerMode::Filter).await
}

#[tokio::test]
async fn after_a_failover_ext_proc_of_the_pool_that_answered_gets_the_served_endpoint() -> Result<()>
{
    the_served_endpoint_is_reported(PickerMode::ExtProc).await
}
