//! Tests discovery with a real kube-apiserver and, in `slow`, with the real controllers of
//! kube-controller-manager. The API refuses loopback addresses, so addresses are fictitious.
//! Metadata that instances serve is therefore tested with the fake API server.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use discovery::backend::PickerFailureMode;
use discovery::kubernetes::{
    InferencePools, Kubernetes, KubernetesLease, KubernetesRegistry, PoolGroup,
};
use discovery::lease::LeaseStore;
use discovery::{Discovery, InstanceState, MetadataPolicy, ServiceDiscovery, ServiceRegistry};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use kube::{Api, Client};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::cluster::{self, TestCluster};
use crate::events::{next, silence, until};

/// A namespace for one test in a cluster.
struct TestNamespace {
    client: Client,
    name: &'static str,
}

impl TestNamespace {
    async fn new(cluster: &TestCluster, name: &'static str) -> Self {
        let client = cluster.client("tok").await;
        create(
            &Api::<Namespace>::all(client.clone()),
            json!({ "metadata": { "name": name } }),
        )
        .await;
        Self { client, name }
    }

    fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), self.name)
    }

    async fn service(&self, name: &str, component: &str) {
        create(
            &self.api::<Service>(),
            json!({ "metadata": { "name": name, "labels": { "nvidia.com/dynamo-component": component } }, "spec": {
                "ports": [{ "name": "http", "port": 8080 }],
                "selector": { "nvidia.com/dynamo-namespace": "dynamo", "nvidia.com/dynamo-component": component } } }),
        )
        .await;
    }

    /// Creates a slice without a controller.
    async fn slice(&self, name: &str, service: &str, kind: &str, endpoints: Value) {
        let slice = json!({ "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": kind, "endpoints": endpoints,
            "metadata": { "name": name, "labels": { "kubernetes.io/service-name": service } }, "ports": [{ "name": "http", "port": 8080 }] });
        self.api::<EndpointSlice>()
            .patch(
                name,
                &PatchParams::apply("test").force(),
                &Patch::Apply(slice),
            )
            .await
            .unwrap();
    }

    async fn pod(&self, name: &str, component: &str) {
        let labels = json!({ "nvidia.com/dynamo-namespace": "dynamo", "nvidia.com/dynamo-component": component, "app": component });
        let container = json!({ "name": "c", "image": "i" });
        let pod = json!({ "metadata": { "name": name, "labels": labels }, "spec": { "nodeName": "node-1", "containers": [container] } });
        create(&self.api::<Pod>(), pod).await;
    }

    /// Sets the readiness as a kubelet does after a probe.
    async fn probe(&self, pod: &str, ip: &str, ready: bool) {
        let (status, reason) = if ready {
            ("True", None)
        } else {
            ("False", Some("ContainersNotReady"))
        };
        let condition = |name: &str| json!({ "type": name, "status": status, "reason": reason });
        self.conditions(
            pod,
            ip,
            json!([condition("Ready"), condition("ContainersReady")]),
        )
        .await;
    }

    /// Sets the readiness as the node lifecycle controller does when the pod's node is not ready.
    async fn lose_node(&self, pod: &str, ip: &str) {
        let condition = |name: &str, status: &str| json!({ "type": name, "status": status });
        self.conditions(
            pod,
            ip,
            json!([
                condition("Ready", "False"),
                condition("ContainersReady", "True")
            ]),
        )
        .await;
    }

    async fn conditions(&self, pod: &str, ip: &str, conditions: Value) {
        let status = json!({ "status": { "podIP": ip, "podIPs": [{ "ip": ip }], "phase": "Running", "conditions": conditions } });
        self.api::<Pod>()
            .patch_status(pod, &PatchParams::default(), &Patch::Merge(status))
            .await
            .unwrap();
    }

    /// Gives a user the roles of a shipped file, in this namespace.
    async fn grant(&self, file: &str, user: &str) {
        for mut object in cluster::objects(&root(file)) {
            let kind = object["kind"].as_str().unwrap().to_owned();
            if !["Role", "RoleBinding"].contains(&kind.as_str()) {
                continue;
            }
            object["metadata"]["namespace"] = self.name.into();
            if kind == "RoleBinding" {
                object["subjects"] = json!([{ "kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io" }]);
            }
            let gvk = GroupVersionKind::gvk("rbac.authorization.k8s.io", "v1", &kind);
            create(
                &Api::<DynamicObject>::namespaced_with(
                    self.client.clone(),
                    self.name,
                    &ApiResource::from_gvk(&gvk),
                ),
                object,
            )
            .await;
        }
    }

    /// Gives a user a role with these rules.
    async fn grant_rules(&self, user: &str, rules: &Value) {
        let group = "rbac.authorization.k8s.io";
        let role = json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": { "name": user }, "rules": rules });
        let binding = json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": { "name": user },
            "roleRef": { "apiGroup": group, "kind": "Role", "name": user }, "subjects": [{ "kind": "User", "name": user, "apiGroup": group }] });
        for object in [role, binding] {
            let gvk = GroupVersionKind::gvk(group, "v1", object["kind"].as_str().unwrap());
            create(
                &Api::<DynamicObject>::namespaced_with(
                    self.client.clone(),
                    self.name,
                    &ApiResource::from_gvk(&gvk),
                ),
                object,
            )
            .await;
        }
    }

    fn discovery(&self) -> Discovery<Kubernetes> {
        Kubernetes::new(self.client.clone(), self.name).discovery(MetadataPolicy::Ignored)
    }
}

fn root(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../envoy-config/kubernetes")
        .join(file)
}

async fn create<K: kube::Resource + Clone + DeserializeOwned + Serialize + std::fmt::Debug>(
    api: &Api<K>,
    object: Value,
) {
    match api
        .create(
            &PostParams::default(),
            &serde_json::from_value(object).unwrap(),
        )
        .await
    {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if status.code == 409 => {} // another test created it
        Err(error) => panic!("{error}"),
    }
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

fn endpoint(pod: &str, ip: &str, conditions: &Value) -> Value {
    json!({ "addresses": [ip], "conditions": conditions, "targetRef": { "kind": "Pod", "name": pod, "uid": format!("uid-{pod}") } })
}

#[tokio::test]
async fn slices_split_moved_doubled_and_dual_stack() {
    let Some(cluster) = cluster::shared().await else {
        return;
    };
    let place = TestNamespace::new(&cluster, "slices").await;
    place.service("svc", "decode").await;
    place.service("other", "prefill").await;
    let discovery = place.discovery();
    assert!(ready(&discovery).await.is_empty());
    let is = |expected: &[&str]| {
        let expected = names(expected);
        let discovery = &discovery;
        async move { until(expected, || ready(discovery)).await }
    };
    let yes = || json!({ "ready": true });
    place
        .slice(
            "a",
            "svc",
            "IPv4",
            json!([
                endpoint("p1", "10.2.0.1", &yes()),
                endpoint("p2", "10.2.0.2", &json!({}))
            ]),
        )
        .await;
    place
        .slice(
            "x",
            "other",
            "IPv4",
            json!([endpoint("foreign", "10.2.0.9", &yes())]),
        )
        .await;
    is(&["p1", "p2"]).await;
    place
        .slice(
            "b",
            "svc",
            "IPv4",
            json!([
                endpoint("p2", "10.2.0.2", &yes()),
                endpoint("p3", "10.2.0.3", &yes())
            ]),
        )
        .await;
    is(&["p1", "p2", "p3"]).await;
    let mut events = discovery.watch("dynamo", "decode").unwrap();
    for _ in 0..3 {
        next(&mut events).await;
    }
    place
        .slice(
            "a",
            "svc",
            "IPv4",
            json!([endpoint("p1", "10.2.0.1", &yes())]),
        )
        .await; // p2 has moved
    place
        .slice(
            "c",
            "svc",
            "IPv6",
            json!([endpoint("p1", "fd00::1", &yes())]),
        )
        .await; // p1 is dual-stack
    silence(&mut events, Duration::from_secs(1)).await;
    let unserving = json!({ "ready": true, "serving": false });
    let leaving = json!({ "ready": false, "serving": true, "terminating": true });
    place
        .slice(
            "b",
            "svc",
            "IPv4",
            json!([
                endpoint("p2", "10.2.0.2", &unserving),
                endpoint("p3", "10.2.0.3", &leaving)
            ]),
        )
        .await;
    is(&["p1"]).await;
    place
        .api::<EndpointSlice>()
        .delete("a", &DeleteParams::default())
        .await
        .unwrap();
    until("[fd00::1]:8080".to_owned(), || async {
        discovery
            .list_instances("dynamo", "decode")
            .await
            .unwrap()
            .first()
            .map_or_else(String::new, |i| i.address.to_string())
    })
    .await;
    place
        .api::<Service>()
        .delete("svc", &DeleteParams::default())
        .await
        .unwrap();
    is(&[]).await;
}

#[tokio::test]
async fn an_inference_pool_is_followed_through_its_edits() {
    let Some(definitions) = cluster::definitions("inference.networking.k8s.io_inferencepools")
    else {
        return;
    };
    let Some(cluster) = cluster::shared().await else {
        return;
    };
    let place = TestNamespace::new(&cluster, "pools").await;
    cluster::define(&place.client, &definitions).await;
    let kind = ApiResource::from_gvk(&GroupVersionKind::gvk(
        "inference.networking.k8s.io",
        "v1",
        "InferencePool",
    ));
    let pools = Api::<DynamicObject>::namespaced_with(place.client.clone(), place.name, &kind);
    let discovery =
        InferencePools::new(place.client.clone(), PoolGroup::V1).discovery(MetadataPolicy::Ignored);
    let mut events = discovery.watch("pools", "llama").unwrap();
    place.pod("p0", "vllm").await;
    place.probe("p0", "10.3.0.1", true).await;
    let spec = |app: &str, ports: Value| {
        json!({ "apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool", "metadata": { "name": "llama" },
            "spec": { "selector": { "matchLabels": { "app": app } }, "targetPorts": ports } })
    };
    let apply = async |object: Value| {
        until(true, || async {
            pools
                .patch(
                    "llama",
                    &PatchParams::apply("test").force(),
                    &Patch::Apply(&object),
                )
                .await
                .is_ok()
        })
        .await;
    };
    apply(spec("vllm", json!([{ "number": 8000 }]))).await;
    assert_eq!(next(&mut events).await, "+p0@10.3.0.1:8000");
    apply(spec(
        "vllm",
        json!([{ "number": 8000 }, { "number": 8001 }]),
    ))
    .await;
    let edit = [
        next(&mut events).await,
        next(&mut events).await,
        next(&mut events).await,
    ];
    assert_eq!(
        edit,
        [
            "-p0",
            "+p0-rank-0@10.3.0.1:8000",
            "+p0-rank-1@10.3.0.1:8001"
        ]
    );
    apply(spec("nobody", json!([{ "number": 8000 }]))).await;
    assert_eq!(
        [next(&mut events).await, next(&mut events).await],
        ["-p0-rank-0", "-p0-rank-1"]
    );
    apply(spec("vllm", json!([{ "number": 8000 }]))).await;
    assert_eq!(next(&mut events).await, "+p0@10.3.0.1:8000");
    let mut open = spec("vllm", json!([{ "number": 8000 }]));
    open["spec"]["endpointPickerRef"] =
        json!({ "name": "epp", "port": { "number": 9002 }, "failureMode": "FailOpen" });
    apply(open).await;
    let followed = discovery.follow("pools", "llama").unwrap();
    until(Some(PickerFailureMode::Open), || async {
        followed
            .status()
            .borrow()
            .requirements
            .as_ref()
            .map(|asked| asked.failure_mode)
    })
    .await;
    let picker = followed
        .status()
        .borrow()
        .requirements
        .as_ref()
        .and_then(|asked| asked.picker.clone())
        .expect("a picker");
    assert_eq!(
        (&*picker.namespace, &*picker.name, picker.port),
        ("pools", "epp", Some(9002))
    );
    place.lose_node("p0", "10.3.0.1").await;
    assert_eq!(
        next(&mut events).await,
        "+p0@10.3.0.1:8000?",
        "the edit lost no pod, but its node is lost"
    );
    place.probe("p0", "10.3.0.1", false).await;
    assert_eq!(next(&mut events).await, "-p0");
}

/// Checks that the rights in `rbac.yaml` are enough, and that without these rights the error names
/// the missing right.
#[tokio::test]
async fn the_shipped_rights_are_enough_and_needed() {
    let Some(cluster) = cluster::shared().await else {
        return;
    };
    let place = TestNamespace::new(&cluster, "rights").await;
    place.service("svc", "decode").await;
    place
        .slice(
            "a",
            "svc",
            "IPv4",
            json!([endpoint("p1", "10.4.0.1", &json!({}))]),
        )
        .await;
    let limited = cluster.client("limited").await;
    let discovery = Kubernetes::new(limited.clone(), place.name).discovery(MetadataPolicy::Ignored);
    let error = discovery
        .list_instances("dynamo", "decode")
        .await
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("forbidden") && error.contains("services"),
        "{error}"
    );
    place.grant("rbac.yaml", "limited").await;
    until(true, || async {
        discovery
            .list_instances("dynamo", "decode")
            .await
            .is_ok_and(|all| all.len() == 1)
    })
    .await;
    place.pod("p1", "decode").await;
    KubernetesRegistry::new(limited.clone(), place.name, "p1")
        .register_instance("dynamo", "decode")
        .await
        .unwrap();
    // The same rights are enough for leader election, and one of two candidates leads.
    let lease = KubernetesLease::new(limited, place.name, "switchpointd");
    assert_eq!(lease.read().await, Ok(None));
    let first = lease.write("a", None).await.unwrap().unwrap();
    assert_eq!(lease.write("b", None).await, Ok(None), "it exists already");
    let renewed = lease.write("a", Some(&first)).await.unwrap().unwrap();
    assert_eq!(
        (
            renewed.version == first.version,
            renewed.transitions,
            lease.read().await
        ),
        (false, 0, Ok(Some(renewed.clone())))
    );
    assert_eq!(
        lease.write("b", Some(&first)).await,
        Ok(None),
        "it has changed since"
    );
    assert_eq!(
        lease
            .write("b", Some(&renewed))
            .await
            .unwrap()
            .unwrap()
            .transitions,
        1
    );
    // The shipped rights do not cover other Leases.
    let theirs = KubernetesLease::new(place.client.clone(), place.name, "theirs")
        .write("them", None)
        .await
        .unwrap()
        .unwrap();
    let other = KubernetesLease::new(cluster.client("limited").await, place.name, "theirs");
    let read = other.read().await.unwrap_err();
    let taken = other.write("a", Some(&theirs)).await.unwrap_err();
    assert!(
        read.contains("forbidden") && taken.contains("forbidden"),
        "{read}; {taken}"
    );
}

/// Checks that the rights in the manifest of a worker are enough to register, and that they allow
/// nothing more.
#[tokio::test]
async fn the_rights_of_a_worker_are_enough_to_register() {
    let Some(cluster) = cluster::shared().await else {
        return;
    };
    let place = TestNamespace::new(&cluster, "worker").await;
    let mut objects = cluster::objects(&root("worker.yaml"));
    let mut find = |kind: &str| {
        objects.remove(
            objects
                .iter()
                .position(|object| object["kind"] == kind)
                .unwrap(),
        )
    };
    let mut service = find("Service");
    let deployment = find("Deployment");
    service["metadata"]["namespace"] = place.name.into();
    create(&place.api::<Service>(), service).await;
    let labels = deployment["spec"]["template"]["metadata"]["labels"].clone();
    let container = json!({ "name": "c", "image": "i" });
    let pod = json!({ "metadata": { "name": "llama-0", "labels": labels }, "spec": { "nodeName": "node-1", "containers": [container] } });
    create(&place.api::<Pod>(), pod).await;

    // These are the arguments of `register` in the manifest.
    let arguments = deployment["spec"]["template"]["spec"]["initContainers"][0]["args"]
        .as_array()
        .unwrap()
        .clone();
    let argument = |name: &str| {
        arguments
            .iter()
            .filter_map(Value::as_str)
            .find_map(|a| a.strip_prefix(name))
            .unwrap()
    };
    let namespace = argument("--namespace=");
    let component = argument("--component=");
    let registry = KubernetesRegistry::new(cluster.client("worker").await, place.name, "llama-0");
    let refused = registry
        .register_instance(namespace, component)
        .await
        .unwrap_err()
        .to_string();
    assert!(refused.contains("forbidden"), "{refused}");
    place.grant("worker.yaml", "worker").await;
    until(true, || async {
        registry
            .register_instance(namespace, component)
            .await
            .is_ok()
    })
    .await;
    let watched = Api::<Pod>::namespaced(cluster.client("worker").await, place.name)
        .list(&ListParams::default())
        .await;
    assert!(watched.is_err(), "it may read only its own pod");
}

/// Checks the set of instances when the API server is killed and started again. Then etcd is
/// restored from an old copy, so that resource versions go backwards.
#[tokio::test]
async fn no_outage_empties_the_set_or_keeps_departed_instances() {
    let Some(cluster) = TestCluster::start().await else {
        return;
    };
    let place = TestNamespace::new(&cluster, "outage").await;
    place.service("svc", "decode").await;
    let all = |n: u8| {
        (1..=n)
            .map(|i| endpoint(&format!("p{i}"), &format!("10.5.0.{i}"), &json!({})))
            .collect::<Vec<_>>()
    };
    place.slice("a", "svc", "IPv4", json!(all(3))).await;
    let discovery = place.discovery();
    until(names(&["p1", "p2", "p3"]), || ready(&discovery)).await;
    let followed = discovery.follow("dynamo", "decode").unwrap();
    let failing = || async { followed.status().borrow().error.is_some() };

    // The test copies the current state for later.
    cluster.apiserver.lock().unwrap().kill();
    cluster.etcd.lock().unwrap().kill();
    let data = cluster.etcd_data();
    let copy = cluster.etcd_data().with_extension("before");
    cluster::copy_folder(&data, &copy);
    until(true, failing).await;
    assert_eq!(
        ready(&discovery).await,
        names(&["p1", "p2", "p3"]),
        "the last known set, as long as the outage lasts"
    );
    tokio::time::sleep(Duration::from_secs(2)).await;
    cluster.etcd.lock().unwrap().start();
    cluster.apiserver.lock().unwrap().start();
    cluster.wait_ready().await;
    place.slice("a", "svc", "IPv4", json!(all(2))).await;
    until(names(&["p1", "p2"]), || ready(&discovery)).await;
    until(false, failing).await;
    for round in 0..30 {
        place
            .slice("noise", "other", "IPv4", json!(all(round % 5)))
            .await; // The copy does not have these versions.
    }
    place.slice("a", "svc", "IPv4", json!(all(5))).await;
    until(names(&["p1", "p2", "p3", "p4", "p5"]), || ready(&discovery)).await;

    cluster.apiserver.lock().unwrap().kill();
    cluster.etcd.lock().unwrap().kill();
    std::fs::remove_dir_all(&data).unwrap();
    std::fs::rename(&copy, &data).unwrap();
    cluster.etcd.lock().unwrap().start();
    cluster.apiserver.lock().unwrap().start();
    cluster.wait_ready().await;
    until(names(&["p1", "p2", "p3"]), || ready(&discovery)).await;
    place.slice("a", "svc", "IPv4", json!(all(1))).await;
    until(names(&["p1"]), || ready(&discovery)).await;
}

/// Tests with the real controllers. `make e2e-long` builds the controllers and runs these tests.
mod slow {
    use super::*;

    #[tokio::test]
    async fn a_pod_enters_and_leaves_by_its_probe_through_the_real_controller() {
        let Some(cluster) = cluster::shared_with_controllers().await else {
            return;
        };
        let place = TestNamespace::new(&cluster, "flow").await;
        create(
            &Api::<Node>::all(place.client.clone()),
            json!({ "metadata": { "name": "node-1" } }),
        )
        .await;
        place.pod("decode-0", "decode").await;
        let registry = KubernetesRegistry::new(place.client.clone(), place.name, "decode-0");
        let refused = registry
            .register_instance("dynamo", "decode")
            .await
            .unwrap_err()
            .to_string();
        assert!(refused.contains("no Service"), "{refused}");
        place.service("svc", "decode").await;
        let refused = registry
            .register_instance("dynamo", "prefill")
            .await
            .unwrap_err()
            .to_string();
        assert!(
            refused.contains("nvidia.com/dynamo-component=prefill"),
            "{refused}"
        );
        let worker = registry
            .register_instance("dynamo", "decode")
            .await
            .unwrap();
        assert_eq!(worker.instance_id(), "decode-0");

        let discovery = place.discovery();
        let mut events = discovery.watch("dynamo", "decode").unwrap();
        place.probe("decode-0", "10.1.0.1", false).await;
        silence(&mut events, Duration::from_secs(2)).await;
        place.probe("decode-0", "10.1.0.1", true).await;
        assert_eq!(next(&mut events).await, "+decode-0@10.1.0.1:8080");
        let [instance] = discovery
            .list_instances("dynamo", "decode")
            .await
            .unwrap()
            .try_into()
            .unwrap();
        let uid = place
            .api::<Pod>()
            .get("decode-0")
            .await
            .unwrap()
            .metadata
            .uid
            .unwrap();
        assert_eq!(
            (instance.generation.as_str(), instance.namespace.as_str()),
            (uid.as_str(), "flow")
        );
        assert!(
            instance.labels.contains(&(
                "nvidia.com/dynamo-component".to_owned(),
                "decode".to_owned()
            )),
            "mirrored from the Service"
        );
        place.probe("decode-0", "10.1.0.1", false).await;
        assert_eq!(next(&mut events).await, "-decode-0");
        place.probe("decode-0", "10.1.0.1", true).await;
        assert_eq!(next(&mut events).await, "+decode-0@10.1.0.1:8080");
        place
            .api::<Pod>()
            .delete("decode-0", &DeleteParams::default().grace_period(0))
            .await
            .unwrap();
        assert_eq!(next(&mut events).await, "-decode-0");
        place.pod("decode-0", "decode").await;
        place.probe("decode-0", "10.1.0.1", true).await;
        assert_eq!(next(&mut events).await, "+decode-0@10.1.0.1:8080");
        let [reborn] = discovery
            .list_instances("dynamo", "decode")
            .await
            .unwrap()
            .try_into()
            .unwrap();
        assert_ne!(
            reborn.generation, instance.generation,
            "the same name and address, another generation"
        );
    }

    /// Checks that the conditions of the pod show the reason why the pod is not ready: its own
    /// probe, or its node.
    #[tokio::test]
    async fn a_pod_whose_node_is_lost_is_unconfirmed_until_its_own_probe_fails_or_it_ends() {
        let Some(cluster) = cluster::shared_with_controllers().await else {
            return;
        };
        let place = TestNamespace::new(&cluster, "nodes").await;
        create(
            &Api::<Node>::all(place.client.clone()),
            json!({ "metadata": { "name": "node-1" } }),
        )
        .await;
        place.service("svc", "decode").await;
        let discovery = place.discovery();
        let mut events = discovery.watch("dynamo", "decode").unwrap();
        let followed = discovery.follow("dynamo", "decode").unwrap();
        place.pod("decode-0", "decode").await;
        place.probe("decode-0", "10.7.0.1", true).await;
        assert_eq!(next(&mut events).await, "+decode-0@10.7.0.1:8080");
        place.lose_node("decode-0", "10.7.0.1").await;
        assert_eq!(next(&mut events).await, "+decode-0@10.7.0.1:8080?");
        let state = followed
            .seen()
            .into_iter()
            .find(|seen| &*seen.id == "decode-0")
            .map(|seen| seen.state);
        assert!(
            matches!(&state, Some(InstanceState::Unconfirmed(why)) if why.contains("node")),
            "{state:?}"
        );
        place.probe("decode-0", "10.7.0.1", true).await;
        assert_eq!(
            next(&mut events).await,
            "+decode-0@10.7.0.1:8080",
            "its kubelet is back"
        );
        place.lose_node("decode-0", "10.7.0.1").await;
        assert_eq!(next(&mut events).await, "+decode-0@10.7.0.1:8080?");
        place.probe("decode-0", "10.7.0.1", false).await;
        assert_eq!(next(&mut events).await, "-decode-0", "its own probe fails");
        place.probe("decode-0", "10.7.0.1", true).await;
        assert_eq!(next(&mut events).await, "+decode-0@10.7.0.1:8080");
        place.lose_node("decode-0", "10.7.0.1").await;
        assert_eq!(next(&mut events).await, "+decode-0@10.7.0.1:8080?");
        // No kubelet ends the pod here, so the pod stays terminating.
        place
            .api::<Pod>()
            .delete("decode-0", &DeleteParams::default().grace_period(60))
            .await
            .unwrap();
        assert_eq!(next(&mut events).await, "-decode-0");
    }

    /// Checks that unready pods get no traffic. With `publishNotReadyAddresses` the controller
    /// reports `ready: true` for every pod; only `serving` and `terminating` show which pods can
    /// serve.
    #[tokio::test]
    async fn a_service_that_publishes_unready_pods_does_not_get_them_traffic() {
        let Some(cluster) = cluster::shared_with_controllers().await else {
            return;
        };
        let place = TestNamespace::new(&cluster, "published").await;
        create(
            &Api::<Node>::all(place.client.clone()),
            json!({ "metadata": { "name": "node-1" } }),
        )
        .await;
        place.service("svc", "decode").await;
        let publish = Patch::Merge(json!({ "spec": { "publishNotReadyAddresses": true } }));
        place
            .api::<Service>()
            .patch("svc", &PatchParams::default(), &publish)
            .await
            .unwrap();
        // The conditions are those that the real controller reports for the only pod.
        let said = || async {
            let slices = place
                .api::<EndpointSlice>()
                .list(&ListParams::default())
                .await
                .unwrap();
            let conditions = slices
                .items
                .iter()
                .flat_map(|slice| slice.endpoints.iter().flatten())
                .next()?
                .conditions
                .clone()?;
            Some((conditions.ready, conditions.serving, conditions.terminating))
        };
        let discovery = place.discovery();
        let mut events = discovery.watch("dynamo", "decode").unwrap();
        let followed = discovery.follow("dynamo", "decode").unwrap();
        let state = || async {
            followed
                .seen()
                .into_iter()
                .find(|seen| &*seen.id == "decode-0")
                .map(|seen| seen.state)
        };
        let why = |why: &str| Some(InstanceState::NotReady(why.to_owned()));
        place.pod("decode-0", "decode").await;
        place.probe("decode-0", "10.6.0.1", false).await;
        until(Some((Some(true), Some(false), Some(false))), said).await;
        until(why("it is not serving, though published as ready"), state).await;
        place.probe("decode-0", "10.6.0.1", true).await;
        assert_eq!(
            next(&mut events).await,
            "+decode-0@10.6.0.1:8080",
            "the first event"
        );
        place.probe("decode-0", "10.6.0.1", false).await;
        assert_eq!(next(&mut events).await, "-decode-0");
        place.probe("decode-0", "10.6.0.1", true).await;
        assert_eq!(next(&mut events).await, "+decode-0@10.6.0.1:8080");
        // No kubelet ends the pod here, so the pod stays terminating, ready and serving.
        place
            .api::<Pod>()
            .delete("decode-0", &DeleteParams::default().grace_period(60))
            .await
            .unwrap();
        until(Some((Some(true), Some(true), Some(true))), said).await;
        assert_eq!(next(&mut events).await, "-decode-0");
        assert_eq!(state().await, why("it is terminating"));
    }

    /// Returns an instance's engine, its role, and the value of its label `of`.
    async fn labels(discovery: &Discovery<Kubernetes>, name: &str) -> Option<[String; 3]> {
        let all = discovery
            .list_instances("dynamo", "decode")
            .await
            .unwrap_or_default();
        let instance = all.iter().find(|instance| instance.name == name)?;
        let value = |key: &str| {
            instance
                .labels
                .iter()
                .find(|(k, _)| k == key)
                .map_or("", |(_, value)| value)
                .to_owned()
        };
        Some([
            value("llm-d.ai/engine-type"),
            value("llm-d.ai/role"),
            value("of"),
        ])
    }

    #[tokio::test]
    async fn labels_of_a_pod_are_read_and_go_before_those_of_its_service() {
        let Some(cluster) = cluster::shared_with_controllers().await else {
            return;
        };
        let place = TestNamespace::new(&cluster, "labels").await;
        create(
            &Api::<Node>::all(place.client.clone()),
            json!({ "metadata": { "name": "node-1" } }),
        )
        .await;
        place.service("svc", "decode").await;
        let all = Patch::Merge(
            json!({ "metadata": { "labels": { "llm-d.ai/engine-type": "vllm", "of": "service" } } }),
        );
        place
            .api::<Service>()
            .patch("svc", &PatchParams::default(), &all)
            .await
            .unwrap();
        let label = async |pod: &str, labels: Value| {
            let patch = Patch::Merge(json!({ "metadata": { "labels": labels } }));
            place
                .api::<Pod>()
                .patch(pod, &PatchParams::default(), &patch)
                .await
                .unwrap();
        };
        place.pod("p1", "decode").await;
        place.pod("p2", "decode").await;
        label(
            "p2",
            json!({ "llm-d.ai/engine-type": "sglang", "llm-d.ai/role": "prefill" }),
        )
        .await;
        place.probe("p1", "10.7.0.1", true).await;
        place.probe("p2", "10.7.0.2", true).await;
        let discovery = place.discovery();
        let is = |values: [&str; 3]| Some(values.map(str::to_owned));
        until(is(["sglang", "prefill", "service"]), || {
            labels(&discovery, "p2")
        })
        .await;
        until(is(["vllm", "", "service"]), || labels(&discovery, "p1")).await;
        label("p1", json!({ "llm-d.ai/role": "decode" })).await;
        until(is(["vllm", "decode", "service"]), || {
            labels(&discovery, "p1")
        })
        .await;
        label("p2", json!({ "llm-d.ai/engine-type": null })).await;
        until(is(["vllm", "prefill", "service"]), || {
            labels(&discovery, "p2")
        })
        .await;

        // Without the right to list pods, discovery reports the endpoints and warns that the labels
        // of pods are missing.
        place
            .grant_rules(
                "slices",
                &json!([{ "apiGroups": ["", "discovery.k8s.io"], "resources": ["services", "endpointslices"], "verbs": ["list", "watch"] }]),
            )
            .await;
        let blind = Kubernetes::new(cluster.client("slices").await, place.name)
            .discovery(MetadataPolicy::Ignored);
        until(is(["vllm", "", "service"]), || labels(&blind, "p2")).await;
        let warning = blind
            .follow("dynamo", "decode")
            .unwrap()
            .status()
            .borrow()
            .warning
            .clone()
            .unwrap_or_default();
        assert!(
            warning.contains("labels of pods") && warning.contains("forbidden"),
            "{warning}"
        );
        assert_eq!(
            discovery
                .follow("dynamo", "decode")
                .unwrap()
                .status()
                .borrow()
                .warning,
            None
        );
    }
}
