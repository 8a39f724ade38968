//! Prompts that every engine refuses, beside prompts that are answered.

use std::time::Duration;

use hyper::Request;
use serde_json::json;
use testbed::client::{self, ClientReply};
use testbed::model_server::ModelServerOptions;
use testbed::stack::Stack;
use testbed::{Result, wait_for};

use super::outsider::LIMIT;
use super::{WORKERS, warm};
use crate::echo;

/// The KV blocks of each engine, which correspond to 2,048 blocks of the prefix index.
const KV_BLOCKS: u32 = 8_192;

/// The maximum context of the engines in tokens, which corresponds to 512 blocks of the prefix
/// index.
const CONTEXT_TOKENS: u32 = 32_768;

/// The length in bytes and the number of the prompts that are refused. A prompt of 16,384 blocks
/// fits no engine's memory. A prompt of 1,560 blocks fits, and is placed until the engine refuses
/// it.
const REFUSED: [(usize, usize); 2] = [(4_200_000, 8), (400_000, 16)];

/// The maximum number of entries. The answered prompts have fewer, and the refused prompts would
/// have twice as many.
const ENTRIES_MAX: f64 = 3_500.0;

/// How many of the 12 answered prompts may move: one, because a worker that the machine delays
/// picks by old load. If the refused prompts displaced the answered ones, 8 would move.
const MOVED_MAX: usize = 1;

/// Names the client. The failures of one client may count against an endpoint while no other
/// client exists.
const CLIENT_HEADER: &str = "x-client";

/// All workers have read a withdrawal after this time, on a busy machine too.
const WITHDRAWAL: Duration = Duration::from_millis(500);

/// Sends a chat as the client of this name, and returns the reply. Each client has its own key. So
/// the picker knows that the client whose prompts are refused never succeeds, and its refusals cost
/// the endpoints nothing. With the key of a client that succeeds, up to three refusals would count
/// as failures of an endpoint, each worth more than the cached prompts of these fast engines.
async fn chat(stack: &Stack, name: &str, prompt: &str) -> Result<ClientReply> {
    let request = Request::post("/v1/chat/completions")
        .header("content-type", "application/json")
        .header("authorization", format!("Bearer {name}"))
        .header(CLIENT_HEADER, name)
        .body(client::full(echo::chat(prompt).to_string()))?;
    client::send(stack.address(), request).await
}

/// Sends the prompts as another client. Returns the server of each.
async fn servers_of(stack: &Stack, prompts: &[String]) -> Result<Vec<usize>> {
    let mut servers = Vec::new();
    for prompt in prompts {
        let reply = chat(stack, "others", prompt).await?;
        assert_eq!(reply.status, 200, "{}", reply.text());
        servers.push(stack.server_of(&reply)?);
    }
    Ok(servers)
}

/// Returns the sum of the rows of a metric of the daemon that contain `label`.
async fn metric(stack: &Stack, name: &str, label: &str) -> Option<f64> {
    let page = stack.daemon.as_ref()?.admin("/metrics").await.ok()?.text();
    let rows = page
        .lines()
        .filter(|line| line.starts_with(name) && line.contains(label));
    rows.map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
        .sum()
}

#[tokio::test]
async fn prompts_that_engines_refuse_take_no_engine_from_others() -> Result<()> {
    let options = ModelServerOptions {
        models: vec!["demo".into()],
        num_gpu_blocks: Some(KV_BLOCKS),
        max_model_len: CONTEXT_TOKENS,
        speed: 0.0,
        ..ModelServerOptions::default()
    };
    let stack = Stack::builder()
        .servers_like(4, &options)
        .concurrency(WORKERS)
        .picker(json!({"client_header": CLIENT_HEADER}))
        .envoy_in_turn()
        .start()
        .await?;
    warm(&stack).await?;
    let prompts: Vec<String> = (0..12)
        .map(|client| format!("{client} clients. {}", "They go on and on. ".repeat(1_000)))
        .collect();
    let mut servers = servers_of(&stack, &prompts).await?;
    // A worker that has just started may miss the first placements. Each worker knows all prompts
    // when none moves any more.
    let settled = async {
        loop {
            let before = servers.clone();
            for _ in 0..WORKERS {
                servers = servers_of(&stack, &prompts).await?;
            }
            if servers == before {
                return Ok(servers);
            }
        }
    };
    let settled: Result<_> = tokio::time::timeout(LIMIT, settled).await?;
    let servers = settled?;
    let mut refusals = 0;
    for (bytes, prompts_refused) in REFUSED {
        tokio::time::sleep(Duration::from_millis(50)).await;
        for attempt in 0..prompts_refused {
            let refused = format!("{attempt} {}", "x".repeat(bytes));
            let reply = chat(&stack, "refused", &refused).await?;
            assert_eq!(reply.status, 400, "longer than the engine's context");
        }
        refusals += prompts_refused;
        tokio::time::sleep(WITHDRAWAL).await;
        let now = servers_of(&stack, &prompts).await?;
        let moved = now
            .iter()
            .zip(&servers)
            .filter(|(now, before)| now != before);
        assert!(
            moved.count() <= MOVED_MAX,
            "{bytes} bytes: {servers:?}, {now:?}"
        );
    }
    // Reports in which all refusals are counted show what the workers still know.
    let withdrawn = || async {
        let counted = metric(&stack, "llm_d_epp_request_error_total", "\"400\"").await?;
        let entries = metric(&stack, "llm_d_epp_prefix_indexer_size{", "").await?;
        (counted >= refusals as f64 && (1.0..ENTRIES_MAX).contains(&entries)).then_some(())
    };
    wait_for(LIMIT, "the refused prompts to be withdrawn", withdrawn).await
}
