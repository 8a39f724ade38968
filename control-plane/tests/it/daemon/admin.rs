//! The admin listener, as operators, probes and Prometheus use it.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use control_plane::cli::args::OutputFormat;
use control_plane::cli::explain::{self, ExplainArgs, ExplainRequest, WaitingCaller, ask};
use prost::Message;
use proto::state::{self, proxy_message};
use serde_json::json;

use super::harness::{FilterStream, daemon, get, get_json, until};
use super::outsiders::LoggedDaemon;

/// Parses a page with `prometheus_client` and fails on lines that it refuses. Returns the samples,
/// one per line.
fn parse(page: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let python = root.join(".venv/bin/python");
    assert!(
        python.exists(),
        "{} is missing: run `make setup` first",
        python.display()
    );
    let script = "
import sys
from prometheus_client.openmetrics.parser import text_string_to_metric_families
for family in text_string_to_metric_families(sys.stdin.read()):
    for s in family.samples:
        print(s.name, sorted(s.labels.items()), float(s.value))
";
    let mut child = Command::new(python)
        .args(["-c", script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(page.as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(
        output.status.success(),
        "{}\n{page}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test]
async fn metrics_are_valid_and_say_what_the_proxies_reported() {
    let daemon = daemon(&["--endpoint", "127.0.0.1:1"]).await;
    let (mut filter, _) = FilterStream::connect(daemon.state_address, "n", 1, &["default"]).await;
    let pool_update = filter.pool_update().await;
    let mut counts = vec![0; proto::HISTOGRAM_BOUNDS.len() + 1];
    (counts[3], counts[20]) = (2, 1);
    let model = state::ModelCounters {
        model: "we\"ird\\na\nme".to_owned(),
        target_model: "m".to_owned(),
        priority: -1,
        requests: 3,
        errors: vec![state::Count {
            key: "503".to_owned(),
            count: 1,
        }],
        ttft_ms: Some(state::Histogram {
            counts,
            sum: 700_014.0,
        }),
        prompt_tokens: 300,
        cached_tokens: 100,
        slo: vec![5, 6, 7],
        ..Default::default()
    };
    let e = &pool_update.endpoints[0];
    let row = state::EndpointCounters {
        slot: e.slot,
        generation: e.generation,
        picked: 3,
        served: 2,
        failed: 1,
        requests: 1,
        ..Default::default()
    };
    let vm = state::VmCounters {
        pool: "default".to_owned(),
        vm_id: 1,
        endpoints: vec![row],
        models: vec![model],
        ..Default::default()
    };
    filter
        .say(proxy_message::Message::Report(state::Report {
            counters: vec![vm.encode_to_vec()],
        }))
        .await;
    until("the report is counted", || async {
        get(daemon.admin_address, "/metrics")
            .await
            .1
            .contains("switchpoint_reports_total 1")
    })
    .await;

    let samples = parse(&get(daemon.admin_address, "/metrics").await.1);
    for expected in [
        r#"llm_d_epp_request_total [('model_name', 'we"ird\\na\nme'), ('pool', 'default'), ('priority', '-1'), ('target_model_name', 'm')] 3.0"#,
        "llm_d_epp_request_ttft_seconds_count",
        "('error_code', '503')",
        "llm_d_epp_ready_endpoints [('name', 'default')] 1.0",
        "llm_d_epp_inflight_requests [('endpoint_name', '127.0.0.1:1')",
        "llm_d_epp_scheduler_attempts_total",
        "switchpoint_endpoint_failed_total",
        "switchpoint_proxies [('pool', 'default')] 1.0",
        "switchpoint_pool_revision",
        r#"switchpoint_slo_requests_total [('model_name', 'we"ird\\na\nme'), ('outcome', 'missed'), ('pool', 'default')"#,
        "switchpoint_latency_predicted_seconds_count [('pool', 'default'), ('target', 'ttft')] 0.0",
        "switchpoint_latency_actual_to_predicted_ratio_bucket",
    ] {
        assert!(samples.contains(expected), "no {expected} in\n{samples}");
    }
    let le = |bound: &str| {
        samples
            .lines()
            .find(|l| {
                l.starts_with("llm_d_epp_request_ttft_seconds_bucket")
                    && l.contains(&format!("('le', '{bound}')"))
            })
            .map(str::to_owned)
    };
    assert!(
        le("0.01").unwrap().ends_with(" 2.0") && le("+Inf").unwrap().ends_with(" 3.0"),
        "buckets are cumulative and in seconds"
    );
    daemon.stop().await;
}

#[tokio::test]
async fn running_requests_with_an_slo_are_shown_by_their_own_ids() {
    let daemon = daemon(&["--endpoint", "127.0.0.1:1"]).await;
    let (mut filter, _) = FilterStream::connect(daemon.state_address, "n", 1, &["default"]).await;
    let endpoint = filter.pool_update().await.endpoints[0].clone();
    let vm = |vm_id: u64, running: String| {
        state::VmCounters {
            pool: "default".to_owned(),
            vm_id,
            running,
            ..Default::default()
        }
        .encode_to_vec()
    };
    let queue = json!([{"slot": endpoint.slot, "generation": endpoint.generation, "running": [{"request": "abc", "tpot_slo_us": 80_000}]}]);
    let counters = vec![
        vm(1, queue.to_string()),
        vm(2, "[1, null]".to_owned()),
        vm(3, "no JSON".to_owned()),
        vm(4, "x".repeat(1 << 17)),
    ];
    filter
        .say(proxy_message::Message::Report(state::Report { counters }))
        .await;
    until("the report is counted", || async {
        get(daemon.admin_address, "/metrics")
            .await
            .1
            .contains("switchpoint_reports_total 1")
    })
    .await;
    let page = get_json(daemon.admin_address, "/debug/running").await;
    let running = json!([{"request": "abc", "tpot_slo_us": 80_000}]);
    let unknown = json!({"pool": "default", "endpoint": null, "running": null});
    let named = json!({"pool": "default", "endpoint": "127.0.0.1:1", "running": running});
    assert_eq!(page, json!({"queues": [named, unknown, unknown]}));
    daemon.stop().await;
}

#[tokio::test]
async fn every_endpoint_is_shown_with_state_and_reason() {
    let daemon = daemon(&["--endpoint", "127.0.0.1:1"]).await;
    until("a scrape failed", || async {
        let row = get_json(daemon.admin_address, "/debug/endpoints").await["endpoints"][0].clone();
        row["reason"]
            .as_str()
            .is_some_and(|r| r.contains("cannot connect"))
    })
    .await;
    let row = get_json(daemon.admin_address, "/debug/endpoints").await["endpoints"][0].clone();
    for key in [
        "name",
        "address",
        "pool",
        "state",
        "reason",
        "since",
        "generation",
        "in_flight",
    ] {
        assert!(!row[key].is_null(), "{key} in {row}");
    }
    assert_eq!(
        row["state"], "ready",
        "a failing scrape is no reason not to route"
    );
    assert!(row["metrics"]["queue_depth"].is_null());
    daemon.stop().await;
}

#[tokio::test]
async fn the_state_page_shows_connected_peers_and_their_state() {
    let args = ["--endpoint", "127.0.0.1:1", "--listen-ext-proc", "none"];
    let daemon = LoggedDaemon::start(1_024, &args, "serving").await;
    let admin = daemon.at("admin");
    let process_id = 0x1234_5678_9abc_def0;
    let (mut filter, _) =
        FilterStream::connect(daemon.at("state"), "node-7", process_id, &["default"]).await;
    filter.pool_update().await;
    let acked = || async {
        !get_json(admin, "/debug/state").await["proxies"][0]["pools"][0]["acked"].is_null()
    };
    until("the acknowledgement is shown", acked).await;
    let state = get_json(admin, "/debug/state").await;
    assert_eq!(state["proxies"][0]["node_id"], "node-7");
    assert_eq!(
        state["pools"][0]["profiles"],
        serde_json::json!(["default"])
    );
    until("the log names the proxy", || async {
        daemon.log().contains("node-7")
    })
    .await;
    let shown = format!("{state} {}", daemon.log());
    for hidden in [format!("{process_id:x}"), process_id.to_string()] {
        assert!(
            !shown.contains(&hidden),
            "a peer that knows it can take over the stream: {shown}"
        );
    }
}

#[tokio::test]
async fn a_question_that_cannot_be_explained_gets_an_error() {
    let daemon = daemon(&["--endpoint", "127.0.0.1:1", "--endpoint", "127.0.0.1:2"]).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("body.json");
    std::fs::write(&file, r#"{"model":"m","prompt":"x"}"#).unwrap();
    let without = |admin: String, addresses: &[&str]| {
        let without = addresses
            .iter()
            .map(|&address| address.to_owned())
            .collect();
        let question = ExplainRequest {
            path: "/v1/completions".to_owned(),
            without,
            ..ExplainRequest::default()
        };
        ask(ExplainArgs {
            admin,
            admin_token_file: None,
            file: file.clone(),
            config: None,
            question,
            format: OutputFormat::Text,
        })
    };
    let admin = daemon.admin_address.to_string();
    until("the endpoints are known", || async {
        without(admin.clone(), &["127.0.0.1:1"]).await.is_ok()
    })
    .await;
    let absent = without(admin.clone(), &["127.0.0.1:1", "127.0.0.1:3"])
        .await
        .unwrap_err();
    assert!(
        absent.contains("no endpoint 127.0.0.1:3 in pool default"),
        "{absent}"
    );
    let nobody = without("127.0.0.1:1".to_owned(), &[]).await.unwrap_err();
    assert!(
        nobody.to_lowercase().contains("refused"),
        "why nobody answered: {nobody}"
    );
}

#[tokio::test]
async fn an_explanation_whose_caller_no_longer_waits_is_not_computed() {
    let daemon = daemon(&["--endpoint", "127.0.0.1:1"]).await;
    let question = ExplainRequest {
        request: r#"{"model":"m","prompt":"x"}"#.to_owned(),
        path: "/v1/completions".to_owned(),
        ..ExplainRequest::default()
    };
    let (waits, caller) = WaitingCaller::pair();
    until("the endpoint is known", || async {
        explain::answer(&daemon.shared, &question, &caller).is_ok()
    })
    .await;
    drop(waits);
    let stopped = explain::answer(&daemon.shared, &question, &caller).unwrap_err();
    assert!(stopped.contains("no client waits"), "{stopped}");
    daemon.stop().await;
}

#[tokio::test]
async fn explain_shows_the_cost_of_each_endpoint_by_term() {
    let daemon = daemon(&["--endpoint", "127.0.0.1:1", "--endpoint", "127.0.0.1:2"]).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("body.json");
    std::fs::write(&file, r#"{"model":"m","prompt":"x"}"#).unwrap();
    let explain = |format| {
        let question = ExplainRequest {
            path: "/v1/completions".to_owned(),
            ..ExplainRequest::default()
        };
        ask(ExplainArgs {
            admin: daemon.admin_address.to_string(),
            admin_token_file: None,
            file: file.clone(),
            config: None,
            question,
            format,
        })
    };
    until("both endpoints are ready", || async {
        explain(OutputFormat::Text)
            .await
            .is_ok_and(|text| text.matches("127.0.0.1:").count() > 4)
    })
    .await;
    let answer: serde_json::Value =
        serde_json::from_str(&explain(OutputFormat::Json).await.unwrap()).unwrap();
    let cost = answer["candidates"][0]["cost"].as_object().unwrap();
    assert!(cost["prefill_ms"].as_f64().unwrap() > 0.0, "{answer:#}");
    assert_eq!(cost["failure_ms"], 0);
    let text = explain(OutputFormat::Text).await.unwrap();
    assert!(
        text.contains("cost in ms, lowest is best") && text.contains("delay_ms"),
        "{text}"
    );
    daemon.stop().await;
}
