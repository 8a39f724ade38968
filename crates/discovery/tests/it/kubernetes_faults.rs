//! Faults of Kubernetes, which a fake API server simulates. After each fault the set is correct in
//! the end, and no error empties the set.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use discovery::backend::PickerFailureMode;
use discovery::kubernetes::{InferencePools, Kubernetes, PoolGroup};
use discovery::registry::InstanceHandle;
use discovery::{
    Discovery, InstanceState, InstanceStatus, LocalAddresses, MetadataPolicy, RegisterError,
    ServiceDiscovery, ServiceRegistry, serve,
};
use serde_json::{Value, json};

use crate::events::{next, silence, until};
use crate::fake_api::{ApiFault, FakeApi};

fn service(name: &str, namespace: &str, component: &str) -> Value {
    json!({ "metadata": { "name": name }, "spec": { "selector": {
        "nvidia.com/dynamo-namespace": namespace, "nvidia.com/dynamo-component": component } } })
}

fn endpoint(pod: &str, ip: &str, ready: bool) -> Value {
    json!({ "addresses": [ip], "conditions": { "ready": ready },
        "targetRef": { "kind": "Pod", "name": pod, "uid": format!("uid-{pod}"), "namespace": "default" } })
}

fn slice(name: &str, service: &str, port: u16, endpoints: &[Value]) -> Value {
    json!({ "metadata": { "name": name, "labels": { "kubernetes.io/service-name": service } }, "addressType": "IPv4",
        "endpoints": endpoints, "ports": [{ "name": "http", "port": port }] })
}

async fn ready(discovery: &Discovery<Kubernetes>) -> BTreeSet<String> {
    discovery
        .list_instances("dynamo", "decode")
        .await
        .unwrap()
        .iter()
        .map(|i| i.name.clone())
        .collect()
}

fn names(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

/// Starts discovery, and a fake API server with two pods in one slice of one Service.
async fn rig(policy: MetadataPolicy) -> (FakeApi, Discovery<Kubernetes>) {
    let fake = FakeApi::start().await;
    fake.put("services", service("svc", "dynamo", "decode"));
    fake.put(
        "endpointslices",
        slice(
            "s",
            "svc",
            80,
            &[
                endpoint("a", "10.0.0.1", true),
                endpoint("b", "10.0.0.2", true),
            ],
        ),
    );
    let discovery = Kubernetes::new(fake.client(), "default")
        .discovery(policy)
        .with_local_addresses(LocalAddresses::Allowed);
    (fake, discovery)
}

/// Tests the whole flow from registration to removal. The test probes like the kubelet and writes
/// slices like the controller.
#[tokio::test]
async fn the_whole_flow_with_metadata() {
    use discovery::kubernetes::KubernetesRegistry;
    let fake = FakeApi::start().await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let registry = KubernetesRegistry::new(fake.client(), "default", "decode-0");
    let refused = |error: RegisterError| {
        matches!(&error, RegisterError::Refused(_))
            .then(|| error.to_string())
            .unwrap_or_else(|| panic!("{error}"))
    };
    assert!(
        refused(
            registry
                .register_instance("dynamo", "decode")
                .await
                .unwrap_err()
        )
        .contains("reading the pod"),
        "there is no such pod"
    );
    let pod = |component: &str| {
        json!({ "metadata": { "name": "decode-0", "uid": "u1", "labels": {
            "nvidia.com/dynamo-namespace": "dynamo", "nvidia.com/dynamo-component": component, "app": "x" } } })
    };
    fake.put("pods", pod("prefill"));
    assert!(
        refused(
            registry
                .register_instance("dynamo", "decode")
                .await
                .unwrap_err()
        )
        .contains("nvidia.com/dynamo-component=decode")
    );
    fake.put("pods", pod("decode"));
    assert!(
        refused(
            registry
                .register_instance("dynamo", "decode")
                .await
                .unwrap_err()
        )
        .contains("no Service")
    );
    fake.put("services", service("elsewhere", "other", "decode"));
    let mut narrower = service("svc", "dynamo", "decode");
    narrower["spec"]["selector"]["app"] = "y".into();
    fake.put("services", narrower);
    assert!(
        refused(
            registry
                .register_instance("dynamo", "decode")
                .await
                .unwrap_err()
        )
        .contains("no Service"),
        "it selects other pods"
    );
    fake.put("services", service("svc", "dynamo", "decode"));
    let worker: InstanceHandle = registry
        .register_instance("dynamo", "decode")
        .await
        .unwrap();
    assert_eq!(worker.instance_id(), "decode-0");
    let routes: Router = serve::router(&worker);
    tokio::spawn(async move { axum::serve(listener, routes).await });

    let discovery = Kubernetes::new(fake.client(), "default")
        .discovery(MetadataPolicy::Preferred)
        .with_local_addresses(LocalAddresses::Allowed);
    let mut events = discovery.watch("dynamo", "decode").unwrap();
    let observe = |probe: bool| {
        fake.put(
            "endpointslices",
            slice(
                "svc-1",
                "svc",
                address.port(),
                &[endpoint("decode-0", "127.0.0.1", probe)],
            ),
        );
    };
    observe(false);
    worker
        .set_metadata(
            json!({"Model": {"name": "Qwen3-32B"}})
                .as_object()
                .cloned()
                .unwrap(),
        )
        .unwrap();
    silence(&mut events, Duration::from_millis(300)).await;
    worker.set_ready(InstanceStatus::Ready);
    observe(true);
    assert_eq!(next(&mut events).await, format!("+decode-0@{address}"));
    let [instance] = discovery
        .list_instances("dynamo", "decode")
        .await
        .unwrap()
        .try_into()
        .unwrap();
    assert_eq!(instance.metadata().models()[0].name, "Qwen3-32B");
    observe(false);
    assert_eq!(next(&mut events).await, "-decode-0");
    observe(true);
    assert_eq!(next(&mut events).await, format!("+decode-0@{address}"));
    fake.delete("endpointslices", "svc-1");
    assert_eq!(next(&mut events).await, "-decode-0");
}

#[tokio::test]
async fn services_are_found_by_selector_and_may_come_change_and_go() {
    let (fake, discovery) = rig(MetadataPolicy::Ignored).await;
    fake.put(
        "services",
        service("dynamo-decode-service", "other", "decode"),
    );
    fake.put(
        "endpointslices",
        slice(
            "t",
            "dynamo-decode-service",
            80,
            &[endpoint("foreign", "10.0.0.9", true)],
        ),
    );
    assert_eq!(
        ready(&discovery).await,
        names(&["a", "b"]),
        "another namespace has a component with that name"
    );
    let mut events = discovery.watch("dynamo", "decode").unwrap();
    next(&mut events).await;
    next(&mut events).await;
    fake.put("services", service("second", "dynamo", "decode"));
    fake.put(
        "endpointslices",
        slice(
            "u",
            "second",
            80,
            &[
                endpoint("b", "10.0.0.2", true),
                endpoint("c", "10.0.0.3", true),
            ],
        ),
    );
    assert_eq!(next(&mut events).await, "+c@10.0.0.3:80");
    fake.delete("endpointslices", "s");
    assert_eq!(
        next(&mut events).await,
        "-a",
        "b is still in the other slice"
    );
    fake.put("services", service("second", "dynamo", "prefill"));
    assert_eq!(
        (next(&mut events).await, next(&mut events).await),
        ("-b".to_owned(), "-c".to_owned())
    );
    fake.delete("services", "svc");
    fake.put("services", service("second", "dynamo", "decode"));
    assert_eq!(
        (next(&mut events).await, next(&mut events).await),
        ("+b@10.0.0.2:80".to_owned(), "+c@10.0.0.3:80".to_owned())
    );
}

#[tokio::test]
async fn every_fault_ends_in_the_truth_and_none_empties_the_set() {
    for fault in [
        ApiFault::Refuse(true, 410),
        ApiFault::Refuse(true, 504),
        ApiFault::Refuse(true, 429),
        ApiFault::Refuse(true, 403),
        ApiFault::Refuse(false, 410),
        ApiFault::Refuse(false, 504),
        ApiFault::Refuse(false, 429),
        ApiFault::Refuse(false, 403),
        ApiFault::Refuse(false, 500),
        ApiFault::HalfALine,
        ApiFault::Expired,
        ApiFault::Ends,
    ] {
        let (fake, discovery) = rig(MetadataPolicy::Ignored).await;
        let mut events = discovery.watch("dynamo", "decode").unwrap();
        assert_eq!(
            (
                next(&mut events).await.as_str(),
                next(&mut events).await.as_str()
            ),
            ("+a@10.0.0.1:80", "+b@10.0.0.2:80")
        );
        // The open watch does not end soon. So the test adds a Service, which causes another watch,
        // and this watch gets the fault.
        for _ in 0..3 {
            fake.fault(fault);
        }
        fake.put("services", service("more", "dynamo", "decode"));
        fake.put_unannounced(
            "endpointslices",
            slice("s", "svc", 80, &[endpoint("b", "10.0.0.2", true)]),
        );
        assert_eq!(
            next(&mut events).await,
            "-a",
            "{fault:?}: a change without an event"
        );
        until(0, || async { fake.faults_left() }).await;
        fake.put(
            "endpointslices",
            slice(
                "s",
                "svc",
                80,
                &[
                    endpoint("b", "10.0.0.2", true),
                    endpoint("c", "10.0.0.3", true),
                ],
            ),
        );
        assert_eq!(
            next(&mut events).await,
            "+c@10.0.0.3:80",
            "{fault:?}: it continues after"
        );
    }
}

#[tokio::test]
async fn an_outage_keeps_the_set_says_so_and_is_over_by_a_list() {
    let (fake, discovery) = rig(MetadataPolicy::Ignored).await;
    let mut events = discovery.watch("dynamo", "decode").unwrap();
    next(&mut events).await;
    next(&mut events).await;
    let followed = discovery.follow("dynamo", "decode").unwrap();
    fake.set_down(true);
    fake.fault(ApiFault::Ends);
    fake.put("services", service("more", "dynamo", "decode"));
    until(true, || async {
        followed.status().borrow().error.is_some()
    })
    .await;
    fake.put_unannounced(
        "endpointslices",
        slice("s", "svc", 80, &[endpoint("b", "10.0.0.2", true)]),
    );
    silence(&mut events, Duration::from_secs(1)).await;
    assert_eq!(ready(&discovery).await, names(&["a", "b"]));
    let failed = fake.requests().len();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(fake.requests().len() - failed < 20, "too many retries");
    fake.set_down(false);
    assert_eq!(next(&mut events).await, "-a");
    until(None, || async { followed.status().borrow().error.clone() }).await;
    let seen = followed.seen();
    assert!(
        seen.iter()
            .any(|s| &*s.id == "a" && s.state == InstanceState::Removed)
            && seen
                .iter()
                .any(|s| &*s.id == "b" && s.state == InstanceState::Ready)
    );
}

#[tokio::test]
async fn a_restarted_pod_at_the_same_address_is_another_generation() {
    let (fake, discovery) = rig(MetadataPolicy::Ignored).await;
    let mut events = discovery.watch("dynamo", "decode").unwrap();
    next(&mut events).await;
    next(&mut events).await;
    let mut reborn = endpoint("a", "10.0.0.1", true);
    reborn["targetRef"]["uid"] = "another".into();
    fake.put(
        "endpointslices",
        slice("s", "svc", 80, &[reborn, endpoint("b", "10.0.0.2", true)]),
    );
    assert_eq!(next(&mut events).await, "+a@10.0.0.1:80");
    let listed = discovery.list_instances("dynamo", "decode").await.unwrap();
    assert_eq!(
        listed
            .iter()
            .map(|i| i.generation.as_str())
            .collect::<Vec<_>>(),
        ["another", "uid-b"]
    );
}

#[tokio::test]
async fn an_inference_pool_of_either_group() {
    let pod = |name: &str, ip: &str, ready: &str| {
        json!({ "metadata": { "name": name, "uid": format!("uid-{name}"), "labels": { "app": "vllm", "llm-d.ai/role": "decode" } },
            "status": { "podIP": ip, "conditions": [{ "type": "Ready", "status": ready, "reason": "r" }] } })
    };
    for (group, spec, wider) in [
        (
            PoolGroup::V1,
            json!({ "selector": { "matchLabels": { "app": "vllm" } }, "targetPorts": [{ "number": 8000 }] }),
            json!({ "selector": { "matchLabels": { "app": "vllm" } }, "targetPorts": [{ "number": 8000 }, { "number": 8001 }] }),
        ),
        (
            PoolGroup::V1Alpha2,
            json!({ "selector": { "app": "vllm" }, "targetPortNumber": 8000 }),
            json!({ "selector": { "app": "vllm" }, "targetPorts": [{ "number": 8000 }, { "number": 8001 }] }),
        ),
    ] {
        let fake = FakeApi::start().await;
        let kind = |spec: &Value| json!({ "apiVersion": "x", "kind": "InferencePool", "metadata": { "name": "llama" }, "spec": spec });
        fake.put("inferencepools", kind(&json!({ "selector": {} })));
        fake.put("pods", pod("p0", "10.0.0.1", "True"));
        let discovery: Discovery<InferencePools> =
            InferencePools::new(fake.client(), group).discovery(MetadataPolicy::Ignored);
        let why = discovery
            .list_instances("default", "llama")
            .await
            .unwrap_err()
            .to_string();
        assert!(why.contains("InferencePool"), "{why}");
        fake.put("inferencepools", kind(&spec));
        let mut events = discovery.watch("default", "llama").unwrap();
        assert_eq!(next(&mut events).await, "+p0@10.0.0.1:8000");
        fake.put("pods", pod("p1", "10.0.0.2", "False"));
        fake.put("pods", pod("p1", "10.0.0.2", "True"));
        assert_eq!(next(&mut events).await, "+p1@10.0.0.2:8000");
        fake.put("pods", json!({ "metadata": { "name": "p1", "labels": { "app": "vllm" } }, "status": { "phase": "Failed" } }));
        assert_eq!(next(&mut events).await, "-p1", "evicted: it has no address");
        fake.put("inferencepools", kind(&wider));
        let edit = [
            next(&mut events).await,
            next(&mut events).await,
            next(&mut events).await,
        ];
        assert_eq!(
            edit,
            [
                "-p0",
                "+p0-rank-0@10.0.0.1:8000",
                "+p0-rank-1@10.0.0.1:8001"
            ]
        );
        let [rank, _] = discovery
            .list_instances("default", "llama")
            .await
            .unwrap()
            .try_into()
            .unwrap();
        assert!(
            rank.labels
                .contains(&("llm-d.ai/role".to_owned(), "decode".to_owned()))
        );
        fake.delete("inferencepools", "llama");
        assert_eq!(
            [next(&mut events).await, next(&mut events).await],
            ["-p0-rank-0", "-p0-rank-1"]
        );
    }
}

/// Checks that discovery reports the settings for gateways in either API group. A change of these
/// settings alone does not change the pool.
#[tokio::test]
async fn an_inference_pool_says_what_its_gateway_does_without_a_pick() {
    for (group, spec, picker) in [
        (
            PoolGroup::V1,
            json!({ "selector": { "matchLabels": { "app": "vllm" } }, "targetPorts": [{ "number": 80 }] }),
            "endpointPickerRef",
        ),
        (
            PoolGroup::V1Alpha2,
            json!({ "selector": { "app": "vllm" }, "targetPortNumber": 80 }),
            "extensionRef",
        ),
    ] {
        let fake = FakeApi::start().await;
        let pool = |picks: Option<Value>| {
            let mut spec = spec.clone();
            spec[picker] = picks.unwrap_or_default();
            json!({ "apiVersion": "x", "kind": "InferencePool", "metadata": { "name": "llama" }, "spec": spec })
        };
        let labels = json!({ "app": "vllm" });
        let status =
            json!({ "podIP": "10.0.0.1", "conditions": [{ "type": "Ready", "status": "True" }] });
        fake.put(
            "pods",
            json!({ "metadata": { "name": "p0", "labels": labels }, "status": status }),
        );
        let discovery: Discovery<InferencePools> =
            InferencePools::new(fake.client(), group).discovery(MetadataPolicy::Ignored);
        let followed = discovery.follow("default", "llama").unwrap();
        let asks = || async {
            followed
                .status()
                .borrow()
                .requirements
                .as_ref()
                .map(|asked| asked.failure_mode)
        };
        let mut events = discovery.watch("default", "llama").unwrap();
        until(true, || async { followed.status().borrow().synced }).await;
        assert_eq!(asks().await, None, "there is no such pool");
        fake.put(
            "inferencepools",
            pool(Some(json!({ "name": "epp", "failureMode": "FailOpen" }))),
        );
        until(Some(PickerFailureMode::Open), asks).await;
        assert_eq!(next(&mut events).await, "+p0@10.0.0.1:80");
        let lists = || {
            fake.requests()
                .iter()
                .filter(|request| request.starts_with("list pods"))
                .count()
        };
        let before = lists();
        fake.put(
            "inferencepools",
            pool(Some(json!({ "name": "epp", "failureMode": "FailClose" }))),
        );
        until(Some(PickerFailureMode::Close), asks).await;
        fake.put(
            "inferencepools",
            pool(Some(json!({ "name": "epp", "failureMode": "FailOpen" }))),
        );
        until(Some(PickerFailureMode::Open), asks).await;
        fake.put("inferencepools", pool(None));
        until(Some(PickerFailureMode::Close), asks).await;
        assert_eq!(lists(), before, "its pods were not listed again");
        fake.delete("inferencepools", "llama");
        until(None, asks).await;
        assert_eq!(next(&mut events).await, "-p0");
    }
}

/// Checks that metadata is fetched from the address in the record, whatever else the slice
/// contains.
#[tokio::test]
async fn metadata_is_fetched_from_the_instance_and_a_dead_one_is_pending() {
    let (fake, discovery) = rig(MetadataPolicy::Preferred).await;
    let closed: SocketAddr = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    fake.put(
        "endpointslices",
        slice(
            "s",
            "svc",
            closed.port(),
            &[endpoint("a", "127.0.0.1", true)],
        ),
    );
    assert!(ready(&discovery).await.is_empty());
    let followed = discovery.follow("dynamo", "decode").unwrap();
    let state = || async {
        followed
            .seen()
            .into_iter()
            .find(|s| &*s.id == "a")
            .map(|s| s.state)
    };
    until(true, || async {
        matches!(state().await, Some(InstanceState::Pending(why)) if why.contains("refused"))
    })
    .await;
}

#[tokio::test]
async fn custom_objects_are_whole_sets_and_a_kind_that_is_not_installed_has_none() {
    use discovery::kubernetes::{CustomKind, follow_objects};
    use futures::StreamExt;
    let fake = FakeApi::start().await;
    let kind = |kind, plural| CustomKind {
        group: "llm-d.ai",
        version: "v1alpha2",
        kind,
        plural,
    };
    let kinds = [
        kind("InferenceObjective", "inferenceobjectives"),
        kind("InferenceModel", "inferencemodels"),
    ];
    // The server refuses only the kind that is listed first.
    fake.fault(ApiFault::Refuse(false, 404));
    let object = |name: &str, priority: i32| {
        json!({ "apiVersion": "llm-d.ai/v1alpha2", "kind": "InferenceObjective", "metadata": { "name": name, "namespace": "default",
            "creationTimestamp": "2026-01-02T03:04:05Z", "uid": "u", "annotations": { "a": "b" } }, "spec": { "priority": priority }, "status": {} })
    };
    let mut sets = follow_objects(&fake.client(), "default", &kinds);
    assert_eq!(sets.next().await, Some(Ok(Vec::new())));
    fake.put("inferenceobjectives", object("batch", -1));
    let set = loop {
        match sets.next().await {
            Some(Ok(set)) if !set.is_empty() => break set,
            Some(Ok(_)) => {}
            other => panic!("{other:?}"),
        }
    };
    let mut expected = object("batch", -1);
    expected["metadata"] = json!({ "name": "batch", "namespace": "default", "creationTimestamp": "2026-01-02T03:04:05Z" });
    expected.as_object_mut().unwrap().remove("status");
    assert_eq!(set, [expected]);
}

/// Checks that the client ends a silent watch five seconds after its expected end.
#[tokio::test]
async fn a_stalled_watch_costs_no_more_than_its_time() {
    let fake = FakeApi::start().await;
    fake.put("services", service("svc", "dynamo", "decode"));
    fake.put(
        "endpointslices",
        slice("s", "svc", 80, &[endpoint("a", "10.0.0.1", true)]),
    );
    for _ in 0..2 {
        fake.fault(ApiFault::Stalls); // One fault is for the Services, and one for the slices.
    }
    let discovery = Kubernetes::new(fake.client(), "default").discovery(MetadataPolicy::Ignored);
    assert_eq!(ready(&discovery).await, names(&["a"]));
    until(0, || async { fake.faults_left() }).await;
    fake.put(
        "endpointslices",
        slice("s", "svc", 80, &[endpoint("b", "10.0.0.2", true)]),
    );
    let began = tokio::time::Instant::now();
    until(names(&["b"]), || ready(&discovery)).await;
    assert!(
        began.elapsed() < Duration::from_secs(50),
        "noticed after {:?}",
        began.elapsed()
    );
}

/// Checks a restore of etcd to its state of an hour ago: versions go backwards, without any notice.
#[tokio::test]
async fn a_version_that_goes_backwards_is_accepted() {
    let (fake, discovery) = rig(MetadataPolicy::Ignored).await;
    let mut events = discovery.watch("dynamo", "decode").unwrap();
    assert_eq!(
        (
            next(&mut events).await.as_str(),
            next(&mut events).await.as_str()
        ),
        ("+a@10.0.0.1:80", "+b@10.0.0.2:80")
    );
    let a = endpoint("a", "10.0.0.1", true);
    let b = endpoint("b", "10.0.0.2", true);
    let c = endpoint("c", "10.0.0.3", true);
    let backup = fake.backup();
    let forward = || {
        (0..10).for_each(|_| {
            fake.put(
                "endpointslices",
                slice("s", "svc", 80, std::slice::from_ref(&c)),
            );
        });
    };
    forward();
    let mut three = [
        next(&mut events).await,
        next(&mut events).await,
        next(&mut events).await,
    ];
    three.sort();
    assert_eq!(three, ["+c@10.0.0.3:80", "-a", "-b"]);
    // A watch that continues still applies an event with an older version than the last event.
    fake.restore(backup.clone());
    fake.put(
        "endpointslices",
        slice("s", "svc", 80, &[a.clone(), c.clone()]),
    );
    assert_eq!(next(&mut events).await, "+a@10.0.0.1:80");
    // A list replaces the set, and the watch continues from the version of the list.
    forward();
    assert_eq!(next(&mut events).await, "-a");
    fake.restore(backup);
    fake.put("services", service("more", "dynamo", "decode"));
    let mut three = [
        next(&mut events).await,
        next(&mut events).await,
        next(&mut events).await,
    ];
    three.sort();
    assert_eq!(three, ["+a@10.0.0.1:80", "+b@10.0.0.2:80", "-c"]);
    fake.put("endpointslices", slice("s", "svc", 80, &[b]));
    assert_eq!(next(&mut events).await, "-a");
}

/// Checks how soon a restore is noticed. A watch that resumes from a version in the future is
/// accepted and stays silent. The restart of the API server ends the watch early, and a list
/// follows soon.
#[tokio::test]
async fn a_restore_that_ends_the_watches_is_noticed_at_once() {
    let elapsed = time_to_notice_a_restore(true).await;
    assert!(
        elapsed < Duration::from_secs(20),
        "noticed after {elapsed:?}"
    );
}

/// Tests the worst case: a proxy hides the restart from the watches. The periodic list limits how
/// long the watches stay silent.
#[tokio::test(start_paused = true)]
async fn a_watch_from_a_future_version_is_silent_and_a_list_ends_that() {
    let elapsed = time_to_notice_a_restore(false).await;
    assert!(
        elapsed <= Duration::from_secs(300 + 35),
        "noticed after {elapsed:?}"
    );
}

async fn time_to_notice_a_restore(watches_end: bool) -> Duration {
    let (fake, discovery) = rig(MetadataPolicy::Ignored).await;
    let mut events = discovery.watch("dynamo", "decode").unwrap();
    assert_eq!(
        (
            next(&mut events).await.as_str(),
            next(&mut events).await.as_str()
        ),
        ("+a@10.0.0.1:80", "+b@10.0.0.2:80")
    );
    let backup = fake.backup();
    (0..10).for_each(|at| {
        fake.put(
            "endpointslices",
            slice(
                "s",
                "svc",
                80,
                &[endpoint("c", &format!("10.0.0.{}", at + 3), true)],
            ),
        );
    });
    until(names(&["c"]), || ready(&discovery)).await;
    fake.restore(backup);
    let restored = tokio::time::Instant::now();
    if watches_end {
        fake.end_watches();
    }
    until(names(&["a", "b"]), || ready(&discovery)).await;
    restored.elapsed()
}

/// Checks that discovery keeps half of a pool that disappears with the first list after an outage,
/// until another list confirms the loss.
#[tokio::test]
async fn a_mass_disappearance_after_an_outage_is_held_and_listed_again() {
    let fake = FakeApi::start().await;
    fake.put("services", service("svc", "dynamo", "decode"));
    let all: Vec<Value> = (1..=8)
        .map(|i| endpoint(&format!("p{i}"), &format!("10.0.0.{i}"), true))
        .collect();
    fake.put("endpointslices", slice("s", "svc", 80, &all));
    let discovery = Kubernetes::new(fake.client(), "default").discovery(MetadataPolicy::Ignored);
    assert_eq!(ready(&discovery).await.len(), 8);
    let followed = discovery.follow("dynamo", "decode").unwrap();
    let lose = async |left: &[Value]| {
        fake.set_down(true);
        fake.fault(ApiFault::Ends);
        fake.put("services", service("more", "dynamo", "decode"));
        until(true, || async {
            followed.status().borrow().error.is_some()
        })
        .await;
        fake.put_unannounced("endpointslices", slice("s", "svc", 80, left));
        fake.delete("services", "more");
        fake.set_down(false);
        until(None, || async { followed.status().borrow().error.clone() }).await;
    };
    lose(&all[..2]).await;
    let held = || async {
        followed
            .seen()
            .iter()
            .filter(|s| s.state == InstanceState::RemovalHeld)
            .count()
    };
    until(6, held).await;
    assert_eq!(
        ready(&discovery).await.len(),
        8,
        "held for a while, and reported as held"
    );
    // The next list has the instances again, so discovery never removed them.
    fake.put("endpointslices", slice("s", "svc", 80, &all));
    until(0, held).await;
    assert_eq!(ready(&discovery).await.len(), 8);
    // The instances that are lost now do not come back, and are removed.
    lose(&all[..2]).await;
    until(names(&["p1", "p2"]), || ready(&discovery)).await;
}
