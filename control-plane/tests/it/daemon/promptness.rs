//! Measures how fast a proxy gets a change, from the event of an API server's watch to the pool
//! update on the wire. A proxy gets no pool update without a change.

use std::time::{Duration, Instant};

use discovery::MetadataPolicy;
use discovery::kubernetes::Kubernetes;
use serde_json::{Value, json};

use super::fake_api::FakeApi;
use super::harness::{DaemonHarness, EnvoyStream, FilterStream, names};

/// The maximum delay of a change: ten times the promised time of an addition, because the machine
/// may be busy.
const LIMIT: Duration = Duration::from_millis(500);

const ROUNDS: usize = 9;

/// Returns a slice with these pods. The trigger time must not matter to the daemon.
fn slice(pods: &[&str], trigger: usize) -> Value {
    let endpoint = |(at, pod): (usize, &&str)| json!({"addresses": [format!("10.0.0.{}", at + 1)], "targetRef": {"kind": "Pod", "name": pod, "uid": pod}});
    let annotations = json!({"endpoints.kubernetes.io/last-change-trigger-time": format!("2026-11-21T00:00:{trigger:02}Z")});
    json!({"metadata": {"name": "s", "labels": {"kubernetes.io/service-name": "svc"}, "annotations": annotations}, "addressType": "IPv4",
        "endpoints": pods.iter().enumerate().map(endpoint).collect::<Vec<_>>(), "ports": [{"port": 80}]})
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

#[tokio::test]
async fn a_proxy_gets_additions_and_removals_in_time_and_nothing_else() {
    let fake = FakeApi::start().await;
    let selector =
        json!({"nvidia.com/dynamo-namespace": "dynamo", "nvidia.com/dynamo-component": "decode"});
    fake.put(
        "services",
        json!({"metadata": {"name": "svc"}, "spec": {"selector": selector}}),
    );
    fake.put("endpointslices", slice(&["stays"], 0));
    let discovery = Kubernetes::new(fake.client(), "default").discovery(MetadataPolicy::Ignored);
    let rig = DaemonHarness::following(discovery.changes("dynamo", "decode").unwrap()).await;
    let mut envoy = EnvoyStream::connect(rig.address, "n").await;
    envoy.ports().await;
    let acknowledges = tokio::spawn(async move { while !envoy.ports().await.is_empty() {} });
    let (mut filter, _) = FilterStream::connect(rig.address, "n", 1, &["default"]).await;
    assert_eq!(names(&filter.pool_update().await), ["stays"]);

    let mut added = Vec::new();
    let mut removed = Vec::new();
    for round in 0..ROUNDS {
        for (pods, times) in [
            (["stays", "comes"].as_slice(), &mut added),
            (&["stays"], &mut removed),
        ] {
            let began = Instant::now();
            fake.put("endpointslices", slice(pods, round));
            while names(&filter.pool_update().await).len() != pods.len() {}
            times.push(began.elapsed());
        }
    }
    let added = median(added);
    let removed = median(removed);
    assert!(
        added <= LIMIT && removed <= LIMIT,
        "added after {added:?}, removed after {removed:?}"
    );

    // The slice is written again and again, as by a controller after changes of pods that the
    // daemon ignores.
    for round in 0..20 {
        fake.put("endpointslices", slice(&["stays"], round));
    }
    let update = filter.pool_update_within(Duration::from_secs(1)).await;
    assert!(update.is_none(), "sent again: {update:?}");
    fake.put("endpointslices", slice(&["stays", "comes"], 21));
    assert_eq!(
        names(&filter.pool_update().await),
        ["stays", "comes"],
        "the next pool update has the change"
    );
    acknowledges.abort();
}
