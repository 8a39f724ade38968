//! The admin listener, for operators, probes and Prometheus. It is on loopback by default and
//! changes nothing. The metrics listener serves some of these routes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use axum::extract::{DefaultBodyLimit, Query, Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use pool_state::queues::FLOW_OUTCOMES;
use scheduler::metrics::{METRICS, MetricDefinition, MetricUnit};
use scheduler::objects::{ObjectsSpec, TargetSpec};
use scheduler::{EndpointMetrics, EndpointRef, Generation, Slot, Version};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::cli::build::COMMIT;
use crate::cli::explain::{self, ExplainRequest, QUESTION_BYTES_MAX};
use crate::config::{ConfigStatus, ResolvedConfig};
use crate::learn::directory::LearnerDirectory;
use crate::pool::discovery_source;
use crate::pool::discovery_source::WatchedComponents;
use crate::pool::writer::{
    Absence, Absentee, MetricsStatus, PoolMember, PoolView, UNCONFIRMED_MAX,
};
use crate::serve::explanations::{ExplanationDesk, QuestionRefusal};
use crate::serve::scaling_page::scaling;
use crate::serve::{console, metrics};
use crate::state::counters::{BandTotals, CounterTotals};
use crate::state::shared::{ConnectedProxy, DaemonState, EdsStream, ProxyPool};
use crate::state::snapshot_file::SnapshotFile;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The state that the routes show.
#[derive(Clone, Debug)]
pub struct AdminServer {
    pub shared: Arc<DaemonState>,
    /// The snapshot file, if there is one.
    pub snapshot: Option<Arc<SnapshotFile>>,
    /// The discovered components, by pool.
    pub components: Arc<BTreeMap<Arc<str>, WatchedComponents>>,
    /// Where explanations are computed.
    pub explanations: ExplanationDesk,
}

/// The routes of a daemon that starts.
pub fn starting() -> Router {
    let waits = || async { (StatusCode::SERVICE_UNAVAILABLE, "starting\n") };
    Router::new()
        .route("/livez", get(|| async { "ok\n" }))
        .route("/metrics", get(no_metrics))
        .fallback(waits)
}

/// An empty page, so that Prometheus counts the target as up.
async fn no_metrics() -> Response {
    ([(header::CONTENT_TYPE, OPEN_METRICS)], "# EOF\n").into_response()
}

/// The routes of the metrics listener: metrics, liveness and readiness.
pub fn metrics_router(admin: AdminServer) -> Router {
    Router::new()
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(prometheus))
        .with_state(admin)
}

/// The routes of the admin listener.
pub fn router(admin: AdminServer) -> Router {
    metrics_router(admin.clone())
        .merge(console::router(admin.clone()))
        .merge(debug_router(admin))
}

fn debug_router(admin: AdminServer) -> Router {
    Router::new()
        .route("/debug/endpoints", get(endpoints))
        .route("/debug/instances", get(instances))
        .route("/debug/state", get(state))
        .route("/debug/config", get(config))
        .route("/debug/model", get(model))
        .route("/debug/scaling", get(scaling))
        .route("/debug/running", get(running))
        .route("/debug/queues", get(queues))
        .route(
            "/debug/explain",
            post(why).layer(DefaultBodyLimit::max(QUESTION_BYTES_MAX)),
        )
        .with_state(admin)
}

/// Ready once every pool has a complete set of endpoints, because proxies would treat an incomplete
/// set as a smaller pool. A standby is not, unless it answers ext_proc.
async fn readyz(State(AdminServer { shared, .. }): State<AdminServer>) -> Response {
    if !shared.is_active() {
        return (
            StatusCode::SERVICE_UNAVAILABLE,
            "standing by: another daemon leads\n",
        )
            .into_response();
    }
    let pools = shared.pools.borrow().clone();
    let waiting: Vec<String> = shared
        .pool_names
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

/// Explains a decision. It is a POST only because it needs a body; it changes nothing.
async fn why(
    State(AdminServer {
        shared,
        explanations,
        ..
    }): State<AdminServer>,
    request: Request,
) -> Response {
    let explain = move |question: ExplainRequest| {
        explain::answer(&shared, &question)
            .map_err(|why| QuestionRefusal::new(StatusCode::BAD_REQUEST, why))
    };
    match explanations.answer(request, explain).await {
        Ok(answer) => Json(answer).into_response(),
        Err(QuestionRefusal { status, why }) => (status, why + "\n").into_response(),
    }
}

/// The metrics. A standby without ext_proc has none, so that sums over daemons count once.
async fn prometheus(
    State(AdminServer {
        shared, snapshot, ..
    }): State<AdminServer>,
) -> Response {
    if !shared.is_active() {
        return no_metrics().await;
    }
    match metrics::page(&shared, snapshot.as_deref()) {
        Ok(page) => ([(header::CONTENT_TYPE, OPEN_METRICS)], page).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn endpoints(State(AdminServer { shared, .. }): State<AdminServer>) -> Json<Value> {
    let pools = shared.pools.borrow().clone();
    let now = Instant::now();
    let rows: Vec<Value> = pools
        .iter()
        .flat_map(|view| {
            let totals = shared.counters().totals(&view.name, now);
            let members = view
                .members
                .iter()
                .zip(view.metrics.iter())
                .map(|(m, metrics)| member_row(view, m, metrics, &totals));
            members
                .chain(view.absent.iter().map(|a| absentee_row(view, a, &totals)))
                .collect::<Vec<_>>()
        })
        .collect();
    Json(json!({ "endpoints": rows }))
}

/// Lists every instance that discovery saw lately, with its state and the reason. Only ready
/// instances are in a pool.
async fn instances(State(AdminServer { components, .. }): State<AdminServer>) -> Json<Value> {
    let all = || {
        components.iter().flat_map(|(pool, all)| {
            all.iter()
                .map(move |(name, followed)| (pool, name, followed))
        })
    };
    let rows = all().flat_map(|(pool, name, followed)| {
        followed.seen().into_iter().map(move |seen| {
            let (state, reason) = discovery_source::said(&seen.state);
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

/// Why a member is not simply ready: what discovery doubts, and what its scrapes show.
pub(super) fn member_reason(member: &PoolMember) -> String {
    let scraped = match &member.metrics {
        MetricsStatus::Fresh => String::new(),
        MetricsStatus::Awaited => "metrics not known yet".to_owned(),
        MetricsStatus::Failing(why) => format!("last scrape failed: {why}"),
        MetricsStatus::Unknown(why) => format!("metrics unknown: {why}"),
    };
    let Some(why) = &member.instance.unconfirmed else {
        return scraped;
    };
    let kept = format!(
        "kept for at most {} s while it answers its scrapes: {why}",
        UNCONFIRMED_MAX.as_secs()
    );
    if scraped.is_empty() {
        kept
    } else {
        format!("{kept}; {scraped}")
    }
}

fn member_row(
    view: &PoolView,
    member: &PoolMember,
    metrics: &EndpointMetrics,
    totals: &CounterTotals,
) -> Value {
    let counts = totals
        .endpoints
        .get(&(member.id.generation, member.id.slot))
        .copied()
        .unwrap_or_default();
    json!({
        "name": member.instance.name,
        "namespace": member.instance.namespace,
        "address": member.instance.address.to_string(),
        "pool": &*view.name,
        "state": if member.instance.unconfirmed.is_some() { "unconfirmed" } else { "ready" },
        "reason": member_reason(member),
        "since": rfc3339(member.since),
        "generation": member.id.generation.0,
        "slot": member.id.slot.0,
        "in_flight": counts.requests,
        "in_flight_prefill_tokens": counts.prefill_tokens,
        "in_flight_decode_tokens": counts.decode_tokens,
        "in_flight_prompts": counts.prompts,
        "in_flight_with_slo": counts.tracked,
        "picked": counts.picked,
        "served": counts.served,
        "models": &*member.models(),
        "failed": counts.failed,
        "metrics": metrics_object(metrics),
    })
}

fn metrics_object(metrics: &EndpointMetrics) -> Value {
    let number = |metric: &MetricDefinition| match metric.unit {
        MetricUnit::Count => json!((metric.get)(metrics).map(|count| count as u32)),
        MetricUnit::Requests | MetricUnit::Share => json!((metric.get)(metrics)),
    };
    let mut object: serde_json::Map<_, _> = METRICS
        .iter()
        .map(|metric| (metric.name.to_owned(), number(metric)))
        .collect();
    let lora =
        metrics.lora.as_ref().map(|l| json!({ "running": l.running, "waiting": l.waiting, "max": l.max, "base_models": l.base_models }));
    let attributes: serde_json::Map<_, _> = metrics
        .attributes
        .iter()
        .map(|(key, value)| (key.to_string(), json!(value)))
        .collect();
    object.extend([
        ("lora".to_owned(), json!(lora)),
        ("attributes".to_owned(), Value::Object(attributes)),
    ]);
    Value::Object(object)
}

/// The state of an endpoint that must not be picked, the reason, and its slot if it has one.
pub(super) fn absence(absentee: &Absentee) -> (&'static str, &'static str, Option<EndpointRef>) {
    match absentee.absence {
        Absence::Departing(id) => (
            "departing",
            "left discovery; waiting for the proxies to acknowledge that",
            Some(id),
        ),
        Absence::NoFreeSlot => ("waiting", "all slots of the pool are taken", None),
        Absence::Unconfirmed => (
            "unconfirmed",
            "discovery reports it as not ready; it does not answer, or has been unconfirmed for too long",
            None,
        ),
        Absence::TooManyModels => (
            "waiting",
            "the model names of the pool would exceed the limit of a message to proxies",
            None,
        ),
    }
}

fn absentee_row(view: &PoolView, absentee: &Absentee, totals: &CounterTotals) -> Value {
    let (state, reason, id) = absence(absentee);
    let counts = id
        .and_then(|id| totals.endpoints.get(&(id.generation, id.slot)))
        .copied()
        .unwrap_or_default();
    json!({
        "name": absentee.instance.name,
        "namespace": absentee.instance.namespace,
        "address": absentee.instance.address.to_string(),
        "pool": &*view.name,
        "state": state,
        "reason": reason,
        "since": rfc3339(absentee.since),
        "generation": id.map(|id| id.generation.0),
        "slot": id.map(|id| id.slot.0),
        "in_flight": counts.requests,
        "in_flight_prefill_tokens": counts.prefill_tokens,
        "in_flight_decode_tokens": counts.decode_tokens,
        "in_flight_prompts": counts.prompts,
        "in_flight_with_slo": counts.tracked,
    })
}

async fn state(
    State(AdminServer {
        shared, snapshot, ..
    }): State<AdminServer>,
) -> Json<Value> {
    let pools = shared.pools.borrow().clone();
    let proxies = shared.proxies.borrow().clone();
    let eds = shared.eds.borrow().clone();
    let written = snapshot
        .as_ref()
        .map(|s| s.written_unix_ms())
        .filter(|&ms| ms > 0);
    Json(json!({
        "release": env!("CARGO_PKG_VERSION"),
        "commit": COMMIT,
        "schema": proto::SCHEMA,
        "leads": shared.life.leads(),
        "term": shared.life.term(),
        "snapshot_written": written.map(|ms| rfc3339(SystemTime::UNIX_EPOCH + std::time::Duration::from_millis(ms))),
        "pools": pools.iter().map(|view| pool_row(view, &shared.counters().totals(&view.name, Instant::now()))).collect::<Vec<_>>(),
        "proxies": proxies.values().map(proxy_row).collect::<Vec<_>>(),
        "eds_streams": eds.open.values().map(eds_row).collect::<Vec<_>>(),
    }))
}

/// The learned models of each pool, how good they are, and why there is no prediction.
async fn model(State(AdminServer { shared, .. }): State<AdminServer>) -> Json<Value> {
    Json(
        shared
            .learning
            .learners
            .get()
            .map_or_else(|| json!({ "pools": [] }), LearnerDirectory::to_json),
    )
}

/// Running requests with an SLO, by endpoint and VM, the strictest first: their SLOs, predictions
/// and measurements.
async fn running(State(AdminServer { shared, .. }): State<AdminServer>) -> Json<Value> {
    let pools = shared.pools.borrow().clone();
    let now = Instant::now();
    let queues = pools.iter().flat_map(|view| {
        let told = shared.counters().totals(&view.name, now).running;
        let rows = told
            .iter()
            .filter_map(|text| serde_json::from_str::<Vec<Value>>(text).ok())
            .flatten();
        rows.filter(|row| row["held"].is_null())
            .map(|row| running_row(view, row))
            .collect::<Vec<_>>()
    });
    Json(json!({ "queues": queues.collect::<Vec<_>>() }))
}

/// The request that [`queues`] looks for, by its id.
#[derive(serde::Deserialize)]
struct HeldQuery {
    request: Option<String>,
}

/// The requests that flow control holds, by pool and band, and what became of the others; with
/// `?request=ID` also why that request waits, if it is among those that have waited longest.
async fn queues(
    State(AdminServer { shared, .. }): State<AdminServer>,
    Query(query): Query<HeldQuery>,
) -> Json<Value> {
    let pools = shared.pools.borrow().clone();
    let now = Instant::now();
    let bands = pools.iter().flat_map(|view| {
        let totals = shared.counters().totals(&view.name, now).bands;
        totals
            .into_iter()
            .rev()
            .map(|(priority, band)| band_row(view, priority, &band))
            .collect::<Vec<_>>()
    });
    let mut page = json!({ "queues": bands.collect::<Vec<_>>() });
    if let Some(id) = query.request {
        let found = pools.iter().flat_map(|view| {
            held_rows(
                view,
                &shared.counters().totals(&view.name, now).running,
                &id,
            )
        });
        page["requests"] = found.collect();
    }
    Json(page)
}

/// The held requests of this id, as the VMs reported them.
fn held_rows(view: &PoolView, told: &[Box<str>], id: &str) -> Vec<Value> {
    let rows = told
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

/// The name of the endpoint of a row.
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

/// The name of the endpoint with this slot and generation.
pub(super) fn member_name(view: &PoolView, (slot, generation): (u32, u32)) -> Option<&str> {
    let is_it = |m: &&PoolMember| u32::from(m.id.slot.0) == slot && m.id.generation.0 == generation;
    view.members
        .iter()
        .find(is_it)
        .map(|m| m.instance.name.as_str())
}

async fn config(State(AdminServer { shared, .. }): State<AdminServer>) -> Json<Value> {
    let pools = shared.pools.borrow().clone();
    Json(json!({ "pools": pools.iter().map(config_row).collect::<Vec<_>>() }))
}

fn config_row(view: &PoolView) -> Value {
    let mut row = status_row(&view.sources.config);
    row["pool"] = json!(&*view.name);
    row["pipeline"] = json!(ResolvedConfig::of(&view.pipeline));
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
        "process_id": format!("{:016x}", proxy.peer.process_id),
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

/// Formats a time as `2026-11-21T15:06:35.123Z`. The date is computed as in Howard Hinnant,
/// "chrono-Compatible Low-Level Date Algorithms", `civil_from_days`.
fn rfc3339(time: SystemTime) -> String {
    let since_epoch = time
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    let seconds = since_epoch.as_secs();
    let millis = since_epoch.subsec_millis();
    let days = seconds / 86_400 + 719_468;
    let of_day = seconds % 86_400;
    let era = days / 146_097;
    let of_era = days % 146_097;
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month_shifted + 2) / 5 + 1;
    let month = if month_shifted < 10 {
        month_shifted + 3
    } else {
        month_shifted - 9
    };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let hour = of_day / 3_600;
    let minute = of_day / 60 % 60;
    let second = of_day % 60;
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_are_written_as_date_does() {
        let check = |millis, expected| {
            assert_eq!(
                rfc3339(SystemTime::UNIX_EPOCH + Duration::from_millis(millis)),
                expected
            );
        };
        check(0, "1970-01-01T00:00:00.000Z");
        check(951_782_400_000, "2000-02-29T00:00:00.000Z");
        check(1_795_273_595_123, "2026-11-21T15:06:35.123Z");
        check(4_107_542_399_999, "2100-02-28T23:59:59.999Z");
        check(4_107_542_400_000, "2100-03-01T00:00:00.000Z");
    }
}
