//! Sends the manifests in `envoy-config/` to a real API server with the published schemas of Istio,
//! the Gateway API and Envoy Gateway. The server must accept each object unchanged, and know all of
//! its fields. The tests in `e2e` show what Envoy does with the objects.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kube::Client;
use serde_json::{Value, json};

use crate::cluster::{self, objects, post};

/// The folders of manifests, and the minimum number of files in each.
const FOLDERS: [(&str, usize); 3] = [("istio", 2), ("envoy-gateway", 3), ("kubernetes", 6)];

/// The maximum time until a definition takes effect, which takes about a second.
const LIMIT: Duration = Duration::from_secs(60);

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn manifests() -> Vec<PathBuf> {
    let of = |(folder, files_min): &(&str, usize)| {
        let entries = std::fs::read_dir(root().join("envoy-config").join(folder))
            .expect("a folder of manifests");
        let files = entries
            .map(|entry| entry.expect("a file").path())
            .filter(|path| path.extension().is_some_and(|end| end == "yaml"));
        // Values of a Helm chart are not objects.
        let files: Vec<PathBuf> = files
            .filter(|path| {
                path.file_name()
                    .is_some_and(|name| name != "gateway-values.yaml")
            })
            .collect();
        assert!(files.len() >= *files_min, "{folder}: {files:?}");
        files
    };
    FOLDERS.iter().flat_map(of).collect()
}

/// Returns the URL of the collection for objects of this kind.
fn collection(object: &Value, namespace: &str) -> String {
    let version = object["apiVersion"].as_str().expect("a version");
    let kind = object["kind"].as_str().expect("a kind");
    let kind = kind.to_lowercase();
    let plural = match kind.strip_suffix('y') {
        Some(stem) if !kind.ends_with("ey") && !kind.ends_with("ay") => format!("{stem}ies"),
        _ if kind.ends_with('s') => format!("{kind}es"),
        _ => format!("{kind}s"),
    };
    let api = if version.contains('/') {
        format!("/apis/{version}")
    } else {
        format!("/api/{version}")
    };
    match kind.as_str() {
        "namespace"
        | "gatewayclass"
        | "customresourcedefinition"
        | "clusterrole"
        | "clusterrolebinding" => format!("{api}/{plural}"),
        _ => format!(
            "{api}/namespaces/{}/{plural}",
            object["metadata"]["namespace"]
                .as_str()
                .unwrap_or(namespace)
        ),
    }
}

/// Sends an object to the API server as a dry run. Returns the server's answer.
async fn judge(client: &Client, object: &Value) -> Result<Value, String> {
    post(
        client,
        &format!(
            "{}?dryRun=All&fieldValidation=Strict",
            collection(object, "default")
        ),
        object,
    )
    .await
}

/// Calls [`judge`] until the definitions take effect. Before that, the server does not know the
/// path.
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
    let Some(definitions) = cluster::definitions("") else {
        return;
    };
    let Some(cluster) = cluster::shared().await else {
        return;
    };
    let client = cluster.client("tok").await;
    cluster::define(&client, &definitions).await;
    let mut judged = 0;
    // The files expect these namespaces to exist.
    for name in ["switchpoint", "inference"] {
        let namespace =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
        let _ = post(&client, "/api/v1/namespaces", &namespace).await; // another test may have created it
    }
    for path in manifests() {
        let file = path.display();
        for object in objects(&path) {
            if object["kind"] == "Namespace" {
                let _ = post(&client, "/api/v1/namespaces", &object).await; // another file may have created it
                continue;
            }
            let said = judge_soon(&client, &object).await;
            assert!(said.is_ok(), "{file}: {}: {said:?}", object["kind"]);
            judged += 1;
        }
    }
    assert!(judged > 35, "{judged} objects were judged");

    // The check is strict: unknown fields and invalid values are refused.
    let plugin = objects(&root().join("envoy-config/istio/wasmplugin.yaml"))
        .into_iter()
        .find(|object| object["kind"] == "WasmPlugin");
    let mut plugin = plugin.expect("a WasmPlugin");
    plugin["spec"]["allowOnHeadersStopIteration"] = json!(true);
    let said = judge(&client, &plugin).await.expect_err("an unknown field");
    assert!(said.contains("unknown field"), "{said}");
    plugin["spec"]["failStrategy"] = json!("FAIL_SOMEHOW");
    assert!(judge(&client, &plugin).await.is_err());
    let pool = objects(&root().join("envoy-config/kubernetes/inference-pool.yaml"))
        .into_iter()
        .find(|object| object["kind"] == "InferencePool");
    let mut pool = pool.expect("an InferencePool");
    pool["spec"]["endpointPickerRef"]
        .as_object_mut()
        .expect("a reference")
        .remove("port");
    let said = judge(&client, &pool)
        .await
        .expect_err("a Service without a port");
    assert!(said.contains("port"), "{said}");
}
