//! The Kubernetes manifests match the daemon's ports.

use std::path::Path;
use std::sync::Arc;

use clap::Parser;
use control_plane::cli::args::{Cli, CliCommand, ServeArgs};
use control_plane::serve::exposure;
use control_plane::serve::health::{LIVENESS, READINESS};
use control_plane::state::client_names::ClientNames;
use control_plane::state::peer::Origin;
use serde_json::{Value, json};

fn objects(file: &str) -> Vec<Value> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../envoy-config/kubernetes")
        .join(file);
    serde_saphyr::from_multiple(&std::fs::read_to_string(file).unwrap()).unwrap()
}

fn of_kind<'o>(objects: &'o [Value], kind: &str) -> &'o Value {
    objects
        .iter()
        .find(|object| object["kind"] == kind)
        .unwrap()
}

fn container(objects: &[Value]) -> &Value {
    let pod = &of_kind(objects, "Deployment")["spec"]["template"]["spec"];
    let all = ["containers", "initContainers"]
        .iter()
        .filter_map(|list| pod[list].as_array())
        .flatten();
    all.into_iter()
        .find(|container| container["name"] == "switchpointd")
        .unwrap()
}

fn arguments(objects: &[Value]) -> ServeArgs {
    let arguments = container(objects)["args"]
        .as_array()
        .unwrap()
        .iter()
        .map(|argument| argument.as_str().unwrap());
    let CliCommand::Serve(serve) =
        Cli::try_parse_from(["switchpointd"].into_iter().chain(arguments))
            .unwrap()
            .command
    else {
        panic!("not serve")
    };
    *serve
}

fn health_port(serve: &ServeArgs) -> u16 {
    serve.ext_proc.listen_health.0.unwrap().port()
}

#[test]
fn no_listener_is_exposed_without_protection() {
    for file in ["daemon.yaml", "sidecar.yaml", "inference-pool.yaml"] {
        assert_eq!(
            exposure::check(&arguments(&objects(file))),
            Ok(Vec::new()),
            "{file}"
        );
    }
}

#[test]
fn a_daemon_that_stands_by_is_kept_alive_and_gets_gateways() {
    let objects = objects("daemon.yaml");
    let health = health_port(&arguments(&objects));
    let probe = |name: &str| container(&objects)[name]["grpc"].clone();
    assert_eq!(
        probe("livenessProbe"),
        json!({"port": health, "service": LIVENESS})
    );
    assert_eq!(
        probe("readinessProbe"),
        json!({"port": health, "service": READINESS})
    );
    assert_eq!(
        of_kind(&objects, "Service")["spec"].get("publishNotReadyAddresses"),
        None
    );
}

#[test]
fn only_the_proxies_of_the_documented_certificates_may_have_state() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/how-to/certificates.md");
    let page = std::fs::read_to_string(page).unwrap();
    let [_, block, ..] = &page.split("```").collect::<Vec<_>>()[..] else {
        panic!("no manifest in it")
    };
    let documented: Vec<Value> =
        serde_saphyr::from_multiple(block.strip_prefix("yaml").unwrap()).unwrap();
    let proxies = documented
        .iter()
        .find(|object| object["spec"]["secretName"] == "switchpoint-proxy-tls")
        .unwrap();
    let named = container(&objects("daemon.yaml"))["args"].clone();
    let names = proxies["spec"]["dnsNames"].as_array().unwrap();
    let wanted = names.iter().map(|name| {
        json!(format!(
            "--state-tls-client-names={}",
            name.as_str().unwrap()
        ))
    });
    let found = named.as_array().unwrap().iter().filter(|argument| {
        let argument = argument.as_str().unwrap();
        argument.starts_with("--state-tls-client-names")
    });
    assert_eq!(
        found.cloned().collect::<Vec<_>>(),
        wanted.collect::<Vec<_>>()
    );
}

#[test]
fn the_network_policy_is_of_the_ports_that_are_open() {
    let serve = arguments(&objects("daemon.yaml"));
    let mut open = vec![
        serve.listen_state.port(),
        serve.ext_proc.listen_ext_proc.0.unwrap().port(),
        serve.listen_metrics.0.unwrap().port(),
        health_port(&serve),
    ];
    let policy = objects("network-policy.yaml");
    let rules = of_kind(&policy, "NetworkPolicy")["spec"]["ingress"]
        .as_array()
        .unwrap();
    let ports = rules
        .iter()
        .flat_map(|rule| rule["ports"].as_array().unwrap())
        .map(|port| port["port"].as_u64().unwrap());
    let mut admitted: Vec<u16> = ports.map(|port| u16::try_from(port).unwrap()).collect();
    open.sort_unstable();
    admitted.sort_unstable();
    assert_eq!(admitted, open);
}

/// Returns the rendered charts that a test of the chart keeps equal to its templates.
fn rendered_charts() -> Vec<(String, Vec<Value>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/charts/tests/golden");
    let files = std::fs::read_dir(folder).unwrap();
    let mut charts: Vec<_> = files
        .map(|file| file.unwrap().path())
        .map(|path| {
            let text = std::fs::read_to_string(&path).unwrap();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            (name, serde_saphyr::from_multiple(&text).unwrap())
        })
        .collect();
    charts.sort_by(|(one, _), (other, _)| one.cmp(other));
    assert!(charts.len() >= 8, "{}", charts.len());
    charts
}

/// Checks the file of learned models in the rendered charts, and that the template still has the
/// same argument. The group `charts` of CI renders the templates, with Helm.
#[test]
fn the_chart_keeps_learned_models_beside_the_snapshot_in_a_volume() {
    let template = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../deploy/charts/switchpoint/templates/daemon.yaml");
    let template = std::fs::read_to_string(template).unwrap();
    for (chart, objects) in rendered_charts() {
        let objects = Value::Array(objects);
        let mut containers = Vec::new();
        with_key(&objects, "args", &mut containers);
        let daemon = containers
            .into_iter()
            .find(|container| container["name"] == "switchpointd")
            .unwrap();
        let folder_of = |flag: &str| {
            let arguments = daemon["args"].as_array().unwrap();
            let path = arguments
                .iter()
                .find_map(|argument| argument.as_str()?.strip_prefix(flag))
                .unwrap_or_else(|| panic!("{chart}: no {flag}"));
            let line = format!("- {flag}{path}\n");
            assert!(
                template.contains(&line),
                "{chart}: no {line} in the template"
            );
            let folder = Path::new(path).parent().unwrap();
            folder.to_str().unwrap().to_owned()
        };
        let folder = folder_of("--latency-model-file=");
        assert_eq!(folder, folder_of("--snapshot-file="), "{chart}");
        let mounts = daemon["volumeMounts"].as_array().unwrap();
        assert!(
            mounts.contains(&json!({"name": "state", "mountPath": folder})),
            "{chart}: {mounts:?}"
        );
    }
}

/// Collects every object below `value` that has the key.
fn with_key<'v>(value: &'v Value, key: &str, found: &mut Vec<&'v Value>) {
    match value {
        Value::Object(fields) => {
            found.extend(fields.contains_key(key).then_some(value));
            fields
                .values()
                .for_each(|value| with_key(value, key, found));
        }
        Value::Array(values) => values.iter().for_each(|value| with_key(value, key, found)),
        _ => {}
    }
}

#[test]
fn the_chart_limits_what_the_daemon_connects_to_and_who_calls_it() {
    let mut callers = 0;
    let mut without = Vec::new();
    for (chart, objects) in rendered_charts() {
        let policies = objects
            .iter()
            .filter(|object| object["kind"] == "NetworkPolicy");
        let of_daemon = policies.map(|policy| &policy["spec"]).find(|spec| {
            let labels = &spec["podSelector"]["matchLabels"];
            labels["app.kubernetes.io/name"] == "switchpoint-daemon"
        });
        let Some(daemon) = of_daemon else {
            without.push(chart);
            continue;
        };
        assert_eq!(daemon["policyTypes"], json!(["Ingress", "Egress"]));
        for rule in daemon["egress"].as_array().unwrap() {
            let Some(to) = rule["to"].as_array() else {
                let ports = rule["ports"].as_array().unwrap();
                let is_known = |port: &Value| [53, 443, 6443].map(Value::from).contains(port);
                assert!(ports.iter().all(|port| is_known(&port["port"])), "{chart}");
                continue;
            };
            for peer in to
                .iter()
                .filter(|peer| peer["ipBlock"]["cidr"] == "0.0.0.0/0")
            {
                let metadata = json!(["169.254.0.0/16"]);
                assert_eq!(peer["ipBlock"]["except"], metadata, "{chart}");
            }
        }
        for rule in daemon["ingress"].as_array().unwrap() {
            let ports = rule["ports"].as_array().unwrap();
            if ports.iter().any(|port| port["port"] == 9002) {
                let from = rule["from"].as_array().unwrap();
                let names_pods = |peer: &Value| {
                    peer.pointer("/podSelector/matchLabels").is_some()
                        || peer.pointer("/namespaceSelector/matchLabels").is_some()
                };
                assert!(!from.is_empty() && from.iter().all(names_pods), "{chart}");
                callers += 1;
            }
        }
    }
    assert_eq!(callers, 1, "one of the charts has the ext_proc server");
    assert_eq!(
        without,
        ["existing-secret.yaml"],
        "its values turn policies off"
    );
}

#[test]
fn the_proxies_of_the_chart_have_its_pools_and_no_other_certificate_has_one() {
    let (_, objects) = rendered_charts()
        .into_iter()
        .find(|(chart, _)| chart == "many-pools.yaml")
        .unwrap();
    let of_daemon = objects
        .iter()
        .find_map(|object| object["data"]["pools.yaml"].as_str())
        .unwrap();
    let file: Value = serde_saphyr::from_str(of_daemon).unwrap();
    let pools: Vec<String> = file["pools"]
        .as_array()
        .unwrap()
        .iter()
        .map(|pool| pool["name"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(pools, ["llama", "qwen", "mistral", "fixed"]);
    let served: Vec<Arc<str>> = pools.iter().map(|pool| Arc::from(pool.as_str())).collect();
    let serve = arguments(&objects);
    let names = ClientNames::try_new(serve.state_tls.state_tls_client_names, &served).unwrap();
    let allowed = |certificate: Option<&str>| {
        let origin = Origin {
            certificate: certificate.map(Arc::from),
            address: None,
        };
        names.sort(pools.clone(), &origin, &served).allowed
    };
    // Envoys run in the namespace of the release, and as sidecars in `edge`, where the pool `fixed`
    // is not.
    assert_eq!(allowed(Some("proxy.sp.switchpoint")), pools);
    assert_eq!(allowed(Some("proxy.sp.edge")), &pools[..3]);
    for other in [
        None,
        Some("proxy.sp.prod"),
        Some("sp-daemon.switchpoint.svc"),
    ] {
        assert!(allowed(other).is_empty(), "{other:?}");
    }
}

/// Helm is not needed to see that the value of the chart sets the flag. With Helm,
/// `deploy/charts/tests` checks the same in a rendered chart.
#[test]
fn the_chart_can_require_certificates_of_gateways_with_ext_proc() {
    let template = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../deploy/charts/switchpoint/templates/daemon.yaml");
    let template = std::fs::read_to_string(template).unwrap();
    let lines: Vec<&str> = template.lines().map(str::trim).collect();
    let required = [
        "{{- if .Values.extProc.clientCertificates }}",
        "- --ext-proc-tls-client-ca=/etc/switchpointd-tls/ca.crt",
        "{{- end }}",
    ];
    assert!(lines.windows(3).any(|window| window == required));
}

#[test]
fn the_chart_gives_keys_to_their_group_only_and_names_the_proxies() {
    for (chart, mut objects) in rendered_charts() {
        // Envoy Gateway's own pods have no group that may read the key.
        objects.retain(|object| object["kind"] != "EnvoyProxy");
        let objects = Value::Array(objects);
        let mut volumes = Vec::new();
        with_key(&objects, "secret", &mut volumes);
        let secrets: Vec<_> = volumes
            .iter()
            .map(|volume| &volume["secret"])
            .filter(|secret| secret["secretName"].is_string())
            .collect();
        assert!(!secrets.is_empty(), "{chart}");
        for secret in secrets {
            assert_eq!(secret["defaultMode"], 0o440, "{chart}: {secret}");
        }
        let mut containers = Vec::new();
        with_key(&objects, "args", &mut containers);
        let names = containers
            .iter()
            .filter_map(|container| container["args"].as_array())
            .flatten()
            .filter_map(Value::as_str)
            .filter(|argument| argument.starts_with("--state-tls-client-names="))
            .count();
        // A user who provides certificates chooses the names too.
        let is_own = chart == "existing-secret.yaml";
        assert!(
            names > 0 || is_own,
            "{chart}: any client of the CA is a proxy"
        );
    }
}
