//! What waiting cannot change is refused before anything is held: the same request gets the same
//! answer at once, with and without flow control, on each front.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use e2e::held_requests::{self, SEATS};
use serde_json::{Value, json};
use testbed::Result;
use testbed::client::{self, ClientReply};
use testbed::envoy::subset_hint_filter;
use testbed::stack::{PickerMode, Stack, StackBuilder};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::{LIMIT, until_held};

/// Longest time to a refusal. A held request would wait for seconds, until one that runs has ended.
const AT_ONCE: Duration = Duration::from_secs(2);

/// The output tokens of a request that runs until the test ends: for half a minute or more.
const ENDLESS: u32 = 3_000;

/// An address that no endpoint has.
const ELSEWHERE: &str = "10.9.9.9:1";

/// A request that no endpoint can serve.
struct HopelessRequest {
    name: &'static str,
    model: &'static str,
    subset: Option<String>,
}

/// Two engines behind flow control, or without, and a pool that names its only model.
fn builder(front: PickerMode, workers: u32, has_flow_control: bool, folder: &Path) -> Result<StackBuilder> {
    let builder = Stack::builder().front(front).servers_like(2, &held_requests::slow_engine()).concurrency(workers);
    let builder = held_requests::holding(builder.filter_before_picker(subset_hint_filter()), folder, SEATS)?;
    held_requests::replace(folder, has_flow_control.then_some(SEATS))?;
    let model = json!({"apiVersion": "inference.networking.x-k8s.io/v1alpha2", "kind": "InferenceModel", "metadata": {"name": "demo"},
                       "spec": {"modelName": "demo", "poolRef": {"name": "default"}}});
    let objects = folder.join("objects.yaml");
    std::fs::write(&objects, format!("{}\n---\n{model}", std::fs::read_to_string(&objects)?))?;
    Ok(builder.daemon_arguments(&["--strict-models"]))
}

/// Sends a request of the band that has requests waiting, if any has.
fn send(stack: &Stack, hopeless: &HopelessRequest) -> Result<JoinHandle<Result<ClientReply>>> {
    let body = json!({"model": hopeless.model, "max_tokens": 1, "messages": [{"role": "user", "content": hopeless.name}]});
    let mut head = http::Request::post("/v1/chat/completions").header("content-type", "application/json");
    if let Some(subset) = &hopeless.subset {
        head = head.header("x-test-subset", subset);
    }
    let request = head.header("x-llm-d-inference-objective", "batch").body(client::full(body.to_string()))?;
    Ok(tokio::spawn(client::send(stack.address(), request)))
}

/// Status, reason and code of an answer.
fn verdict(reply: &ClientReply) -> Result<String> {
    let body: Value = reply.json()?;
    Ok(format!("{} {} {}", reply.status, reply.header("x-llm-d-request-dropped-reason"), body["error"]["code"]))
}

/// The answers of one stack, by request.
async fn refusals(front: PickerMode, workers: u32, has_flow_control: bool) -> Result<BTreeMap<&'static str, String>> {
    let folder = tempfile::tempdir()?;
    let mut stack = builder(front, workers, has_flow_control, folder.path())?.start().await?;
    // With flow control, four run and two wait.
    let running = held_requests::send(&stack, 6, "batch", ENDLESS)?;
    if has_flow_control {
        until_held(&stack, |held| held == 2).await?;
    }
    let mut verdicts = BTreeMap::new();
    let hopeless = |name, model, subset: Option<&str>| HopelessRequest { name, model, subset: subset.map(str::to_owned) };
    for request in [hopeless("another subset", "demo", Some(ELSEWHERE)), hopeless("unknown model", "nope", None)] {
        let reply = timeout(AT_ONCE, send(&stack, &request)?).await.map_err(|_| format!("{}: no answer", request.name))???;
        verdicts.insert(request.name, verdict(&reply)?);
    }
    let leaving = stack.servers[1].addr().to_string();
    let request = hopeless("a subset that leaves", "demo", Some(&leaving));
    let asked = if has_flow_control {
        let asked = send(&stack, &request)?;
        until_held(&stack, |held| held == 3).await?;
        stack.set_pool(&[0])?;
        asked
    } else {
        stack.set_pool(&[0])?;
        let left = || async { stack.daemon.as_ref()?.endpoints().await.ok().filter(|left| left.len() == 1).map(|_| ()) };
        testbed::wait_for(LIMIT, "the daemon to have one endpoint", left).await?;
        tokio::time::sleep(AT_ONCE).await;
        send(&stack, &request)?
    };
    let reply = timeout(2 * AT_ONCE, asked).await.map_err(|_| format!("{}: no answer", request.name))???;
    verdicts.insert(request.name, verdict(&reply)?);
    running.iter().for_each(JoinHandle::abort);
    Ok(verdicts)
}

async fn check(front: PickerMode, workers: u32) -> Result<()> {
    let expected = BTreeMap::from(
        [
            ("another subset", r#"503 rejected-no-endpoints "no_eligible_endpoint""#),
            ("unknown model", r#"404 unknown-model "model_not_found""#),
            ("a subset that leaves", r#"503 rejected-no-endpoints "no_eligible_endpoint""#),
        ]
        .map(|(name, verdict)| (name, verdict.to_owned())),
    );
    for has_flow_control in [false, true] {
        assert_eq!(refusals(front, workers, has_flow_control).await?, expected, "flow control: {has_flow_control}");
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
