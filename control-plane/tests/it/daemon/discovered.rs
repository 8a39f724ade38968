//! A pool whose endpoints register themselves, from the command line to the roster.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::harness::{daemon, get_json};

/// A lost process is noticed by three missed heartbeats of five seconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// A program that is ended with its test.
struct Sidecar(Child);

impl Drop for Sidecar {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn switchpointd(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_switchpointd"));
    command.args(arguments).stdin(Stdio::null());
    command
}

fn register(folder: &Path, component: &str, name: &str, address: &str, more: &[&str]) -> Sidecar {
    let folder = folder.to_str().unwrap();
    let line = ["register", "--directory", folder, "--namespace", "dynamo", "--component", component, "--name", name, "--address", address];
    Sidecar(switchpointd(&[&line, more].concat()).spawn().unwrap())
}

#[tokio::test]
async fn processes_that_register_are_in_the_pool_while_they_are_well() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("instances");
    let components = "[{name: decode, role: decode}, {name: prefill, role: prefill}]";
    let pools = root.path().join("pools.yaml");
    let text = format!("pools: [{{name: p, directory: {{path: {}, namespace: dynamo, components: {components}}}}}]", folder.display());
    std::fs::write(&pools, text).unwrap();
    let daemon = daemon(&["--pools", pools.to_str().unwrap()]).await;
    let members = || async {
        let pools = daemon.shared.pools.borrow().clone();
        let role = |labels: &[(String, String)]| labels.iter().find(|(key, _)| key == "llm-d.ai/role").map(|(_, role)| role.clone());
        let row = |m: &control_plane::pool::Member| format!("{} {} {:?}", m.instance.name, m.instance.address, role(&m.instance.labels));
        let mut rows: Vec<String> = pools.get("p").into_iter().flat_map(|view| view.members.iter().map(row)).collect();
        rows.sort();
        rows.join(", ")
    };
    let is = |expected: &'static str| {
        let members = &members;
        async move {
            let began = Instant::now();
            while members().await != expected {
                assert!(began.elapsed() < PATIENCE, "{}, not {expected}", members().await);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    };

    let (health, told) = watch::channel(StatusCode::SERVICE_UNAVAILABLE);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let probe = format!("http://{}/health", listener.local_addr().unwrap());
    let router = Router::new().route("/health", get(move || async move { *told.borrow() }));
    tokio::spawn(async move { axum::serve(listener, router).await });
    let metadata = root.path().join("metadata.json");
    std::fs::write(&metadata, r#"{"Model": {"name": "Qwen3-32B"}, "Transport": {"port": 9001}}"#).unwrap();
    let decode = register(&folder, "decode", "d0", "127.0.0.1:9000", &["--probe", &probe, "--metadata-file", metadata.to_str().unwrap()]);
    let _prefill = register(&folder, "prefill", "p0", "127.0.0.1:9002", &[]);
    is("p0 127.0.0.1:9002 Some(\"prefill\")").await;
    health.send_replace(StatusCode::OK);
    is("d0 127.0.0.1:9001 Some(\"decode\"), p0 127.0.0.1:9002 Some(\"prefill\")").await;

    let list = switchpointd(&["instances", "--namespace", "dynamo", "--component", "decode", "--directory", folder.to_str().unwrap()]);
    let listed = tokio::task::spawn_blocking(move || { list }.output().unwrap()).await.unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    assert!(listed.contains("d0") && listed.contains("127.0.0.1:9001") && listed.contains("Qwen3-32B"), "{listed}");

    health.send_replace(StatusCode::INTERNAL_SERVER_ERROR);
    is("p0 127.0.0.1:9002 Some(\"prefill\")").await;
    let seen = || async {
        let seen = get_json(daemon.admin_address, "/debug/instances").await;
        let row = seen["instances"].as_array().unwrap().iter().find(|row| row["name"] == "d0").unwrap();
        format!("{} {} {}", row["state"].as_str().unwrap(), row["component"].as_str().unwrap(), row["reason"].as_str().unwrap())
    };
    assert_eq!(seen().await, "not_ready decode it says that it is not ready");
    health.send_replace(StatusCode::OK);
    is("d0 127.0.0.1:9001 Some(\"decode\"), p0 127.0.0.1:9002 Some(\"prefill\")").await;
    drop(decode); // killed: its heartbeats end
    is("p0 127.0.0.1:9002 Some(\"prefill\")").await;
    assert_eq!(seen().await, "not_ready decode no heartbeat for more than 15s");
    daemon.stop().await;
}

#[test]
fn a_command_line_that_says_not_where_is_refused() {
    for line in [
        ["register", "--namespace", "n", "--component", "c"].as_slice(),
        &["register", "--namespace", "n", "--component", "c", "--directory", "d"],
        &["register", "--namespace", "n", "--component", "c", "--kubernetes", "k", "--name", "pod"],
        &["instances", "--namespace", "n", "--component", "c", "--directory", "d", "--kubernetes", "k"],
    ] {
        let mut child = switchpointd(line).env_remove("POD_NAME").stderr(Stdio::piped()).spawn().unwrap();
        let mut text = String::new();
        child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(2), "{line:?}: {text}");
    }
}
