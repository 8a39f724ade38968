//! Sets up a pool whose engine runs only a few requests at the same time, so that flow control
//! holds the others.

use std::path::Path;

use http::Request;
use serde_json::{Value, json};
use testbed::Result;
use testbed::client::{self, Body, ClientReply};
use testbed::model_server::ModelServerOptions;
use testbed::stack::{PickerMode, Stack, StackBuilder};
use tokio::task::JoinHandle;

/// The number of requests that the engine runs at the same time.
pub const SEATS: u32 = 2;

/// The names and priorities (bands) of the objectives.
pub const BANDS: [(&str, i32); 2] = [("chat", 10), ("batch", -10)];

/// Returns a scheduling configuration that holds requests beyond `seats`; `None` holds none.
#[must_use]
pub fn picker(seats: Option<u32>) -> String {
    let head = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n";
    let Some(seats) = seats else {
        return format!("{head}plugins:\n- type: queue-scorer\n");
    };
    format!(
        "{head}featureGates: [flowControl]\nplugins:\n- type: queue-scorer\n\
         - {{type: concurrency-detector, parameters: {{maxConcurrency: {seats}}}}}\n\
         flowControl:\n  saturationDetector: {{pluginRef: concurrency-detector}}\n  defaultRequestTTL: 120s\n  \
         defaultNegativePriorityBand: {{maxRequests: 20000}}\n"
    )
}

/// Writes the objectives and the configuration into `folder`. Returns the daemon's arguments.
///
/// # Errors
/// Fails if a file cannot be written.
pub fn files(folder: &Path, seats: Option<u32>) -> Result<Vec<String>> {
    let objective = |(name, priority): (&str, i32)| {
        json!({"apiVersion": "llm-d.ai/v1alpha2", "kind": "InferenceObjective", "metadata": {"name": name},
               "spec": {"priority": priority, "poolRef": {"name": "default"}}})
        .to_string()
    };
    let objects = folder.join("objects.yaml");
    let config = folder.join("picker.yaml");
    std::fs::write(&objects, BANDS.map(objective).join("\n---\n"))?;
    replace(folder, seats)?;
    Ok(vec![
        "--objects".into(),
        objects.display().to_string(),
        "--config".into(),
        config.display().to_string(),
    ])
}

/// Replaces the configuration in `folder`.
///
/// # Errors
/// Fails if the file cannot be written.
pub fn replace(folder: &Path, seats: Option<u32>) -> Result<()> {
    let draft = folder.join("picker.draft");
    std::fs::write(&draft, picker(seats))?;
    Ok(std::fs::rename(draft, folder.join("picker.yaml"))?)
}

/// Sets the maximum time for which a request is held, in the configuration in `folder`.
///
/// # Errors
/// Fails if the configuration does not limit this time, or if the file cannot be written.
pub fn hold_for(folder: &Path, seconds: u32) -> Result<()> {
    let file = folder.join("picker.yaml");
    let before = std::fs::read_to_string(&file)?;
    let after = before.replace(
        "defaultRequestTTL: 120s",
        &format!("defaultRequestTTL: {seconds}s"),
    );
    if after == before {
        return Err("the configuration has no time to replace".into());
    }
    Ok(std::fs::write(file, after)?)
}

/// Describes a stack with one engine like `engine`, and one worker.
///
/// # Errors
/// Fails if a file cannot be written.
pub fn builder(
    front: PickerMode,
    folder: &Path,
    engine: &ModelServerOptions,
) -> Result<StackBuilder> {
    holding(
        Stack::builder()
            .front(front)
            .servers_like(1, engine)
            .concurrency(1),
        folder,
        SEATS,
    )
}

/// Adds flow control by tenant to a stack whose filter picks.
///
/// # Errors
/// Fails if a file cannot be written.
pub fn holding_tenants(builder: StackBuilder, folder: &Path, seats: u32) -> Result<StackBuilder> {
    Ok(holding(builder, folder, seats)?.picker(json!({"fairness_header": "trust"})))
}

/// Adds flow control to a stack: each engine takes `seats` requests.
///
/// # Errors
/// Fails if a file cannot be written.
pub fn holding(builder: StackBuilder, folder: &Path, seats: u32) -> Result<StackBuilder> {
    let arguments = files(folder, Some(seats))?;
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let builder = builder.picker(json!({"objective_header": "trust"}));
    Ok(builder.daemon_arguments(&arguments))
}

/// Returns the options of a slow engine: a request of 100 tokens takes one or two seconds.
#[must_use]
pub fn slow_engine() -> ModelServerOptions {
    ModelServerOptions {
        speed: 1.0,
        models: vec!["demo".into()],
        ..ModelServerOptions::default()
    }
}

/// Creates a request of `tokens` output tokens.
///
/// # Errors
/// Fails if the request is invalid.
pub fn request(objective: &str, tokens: u32) -> Result<Request<Body>> {
    let body = json!({"model": "demo", "max_tokens": tokens, "ignore_eos": true, "messages": [{"role": "user", "content": objective}]});
    let head = Request::post("/v1/chat/completions").header("content-type", "application/json");
    Ok(head
        .header("x-llm-d-inference-objective", objective)
        .body(client::full(body.to_string()))?)
}

/// Sends `count` requests that [`request`] creates, each on a separate connection.
///
/// # Errors
/// Fails if a request is invalid.
pub fn send(
    stack: &Stack,
    count: usize,
    objective: &str,
    tokens: u32,
) -> Result<Vec<JoinHandle<Result<ClientReply>>>> {
    let address = stack.address();
    (0..count)
        .map(|_| {
            Ok(tokio::spawn(client::send(
                address,
                request(objective, tokens)?,
            )))
        })
        .collect()
}

/// Returns the rows of `/debug/queues`; `None` if the daemon does not answer.
pub async fn queues(stack: &Stack) -> Option<Vec<Value>> {
    let page = stack
        .daemon
        .as_ref()?
        .admin("/debug/queues")
        .await
        .ok()?
        .json()
        .ok()?;
    page["queues"].as_array().cloned()
}

/// Returns how many requests are held, from the daemon's page `/debug/queues`.
pub async fn held(stack: &Stack) -> Option<u64> {
    Some(
        queues(stack)
            .await?
            .iter()
            .map(|row| row["held"].as_u64().unwrap_or(0))
            .sum(),
    )
}

/// Returns how many requests ended with this outcome, from the daemon's page `/debug/queues`.
pub async fn ended(stack: &Stack, outcome: &str) -> Option<u64> {
    Some(
        queues(stack)
            .await?
            .iter()
            .map(|row| row["outcomes"][outcome].as_u64().unwrap_or(0))
            .sum(),
    )
}
