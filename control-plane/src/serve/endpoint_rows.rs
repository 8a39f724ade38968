//! Endpoints as rows of pages: their state, the reason for it, their load and metrics.

use scheduler::metrics::{METRICS, MetricDefinition, MetricUnit};
use scheduler::{EndpointMetrics, EndpointRef};
use serde_json::{Value, json};

use crate::kv_events::KvEventRow;
use crate::pool::writer::{
    Absence, Absentee, MetricsStatus, PoolMember, PoolView, UNCONFIRMED_MAX,
};
use crate::serve::timestamp::rfc3339;
use crate::state::counters::CounterTotals;

/// Returns what discovery doubts about a member, and why its metrics are missing. Returns an empty
/// text if neither applies.
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

pub(super) fn member_row(
    view: &PoolView,
    member: &PoolMember,
    metrics: &EndpointMetrics,
    totals: &CounterTotals,
    kv_events: Option<&KvEventRow>,
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
        "unread": counts.unread,
        "picked": counts.picked,
        "served": counts.served,
        "models": &*member.models(),
        "failed": counts.failed,
        "metrics": metrics_object(metrics),
        "kv_events": kv_events.map(KvEventRow::to_json),
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

/// Returns the state of an endpoint that must not be picked, the reason, and its slot if it has
/// one.
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

pub(super) fn absentee_row(view: &PoolView, absentee: &Absentee, totals: &CounterTotals) -> Value {
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
        "unread": counts.unread,
    })
}

/// Returns the name of the endpoint with this slot and generation.
pub(super) fn member_name(view: &PoolView, place: (u32, u32)) -> Option<&str> {
    let (slot, generation) = place;
    let is_it = |m: &&PoolMember| u32::from(m.id.slot.0) == slot && m.id.generation.0 == generation;
    view.members
        .iter()
        .find(is_it)
        .map(|m| m.instance.name.as_str())
}
