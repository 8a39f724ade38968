//! The Kubernetes manifests match the daemon's ports.

use std::path::Path;

use clap::Parser;
use control_plane::cli::args::{Cli, CliCommand, ServeArgs};
use control_plane::serve::exposure;
use control_plane::serve::health::{LIVENESS, READINESS};
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
