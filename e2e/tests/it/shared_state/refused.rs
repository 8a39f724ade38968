//! Prompts that every engine refuses, beside prompts that are answered.

use std::time::Duration;

use testbed::Result;
use testbed::model_server::ModelServerOptions;
use testbed::stack::Stack;

use super::{WORKERS, warm};
use crate::echo;

/// KV blocks of each engine: 2,048 blocks of the prefix index.
const KV_BLOCKS: u32 = 8_192;

/// Eight of these, of 16,384 blocks each, are 16 times the memory of all four engines.
const REFUSED_BYTES: usize = 4_200_000;

async fn server_of(stack: &Stack, prompt: &str) -> Result<usize> {
    let reply = stack
        .post("/v1/chat/completions", &echo::chat(prompt))
        .await?;
    assert_eq!(reply.status, 200, "{}", reply.text());
    stack.server_of(&reply)
}

#[tokio::test]
async fn prompts_that_engines_refuse_take_no_engine_from_others() -> Result<()> {
    let options = ModelServerOptions {
        models: vec!["demo".into()],
        num_gpu_blocks: Some(KV_BLOCKS),
        speed: 0.0,
        ..ModelServerOptions::default()
    };
    let stack = Stack::builder()
        .servers_like(4, &options)
        .concurrency(WORKERS)
        .envoy_in_turn()
        .start()
        .await?;
    warm(&stack).await?;
    let prompts: Vec<String> = (0..12)
        .map(|client| format!("{client} clients. {}", "They go on and on. ".repeat(1_000)))
        .collect();
    let mut servers = Vec::new();
    for prompt in &prompts {
        servers.push(server_of(&stack, prompt).await?);
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    for attempt in 0..8 {
        let refused = format!("{attempt} {}", "x".repeat(REFUSED_BYTES));
        let reply = stack
            .post("/v1/chat/completions", &echo::chat(&refused))
            .await?;
        assert_eq!(reply.status, 400, "longer than the engine's context");
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    for (prompt, server) in prompts.iter().zip(servers) {
        assert_eq!(server_of(&stack, prompt).await?, server);
    }
    Ok(())
}
