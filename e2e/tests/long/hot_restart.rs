//! In a hot restart a new Envoy takes over from the old Envoy. For some time two processes have one
//! node id. No request is lost.

use std::time::Duration;

use e2e::ledger_metrics;
use http::Request;
use serde_json::{Value, json};
use testbed::client::{self, EventStream};
use testbed::envoy::{EnvoyConfig, EnvoyOptions, EnvoyProcess};
use testbed::load::LoadGenerator;
use testbed::model_server;
use testbed::stack::Stack;
use testbed::{Result, wait_for};

const LIMIT: Duration = Duration::from_secs(60);

/// Returns the process ids of the proxies that the daemon knows.
async fn processes(stack: &Stack) -> Option<Vec<String>> {
    let state = stack
        .daemon
        .as_ref()?
        .admin("/debug/state")
        .await
        .ok()?
        .json()
        .ok()?;
    let id = |proxy: &Value| Some(proxy["process_id"].as_str()?.to_owned());
    state["proxies"].as_array()?.iter().map(id).collect()
}

#[tokio::test]
async fn a_hot_restart_loses_no_request_and_both_hear_the_daemon() -> Result<()> {
    // The base id must differ from that of every other test: the number of a leased port does.
    let base = testbed::ports::ReservedPort::lease()?;
    let base_id = base.number().to_string();
    let times = ["--drain-time-s", "3", "--parent-shutdown-time-s", "8"];
    let arguments = |epoch: &str| -> Vec<String> {
        ["--base-id", &base_id, "--restart-epoch", epoch]
            .into_iter()
            .chain(times)
            .map(str::to_owned)
            .collect()
    };
    let first = arguments("0");
    let first: Vec<&str> = first.iter().map(String::as_str).collect();
    let slow = model_server::ModelServerOptions {
        models: vec!["demo".into()],
        speed: 0.0,
        chunk_delay_ms: 50,
        ..Default::default()
    };
    let mut stack = Stack::builder()
        .servers_like(3, &slow)
        .concurrency(2)
        .hot_restart()
        .envoy_arguments(&first)
        .start()
        .await?;
    let old = processes(&stack).await.ok_or("no proxies")?;
    assert_eq!(old.len(), 1);

    let chat = json!({"model": "demo", "stream": true, "max_tokens": 80, "ignore_eos": true, "messages": [{"role": "user", "content": "long"}]});
    let request = Request::post("/v1/chat/completions").body(client::full(chat.to_string()))?;
    let mut stream = EventStream::new(client::start(stack.address(), request).await?);
    stream.next().await?.ok_or("the stream begins")?;
    let load = LoadGenerator::start(stack.address(), 6);
    load.wait_for_more(50, LIMIT).await?;

    let folder = tempfile::tempdir()?;
    let options = EnvoyOptions {
        concurrency: 2,
        arguments: arguments("1"),
        hot_restart: true,
        ..EnvoyOptions::default()
    };
    let config = EnvoyConfig::read(&stack.folder().join("envoy.json"))?;
    let second = EnvoyProcess::start(
        &config,
        stack.envoy.listener(),
        stack.envoy.admin(),
        &options,
        folder.path(),
    )?;
    let both = || async {
        processes(&stack)
            .await
            .filter(|ids| ids.len() == 2 && ids.contains(&old[0]))
    };
    wait_for(LIMIT, "both processes to be connected to the daemon", both).await?;
    load.wait_for_more(100, LIMIT).await?;
    stack.set_pool(&[0, 1])?;
    load.wait_for_more(100, LIMIT).await?;
    let events = stream.rest().await?;
    assert_eq!(
        events.last().map(|event| event.data.as_str()),
        Some("[DONE]"),
        "the old process finished the stream"
    );

    let status = stack.envoy.process().wait(LIMIT).await?;
    assert!(
        status.success(),
        "the old process ended without success: {status}"
    );
    let one = || async {
        processes(&stack)
            .await
            .filter(|ids| ids.len() == 1 && !ids.contains(&old[0]))
    };
    wait_for(LIMIT, "the daemon to know only the new process", one).await?;
    load.wait_for_more(100, LIMIT).await?;
    stack.envoy = second; // The checks below read the statistics of the second Envoy.
    ledger_metrics::close("Envoy hot-restarted", load, &stack).await?;
    assert!(stack.envoy.process().check_running().is_ok());
    Ok(())
}
