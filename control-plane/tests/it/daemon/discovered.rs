//! A pool whose endpoints register themselves, from the command line to the pool update.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::http::StatusCode;
use axum::routing;
use control_plane::daemon::StandbyDaemon;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::fake_api::FakeApi;
use super::harness::{Daemon, daemon, get, get_json, serve, until};

/// The maximum wait for a change. The daemon notices a lost process after three missed heartbeats
/// of five seconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// A process that ends with its test.
struct SidecarProcess(Child);

impl Drop for SidecarProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(super) fn switchpointd(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_switchpointd"));
    command.args(arguments).stdin(Stdio::null());
    command.env("SWITCHPOINT_LOCAL_ENDPOINTS", "true");
    command
}

fn register(
    folder: &Path,
    component: &str,
    name: &str,
    address: &str,
    more: &[&str],
) -> SidecarProcess {
    let folder = folder.to_str().unwrap();
    let line = [
        "register",
        "--directory",
        folder,
        "--namespace",
        "dynamo",
        "--component",
        component,
        "--name",
        name,
        "--address",
        address,
    ];
    SidecarProcess(switchpointd(&[&line, more].concat()).spawn().unwrap())
}

/// Returns the members of pool `p` as text: name, address and role.
fn members(daemon: &Daemon) -> String {
    let pools = daemon.shared.pools.views.borrow().clone();
    let role = |labels: &[(String, String)]| {
        labels
            .iter()
            .find(|(key, _)| key == "llm-d.ai/role")
            .map(|(_, role)| role.clone())
    };
    let row = |m: &control_plane::pool::writer::PoolMember| {
        format!(
            "{} {} {:?}",
            m.instance.name,
            m.instance.address,
            role(&m.instance.labels)
        )
    };
    let mut rows: Vec<String> = pools
        .get("p")
        .into_iter()
        .flat_map(|view| view.members.iter().map(row))
        .collect();
    rows.sort();
    rows.join(", ")
}

/// Waits until the pool has these members.
async fn wait_for_members(daemon: &Daemon, expected: &str) {
    let began = Instant::now();
    while members(daemon) != expected {
        assert!(
            began.elapsed() < PATIENCE,
            "{}, not {expected}",
            members(daemon)
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn processes_that_register_are_in_the_pool_while_they_are_well() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("instances");
    let components = "[{name: decode, role: decode}, {name: prefill, role: prefill}]";
    let pools = root.path().join("pools.yaml");
    let text = format!(
        "pools: [{{name: p, directory: {{path: {}, namespace: dynamo, components: {components}}}}}]",
        folder.display()
    );
    std::fs::write(&pools, text).unwrap();
    let daemon = daemon(&["--pools", pools.to_str().unwrap()]).await;
    let is = |expected: &'static str| wait_for_members(&daemon, expected);

    let (health, answer) = watch::channel(StatusCode::SERVICE_UNAVAILABLE);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let probe = format!("http://{}/health", listener.local_addr().unwrap());
    let router = Router::new().route(
        "/health",
        routing::get(move || async move { *answer.borrow() }),
    );
    tokio::spawn(async move { axum::serve(listener, router).await });
    let metadata = root.path().join("metadata.json");
    std::fs::write(
        &metadata,
        r#"{"Model": {"name": "Qwen3-32B"}, "Transport": {"port": 9001}}"#,
    )
    .unwrap();
    let decode = register(
        &folder,
        "decode",
        "d0",
        "127.0.0.1:9000",
        &[
            "--probe",
            &probe,
            "--metadata-file",
            metadata.to_str().unwrap(),
        ],
    );
    let says = r#"{"Model": {"name": "Qwen3-32B"}, "Transport": {"port": 9003}}"#;
    let process = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/metadata", process.local_addr().unwrap());
    tokio::spawn(async move {
        axum::serve(
            process,
            Router::new().route("/metadata", routing::get(move || async move { says })),
        )
        .await
    });
    let _prefill = register(
        &folder,
        "prefill",
        "p0",
        "127.0.0.1:9002",
        &["--metadata-url", &url],
    );
    is("p0 127.0.0.1:9003 Some(\"prefill\")").await;
    health.send_replace(StatusCode::OK);
    is("d0 127.0.0.1:9001 Some(\"decode\"), p0 127.0.0.1:9003 Some(\"prefill\")").await;

    let list = switchpointd(&[
        "instances",
        "--namespace",
        "dynamo",
        "--component",
        "decode",
        "--directory",
        folder.to_str().unwrap(),
    ]);
    let listed = tokio::task::spawn_blocking(move || { list }.output().unwrap())
        .await
        .unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    assert!(
        listed.contains("d0") && listed.contains("127.0.0.1:9001") && listed.contains("Qwen3-32B"),
        "{listed}"
    );

    let lines = [
        "instances",
        "--namespace",
        "dynamo",
        "--component",
        "decode",
        "--directory",
        folder.to_str().unwrap(),
        "--watch",
    ];
    let mut watching = tokio::process::Command::from(switchpointd(&lines))
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut watched = BufReader::new(watching.stdout.take().unwrap()).lines();
    let mut line = async || {
        tokio::time::timeout(PATIENCE, watched.next_line())
            .await
            .expect("a line in time")
            .unwrap()
            .unwrap()
    };
    assert_eq!(line().await, "+ d0 127.0.0.1:9001 Qwen3-32B");

    health.send_replace(StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(line().await, "- d0");
    is("p0 127.0.0.1:9003 Some(\"prefill\")").await;
    let seen = || async {
        let seen = get_json(daemon.admin_address, "/debug/instances").await;
        let row = seen["instances"]
            .as_array()
            .unwrap()
            .iter()
            .find(|row| row["name"] == "d0")
            .unwrap();
        format!(
            "{} {} {}",
            row["state"].as_str().unwrap(),
            row["component"].as_str().unwrap(),
            row["reason"].as_str().unwrap()
        )
    };
    assert_eq!(
        seen().await,
        "not_ready decode it reports that it is not ready"
    );
    health.send_replace(StatusCode::OK);
    is("d0 127.0.0.1:9001 Some(\"decode\"), p0 127.0.0.1:9003 Some(\"prefill\")").await;
    drop(decode); // The worker is killed, so its heartbeats end.
    is("p0 127.0.0.1:9003 Some(\"prefill\")").await;
    assert_eq!(
        seen().await,
        "not_ready decode no heartbeat for more than 15s"
    );
    daemon.stop().await;
}

/// Checks that a standby that becomes the leader knows the endpoints that it followed. The source
/// of these endpoints is gone by then, so the daemon could not read them again.
#[tokio::test]
async fn a_standby_leads_with_the_endpoints_that_it_followed() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("instances");
    let pools = root.path().join("pools.yaml");
    let text = format!(
        "pools: [{{name: p, directory: {{path: {}, namespace: dynamo, components: [{{name: decode}}]}}}}]",
        folder.display()
    );
    std::fs::write(&pools, text).unwrap();
    let _worker = register(&folder, "decode", "d0", "127.0.0.1:9000", &[]);
    let arguments = serve(&["--pools", pools.to_str().unwrap()]);
    let following = StandbyDaemon::start(arguments).await.unwrap();
    let seen = || async {
        get_json(following.admin_address, "/debug/instances").await["instances"][0]["state"]
            == "ready"
    };
    until("that the worker is followed", seen).await;
    std::fs::rename(&folder, root.path().join("aside")).unwrap();
    std::fs::write(&folder, "not a folder").unwrap();
    let daemon = Daemon::from_standby(following).await;
    until("that it leads with its set", || async {
        get(daemon.admin_address, "/readyz").await.0 == 200
    })
    .await;
    let page = get_json(daemon.admin_address, "/debug/endpoints").await;
    assert_eq!(page["endpoints"][0]["name"], "d0", "{page}");
    daemon.stop().await;
}

/// The log of a daemon, line by line.
pub(super) struct DaemonLog(Arc<Mutex<Vec<Value>>>);

impl DaemonLog {
    pub(super) fn read(stderr: tokio::process::ChildStderr) -> Self {
        let all = Self(Arc::default());
        let said = Arc::clone(&all.0);
        let mut lines = BufReader::new(stderr).lines();
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                said.lock()
                    .unwrap()
                    .push(serde_json::from_str(&line).unwrap());
            }
        });
        all
    }

    /// Waits for a line with this text, and returns the first such line.
    pub(super) async fn line(&self, part: &str) -> Value {
        let found = || {
            self.0
                .lock()
                .unwrap()
                .iter()
                .find(|line| line.to_string().contains(part))
                .cloned()
        };
        until(part, || async { found().is_some() }).await;
        found().unwrap()
    }
}

/// Writes the kubeconfig of this API server into the folder.
pub(super) fn kubeconfig(folder: &Path, fake: &FakeApi) -> PathBuf {
    let path = folder.join("kubeconfig");
    let clusters = json!([{"name": "c", "cluster": {"server": fake.url}}]);
    let contexts = json!([{"name": "x", "context": {"cluster": "c", "user": "u"}}]);
    let config = json!({"apiVersion": "v1", "kind": "Config", "clusters": clusters, "users": [{"name": "u", "user": {}}], "contexts": contexts,
        "current-context": "x"});
    std::fs::write(&path, config.to_string()).unwrap();
    path
}

/// Checks that the daemon reports what an InferencePool wants in the log and on the admin pages,
/// because the daemon cannot configure the gateway of an InferencePool.
#[tokio::test]
async fn the_gateway_settings_of_an_inference_pool_are_reported() {
    let root = tempfile::tempdir().unwrap();
    let fake = FakeApi::start().await;
    let ask = |failure_mode: &str| {
        let spec = json!({"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 8000}], "appProtocol": "kubernetes.io/h2c",
            "endpointPickerRef": {"name": "epp", "failureMode": failure_mode}});
        fake.put("inferencepools", json!({"apiVersion": "x", "kind": "InferencePool", "metadata": {"name": "llama"}, "spec": spec}));
    };
    ask("FailOpen");
    let kubeconfig = kubeconfig(root.path(), &fake);
    let pools = root.path().join("pools.json");
    std::fs::write(
        &pools,
        json!({"pools": [{"name": "p", "inferencePool": {"name": "llama"}}]}).to_string(),
    )
    .unwrap();
    let any = "127.0.0.1:0";
    let listen = [
        "--listen-state",
        any,
        "--listen-admin",
        any,
        "--listen-health",
        any,
        "--listen-ext-proc",
        "none",
        "--log-format",
        "json",
    ];
    let mut child =
        tokio::process::Command::from(switchpointd(&["serve", "--pools", pools.to_str().unwrap()]))
            .args(listen)
            .env("KUBECONFIG", kubeconfig)
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
    let log = DaemonLog::read(child.stderr.take().unwrap());
    let serving = log.line("\"serving\"").await;
    let asked = log.line("FailOpen").await;
    let how = asked["message"].as_str().unwrap();
    assert!(
        asked["level"] == "WARN"
            && asked["inference_pool"] == "llama"
            && how.contains("--ext-proc-failure-mode"),
        "{asked}"
    );
    let admin = serving["admin"].as_str().unwrap().parse().unwrap();
    let shown = || async {
        get_json(admin, "/debug/instances").await["sources"][0]["failure_mode"].clone()
    };
    assert_eq!(shown().await, "FailOpen");
    let other = log.line("another protocol").await;
    let said = ["level", "pool", "inference_pool", "app_protocol", "cluster"]
        .map(|key| other[key].as_str().unwrap().to_owned());
    assert_eq!(said, ["WARN", "p", "llama", "kubernetes.io/h2c", "http"]);
    assert_eq!(
        get_json(admin, "/debug/instances").await["sources"][0]["app_protocol"],
        "kubernetes.io/h2c"
    );
    let metrics = get(admin, "/metrics").await.1;
    assert!(
        metrics.contains("switchpoint_protocol_mismatch{pool=\"p\",component=\"llama\"} 1"),
        "{metrics}"
    );
    ask("FailClose");
    assert_eq!(log.line("FailClose").await["level"], "INFO");
    assert_eq!(shown().await, "FailClose");
    fake.delete("inferencepools", "llama");
    until("a deleted pool has no settings", || async {
        shown().await.is_null()
    })
    .await;
}

#[test]
fn a_command_line_that_says_not_where_is_refused() {
    for line in [
        ["register", "--namespace", "n", "--component", "c"].as_slice(),
        &[
            "register",
            "--namespace",
            "n",
            "--component",
            "c",
            "--directory",
            "d",
        ],
        &[
            "register",
            "--namespace",
            "n",
            "--component",
            "c",
            "--kubernetes",
            "k",
            "--name",
            "pod",
        ],
        &[
            "instances",
            "--namespace",
            "n",
            "--component",
            "c",
            "--directory",
            "d",
            "--kubernetes",
            "k",
        ],
    ] {
        let mut child = switchpointd(line)
            .env_remove("POD_NAME")
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut text = String::new();
        child
            .stderr
            .take()
            .unwrap()
            .read_to_string(&mut text)
            .unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(2), "{line:?}: {text}");
    }
}
