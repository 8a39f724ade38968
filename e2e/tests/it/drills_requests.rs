//! Failure drills of requests: clients that disconnect, engines that fail, endpoints that leave.
//! docs/reference/failure-drills.md lists the results.

use std::time::Duration;

use e2e::explain::{ExplainedDecision, pool_is};
use e2e::ledger_metrics;
use serde_json::{Value, json};
use testbed::client::{self, Http2Client, RawConnection};
use testbed::load::LoadGenerator;
use testbed::model_server::{FaultMode, ServerFault};
use testbed::stack::Stack;
use testbed::{Result, wait_for};

use crate::echo;
use crate::streams::{self, slow};

const LIMIT: Duration = Duration::from_secs(60);

/// The number of clients of each kind.
const EACH: usize = 6;

async fn upstream_active(stack: &Stack, count: usize) -> Result<()> {
    let wanted = i64::try_from(count)?;
    let look = || async {
        (stack
            .envoy
            .stat("cluster.inference-pool.upstream_rq_active")
            .await
            .ok()?
            >= wanted)
            .then_some(())
    };
    wait_for(LIMIT, &format!("{count} requests to be at engines"), look).await
}

fn post_head(length: usize) -> String {
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    )
}

/// Connects a client that disconnects after it has sent `bytes`.
async fn leaves_after(stack: &Stack, bytes: &str) -> Result<()> {
    let mut raw = RawConnection::connect(stack.address()).await?;
    raw.write(bytes).await?;
    raw.reset()
}

#[tokio::test]
async fn clients_that_leave_at_any_moment_leave_nothing_behind() -> Result<()> {
    let stack = Stack::builder()
        .servers_like(3, &slow(40))
        .concurrency(2)
        .envoy_in_turn()
        .start()
        .await?;
    let load = LoadGenerator::start(stack.address(), 4);
    load.wait_for_more(20, LIMIT).await?;
    let body = echo::chat("a client that leaves").to_string();
    let head = post_head(body.len());
    let whole = post_head(body.len()) + &body;
    for _ in 0..EACH {
        leaves_after(&stack, &head[..head.len() / 2]).await?;
        leaves_after(&stack, &head).await?;
        leaves_after(&stack, &(head.clone() + &body[..body.len() / 2])).await?;
        // The client leaves immediately after sending: before, during or after the pick.
        leaves_after(&stack, &whole).await?;
    }
    // The clients of this stack leave before the first token: the engines accept the request and
    // send nothing for a long time.
    let silent = Stack::builder()
        .servers_like(2, &slow(60_000))
        .envoy_in_turn()
        .start()
        .await?;
    let mut raws = Vec::new();
    let mut pending = Vec::new();
    for i in 0..EACH {
        let mut raw = RawConnection::connect(silent.address()).await?;
        let body = streams::chat(&format!("{i} waits"), 10).to_string();
        raw.write(post_head(body.len()) + &body).await?;
        raws.push(raw);
        let connection = Http2Client::connect(silent.address()).await?;
        let request = streams::request(&format!("{i} waits, too"), 10)?;
        pending.push(tokio::spawn(async move {
            let _reply = connection.start(request).await;
            std::future::pending::<()>().await;
        }));
    }
    upstream_active(&silent, 2 * EACH).await?;
    raws.into_iter().try_for_each(RawConnection::reset)?;
    pending.iter().for_each(tokio::task::JoinHandle::abort);
    ledger_metrics::nothing_left(&silent).await?;
    // The clients of these streams disconnect in the middle.
    drop(streams::open(stack.address(), 2 * EACH, 1_000).await?);
    assert_eq!(
        stack
            .envoy
            .picker_stat("switchpoint_host_errors_total")
            .await?,
        0,
        "their requests ended without an error"
    );
    ledger_metrics::close("clients leave: in headers, in the body, at the pick, before the first token, in the stream", load, &stack)
        .await?;
    Ok(())
}

#[tokio::test]
async fn clients_that_leave_while_parked_leave_nothing_behind() -> Result<()> {
    let patient = json!({"cold_start_wait_ms": 30_000});
    let mut stack = Stack::builder()
        .servers(2)
        .concurrency(2)
        .without_daemon()
        .picker(patient)
        .envoy_in_turn()
        .start()
        .await?;
    let load = LoadGenerator::start(stack.address(), 4);
    let body = echo::chat("parked").to_string();
    let mut parked = Vec::new();
    for _ in 0..2 * EACH {
        let mut raw = RawConnection::connect(stack.address()).await?;
        raw.write(post_head(body.len()) + &body).await?;
        parked.push(raw);
    }
    stack
        .envoy
        .picker_stat_until(
            "switchpoint_parked_total",
            |parked| parked >= 4 + 2 * EACH as i64,
            LIMIT,
        )
        .await?;
    parked.into_iter().try_for_each(RawConnection::reset)?;
    stack.start_daemon()?;
    load.wait_for_more(100, LIMIT).await?;
    assert_eq!(
        stack
            .envoy
            .picker_stat("switchpoint_host_errors_total")
            .await?,
        0
    );
    ledger_metrics::close(
        "proxy started while the daemon is down; clients leave while parked",
        load,
        &stack,
    )
    .await?;
    Ok(())
}

/// An engine that refuses also closes the connections of streams that it is answering, at most one
/// stream of each client. No other request fails.
#[tokio::test]
async fn an_engine_that_fails_before_it_answers_fails_no_request() -> Result<()> {
    const CLIENTS: usize = 6;
    let stack = Stack::builder()
        .servers(3)
        .concurrency(2)
        .picker(json!({"per_try_timeout_ms": 300}))
        .envoy_in_turn()
        .start()
        .await?;
    // The load consists of streams, because the per-try timeout applies only to streaming requests.
    let load = LoadGenerator::of_streams(stack.address(), CLIENTS);
    let mut cut_off = None;
    for mode in [
        FaultMode::Refuse,
        FaultMode::Hang,
        FaultMode::ResetBeforeHeaders,
        FaultMode::ResetMidHeaders,
        FaultMode::Status,
    ] {
        let failed = stack
            .envoy
            .picker_stat("switchpoint_failed_attempts_total")
            .await?;
        stack.servers[1].fault(ServerFault::new(mode)).await;
        stack
            .envoy
            .picker_stat_until(
                "switchpoint_failed_attempts_total",
                |now| now > failed,
                LIMIT,
            )
            .await?;
        load.wait_for_more(60, LIMIT).await?;
        cut_off = cut_off.or(Some(load.so_far().failures.len()));
        stack.servers[1]
            .fault(ServerFault::new(FaultMode::None))
            .await;
        load.wait_for_more(20, LIMIT).await?;
    }
    let name = "engine refuses, hangs, resets before and in the headers, answers 503";
    let outcome = ledger_metrics::close_but(name, load, &stack, client::is_broken_off).await?;
    assert!(outcome.failures.len() <= CLIENTS, "{:?}", outcome.failures);
    assert_eq!(
        Some(outcome.failures.len()),
        cut_off,
        "{:?}",
        outcome.failures
    );
    Ok(())
}

#[tokio::test]
async fn an_engine_that_breaks_off_fails_exactly_those_it_answered() -> Result<()> {
    const BROKEN: u32 = 7;
    let stack = Stack::builder()
        .servers_like(3, &slow(5))
        .concurrency(2)
        .envoy_in_turn()
        .start()
        .await?;
    let load = LoadGenerator::of_streams(stack.address(), 6);
    load.wait_for_more(20, LIMIT).await?;
    stack.servers[0]
        .fault(ServerFault {
            after_chunks: Some(2),
            count: Some(BROKEN),
            ..ServerFault::new(FaultMode::ResetMidStream)
        })
        .await;
    let broken = || async { (load.so_far().failures.len() == BROKEN as usize).then_some(()) };
    wait_for(LIMIT, "seven streams to break", broken).await?;
    load.wait_for_more(60, LIMIT).await?;
    let outcome = ledger_metrics::close_but(
        "engine resets in the stream, seven times",
        load,
        &stack,
        client::is_broken_off,
    )
    .await?;
    assert_eq!(
        outcome.failures.len(),
        BROKEN as usize,
        "{:?}",
        outcome.failures
    );
    Ok(())
}

async fn row(stack: &Stack, name: &str) -> Result<Value> {
    let rows = stack
        .daemon
        .as_ref()
        .ok_or("no daemon")?
        .endpoints()
        .await?;
    rows.into_iter()
        .find(|row| row["name"] == name)
        .ok_or_else(|| format!("no {name}").into())
}

#[tokio::test]
async fn a_retry_takes_the_accounting_with_it() -> Result<()> {
    let stack = Stack::builder()
        .servers_like(2, &slow(50))
        .envoy_in_turn()
        .start()
        .await?;
    stack.servers[0]
        .fault(ServerFault {
            status: Some(503),
            ..ServerFault::new(FaultMode::Status)
        })
        .await;
    let mut running = Vec::new();
    // The test sends these requests one after the other. The second request at the latest is picked
    // for the failing endpoint, which has no load.
    for _ in 0..6 {
        running.extend(streams::open(stack.address(), 1, 1_000).await?);
    }
    let by = stack.servers[1].addr().to_string();
    let count = running.len();
    assert!(
        running.iter().all(|stream| stream.by == by),
        "the other endpoint served all"
    );
    let moved = || async {
        let failed = row(&stack, "server-0").await.ok()?;
        let served = row(&stack, "server-1").await.ok()?;
        let as_it_was = failed["in_flight"] == 0
            && failed["failed"].as_u64() > Some(0)
            && failed["served"] == 0;
        (as_it_was && served["in_flight"] == count && served["served"] == count).then_some(())
    };
    if let Err(error) = wait_for(
        LIMIT,
        "the retried requests to count at their served endpoint",
        moved,
    )
    .await
    {
        return Err(format!(
            "{error}: {count} streams, {} {}",
            row(&stack, "server-0").await?,
            row(&stack, "server-1").await?
        )
        .into());
    }
    let load = LoadGenerator::start(stack.address(), 4);
    load.wait_for_more(60, LIMIT).await?;
    drop(running);
    ledger_metrics::close("a retry moves a request", load, &stack).await?;
    Ok(())
}

#[tokio::test]
async fn an_endpoint_removed_while_it_serves_ends_its_streams_itself() -> Result<()> {
    const STREAMS: usize = 24;
    let mut stack = Stack::builder()
        .servers_like(3, &slow(60))
        .concurrency(2)
        .picker(json!({"explain": true}))
        .envoy_in_turn()
        .start()
        .await?;
    let load = LoadGenerator::start(stack.address(), 4);
    let running = streams::open(stack.address(), STREAMS, 60).await?;
    let leaving = stack.servers[0].addr().to_string();
    let served = running.iter().filter(|stream| stream.by == leaving).count();
    assert!(served > 0, "the leaving endpoint serves some streams");
    stack.set_pool(&[1, 2])?;
    pool_is(&stack, &[1, 2]).await?;
    load.wait_for_more(60, LIMIT).await?;
    assert_eq!(streams::ends(running).await, (STREAMS, 0));
    ledger_metrics::close(
        &format!("endpoint removed while it serves {served} streams"),
        load,
        &stack,
    )
    .await?;
    Ok(())
}

/// `make e2e-long` runs these tests.
mod slow {
    use super::*;

    #[tokio::test]
    async fn an_endpoint_replaced_at_its_address_starts_with_an_empty_record() -> Result<()> {
        const STREAMS: usize = 24;
        const CLIENTS: usize = 4;
        let builder = Stack::builder()
            .servers_like(3, &slow(60))
            .concurrency(2)
            .scored_by(&[("prefix-cache-scorer", 1), ("active-request-scorer", 1)]);
        let stack = builder.picker(json!({"explain": true})).start().await?;
        let load = LoadGenerator::start(stack.address(), CLIENTS);
        let home = stack.servers[0].addr().to_string();
        let mut known = Vec::new();
        for i in 0..60 {
            let prompt = format!(
                "{i} is how this prompt begins. {}",
                "It goes on for long. ".repeat(100)
            );
            if ExplainedDecision::ask(stack.address(), &prompt)
                .await?
                .picked[0]
                == home
            {
                known.push(prompt);
            }
        }
        let name = "server-0";
        let before = row(&stack, name).await?["generation"].as_u64();
        let running = streams::open(stack.address(), STREAMS, 200).await?;
        let lost = running.iter().filter(|stream| stream.by == home).count();
        stack.servers[0]
            .restart(Some(Duration::from_millis(300)))
            .await;
        let (whole, broken) = streams::ends(running).await;
        assert_eq!(
            (whole, broken),
            (STREAMS - lost, lost),
            "exactly the streams of the restarted engine broke"
        );
        let replaced = || async {
            (row(&stack, name).await.ok()?["generation"].as_u64() > before).then_some(())
        };
        wait_for(LIMIT, "a new generation at the same address", replaced).await?;
        // Ask for each prompt only once, because a pick also places the prompt. The workers learn
        // of the new generation within milliseconds.
        let mut believed = Vec::new();
        for prompt in &known {
            let score = ExplainedDecision::ask(stack.address(), prompt)
                .await?
                .scores("prefix-cache-scorer")
                .get(&home)
                .copied();
            believed.push(score);
            if score.is_none_or(|score| score == 0.0) {
                break;
            }
        }
        assert!(
            believed
                .last()
                .is_some_and(|last| last.is_none_or(|score| score == 0.0)),
            "the prefix index still has prompts of the old generation: {believed:?}"
        );
        load.wait_for_more(60, LIMIT).await?;
        // Replies that had started when the engine died broke. Requests without a reply were
        // retried.
        let outcome = ledger_metrics::close_but(
            "endpoint replaced at its address",
            load,
            &stack,
            client::is_broken_off,
        )
        .await?;
        let failed = outcome.failures.len();
        assert!(
            failed <= CLIENTS,
            "at most one request of each client: {:?}",
            outcome.failures
        );
        let had_begun = |line: &Value| {
            line["details"]
                .as_str()
                .is_some_and(|details| details.starts_with("upstream_reset_after_response_started"))
        };
        ledger_metrics::agree(&stack, failed + broken, had_begun).await?;
        ledger_metrics::note(
            "endpoint replaced at its address",
            &format!("{lost} of {STREAMS} streams were at this endpoint and broke"),
        );
        Ok(())
    }
}
