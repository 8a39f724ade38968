//! Makes the Envoy configuration that Envoy Gateway makes of the manifest. [`patched`] only applies
//! the manifest's patches to a small copy of the configuration for a Gateway and an HTTPRoute.
//! [`translated`] translates the whole manifest with Envoy Gateway's own translator, if the
//! translator was built.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use super::{AssembledConfig, FragmentPlace, LocalPorts, PlacedFragment, Substitution, only, read};
use testbed::{Result, root};

const FILE: &str = "envoy-gateway/gateway.yaml";
const FILTERS: &str = "/listeners/0/default_filter_chain/filters/0/typed_config/http_filters";
const CLUSTERS: &str = "/clusters";
const CODE_AT: &str = "/typed_config/config/vm_config/code";

/// Returns the translator (`egctl`), if `.ci/cluster_tools.py` or the user has built it.
pub fn translator() -> Option<PathBuf> {
    let assets = std::env::var_os("KUBEBUILDER_ASSETS").map(PathBuf::from);
    assets
        .into_iter()
        .chain([root().join(".tools/bin")])
        .map(|folder| folder.join("egctl"))
        .find(|path| path.exists())
}

/// Applies the patches to a configuration without patches.
///
/// # Errors
/// Fails if a patch is of an unknown kind, or finds nothing to patch.
pub fn patched(local: &LocalPorts) -> Result<AssembledConfig> {
    let mut made = AssembledConfig {
        config: bare(local),
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
    for patch in patches()? {
        let operation = &patch["operation"];
        let kind = patch["type"].as_str().unwrap_or("");
        let path = operation["path"].as_str().unwrap_or("");
        let list = kind.rsplit('.').next().unwrap_or("");
        let value = &operation["value"];
        match list {
            "Cluster" if path.is_empty() => {
                PlacedFragment::insert(&mut made, CLUSTERS, None, value, substituted(value))?;
            }
            "Listener" if path.ends_with("/http_filters/0") => {
                let first = made
                    .config
                    .pointer(FILTERS)
                    .and_then(|filters| filters[0]["name"].as_str())
                    .map(str::to_owned);
                PlacedFragment::insert(
                    &mut made,
                    FILTERS,
                    first.as_deref(),
                    value,
                    substituted(value),
                )?;
            }
            "Listener" => set(&mut made, &format!("/listeners/0{path}"), operation)?,
            "RouteConfiguration" => set(&mut made, &format!("/routes/0{path}"), operation)?,
            other => return Err(format!("this test does not know patches of {other}").into()),
        }
    }
    Ok(made)
}

/// Translates the whole manifest.
///
/// # Errors
/// Fails if the translator refuses the manifest, or its result is not as expected.
pub fn translated(translator: &Path, local: &LocalPorts) -> Result<AssembledConfig> {
    let configs = translate(translator, &local.folder)?;
    let mut listeners = resources(&configs, "dynamicListeners", "listener");
    let routes = resources(&configs, "dynamicRouteConfigs", "routeConfig");
    let mut clusters = resources(&configs, "dynamicActiveClusters", "cluster");
    // Drops Envoy Gateway's own readiness listener, whose port may be in use on this machine.
    listeners.retain(|listener| listener["name"] == "default/inference/http");
    let ([listener], [route]) = (&mut listeners[..], &routes[..]) else {
        return Err(format!("listeners {listeners:?}").into());
    };
    let manager = localized(listener, local)?;
    manager.remove("rds").ok_or("routes are not discovered")?;
    manager.insert("routeConfig".to_owned(), route.clone());
    // Drops the cluster of the Service. That cluster would need discovery, and no request uses it.
    clusters.retain(|cluster| cluster["name"] == "inference-pool");
    let mut own: Vec<Value> = configs
        .iter()
        .find_map(|config| config.pointer("/bootstrap/staticResources/clusters"))
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter(|cluster| cluster["name"] == "switchpoint-state")
        .cloned()
        .collect();
    let filters = manager.get_mut("httpFilters").and_then(Value::as_array_mut);
    let placed = filters.into_iter().flatten().chain(&mut clusters);
    for item in placed.chain(&mut own) {
        here(item, local)?;
    }
    let mut config = bare(local);
    config["bootstrap"]["static_resources"]["clusters"] = Value::Array(own);
    for (list, resources) in [
        ("listeners", listeners),
        ("routes", routes),
        ("clusters", clusters),
    ] {
        config[list] = Value::Array(resources);
    }
    Ok(AssembledConfig {
        config,
        placed: Vec::new(),
    })
}

/// Runs the translator, and returns the parts of its output.
fn translate(translator: &Path, folder: &Path) -> Result<Vec<Value>> {
    const ARGUMENTS: &str = "experimental translate --from gateway-api --to xds --type all \
                             --add-missing-resources -o json";
    let output = Command::new(translator)
        .args(ARGUMENTS.split_whitespace())
        .arg("-f")
        .arg(for_the_translator(folder)?)
        .output()?;
    if !output.status.success() {
        return Err(format!("egctl: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    let dump: Value = serde_json::from_slice(&output.stdout)?;
    let configs = dump["xds"]["default/inference"]["configs"].as_array();
    Ok(configs.ok_or("no configuration of the gateway")?.clone())
}

/// Returns the resources of a kind, from a list in the translator's output.
fn resources(configs: &[Value], list: &str, kind: &str) -> Vec<Value> {
    configs
        .iter()
        .filter_map(|config| config[list].as_array())
        .flatten()
        .filter_map(|entry| entry.get(kind).or_else(|| entry["activeState"].get(kind)))
        .cloned()
        .map(untyped)
        .collect()
}

/// Makes the listener use the test's port. Returns its HTTP connection manager.
fn localized<'l>(
    listener: &'l mut Value,
    local: &LocalPorts,
) -> Result<&'l mut serde_json::Map<String, Value>> {
    let probed = probed_port()?;
    let address = &mut listener["address"];
    if address["socketAddress"]["portValue"] != probed {
        return Err(format!(
            "the readiness probe uses port {probed}, but the listener is at {address}"
        )
        .into());
    }
    *address = json!({"socketAddress": {"address": "127.0.0.1", "portValue": local.listener}});
    let manager = listener
        .pointer_mut("/defaultFilterChain/filters/0/typedConfig")
        .and_then(Value::as_object_mut);
    Ok(manager.ok_or("no HTTP")?)
}

/// Returns the path of a manifest in which the GatewayClass names the EnvoyProxy, not the Gateway.
/// The translator, unlike the controller, ignores the bootstrap of an EnvoyProxy that a Gateway
/// names.
fn for_the_translator(folder: &Path) -> Result<PathBuf> {
    let mut objects = read(FILE)?;
    let proxy = only(&objects, "EnvoyProxy")?["metadata"].clone();
    for class in objects
        .iter_mut()
        .filter(|object| object["kind"] == "GatewayClass")
    {
        class["spec"]["parametersRef"] = json!({"group": "gateway.envoyproxy.io", "kind": "EnvoyProxy", "name": proxy["name"], "namespace": proxy["namespace"]});
    }
    let file = folder.join("gateway.yaml");
    std::fs::write(
        &file,
        objects
            .iter()
            .map(Value::to_string)
            .collect::<Vec<_>>()
            .join("\n---\n"),
    )?;
    Ok(file)
}

/// Returns the port of the readiness probe of a proxy's pod.
fn probed_port() -> Result<Value> {
    let objects = read(FILE)?;
    let patch = &only(&objects, "EnvoyProxy")?["spec"]["provider"]["kubernetes"]["envoyDeployment"]
        ["patch"]["value"];
    let probe = &patch["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"];
    if probe["path"] == "/switchpoint/ready" {
        Ok(probe["port"].clone())
    } else {
        Err(format!("unexpected probe: {probe}").into())
    }
}

/// Makes the substitutions of [`Substitution`] in the translator's output, which spells field names
/// in camel case.
fn here(item: &mut Value, local: &LocalPorts) -> Result<()> {
    if let Some(code) = item.pointer_mut("/typedConfig/config/vmConfig/code") {
        let meant = json!({"local": {"filename": "/etc/switchpoint/switchpoint.wasm"}});
        if *code != meant {
            return Err(format!("unexpected module: {code}").into());
        }
        *code = json!({"local": {"filename": super::MODULE}});
    }
    if let Some(address) =
        item.pointer_mut("/loadAssignment/endpoints/0/lbEndpoints/0/endpoint/address/socketAddress")
    {
        if *address != json!({"address": super::DAEMON, "portValue": 9004}) {
            return Err(format!("unexpected daemon: {address}").into());
        }
        *address = json!({"address": "127.0.0.1", "portValue": local.state});
        for (at, meant, here) in super::CERTIFICATES {
            let file = item
                .pointer_mut(&camel_case(at))
                .ok_or_else(|| format!("no certificate at {at}"))?;
            if *file != json!(format!("{}/{meant}", super::MOUNTED)) {
                return Err(format!("unexpected certificate: {file}").into());
            }
            *file = json!(local.folder.join(here));
        }
    }
    Ok(())
}

fn camel_case(pointer: &str) -> String {
    let mut words = pointer.split('_');
    let first = words.next().unwrap_or_default().to_owned();
    words.fold(first, |done, word| {
        done + &word[..1].to_uppercase() + &word[1..]
    })
}

/// Removes the type that a config dump adds to each resource.
fn untyped(mut resource: Value) -> Value {
    if let Some(fields) = resource.as_object_mut() {
        fields.remove("@type");
    }
    resource
}

fn patches() -> Result<Vec<Value>> {
    let objects = read(FILE)?;
    Ok(only(&objects, "EnvoyPatchPolicy")?["spec"]["jsonPatches"]
        .as_array()
        .ok_or("no patches")?
        .clone())
}

/// Returns the clusters that the EnvoyProxy adds to Envoy's bootstrap.
fn own_clusters() -> Result<Vec<Value>> {
    let objects = read(FILE)?;
    let bootstrap = &only(&objects, "EnvoyProxy")?["spec"]["bootstrap"];
    let added = bootstrap["jsonPatches"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|patch| {
            let appends = patch["op"] == "add" && patch["path"] == "/static_resources/clusters/-";
            if appends {
                Ok(patch["value"].clone())
            } else {
                Err(
                    format!("this test does not know such a patch of the bootstrap: {patch}")
                        .into(),
                )
            }
        });
    added.collect()
}

fn substituted(fragment: &Value) -> Vec<Substitution> {
    fragment
        .pointer(CODE_AT)
        .map(|code| Substitution::module(CODE_AT, code.clone()))
        .into_iter()
        .collect()
}

/// Applies a JSON patch at one JSON pointer.
fn set(made: &mut AssembledConfig, at: &str, operation: &Value) -> Result<()> {
    let (parent, key) = at.rsplit_once('/').ok_or("a path without a name")?;
    let fields = made
        .config
        .pointer_mut(parent)
        .and_then(Value::as_object_mut)
        .ok_or_else(|| format!("nothing at {parent}"))?;
    match (operation["op"].as_str(), fields.contains_key(key)) {
        (Some("add"), false) | (Some("replace"), true) => {
            fields.insert(key.to_owned(), operation["value"].clone())
        }
        (op, there) => {
            return Err(format!(
                "{op:?} at {at}, which is {}there",
                if there { "" } else { "not " }
            )
            .into());
        }
    };
    made.placed.push(PlacedFragment {
        meant: operation["value"].clone(),
        substituted: Vec::new(),
        at: FragmentPlace::In(at.to_owned()),
    });
    Ok(())
}

/// Returns the configuration that Envoy Gateway makes of a Gateway and an HTTPRoute, without the
/// parts that the tests do not need.
fn bare(local: &LocalPorts) -> Value {
    let address =
        |port: u16| json!({"socket_address": {"address": "127.0.0.1", "port_value": port}});
    let connection_manager = json!({
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "http-10080",
        "use_remote_address": true,
        "normalize_path": true,
        "merge_slashes": true,
        "path_with_escaped_slashes_action": "UNESCAPE_AND_FORWARD",
        "http2_protocol_options": {"initial_connection_window_size": 1_048_576, "initial_stream_window_size": 65_536, "max_concurrent_streams": 100},
        "http_filters": [{
            "name": "envoy.filters.http.router",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router",
                "suppress_envoy_headers": true,
            },
        }],
        "rds": {"route_config_name": "default/inference/http", "config_source": super::source(&local.folder, "routes")},
    });
    let service = "httproute/default/inference/rule/0";
    let routes = json!({"name": "default/inference/http", "virtual_hosts": [{
        "name": "default/inference/http/*",
        "domains": ["*"],
        "routes": [{
            "name": format!("{service}/match/0/*"),
            "match": {"prefix": "/"},
            "metadata": {"filter_metadata": {"envoy-gateway": {}}},
            "route": {"cluster": service, "timeout": "0s", "upgrade_configs": [{"upgrade_type": "websocket"}]},
        }],
    }]});
    json!({
        "bootstrap": {
            "node": {"id": "envoy-default-inference-1", "cluster": "default/inference"},
            "admin": {"address": address(local.admin)},
            "static_resources": {"clusters": []},
        },
        "listeners": [{
            "name": "default/inference/http",
            "address": address(local.listener),
            "per_connection_buffer_limit_bytes": 65_536,
            "default_filter_chain": {"filters": [{
                "name": "envoy.filters.network.http_connection_manager",
                "typed_config": connection_manager,
            }]},
        }],
        "clusters": [super::unused(service)],
        "routes": [routes],
    })
}
