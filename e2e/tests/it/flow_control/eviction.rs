//! With `enableEviction`, a worker aborts its running batch requests for chat requests that wait,
//! but only before the first byte of the reply. The gate of the engine decides when a batch request
//! ends, not a time.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use e2e::ledger_metrics::note;
use e2e::queued_requests;
use http::Request;
use serde_json::json;
use testbed::client::{self, ClientReply};
use testbed::stack::{PickerMode, Stack};
use testbed::{Result, wait_for};
use tokio::task::JoinHandle;

use super::gated_engine::{BEGIN, Counts, GatedEngine};

const LIMIT: Duration = Duration::from_secs(60);
const SEATS: u32 = 3;

/// The number of rounds with four workers. In each round, the kernel chooses the worker of the chat
/// request and the worker of the batch request that is aborted.
const ROUNDS: u64 = 12;

type Reply = JoinHandle<Result<ClientReply>>;

fn request(objective: &str) -> Result<Request<client::Body>> {
    let body = json!({"model": "demo", "messages": [{"role": "user", "content": "x"}]});
    let head = Request::post("/v1/chat/completions").header("content-type", "application/json");
    let head = head
        .header("x-llm-d-inference-objective", objective)
        .header("x-test-objective", objective);
    Ok(head.body(client::full(body.to_string()))?)
}

fn ask(proxy: SocketAddr, objective: &str) -> Result<Reply> {
    Ok(tokio::spawn(client::send(proxy, request(objective)?)))
}

/// Sends a batch request, and waits for its response headers.
async fn begin(proxy: SocketAddr) -> Result<Reply> {
    let mut request = request("batch")?;
    request.headers_mut().insert(BEGIN, "1".parse()?);
    let response = client::start(proxy, request).await?;
    Ok(tokio::spawn(ClientReply::read(response)))
}

async fn stack(
    front: PickerMode,
    workers: u32,
    engine: &GatedEngine,
    folder: &Path,
    eviction: bool,
) -> Result<Stack> {
    let builder = Stack::builder()
        .front(front)
        .servers(0)
        .stranger(engine.address)
        .concurrency(workers)
        .shared_envoy();
    let builder = queued_requests::holding(builder, folder, SEATS)?;
    let config = folder.join("picker.yaml");
    let text = std::fs::read_to_string(&config)?;
    std::fs::write(config, format!("{text}  enableEviction: {eviction}\n"))?;
    builder.start().await
}

async fn until(engine: &GatedEngine, expected: Counts) -> Result<()> {
    wait_for(LIMIT, &format!("{expected:?}"), || async {
        (engine.counts() == expected).then_some(())
    })
    .await
}

/// Sends batch requests, one after the other, until the engine is full.
async fn fill(stack: &Stack, engine: &GatedEngine, begun: bool) -> Result<Vec<Reply>> {
    let mut replies = Vec::new();
    loop {
        let Counts {
            running,
            broken_off,
        } = engine.counts();
        if running == SEATS as usize {
            return Ok(replies);
        }
        replies.push(if begun {
            begin(stack.address()).await?
        } else {
            ask(stack.address(), "batch")?
        });
        until(
            engine,
            Counts {
                running: running + 1,
                broken_off,
            },
        )
        .await?;
    }
}

/// Sends chat requests to a full engine. Each is answered immediately, and one batch request is
/// aborted for it.
async fn chats_take_room(front: PickerMode, workers: u32, rounds: u64) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let engine = GatedEngine::start().await?;
    let stack = stack(front, workers, &engine, folder.path(), true).await?;
    let mut batch = Vec::new();
    let mut slowest = Duration::ZERO;
    for round in 1..=rounds {
        batch.extend(fill(&stack, &engine, false).await?);
        // Workers that have just started may not know each other's requests for one tick. In that
        // time, the proxy may send a chat request to the full engine.
        while engine.counts().broken_off < usize::try_from(round)? {
            let begun = Instant::now();
            let reply = ask(stack.address(), "chat")?.await??;
            slowest = slowest.max(begun.elapsed());
            assert_eq!(reply.status, 200, "{}", reply.text());
        }
        until(
            &engine,
            Counts {
                running: SEATS as usize - 1,
                broken_off: usize::try_from(round)?,
            },
        )
        .await?;
    }
    engine.open();
    let mut served = 0;
    let mut given_up = 0;
    for reply in batch {
        let reply = reply.await??;
        match (reply.status, reply.header("x-llm-d-request-dropped-reason")) {
            (200, "") => served += 1,
            (429, "evicted") if !reply.header("retry-after").is_empty() => given_up += 1,
            other => return Err(format!("{other:?}: {}", reply.text()).into()),
        }
    }
    note(
        "chats that took the room of batch requests",
        &format!("{front:?}, {workers} workers: {rounds}, the slowest in {slowest:?}"),
    );
    assert_eq!((served, given_up), (u64::from(SEATS) - 1, rounds));
    let counted = || async {
        let rows = queued_requests::queues(&stack).await?;
        let row = |priority: i64| rows.iter().find(|row| row["priority"] == priority);
        let found = (
            row(-10)?["given_up"].as_u64()?,
            row(10)?["given_up_for"].as_u64()?,
            queued_requests::held(&stack).await?,
        );
        let page = stack.daemon.as_ref()?.admin("/metrics").await.ok()?.text();
        let metric = format!(
            "llm_d_epp_flow_control_revocations_issued_total{{inference_pool=\"default\",priority=\"10\"}} {rounds}\n"
        );
        (found == (rounds, rounds, 0) && page.contains(&metric)).then_some(())
    };
    wait_for(LIMIT, "the counters", counted).await
}

#[tokio::test]
async fn chat_takes_the_room_of_a_batch_request_at_once() -> Result<()> {
    chats_take_room(PickerMode::Filter, 1, 4).await
}

#[tokio::test]
async fn chat_takes_the_room_of_a_batch_request_of_any_worker() -> Result<()> {
    chats_take_room(PickerMode::Filter, 4, ROUNDS).await
}

#[tokio::test]
async fn chat_takes_the_room_of_a_batch_request_through_the_ext_proc_server() -> Result<()> {
    chats_take_room(PickerMode::ExtProc, 2, 4).await
}

/// Checks that chat requests wait until the gate opens, and that all requests are served then.
async fn chat_waits(front: PickerMode, workers: u32, eviction: bool, begun: bool) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let engine = GatedEngine::start().await?;
    let stack = stack(front, workers, &engine, folder.path(), eviction).await?;
    let mut batch = fill(&stack, &engine, begun).await?;
    // As in [`chats_take_room`], the proxy may send the first chat requests to the full engine.
    let mut chats = Vec::new();
    while queued_requests::held(&stack).await != Some(1) {
        if chats.iter().all(Reply::is_finished) {
            chats.push(ask(stack.address(), "chat")?);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(
        engine.counts(),
        Counts {
            running: SEATS as usize,
            broken_off: 0
        }
    );
    assert_eq!(chats.iter().filter(|chat| !chat.is_finished()).count(), 1);
    engine.open();
    batch.extend(chats);
    for reply in batch {
        let reply = reply.await??;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    assert_eq!(engine.counts(), Counts::default());
    Ok(())
}

#[tokio::test]
async fn without_eviction_chat_waits_for_the_batch() -> Result<()> {
    for workers in [1, 4] {
        chat_waits(PickerMode::Filter, workers, false, false).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_request_that_has_begun_to_answer_is_never_given_up() -> Result<()> {
    for workers in [1, 4] {
        chat_waits(PickerMode::Filter, workers, true, true).await?;
    }
    Ok(())
}
