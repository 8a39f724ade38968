//! The manifests for Istio and Envoy Gateway: every Envoy fragment in these manifests runs on a
//! real Envoy, changed only by a short list of substitutions (`e2e::manifests`). The tests generate
//! the rest of the configuration as the gateways are known to do. The long suite runs Envoy
//! Gateway's own translator.

use std::io::Write as _;
use std::time::Duration;

use e2e::manifests::{self, AssembledConfig, LocalPorts, envoy_gateway, istio};
use flate2::Compression;
use flate2::write::GzEncoder;
use http::Request;
use serde_json::{Value, json};
use tempfile::TempDir;
use testbed::certificates::{self, Authority};
use testbed::model_server::{FaultMode, ServerFault};
use testbed::ports::ReservedPort;
use testbed::stack::{Stack, StackBuilder};
use testbed::{Result, client, wait_for};

use crate::picker_modes::forbid_to_hold_headers;
use crate::{echo, limits};

const LIMIT: Duration = Duration::from_secs(20);

/// Describes a stack whose Envoy runs the configuration that `make` returns. The configuration must
/// contain at least `fragments` unchanged fragments of a manifest. `folder` has the certificates.
fn stack(
    fragments: usize,
    make: impl Fn(&LocalPorts) -> Result<AssembledConfig> + Send + 'static,
) -> Result<(StackBuilder, TempDir)> {
    let folder = Authority::new()?.folder(manifests::DAEMON)?;
    let path = folder.path().to_owned();
    let arguments = certificates::daemon_arguments(&path);
    let builder = Stack::builder()
        .servers(3)
        .daemon_arguments(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    let builder = builder.envoy_config(move |config| {
        let local = manifests::local(config, &path).expect("the shipped file");
        let made = make(&local).expect("a gateway");
        made.check(fragments).expect("the manifest's own words");
        *config = made.deliver(&path).expect("a folder that can be written");
    });
    Ok((builder, folder))
}

fn istio_gateway(file: &'static str, fragments: usize) -> Result<(StackBuilder, TempDir)> {
    stack(fragments, move |local| istio::gateway(file, local))
}

/// Checks that Envoy accepted every delivered resource. If Envoy refused a resource, its log has
/// the reason. A failed test prints this log.
async fn takes_all_that_is_delivered(stack: &Stack) -> Result<()> {
    let refused = stack.envoy.stats("\\.update_rejected$").await?;
    let refused: Vec<_> = refused
        .into_iter()
        .filter(|(_, count)| *count > 0)
        .collect();
    assert!(refused.is_empty(), "{refused:?}");
    Ok(())
}

/// Runs the checks that every gateway must pass.
async fn serves(stack: &Stack) -> Result<()> {
    takes_all_that_is_delivered(stack).await?;
    let chat = echo::chat("hello").to_string();
    let reply = stack
        .send(echo::post(
            "/v1/chat/completions",
            &[("x-request-id", "one")],
            chat.clone(),
        )?)
        .await?;
    let ranked = echo::ranked(&reply)?;
    assert_eq!(
        (reply.status, ranked.len(), reply.header("x-served-by")),
        (200, 3, ranked[0].as_str()),
        "{}",
        reply.text()
    );
    assert_eq!(reply.json()?["body"], chat, "byte for byte");

    let elsewhere = "192.0.2.1:1";
    let mut stolen = Request::post("/v1/chat/completions").header("x-echo", "1");
    for name in [
        "x-gateway-destination-endpoint",
        "x-gateway-destination-endpoint-subset",
        "x-prefiller-host-port",
        "x-switchpoint-open",
    ] {
        stolen = stolen.header(name, elsewhere);
    }
    let reply = stack.send(stolen.body(client::full(chat.clone()))?).await?;
    assert!(
        reply.status == 200 && !reply.text().contains(elsewhere),
        "{} {}",
        reply.status,
        reply.text()
    );

    let large = echo::chat(&"lorem ".repeat(80_000)).to_string();
    let reply = stack
        .send(echo::post("/v1/chat/completions", &[], large.clone())?)
        .await?;
    assert_eq!(
        (reply.status, &reply.json()?["body_bytes"]),
        (200, &json!(large.len())),
        "{}",
        reply.text()
    );
    assert_eq!(stack.get("/v1/models").await?.status, 200);

    let stream = json!({"model": "demo", "stream": true, "max_tokens": 5, "ignore_eos": true, "messages": [{"role": "user", "content": "x"}]});
    let reply = stack.post("/v1/chat/completions", &stream).await?;
    assert!(
        reply.status == 200 && reply.text().ends_with("data: [DONE]\n\n"),
        "{}",
        reply.text()
    );

    let bad = client::post(stack.address(), "/v1/chat/completions", "{").await?;
    let too_large = echo::chat(&"x".repeat(25 << 20)).to_string();
    let too_large = stack
        .send(echo::post("/v1/chat/completions", &[], too_large)?)
        .await?;
    assert_eq!(
        (bad.status, &bad.json()?["error"]["code"]),
        (400, &json!("invalid_json")),
        "{}",
        bad.text()
    );
    assert_eq!(
        (too_large.status, &too_large.json()?["error"]["code"]),
        (413, &json!("request_too_large"))
    );
    inflates(stack).await?;
    serves_listed_paths_only(stack).await?;
    fails_over(stack).await
}

/// Checks that only listed paths are served, after normalisation, and that an upgrade is refused
/// except on its own path.
async fn serves_listed_paths_only(stack: &Stack) -> Result<()> {
    let chat = echo::chat("hello").to_string();
    for same in [
        "/v1/chat/%63ompletions",
        "//v1//chat/completions",
        "/v1/x/../chat/completions",
        "/v1%2Fchat/completions",
    ] {
        let reply = stack.send(echo::post(same, &[], chat.clone())?).await?;
        assert_eq!(
            (
                reply.status,
                echo::ranked(&reply)?.len(),
                &reply.json()?["path"]
            ),
            (200, 3, &json!("/v1/chat/completions")),
            "{same}"
        );
    }
    for order in [
        "/sleep",
        "/flush_cache",
        "/v1/load_lora_adapter",
        "/v1/modelsx",
        "/v1/chat/completions/",
    ] {
        let reply = stack.send(echo::post(order, &[], chat.clone())?).await?;
        assert_eq!(reply.status, 404, "{order}: {}", reply.text());
    }
    let upgrade = [("connection", "upgrade"), ("upgrade", "websocket")];
    assert_eq!(
        stack
            .send(echo::post("/v1/chat/completions", &upgrade, chat)?)
            .await?
            .status,
        403
    );
    Ok(())
}

/// Checks that a compressed request reaches the engine decompressed, also a request with a high
/// compression ratio.
async fn inflates(stack: &Stack) -> Result<()> {
    let text = echo::chat(&limits::regular_prompt()).to_string();
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(text.as_bytes())?;
    let reply = stack
        .send(echo::post(
            "/v1/chat/completions",
            &[("content-encoding", "gzip")],
            encoder.finish()?,
        )?)
        .await?;
    let echo = reply.json()?;
    assert_eq!(
        (reply.status, &echo["body_bytes"]),
        (200, &json!(text.len())),
        "{}",
        reply.text()
    );
    assert_eq!(
        (
            echo::header(&echo, "content-encoding"),
            echo::ranked(&reply)?.len()
        ),
        (vec![], 3)
    );
    Ok(())
}

/// Checks that a dead engine costs no request: the next endpoint of the list answers. Only one
/// engine is dead, because Envoy retries a request only once if the engines have answered before.
/// So a request that crashes engines cannot crash all of them.
async fn fails_over(stack: &Stack) -> Result<()> {
    stack.servers[0]
        .fault(ServerFault::new(FaultMode::Refuse))
        .await;
    for number in 0..9 {
        let reply = stack
            .post(
                "/v1/chat/completions",
                &echo::chat(&format!("number {number}")),
            )
            .await?;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_ne!(stack.server_of(&reply)?, 0);
    }
    Ok(())
}

/// Checks that a compressed bomb does not fill the memory of a gateway that has just started.
async fn survives_bombs(stack: &mut Stack) -> Result<()> {
    let bomb = limits::gzip(limits::BOMB_BYTES)?;
    let before = limits::memory_kib(stack, "VmRSS")?;
    for _ in 0..3 {
        let reply = stack
            .send(echo::post(
                "/v1/chat/completions",
                &[("content-encoding", "gzip")],
                bomb.clone(),
            )?)
            .await?;
        assert_eq!(reply.status, 413, "{}", reply.text());
    }
    let growth = limits::memory_kib(stack, "VmHWM")?.saturating_sub(before);
    assert!(
        growth < limits::GROWTH_KIB_MAX,
        "memory was {before} KiB and grew by at most {growth} KiB"
    );
    Ok(())
}

/// Checks the protocol's metadata in the access log of our Istio configuration.
async fn metadata(stack: &Stack) -> Result<()> {
    let line = stack.envoy.access_log_of("one", LIMIT).await?;
    let destination = line["lb:x-gateway-destination-endpoint"]
        .as_str()
        .ok_or("no destination in the metadata")?;
    assert_eq!(destination.split(',').count(), 3, "{line}");
    assert_eq!(
        line["lb:x-gateway-destination-endpoint-served"],
        destination.split(',').next().unwrap_or_default(),
        "{line}"
    );
    assert_eq!(line["pool"], "default", "{line}");
    Ok(())
}

#[tokio::test]
async fn an_istio_gateway_with_the_envoyfilter() -> Result<()> {
    let (builder, _folder) = istio_gateway("istio/envoyfilter.yaml", 9)?;
    let mut stack = builder.start().await?;
    survives_bombs(&mut stack).await?;
    serves(&stack).await?;
    metadata(&stack).await
}

#[tokio::test]
async fn an_istio_gateway_with_the_wasmplugin() -> Result<()> {
    let (builder, _folder) = istio_gateway("istio/wasmplugin.yaml", 11)?;
    let mut stack = builder.start().await?;
    survives_bombs(&mut stack).await?;
    serves(&stack).await?;
    metadata(&stack).await
}

#[tokio::test]
async fn an_envoy_gateway_with_the_patches() -> Result<()> {
    let (builder, _folder) = stack(8, envoy_gateway::patched)?;
    let mut stack = builder.start().await?;
    survives_bombs(&mut stack).await?;
    serves(&stack).await
}

#[tokio::test]
async fn a_request_that_the_picker_cannot_hold_waits_for_the_first_state_with_its_body()
-> Result<()> {
    // First the filter decides at the headers, then it is a WasmPlugin with the buffer filter.
    let at_the_headers = Stack::builder()
        .servers(3)
        .picker(json!({"decide_at": "headers"}))
        .envoy_config(forbid_to_hold_headers);
    waits_for_the_first_state(at_the_headers).await?;
    let (builder, _folder) = istio_gateway("istio/wasmplugin.yaml", 11)?;
    waits_for_the_first_state(builder).await
}

async fn waits_for_the_first_state(builder: StackBuilder) -> Result<()> {
    let mut stack = builder.without_daemon().start().await?;
    let address = stack.address();
    // The client sends this body in pieces: some arrive while the request waits, some after.
    let body = echo::chat(&"lorem ".repeat(50_000)).to_string();
    let asked = {
        let body = body.clone();
        tokio::spawn(async move {
            client::send(address, echo::post("/v1/chat/completions", &[], body)?).await
        })
    };
    tokio::time::sleep(Duration::from_millis(200)).await;
    stack.start_daemon()?;
    let reply = asked.await??;
    // On a loaded machine the daemon may start after the longest wait; then the picker must have
    // refused the request.
    if reply.status == 503 {
        assert_eq!(
            reply.json()?["error"]["code"],
            "not_ready",
            "{}",
            reply.text()
        );
    } else {
        assert_eq!(
            (reply.status, &reply.json()?["body_bytes"]),
            (200, &json!(body.len())),
            "{}",
            reply.text()
        );
    }
    let again = || async {
        stack
            .post("/v1/chat/completions", &echo::chat("x"))
            .await
            .ok()
            .filter(|reply| reply.status == 200)
    };
    wait_for(LIMIT, "a reply", again).await?;
    Ok(())
}

#[test]
fn the_pods_of_an_istio_gateway_have_what_its_files_need() -> Result<()> {
    let values: Value = serde_saphyr::from_str(&std::fs::read_to_string(
        testbed::root().join("envoy-config/istio/gateway-values.yaml"),
    )?)?;
    let bootstrap = manifests::read("istio/bootstrap.yaml")?;
    let name = &manifests::only(&bootstrap, "ConfigMap")?["metadata"]["name"];
    assert_eq!(
        &values["podAnnotations"]["sidecar.istio.io/bootstrapOverride"],
        name
    );
    assert_eq!(
        values["volumes"][0]["name"],
        values["volumeMounts"][0]["name"]
    );
    assert_eq!(
        values["volumes"][0]["secret"]["secretName"],
        "switchpoint-proxy-tls"
    );
    assert_eq!(values["volumeMounts"][0]["mountPath"], manifests::MOUNTED);
    assert_eq!(
        values["readinessProbe"]["httpGet"]["path"],
        "/switchpoint/ready"
    );
    assert_eq!(values["env"]["EXIT_ON_ZERO_ACTIVE_CONNECTIONS"], "true");
    Ok(())
}

#[test]
fn both_files_for_istio_say_the_same_where_they_can() -> Result<()> {
    let patches = |file: &str| -> Result<Vec<Value>> {
        let objects = manifests::read(file)?;
        Ok(
            manifests::only(&objects, "EnvoyFilter")?["spec"]["configPatches"]
                .as_array()
                .ok_or("no patches")?
                .clone(),
        )
    };
    let whole = patches("istio/envoyfilter.yaml")?;
    let rest = patches("istio/wasmplugin.yaml")?;
    // Keeps the parts that both files have. The EnvoyFilter has the module, its filter and a
    // decompressor before the router; the other file has a decompressor before the WasmPlugin and
    // two filters after it.
    let same = |patches: Vec<Value>| -> Vec<Value> {
        let others = patches.into_iter().filter(|patch| {
            !["switchpoint", "hold", "picked_headers"]
                .iter()
                .any(|name| patch["patch"]["value"]["name"] == *name)
        });
        let value = |patch: Value| {
            let mut value = patch["patch"]["value"].clone();
            value
                .as_object_mut()
                .and_then(|value| value.remove("typed_per_filter_config"));
            (patch["applyTo"].clone(), value)
        };
        others
            .map(value)
            .map(|(to, value)| json!({"applyTo": to, "value": value}))
            .collect()
    };
    assert_eq!((whole.len(), rest.len()), (9, 9));
    let not_held = |patches: &[Value]| {
        patches
            .iter()
            .filter(|patch| !patch["patch"]["value"]["typed_per_filter_config"].is_null())
            .count()
    };
    assert_eq!((not_held(&whole), not_held(&rest)), (0, 1));
    assert_eq!(same(whole), same(rest));
    let route = |file: &str| -> Result<Value> {
        Ok(manifests::only(&manifests::read(file)?, "VirtualService")?["spec"].clone())
    };
    assert_eq!(
        route("istio/envoyfilter.yaml")?,
        route("istio/wasmplugin.yaml")?
    );
    Ok(())
}

/// Returns an Envoy route's match in the terms of a VirtualService.
fn uris(matched: &Value) -> Vec<Value> {
    let uri = |how: &str, path: &Value| json!({"uri": {how: path}});
    match (
        &matched["path_separated_prefix"],
        &matched["path"],
        &matched["prefix"],
    ) {
        (Value::String(path), ..) => vec![
            uri("exact", &json!(path)),
            uri("prefix", &json!(format!("{path}/"))),
        ],
        (_, Value::String(path), _) => vec![uri("exact", &json!(path))],
        (.., Value::String(path)) => vec![uri("prefix", &json!(path))],
        _ => vec![uri("regex", &matched["safe_regex"]["regex"])],
    }
}

#[test]
fn all_gateways_serve_the_same_paths() -> Result<()> {
    let gateway = manifests::read("envoy-gateway/gateway.yaml")?;
    let patches = manifests::only(&gateway, "EnvoyPatchPolicy")?["spec"]["jsonPatches"]
        .as_array()
        .ok_or("no patches")?;
    let routes = patches
        .iter()
        .map(|patch| &patch["operation"])
        .find(|operation| operation["path"] == "/virtual_hosts/0/routes");
    let routes = routes.ok_or("no routes")?["value"]
        .as_array()
        .into_iter()
        .flatten();
    let served: Vec<Value> = routes
        .filter(|route| route.get("route").is_some())
        .flat_map(|route| uris(&route["match"]))
        .collect();
    let istio = manifests::read("istio/envoyfilter.yaml")?;
    let service = &manifests::only(&istio, "VirtualService")?["spec"]["http"];
    let listed: Vec<Value> = service
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|entry| entry["match"].as_array())
        .flatten()
        .cloned()
        .collect();
    assert_eq!(listed, served);
    let standalone: Value = serde_saphyr::from_str(&std::fs::read_to_string(
        testbed::root().join("envoy-config/standalone.yaml"),
    )?)?;
    let manager = &standalone["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]
        ["typed_config"];
    let routes = manager["route_config"]["virtual_hosts"][0]["routes"]
        .as_array()
        .into_iter()
        .flatten();
    let matches: Vec<Value> = routes
        .filter(|route| route.get("route").is_some())
        .flat_map(|route| uris(&route["match"]))
        .collect();
    assert_eq!(matches, served);
    Ok(())
}

#[test]
fn fragments_are_those_of_the_standalone_file() -> Result<()> {
    // The manifests must equal the standalone file in the cluster and in the filters, so that no
    // file is forgotten when one changes.
    let standalone: Value = serde_saphyr::from_str(&std::fs::read_to_string(
        testbed::root().join("envoy-config/standalone.yaml"),
    )?)?;
    let cluster = &standalone["static_resources"]["clusters"][0];
    let istio = manifests::read("istio/envoyfilter.yaml")?;
    let patches = &manifests::only(&istio, "EnvoyFilter")?["spec"]["configPatches"];
    let value = |to: &str, name: &str| {
        let of = patches
            .as_array()
            .into_iter()
            .flatten()
            .filter(|patch| patch["applyTo"] == to)
            .map(|patch| &patch["patch"]["value"]);
        of.clone()
            .find(|value| value["name"] == name)
            .cloned()
            .unwrap_or_default()
    };
    assert_eq!(value("CLUSTER", "inference-pool"), *cluster);
    let filters = &standalone["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]
        ["typed_config"];
    let filter = |name: &str| {
        filters["http_filters"]
            .as_array()
            .into_iter()
            .flatten()
            .find(|filter| filter["name"] == name)
            .cloned()
    };
    for name in ["gunzip", "header_to_metadata"] {
        assert_eq!(Some(value("HTTP_FILTER", name)), filter(name));
    }
    let listener = &standalone["static_resources"]["listeners"][0];
    let patched = patches
        .as_array()
        .into_iter()
        .flatten()
        .find(|patch| patch["applyTo"] == "LISTENER")
        .ok_or("no listener")?;
    assert_eq!(
        patched["patch"]["value"],
        json!({"per_connection_buffer_limit_bytes": listener["per_connection_buffer_limit_bytes"]})
    );
    let stripped = &value(
        "NETWORK_FILTER",
        "envoy.filters.network.http_connection_manager",
    )["typed_config"];
    assert_eq!(
        stripped["early_header_mutation_extensions"],
        filters["early_header_mutation_extensions"]
    );

    let gateway = manifests::read("envoy-gateway/gateway.yaml")?;
    let patches = manifests::only(&gateway, "EnvoyPatchPolicy")?["spec"]["jsonPatches"]
        .as_array()
        .ok_or("no patches")?
        .clone();
    let patched = |name: &str| {
        patches
            .iter()
            .map(|patch| &patch["operation"]["value"])
            .find(|value| value["name"] == name)
            .cloned()
    };
    assert_eq!(patched("inference-pool").as_ref(), Some(cluster));
    for name in ["gunzip", "header_to_metadata"] {
        assert_eq!(patched(name), filter(name));
    }
    let removed = &manifests::only(&gateway, "ClientTrafficPolicy")?["spec"]["headers"]["earlyRequestHeaders"]
        ["remove"];
    let mutations = &filters["early_header_mutation_extensions"][0]["typed_config"]["mutations"];
    let names: Vec<&Value> = mutations
        .as_array()
        .into_iter()
        .flatten()
        .map(|mutation| &mutation["remove"])
        .collect();
    assert_eq!(
        removed.as_array().map(|names| names.iter().collect()),
        Some(names)
    );
    Ok(())
}

#[tokio::test]
async fn the_daemon_takes_the_arguments_of_its_manifests() -> Result<()> {
    for file in ["kubernetes/daemon.yaml", "kubernetes/sidecar.yaml"] {
        let objects = manifests::read(file)?;
        let pod = &manifests::only(&objects, "Deployment")?["spec"]["template"]["spec"];
        let containers = ["containers", "initContainers"]
            .iter()
            .filter_map(|list| pod[list].as_array())
            .flatten();
        let daemon = containers
            .clone()
            .find(|container| container["name"] == "switchpointd")
            .ok_or("no daemon")?;
        let arguments = daemon["args"]
            .as_array()
            .ok_or("no arguments")?
            .iter()
            .filter_map(Value::as_str)
            .map(str::to_owned);
        // The folders of a pod do not exist on this machine, and its ports may be in use. So the
        // test replaces folders and ports, and the daemon must start with all other flags.
        let folder = tempfile::tempdir()?;
        let port = || ReservedPort::lease();
        let state = port()?;
        let ext_proc = port()?;
        let health = port()?;
        let admin = port()?;
        let metrics = port()?;
        let certificates = Authority::new()?.folder(manifests::DAEMON)?;
        let here = |argument: String| {
            let path = |name: &str| folder.path().join(name).display().to_string();
            let certificate = |name: &str| certificates.path().join(name).display().to_string();
            let listens = [
                ("state", &state),
                ("ext-proc", &ext_proc),
                ("health", &health),
                ("admin", &admin),
                ("metrics", &metrics),
            ];
            let taken = listens.iter().find_map(|(name, port)| {
                argument
                    .strip_prefix(&format!("--listen-{name}="))
                    .map(|_| (name, port))
            });
            match taken {
                Some((name, port)) => format!("--listen-{name}={}", port.address()),
                None => argument
                    .replace("/etc/switchpointd/pools.yaml", &path("pools.yaml"))
                    .replace("/var/lib/switchpointd/state.json", &path("state.json"))
                    .replace("/etc/switchpointd-tls/tls.crt", &certificate("daemon.pem"))
                    .replace("/etc/switchpointd-tls/tls.key", &certificate("daemon.key"))
                    .replace("/etc/switchpointd-tls/ca.crt", &certificate("ca.pem")),
            }
        };
        let mut arguments: Vec<String> = arguments.map(here).collect();
        for (name, port) in [
            ("state", &state),
            ("ext-proc", &ext_proc),
            ("admin", &admin),
        ] {
            if !arguments
                .iter()
                .any(|argument| argument.starts_with(&format!("--listen-{name}=")))
            {
                arguments.push(format!("--listen-{name}={}", port.address()));
            }
        }
        std::fs::write(
            folder.path().join("pools.yaml"),
            "pools: [{name: default, endpoints: [\"127.0.0.1:1\"]}]",
        )?;
        let mut command = std::process::Command::new(testbed::daemon::binary()?);
        let process = testbed::process::ChildProcess::spawn(
            "switchpointd",
            command.args(&arguments),
            folder.path(),
        )?;
        let live = || async {
            client::get(admin.address(), "/metrics")
                .await
                .ok()
                .filter(|reply| reply.status == 200)
        };
        let up = wait_for(LIMIT, "the daemon", live).await;
        assert!(
            up.is_ok(),
            "{file}: {arguments:?}: {}",
            process.log_tail(20)
        );
    }
    Ok(())
}
