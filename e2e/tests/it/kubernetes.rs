//! The flow of the llm-d proposal on a real kube-apiserver with the real EndpointSlice controller:
//! a worker registers, publishes metadata and becomes ready; the slice adds it, and requests are
//! routed to it. When it is not ready, it is removed and gets no requests. A Lease decides which of
//! two daemons leads, and custom resources configure models and rewrites.
//!
//! The API server refuses loopback addresses in slices, so pods need other addresses. Each test
//! therefore runs itself again in its own network namespace, which has no connection to the
//! outside. The test plays the kubelet: it calls the readiness probe and writes the pod's
//! condition.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Node, Pod, Service};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use kube::{Api, Client};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use testbed::model_server::{self, ModelServer};
use testbed::stack::Stack;
use testbed::{Result, client, wait_for};

use crate::cluster::{self, TestCluster};
use crate::discovered::{LIMIT, LeaderEnd, RegisteredWorker, asked, fail_over, fed_by, until};

/// The environment variable that is set in the process that runs in a separate network.
const INSIDE: &str = "SWITCHPOINT_OWN_NETWORK";

const NAMESPACE: &str = "flow";

/// Runs the named test again in a network that has the addresses of three pods. Returns `None` in
/// that network, and `Ok` if the machine forbids new networks or lacks the tools.
pub(crate) fn outside(name: &str) -> Option<Result<()>> {
    if std::env::var_os(INSIDE).is_some() {
        return None;
    }
    let controllers = name
        .contains("::slow::")
        .then_some("kube-controller-manager");
    if ["kube-apiserver", "etcd"]
        .into_iter()
        .chain(controllers)
        .any(|tool| cluster::tool(tool).is_none())
    {
        return Some(Ok(()));
    }
    let allowed = Command::new("unshare")
        .args(["-Urn", "ip", "link", "set", "lo", "up"])
        .output()
        .is_ok_and(|tried| tried.status.success());
    if !allowed {
        cluster::skipped("this machine does not allow a network namespace (unshare, ip)");
        return Some(Ok(()));
    }
    let run = || -> Result<()> {
        let folder = tempfile::tempdir()?;
        let addresses: String = (1..=3)
            .map(|pod| format!("ip addr add 10.99.0.{pod}/32 dev lo && "))
            .collect();
        // An API server needs a default route, although it never uses it.
        let script = format!(
            "ip link set lo up && {addresses} ip route add default dev lo && exec \"$0\" --exact {name} --nocapture"
        );
        let mut command = Command::new("unshare");
        command
            .args(["-Urn", "sh", "-c", &script])
            .arg(std::env::current_exe()?);
        let status = command
            .env(INSIDE, "1")
            .env("KUBECONFIG", folder.path().join("kubeconfig"))
            .status()?;
        if status.success() {
            Ok(())
        } else {
            Err(format!("{name} failed inside its network: {status}").into())
        }
    };
    Some(run())
}

/// A cluster that only this test uses, with a namespace. The kubeconfig of the cluster is where our
/// programs look for a kubeconfig.
pub(crate) struct KubernetesPlace {
    cluster: TestCluster,
    pub(crate) client: Client,
}

impl KubernetesPlace {
    pub(crate) async fn start() -> Result<Self> {
        Self::in_cluster(TestCluster::start().await.ok_or("no cluster")?).await
    }

    async fn start_with_controllers() -> Result<Self> {
        Self::in_cluster(
            TestCluster::start_with_controllers()
                .await
                .ok_or("no cluster")?,
        )
        .await
    }

    async fn in_cluster(cluster: TestCluster) -> Result<Self> {
        let kubeconfig =
            PathBuf::from(std::env::var_os("KUBECONFIG").ok_or("no place for the kubeconfig")?);
        std::fs::copy(cluster.kubeconfig(), kubeconfig)?;
        let place = Self {
            client: cluster.client("tok").await,
            cluster,
        };
        place
            .create(
                &Api::<Namespace>::all(place.client.clone()),
                json!({"metadata": {"name": NAMESPACE}}),
            )
            .await?;
        place
            .create(
                &Api::<Node>::all(place.client.clone()),
                json!({"metadata": {"name": "node-1"}}),
            )
            .await?;
        Ok(place)
    }

    fn api<K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>>(
        &self,
    ) -> Api<K> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    async fn create<K>(&self, api: &Api<K>, object: Value) -> Result<()>
    where
        K: kube::Resource + Clone + DeserializeOwned + Serialize + std::fmt::Debug,
    {
        api.create(&PostParams::default(), &serde_json::from_value(object)?)
            .await?;
        Ok(())
    }

    async fn service(&self, component: &str) -> Result<()> {
        let selector = json!({"nvidia.com/dynamo-namespace": "dynamo", "nvidia.com/dynamo-component": component});
        // Pods serve their metadata at this port; requests are sent to the port that the metadata
        // names.
        let spec = json!({"selector": selector, "ports": [{"name": "http", "port": 8080, "targetPort": 8080}]});
        self.create(
            &self.api::<Service>(),
            json!({"metadata": {"name": format!("dynamo-{component}-service")}, "spec": spec}),
        )
        .await
    }

    /// Sets the status of a pod as a kubelet does when the readiness probe succeeds.
    pub(crate) async fn ready_in(&self, namespace: &str, pod: &str, ip: &str) -> Result<()> {
        let status = json!({"status": {"podIP": ip, "podIPs": [{"ip": ip}], "phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
        let pods = Api::<Pod>::namespaced(self.client.clone(), namespace);
        pods.patch_status(pod, &PatchParams::default(), &Patch::Merge(status))
            .await?;
        Ok(())
    }

    /// Creates a pod with its sidecar at a separate address, and starts a kubelet that calls the
    /// pod's readiness probe.
    async fn pod(&self, at: u8, component: &str, metadata: &Value) -> Result<RegisteredWorker> {
        let name = format!("{component}-{at}");
        let ip = format!("10.99.0.{at}");
        let labels = json!({"nvidia.com/dynamo-namespace": "dynamo", "nvidia.com/dynamo-component": component});
        let spec = json!({"nodeName": "node-1", "containers": [{"name": "c", "image": "i"}]});
        self.create(
            &self.api::<Pod>(),
            json!({"metadata": {"name": name, "labels": labels}, "spec": spec}),
        )
        .await?;
        let listen = format!("{ip}:8080");
        let arguments = ["--kubernetes", NAMESPACE, "--listen", &listen].map(str::to_owned);
        let worker = RegisteredWorker::register(&arguments, component, &name, metadata).await?;
        tokio::spawn(kubelet(self.api::<Pod>(), name, ip));
        Ok(worker)
    }
}

/// Plays the part of a kubelet that the tests need.
async fn kubelet(pods: Api<Pod>, name: String, ip: String) {
    let mut before = None;
    loop {
        let probe = format!("{ip}:8080").parse::<SocketAddr>();
        let ready = match probe {
            Ok(probe) => client::get(probe, "/health")
                .await
                .is_ok_and(|reply| reply.status == 200),
            Err(_) => false,
        };
        if before != Some(ready) {
            let condition =
                json!({"type": "Ready", "status": if ready { "True" } else { "False" }});
            let status = json!({"status": {"podIP": ip, "podIPs": [{"ip": ip}], "phase": "Running", "conditions": [condition]}});
            if pods
                .patch_status(&name, &PatchParams::default(), &Patch::Merge(status))
                .await
                .is_ok()
            {
                before = Some(ready);
            }
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn server(ip: &str, model: &str) -> Result<ModelServer> {
    server_at(&format!("{ip}:0"), model)
}

pub(crate) fn server_at(listen: &str, model: &str) -> Result<ModelServer> {
    let listen = listen.parse()?;
    let options = model_server::ModelServerOptions {
        listen,
        models: vec![model.to_owned(), "tuned".to_owned()],
        speed: 0.0,
        ..Default::default()
    };
    Ok(ModelServer::start(options)?)
}

fn says(server: &ModelServer, spelling: &str, model: &str) -> Value {
    json!({spelling: {"name": model, "type": "Completions", "runtime_config": {"total_kv_blocks": 24064, "max_num_seqs": 256}},
        "Transport": {"port": server.addr().port()}, "MDC": {}})
}

fn source() -> Value {
    let components =
        json!([{"name": "decode", "role": "decode"}, {"name": "prefill", "role": "prefill"}]);
    json!({"kubernetes": {"namespace": "dynamo", "kubeNamespace": NAMESPACE, "components": components}, "objectsKubernetes": NAMESPACE})
}

impl KubernetesPlace {
    /// Defines a custom kind that allows any fields.
    async fn define(&self, kind: &GroupVersionKind, plural: &str) -> Result<()> {
        let schema = json!({"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}});
        let names =
            json!({"plural": plural, "singular": kind.kind.to_lowercase(), "kind": kind.kind});
        let version =
            json!({"name": kind.version, "served": true, "storage": true, "schema": schema});
        let definition = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": format!("{plural}.{}", kind.group)},
            "spec": {"group": kind.group, "scope": "Namespaced", "names": names, "versions": [version]}});
        let definitions = ApiResource::from_gvk(&GroupVersionKind::gvk(
            "apiextensions.k8s.io",
            "v1",
            "CustomResourceDefinition",
        ));
        self.create(
            &Api::<DynamicObject>::all_with(self.client.clone(), &definitions),
            definition,
        )
        .await
    }
}

/// Tests with the real controllers. `make e2e-long` builds the controllers and runs these tests.
mod slow {
    use super::*;

    #[tokio::test]
    async fn from_registration_to_request() -> Result<()> {
        if let Some(done) = outside("kubernetes::slow::from_registration_to_request") {
            return done;
        }
        let place = KubernetesPlace::start_with_controllers().await?;
        let folder = tempfile::tempdir()?;
        place.service("decode").await?;
        place.service("prefill").await?;
        let pools = fed_by(folder.path(), &source())?;
        let mut stack = Stack::builder()
            .daemon_arguments(&["--pools", &pools])
            .start()
            .await?;
        assert_eq!(
            asked(&stack, "llama").await?.0,
            503,
            "no worker is registered"
        );
        let llama = server("10.99.0.1", "llama")?;
        let qwen = server("10.99.0.2", "qwen")?;
        let first = place
            .pod(1, "decode", &says(&llama, "Model", "llama"))
            .await?;
        until(&stack, "llama", 200, &llama.addr().to_string()).await?;
        let _second = place
            .pod(2, "decode", &says(&qwen, "model", "qwen"))
            .await?;
        until(&stack, "qwen", 200, &qwen.addr().to_string()).await?;
        for _ in 0..20 {
            assert_eq!(
                asked(&stack, "llama").await?,
                (200, llama.addr().to_string())
            );
            assert_eq!(asked(&stack, "qwen").await?, (200, qwen.addr().to_string()));
        }
        let rows = stack.daemon()?.endpoints().await?;
        let row = rows
            .iter()
            .find(|row| row["name"] == "decode-1")
            .ok_or("no instance with the pod's name")?;
        assert_eq!(
            row["address"],
            llama.addr().to_string(),
            "requests go to the port that the metadata names"
        );

        // The worker is not ready: its pod is removed and gets no request. Then the worker is ready
        // again.
        first
            .healthy
            .store(false, std::sync::atomic::Ordering::Relaxed);
        until(&stack, "llama", 404, "").await?;
        for _ in 0..5 {
            assert_eq!(
                asked(&stack, "llama").await?.0,
                404,
                "no request reaches the pod"
            );
        }
        first
            .healthy
            .store(true, std::sync::atomic::Ordering::Relaxed);
        until(&stack, "llama", 200, &llama.addr().to_string()).await?;

        // A prefill worker is discovered the same way, with its role.
        let other = server("10.99.0.3", "llama")?;
        let _third = place
            .pod(3, "prefill", &says(&other, "Model", "llama"))
            .await?;
        let role = || async {
            let rows = stack
                .daemon
                .as_ref()?
                .admin("/debug/instances")
                .await
                .ok()?
                .json()
                .ok()?;
            let found = rows["instances"]
                .as_array()?
                .iter()
                .find(|row| row["name"] == "prefill-3" && row["state"] == "ready")?
                .clone();
            (found["component"] == "prefill").then_some(())
        };
        wait_for(LIMIT, "the prefill worker", role).await?;

        // While the API server is down, nothing changes except the age of the data. A pod that is
        // deleted afterwards leaves the pool.
        place
            .cluster
            .apiserver
            .lock()
            .map_err(|_| "poisoned")?
            .kill();
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(asked(&stack, "qwen").await?, (200, qwen.addr().to_string()));
        assert_eq!(
            stack.daemon()?.admin("/readyz").await?.status,
            200,
            "the daemon stays ready"
        );
        // The daemon restarts without the API server, and starts from its snapshot on disk.
        stack.daemon()?.process().kill()?;
        stack.daemon()?.start_again()?;
        let again = || async {
            (stack.daemon.as_ref()?.admin("/readyz").await.ok()?.status == 200).then_some(())
        };
        wait_for(LIMIT, "the daemon to be ready by its snapshot", again).await?;
        assert_eq!(asked(&stack, "qwen").await?, (200, qwen.addr().to_string()));
        place
            .cluster
            .apiserver
            .lock()
            .map_err(|_| "poisoned")?
            .start();
        place.cluster.wait_ready().await;
        place
            .api::<Pod>()
            .delete("decode-2", &DeleteParams::default().grace_period(0))
            .await?;
        until(&stack, "qwen", 404, "").await
    }

    #[tokio::test]
    async fn daemons_fail_over_by_a_lease_and_objects_come_from_the_api() -> Result<()> {
        if let Some(done) =
            outside("kubernetes::slow::daemons_fail_over_by_a_lease_and_objects_come_from_the_api")
        {
            return done;
        }
        let place = KubernetesPlace::start_with_controllers().await?;
        place.service("decode").await?;
        place.service("prefill").await?;
        let demo = server("10.99.0.1", "demo")?;
        let _worker = place
            .pod(1, "decode", &says(&demo, "Model", "demo"))
            .await?;
        let ready = || async {
            let pod = place.api::<Pod>().get("decode-1").await.ok()?;
            pod.status?
                .conditions?
                .iter()
                .any(|c| c.type_ == "Ready" && c.status == "True")
                .then_some(())
        };
        wait_for(LIMIT, "the pod to be ready", ready).await?;
        fail_over(
            &["--lease-kubernetes", "flow/switchpointd"],
            &source(),
            LeaderEnd::Killed,
        )
        .await?;
        let leases = Api::<k8s_openapi::api::coordination::v1::Lease>::namespaced(
            place.client.clone(),
            NAMESPACE,
        );
        let lease = leases
            .get("switchpointd")
            .await?
            .spec
            .ok_or("a lease has a spec")?;
        assert_eq!(
            (
                lease.lease_duration_seconds,
                lease.lease_transitions >= Some(2)
            ),
            (Some(15), true),
            "{lease:?}"
        );

        // A rewrite is created as a custom resource. The pods also serve `tuned`, but their
        // metadata does not name this model.
        let folder = tempfile::tempdir()?;
        let pools = fed_by(folder.path(), &source())?;
        let stack = Stack::builder()
            .daemon_arguments(&["--pools", &pools])
            .start()
            .await?;
        until(&stack, "demo", 200, &demo.addr().to_string()).await?;
        assert_eq!(asked(&stack, "alias").await?.0, 404);
        let kind = GroupVersionKind::gvk("llm-d.ai", "v1alpha2", "InferenceModelRewrite");
        let resource = ApiResource::from_gvk_with_plural(&kind, "inferencemodelrewrites");
        place.define(&kind, "inferencemodelrewrites").await?;
        let rewrites =
            Api::<DynamicObject>::namespaced_with(place.client.clone(), NAMESPACE, &resource);
        let rewrite = json!({"apiVersion": "llm-d.ai/v1alpha2", "kind": "InferenceModelRewrite", "metadata": {"name": "alias"}, "spec": {
            "poolRef": {"name": "default"}, "rules": [{"matches": [{"model": {"value": "alias"}}], "targets": [{"modelRewrite": "demo", "weight": 1}]}]}});
        let made = || async { place.create(&rewrites, rewrite.clone()).await.ok() };
        wait_for(LIMIT, "the kind to be served", made).await?;
        until(&stack, "alias", 200, &demo.addr().to_string()).await?;
        rewrites.delete("alias", &DeleteParams::default()).await?;
        until(&stack, "alias", 404, "").await
    }
}
