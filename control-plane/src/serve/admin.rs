//! The admin listener for operators, probes and Prometheus. The listener is on loopback by default,
//! and its requests change nothing. The metrics listener serves some of these routes.

use std::sync::Arc;
use std::time::SystemTime;

use axum::extract::{DefaultBodyLimit, Query, Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use pool_state::queues::FLOW_OUTCOMES;
use scheduler::objects::{ObjectsSpec, TargetSpec};
use scheduler::{Generation, Slot, Version};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::cli::build::COMMIT;
use crate::cli::explain::{self, ExplainRequest, QUESTION_BYTES_MAX, WaitingCaller};
use crate::config::{ConfigStatus, ResolvedConfig};
use crate::learn::directory::LearnerDirectory;
use crate::pool::discovery_source;
use crate::pool::writer::{Absence, PoolView};
use crate::serve::endpoint_rows::{absentee_row, member_name, member_row};
use crate::serve::explanations::QuestionRefusal;
use crate::serve::scaling_page::scaling;
use crate::serve::shown_state::ShownState;
use crate::serve::timestamp::rfc3339;
use crate::serve::{console, metrics};
use crate::state::counters::{BandTotals, CounterTotals};
use crate::state::eds_streams::EdsStream;
use crate::state::proxies::{ConnectedProxy, ProxyPool};

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Returns the routes of a daemon that is still starting.
pub fn starting() -> Router {
    let waits = || async { (StatusCode::SERVICE_UNAVAILABLE, "starting\n") };
    Router::new()
        .route("/livez", get(|| async { "ok\n" }))
        .route("/metrics", get(no_metrics))
        .fallback(waits)
}

/// Returns an empty page, so that Prometheus counts the target as up.
async fn no_metrics() -> Response {
    ([(header::CONTENT_TYPE, OPEN_METRICS)], "# EOF\n").into_response()
}

/// Returns the routes of the metrics listener: metrics, liveness and readiness.
pub fn metrics_router(shown: ShownState) -> Router {
    Router::new()
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(prometheus))
        .with_state(shown)
}

/// Returns the routes of the admin listener.
pub fn router(shown: ShownState) -> Router {
    metrics_router(shown.clone())
        .merge(console::router(&shown))
        .merge(debug_router(shown))
}

fn debug_router(shown: ShownState) -> Router {
    Router::new()
        .route("/debug/endpoints", get(endpoints))
        .route("/debug/instances", get(instances))
        .route("/debug/state", get(state))
        .route("/debug/config", get(config))
        .route("/debug/model", get(model))
        .route(
            "/debug/scaling",
            get(scaling).with_state(Arc::clone(&shown.signals)),
        )
        .route("/debug/running", get(running))
        .route("/debug/queues", get(queues))
        .route(
            "/debug/explain",
            post(why).layer(DefaultBodyLimit::max(QUESTION_BYTES_MAX)),
        )
        .with_state(shown)
}

/// Answers that the daemon is ready once every pool has a complete set of endpoints, because
/// proxies would treat an incomplete set as a smaller pool. A standby is not ready, unless it
/// answers ext_proc.
async fn readyz(State(shown): State<ShownState>) -> Response {
    if !shown.is_active() {
        return (
            StatusCode::SERVICE_UNAVAILABLE,
            "standing by: another daemon leads\n",
        )
            .into_response();
    }
    let table = &shown.shared.pools;
    let pools = table.views.borrow().clone();
    let waiting: Vec<String> = table
        .names
        .iter()
        .filter(|name| pools.get(name).is_none())
        .map(|name| {
            let error = pools
                .iter()
                .find(|v| v.name == *name)
                .and_then(|v| v.sources.discovery_error.clone());
            format!(
                "pool {name}: {}\n",
                error.unwrap_or_else(|| "no complete set of endpoints yet".to_owned())
            )
        })
        .collect();
    if waiting.is_empty() {
        "ready\n".into_response()
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, waiting.concat()).into_response()
    }
}

/// Explains a decision. The route uses POST only because a request needs a body. The request
/// changes nothing.
async fn why(
    State(ShownState {
        shared,
        explanations,
        ..
    }): State<ShownState>,
    request: Request,
) -> Response {
    let explain = move |question: ExplainRequest, caller: WaitingCaller| {
        explain::answer(&shared, &question, &caller)
            .map_err(|why| QuestionRefusal::new(StatusCode::BAD_REQUEST, why))
    };
    match explanations.answer(request, explain).await {
        Ok(answer) => answer,
        Err(QuestionRefusal { status, why }) => (status, why + "\n").into_response(),
    }
}

/// Returns the metrics. A standby without ext_proc returns an empty page, so that sums over daemons
/// count everything once.
async fn prometheus(State(shown): State<ShownState>) -> Response {
    if !shown.is_active() {
        return no_metrics().await;
    }
    match metrics::page(&shown) {
        Ok(page) => ([(header::CONTENT_TYPE, OPEN_METRICS)], page).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn endpoints(State(ShownState { shared, .. }): State<ShownState>) -> Json<Value> {
    let pools = shared.pools.views.borrow().clone();
    let now = Instant::now();
    let rows: Vec<Value> = pools
        .iter()
        .flat_map(|view| {
            let totals = shared.reports.totals(&view.name, now);
            let kv_events = shared.reports.kv_events(&view.name);
            let members = view
                .members
                .iter()
                .zip(view.metrics.iter())
                .map(|(m, metrics)| {
                    let kv_events = kv_events.get(&m.instance.address);
                    member_row(view, m, metrics, &totals, kv_events)
                });
            members
                .chain(view.absent.iter().map(|a| absentee_row(view, a, &totals)))
                .collect::<Vec<_>>()
        })
        .collect();
    Json(json!({ "endpoints": rows }))
}

/// Lists every instance that discovery saw recently, with its state and the reason for it. Only
/// ready instances are in a pool.
async fn instances(State(ShownState { discovery, .. }): State<ShownState>) -> Json<Value> {
    let all = || {
        discovery.components.iter().flat_map(|(pool, all)| {
            all.iter()
                .map(move |(name, followed)| (pool, name, followed))
        })
    };
    let rows = all().flat_map(|(pool, name, followed)| {
        followed.seen().into_iter().map(move |seen| {
            let (state, reason) = discovery_source::state_and_reason(&seen.state);
            json!({
                "name": &*seen.id,
                "address": seen.address.to_string(),
                "pool": &**pool,
                "component": name,
                "generation": seen.generation,
                "state": state,
                "reason": reason,
                "since": rfc3339(seen.since),
            })
        })
    });
    let sources = all().map(|(pool, name, followed)| {
        let status = followed.status().borrow().clone();
        let age = status
            .last_contact
            .and_then(|at| at.elapsed().ok())
            .map(|age| age.as_secs_f64());
        let asked = status.requirements.as_ref();
        let failure_mode = asked.map(|asked| discovery_source::failure_mode(asked.failure_mode));
        let app_protocol = asked.map(|asked| discovery_source::app_protocol(asked.protocol));
        let picker = asked
            .and_then(|asked| asked.picker.as_ref())
            .map(discovery_source::picker);
        json!({
            "pool": &**pool,
            "component": name,
            "synced": status.synced,
            "error": status.error,
            "warning": status.warning,
            "age_seconds": age,
            "failure_mode": failure_mode,
            "app_protocol": app_protocol,
            "picker": picker,
        })
    });
    Json(json!({ "instances": rows.collect::<Vec<_>>(), "sources": sources.collect::<Vec<_>>() }))
}

async fn state(State(shown): State<ShownState>) -> Json<Value> {
    let shared = &shown.shared;
    let pools = shared.pools.views.borrow().clone();
    let proxies = shared.proxies.streams.borrow().clone();
    let eds = shared.proxies.eds.borrow().clone();
    let written = shown.snapshot_written_unix_ms();
    Json(json!({
        "release": env!("CARGO_PKG_VERSION"),
        "commit": COMMIT,
        "schema": proto::SCHEMA,
        "leads": shared.life.leads(),
        "term": shared.life.term(),
        "snapshot_written": written.map(|ms| rfc3339(SystemTime::UNIX_EPOCH + std::time::Duration::from_millis(ms))),
        "pools": pools.iter().map(|view| pool_row(view, &shared.reports.totals(&view.name, Instant::now()))).collect::<Vec<_>>(),
        "proxies": proxies.values().map(proxy_row).collect::<Vec<_>>(),
        "eds_streams": eds.open.values().map(eds_row).collect::<Vec<_>>(),
    }))
}

/// Returns the learned models of each pool, their quality, and the reasons for missing predictions.
async fn model(State(ShownState { shared, .. }): State<ShownState>) -> Json<Value> {
    Json(
        shared
            .learned
            .learners
            .get()
            .map_or_else(|| json!({ "pools": [] }), LearnerDirectory::to_json),
    )
}

/// Returns the running requests with an SLO, by endpoint and VM, the strictest first, each with its
/// SLOs, predictions and measurements.
async fn running(State(ShownState { shared, .. }): State<ShownState>) -> Json<Value> {
    let pools = shared.pools.views.borrow().clone();
    let now = Instant::now();
    let queues = pools.iter().flat_map(|view| {
        let running = shared.reports.totals(&view.name, now).running;
        let rows = running
            .iter()
            .filter_map(|text| serde_json::from_str::<Vec<Value>>(text).ok())
            .flatten();
        rows.filter(|row| row["held"].is_null())
            .map(|row| running_row(view, row))
            .collect::<Vec<_>>()
    });
    Json(json!({ "queues": queues.collect::<Vec<_>>() }))
}

/// The id of the request that [`queues`] looks for.
#[derive(serde::Deserialize)]
struct QueuedQuery {
    request: Option<String>,
}

/// Returns the requests that flow control holds, by pool and band, and the outcomes of earlier
/// requests. With `?request=ID`, also shows why that request waits, if this request is among those
/// that have waited longest.
async fn queues(
    State(ShownState { shared, .. }): State<ShownState>,
    Query(query): Query<QueuedQuery>,
) -> Json<Value> {
    let pools = shared.pools.views.borrow().clone();
    let now = Instant::now();
    let bands = pools.iter().flat_map(|view| {
        let totals = shared.reports.totals(&view.name, now).bands;
        totals
            .into_iter()
            .rev()
            .map(|(priority, band)| band_row(view, priority, &band))
            .collect::<Vec<_>>()
    });
    let mut page = json!({ "queues": bands.collect::<Vec<_>>() });
    if let Some(id) = query.request {
        let found = pools.iter().flat_map(|view| {
            queued_rows(view, &shared.reports.totals(&view.name, now).running, &id)
        });
        page["requests"] = found.collect();
    }
    Json(page)
}

/// Returns the queued requests with this id, as the VMs reported them.
fn queued_rows(view: &PoolView, running: &[Box<str>], id: &str) -> Vec<Value> {
    let rows = running
        .iter()
        .filter_map(|text| serde_json::from_str::<Vec<Value>>(text).ok())
        .flatten();
    let found = rows.filter(|row| row["held"] == id);
    found
        .map(
            |row| json!({ "pool": &*view.name, "request": id, "ms": row["ms"], "priority": row["priority"], "full": row_name(view, &row) }),
        )
        .collect()
}

fn band_row(view: &PoolView, priority: i32, band: &BandTotals) -> Value {
    let outcomes: serde_json::Map<String, Value> = FLOW_OUTCOMES
        .iter()
        .zip(band.outcomes)
        .map(|(outcome, count)| ((*outcome).to_owned(), count.into()))
        .collect();
    let oldest = (band.held > 0).then(|| json!({ "ms": band.oldest_ms, "full": band.full_at.and_then(|full| member_name(view, full)) }));
    json!({
        "pool": &*view.name, "priority": priority, "held": band.held, "bytes": band.bytes, "oldest": oldest, "outcomes": outcomes,
        "given_up": band.given_up, "given_up_for": band.given_up_for,
    })
}

/// Returns the name of a reported request's endpoint.
fn row_name<'v>(view: &'v PoolView, row: &Value) -> Option<&'v str> {
    let part = |name: &str| {
        row[name]
            .as_u64()
            .and_then(|number| u32::try_from(number).ok())
    };
    part("slot")
        .zip(part("generation"))
        .and_then(|id| member_name(view, id))
}

fn running_row(view: &PoolView, mut row: Value) -> Value {
    let name = row_name(view, &row);
    json!({ "pool": &*view.name, "endpoint": name, "running": row.get_mut("running").map(Value::take) })
}

async fn config(State(ShownState { shared, .. }): State<ShownState>) -> Json<Value> {
    let pools = shared.pools.views.borrow().clone();
    Json(json!({ "pools": pools.iter().map(config_row).collect::<Vec<_>>() }))
}

fn config_row(view: &PoolView) -> Value {
    let mut row = status_row(&view.sources.config);
    row["pool"] = json!(&*view.name);
    row["pipeline"] = json!(ResolvedConfig::from_spec(&view.pipeline));
    row["objects"] = objects_row(view);
    row
}

fn status_row(status: &ConfigStatus) -> Value {
    let ConfigStatus {
        file,
        text: _,
        since,
        taken_at,
        taken,
        refused,
        error,
    } = status;
    json!({
        "file": file.as_deref(),
        "since": rfc3339(*since),
        "last_success": rfc3339(*taken_at),
        "taken": taken,
        "refused": refused,
        "error": error.as_ref().map(|e| json!({ "message": e.why, "at": rfc3339(e.at) })),
    })
}

fn objects_row(view: &PoolView) -> Value {
    let ObjectsSpec {
        objectives,
        models,
        rewrites,
        strict_models,
    } = &*view.objects;
    let targets = |targets: &[TargetSpec]| {
        targets
            .iter()
            .map(|t| json!({ "model": t.model, "weight": t.weight }))
            .collect::<Vec<_>>()
    };
    let mut row = status_row(&view.sources.objects);
    row["strict_models"] = json!(strict_models);
    row["without_pool"] = json!(&*view.sources.objects_without_pool);
    row["objectives"] = objectives
        .iter()
        .map(|o| json!({ "name": o.name, "priority": o.priority }))
        .collect();
    row["models"] = models
        .iter()
        .map(|m| json!({ "name": m.name, "priority": m.priority, "targets": targets(&m.targets) }))
        .collect();
    row["rewrites"] = rewrites
        .iter()
        .map(|r| json!({ "models": r.models, "targets": targets(&r.targets) }))
        .collect();
    row
}

fn pool_row(view: &PoolView, totals: &CounterTotals) -> Value {
    let is_member = |at: &(Generation, Slot)| {
        view.members
            .iter()
            .any(|member| (member.id.generation, member.id.slot) == *at)
    };
    json!({
        "name": &*view.name,
        "complete": view.sources.complete,
        "revision": view.revision,
        "endpoints": view.members.len(),
        "in_flight_at_former_endpoints": totals.endpoints.iter().filter(|(at, _)| !is_member(at)).map(|(_, row)| row.requests).sum::<u64>(),
        "departing": view.absent.iter().filter(|a| matches!(a.absence, Absence::Departing(_))).count(),
        "waiting": view.absent.iter().filter(|a| !matches!(a.absence, Absence::Departing(_))).count(),
        "eds_revision": view.eds.revision,
        "staleness_max_ms": view.staleness_max.as_millis(),
        "profiles": view.pipeline.profiles.iter().map(|profile| &profile.name).collect::<Vec<_>>(),
        "discovery": { "synced": view.sources.synced, "error": view.sources.discovery_error },
        "config": { "error": view.sources.config.error.as_ref().map(|e| &e.why) },
        "objects": { "error": view.sources.objects.error.as_ref().map(|e| &e.why) },
    })
}

fn proxy_row(proxy: &ConnectedProxy) -> Value {
    let version = |v: Option<(Version, u64)>| {
        v.map(
            |(v, revision)| json!({ "term": v.term, "sequence": v.sequence, "revision": revision }),
        )
    };
    let pool = |(name, pool): (&String, &ProxyPool)| {
        json!({
            "pool": name,
            "sent": version(pool.sent),
            "acked": version(pool.acked),
            "withheld": pool.withheld,
            "refused": pool.refused,
        })
    };
    json!({
        "node_id": proxy.peer.node_id,
        "process_id": format!("{:016x}", proxy.peer.id),
        "peer": proxy.peer.remote.to_string(),
        "certificate": proxy.peer.remote.origin.certificate.as_deref(),
        "since": rfc3339(proxy.since),
        "pools": proxy.pools.iter().map(pool).collect::<Vec<_>>(),
    })
}

fn eds_row(stream: &EdsStream) -> Value {
    let pools: Vec<Value> = stream
        .pools
        .iter()
        .map(|(name, ack)| json!({ "pool": name, "acked_revision": ack.acked, "refused": ack.refused, "late": ack.late }))
        .collect();
    json!({ "node_id": stream.node_id, "peer": stream.remote.to_string(), "certificate": stream.remote.origin.certificate.as_deref(), "since": rfc3339(stream.since), "pools": pools })
}
