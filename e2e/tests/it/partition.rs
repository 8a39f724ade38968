//! The daemon runs, but no bytes pass between it and the proxy. In the ordinary suite this lasts
//! for some seconds, in the long suite for a minute.

use std::time::Duration;

use e2e::explain::{ExplainedDecision, pool_is};
use e2e::ledger_metrics;
use serde_json::json;
use testbed::Result;
use testbed::cuttable_link::CuttableLink;
use testbed::load::LoadGenerator;
use testbed::stack::Stack;

const LIMIT: Duration = Duration::from_secs(60);

/// Cuts the link for this time. Meanwhile one endpoint leaves and another joins.
pub(crate) async fn partitioned_for(time: Duration, transport: &str) -> Result<()> {
    let cable = CuttableLink::lay().await?;
    let state =
        json!({"cluster": "switchpoint-state", "transport": transport, "silence_max_ms": 1_000});
    let builder = Stack::builder()
        .servers(4)
        .concurrency(2)
        .picker(json!({"explain": true, "state": state}));
    let mut stack = builder.cable(&cable).start().await?;
    cable.connect_to(stack.daemon()?.settings().state.address());
    stack.wait_until_ready().await?;
    stack.set_pool(&[0, 1, 2])?;
    pool_is(&stack, &[0, 1, 2]).await?;

    let load = LoadGenerator::start(stack.address(), 4);
    load.wait_for_more(20, LIMIT).await?;
    cable.cut();
    stack
        .envoy
        .picker_stat_until(
            "switchpoint_state_connected",
            |connected| connected == 0,
            LIMIT,
        )
        .await?;
    stack.set_pool(&[1, 2, 3])?;
    tokio::time::sleep(time).await; // The length of this pause is what the drill tests.
    load.wait_for_more(50, LIMIT).await?;
    let known = ExplainedDecision::ask(stack.address(), "who is there?")
        .await?
        .endpoints();
    assert!(
        known.contains(&stack.servers[0].addr().to_string()),
        "the proxy knows no change during the partition: {known:?}"
    );

    cable.mend();
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
        &format!("daemon cut off for {time:?}, by {transport}"),
        load,
        &stack,
    )
    .await?;
    Ok(())
}
