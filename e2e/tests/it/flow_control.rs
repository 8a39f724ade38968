//! Flow control on a real Envoy: requests wait in the proxy, requests of the higher band are sent
//! first, and none is lost when the daemon is killed, a client leaves, or the pool changes.

mod eviction;
mod gated_engine;
mod proxies;
mod refusals;
mod seat_engine;
mod workers;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use e2e::queued_requests::{self, SEATS};
use http::Request;
use serde_json::Value;
use testbed::client::{self, ClientReply};
use testbed::stack::{PickerMode, Stack};
use testbed::{Result, wait_for};
use tokio::task::JoinHandle;

/// The maximum wait for a change without a promised time.
const LIMIT: Duration = Duration::from_secs(60);

/// The number of requests in a wave of batch requests.
const WAVE: usize = 10;

/// The output tokens of a request, for which the engine needs one or two seconds.
const TOKENS: u32 = 100;

/// Sends a request. Returns the reply and its position in the order of all replies.
fn ask(
    stack: &Stack,
    objective: &'static str,
    turns: &Arc<AtomicUsize>,
) -> Result<JoinHandle<Result<(ClientReply, usize)>>> {
    let address = stack.address();
    let turns = Arc::clone(turns);
    let request = queued_requests::request(objective, TOKENS)?;
    Ok(tokio::spawn(async move {
        let reply = client::send(address, request).await?;
        Ok((reply, turns.fetch_add(1, Ordering::Relaxed)))
    }))
}

async fn stack(front: PickerMode, folder: &std::path::Path) -> Result<Stack> {
    queued_requests::builder(front, folder, &queued_requests::slow_engine())?
        .envoy_in_turn()
        .start()
        .await
}

/// The output tokens of a request that is held for long enough to be seen on the daemon's page.
const LONG: u32 = 400;

/// The output tokens of a request that runs for longer than [`MESSAGE_TIMEOUT`].
const LONGEST: u32 = 1_200;

/// The value of `message_timeout` in the shipped file.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(5);

async fn until_running(stack: &Stack, wanted: u64) -> Result<()> {
    let daemon = stack.daemon.as_ref().ok_or("a daemon")?;
    let running = || async {
        let page: Value = daemon.admin("/debug/endpoints").await.ok()?.json().ok()?;
        (page["endpoints"][0]["in_flight"] == wanted).then_some(())
    };
    wait_for(LIMIT, "the requests to run", running).await
}

async fn until_queued(stack: &Stack, enough: impl Fn(u64) -> bool) -> Result<()> {
    let held = || async {
        queued_requests::held(stack)
            .await
            .filter(|held| enough(*held))
            .map(|_| ())
    };
    wait_for(LIMIT, "requests to be held", held).await
}

#[tokio::test]
async fn chat_passes_a_batch_wave_and_nothing_is_lost_without_the_daemon() -> Result<()> {
    chat_passes_without_the_daemon(PickerMode::Filter).await
}

#[tokio::test]
async fn chat_passes_a_batch_wave_in_the_native_module() -> Result<()> {
    chat_passes_without_the_daemon(PickerMode::Native).await
}

async fn chat_passes_without_the_daemon(front: PickerMode) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut stack = stack(front, folder.path()).await?;
    let turns = Arc::new(AtomicUsize::new(0));
    let mut wave = (0..WAVE)
        .map(|_| ask(&stack, "batch", &turns))
        .collect::<Result<Vec<_>>>()?;
    let held = (WAVE - SEATS as usize) as i64;
    stack
        .envoy
        .picker_stat_until("switchpoint_held_total", |count| count >= held, LIMIT)
        .await?;
    let chat = ask(&stack, "chat", &turns)?;
    stack
        .envoy
        .picker_stat_until("switchpoint_held_total", |count| count > held, LIMIT)
        .await?;
    // A client leaves, and the daemon dies, while requests wait.
    wave.pop().into_iter().for_each(|request| request.abort());
    stack.daemon()?.process().kill()?;
    let (reply, turn) = chat.await??;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert!(
        turn <= WAVE / 2,
        "chat was answered after {turn} requests that came earlier"
    );
    for request in wave {
        let (reply, _) = request.await??;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    assert_eq!(
        turns.load(Ordering::Relaxed),
        WAVE,
        "all but the client that left"
    );
    stack.daemon()?.start_again()?;
    let counted = || async {
        let ended = |outcome| queued_requests::ended(&stack, outcome);
        let found = (
            queued_requests::held(&stack).await?,
            ended("Dispatched").await?,
            ended("EvictedContextCancelled").await?,
        );
        (found == (0, WAVE as u64, 1)).then_some(())
    };
    wait_for(LIMIT, "the counters of the queues to end at zero", counted).await?;
    let (reply, _) = ask(&stack, "batch", &turns)?.await??;
    assert_eq!(
        (
            reply.status,
            stack.envoy.picker_stat("switchpoint_held_total").await?
        ),
        (200, held + 1),
        "an idle pool holds nothing"
    );
    Ok(())
}

#[tokio::test]
async fn chat_passes_a_batch_wave_through_the_ext_proc_server() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stack = stack(PickerMode::ExtProc, folder.path()).await?;
    let turns = Arc::new(AtomicUsize::new(0));
    let wave = (0..WAVE)
        .map(|_| ask(&stack, "batch", &turns))
        .collect::<Result<Vec<_>>>()?;
    until_queued(&stack, |held| held > 2).await?;
    let (reply, turn) = ask(&stack, "chat", &turns)?.await??;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert!(
        turn < WAVE - 1,
        "chat was answered after {turn} requests that came earlier"
    );
    for request in wave {
        let (reply, _) = request.await??;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    until_queued(&stack, |held| held == 0).await
}

/// Checks that the ext_proc server, while it holds a request, asks Envoy for more than the 5 s that
/// the shipped file gives it for an answer (`message_timeout`).
#[tokio::test]
async fn the_ext_proc_server_may_hold_a_request_longer_than_its_usual_time() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stack = stack(PickerMode::ExtProc, folder.path()).await?;
    let running = queued_requests::send(&stack, SEATS as usize, "batch", LONGEST)?;
    until_running(&stack, SEATS.into()).await?;
    let began = Instant::now();
    let held = client::send(stack.address(), queued_requests::request("batch", 1)?);
    let reply = held.await?;
    let waited = began.elapsed();
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert!(waited > MESSAGE_TIMEOUT, "it was held for {waited:?} only");
    for request in running {
        assert_eq!(request.await??.status, 200);
    }
    Ok(())
}

/// First a pool that scales from zero loses its endpoint and gets it back, then flow control is
/// turned off.
#[tokio::test]
async fn held_requests_survive_an_empty_pool_and_are_answered_when_flow_control_ends() -> Result<()>
{
    let folder = tempfile::tempdir()?;
    let builder = queued_requests::builder(
        PickerMode::Filter,
        folder.path(),
        &queued_requests::slow_engine(),
    )?;
    let picker = queued_requests::picker(Some(SEATS)) + "  noEndpointRequestTTL: 120s\n";
    std::fs::write(folder.path().join("picker.yaml"), picker)?;
    let mut stack = builder.shared_envoy().start().await?;
    let wave = queued_requests::send(&stack, 6, "batch", LONG)?;
    until_queued(&stack, |held| held == 4).await?;
    let rows = queued_requests::queues(&stack).await.ok_or("no queues")?;
    let waits = rows
        .iter()
        .any(|row| row["priority"] == -10 && row["oldest"]["full"].is_string());
    assert!(waits, "the page says which endpoint has no room: {rows:?}");
    let request = queued_requests::request("batch", LONG)?;
    let (mut head, body) = request.into_parts();
    head.headers.insert("x-request-id", "find-me".parse()?);
    let asked = tokio::spawn(client::send(
        stack.address(),
        Request::from_parts(head, body),
    ));
    let found = || async {
        let page = stack
            .daemon
            .as_ref()?
            .admin("/debug/queues?request=find-me")
            .await
            .ok()?
            .json()
            .ok()?;
        let row = page["requests"].as_array()?.first()?.clone();
        (row["priority"] == -10 && row["ms"].is_u64() && row["full"].is_string()).then_some(())
    };
    wait_for(LIMIT, "the held request to be found by its id", found).await?;
    asked.abort();
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
    wait_for(LIMIT, "the daemon to have no endpoint", empty).await?;
    let later = queued_requests::send(&stack, 1, "chat", TOKENS)?;
    until_queued(&stack, |held| held > 1).await?;
    stack.set_pool(&[0])?;
    for request in wave.into_iter().chain(later) {
        let reply = request.await??;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    let wave = queued_requests::send(&stack, 6, "batch", LONG)?;
    until_queued(&stack, |held| held == 4).await?;
    queued_requests::replace(folder.path(), None)?;
    let mut served = 0;
    let mut refused = 0;
    for request in wave {
        let reply = request.await??;
        match (reply.status, reply.header("x-llm-d-request-dropped-reason")) {
            (200, "") => served += 1,
            (503, "rejected-shutting-down") => refused += 1,
            other => panic!("{other:?}: {}", reply.text()),
        }
    }
    // On a busy machine the engine may end a request before the proxy has the new configuration.
    assert!(
        served >= 2 && refused > 0,
        "{served} served, {refused} refused"
    );
    Ok(())
}
