//! After a long outage of the API server, Kubernetes reports every pod as not ready until its
//! kubelet is back. Engines that answer their scrapes stay in the pool.

use std::net::SocketAddr;
use std::process::Stdio;
use std::time::{Duration, Instant};

use axum::Router;
use axum::routing::get;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::AbortHandle;

use super::discovered::{DaemonLog, kubeconfig, switchpointd};
use super::fake_api::FakeApi;
use super::harness::{self, get_json, until};

/// The time for which the pool is observed while its nodes are lost. In a real cluster a kubelet
/// was back after 4.7 s.
const OBSERVED: Duration = Duration::from_secs(2);

/// A limit for removals that must be immediate, with room for a busy machine. The limit is less
/// than the time after which a silent or unconfirmed endpoint would leave.
const AT_ONCE: Duration = Duration::from_secs(4);

/// The pods 0, 1, ... of an InferencePool, in a fake API server; their engines are at 127.0.0.2,
/// 127.0.0.3, ...
struct LostNodeDrill {
    fake: FakeApi,
    admin: SocketAddr,
    engines: Vec<AbortHandle>,
}

#[derive(Clone, Copy)]
enum PodState {
    Ready,
    /// The node of the pod is not ready.
    NodeLost,
    /// The readiness probe of the pod fails.
    ProbeFails,
    Terminating,
}

// === impl LostNodeDrill ===

impl LostNodeDrill {
    /// Returns the pods as /debug/endpoints shows them: `name state`.
    async fn shown(&self) -> String {
        let page = get_json(self.admin, "/debug/endpoints").await;
        let rows = page["endpoints"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|row| row["state"] != "departing");
        let mut rows: Vec<String> = rows
            .map(|row| {
                format!(
                    "{} {}",
                    row["name"].as_str().unwrap(),
                    row["state"].as_str().unwrap()
                )
            })
            .collect();
        rows.sort();
        rows.join(", ")
    }

    async fn shows(&self, expected: &str) {
        until(expected, || async { self.shown().await == expected }).await;
    }

    fn pod(&self, number: usize, state: PodState) {
        put_pod(&self.fake, number, state);
    }

    async fn metric(&self) -> String {
        let page = harness::get(self.admin, "/metrics").await.1;
        page.lines()
            .find(|line| line.starts_with("switchpoint_endpoints_unconfirmed{"))
            .unwrap_or_default()
            .to_owned()
    }
}

fn put_pod(fake: &FakeApi, number: usize, state: PodState) {
    let (ready, containers, reason) = match state {
        PodState::Ready | PodState::Terminating => ("True", "True", None),
        PodState::NodeLost => ("False", "True", None),
        PodState::ProbeFails => ("False", "False", Some("ContainersNotReady")),
    };
    let conditions = json!([{"type": "Ready", "status": ready, "reason": reason}, {"type": "ContainersReady", "status": containers}]);
    let mut metadata = json!({"name": format!("p{number}"), "namespace": "default", "uid": number.to_string(), "labels": {"app": "vllm"}});
    if matches!(state, PodState::Terminating) {
        metadata["deletionTimestamp"] = "2026-11-25T00:00:00Z".into();
    }
    let status = json!({"podIP": format!("127.0.0.{}", number + 2), "phase": "Running", "conditions": conditions});
    fake.put("pods", json!({"metadata": metadata, "status": status}));
}

/// Starts `count` engines, which listen on one port of 127.0.0.2, 127.0.0.3, ... Returns the port.
async fn engines(count: u8) -> (u16, Vec<AbortHandle>) {
    let mut port = 0;
    let mut tasks = Vec::new();
    for number in 0..count {
        let listener = TcpListener::bind((std::net::Ipv4Addr::new(127, 0, 0, number + 2), port))
            .await
            .unwrap();
        port = listener.local_addr().unwrap().port();
        let page = || async { "vllm:num_requests_waiting{model_name=\"m\"} 0\n" };
        let router = Router::new().route("/metrics", get(page));
        tasks.push(tokio::spawn(async move { axum::serve(listener, router).await }).abort_handle());
    }
    (port, tasks)
}

#[tokio::test]
async fn engines_that_answer_stay_when_all_nodes_are_reported_lost() {
    let root = tempfile::tempdir().unwrap();
    let fake = FakeApi::start().await;
    let (port, engines) = engines(4).await;
    let spec = json!({"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": port}], "endpointPickerRef": {"name": "epp"}});
    fake.put("inferencepools", json!({"apiVersion": "x", "kind": "InferencePool", "metadata": {"name": "llama"}, "spec": spec}));
    (0..4).for_each(|number| put_pod(&fake, number, PodState::Ready));
    let pools = root.path().join("pools.json");
    std::fs::write(
        &pools,
        json!({"pools": [{"name": "p", "inferencePool": {"name": "llama"}}]}).to_string(),
    )
    .unwrap();
    let any = "127.0.0.1:0";
    let mut child =
        tokio::process::Command::from(switchpointd(&["serve", "--pools", pools.to_str().unwrap()]))
            .args([
                "--listen-state",
                any,
                "--listen-admin",
                any,
                "--listen-health",
                "none",
                "--listen-ext-proc",
                "none",
            ])
            .args([
                "--log-format",
                "json",
                "--scrape-interval",
                "100ms",
                "--staleness-max",
                "1s",
            ])
            .env("KUBECONFIG", kubeconfig(root.path(), &fake))
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
    let log = DaemonLog::read(child.stderr.take().unwrap());
    let admin = log.line("\"serving\"").await["admin"]
        .as_str()
        .unwrap()
        .parse()
        .unwrap();
    let drill = LostNodeDrill {
        fake,
        admin,
        engines,
    };
    drill.shows("p0 ready, p1 ready, p2 ready, p3 ready").await;
    let scraped = || async {
        harness::get(admin, "/debug/endpoints")
            .await
            .1
            .matches("\"reason\":\"\"")
            .count()
            == 4
    };
    until("that all engines are scraped", scraped).await;

    // The nodes are lost one after another, as the node lifecycle controller reports it.
    for number in 0..4 {
        drill.pod(number, PodState::NodeLost);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    drill
        .shows("p0 unconfirmed, p1 unconfirmed, p2 unconfirmed, p3 unconfirmed")
        .await;
    let began = Instant::now();
    while began.elapsed() < OBSERVED {
        assert_eq!(
            drill.shown().await,
            "p0 unconfirmed, p1 unconfirmed, p2 unconfirmed, p3 unconfirmed"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(
        drill.metric().await,
        "switchpoint_endpoints_unconfirmed{pool=\"p\"} 4.0"
    );
    let said = log.line("stay while they answer").await;
    assert!(
        said["level"] == "WARN" && said["why"].as_str().unwrap().contains("node"),
        "{said}"
    );
    let row = get_json(admin, "/debug/endpoints").await["endpoints"][0].clone();
    assert!(
        row["slot"].is_number()
            && row["reason"]
                .as_str()
                .unwrap()
                .starts_with("kept for at most 300 s"),
        "{row}"
    );

    // These are deliberate removals, and an engine that is dead.
    drill.removed_at_once(0, None).await;
    drill.removed_at_once(1, Some(PodState::ProbeFails)).await;
    drill.engines[2].abort();
    let in_pool = |row: &Value| row["slot"].is_number() && row["state"] != "departing";
    let left = || async { !drill.rows("p2").await.iter().any(in_pool) };
    until("that the dead engine leaves", left).await;
    assert_eq!(
        drill.shown().await,
        "p2 unconfirmed, p3 unconfirmed",
        "it is still shown, with the reason"
    );
    assert_eq!(
        drill.metric().await,
        "switchpoint_endpoints_unconfirmed{pool=\"p\"} 1.0"
    );

    // The kubelets are back.
    drill.pod(3, PodState::Ready);
    drill.shows("p2 unconfirmed, p3 ready").await;
    log.line("discovery confirms all endpoints again").await;
    assert_eq!(
        drill.metric().await,
        "switchpoint_endpoints_unconfirmed{pool=\"p\"} 0.0"
    );
    drill.pod(3, PodState::NodeLost);
    drill.shows("p2 unconfirmed, p3 unconfirmed").await;
    drill.removed_at_once(3, Some(PodState::Terminating)).await;
}

impl LostNodeDrill {
    async fn rows(&self, name: &str) -> Vec<Value> {
        let page = get_json(self.admin, "/debug/endpoints").await;
        page["endpoints"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|row| row["name"] == name)
            .cloned()
            .collect()
    }

    /// Deletes the pod, or gives it this state, and checks that it leaves the pool immediately.
    async fn removed_at_once(&self, number: usize, state: Option<PodState>) {
        let name = format!("p{number}");
        let began = Instant::now();
        match state {
            Some(state) => self.pod(number, state),
            None => self.fake.delete("pods", &name),
        }
        until(&format!("that {name} leaves"), || async {
            !self.shown().await.contains(&name)
        })
        .await;
        assert!(
            began.elapsed() < AT_ONCE,
            "{name} left after {:?}",
            began.elapsed()
        );
    }
}
