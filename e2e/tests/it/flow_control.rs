//! Flow control on a real Envoy: requests wait in the proxy, the higher band goes first, and none
//! is lost when the daemon is killed or a client leaves.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use testbed::client::{self, ClientReply};
use testbed::model_server::ModelServerOptions;
use testbed::stack::{PickerMode, Stack};
use testbed::{Result, wait_for};
use tokio::task::JoinHandle;

/// Longest wait for changes without a promised time.
const LIMIT: Duration = Duration::from_secs(60);

/// Requests of a batch wave, and how many of them the only engine takes at once.
const WAVE: usize = 10;
const SEATS: u32 = 2;

/// The objectives of the test, and a configuration that holds requests beyond [`SEATS`].
fn files(folder: &std::path::Path) -> Result<[String; 2]> {
    let objective = |(name, priority): (&str, i32)| {
        json!({"apiVersion": "llm-d.ai/v1alpha2", "kind": "InferenceObjective", "metadata": {"name": name},
               "spec": {"priority": priority, "poolRef": {"name": "default"}}})
        .to_string()
    };
    let config = format!(
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nfeatureGates: [flowControl]\nplugins:\n\
         - type: queue-scorer\n- {{type: concurrency-detector, parameters: {{maxConcurrency: {SEATS}}}}}\n\
         flowControl:\n  saturationDetector: {{pluginRef: concurrency-detector}}\n  defaultRequestTTL: 120s\n"
    );
    let (objects, picker) = (folder.join("objects.yaml"), folder.join("picker.yaml"));
    std::fs::write(&objects, [("chat", 10), ("batch", -10)].map(objective).join("\n---\n"))?;
    std::fs::write(&picker, config)?;
    Ok([objects, picker].map(|path| path.display().to_string()))
}

async fn stack(front: PickerMode, folder: &std::path::Path) -> Result<Stack> {
    let [objects, picker] = files(folder)?;
    // Long enough that a busy machine sees the wave.
    let engine = ModelServerOptions { speed: 1.0, models: vec!["demo".into()], ..ModelServerOptions::default() };
    let builder = Stack::builder().front(front).servers_like(1, &engine).concurrency(1).picker(json!({"objective_header": "trust"}));
    builder.envoy_config(wait_longer).daemon_arguments(&["--objects", &objects, "--config", &picker]).start().await
}

/// Lets Envoy wait for ext_proc as long as requests may be held; as shipped it gives up after 5 s.
fn wait_longer(config: &mut Value) {
    let filters = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/http_filters";
    let filters = config.pointer_mut(filters).and_then(Value::as_array_mut).into_iter().flatten();
    for filter in filters.filter(|filter| !filter["typed_config"]["message_timeout"].is_null()) {
        filter["typed_config"]["message_timeout"] = json!("120s");
    }
}

/// A request that takes a second or two of the engine. Returns the reply and its turn
/// among all replies.
fn ask(stack: &Stack, objective: &'static str, turns: &Arc<AtomicUsize>) -> Result<JoinHandle<Result<(ClientReply, usize)>>> {
    let body = json!({"model": "demo", "max_tokens": 100, "ignore_eos": true, "messages": [{"role": "user", "content": objective}]});
    let request = http::Request::builder()
        .method("POST")
        .uri("/v1/chat/completions")
        .header("x-llm-d-inference-objective", objective)
        .body(client::full(body.to_string()))?;
    let (address, turns) = (stack.address(), Arc::clone(turns));
    Ok(tokio::spawn(async move {
        let reply = client::send(address, request).await?;
        Ok((reply, turns.fetch_add(1, Ordering::Relaxed)))
    }))
}

#[tokio::test]
async fn chat_passes_a_batch_wave_and_nothing_is_lost_without_the_daemon() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut stack = stack(PickerMode::Filter, folder.path()).await?;
    let turns = Arc::new(AtomicUsize::new(0));
    let mut wave = (0..WAVE).map(|_| ask(&stack, "batch", &turns)).collect::<Result<Vec<_>>>()?;
    let held = (WAVE - SEATS as usize) as i64;
    stack.envoy.picker_stat_until("switchpoint_held_total", |count| count >= held, LIMIT).await?;
    let chat = ask(&stack, "chat", &turns)?;
    stack.envoy.picker_stat_until("switchpoint_held_total", |count| count > held, LIMIT).await?;
    // A client that leaves, and a daemon that dies, while requests wait.
    wave.pop().into_iter().for_each(|request| request.abort());
    stack.daemon()?.process().kill()?;
    let (reply, turn) = chat.await??;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert!(turn <= WAVE / 2, "chat was answered after {turn} requests that came earlier");
    for request in wave {
        let (reply, _) = request.await??;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    assert_eq!(turns.load(Ordering::Relaxed), WAVE, "all but the client that left");
    stack.daemon()?.start_again()?;
    let queues = || async {
        let queues = stack.daemon.as_ref()?.admin("/debug/queues").await.ok()?.json().ok()?;
        let rows = queues["queues"].as_array()?.clone();
        let outcomes = |name: &str| rows.iter().map(|row| row["outcomes"][name].as_u64().unwrap_or(0)).sum::<u64>();
        let held: u64 = rows.iter().map(|row| row["held"].as_u64().unwrap_or(u64::MAX)).sum();
        (rows.len() == 2 && held == 0 && outcomes("Dispatched") == WAVE as u64 && outcomes("EvictedContextCancelled") == 1).then_some(())
    };
    wait_for(LIMIT, "the counters of the queues to end at zero", queues).await?;
    let (reply, _) = ask(&stack, "batch", &turns)?.await??;
    assert_eq!((reply.status, stack.envoy.picker_stat("switchpoint_held_total").await?), (200, held + 1), "an idle pool holds nothing");
    Ok(())
}

#[tokio::test]
async fn chat_passes_a_batch_wave_through_the_ext_proc_server() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stack = stack(PickerMode::ExtProc, folder.path()).await?;
    let turns = Arc::new(AtomicUsize::new(0));
    let wave = (0..WAVE).map(|_| ask(&stack, "batch", &turns)).collect::<Result<Vec<_>>>()?;
    let held = || async {
        let queues = stack.daemon.as_ref()?.admin("/debug/queues").await.ok()?.json().ok()?;
        let held = queues["queues"].as_array()?.iter().map(|row| row["held"].as_u64().unwrap_or(0)).sum::<u64>();
        (held > 2).then_some(())
    };
    wait_for(LIMIT, "requests to be held", held).await?;
    let (reply, turn) = ask(&stack, "chat", &turns)?.await??;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert!(turn < WAVE - 1, "chat was answered after {turn} requests that came earlier");
    for request in wave {
        let (reply, _) = request.await??;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    let ended = || async {
        let queues = stack.daemon.as_ref()?.admin("/debug/queues").await.ok()?.json().ok()?;
        let held: u64 = queues["queues"].as_array()?.iter().map(|row| row["held"].as_u64().unwrap_or(u64::MAX)).sum();
        (held == 0).then_some(())
    };
    wait_for(LIMIT, "the counters of the queues to end at zero", ended).await
}
