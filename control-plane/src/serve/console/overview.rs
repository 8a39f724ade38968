//! The current state: pools, endpoints, models, proxies, refusals.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::Json;
use axum::extract::State;
use discovery::Instance;
use pool_state::queues::FLOW_OUTCOMES;
use scheduler::flow::FLOW_CONTROL;
use scheduler::{EndpointMetrics, Generation, Slot, Version};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::cli::build::COMMIT;
use crate::learn::directory::{LearnedEndpoint, LearnerReport};
use crate::pool::writer::{Absentee, PoolMember, PoolView};
use crate::serve::endpoint_rows::{absence, member_name, member_reason};
use crate::state::counters::{BandTotals, CounterTotals, EndpointTotals, ModelTotals, TotalsLabel};
use crate::state::proxies::{ConnectedProxy, ProxyPool};
use crate::state::shared::DaemonState;
use crate::state::snapshot_file::SnapshotFile;
use crate::state::traffic::LatencyQuantiles;

/// The maximum number of models of a pool in an answer, the busiest first. Clients choose the
/// names, and a page with hundreds of names helps no reader.
const MODELS_SHOWN_MAX: usize = 100;

/// The tables that the page shows.
#[derive(Clone)]
pub(super) struct OverviewTables {
    pub(super) shared: Arc<DaemonState>,
    pub(super) snapshot: Option<Arc<SnapshotFile>>,
}

pub(super) async fn answer(
    State(OverviewTables { shared, snapshot }): State<OverviewTables>,
) -> Json<Value> {
    let views: Vec<PoolView> = shared.pools.all();
    let proxies = shared.proxies.streams.borrow().clone();
    let now = Instant::now();
    let heard_at: Vec<Option<Instant>> = proxies
        .values()
        .map(|proxy| shared.reports.counters().reported_at(&proxy.peer))
        .collect();
    let age = |at: Option<Instant>| at.map(|at| whole_ms(now.saturating_duration_since(at)));
    let proxies = proxies
        .values()
        .zip(heard_at)
        .map(|(proxy, heard_at)| proxy_row(proxy, heard_at, &views, age));
    let pools = views.iter().map(|view| {
        let totals = shared.reports.totals(&view.name, now);
        let learned = shared.learned.report(&view.name).unwrap_or_default();
        pool_row(view, &totals, &learned)
    });
    Json(json!({
        "now_ms": unix_ms(SystemTime::now()),
        "release": env!("CARGO_PKG_VERSION"),
        "commit": COMMIT,
        "term": shared.life.term(),
        "snapshot_written_ms": snapshot.as_ref().map(|s| s.written_unix_ms()).filter(|&ms| ms > 0),
        "pools": pools.collect::<Vec<_>>(),
        "proxies": proxies.collect::<Vec<_>>(),
        "refusals": refusals(&shared),
    }))
}

/// Returns the time in milliseconds since 1970.
pub(super) fn unix_ms(time: SystemTime) -> u64 {
    whole_ms(
        time.duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default(),
    )
}

fn whole_ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn pool_row(view: &PoolView, totals: &CounterTotals, learned: &LearnerReport) -> Value {
    let members = view.members.iter().zip(view.metrics.iter());
    let absent = view
        .absent
        .iter()
        .map(|absentee| absentee_row(absentee, totals));
    let endpoints = members
        .map(|(member, metrics)| member_row(member, metrics, totals, learned))
        .chain(absent);
    let mut models: Vec<(&TotalsLabel, &ModelTotals)> = totals.models.iter().collect();
    models.sort_by_key(|(_, model)| std::cmp::Reverse(model.requests));
    json!({
        "name": &*view.name,
        "complete": view.sources.complete,
        "revision": view.revision,
        "profiles": view.pipeline.profiles.iter().map(|profile| &*profile.name).collect::<Vec<_>>(),
        "staleness_max_ms": whole_ms(view.staleness_max),
        "discovery_error": view.sources.discovery_error,
        "config_error": view.sources.config.error.as_ref().map(|error| &error.why),
        "objects_error": view.sources.objects.error.as_ref().map(|error| &error.why),
        "latency_prediction": view.pipeline.latency_prediction,
        "predicts": learned.predicts,
        "vms": totals.vms,
        "dropped": totals.dropped,
        "flow_control": view.pipeline.plugins.iter().any(|plugin| plugin.plugin_type == FLOW_CONTROL),
        "bands": totals.bands.iter().rev().map(|(priority, band)| band_row(view, *priority, band)).collect::<Vec<_>>(),
        "endpoints": endpoints.collect::<Vec<_>>(),
        "models": models.into_iter().take(MODELS_SHOWN_MAX).map(|(label, model)| model_row(label, model)).collect::<Vec<_>>(),
    })
}

fn member_row(
    member: &PoolMember,
    metrics: &EndpointMetrics,
    totals: &CounterTotals,
    learned: &LearnerReport,
) -> Value {
    let state = if member.instance.unconfirmed.is_some() {
        "unconfirmed"
    } else {
        "ready"
    };
    let counts = counts(totals, Some((member.id.generation, member.id.slot)));
    let mut row = endpoint_row(&member.instance, state, &member_reason(member), counts);
    let known = learned.learned.get(&member.id).copied().unwrap_or_default();
    let LearnedEndpoint {
        prefill_time,
        decode_time,
        prompt_tokens,
        cached_tokens,
    } = known;
    row["since_ms"] = json!(unix_ms(member.since));
    row["queue_depth"] = json!(metrics.queue_depth);
    row["running"] = json!(metrics.running_requests);
    row["kv"] = json!(metrics.kv_cache_utilization);
    row["prefill_time"] = json!(prefill_time);
    row["decode_time"] = json!(decode_time);
    row["prompt_tokens"] = json!(prompt_tokens);
    row["cached_tokens"] = json!(cached_tokens);
    row
}

fn absentee_row(absentee: &Absentee, totals: &CounterTotals) -> Value {
    let (state, reason, id) = absence(absentee);
    let counts = counts(totals, id.map(|id| (id.generation, id.slot)));
    let mut row = endpoint_row(&absentee.instance, state, reason, counts);
    row["since_ms"] = json!(unix_ms(absentee.since));
    for unknown in [
        "queue_depth",
        "running",
        "kv",
        "prefill_time",
        "decode_time",
    ] {
        row[unknown] = Value::Null;
    }
    row["prompt_tokens"] = json!(0);
    row["cached_tokens"] = json!(0);
    row
}

fn counts(totals: &CounterTotals, id: Option<(Generation, Slot)>) -> EndpointTotals {
    id.and_then(|id| totals.endpoints.get(&id))
        .copied()
        .unwrap_or_default()
}

fn endpoint_row(
    Instance { name, address, .. }: &Instance,
    state: &str,
    reason: &str,
    counts: EndpointTotals,
) -> Value {
    let EndpointTotals {
        picked,
        served,
        failed,
        requests,
        prefill_tokens,
        decode_tokens,
        prompts,
        ..
    } = counts;
    json!({
        "name": name,
        "address": address.to_string(),
        "state": state,
        "reason": reason,
        "in_flight": requests,
        "prefill_tokens": prefill_tokens,
        "decode_tokens": decode_tokens,
        "waiting_prompts": prompts,
        "picked": picked,
        "served": served,
        "failed": failed,
    })
}

fn model_row(label: &TotalsLabel, model: &ModelTotals) -> Value {
    let [met, missed, shed] = model.slo;
    json!({
        "model": label.model,
        "target": label.target,
        "priority": label.priority,
        "requests": model.requests,
        "running": model.running,
        "errors": model.errors,
        "prompt_tokens": model.prompt_tokens,
        "cached_tokens": model.cached_tokens,
        "output_tokens": model.completion_tokens,
        "slo_met": met,
        "slo_missed": missed,
        "slo_shed": shed,
    })
}

fn band_row(view: &PoolView, priority: i32, band: &BandTotals) -> Value {
    let outcomes: BTreeMap<&str, u64> = FLOW_OUTCOMES.into_iter().zip(band.outcomes).collect();
    let wait = LatencyQuantiles::from_histogram(&band.queue_ms);
    json!({
        "priority": priority,
        "held": band.held,
        "bytes": band.bytes,
        "oldest_ms": (band.held > 0).then_some(band.oldest_ms),
        "full": band.full_at.filter(|_| band.held > 0).and_then(|full| member_name(view, full)),
        "outcomes": outcomes,
        "wait_ms": wait.map(|wait| json!({ "p50": wait.p50, "p99": wait.p99 })),
    })
}

/// Returns the row of a proxy. `age` returns the milliseconds since a point in time.
fn proxy_row(
    proxy: &ConnectedProxy,
    heard_at: Option<Instant>,
    views: &[PoolView],
    age: impl Fn(Option<Instant>) -> Option<u64>,
) -> Value {
    let revision = |version: Option<(Version, u64)>| version.map(|(_, revision)| revision);
    let pool = |(name, pool): (&String, &ProxyPool)| {
        json!({
            "pool": name,
            "revision": views.iter().find(|view| *view.name == **name).map(|view| view.revision),
            "sent": revision(pool.sent),
            "acknowledged": revision(pool.acked),
            "age_ms": age(pool.acked_at),
            "withheld": pool.withheld,
            "refused": pool.refused,
        })
    };
    json!({
        "node_id": proxy.peer.node_id,
        "process_id": format!("{:016x}", proxy.peer.id),
        "peer": proxy.peer.remote.to_string(),
        "certificate": proxy.peer.remote.origin.certificate.as_deref(),
        "release": if proxy.release.is_empty() { None } else { Some(&proxy.release) },
        "since_ms": unix_ms(proxy.since),
        "heard_ms": age(heard_at),
        "pools": proxy.pools.iter().map(pool).collect::<Vec<_>>(),
    })
}

/// Returns counts of what was refused since the daemon started.
fn refusals(shared: &DaemonState) -> BTreeMap<&'static str, u64> {
    let counters = shared.reports.counters();
    BTreeMap::from([
        ("pool_updates", counters.pool_updates_refused),
        ("eds_responses", counters.eds_refused),
        ("eds_unanswered", counters.eds_unanswered),
        ("peer_messages", counters.messages_refused),
        ("reports_invalid", counters.reports_invalid),
        (
            "streams",
            shared
                .proxies
                .origins
                .refused()
                .map(|(_, count)| count)
                .sum(),
        ),
    ])
}
