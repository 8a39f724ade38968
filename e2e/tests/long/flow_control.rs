//! Requests that flow control holds while their proxy stops, is replaced, or loses its VM, and
//! thousands of held requests at the same time.

use std::collections::BTreeMap;
use std::time::Duration;

use e2e::ledger_metrics::note;
use e2e::queued_requests::{self, SEATS};
use http::Request;
use rustix::process::Signal;
use serde_json::{Value, json};
use testbed::client::{self, ClientReply, EventStream, Http2Client};
use testbed::envoy::{EnvoyConfig, EnvoyOptions, EnvoyProcess};
use testbed::model_server::ModelServerOptions;
use testbed::ports::ReservedPort;
use testbed::stack::{PickerMode, Stack};
use testbed::{Result, drill, wait_for};
use tokio::task::JoinHandle;

const LIMIT: Duration = Duration::from_secs(90);
const WAVE: usize = 8;

/// The output tokens of a request. The engine needs long enough for them that the test sees what is
/// held.
const TOKENS: u32 = 400;

async fn until_queued(stack: &Stack, enough: impl Fn(u64) -> bool) -> Result<()> {
    let held = || async {
        queued_requests::held(stack)
            .await
            .filter(|held| enough(*held))
            .map(|_| ())
    };
    wait_for(LIMIT, "requests to be held", held).await
}

async fn all_served(requests: Vec<JoinHandle<Result<ClientReply>>>) -> Result<()> {
    for request in requests {
        let reply = request.await??;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    Ok(())
}

#[tokio::test]
async fn a_proxy_that_drains_serves_what_it_holds() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let builder = queued_requests::builder(
        PickerMode::Filter,
        folder.path(),
        &queued_requests::slow_engine(),
    )?;
    let mut stack = builder.start_script(30).start().await?;
    let wave = queued_requests::send(&stack, WAVE, "batch", TOKENS)?;
    until_queued(&stack, |held| held > 2).await?;
    stack.envoy.process().signal(Signal::TERM)?;
    all_served(wave).await?;
    let status = stack.envoy.process().wait(LIMIT).await?;
    assert!(status.success(), "{status}");
    Ok(())
}

#[tokio::test]
async fn a_hot_restart_serves_what_the_old_process_holds() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let base = ReservedPort::lease()?;
    let base_id = base.number().to_string();
    let arguments = |epoch: &str| -> Vec<String> {
        let times = ["--drain-time-s", "3", "--parent-shutdown-time-s", "60"];
        ["--base-id", &base_id, "--restart-epoch", epoch]
            .into_iter()
            .chain(times)
            .map(str::to_owned)
            .collect()
    };
    let first = arguments("0");
    let first: Vec<&str> = first.iter().map(String::as_str).collect();
    let builder = queued_requests::builder(
        PickerMode::Filter,
        folder.path(),
        &queued_requests::slow_engine(),
    )?;
    let mut stack = builder
        .hot_restart()
        .envoy_arguments(&first)
        .start()
        .await?;
    let wave = queued_requests::send(&stack, WAVE, "batch", TOKENS)?;
    until_queued(&stack, |held| held > 2).await?;
    let options = EnvoyOptions {
        concurrency: 1,
        arguments: arguments("1"),
        hot_restart: true,
        ..EnvoyOptions::default()
    };
    let config = EnvoyConfig::read(&stack.folder().join("envoy.json"))?;
    let second_folder = tempfile::tempdir()?;
    let second = EnvoyProcess::start(
        &config,
        stack.envoy.listener(),
        stack.envoy.admin(),
        &options,
        second_folder.path(),
    )?;
    all_served(wave).await?;
    let first = std::mem::replace(&mut stack.envoy, second);
    drop(first); // Every request is answered before this Envoy ends.
    all_served(queued_requests::send(&stack, 1, "chat", 1)?).await
}

/// Envoy makes no more calls to a VM that has trapped, so a request that this VM held waits until
/// Envoy's own limit for silent streams. Requests that the VM had sent to the engine end
/// immediately.
#[tokio::test]
async fn what_a_vm_held_that_trapped_is_answered_by_the_idle_timeout() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let builder = queued_requests::builder(
        PickerMode::Filter,
        folder.path(),
        &queued_requests::slow_engine(),
    )?;
    let shorter = |config: &mut Value| {
        let manager = config
            .pointer_mut("/static_resources/listeners/0/filter_chains/0/filters/0/typed_config");
        manager
            .into_iter()
            .for_each(|manager| manager["stream_idle_timeout"] = json!("20s"));
    };
    let stack = builder
        .envoy_config(drill::envoy_config()?)
        .envoy_config(shorter)
        .start()
        .await?;
    let wave = queued_requests::send(&stack, WAVE, "batch", TOKENS)?;
    until_queued(&stack, |held| held > 2).await?;
    let poison = Request::post("/v1/chat/completions")
        .header(drill::TRAP, "1")
        .body(client::full("{}"))?;
    assert_eq!(stack.send(poison).await?.status, 503);
    let mut answers = BTreeMap::<String, usize>::new();
    for request in wave {
        let answer = match request.await? {
            Ok(reply) => reply.status.to_string(),
            Err(error) if client::is_broken_off(&error.to_string()) => "cut off".to_owned(),
            Err(error) => error.to_string(),
        };
        *answers.entry(answer).or_default() += 1;
    }
    let answered = ["503", "cut off", "200"]
        .iter()
        .filter_map(|answer| answers.get(*answer))
        .sum::<usize>();
    assert!(
        answered == WAVE && answers.get("503").is_some_and(|lost| *lost > 2),
        "{answers:?}"
    );
    note(
        "a VM traps while it holds requests",
        &format!("{answers:?}, with a stream_idle_timeout of 20 s"),
    );
    let served = || async {
        stack
            .send(queued_requests::request("chat", 1).ok()?)
            .await
            .ok()
            .filter(|reply| reply.status == 200)
            .map(|_| ())
    };
    wait_for(LIMIT, "the next VM to serve", served).await?;
    until_queued(&stack, |held| held == 0).await
}

/// The maximum number of streams on one connection to Envoy.
const STREAMS_MAX: usize = 250;

/// Returns the options of an engine whose streams last long, and whose other replies come
/// immediately.
fn streaming_engine() -> ModelServerOptions {
    ModelServerOptions {
        models: vec!["demo".into()],
        speed: 0.0,
        chunk_delay_ms: 100,
        ..ModelServerOptions::default()
    }
}

/// Fills the engine with streams for longer than a test takes.
async fn fill(stack: &Stack) -> Result<Vec<EventStream>> {
    let chat = json!({"model": "demo", "stream": true, "max_tokens": 3_000, "ignore_eos": true, "messages": [{"role": "user", "content": "x"}]});
    let mut streams = Vec::new();
    for _ in 0..SEATS {
        let request = Request::post("/v1/chat/completions").body(client::full(chat.to_string()))?;
        let mut stream = EventStream::new(client::start(stack.address(), request).await?);
        stream.next().await?.ok_or("the stream begins")?;
        streams.push(stream);
    }
    Ok(streams)
}

/// Sends as many requests as this number of connections can have.
async fn send_on(
    stack: &Stack,
    connections: usize,
) -> Result<Vec<JoinHandle<Result<ClientReply>>>> {
    let mut requests = Vec::new();
    for _ in 0..connections {
        let client = std::sync::Arc::new(Http2Client::connect(stack.address()).await?);
        for _ in 0..STREAMS_MAX {
            let client = std::sync::Arc::clone(&client);
            let request = queued_requests::request("batch", 1)?;
            requests.push(tokio::spawn(async move {
                ClientReply::read(client.start_within(request, LIMIT).await?).await
            }));
        }
    }
    Ok(requests)
}

#[tokio::test]
async fn ten_thousand_requests_are_held_and_served() -> Result<()> {
    const HELD: usize = 10_000;
    let folder = tempfile::tempdir()?;
    let builder = queued_requests::builder(PickerMode::Filter, folder.path(), &streaming_engine())?;
    let mut stack = builder.start().await?;
    let streams = fill(&stack).await?;
    let before = stack.envoy.process().memory_bytes()?;
    let requests = send_on(&stack, HELD / STREAMS_MAX).await?;
    until_queued(&stack, |held| held == HELD as u64).await?;
    let each = (stack.envoy.process().memory_bytes()?.saturating_sub(before)) / HELD as u64;
    queued_requests::replace(folder.path(), Some(500))?;
    all_served(requests).await?;
    drop(streams);
    until_queued(&stack, |held| held == 0).await?;
    let dispatched = queued_requests::ended(&stack, "Dispatched")
        .await
        .ok_or("no queues")?;
    assert_eq!(dispatched, HELD as u64 + u64::from(SEATS));
    note(
        "10,000 requests held",
        &format!("all served; {each} bytes of Envoy for each while held"),
    );
    Ok(())
}

/// Checks that requests expire together: Envoy is stopped until all requests have expired, so one
/// tick finds all of them.
#[tokio::test]
async fn three_thousand_requests_expire_at_once() -> Result<()> {
    const HELD: usize = 3_000;
    const TTL_S: u32 = 30;
    let folder = tempfile::tempdir()?;
    let builder = queued_requests::builder(PickerMode::Filter, folder.path(), &streaming_engine())?;
    queued_requests::hold_for(folder.path(), TTL_S)?;
    let mut stack = builder.start().await?;
    let streams = fill(&stack).await?;
    let requests = send_on(&stack, HELD / STREAMS_MAX).await?;
    until_queued(&stack, |held| held == HELD as u64).await?;
    stack.envoy.process().signal(Signal::STOP)?;
    tokio::time::sleep(Duration::from_secs(TTL_S.into())).await;
    stack.envoy.process().signal(Signal::CONT)?;
    for request in requests {
        let reply = request.await??;
        assert_eq!(reply.status, 429, "{}", reply.text());
    }
    drop(streams);
    until_queued(&stack, |held| held == 0).await?;
    let log = stack.envoy.process().stderr();
    assert!(!log.contains("Uncaught"), "a VM trapped");
    note("3,000 requests expire at once", "all got 429");
    Ok(())
}
