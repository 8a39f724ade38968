//! The manifests in `envoy-config/` before a real API server, with the published schemas of Istio, the Gateway API and Envoy Gateway: each object is taken
//! as it stands, and no field of it is unknown. What a gateway makes of them is tested with Envoy (`e2e`).

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use axum::http::Request;
use kube::Client;
use serde_json::{Value, json};

use crate::cluster;

/// Where the manifests are, and how many files there are at least.
const FOLDERS: [(&str, usize); 3] = [("istio", 2), ("envoy-gateway", 1), ("kubernetes", 2)];

/// A definition takes effect in about a second.
const LIMIT: Duration = Duration::from_secs(60);

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn manifests() -> Vec<PathBuf> {
    let of = |(folder, files_min): &(&str, usize)| {
        let entries = std::fs::read_dir(root().join("envoy-config").join(folder)).expect("a folder of manifests");
        let files = entries.map(|entry| entry.expect("a file").path()).filter(|path| path.extension().is_some_and(|end| end == "yaml"));
        // Values of a Helm chart are no objects.
        let files: Vec<PathBuf> = files.filter(|path| path.file_name().is_some_and(|name| name != "gateway-values.yaml")).collect();
        assert!(files.len() >= *files_min, "{folder}: {files:?}");
        files
    };
    FOLDERS.iter().flat_map(of).collect()
}

fn objects(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let all: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    all.into_iter().filter(|object| !object.is_null()).collect()
}

/// The published definitions, where `.ci/cluster_tools.py` has fetched them.
fn definitions() -> Option<Vec<Value>> {
    let Ok(folder) = std::fs::read_dir(root().join(".tools/schemas")) else {
        println!("SKIPPED: there are no schemas; `.ci/cluster_tools.py schemas` fetches them where Go is installed");
        return None;
    };
    let all = folder.flat_map(|entry| objects(&entry.expect("a file").path()));
    Some(all.filter(|object| object["kind"] == "CustomResourceDefinition").collect())
}

/// Where objects of this kind are made.
fn collection(object: &Value, namespace: &str) -> String {
    let (version, kind) = (object["apiVersion"].as_str().expect("a version"), object["kind"].as_str().expect("a kind"));
    let kind = kind.to_lowercase();
    let plural = match kind.strip_suffix('y') {
        Some(stem) if !kind.ends_with("ey") && !kind.ends_with("ay") => format!("{stem}ies"),
        _ if kind.ends_with('s') => format!("{kind}es"),
        _ => format!("{kind}s"),
    };
    let api = if version.contains('/') { format!("/apis/{version}") } else { format!("/api/{version}") };
    match kind.as_str() {
        "namespace" | "gatewayclass" | "customresourcedefinition" | "clusterrole" | "clusterrolebinding" => format!("{api}/{plural}"),
        _ => format!("{api}/namespaces/{}/{plural}", object["metadata"]["namespace"].as_str().unwrap_or(namespace)),
    }
}

async fn post(client: &Client, path: &str, object: &Value) -> Result<Value, String> {
    let request = Request::post(path).header("content-type", "application/json").body(object.to_string().into_bytes());
    client.request(request.expect("a request")).await.map_err(|error| error.to_string())
}

/// What the API server says to an object, without keeping it.
async fn judge(client: &Client, object: &Value) -> Result<Value, String> {
    post(client, &format!("{}?dryRun=All&fieldValidation=Strict", collection(object, "default")), object).await
}

async fn define(client: &Client, definitions: &[Value]) {
    for definition in definitions {
        match post(client, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition).await {
            Ok(_) => {}
            Err(error) => assert!(error.contains("already exists"), "{}: {error}", definition["metadata"]["name"]),
        }
    }
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "switchpoint"}});
    let _ = post(client, "/api/v1/namespaces", &namespace).await; // another test may have made it
}

/// The same once the definitions are in force: until then the server knows no such path.
async fn judge_soon(client: &Client, object: &Value) -> Result<Value, String> {
    let began = Instant::now();
    loop {
        match judge(client, object).await {
            Err(error) if error.contains("could not find") || error.contains("404") => {
                assert!(began.elapsed() < LIMIT, "{}: {error}", object["kind"]);
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
            other => return other,
        }
    }
}

#[tokio::test]
async fn every_object_is_as_published_schemas_want_it() {
    let Some(definitions) = definitions() else { return };
    let Some(cluster) = cluster::shared().await else { return };
    let client = cluster.client("tok").await;
    define(&client, &definitions).await;
    let mut judged = 0;
    for path in manifests() {
        let file = path.display();
        for object in objects(&path) {
            // The namespace was made above.
            if object["kind"] == "Namespace" {
                continue;
            }
            let said = judge_soon(&client, &object).await;
            assert!(said.is_ok(), "{file}: {}: {said:?}", object["kind"]);
            judged += 1;
        }
    }
    assert!(judged > 15, "{judged} objects were judged");

    // The judge is strict: a field that is not there, and a value that is not allowed, are refused.
    let plugin = objects(&root().join("envoy-config/istio/wasmplugin.yaml")).into_iter().find(|object| object["kind"] == "WasmPlugin");
    let mut plugin = plugin.expect("a WasmPlugin");
    plugin["spec"]["allowOnHeadersStopIteration"] = json!(true);
    let said = judge(&client, &plugin).await.expect_err("a field that there is not");
    assert!(said.contains("unknown field"), "{said}");
    plugin["spec"]["failStrategy"] = json!("FAIL_SOMEHOW");
    assert!(judge(&client, &plugin).await.is_err());
}
