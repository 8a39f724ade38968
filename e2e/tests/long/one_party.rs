//! Tests how much one engine with false reports, or one client with invented names, may harm the
//! others.

use std::net::SocketAddr;
use std::time::Duration;

use e2e::ledger_metrics::note;
use futures::future::join_all;
use http::StatusCode;
use serde_json::{Value, json};
use testbed::model_server::ModelServerOptions;
use testbed::plain_engine::{AnswerDelay, PlainAnswer, PlainBehaviour, PlainEngine};
use testbed::stack::Stack;
use testbed::{Error, Result, client, wait_for};

const LIMIT: Duration = Duration::from_secs(60);

// === An engine that lies about the tokens that it sent ===

const CLIENTS: usize = 40;
const ROUNDS: usize = 10;

/// The number of requests that are not the first of their client.
const RETURNS: usize = CLIENTS * (ROUNDS - 1);

/// The results of the clients of a pool.
struct PoolOutcome {
    /// The number of requests that reached another engine than the client's request before.
    moved: usize,
    /// The longest time, in ms, that a pick expected for the output of a request.
    decode_ms: f64,
}

/// Starts an engine that reports this many tokens for each reply of 64 bytes.
async fn reporting(tokens: u32) -> Result<PlainEngine> {
    let body = json!({
        "id": "1", "object": "chat.completion", "model": "demo",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "x".repeat(64)}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5_000, "completion_tokens": tokens},
    });
    let behaviour = PlainBehaviour {
        answer: PlainAnswer::Fixed(StatusCode::OK, body.to_string()),
        delay: AnswerDelay::Constant(Duration::from_millis(150)),
        ..PlainBehaviour::default()
    };
    Ok(PlainEngine::start(([127, 0, 0, 1], 0).into(), behaviour).await?)
}

/// Returns a request with a prompt of 20 KB and no limit on its output.
fn chat(client: usize, round: usize) -> Value {
    let prompt = format!(
        "{client} clients. {}{round}",
        "They go on and on. ".repeat(1_050)
    );
    json!({"model": "demo", "messages": [{"role": "user", "content": prompt}]})
}

/// Sends the requests of a client. Returns how many reached another engine than the request before.
async fn moves(proxy: SocketAddr, number: usize) -> Result<usize> {
    let mut moved = 0;
    let mut last: Option<String> = None;
    for round in 0..ROUNDS {
        let body = chat(number, round).to_string();
        let reply = client::post(proxy, "/v1/chat/completions", body).await?;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let engine = reply.header("x-served-by").to_owned();
        moved += usize::from(last.is_some_and(|last| last != engine));
        last = Some(engine);
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    Ok(moved)
}

/// Lets all clients use a pool of four engines. One of the engines reports this many tokens per
/// reply.
async fn outcome(tokens: u32) -> Result<PoolOutcome> {
    let engine = reporting(tokens).await?;
    let others = ModelServerOptions {
        models: vec!["demo".into()],
        output_tokens_mean: 16,
        ..ModelServerOptions::default()
    };
    let mut stack = Stack::builder()
        .servers_like(3, &others)
        .stranger(engine.addr())
        .start()
        .await?;
    let address = stack.address();
    let mut moved = 0;
    for client in join_all((0..CLIENTS).map(|number| moves(address, number))).await {
        moved += client?;
    }
    let question = json!({"request": chat(0, 0).to_string(), "path": "/v1/chat/completions"});
    let admin = stack.daemon()?.settings().admin.address();
    let reply = client::post(admin, "/api/v1/explain", question.to_string()).await?;
    let explained = reply.json()?;
    let candidates = explained["candidates"].as_array().into_iter().flatten();
    let decode_ms = candidates
        .filter_map(|candidate| candidate["cost"]["decode_ms"].as_f64())
        .reduce(f64::max)
        .ok_or_else(|| Error::from(format!("no costs: {explained}")))?;
    Ok(PoolOutcome { moved, decode_ms })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_claims_too_many_tokens_moves_no_prompt_of_others() -> Result<()> {
    let honest = outcome(16).await?;
    let lied_to = outcome(u32::MAX).await?;
    note(
        "an engine claims 4,294,967,295 tokens for each reply",
        &format!(
            "{} of {RETURNS} requests moved, {} where it is honest; output takes {:.0} ms, {:.0} where it is honest",
            lied_to.moved, honest.moved, lied_to.decode_ms, honest.decode_ms
        ),
    );
    assert!(lied_to.moved <= honest.moved + RETURNS / 50);
    assert!(lied_to.decode_ms < 10.0 * honest.decode_ms);
    Ok(())
}

// === A client that invents names of models ===

#[tokio::test]
async fn invented_names_leave_the_page_small_and_a_row_for_the_real_model() -> Result<()> {
    const INVENTED: usize = 260;
    const REAL: usize = 20;
    const PAGE_BYTES_MAX: usize = 6 << 20;
    let engine = PlainEngine::start(([127, 0, 0, 1], 0).into(), PlainBehaviour::default()).await?;
    let stack = Stack::builder()
        .servers(0)
        .stranger(engine.addr())
        .concurrency(2)
        .start()
        .await?;
    let send = async |model: &str| -> Result<()> {
        let body = json!({"model": model, "messages": [{"role": "user", "content": "hello"}]});
        let reply = stack.post("/v1/chat/completions", &body).await?;
        assert_eq!(reply.status, 200, "{}", reply.text());
        Ok(())
    };
    for number in 0..INVENTED {
        send(&format!("{number:03}{}", "x".repeat(237))).await?;
    }
    for _ in 0..REAL {
        send("demo").await?;
    }
    let real_row = || async {
        let page = stack.daemon.as_ref()?.admin("/metrics").await.ok()?.text();
        let rows = page.lines().filter(|line| {
            line.starts_with("llm_d_epp_request_total{") && line.contains("model_name=\"demo\"")
        });
        let counts = rows.filter_map(|row| row.rsplit(' ').next()?.parse::<f64>().ok());
        // Each worker treats the name as real after its first answer with this name.
        let has_all = counts.sum::<f64>() >= REAL as f64 - 2.0;
        has_all.then_some(page.len())
    };
    let bytes = wait_for(LIMIT, "a row for the real model", real_row).await?;
    note(
        "260 invented names of 240 bytes",
        &format!("the page has {bytes} bytes, and the real model a row"),
    );
    assert!(bytes < PAGE_BYTES_MAX, "{bytes} bytes");
    Ok(())
}
