//! The admin listener, for people, probes and Prometheus. On loopback by default; it changes nothing.

use std::sync::Arc;
use std::time::SystemTime;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde_json::{Value, json};

use crate::pool::{Absence, Absentee, Member, MetricsStatus, PoolView};
use crate::shared::Shared;

/// The routes of the admin listener.
pub fn router(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/debug/endpoints", get(endpoints))
        .with_state(shared)
}

/// Ready once every pool has a complete set: what is served before would be taken for the truth.
async fn readyz(State(shared): State<Arc<Shared>>) -> Response {
    let pools = shared.pools.borrow().clone();
    let waiting: Vec<String> = shared
        .pool_names
        .iter()
        .filter(|name| pools.get(name).is_none())
        .map(|name| {
            let error = pools.iter().find(|v| v.name == *name).and_then(|v| v.sources.discovery_error.clone());
            format!("pool {name}: {}\n", error.unwrap_or_else(|| "no complete set of endpoints yet".to_owned()))
        })
        .collect();
    if waiting.is_empty() { "ready\n".into_response() } else { (StatusCode::SERVICE_UNAVAILABLE, waiting.concat()).into_response() }
}

async fn endpoints(State(shared): State<Arc<Shared>>) -> Json<Value> {
    let pools = shared.pools.borrow().clone();
    let rows: Vec<Value> = pools
        .iter()
        .flat_map(|view| {
            let members = view.members.iter().map(|m| member_row(view, m));
            members.chain(view.absent.iter().map(|a| absentee_row(view, a))).collect::<Vec<_>>()
        })
        .collect();
    Json(json!({ "endpoints": rows }))
}

fn member_row(view: &PoolView, member: &Member) -> Value {
    let reason = match &member.metrics {
        MetricsStatus::Fresh => String::new(),
        MetricsStatus::Awaited => "metrics not known yet".to_owned(),
        MetricsStatus::Failing(why) => format!("last scrape failed: {why}"),
        MetricsStatus::Unknown(why) => format!("metrics unknown: {why}"),
    };
    json!({
        "name": member.instance.name,
        "address": member.instance.address.to_string(),
        "pool": &*view.name,
        "state": "ready",
        "reason": reason,
        "since": rfc3339(member.since),
        "incarnation": member.id.incarnation.0,
        "slot": member.id.slot.0,
    })
}

fn absentee_row(view: &PoolView, absentee: &Absentee) -> Value {
    let (state, reason, id) = match absentee.absence {
        Absence::Departing(id) => ("departing", "left discovery; waiting for the proxies to acknowledge that", Some(id)),
        Absence::NoFreeSlot => ("waiting", "every slot of the pool is taken", None),
    };
    json!({
        "name": absentee.instance.name,
        "address": absentee.instance.address.to_string(),
        "pool": &*view.name,
        "state": state,
        "reason": reason,
        "since": rfc3339(absentee.since),
        "incarnation": id.map(|id| id.incarnation.0),
        "slot": id.map(|id| id.slot.0),
    })
}

/// `2026-11-21T15:06:35.123Z`. Days to civil date: Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms", `civil_from_days`.
fn rfc3339(time: SystemTime) -> String {
    let since_epoch = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let (seconds, millis) = (since_epoch.as_secs(), since_epoch.subsec_millis());
    let (days, of_day) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month_shifted + 2) / 5 + 1;
    let month = if month_shifted < 10 { month_shifted + 3 } else { month_shifted - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (of_day / 3_600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_are_written_as_date_does() {
        let check = |millis, expected| assert_eq!(rfc3339(SystemTime::UNIX_EPOCH + Duration::from_millis(millis)), expected);
        check(0, "1970-01-01T00:00:00.000Z");
        check(951_782_400_000, "2000-02-29T00:00:00.000Z");
        check(1_795_273_595_123, "2026-11-21T15:06:35.123Z");
        check(4_107_542_399_999, "2100-02-28T23:59:59.999Z");
        check(4_107_542_400_000, "2100-03-01T00:00:00.000Z");
    }
}
