//! Tests a daemon that fails or never ran. Picks continue with the last state, and the proxy
//! reports that the daemon is missing.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use e2e::explain::{ExplainedDecision, pool_is};
use e2e::ledger_metrics;
use rustix::process::Signal;
use serde_json::{Value, json};
use testbed::client::{self, ClientReply, RawConnection};
use testbed::load::LoadGenerator;
use testbed::model_server::{ModelServer, ModelServerOptions};
use testbed::stack::Stack;
use testbed::{Result, wait_for};

use crate::echo;
use crate::played::known_hosts;

/// The maximum wait for a change. It is far above every promised time, because a machine that
/// compiles at the same time is slow.
const LIMIT: Duration = Duration::from_secs(30);

/// Returns a picker configuration that allows explanations. With it, a proxy leaves a daemon after
/// one second of silence instead of five.
fn attentive() -> Value {
    json!({"explain": true, "state": {"cluster": "switchpoint-state", "silence_max_ms": 1_000}})
}

async fn queue_tells_apart(stack: &Stack, wanted: bool) -> Result<()> {
    let look = || async {
        (ExplainedDecision::ask(stack.address(), "who is busy?")
            .await
            .ok()?
            .distinguishes("queue-scorer")
            == wanted)
            .then_some(())
    };
    wait_for(
        LIMIT,
        &format!("queue-scorer to distinguish endpoints: {wanted}"),
        look,
    )
    .await
}

async fn term(stack: &Stack) -> Result<u64> {
    let state = stack
        .daemon
        .as_ref()
        .ok_or("no daemon")?
        .admin("/debug/state")
        .await?
        .json()?;
    state["term"]
        .as_u64()
        .ok_or_else(|| format!("no term: {state}").into())
}

#[tokio::test]
async fn picks_continue_without_a_killed_daemon_and_its_successor_is_used() -> Result<()> {
    let arguments = ["--staleness-max", "1s"];
    // The stack has one worker, because each worker has a separate prefix index.
    let builder = Stack::builder()
        .servers(4)
        .scored_by(&[("queue-scorer", 1), ("prefix-cache-scorer", 1)]);
    let mut stack = builder
        .picker(attentive())
        .daemon_arguments(&arguments)
        .start()
        .await?;
    stack.set_pool(&[0, 1, 2])?;
    pool_is(&stack, &[0, 1, 2]).await?;
    stack.servers[0]
        .override_metrics([("num_requests_waiting".to_owned(), "40".to_owned())].into());
    queue_tells_apart(&stack, true).await?;
    let before = term(&stack).await?;
    let heard = stack
        .envoy
        .picker_stat("switchpoint_state_pool_updates_total")
        .await?;

    let load = LoadGenerator::start(stack.address(), 4);
    stack.daemon()?.process().kill()?;
    stack
        .envoy
        .picker_stat_until(
            "switchpoint_state_connected",
            |connected| connected == 0,
            LIMIT,
        )
        .await?;
    queue_tells_apart(&stack, false).await?;
    stack
        .envoy
        .picker_stat_until("switchpoint_state_age_ms", |age_ms| age_ms > 2_000, LIMIT)
        .await?;
    load.wait_for_more(100, LIMIT).await?;
    let decision = ExplainedDecision::ask(stack.address(), &long_prompt()).await?;
    let again = ExplainedDecision::ask(stack.address(), &long_prompt()).await?;
    assert_eq!(
        decision.picked[0], again.picked[0],
        "the proxy's own prefix index is still used"
    );
    assert!(again.distinguishes("prefix-cache-scorer"), "{again:?}");

    // While the daemon is down, one endpoint leaves and one joins.
    stack.set_pool(&[1, 2, 3])?;
    stack.daemon()?.start_again()?;
    stack
        .envoy
        .picker_stat_until(
            "switchpoint_state_connected",
            |connected| connected == 1,
            LIMIT,
        )
        .await?;
    pool_is(&stack, &[1, 2, 3]).await?;
    load.wait_for_more(50, LIMIT).await?;
    ledger_metrics::close(
        "daemon killed, one endpoint gone and one come meanwhile",
        load,
        &stack,
    )
    .await?;
    assert!(
        term(&stack).await? > before,
        "a restarted daemon has a newer term"
    );
    let log = stack.envoy.process().stderr();
    assert!(
        log.contains("picks continue with the last state") && log.contains("the daemon is back"),
        "the log reports the loss and the return"
    );
    assert!(
        stack
            .envoy
            .picker_stat("switchpoint_state_pool_updates_total")
            .await?
            > heard,
        "the restarted daemon sends everything again"
    );
    stack
        .envoy
        .picker_stat_until("switchpoint_state_age_ms", |age_ms| age_ms < 2_000, LIMIT)
        .await?;
    Ok(())
}

fn long_prompt() -> String {
    "The quick brown fox jumps over the lazy dog. ".repeat(100)
}

#[tokio::test]
async fn a_paused_daemon_counts_as_gone_and_is_used_again() -> Result<()> {
    let mut stack = Stack::builder()
        .servers(4)
        .picker(attentive())
        .envoy_in_turn()
        .start()
        .await?;
    stack.set_pool(&[0, 1, 2])?;
    pool_is(&stack, &[0, 1, 2]).await?;
    let before = term(&stack).await?;
    let load = LoadGenerator::start(stack.address(), 4);
    stack.daemon()?.process().signal(Signal::STOP)?;
    // The connections of the daemon stay open, so only its silence shows that it stopped.
    stack
        .envoy
        .picker_stat_until(
            "switchpoint_state_connected",
            |connected| connected == 0,
            LIMIT,
        )
        .await?;
    let streams = stack
        .envoy
        .picker_stat("switchpoint_state_streams_total")
        .await?;
    stack
        .envoy
        .picker_stat_until(
            "switchpoint_state_streams_total",
            |opened| opened > streams,
            LIMIT,
        )
        .await?;
    load.wait_for_more(100, LIMIT).await?;

    stack.set_pool(&[0, 2, 3])?;
    stack.daemon()?.process().signal(Signal::CONT)?;
    stack
        .envoy
        .picker_stat_until(
            "switchpoint_state_connected",
            |connected| connected == 1,
            LIMIT,
        )
        .await?;
    pool_is(&stack, &[0, 2, 3]).await?;
    load.wait_for_more(50, LIMIT).await?;
    ledger_metrics::close(
        "daemon stopped by SIGSTOP, one endpoint gone and one come meanwhile",
        load,
        &stack,
    )
    .await?;
    assert_eq!(term(&stack).await?, before, "the daemon was not restarted");
    Ok(())
}

#[tokio::test]
async fn a_daemon_that_comes_and_goes_fails_no_request() -> Result<()> {
    let mut stack = Stack::builder()
        .servers(3)
        .concurrency(2)
        .picker(attentive())
        .envoy_in_turn()
        .start()
        .await?;
    let load = LoadGenerator::start(stack.address(), 4);
    for round in 1_usize..=4 {
        stack.daemon()?.process().kill()?;
        stack
            .envoy
            .picker_stat_until(
                "switchpoint_state_connected",
                |connected| connected == 0,
                LIMIT,
            )
            .await?;
        stack.set_pool(&[round % 3, (round + 1) % 3])?;
        stack.daemon()?.start_again()?;
        pool_is(&stack, &[round % 3, (round + 1) % 3]).await?;
    }
    ledger_metrics::close("daemon killed and restarted four times", load, &stack)
        .await
        .map(drop)
}

// === Before the first start of a daemon ===

/// Returns the SHA-256 of a body in hex, as the echoing server reports it.
fn sha256(body: &str) -> String {
    ring::digest::digest(&ring::digest::SHA256, body.as_bytes())
        .as_ref()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Checks that a response is the picker's refusal for lack of state.
fn assert_not_ready(reply: &ClientReply) -> Result<()> {
    assert_eq!(reply.status, 503, "{}", reply.text());
    assert_eq!(reply.json()?["error"]["code"], "not_ready");
    assert_eq!(
        reply.header("x-llm-d-request-dropped-reason"),
        "rejected-no-endpoints"
    );
    Ok(())
}

#[tokio::test]
async fn without_a_daemon_requests_wait_and_are_refused() -> Result<()> {
    let stack = Stack::builder()
        .without_daemon()
        .picker(json!({"cold_start_wait_ms": 500}))
        .start()
        .await?;
    let asked = Instant::now();
    let question = echo::chat("hello?");
    let (chat, list, tokens) = tokio::join!(
        stack.post("/v1/chat/completions", &question),
        stack.get("/v1/models"),
        stack.post("/v1/messages", &question),
    );
    assert!(
        asked.elapsed() >= Duration::from_millis(450),
        "the requests waited only {:?}",
        asked.elapsed()
    );
    assert_not_ready(&chat?)?;
    assert_not_ready(&list?)?;
    let tokens = tokens?;
    assert_eq!(
        (tokens.status, &tokens.json()?["error"]["type"]),
        (503, &json!("overloaded_error")),
        "in the error format of the API"
    );
    assert_eq!(
        stack.envoy.picker_stat("switchpoint_parked_total").await?,
        3
    );
    assert_eq!(
        stack
            .envoy
            .picker_stat("switchpoint_state_connected")
            .await?,
        0
    );
    assert_eq!(stack.get("/switchpoint/ready").await?.status, 503);
    Ok(())
}

#[tokio::test]
async fn no_wait_is_no_wait() -> Result<()> {
    let stack = Stack::builder()
        .without_daemon()
        .picker(json!({"cold_start_wait_ms": 0}))
        .envoy_in_turn()
        .start()
        .await?;
    assert_not_ready(
        &stack
            .post("/v1/chat/completions", &echo::chat("hello?"))
            .await?,
    )?;
    assert_eq!(
        stack.envoy.picker_stat("switchpoint_parked_total").await?,
        0
    );
    Ok(())
}

#[tokio::test]
async fn parked_requests_are_served_whole_when_the_daemon_comes() -> Result<()> {
    const PARKED: usize = 24;
    let patient = json!({"cold_start_wait_ms": 30_000});
    let mut stack = Stack::builder()
        .servers(2)
        .concurrency(2)
        .without_daemon()
        .picker(patient)
        .envoy_in_turn()
        .start()
        .await?;
    let address = stack.address();
    let bodies: Vec<String> = (0..PARKED)
        .map(|i| echo::chat(&format!("{i} {}", "lorem ipsum ".repeat(i * 2_000))).to_string())
        .collect();
    let mut waiting = Vec::new();
    for body in bodies.clone() {
        waiting.push(tokio::spawn(async move {
            client::send(address, echo::post("/v1/chat/completions", &[], body)?).await
        }));
    }
    // A request without a body waits too. So does a request whose body is incomplete when the state
    // arrives.
    let bodiless = tokio::spawn(async move { client::get(address, "/v1/models").await });
    let mut slow = RawConnection::connect(address).await?;
    let text = echo::chat("slowly").to_string();
    slow.write(format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-echo: 1\r\ncontent-length: {}\r\n\r\n{}",
        text.len(),
        &text[..9]
    ))
    .await?;
    // The client of one more request disconnects before the state arrives.
    let mut closed = RawConnection::connect(address).await?;
    closed
        .write(format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{text}",
            text.len()
        ))
        .await?;
    stack
        .envoy
        .picker_stat_until(
            "switchpoint_parked_total",
            |parked| parked == PARKED as i64 + 2,
            LIMIT,
        )
        .await?;
    closed.reset()?;
    assert_eq!(stack.get("/switchpoint/ready").await?.status, 503);

    stack.start_daemon()?;
    for (task, body) in waiting.into_iter().zip(bodies) {
        let reply = task.await??;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.json()?["body_sha256"], sha256(&body), "byte for byte");
    }
    assert_eq!(bodiless.await??.status, 200);
    slow.write(&text[9..]).await?;
    let reply = slow.read_reply().await?;
    assert_eq!((reply.status, &reply.json()?["body"]), (200, &json!(text)));
    stack.wait_until_ready().await?;
    assert_eq!(
        stack
            .envoy
            .picker_stat("switchpoint_host_errors_total")
            .await?,
        0,
        "the request of the disconnected client ended without an error"
    );
    Ok(())
}

/// Sends requests to a path whose bodies the picker does not read. The body may be a dialogue, in
/// which the client waits for an answer before it sends more.
#[tokio::test]
async fn parked_requests_whose_bodies_have_no_end_yet_are_picked_when_the_daemon_comes()
-> Result<()> {
    const OPEN: usize = 4;
    let patient = json!({"cold_start_wait_ms": 30_000});
    let mut stack = Stack::builder()
        .servers(2)
        .concurrency(2)
        .without_daemon()
        .picker(patient)
        .envoy_in_turn()
        .start()
        .await?;
    let pieces: Vec<String> = (0..40)
        .map(|i| format!("piece {i} {}", "lorem ipsum ".repeat(i)))
        .collect();
    let chunk = |text: &str| format!("{:x}\r\n{text}\r\n", text.len());
    let begun =
        "POST /v2/models/demo/infer HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            .to_owned()
            + &chunk(&pieces[0]);
    let mut open = Vec::new();
    for _ in 0..=OPEN {
        let mut raw = RawConnection::connect(stack.address()).await?;
        raw.write(&begun).await?;
        open.push(raw);
    }
    let closed = open.pop().ok_or("none")?;
    stack
        .envoy
        .picker_stat_until(
            "switchpoint_parked_total",
            |parked| parked == OPEN as i64 + 1,
            LIMIT,
        )
        .await?;
    closed.reset()?;

    stack.start_daemon()?;
    stack
        .envoy
        .picker_stat_until(
            "switchpoint_picked_total",
            |picked| picked >= OPEN as i64,
            LIMIT,
        )
        .await?;
    for (number, piece) in pieces.iter().enumerate().skip(1) {
        for raw in &mut open {
            raw.write(chunk(piece)).await?;
        }
        // The first pieces come further apart than the filter's ticks, as from a client that waits
        // for answers.
        tokio::time::sleep(Duration::from_millis(if number < 4 { 250 } else { 2 })).await;
    }
    for mut raw in open {
        raw.write("0\r\n\r\n").await?;
        let reply = raw.read_reply().await?;
        assert_eq!(
            (reply.status, &reply.json()?["body"]),
            (200, &json!(pieces.concat())),
            "byte for byte"
        );
    }
    assert_eq!(
        stack
            .envoy
            .picker_stat("switchpoint_host_errors_total")
            .await?,
        0
    );
    Ok(())
}

#[tokio::test]
async fn fail_open_goes_to_any_endpoint_that_envoy_knows() -> Result<()> {
    let server = || {
        ModelServer::start(ModelServerOptions {
            models: vec!["demo".into()],
            speed: 0.0,
            ..ModelServerOptions::default()
        })
    };
    let servers = [server()?, server()?];
    let hosts: Vec<SocketAddr> = servers.iter().map(ModelServer::addr).collect();
    let picker = json!({"failure_mode": "open", "cold_start_wait_ms": 20});
    let stack = Stack::builder()
        .without_daemon()
        .picker(picker)
        .envoy_config(known_hosts(&hosts))
        .envoy_in_turn()
        .start()
        .await?;
    let mut by = BTreeSet::new();
    for i in 0..20 {
        // The picker ignores a destination that the client sends, also when it lets requests pass
        // without state.
        let forged = [
            ("x-gateway-destination-endpoint", "127.0.0.1:1"),
            ("x-switchpoint-open", "0"),
        ];
        let reply = stack
            .send(echo::post(
                "/v1/chat/completions",
                &forged,
                echo::chat(&i.to_string()).to_string(),
            )?)
            .await?;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(
            echo::header(&reply.json()?, "x-switchpoint-open"),
            Vec::<&str>::new(),
            "the engine does not receive the internal header"
        );
        by.insert(reply.header("x-served-by").to_owned());
    }
    assert_eq!(by.len(), 2, "both endpoints were used: {by:?}");
    assert_eq!(
        stack
            .envoy
            .picker_stat("switchpoint_failed_open_total")
            .await?,
        20
    );
    assert_eq!(
        stack.get("/switchpoint/ready").await?.status,
        503,
        "failing open does not count as ready"
    );
    Ok(())
}
