//! Makes the configuration that istiod makes of an EnvoyFilter and a WasmPlugin according to
//! Istio's documentation. This module adds the fields that are known from running gateways, and
//! supports only the kinds of patches that we ship. Any other kind is an error.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::{AssembledConfig, LocalPorts, PlacedFragment, Substitution, only, read};
use testbed::Result;

const FILTERS: &str = "/listeners/0/filter_chains/0/filters/0/typed_config/http_filters";
const LISTENER: &str = "/listeners/0";
const CONNECTION_MANAGER: &str = "/listeners/0/filter_chains/0/filters/0";
const ROUTES: &str = "/routes/0/virtual_hosts/0/routes";
const CLUSTERS: &str = "/clusters";
const BOOTSTRAP: &str = "istio/bootstrap.yaml";
const FAULT: &str = "envoy.filters.http.fault";
const ROUTER: &str = "envoy.filters.http.router";
const WASM: &str = "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm";

/// Returns the configuration of a gateway with the objects of `file`.
///
/// # Errors
/// Fails if an object has something that is not supported.
pub fn gateway(file: &str, local: &LocalPorts) -> Result<AssembledConfig> {
    let objects = read(file)?;
    let (routes, cluster) = routes(&only(&objects, "VirtualService")?["spec"]["http"])?;
    let mut made = AssembledConfig {
        config: bare(local, &routes, &cluster),
        placed: Vec::new(),
    };
    for cluster in own_clusters()? {
        PlacedFragment::insert(
            &mut made,
            super::OWN_CLUSTERS,
            None,
            &cluster,
            Substitution::state_cluster(local),
        )?;
    }
    if let Ok(plugin) = only(&objects, "WasmPlugin") {
        wasm_plugin(&mut made, plugin, &local.folder)?;
    }
    let patches = only(&objects, "EnvoyFilter")?["spec"]["configPatches"]
        .as_array()
        .ok_or("no patches")?;
    patches
        .iter()
        .try_for_each(|patch| apply(&mut made, patch, local))?;
    Ok(made)
}

/// Returns the clusters of the gateway's bootstrap, from [`BOOTSTRAP`]'s ConfigMap, which an
/// annotation of the pod names.
fn own_clusters() -> Result<Vec<Value>> {
    let objects = read(BOOTSTRAP)?;
    let text = only(&objects, "ConfigMap")?["data"]["custom_bootstrap.json"]
        .as_str()
        .ok_or("no custom_bootstrap.json, the name that Istio's agent reads")?;
    let mut bootstrap: Value = serde_saphyr::from_str(text)?;
    let clusters: Vec<Value> =
        serde_json::from_value(bootstrap["static_resources"]["clusters"].take())?;
    if bootstrap != json!({"static_resources": {"clusters": null}}) {
        return Err(format!("the bootstrap has more than clusters: {bootstrap}").into());
    }
    Ok(clusters)
}

fn apply(made: &mut AssembledConfig, patch: &Value, local: &LocalPorts) -> Result<()> {
    let operation = patch["patch"]["operation"].as_str().unwrap_or("");
    let value = &patch["patch"]["value"];
    let context = &patch["match"]["context"];
    if context != "GATEWAY" {
        return Err(format!("a patch for {context} instead of GATEWAY").into());
    }
    let chain = &patch["match"]["listener"]["filterChain"]["filter"];
    match (patch["applyTo"].as_str().unwrap_or(""), operation) {
        ("EXTENSION_CONFIG", "ADD") => extension(made, value, &local.folder),
        ("HTTP_FILTER", "INSERT_BEFORE" | "INSERT_FIRST") => {
            let first = made
                .config
                .pointer(FILTERS)
                .and_then(|filters| filters[0]["name"].as_str())
                .map(str::to_owned);
            let before = if operation == "INSERT_FIRST" {
                first.as_deref()
            } else {
                chain["subFilter"]["name"].as_str()
            };
            let discovered = value.pointer("/config_discovery/config_source").cloned();
            let name = value["name"].as_str().unwrap_or_default();
            let substituted = discovered.map(|meant| {
                Substitution::discovered(
                    "/config_discovery/config_source",
                    meant,
                    &discovery_file(&local.folder, name),
                )
            });
            PlacedFragment::insert(
                made,
                FILTERS,
                before,
                value,
                substituted.into_iter().collect(),
            )
        }
        ("NETWORK_FILTER", "MERGE") if chain["name"] == value["name"] => {
            PlacedFragment::merge(made, CONNECTION_MANAGER.to_owned(), value)
        }
        ("HTTP_ROUTE", "MERGE") => {
            let name = &patch["match"]["routeConfiguration"]["vhost"]["route"]["name"];
            let routes = made
                .config
                .pointer(ROUTES)
                .and_then(Value::as_array)
                .ok_or("no routes")?;
            let named: Vec<usize> = (0..routes.len())
                .filter(|&at| routes[at]["name"] == *name)
                .collect();
            if named.is_empty() {
                return Err(format!("no route {name}").into());
            }
            named
                .into_iter()
                .try_for_each(|at| PlacedFragment::merge(made, format!("{ROUTES}/{at}"), value))
        }
        ("LISTENER", "MERGE") => PlacedFragment::merge(made, LISTENER.to_owned(), value),
        ("CLUSTER", "ADD") => PlacedFragment::insert(made, CLUSTERS, None, value, Vec::new()),
        (to, how) => Err(format!("this test does not know {how} of {to}").into()),
    }
}

fn discovery_file(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{}.json", name.replace('/', "-")))
}

/// Writes a discovered filter to the file from which the test's Envoy discovers it.
fn extension(made: &mut AssembledConfig, meant: &Value, folder: &Path) -> Result<()> {
    let at = "/typed_config/config/vm_config/code";
    let code = meant.pointer(at).ok_or("a filter without a module")?;
    let uri = code
        .pointer("/remote/http_uri/uri")
        .and_then(Value::as_str)
        .unwrap_or_default();
    if !uri.starts_with("oci://") {
        return Err(format!("Istio's agent fetches oci:// only, not {uri:?}").into());
    }
    let name = meant["name"].as_str().unwrap_or_default();
    PlacedFragment::discover(
        made,
        discovery_file(folder, name),
        meant,
        vec![Substitution::module(at, code.clone())],
    )
}

/// Adds the filter that a WasmPlugin without a phase becomes. Envoy discovers this filter. The
/// filter precedes fault injection and CORS, and has only the settings of the WasmPlugin API.
fn wasm_plugin(made: &mut AssembledConfig, plugin: &Value, folder: &Path) -> Result<()> {
    let spec = &plugin["spec"];
    if ["phase", "vmConfig", "sha256", "imagePullSecret"]
        .iter()
        .any(|field| spec.get(field).is_some())
    {
        return Err("this test does not know a field of the WasmPlugin".into());
    }
    let policy = match spec["failStrategy"].as_str() {
        Some("FAIL_RELOAD") => "FAIL_RELOAD",
        other => return Err(format!("unexpected failStrategy {other:?}").into()),
    };
    let name = format!(
        "extensions.istio.io/wasmplugin/istio-system.{}",
        plugin["metadata"]["name"].as_str().unwrap_or_default()
    );
    let filter = json!({
        "name": name,
        "typed_config": {
            "@type": WASM,
            "config": {
                "name": "istio-system.switchpoint",
                "root_id": spec["pluginName"],
                "failure_policy": policy,
                "configuration": {"@type": "type.googleapis.com/google.protobuf.StringValue", "value": spec["pluginConfig"].to_string()},
                // `vm_id` and `allow_on_headers_stop_iteration` are missing, because the WasmPlugin
                // API has neither.
                "vm_config": {
                    "runtime": "envoy.wasm.runtime.v8",
                    "code": {"remote": {"http_uri": {"uri": spec["url"], "timeout": "30s", "cluster": "_"}}},
                },
            },
        },
    });
    extension(made, &filter, folder)?;
    let config_source =
        json!({"ads": {}, "initial_fetch_timeout": "0s", "resource_api_version": "V3"});
    let discovered = json!({"name": name, "config_discovery": {"config_source": config_source, "type_urls": [WASM]}});
    let substitution = Substitution::discovered(
        "/config_discovery/config_source",
        config_source,
        &discovery_file(folder, &name),
    );
    PlacedFragment::insert(made, FILTERS, Some(FAULT), &discovered, vec![substitution])
}

fn filter(name: &str, kind: &str) -> Value {
    json!({"name": name, "typed_config": {"@type": format!("type.googleapis.com/envoy.extensions.filters.http.{kind}")}})
}

/// Returns the routes of a VirtualService, one for each match, and the cluster of its Service.
fn routes(http: &Value) -> Result<(Vec<Value>, String)> {
    let mut routes = Vec::new();
    let destination = &http[0]["route"][0]["destination"];
    let cluster = format!(
        "outbound|{}||{}",
        destination["port"]["number"],
        destination["host"].as_str().unwrap_or_default()
    );
    for entry in http.as_array().into_iter().flatten() {
        for condition in entry["match"].as_array().ok_or("a route without a match")? {
            let (how, uri) = condition["uri"]
                .as_object()
                .and_then(|uri| uri.iter().next())
                .ok_or("a match without a path")?;
            let matched = match how.as_str() {
                "exact" => json!({"path": uri}),
                "prefix" => json!({"prefix": uri}),
                "regex" => json!({"safe_regex": {"regex": uri}}),
                other => return Err(format!("this test does not know a match by {other}").into()),
            };
            let action = json!({"cluster": cluster, "timeout": "0s", "max_grpc_timeout": "0s"});
            routes.push(json!({"name": entry["name"], "match": matched, "route": action}));
        }
    }
    Ok((routes, cluster))
}

/// Returns the configuration that an Istio gateway runs without patches, without the parts that the
/// tests do not need.
fn bare(local: &LocalPorts, routes: &[Value], cluster: &str) -> Value {
    let address =
        |port: u16| json!({"socket_address": {"address": "127.0.0.1", "port_value": port}});
    let connection_manager = json!({
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "outbound_0.0.0.0_8080",
        "use_remote_address": true,
        "stream_idle_timeout": "0s",
        "normalize_path": true,
        "upgrade_configs": [{"upgrade_type": "websocket"}],
        "request_id_extension": {"typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.request_id.uuid.v3.UuidRequestIdConfig",
            "use_request_id_for_trace_sampling": true,
        }},
        "preserve_external_request_id": true,
        "access_log": [access_log()],
        "rds": {"route_config_name": "http.8080", "config_source": super::source(&local.folder, "routes")},
        "http_filters": [
            filter(FAULT, "fault.v3.HTTPFault"),
            filter("envoy.filters.http.cors", "cors.v3.Cors"),
            filter(ROUTER, "router.v3.Router"),
        ],
    });
    let routes = json!({"name": "http.8080", "virtual_hosts": [{"name": "*:8080", "domains": ["*"], "routes": routes}]});
    json!({
        "bootstrap": {
            "node": {"id": "router~10.1.2.3~istio-ingressgateway.istio-system~istio-system.svc.cluster.local", "cluster": "istio-ingressgateway"},
            "admin": {"address": address(local.admin)},
            "static_resources": {"clusters": []},
        },
        "listeners": [{
            "name": "0.0.0.0_8080",
            "address": address(local.listener),
            "filter_chains": [{"filters": [{
                "name": "envoy.filters.network.http_connection_manager",
                "typed_config": connection_manager,
            }]}],
        }],
        "clusters": [super::unused(cluster)],
        "routes": [routes],
    })
}

/// Returns the access log that the tests read: the ranked list and the served endpoint, from
/// dynamic metadata.
fn access_log() -> Value {
    json!({
        "name": "envoy.access_loggers.stdout",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.access_loggers.stream.v3.StdoutAccessLog",
            "log_format": {"json_format": {
                "request_id": "%REQ(X-REQUEST-ID):64%",
                "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
                "lb:x-gateway-destination-endpoint": "%DYNAMIC_METADATA(envoy.lb:x-gateway-destination-endpoint)%",
                "lb:x-gateway-destination-endpoint-served": "%DYNAMIC_METADATA(envoy.lb:x-gateway-destination-endpoint-served)%",
                "pool": "%METADATA(ROUTE:switchpoint:pool)%",
            }},
        },
    })
}
