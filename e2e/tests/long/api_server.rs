//! Stops the API server of a real cluster for a minute. During that time discovery loses no ready
//! endpoint, and it removes a deleted endpoint soon after the API server is back.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use discovery::kubernetes::Kubernetes;
use discovery::{Discovery, MetadataPolicy, ServiceDiscovery};
use k8s_openapi::api::core::v1::{Namespace, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::json;
use testbed::{Result, wait_for};

use crate::cluster::TestCluster;

const LIMIT: Duration = Duration::from_secs(60);

/// The maximum delay until discovery notices the end of an outage, which exceeds the longest wait
/// of the client between two attempts.
const BOUND: Duration = Duration::from_secs(15);

async fn ready(discovery: &Discovery<Kubernetes>) -> Option<BTreeSet<String>> {
    Some(
        discovery
            .list_instances("dynamo", "decode")
            .await
            .ok()?
            .iter()
            .map(|i| i.name.clone())
            .collect(),
    )
}

fn names(count: u8) -> BTreeSet<String> {
    (1..=count).map(|pod| format!("p{pod}")).collect()
}

#[tokio::test]
async fn an_api_server_that_is_gone_for_a_minute() -> Result<()> {
    let Some(cluster) = TestCluster::start().await else {
        return Ok(());
    };
    let client = cluster.client("tok").await;
    Api::<Namespace>::all(client.clone())
        .create(
            &PostParams::default(),
            &serde_json::from_value(json!({"metadata": {"name": "long"}}))?,
        )
        .await?;
    let spec = json!({"ports": [{"port": 8080}], "selector": {"nvidia.com/dynamo-namespace": "dynamo", "nvidia.com/dynamo-component": "decode"}});
    let service = json!({"metadata": {"name": "svc"}, "spec": spec});
    Api::<Service>::namespaced(client.clone(), "long")
        .create(&PostParams::default(), &serde_json::from_value(service)?)
        .await?;
    let slices = Api::<EndpointSlice>::namespaced(client.clone(), "long");
    let put = async |count: u8| {
        let endpoint = |pod: u8| json!({"addresses": [format!("10.8.0.{pod}")], "targetRef": {"kind": "Pod", "name": format!("p{pod}")}});
        let slice = json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {"name": "s", "labels": {"kubernetes.io/service-name": "svc"}}, "ports": [{"port": 8080}],
            "endpoints": (1..=count).map(endpoint).collect::<Vec<_>>()});
        slices
            .patch(
                "s",
                &PatchParams::apply("test").force(),
                &Patch::Apply(slice),
            )
            .await
            .map(drop)
    };
    put(6).await?;
    let discovery = Kubernetes::new(client, "long").discovery(MetadataPolicy::Ignored);
    wait_for(LIMIT, "six", || async {
        (ready(&discovery).await? == names(6)).then_some(())
    })
    .await?;
    cluster.apiserver.lock().map_err(|_| "poisoned")?.kill();
    let stopped_at = Instant::now();
    while stopped_at.elapsed() < Duration::from_secs(60) {
        assert_eq!(
            ready(&discovery).await,
            Some(names(6)),
            "after {:?}",
            stopped_at.elapsed()
        );
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    cluster.apiserver.lock().map_err(|_| "poisoned")?.start();
    cluster.wait_ready().await;
    put(5).await?;
    let back = Instant::now();
    wait_for(LIMIT, "five", || async {
        (ready(&discovery).await? == names(5)).then_some(())
    })
    .await?;
    assert!(
        back.elapsed() < BOUND,
        "a deleted endpoint was kept for {:?}",
        back.elapsed()
    );
    Ok(())
}
