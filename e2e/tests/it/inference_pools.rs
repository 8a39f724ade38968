//! InferencePools with their published CRDs on a real kube-apiserver, through a real Envoy: the
//! pool of
//! `inference-pool.yaml` with the objects that configure its requests, and several pools behind one
//! ext_proc port. The daemon finds the pool of a request as the gateways expect. Each test has its
//! own network, as in `kubernetes.rs`.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use testbed::model_server::{MetricOverrides, ModelServer};
use testbed::stack::{PickerMode, Stack};
use testbed::{Result, wait_for};

use crate::cluster;
use crate::discovered::{LIMIT, asked};
use crate::echo;
use crate::kubernetes::{KubernetesPlace, outside, server_at};

/// The namespace of the shipped file.
const NAMESPACE: &str = "inference";

const OBJECTIVE: &str = "x-llm-d-inference-objective";

fn shipped(file: &str) -> Vec<Value> {
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../envoy-config/kubernetes")
        .join(file);
    cluster::objects(&path)
}

/// Returns the object of a kind in the shipped file.
fn shipped_object(kind: &str) -> Result<Value> {
    Ok(shipped("inference-pool.yaml")
        .into_iter()
        .find(|object| object["kind"] == kind)
        .ok_or("no such object")?)
}

/// Writes the pools of the shipped ConfigMap to a file. The only pool is renamed to `name`, which
/// the shipped Envoy files use.
fn shipped_pools(folder: &Path, name: &str) -> Result<String> {
    let map = shipped_object("ConfigMap")?;
    let mut pools: Value =
        serde_saphyr::from_str(map["data"]["pools.yaml"].as_str().ok_or("no pools")?)?;
    pools["pools"][0]["name"] = json!(name);
    let file = folder.join("pools.json");
    std::fs::write(&file, pools.to_string())?;
    Ok(file.display().to_string())
}

async fn make(place: &KubernetesPlace, path: &str, object: &Value) -> Result<()> {
    let made = cluster::post(&place.client, path, object).await;
    made.map(drop)
        .map_err(|error| format!("{path}: {error}").into())
}

fn collection(group: &str, version: &str, plural: &str) -> String {
    format!("/apis/{group}/{version}/namespaces/{NAMESPACE}/{plural}")
}

/// Creates a ready pod with this label whose engine listens at the target port of the pools.
async fn pod(place: &KubernetesPlace, at: u8, app: &str, model: &str) -> Result<ModelServer> {
    let name = format!("{app}-{at}");
    let ip = format!("10.99.0.{at}");
    let server = server_at(&format!("{ip}:8000"), model)?;
    let spec = json!({"nodeName": "node-1", "containers": [{"name": "c", "image": "i"}]});
    let object = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": app}}, "spec": spec});
    make(
        place,
        &format!("/api/v1/namespaces/{NAMESPACE}/pods"),
        &object,
    )
    .await?;
    place.ready_in(NAMESPACE, &name, &ip).await?;
    Ok(server)
}

async fn start() -> Result<Option<KubernetesPlace>> {
    let Some(definitions) = cluster::definitions("gateway-api-inference-extension") else {
        return Ok(None);
    };
    let place = KubernetesPlace::start().await?;
    cluster::define(&place.client, &definitions).await;
    make(&place, "/api/v1/namespaces", &shipped_object("Namespace")?).await?;
    Ok(Some(place))
}

const V1: (&str, &str, &str) = ("inference.networking.k8s.io", "v1", "inferencepools");

async fn make_pool(place: &KubernetesPlace, change: impl FnOnce(&mut Value)) -> Result<()> {
    let mut pool = shipped_object("InferencePool")?;
    change(&mut pool);
    make(place, &collection(V1.0, V1.1, V1.2), &pool).await
}

/// Creates an object of the Inference Extension that names a pool.
async fn make_object(
    place: &KubernetesPlace,
    kind: &str,
    name: &str,
    pool: &str,
    mut spec: Value,
) -> Result<()> {
    let group = "inference.networking.x-k8s.io";
    spec["poolRef"] = json!({"name": pool});
    if kind != "InferenceModel" {
        spec["poolRef"]["group"] = json!(V1.0);
    }
    let object = json!({"apiVersion": format!("{group}/v1alpha2"), "kind": kind, "metadata": {"name": name}, "spec": spec});
    make(
        place,
        &collection(group, "v1alpha2", &format!("{}s", kind.to_lowercase())),
        &object,
    )
    .await
}

async fn chat_as(stack: &Stack, objective: &str, model: &str) -> Result<u16> {
    let body = json!({"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]});
    Ok(stack
        .send(echo::post(
            "/v1/chat/completions",
            &[(OBJECTIVE, objective)],
            body.to_string(),
        )?)
        .await?
        .status)
}

async fn its_objects_mean_what_they_say(front: PickerMode, servers: &[ModelServer]) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let pools = shipped_pools(folder.path(), "default")?;
    let builder = Stack::builder()
        .front(front)
        .daemon_arguments(&["--pools", &pools]);
    let builder = match front {
        PickerMode::Filter | PickerMode::Native => {
            builder.picker(json!({"objective_header": "trust"}))
        }
        PickerMode::ExtProc => builder.daemon_arguments(&["--ext-proc-objective-header", "trust"]),
    };
    let mut stack = builder.shared_envoy().start().await?;
    let addresses: Vec<String> = servers
        .iter()
        .map(|server| server.addr().to_string())
        .collect();
    let served = || async { (asked(&stack, "demo").await.ok()?.0 == 200).then_some(()) };
    wait_for(LIMIT, "the pods of the pool to be known", served).await?;
    assert!(
        addresses.contains(&asked(&stack, "demo").await?.1),
        "{front:?}"
    );
    // The picker itself answers: no server header is set.
    let unknown = || async {
        (asked(&stack, "unheard-of").await.ok()? == (404, String::new())).then_some(())
    };
    wait_for(
        LIMIT,
        "a model that the pool does not list to be 404",
        unknown,
    )
    .await?;

    servers.iter().for_each(|server| {
        server.override_metrics(MetricOverrides::from([(
            "num_requests_waiting".to_owned(),
            "50".to_owned(),
        )]));
    });
    let shed = || async { (chat_as(&stack, "batch", "demo").await.ok()? == 429).then_some(()) };
    wait_for(LIMIT, "requests of a low priority to be shed", shed).await?;
    assert_eq!(chat_as(&stack, "urgent", "demo").await?, 200, "{front:?}");
    servers
        .iter()
        .for_each(|server| server.override_metrics(MetricOverrides::new()));

    // Objects that name no pool of this daemon are reported by the debug page and by a metric.
    let config = stack.daemon()?.admin("/debug/config").await?.json()?;
    let objects = &config["pools"][0]["objects"];
    assert_eq!(
        objects["without_pool"],
        json!({"inference/default": 1}),
        "{objects}"
    );
    let page = stack.daemon()?.admin("/metrics").await?.text();
    assert!(
        page.lines()
            .any(|line| line == "switchpoint_objects_without_pool{pool=\"default\"} 1.0"),
        "{page}"
    );
    Ok(())
}

#[tokio::test]
async fn an_inference_pool_serves_through_envoy_as_its_objects_say() -> Result<()> {
    if let Some(done) =
        outside("inference_pools::an_inference_pool_serves_through_envoy_as_its_objects_say")
    {
        return done;
    }
    let Some(place) = start().await? else {
        return Ok(());
    };
    make_pool(&place, |_| {}).await?;
    let servers = [
        pod(&place, 1, "llama", "demo").await?,
        pod(&place, 2, "llama", "demo").await?,
    ];
    let _other = pod(&place, 3, "other", "demo").await?;
    make_object(
        &place,
        "InferenceModel",
        "demo",
        "llama",
        json!({"modelName": "demo", "criticality": "Standard"}),
    )
    .await?;
    make_object(
        &place,
        "InferenceObjective",
        "batch",
        "llama",
        json!({"priority": -1}),
    )
    .await?;
    make_object(
        &place,
        "InferenceObjective",
        "urgent",
        "llama",
        json!({"priority": 5}),
    )
    .await?;
    make_object(
        &place,
        "InferenceObjective",
        "stray",
        "default",
        json!({"priority": 1}),
    )
    .await?;
    for front in PickerMode::ALL {
        its_objects_mean_what_they_say(front, &servers).await?;
    }
    Ok(())
}

/// Adds what a gateway writes for one more pool, namely a route whose ext_proc stream has this
/// authority. The authority is the cluster's name if `authority` is `None`.
fn asks(config: &mut Value, pool: &str, cluster_name: &str, authority: Option<&str>) {
    let resources = &mut config["static_resources"];
    let clusters = resources["clusters"].as_array_mut().expect("clusters");
    let find = |name: &str, clusters: &[Value]| {
        clusters
            .iter()
            .find(|cluster| cluster["name"] == name)
            .expect("a cluster")
            .clone()
    };
    let mut servers = find("inference-pool", clusters);
    let mut picker = find("switchpoint-ext-proc", clusters);
    servers["name"] = json!(format!("{pool}-pool"));
    servers["eds_cluster_config"]["service_name"] = json!(pool);
    picker["name"] = json!(cluster_name);
    picker["load_assignment"]["cluster_name"] = json!(cluster_name);
    if cluster_name.starts_with("outbound|") {
        picker["typed_extension_protocol_options"] = patched_by_istio(cluster_name);
    }
    clusters.extend([servers, picker]);
    let path = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/route_config/virtual_hosts/0/routes";
    let routes = config
        .pointer_mut(path)
        .and_then(Value::as_array_mut)
        .expect("routes");
    let mut route = routes[0].clone();
    route["match"]["headers"] = json!([{"name": "x-to", "string_match": {"exact": pool}}]);
    route["route"]["cluster"] = json!(format!("{pool}-pool"));
    let mut service = json!({"cluster_name": cluster_name});
    if let Some(authority) = authority {
        service["authority"] = json!(authority);
    }
    route["typed_per_filter_config"]["switchpoint"] = json!({
        "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
        "overrides": {"grpc_service": {"envoy_grpc": service}},
    });
    routes.insert(0, route);
}

/// Returns the options that the shipped EnvoyFilter adds to Istio's cluster of that name.
fn patched_by_istio(cluster_name: &str) -> Value {
    let filter = shipped("inference-pool-istio.yaml")
        .into_iter()
        .find(|object| object["kind"] == "EnvoyFilter")
        .expect("an EnvoyFilter");
    let patch = &filter["spec"]["configPatches"][0];
    let port = cluster_name.split('|').nth(1).expect("a port");
    let host = cluster_name.split('|').next_back();
    assert_eq!(patch["match"]["cluster"]["service"].as_str(), host);
    let options = patch["patch"]["value"]["typed_extension_protocol_options"].to_string();
    serde_json::from_str(&options.replace(":9002", &format!(":{port}"))).expect("options")
}

/// Returns the server to which a route's picker sends a request, or the refusal.
async fn to(stack: &Stack, pool: &str) -> Result<String> {
    let request = echo::post(
        "/v1/chat/completions",
        &[("x-to", pool)],
        echo::chat("hello").to_string(),
    )?;
    let reply = stack.send(request).await?;
    Ok(if reply.status == 200 {
        reply.header("x-served-by").to_owned()
    } else {
        format!("{} {}", reply.status, reply.text())
    })
}

/// A pool, and how a gateway addresses the pool's picker.
struct GatewayPool {
    pool: &'static str,
    /// The `app` label of the pool's pods.
    app: &'static str,
    service: &'static str,
    port: u16,
    cluster: &'static str,
    /// The authority of the ext_proc stream. If it is `None`, Envoy sends the name of the cluster.
    authority: Option<&'static str>,
}

const ASKED: [GatewayPool; 4] = [
    // Envoy AI Gateway and kgateway use one Service, with one port for each pool.
    GatewayPool {
        pool: "llama",
        app: "llama",
        service: "switchpointd",
        port: 9002,
        cluster: "endpointpicker_llama_inference_ext_proc",
        authority: Some("switchpointd.inference.svc:9002"),
    },
    GatewayPool {
        pool: "qwen",
        app: "qwen",
        service: "switchpointd",
        port: 9012,
        cluster: "endpointpicker_qwen_inference_ext_proc",
        authority: Some("switchpointd.inference.svc:9012"),
    },
    // An operator who writes the route by hand uses the full name of a separate Service.
    GatewayPool {
        pool: "mixtral",
        app: "mixtral",
        service: "mixtral-picker",
        port: 9002,
        cluster: "mixtral-picker",
        authority: Some("mixtral-picker.inference.svc.cluster.local:9002"),
    },
    // Istio addresses the picker so, and `inference-pool-istio.yaml` patches the cluster.
    GatewayPool {
        pool: "gemma",
        app: "llama",
        service: "switchpointd",
        port: 9022,
        cluster: "outbound|9022||switchpointd.inference.svc.cluster.local",
        authority: None,
    },
];

#[tokio::test]
async fn pools_behind_one_port_are_distinguished_by_the_service_that_a_gateway_calls() -> Result<()>
{
    if let Some(done) = outside(
        "inference_pools::pools_behind_one_port_are_distinguished_by_the_service_that_a_gateway_calls",
    ) {
        return done;
    }
    let Some(place) = start().await? else {
        return Ok(());
    };
    let mut servers = Vec::new();
    for (at, app) in (1..).zip(["llama", "qwen", "mixtral"]) {
        servers.push((app, pod(&place, at, app, "demo").await?));
    }
    let address = |app: &str| {
        servers
            .iter()
            .find(|(of, _)| *of == app)
            .map(|(_, server)| server.addr().to_string())
            .unwrap_or_default()
    };
    // The pool of the shipped file comes first; the test adds the pools that it sends requests to.
    let mut rows = vec![json!({"name": "default", "endpoints": [address("llama")]})];
    for GatewayPool {
        pool: name,
        app,
        service,
        port,
        ..
    } in ASKED
    {
        make_pool(&place, |pool| {
            pool["metadata"]["name"] = json!(name);
            pool["spec"]["selector"]["matchLabels"]["app"] = json!(app);
            pool["spec"]["endpointPickerRef"]["name"] = json!(service);
            pool["spec"]["endpointPickerRef"]["port"]["number"] = json!(port);
        })
        .await?;
        rows.push(json!({"name": name, "inferencePool": {"namespace": NAMESPACE, "name": name}}));
    }
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("pools.json");
    std::fs::write(&file, json!({ "pools": rows }).to_string())?;
    let builder = Stack::builder()
        .front(PickerMode::ExtProc)
        .daemon_arguments(&["--pools", &file.display().to_string()]);
    let mut stack = builder
        .envoy_config(|config| {
            for GatewayPool {
                pool,
                cluster,
                authority,
                ..
            } in ASKED
            {
                asks(config, pool, cluster, authority);
            }
            asks(
                config,
                "stranger",
                "picker-of-a-stranger",
                Some("stranger.inference.svc:9002"),
            );
        })
        .start()
        .await?;
    let first = || async { (to(&stack, "llama").await.ok()? == address("llama")).then_some(()) };
    wait_for(LIMIT, "the pods to be known", first).await?;
    for _ in 0..5 {
        for GatewayPool { pool, app, .. } in ASKED {
            assert_eq!(to(&stack, pool).await?, address(app), "{pool}");
        }
        assert!(
            to(&stack, "stranger").await?.starts_with("503"),
            "a Service that no pool names"
        );
    }
    pickers_are_shown(&mut stack).await
}

/// Checks that `/debug/instances` shows the Service that each pool names.
async fn pickers_are_shown(stack: &mut Stack) -> Result<()> {
    let sources = stack.daemon()?.admin("/debug/instances").await?.json()?["sources"].clone();
    let pickers: Vec<&str> = sources
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|source| source["picker"].as_str())
        .collect();
    assert_eq!(
        pickers,
        [
            "inference/switchpointd:9022",
            "inference/switchpointd:9002",
            "inference/mixtral-picker:9002",
            "inference/switchpointd:9012"
        ]
    );
    Ok(())
}
