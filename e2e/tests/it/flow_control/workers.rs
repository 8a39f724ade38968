//! Four workers hold requests in one order, and never use the same room for two requests.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use e2e::ledger_metrics::note;
use e2e::queued_requests;
use http::Request;
use serde_json::{Value, json};
use testbed::client::{self, ClientReply};
use testbed::stack::Stack;
use testbed::{Result, drill};
use tokio::task::JoinHandle;

use super::seat_engine::SeatEngine;

const LIMIT: Duration = Duration::from_secs(60);
const WORKERS: u32 = 4;

/// The number of requests that the engine may run at the same time.
const SEATS: u32 = 3;

/// The time that the engine takes for each request.
const DELAY: Duration = Duration::from_millis(30);

pub type Replies = Vec<JoinHandle<Result<ClientReply>>>;

fn send(stack: &Stack, count: usize, objective: &str, tenant: &str) -> Result<Replies> {
    send_to(stack.address(), count, objective, tenant)
}

/// Sends requests, each on a separate connection, so that they reach all workers.
pub fn send_to(proxy: SocketAddr, count: usize, objective: &str, tenant: &str) -> Result<Replies> {
    let request = || -> Result<_> {
        let body = json!({"model": "demo", "messages": [{"role": "user", "content": "x"}]});
        let head = Request::post("/v1/chat/completions").header("content-type", "application/json");
        let head = head
            .header("x-llm-d-inference-objective", objective)
            .header("x-test-objective", objective);
        let head = head
            .header("x-llm-d-inference-fairness-id", tenant)
            .header("x-test-tenant", tenant);
        Ok(tokio::spawn(client::send(
            proxy,
            head.body(client::full(body.to_string()))?,
        )))
    };
    (0..count).map(|_| request()).collect()
}

pub async fn all_served(replies: Replies) -> Result<()> {
    for reply in replies {
        let reply = reply.await??;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    Ok(())
}

/// Sends requests one after the other until the engine is full and some are held.
async fn fill(stack: &Stack, count: usize) -> Result<Replies> {
    let mut replies = Vec::new();
    for at in 0..count {
        replies.extend(send(stack, 1, "batch", "filler")?);
        if at <= SEATS as usize {
            tokio::time::sleep(Duration::from_millis(4)).await;
        }
    }
    Ok(replies)
}

/// Waits until each of `sent` requests is at the engine or held.
async fn all_queued(stack: &Stack, engine: &SeatEngine, sent: usize) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    while Instant::now() < deadline {
        let held = queued_requests::held(stack).await.unwrap_or(0);
        if held + engine.arrivals().len() as u64 == sent as u64 {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Err("not all requests are held".into())
}

async fn stack(engine: &SeatEngine, folder: &std::path::Path) -> Result<Stack> {
    let builder = Stack::builder()
        .servers(0)
        .stranger(engine.address)
        .concurrency(WORKERS);
    queued_requests::holding_tenants(builder, folder, SEATS)?
        .envoy_in_turn()
        .start()
        .await
}

#[tokio::test]
async fn no_room_is_given_twice_while_four_workers_hold() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let engine = SeatEngine::start(DELAY).await?;
    let stack = stack(&engine, folder.path()).await?;
    let started = Instant::now();
    let mut replies = fill(&stack, 40).await?;
    // The proxy may have sent a request to the full engine while no request was held.
    stack
        .envoy
        .picker_stat_until("switchpoint_held_total", |held| held >= 30, LIMIT)
        .await?;
    tokio::time::sleep(DELAY * 2).await;
    engine.most();
    for _ in 0..10 {
        replies.extend(send(&stack, 20, "batch", "")?);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let sent = replies.len();
    all_served(replies).await?;
    let took = started.elapsed();
    let most = engine.most();
    let ideal = DELAY * u32::try_from(sent)? / SEATS;
    note(
        "four workers, one engine",
        &format!("{sent} requests, at most {most} of {SEATS} at once, {took:?} (ideal {ideal:?})"),
    );
    assert!(most <= SEATS as usize, "{most} at once");
    assert!(took < ideal * 10, "{took:?} for {sent} requests");
    Ok(())
}

#[tokio::test]
async fn chat_goes_before_the_batch_of_all_workers() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let engine = SeatEngine::start(DELAY).await?;
    let stack = stack(&engine, folder.path()).await?;
    engine.close();
    let mut replies = fill(&stack, 60).await?;
    replies.extend(send(&stack, 12, "chat", "")?);
    all_queued(&stack, &engine, replies.len()).await?;
    engine.open();
    all_served(replies).await?;
    let arrivals = engine.arrivals();
    let chats = || {
        arrivals
            .iter()
            .enumerate()
            .filter(|(_, (_, objective, _))| objective == "chat")
            .map(|(at, _)| at)
    };
    let first = chats().next().ok_or("a chat")?;
    let last = chats().nth(11).ok_or("twelve chats")?;
    let between = last + 1 - first - 12;
    note(
        "chat and the batch of four workers",
        &format!("{between} batch requests between the first and the last of 12 chats"),
    );
    assert!(
        between <= 2,
        "{between} batch requests went between the chats"
    );
    Ok(())
}

#[tokio::test]
async fn tenants_of_four_workers_get_equal_shares() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let engine = SeatEngine::start(DELAY).await?;
    let stack = stack(&engine, folder.path()).await?;
    engine.close();
    let mut replies = fill(&stack, 20).await?;
    replies.extend(send(&stack, 120, "batch", "large")?);
    replies.extend(send(&stack, 40, "batch", "small")?);
    all_queued(&stack, &engine, replies.len()).await?;
    engine.open();
    all_served(replies).await?;
    let arrivals = engine.arrivals();
    let of = |tenant: &str, from: usize, to: usize| {
        arrivals[from..to]
            .iter()
            .filter(|(.., known)| known == tenant)
            .count()
    };
    let begin = arrivals
        .iter()
        .position(|(.., tenant)| tenant == "small")
        .ok_or("a small one")?;
    let last = arrivals
        .iter()
        .rposition(|(.., tenant)| tenant == "small")
        .ok_or("a small one")?;
    let small = of("small", begin, last + 1);
    let large = of("large", begin, last + 1);
    note(
        "two tenants, 120 and 40 requests over four workers",
        &format!("{large} of the larger while {small} of the smaller went"),
    );
    assert!(
        small == 40 && (34..=46).contains(&large),
        "{large} large ones went beside {small} small ones"
    );
    Ok(())
}

/// A VM that traps loses the requests that it held. The requests that the other VMs hold continue.
#[tokio::test]
async fn a_trapped_worker_does_not_block_the_others() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let engine = SeatEngine::start(DELAY).await?;
    let shorter = |config: &mut Value| {
        let manager = config
            .pointer_mut("/static_resources/listeners/0/filter_chains/0/filters/0/typed_config");
        manager
            .into_iter()
            .for_each(|manager| manager["stream_idle_timeout"] = json!("15s"));
    };
    let builder = Stack::builder()
        .servers(0)
        .stranger(engine.address)
        .concurrency(WORKERS);
    let builder = builder
        .envoy_config(drill::envoy_config()?)
        .envoy_config(shorter);
    let stack = queued_requests::holding_tenants(builder, folder.path(), SEATS)?
        .start()
        .await?;
    let replies = fill(&stack, 240).await?;
    stack
        .envoy
        .picker_stat_until("switchpoint_held_total", |held| held >= 230, LIMIT)
        .await?;
    let trapped = Instant::now();
    let poison = Request::post("/v1/chat/completions")
        .header(drill::TRAP, "1")
        .body(client::full("{}"))?;
    assert_eq!(stack.send(poison).await?.status, 503);
    let mut served = 0;
    let mut lost = 0;
    for reply in replies {
        match reply.await? {
            Ok(reply) if reply.status == 200 => served += 1,
            _ => lost += 1,
        }
    }
    let last = engine
        .arrivals()
        .last()
        .map(|(at, ..)| at.duration_since(trapped))
        .ok_or("arrivals")?;
    let row = format!(
        "{served} served, the last sent {last:?} after the trap; {lost} answered by the idle timeout of 15 s"
    );
    note("one of four workers traps while all hold", &row);
    assert!(served >= 140 && lost > 0 && lost < 100, "{row}");
    assert!(
        last < Duration::from_secs(10),
        "the last request went {last:?} after the trap"
    );
    assert_eq!(send_one(&stack).await?, 200);
    Ok(())
}

async fn send_one(stack: &Stack) -> Result<u16> {
    let reply = send(stack, 1, "chat", "")?.pop().ok_or("one")?.await??;
    Ok(reply.status)
}
