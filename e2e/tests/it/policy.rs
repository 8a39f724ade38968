//! Laws of the default policy on a real Envoy: which endpoints get requests, for any numbers of the
//! policy.

use std::collections::BTreeMap;

use futures::{StreamExt, TryStreamExt, stream};
use http::Request;
use serde_json::json;
use testbed::model_server::ModelServerOptions;
use testbed::stack::Stack;
use testbed::{Result, client};

const SERVERS: usize = 4;

/// Returns the options of an engine that is ten times as fast as a real engine, so that a test
/// takes seconds.
fn options() -> ModelServerOptions {
    ModelServerOptions {
        models: vec!["demo".to_owned(), "chat".to_owned()],
        speed: 10.0,
        ..ModelServerOptions::default()
    }
}

/// Sends a prompt to this model, and returns the position of the server that answered.
async fn server_of(stack: &Stack, model: &str, prompt: String, max_tokens: u32) -> Result<usize> {
    let body =
        json!({"model": model, "max_tokens": max_tokens, "ignore_eos": true, "prompt": prompt});
    let request = Request::post("/v1/completions").header("content-type", "application/json");
    let reply = stack
        .send(request.body(client::full(body.to_string()))?)
        .await?;
    assert_eq!(reply.status, 200, "{}", reply.text());
    stack.server_of(&reply)
}

/// Prompts that share nothing find equal engines. The engines have a place for an adapter, and the
/// model has a second name. Neither fact may change the spread, because neither name needs an
/// adapter.
#[tokio::test]
async fn prompts_of_a_base_model_by_any_name_spread_over_an_idle_pool() -> Result<()> {
    let options = ModelServerOptions {
        loras: vec!["sql".to_owned()],
        max_lora: 1,
        ..options()
    };
    let stack = Stack::builder()
        .servers_like(SERVERS, &options)
        .shared_envoy()
        .start()
        .await?;
    let mut counts = BTreeMap::<usize, usize>::new();
    for number in 0..10 * SERVERS {
        let model = ["demo", "chat"][number % 2];
        let prompt = format!("{number} is another prompt ").repeat(50);
        *counts
            .entry(server_of(&stack, model, prompt, 4).await?)
            .or_default() += 1;
    }
    assert!(
        counts.len() == SERVERS && counts.values().all(|&count| count <= 15),
        "{counts:?}"
    );
    Ok(())
}

/// Sessions begin with one long system prompt, which at first one engine has cached. Each engine
/// gets a copy while the others are busy, and then as many sessions as the other engines.
#[tokio::test]
async fn a_prompt_that_all_share_comes_to_be_used_at_all_engines() -> Result<()> {
    let stack = Stack::builder()
        .servers_like(SERVERS, &options())
        .shared_envoy()
        .start()
        .await?;
    let system = "You are a careful agent. ".repeat(1_000);
    let session = |number: usize| {
        let prompt = format!("{system} session {number} {}", "asks ".repeat(20 + number));
        server_of(&stack, "demo", prompt, 200)
    };
    let servers: Vec<usize> = stream::iter((0..120).map(session))
        .buffered(12)
        .try_collect()
        .await?;
    let mut counts = BTreeMap::<usize, usize>::new();
    servers
        .iter()
        .skip(60)
        .for_each(|server| *counts.entry(*server).or_default() += 1);
    assert!(
        counts.len() == SERVERS && counts.values().all(|&count| count <= 2 * 60 / SERVERS),
        "{counts:?}"
    );
    Ok(())
}
