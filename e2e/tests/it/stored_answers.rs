//! Answers that an engine keeps in memory: a request that names a stored answer reaches that
//! engine, whichever worker, proxy or picker gets it.

use std::collections::BTreeSet;
use std::time::Duration;

use http::Request;
use serde_json::{Value, json};
use testbed::client::{ClientReply, empty};
use testbed::second_envoy::SecondEnvoy;
use testbed::stack::{PickerMode, Stack};
use testbed::{Result, client, wait_for};

const LIMIT: Duration = Duration::from_secs(30);

const SERVERS: usize = 4;

async fn respond(stack: &Stack, more: &Value) -> Result<ClientReply> {
    let mut body = json!({"model": "demo", "input": "hello", "max_output_tokens": 4});
    more.as_object()
        .into_iter()
        .flatten()
        .for_each(|(key, value)| body[key] = value.clone());
    let reply = stack.post("/v1/responses", &body).await?;
    assert_eq!(reply.status, 200, "{}", reply.text());
    Ok(reply)
}

/// Returns the id in a reply, streamed or not.
fn id(reply: &ClientReply) -> Result<String> {
    let text = reply.text();
    let json = text
        .lines()
        .find_map(|line| line.strip_prefix("data: "))
        .unwrap_or(&text);
    let value: Value = serde_json::from_str(json)?;
    Ok(value["id"]
        .as_str()
        .or(value["response"]["id"].as_str())
        .ok_or("no id")?
        .to_owned())
}

/// Checks that all requests that name the response reach the endpoint that made the response.
async fn followed_up(stack: &Stack, id: &str, by: &str) -> Result<()> {
    for _ in 0..3 {
        let reply = respond(stack, &json!({"previous_response_id": id, "stream": false})).await?;
        assert_eq!(reply.header("x-served-by"), by, "{id}");
        for (method, path) in [
            ("GET", ""),
            ("DELETE", ""),
            ("POST", "/cancel"),
            ("GET", "/input_items"),
        ] {
            let request = Request::builder()
                .method(method)
                .uri(format!("/v1/responses/{id}{path}"))
                .body(empty())?;
            let reply = stack.send(request).await?;
            assert_eq!(
                (reply.status, reply.header("x-served-by")),
                (200, by),
                "{method} {id}{path}"
            );
        }
    }
    Ok(())
}

#[tokio::test]
async fn what_follows_a_response_goes_to_the_engine_that_made_it() -> Result<()> {
    for front in PickerMode::ALL {
        let stack = Stack::builder()
            .front(front)
            .servers(SERVERS)
            .concurrency(2)
            .shared_envoy()
            .start()
            .await?;
        // The workers read each other's state from their first ticks on.
        tokio::time::sleep(Duration::from_millis(500)).await;
        let mut made = Vec::new();
        for stream in [false, true, false, true, false, true] {
            let reply = respond(&stack, &json!({"stream": stream})).await?;
            made.push((id(&reply)?, reply.header("x-served-by").to_owned()));
        }
        let endpoints: BTreeSet<_> = made.iter().map(|(_, by)| by).collect();
        assert!(endpoints.len() > 1, "{front:?}: {made:?}");
        let (id, by) = made.last().ok_or("no response")?;
        let body = json!({"previous_response_id": id});
        let known = || async {
            for _ in 0..8 {
                let reply = respond(&stack, &body).await.ok()?;
                (reply.header("x-served-by") == by).then_some(())?;
            }
            Some(())
        };
        wait_for(LIMIT, "all workers to know the last response", known).await?;
        for (id, by) in &made {
            followed_up(&stack, id, by).await?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn another_proxy_knows_it_too_and_an_engine_that_is_gone_is_not_waited_for() -> Result<()> {
    let mut stack = Stack::builder().servers(SERVERS).start().await?;
    let second = SecondEnvoy::start(&stack, "another", 2).await?;
    let reply = respond(&stack, &json!({})).await?;
    let id = id(&reply)?;
    let by = reply.header("x-served-by").to_owned();
    let body = json!({"model": "demo", "input": "more", "previous_response_id": id}).to_string();
    let post = || async {
        client::post(second.envoy.listener(), "/v1/responses", body.clone())
            .await
            .ok()
    };
    let together = || async {
        for _ in 0..8 {
            if post().await?.header("x-served-by") != by {
                return None;
            }
        }
        Some(())
    };
    wait_for(LIMIT, "the second proxy to know the response", together).await?;
    let at = stack
        .servers
        .iter()
        .position(|server| server.addr().to_string() == by)
        .ok_or("no server")?;
    drop(stack.servers.remove(at));
    let elsewhere = || async { post().await.filter(|reply| reply.status == 200).map(drop) };
    wait_for(LIMIT, "another engine to get it", elsewhere).await
}
