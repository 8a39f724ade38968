//! Flow control immediately refuses a request that waiting cannot help. The request gets the answer
//! that it gets without flow control, in each picker mode.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use e2e::queued_requests::{self, SEATS};
use e2e::slo::example;
use scheduler::latency::LatencyModel;
use scheduler::latency::step::StepModel;
use serde_json::{Value, json};
use testbed::Result;
use testbed::client::{self, ClientReply};
use testbed::envoy::subset_hint_filter;
use testbed::stack::{PickerMode, Stack, StackBuilder};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::{LIMIT, until_queued};

/// The maximum time until a refusal. A held request would wait for seconds, until a running request
/// has ended.
const AT_ONCE: Duration = Duration::from_secs(2);

/// The output tokens of a request that runs until the test ends: for half a minute or more.
const ENDLESS: u32 = 3_000;

/// The pause between two requests. It is longer than a worker needs to learn of the requests of the
/// other worker.
const APART: Duration = Duration::from_millis(50);

/// An address that no endpoint has.
const ELSEWHERE: &str = "10.9.9.9:1";

/// A request that no endpoint can serve.
struct HopelessRequest {
    name: &'static str,
    model: &'static str,
    subset: Option<String>,
}

/// Describes a stack with two engines, with or without flow control, and a pool that names its only
/// model.
fn builder(
    front: PickerMode,
    workers: u32,
    has_flow_control: bool,
    folder: &Path,
) -> Result<StackBuilder> {
    let builder = Stack::builder()
        .front(front)
        .servers_like(2, &queued_requests::slow_engine())
        .concurrency(workers);
    let builder = queued_requests::holding(
        builder.filter_before_picker(subset_hint_filter()),
        folder,
        SEATS,
    )?;
    queued_requests::replace(folder, has_flow_control.then_some(SEATS))?;
    let model = json!({"apiVersion": "inference.networking.x-k8s.io/v1alpha2", "kind": "InferenceModel", "metadata": {"name": "demo"},
                       "spec": {"modelName": "demo", "poolRef": {"name": "default"}}});
    let objects = folder.join("objects.yaml");
    std::fs::write(
        &objects,
        format!("{}\n---\n{model}", std::fs::read_to_string(&objects)?),
    )?;
    Ok(builder.daemon_arguments(&["--strict-models"]))
}

/// Sends the request in the band `batch`. If requests wait, they wait in this band.
fn send(stack: &Stack, hopeless: &HopelessRequest) -> Result<JoinHandle<Result<ClientReply>>> {
    let body = json!({"model": hopeless.model, "max_tokens": 1, "messages": [{"role": "user", "content": hopeless.name}]});
    let mut head =
        http::Request::post("/v1/chat/completions").header("content-type", "application/json");
    if let Some(subset) = &hopeless.subset {
        head = head.header("x-test-subset", subset);
    }
    let request = head
        .header("x-llm-d-inference-objective", "batch")
        .body(client::full(body.to_string()))?;
    Ok(tokio::spawn(client::send(stack.address(), request)))
}

/// Returns the status, reason and code of an answer.
fn verdict(reply: &ClientReply) -> Result<String> {
    let body: Value = reply.json()?;
    Ok(format!(
        "{} {} {}",
        reply.status,
        reply.header("x-llm-d-request-dropped-reason"),
        body["error"]["code"]
    ))
}

/// Returns the answers of one stack, by request.
async fn refusals(
    front: PickerMode,
    workers: u32,
    has_flow_control: bool,
) -> Result<BTreeMap<&'static str, String>> {
    let folder = tempfile::tempdir()?;
    let mut stack = builder(front, workers, has_flow_control, folder.path())?
        .shared_envoy()
        .start()
        .await?;
    // With flow control, four requests run and two wait. The test sends them one after another,
    // because two workers may use the same room twice while nothing is held.
    let mut running = Vec::new();
    for _ in 0..6 {
        running.extend(queued_requests::send(&stack, 1, "batch", ENDLESS)?);
        tokio::time::sleep(APART).await;
    }
    if has_flow_control {
        until_queued(&stack, |held| held == 2).await?;
    }
    let mut verdicts = BTreeMap::new();
    let hopeless = |name, model, subset: Option<&str>| HopelessRequest {
        name,
        model,
        subset: subset.map(str::to_owned),
    };
    for request in [
        hopeless("another subset", "demo", Some(ELSEWHERE)),
        hopeless("unknown model", "nope", None),
    ] {
        let reply = timeout(AT_ONCE, send(&stack, &request)?)
            .await
            .map_err(|_| format!("{}: no answer", request.name))???;
        verdicts.insert(request.name, verdict(&reply)?);
    }
    let leaving = stack.servers[1].addr().to_string();
    let request = hopeless("a subset that leaves", "demo", Some(&leaving));
    let asked = if has_flow_control {
        let asked = send(&stack, &request)?;
        until_queued(&stack, |held| held == 3).await?;
        stack.set_pool(&[0])?;
        asked
    } else {
        stack.set_pool(&[0])?;
        let left = || async {
            stack
                .daemon
                .as_ref()?
                .endpoints()
                .await
                .ok()
                .filter(|left| left.len() == 1)
                .map(|_| ())
        };
        testbed::wait_for(LIMIT, "the daemon to have one endpoint", left).await?;
        tokio::time::sleep(AT_ONCE).await;
        send(&stack, &request)?
    };
    let reply = timeout(2 * AT_ONCE, asked)
        .await
        .map_err(|_| format!("{}: no answer", request.name))???;
    verdicts.insert(request.name, verdict(&reply)?);

    // No request waits for the first endpoint of an empty pool, unless the configuration says that
    // the pool scales from zero.
    let waits = hopeless("a pool that becomes empty", "demo", None);
    let asked = if has_flow_control {
        let asked = send(&stack, &waits)?;
        until_queued(&stack, |held| held == 3).await?;
        Some(asked)
    } else {
        None
    };
    stack.set_pool(&[])?;
    let empty = || async {
        stack
            .daemon
            .as_ref()?
            .endpoints()
            .await
            .ok()
            .filter(Vec::is_empty)
            .map(|_| ())
    };
    testbed::wait_for(LIMIT, "the daemon to have no endpoint", empty).await?;
    let asked = match asked {
        Some(asked) => asked,
        None => {
            tokio::time::sleep(AT_ONCE).await;
            send(&stack, &waits)?
        }
    };
    let reply = timeout(2 * AT_ONCE, asked)
        .await
        .map_err(|_| format!("{}: no answer", waits.name))???;
    verdicts.insert(waits.name, verdict(&reply)?);
    let request = hopeless("an empty pool", "demo", None);
    let reply = timeout(AT_ONCE, send(&stack, &request)?)
        .await
        .map_err(|_| format!("{}: no answer", request.name))???;
    verdicts.insert(request.name, verdict(&reply)?);
    if has_flow_control {
        until_queued(&stack, |held| held == 0).await?;
    }
    running.iter().for_each(JoinHandle::abort);
    Ok(verdicts)
}

async fn check(front: PickerMode, workers: u32) -> Result<()> {
    let expected = BTreeMap::from(
        [
            (
                "another subset",
                r#"503 rejected-no-endpoints "no_eligible_endpoint""#,
            ),
            ("unknown model", r#"404 unknown-model "model_not_found""#),
            (
                "a subset that leaves",
                r#"503 rejected-no-endpoints "no_eligible_endpoint""#,
            ),
            (
                "a pool that becomes empty",
                r#"503 rejected-no-endpoints "no_ready_endpoint""#,
            ),
            (
                "an empty pool",
                r#"503 rejected-no-endpoints "no_ready_endpoint""#,
            ),
        ]
        .map(|(name, verdict)| (name, verdict.to_owned())),
    );
    for has_flow_control in [false, true] {
        assert_eq!(
            refusals(front, workers, has_flow_control).await?,
            expected,
            "flow control: {has_flow_control}"
        );
    }
    Ok(())
}

#[tokio::test]
async fn hopeless_requests_are_refused_at_once_by_the_filter() -> Result<()> {
    check(PickerMode::Filter, 1).await
}

#[tokio::test]
async fn hopeless_requests_are_refused_at_once_by_two_workers() -> Result<()> {
    check(PickerMode::Filter, 2).await
}

#[tokio::test]
async fn hopeless_requests_are_refused_at_once_by_the_ext_proc_server() -> Result<()> {
    check(PickerMode::ExtProc, 1).await
}

// === SLOs ===

/// The predicted TTFT of every request, in ms, by a model that the daemon has from a file.
const TTFT_MS: f32 = 900.0;

/// A request with an SLO, or without one, at a pool whose only engine is busy.
struct SloCell {
    name: &'static str,
    objective: &'static str,
    headers: &'static [(&'static str, &'static str)],
    verdict: &'static str,
}

const BY_SLO: (&str, &str) = ("PredictionBasedRouting", "true");
const NOT_BY_SLO: (&str, &str) = ("PredictionBasedRouting", "false");

/// The requests with their expected results while latency is predicted. SLOs count only by the
/// header of the proposal, and a critical request is served late. Without prediction, all are
/// served.
const SLO_CELLS: [SloCell; 12] = [
    SloCell {
        name: "loose",
        objective: "standard",
        headers: &[BY_SLO, ("x-slo-ttft-ms", "60000")],
        verdict: "200",
    },
    SloCell {
        name: "strict",
        objective: "standard",
        headers: &[BY_SLO, ("x-slo-ttft-ms", "1")],
        verdict: r#"429 rejected-saturated "slo_unattainable""#,
    },
    SloCell {
        name: "strict, by the newer name",
        objective: "standard",
        headers: &[BY_SLO, ("x-llm-d-slo-ttft-ms", "1")],
        verdict: r#"429 rejected-saturated "slo_unattainable""#,
    },
    SloCell {
        name: "strict TPOT, batch",
        objective: "batch",
        headers: &[BY_SLO, ("x-slo-tpot-ms", "0.1")],
        verdict: r#"429 rejected-saturated "slo_unattainable""#,
    },
    SloCell {
        name: "strict, critical",
        objective: "critical",
        headers: &[BY_SLO, ("x-slo-ttft-ms", "1")],
        verdict: "200",
    },
    SloCell {
        name: "strict, not asked for",
        objective: "standard",
        headers: &[("x-slo-ttft-ms", "1")],
        verdict: "200",
    },
    SloCell {
        name: "strict, header false",
        objective: "standard",
        headers: &[NOT_BY_SLO, ("x-slo-ttft-ms", "1")],
        verdict: "200",
    },
    SloCell {
        name: "none, header false",
        objective: "standard",
        headers: &[NOT_BY_SLO],
        verdict: r#"400 invalid-request "missing_slo""#,
    },
    SloCell {
        name: "none",
        objective: "standard",
        headers: &[BY_SLO],
        verdict: r#"400 invalid-request "missing_slo""#,
    },
    SloCell {
        name: "none, not asked for",
        objective: "standard",
        headers: &[],
        verdict: r#"400 invalid-request "missing_slo""#,
    },
    SloCell {
        name: "no number",
        objective: "critical",
        headers: &[BY_SLO, ("x-slo-ttft-ms", "soon")],
        verdict: r#"400 invalid-request "invalid_header""#,
    },
    SloCell {
        name: "no answer to the question",
        objective: "standard",
        headers: &[
            ("PredictionBasedRouting", "perhaps"),
            ("x-slo-ttft-ms", "1"),
        ],
        verdict: r#"400 invalid-request "invalid_header""#,
    },
];

/// Describes a stack with the proposal's example on one engine and a model from a file, with or
/// without flow control.
fn slo_builder(front: PickerMode, has_flow_control: bool, folder: &Path) -> Result<StackBuilder> {
    let path = |name: &str| folder.join(name).display().to_string();
    let gate = if has_flow_control {
        "featureGates: [flowControl]\n"
    } else {
        ""
    };
    std::fs::write(
        path("picker.yaml"),
        std::fs::read_to_string(example())? + "\n" + gate,
    )?;
    let objective = |(name, priority): (&str, i32)| {
        json!({"apiVersion": "llm-d.ai/v1alpha2", "kind": "InferenceObjective", "metadata": {"name": name},
               "spec": {"priority": priority, "poolRef": {"name": "default"}}})
        .to_string()
    };
    let objectives = [("critical", 1), ("standard", 0), ("batch", -1)];
    std::fs::write(
        path("objects.yaml"),
        objectives.map(objective).join("\n---\n"),
    )?;
    let models = json!({"step": StepModel::default().words(), "latency": LatencyModel::constant(TTFT_MS, 20.0).words()});
    std::fs::write(
        path("models.json"),
        json!({"schema": 1, "pools": {"default": models}}).to_string(),
    )?;
    let config = path("picker.yaml");
    let objects = path("objects.yaml");
    let models = path("models.json");
    let arguments = [
        "--config",
        &config,
        "--objects",
        &objects,
        "--latency-model-file",
        &models,
    ];
    let builder = Stack::builder()
        .front(front)
        .servers_like(1, &queued_requests::slow_engine());
    Ok(builder
        .picker(json!({"objective_header": "trust", "slo_headers": "trust"}))
        .daemon_arguments(&arguments))
}

async fn check_slos(front: PickerMode) -> Result<()> {
    for has_flow_control in [false, true] {
        let folder = tempfile::tempdir()?;
        let stack = slo_builder(front, has_flow_control, folder.path())?
            .daemon_arguments(&["--latency-prediction"])
            .shared_envoy()
            .start()
            .await?;
        e2e::slo::predicts(&stack, LIMIT).await?;
        let mut running = Vec::new();
        for _ in 0..2 {
            // Every request of such a pool must have an SLO.
            let mut request = queued_requests::request("critical", ENDLESS)?;
            request
                .headers_mut()
                .insert("x-slo-ttft-ms", http::HeaderValue::from_static("60000"));
            running.push(tokio::spawn(client::send(stack.address(), request)));
        }
        // An idle engine takes every request. So the test waits until the proxy knows that the
        // engine is busy, and has the model.
        let is_shed = || async {
            (slo_verdict(&stack, &SLO_CELLS[1]).await.ok()? == SLO_CELLS[1].verdict).then_some(())
        };
        testbed::wait_for(LIMIT, "the engine to be busy", is_shed).await?;
        for cell in &SLO_CELLS {
            let verdict = slo_verdict(&stack, cell).await?;
            assert_eq!(
                verdict, cell.verdict,
                "{front:?}, flow control: {has_flow_control}, {}",
                cell.name
            );
        }
        running.iter().for_each(JoinHandle::abort);
    }
    let folder = tempfile::tempdir()?;
    let unpredicted = slo_builder(front, false, folder.path())?
        .shared_envoy()
        .start()
        .await?;
    for cell in &SLO_CELLS {
        let verdict = slo_verdict(&unpredicted, cell).await?;
        assert_eq!(
            verdict, "200",
            "{front:?}, without prediction, {}",
            cell.name
        );
    }
    Ok(())
}

async fn slo_verdict(stack: &Stack, cell: &SloCell) -> Result<String> {
    // A request that is not a stream has no TTFT.
    let body = json!({"model": "demo", "max_tokens": 2, "stream": true, "messages": [{"role": "user", "content": cell.name}]});
    let head =
        http::Request::post("/v1/chat/completions").header("content-type", "application/json");
    let head = cell
        .headers
        .iter()
        .fold(head, |head, (name, value)| head.header(*name, *value));
    let request = head
        .header("x-llm-d-inference-objective", cell.objective)
        .body(client::full(body.to_string()))?;
    let reply = timeout(LIMIT, client::send(stack.address(), request))
        .await
        .map_err(|_| format!("{}: no answer", cell.name))??;
    if reply.status == 200 {
        Ok("200".to_owned())
    } else {
        verdict(&reply)
    }
}

#[tokio::test]
async fn slos_are_refused_and_served_alike_by_the_filter() -> Result<()> {
    check_slos(PickerMode::Filter).await
}

#[tokio::test]
async fn slos_are_refused_and_served_alike_by_the_ext_proc_server() -> Result<()> {
    check_slos(PickerMode::ExtProc).await
}

// === clients that leave ===

/// The length of the body of a request that waits, in bytes.
const LONG_BODY: usize = 2_000_000;

/// The number of requests with a body of [`LONG_BODY`] bytes.
const LEAVING: usize = 8;

/// Returns the number of bytes that the ext_proc server holds, from the daemon's metrics.
async fn held_by_daemon(stack: &Stack) -> Option<f64> {
    let page = stack.daemon.as_ref()?.admin("/metrics").await.ok()?.text();
    page.lines().find_map(|line| {
        line.strip_prefix("switchpoint_ext_proc_held_bytes ")?
            .parse()
            .ok()
    })
}

async fn held_by_envoy(stack: &Stack) -> Option<f64> {
    let page: Value = serde_json::from_str(&stack.envoy.admin_page("/memory").await.ok()?).ok()?;
    page["allocated"].as_str()?.parse().ok()
}

/// Checks that Envoy and the daemon free the bodies of held requests whose clients leave.
async fn check_leaving(front: PickerMode) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stack = queued_requests::builder(front, folder.path(), &queued_requests::slow_engine())?
        .start()
        .await?;
    let running = queued_requests::send(&stack, SEATS as usize + 1, "chat", ENDLESS)?;
    until_queued(&stack, |held| held == 1).await?;
    let before = held_by_envoy(&stack).await.ok_or("Envoy's memory")?;
    let body = json!({"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "x".repeat(LONG_BODY)}]}).to_string();
    let request = || http::Request::post("/v1/chat/completions").body(client::full(body.clone()));
    let waiting: Vec<_> = (0..LEAVING)
        .map(|_| Ok(tokio::spawn(client::send(stack.address(), request()?))))
        .collect::<Result<_>>()?;
    until_queued(&stack, |held| held == 1 + LEAVING as u64).await?;
    let all = (LEAVING * LONG_BODY) as f64;
    let full = held_by_envoy(&stack).await.ok_or("Envoy's memory")?;
    assert!(
        full - before >= all,
        "Envoy has the bodies: {before} bytes, then {full}"
    );
    waiting.iter().for_each(JoinHandle::abort);
    until_queued(&stack, |held| held == 1).await?;
    let freed = || async {
        let envoy = held_by_envoy(&stack).await?;
        let daemon = held_by_daemon(&stack).await?;
        (envoy - before < all / 4.0 && daemon < LONG_BODY as f64).then_some(())
    };
    testbed::wait_for(LIMIT, "the bodies to be freed", freed).await?;
    assert!(
        running.iter().all(|request| !request.is_finished()),
        "no room was made"
    );
    running.iter().for_each(JoinHandle::abort);
    Ok(())
}

#[tokio::test]
async fn a_client_that_leaves_while_it_waits_leaves_no_body_in_the_filter() -> Result<()> {
    check_leaving(PickerMode::Filter).await
}

#[tokio::test]
async fn a_client_that_leaves_while_it_waits_leaves_no_body_in_the_ext_proc_server() -> Result<()> {
    check_leaving(PickerMode::ExtProc).await
}
