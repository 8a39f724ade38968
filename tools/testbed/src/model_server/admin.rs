//! Admin orders (HTTP requests that control a model server). Each server accepts them under
//! `/admin/` on its own port. The control listener accepts them for all servers of a process.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, State};
use http::{HeaderValue, Method, Response, StatusCode, header};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::time::Instant;

use super::ModelServerState;
use super::faults::{FaultMode, ServerFault};
use super::metrics::MetricOverrides;
use super::response::{header_pairs, json_reply};
use super::socket::SocketCommand;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct RestartRequest {
    /// The time for which the socket stays closed, in ms.
    for_ms: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PaceRequest {
    slowdown: f64,
}

/// Carries out an order. `spare` is the connection that brought the order. This connection stays
/// open when the socket is closed, and closes after the answer.
pub(super) async fn handle(
    server: &ModelServerState,
    action: &str,
    method: &Method,
    body: &[u8],
    spare: Option<u64>,
) -> Response<Body> {
    let outcome = match (method, action) {
        (&Method::GET, "state") => server.state().await,
        (&Method::GET, "faults") => Ok(json!(server.faults().list())),
        (&Method::POST, "faults") => match read::<ServerFault>(body) {
            Ok(fault) => {
                server.order(fault, spare).await;
                Ok(json!(server.faults().list()))
            }
            Err(message) => Err(message),
        },
        (&Method::GET, "lie") => Ok(json!(*server.overrides())),
        (&Method::POST, "lie") => read::<Value>(body)
            .and_then(|overrides| parse_overrides(&overrides))
            .map(|overrides| {
                *server.overrides() = overrides;
                json!(*server.overrides())
            }),
        (&Method::POST, "pace") => {
            read::<PaceRequest>(body).and_then(|PaceRequest { slowdown }| {
                let sane = super::SLOWDOWN
                    .contains(&slowdown)
                    .then(|| server.engine.slow_down(slowdown));
                sane.map(|()| json!({ "slowdown": slowdown }))
                    .ok_or_else(|| format!("`slowdown` must be within {:?}.", super::SLOWDOWN))
            })
        }
        (&Method::POST, "restart") => {
            match read::<RestartRequest>(if body.is_empty() { b"{}" } else { body }) {
                Ok(restart) => {
                    server
                        .restart(restart.for_ms.map(Duration::from_millis), spare)
                        .await;
                    Ok(json!({}))
                }
                Err(message) => Err(message),
            }
        }
        _ => Err(
            "No such order. GET state, faults, lie; POST faults, lie, pace, restart.".to_owned(),
        ),
    };
    let mut reply = match outcome {
        Ok(value) => json_reply(&value),
        Err(message) => {
            let mut reply = json_reply(&json!({"error": {"message": message}}));
            *reply.status_mut() = StatusCode::BAD_REQUEST;
            reply
        }
    };
    if spare.is_some() && *method == Method::POST {
        reply
            .headers_mut()
            .insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    reply
}

fn read<T: for<'de> Deserialize<'de>>(body: &[u8]) -> Result<T, String> {
    serde_json::from_slice(body).map_err(|error| error.to_string())
}

/// Parses `{"name": number or text}`. Text appears on the metrics page as it is.
fn parse_overrides(value: &Value) -> Result<MetricOverrides, String> {
    let object = value
        .as_object()
        .ok_or("An object of names and values is expected.")?;
    let entry = |(name, value): (&String, &Value)| match value {
        Value::String(text) => Ok((name.clone(), text.clone())),
        Value::Number(number) => Ok((name.clone(), number.to_string())),
        _ => Err(format!("`{name}` must be a number or a text.")),
    };
    object.iter().map(entry).collect()
}

/// Runs the control listener. `GET /servers` lists addresses; `/servers/<host:port>/<order>` is
/// `/admin/<order>` of that server.
pub(super) async fn serve(
    listener: TcpListener,
    servers: Vec<Arc<ModelServerState>>,
) -> std::io::Result<()> {
    let router = Router::new()
        .route("/servers", axum::routing::get(list))
        .route("/servers/{address}/{action}", axum::routing::any(one))
        .with_state(Arc::new(servers));
    axum::serve(listener, router).await
}

async fn list(State(servers): State<Arc<Vec<Arc<ModelServerState>>>>) -> Response<Body> {
    json_reply(&json!(
        servers
            .iter()
            .map(|server| server.address.to_string())
            .collect::<Vec<_>>()
    ))
}

async fn one(
    State(servers): State<Arc<Vec<Arc<ModelServerState>>>>,
    Path((address, action)): Path<(String, String)>,
    method: Method,
    body: Bytes,
) -> Response<Body> {
    match servers
        .iter()
        .find(|server| server.address.to_string() == address)
    {
        Some(server) => handle(server, &action, &method, &body, None).await,
        None => {
            let mut reply =
                json_reply(&json!({"error": {"message": format!("No server at {address}.")}}));
            *reply.status_mut() = StatusCode::NOT_FOUND;
            reply
        }
    }
}

impl ModelServerState {
    /// Starts a fault, or ends all faults.
    pub(super) async fn order(&self, fault: ServerFault, spare: Option<u64>) {
        match fault.mode {
            FaultMode::None => {
                self.faults().clear();
                self.command_socket(SocketCommand::Open).await;
            }
            FaultMode::Refuse => {
                let reopen_after = fault.for_ms.map(Duration::from_millis);
                self.command_socket(SocketCommand::Close {
                    reopen_after,
                    spare,
                })
                .await;
            }
            _ => self.faults().order(fault, Instant::now()),
        }
    }

    /// Makes the server act like a new process at the same address, with empty caches and all
    /// counters at zero. If `down` has a time, the server refuses connections for this time.
    pub(super) async fn restart(&self, down: Option<Duration>, spare: Option<u64>) {
        self.engine.restart();
        self.command_socket(match down {
            Some(_) => SocketCommand::Close {
                reopen_after: down,
                spare,
            },
            None => SocketCommand::ResetAll { spare },
        })
        .await;
    }

    pub(super) async fn state(&self) -> Result<Value, String> {
        let report = self
            .engine
            .report()
            .await
            .ok_or("The engine has stopped.")?;
        let log = self.log();
        let requests = log.records.iter().map(|record| {
            json!({
                "method": record.method.as_str(), "path": record.path, "version": format!("{:?}", record.version),
                "headers": header_pairs(&record.headers), "body_bytes": record.body_bytes,
            })
        });
        Ok(json!({
            "address": self.address.to_string(),
            "started_at": report.stats.started_at,
            "running": report.load.running,
            "waiting": report.load.waiting,
            "kv_usage": report.load.kv_usage,
            "prefix_query_tokens": report.stats.prefix_queries,
            "prefix_hit_tokens": report.stats.prefix_hits,
            "prompt_tokens": report.stats.prompt_tokens,
            "generation_tokens": report.stats.generation_tokens,
            "finished": {"stop": report.stats.finished[0], "length": report.stats.finished[1], "abort": report.stats.finished[2]},
            "preemptions": report.preemptions,
            "step_late_p99_ms": report.stats.late.p99_ms(),
            "lora_loads": report.lora_loads,
            "requests_served": log.requests,
            "scrapes": log.scrapes,
            "requests": requests.collect::<Vec<_>>(),
        }))
    }
}
