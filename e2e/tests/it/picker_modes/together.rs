//! The filter in one Envoy and ext_proc in another, with one daemon. The daemon treats its ext_proc
//! server as one more proxy.

use std::time::Duration;

use testbed::model_server::ModelServerOptions;
use testbed::second_envoy::SecondEnvoy;
use testbed::stack::{PickerMode, Stack};
use testbed::{Result, client};

use super::{slow, stream, until_in_flight};
use crate::echo;

#[tokio::test]
async fn both_fronts_at_once_share_one_state() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let config = folder.path().join("config.yaml");
    std::fs::write(
        &config,
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{type: active-request-scorer}]\n",
    )?;
    let builder = Stack::builder()
        .front(PickerMode::Filter)
        .servers_like(2, &slow(100));
    let stack = builder
        .daemon_arguments(&["--config", &config.display().to_string()])
        .start()
        .await?;
    let beside = SecondEnvoy::start_as(PickerMode::ExtProc, &stack, "beside").await?;
    let mut open = Vec::new();
    for i in 0..8 {
        let address = if i % 2 == 0 {
            stack.address()
        } else {
            beside.envoy.listener()
        };
        open.push(stream(address, 200).await?);
        // The pause is far longer than load takes to reach the other proxy, so that each pick knows
        // it.
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    until_in_flight(&stack, 8).await?;
    let endpoints = stack
        .daemon
        .as_ref()
        .ok_or("no daemon")?
        .endpoints()
        .await?;
    let spread: Vec<Option<u64>> = endpoints
        .iter()
        .map(|endpoint| endpoint["in_flight"].as_u64())
        .collect();
    assert_eq!(
        spread,
        [Some(4), Some(4)],
        "each proxy balances the load of the other"
    );
    Ok(())
}

#[tokio::test]
async fn what_one_front_placed_the_other_finds() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let config = folder.path().join("config.yaml");
    std::fs::write(
        &config,
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{type: prefix-cache-scorer}]\n",
    )?;
    let builder = Stack::builder().front(PickerMode::Filter).servers_like(
        6,
        &ModelServerOptions {
            models: vec!["demo".into()],
            speed: 0.0,
            ..ModelServerOptions::default()
        },
    );
    let stack = builder
        .daemon_arguments(&["--config", &config.display().to_string()])
        .start()
        .await?;
    let beside = SecondEnvoy::start_as(PickerMode::ExtProc, &stack, "beside").await?;
    let fronts = [stack.address(), beside.envoy.listener()];
    let post = |front: usize, prompt: String| async move {
        let body = echo::chat(&prompt).to_string();
        let reply = client::post(fronts[front], "/v1/chat/completions", body).await?;
        // An endpoint that refuses a prompt does not have it cached.
        assert_eq!(reply.status, 200, "{}", reply.text());
        Ok::<_, testbed::Error>(reply)
    };
    // A proxy that has not served yet gets no state from others, and reports only once a second. So
    // each proxy serves one request first, and the test waits.
    for front in [0, 1] {
        post(front, "to begin with".to_owned()).await?;
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let mut placed = Vec::new();
    for number in 0..6 {
        let prompt = format!(
            "{number} conversations. {}",
            "They go on and on. ".repeat(200)
        );
        placed.push((
            stack.server_of(&post(number % 2, prompt.clone()).await?)?,
            prompt,
        ));
    }
    // Waits ten times as long as the product allows for a placement to reach the other proxy.
    tokio::time::sleep(Duration::from_secs(1)).await;
    for (number, (server, prompt)) in placed.into_iter().enumerate() {
        for turn in 0..4 {
            let reply = post((number + 1) % 2, format!("{prompt} {turn}")).await?;
            assert_eq!(
                stack.server_of(&reply)?,
                server,
                "conversation {number}, turn {turn}"
            );
        }
    }
    Ok(())
}
