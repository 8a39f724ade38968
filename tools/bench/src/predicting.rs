//! Starts a stack whose picks use predicted latency. The bench first trains the latency models, so
//! that the measured picks really use predictions.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use http::Request;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use testbed::{Result, client, wait_for};
use tokio::task::JoinSet;

use crate::world::BenchStack;

/// The headers of every request. They demand picks by predicted latency, with SLOs that every
/// endpoint meets.
pub(crate) const HEADERS: &[&str] = &[
    "x-llm-d-slo-ttft-ms: 600000",
    "x-llm-d-slo-tpot-ms: 60000",
    "PredictionBasedRouting: true",
];

/// A scheduling configuration with two profiles, as in `docs/how-to/slo.md`.
const CONFIG: &str = "
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: prefix-cache-scorer
- type: slo-request-tracker
- type: slo-scorer
- type: slo-aware-profile-handler
- type: weighted-random-picker
schedulingProfiles:
- name: default
  plugins: [{pluginRef: slo-request-tracker}, {pluginRef: prefix-cache-scorer}]
- name: slo
  plugins: [{pluginRef: slo-request-tracker}, {pluginRef: slo-scorer}, {pluginRef: weighted-random-picker}]
";

/// The number of clients that send training requests, the lengths of their prompts in words, and
/// the maximum time of the training.
const CLIENTS: usize = 8;
const WORDS: [usize; 4] = [200, 2_000, 20_000, 40_000];
const LIMIT: Duration = Duration::from_secs(90);

/// Starts the stack and trains both daemons. Returns when the daemons' latency models predict.
///
/// # Errors
/// Fails if a process does not start, or if a model does not predict in time.
pub(crate) async fn world(
    endpoints: usize,
    daemon: &[String],
    folder: &Path,
) -> Result<BenchStack> {
    let config = folder.join("predicting.yaml");
    std::fs::write(&config, CONFIG)?;
    let further = [
        "--latency-prediction".to_owned(),
        "--config".to_owned(),
        config.display().to_string(),
        "--ext-proc-slo-headers".to_owned(),
        "trust".to_owned(),
    ];
    let arguments: Vec<String> = daemon.iter().cloned().chain(further).collect();
    let world = BenchStack::start(endpoints, 1, &arguments).await?;
    for (listener, admin) in world.pickers() {
        let mut teachers = JoinSet::new();
        let number = Arc::<AtomicU64>::default();
        for _ in 0..CLIENTS {
            let number = Arc::clone(&number);
            teachers.spawn(async move {
                while teach(listener, number.fetch_add(1, Ordering::Relaxed))
                    .await
                    .is_ok()
                {}
            });
        }
        wait_for(LIMIT, "a model that predicts", || async {
            predicts(admin).await.ok()?.then_some(())
        })
        .await?;
    }
    Ok(world) // each dropped set ended its clients
}

async fn predicts(daemon: SocketAddr) -> Result<bool> {
    let page = client::get(daemon, "/debug/model").await?.json()?;
    Ok(page["pools"][0]["predicts"] == true)
}

/// Sends one streaming request, from whose reply the latency model learns. Reads the reply to its
/// end.
async fn teach(listener: SocketAddr, number: u64) -> Result<()> {
    let words = WORDS[usize::try_from(number).unwrap_or(0) % WORDS.len()];
    let text = format!("{number:05} ").repeat(words);
    let body: Value = json!({
        "model": "m", "max_tokens": 8, "stream": true, "stream_options": {"include_usage": true},
        "messages": [{"role": "user", "content": text}],
    });
    let mut request = Request::post("/v1/chat/completions?chunks=8&every_ms=2")
        .header("content-type", "application/json");
    for (name, value) in HEADERS.iter().filter_map(|line| line.split_once(": ")) {
        request = request.header(name, value);
    }
    let mut reply = client::start(listener, request.body(client::full(body.to_string()))?)
        .await?
        .into_body();
    while let Some(frame) = reply.frame().await {
        frame?;
    }
    Ok(())
}
