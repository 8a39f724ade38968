//! HTTP calls as the transport of state: proxies can do by HTTP calls everything that they do by
//! one gRPC stream.

use std::time::Duration;

use e2e::explain::{ExplainedDecision, pool_is};
use e2e::ledger_metrics;
use serde_json::json;
use testbed::load::LoadGenerator;
use testbed::stack::{Stack, StackBuilder};
use testbed::{Result, wait_for};

use crate::echo;
use crate::pools::SecondEnvoy;
use crate::streams::{self, slow};

const LIMIT: Duration = Duration::from_secs(60);

/// The configuration has only the scorers that these tests check.
const CONFIG: &str = "apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: active-request-scorer
- type: prefix-cache-scorer
";

/// Describes a stack that uses this transport and leaves a silent daemon after one second.
pub(crate) fn by(transport: &str) -> StackBuilder {
    let state =
        json!({"cluster": "switchpoint-state", "transport": transport, "silence_max_ms": 1_000});
    Stack::builder().picker(json!({"explain": true, "state": state}))
}

#[tokio::test]
async fn state_comes_by_calls_and_acknowledgements_and_reports_go() -> Result<()> {
    let mut stack = by("http")
        .servers(3)
        .concurrency(2)
        .scored_by(&[("queue-scorer", 1)])
        .start()
        .await?;
    let load = LoadGenerator::start(stack.address(), 4);
    for indices in [&[0, 1][..], &[1, 2], &[0, 1, 2]] {
        stack.set_pool(indices)?;
        pool_is(&stack, indices).await?;
    }
    // A slot becomes free only when the proxy has acknowledged the removal of its endpoint.
    let departed = || async {
        let state = stack
            .daemon
            .as_ref()?
            .admin("/debug/state")
            .await
            .ok()?
            .json()
            .ok()?;
        (state["pools"][0]["departing"] == 0 && state["proxies"].as_array()?.len() == 1)
            .then_some(())
    };
    wait_for(LIMIT, "removals to be acknowledged", departed).await?;
    stack.servers[0]
        .override_metrics([("num_requests_waiting".to_owned(), "40".to_owned())].into());
    let arrived = || async {
        ExplainedDecision::ask(stack.address(), "who is busy?")
            .await
            .ok()?
            .distinguishes("queue-scorer")
            .then_some(())
    };
    wait_for(LIMIT, "metrics to arrive", arrived).await?;
    let reported = || async {
        let rows = stack.daemon.as_ref()?.endpoints().await.ok()?;
        rows.iter()
            .all(|row| row["served"].as_u64() > Some(0))
            .then_some(())
    };
    wait_for(LIMIT, "all endpoints to be reported as serving", reported).await?;
    assert_eq!(
        stack
            .envoy
            .picker_stat("switchpoint_state_streams_total")
            .await?,
        1,
        "one connection for the whole test"
    );
    let callouts = stack
        .envoy
        .stat("cluster.switchpoint-state.upstream_rq_200")
        .await?;
    assert!(callouts > 20, "state came by HTTP calls: {callouts}");
    ledger_metrics::close("none, by HTTP calls", load, &stack).await?;
    Ok(())
}

#[tokio::test]
async fn calls_go_by_http_1_as_well() -> Result<()> {
    // A proxy may allow only HTTP/1.1 to the daemon. EDS is gRPC, so Envoy then needs the hosts
    // from another source.
    let stack = by("http").without_waiting();
    let stack = stack.envoy_config(|config| {
        let clusters = config
            .pointer_mut("/static_resources/clusters")
            .and_then(serde_json::Value::as_array_mut)
            .expect("clusters");
        let mut calls = clusters[1].clone();
        calls["name"] = json!("calls");
        calls["load_assignment"]["cluster_name"] = json!("calls");
        calls
            .as_object_mut()
            .expect("a cluster")
            .remove("typed_extension_protocol_options");
        clusters.push(calls);
    });
    let state = json!({"cluster": "calls", "transport": "http"});
    let mut stack = stack
        .picker(json!({"explain": true, "state": state}))
        .servers(2)
        .start()
        .await?;
    stack.wait_until_ready().await?;
    stack.set_pool(&[1])?;
    pool_is(&stack, &[1]).await?;
    assert!(
        stack
            .envoy
            .stat("cluster.calls.upstream_cx_http1_total")
            .await?
            > 0
    );
    Ok(())
}

/// Checks that two proxies with one daemon pick as one. Each proxy includes the load of the other
/// in its picks, and sends a prompt that the other placed to the same endpoint. `shared_state` and
/// `drills_proxy` test this for streams.
#[tokio::test]
async fn two_proxies_pick_as_one_by_calls() -> Result<()> {
    let config = tempfile::NamedTempFile::new()?;
    std::fs::write(config.path(), CONFIG)?;
    let builder = by("http")
        .servers_like(8, &slow(50))
        .daemon_arguments(&["--config", &config.path().to_string_lossy()]);
    let stack = builder.start().await?;
    let second = SecondEnvoy::start(&stack, "another", 2).await?;
    let apart = async |wanted: bool| {
        let look = || async {
            (ExplainedDecision::ask(stack.address(), "who is busy?")
                .await
                .ok()?
                .distinguishes("active-request-scorer")
                == wanted)
                .then_some(())
        };
        wait_for(
            LIMIT,
            &format!("the other proxy's load to distinguish endpoints: {wanted}"),
            look,
        )
        .await
    };
    apart(false).await?;
    let running = streams::open(second.envoy.listener(), 3, 100).await?;
    apart(true).await?;
    assert_eq!(streams::ends(running).await, (3, 0));
    apart(false).await?;

    // Placements arrive within 100 ms on an idle machine. So the test waits longer than 100 ms in
    // each round. One in eight prompts would agree by chance.
    let mut found = 0;
    for round in 0..12 {
        let prompt = format!(
            "{round} is how this prompt begins. {}",
            "It goes on for long. ".repeat(200)
        );
        let home = stack.server_of(
            &stack
                .post("/v1/chat/completions", &echo::chat(&prompt))
                .await?,
        )?;
        tokio::time::sleep(Duration::from_millis(40 * (round + 1))).await;
        let decision = ExplainedDecision::ask(second.envoy.listener(), &prompt).await?;
        found += usize::from(decision.picked[0] == stack.servers[home].addr().to_string());
    }
    assert!(
        found >= 8,
        "{found} of 12 prompts were found again through the other proxy"
    );
    ledger_metrics::nothing_left(&stack).await
}
