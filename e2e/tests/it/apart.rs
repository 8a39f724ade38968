//! Two proxies that cannot exchange state, because the daemon is down.

use std::time::Duration;

use e2e::ledger_metrics;
use testbed::fleet::{Fleet, FleetShape};
use testbed::load::LoadGenerator;
use testbed::model_server::ModelServerOptions;
use testbed::{Result, client};

use crate::echo;

const LIMIT: Duration = Duration::from_secs(60);
const PROMPTS: usize = 12;

/// Sends a prompt through this proxy, and returns the server that answers.
async fn served(fleet: &Fleet, proxy: std::net::SocketAddr, prompt: &str) -> Result<usize> {
    // The prompt has about 11,000 tokens. For a short prompt, the endpoint that its hash chooses
    // saves too little: all endpoints then cost the same, and each proxy picks one endpoint after
    // another.
    let body = echo::chat(&prompt.repeat(2_000)).to_string();
    fleet
        .stack
        .server_of(&client::post(proxy, "/v1/chat/completions", body).await?)
}

#[tokio::test]
async fn without_the_daemon_two_proxies_send_cold_prompts_to_the_same_and_with_it_they_tell_again()
-> Result<()> {
    let mut fleet = Fleet::start(
        FleetShape {
            proxies: 2,
            workers: 1,
        },
        true,
        4,
        &ModelServerOptions::default(),
    )
    .await?;
    let [one, two] = [fleet.stack.address(), fleet.seconds[0].envoy.listener()];
    let load = LoadGenerator::start(one, 2);
    let their_load = LoadGenerator::start(two, 2);
    load.wait_for_more(20, LIMIT).await?;
    fleet.stack.daemon()?.process().kill()?;
    for proxy in [&fleet.stack.envoy, &fleet.seconds[0].envoy] {
        proxy
            .picker_stat_until("switchpoint_state_age_ms", |age_ms| age_ms > 2_500, LIMIT)
            .await?;
    }
    load.wait_for_more(50, LIMIT).await?;
    their_load.wait_for_more(50, LIMIT).await?;
    their_load.stop().await?.check_all_served()?;
    let outcome = load.stop().await?;
    outcome.check_all_served()?;

    let prompts: Vec<String> = (0..PROMPTS)
        .map(|number| format!("{number} is where it begins. "))
        .collect();
    let mut here = Vec::new();
    let mut there = Vec::new();
    for prompt in &prompts {
        here.push(served(&fleet, one, prompt).await?);
    }
    // The second proxy gets the prompts in reverse order, so that two round-robin pickers would not
    // agree.
    for prompt in prompts.iter().rev() {
        there.insert(0, served(&fleet, two, prompt).await?);
    }
    assert_eq!(
        here, there,
        "both proxies choose the same endpoints; the chance of a coincidence is one in sixteen million"
    );
    assert!(
        here.iter().any(|server| *server != here[0]),
        "not all prompts go to one endpoint: {here:?}"
    );

    fleet.stack.daemon()?.start_again()?;
    for proxy in [&fleet.stack.envoy, &fleet.seconds[0].envoy] {
        proxy
            .picker_stat_until(
                "switchpoint_state_connected",
                |connected| connected == 1,
                LIMIT,
            )
            .await?;
    }
    let load = LoadGenerator::start(one, 2);
    load.wait_for_more(50, LIMIT).await?;
    ledger_metrics::close(
        "two proxies, their daemon killed and started again",
        load,
        &fleet.stack,
    )
    .await?;
    let prompts: Vec<String> = (0..8)
        .map(|number| format!("{number} is told again. "))
        .collect();
    let mut placed = Vec::new();
    for prompt in &prompts {
        placed.push(served(&fleet, one, prompt).await?);
    }
    // Waits ten times as long as the product allows for a placement to reach the other proxy.
    tokio::time::sleep(Duration::from_secs(1)).await;
    for (prompt, server) in prompts.iter().zip(placed) {
        assert_eq!(served(&fleet, two, prompt).await?, server, "{prompt}");
    }
    Ok(())
}
