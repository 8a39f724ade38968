//! Traffic and latency of the last hour.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use super::overview::unix_ms;
use crate::state::traffic::{
    LatencyQuantiles, SAMPLE_INTERVAL, SAMPLES_MAX, TrafficRecorder, TrafficSample,
};

pub(super) async fn answer(State(traffic): State<Arc<TrafficRecorder>>) -> Json<Value> {
    let traffic = traffic.history();
    let pools = traffic.pools().map(|(pool, samples)| json!({ "name": &**pool, "samples": samples.map(sample).collect::<Vec<_>>() }));
    let pools = pools.collect::<Vec<_>>();
    Json(
        json!({ "interval_seconds": SAMPLE_INTERVAL.as_secs(), "samples_max": SAMPLES_MAX, "pools": pools }),
    )
}

fn sample(sample: &TrafficSample) -> Value {
    let TrafficSample {
        at,
        seconds,
        requests,
        client_errors,
        server_errors,
        refused,
        prompt_tokens,
        cached_tokens,
        ..
    } = sample;
    let quantiles = |q: Option<LatencyQuantiles>| q.map(|q| json!({ "p50": q.p50, "p99": q.p99 }));
    let [met, missed, shed] = sample.slo;
    json!({
        "at_ms": unix_ms(*at),
        "seconds": seconds,
        "requests": requests,
        "client_errors": client_errors,
        "server_errors": server_errors,
        "refused": refused,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "output_tokens": sample.output_tokens,
        "running": sample.running,
        "held": sample.held,
        "slo_met": met,
        "slo_missed": missed,
        "slo_shed": shed,
        "ttft_ms": quantiles(sample.ttft),
        "tpot_ms": quantiles(sample.tpot),
        "duration_ms": quantiles(sample.duration),
    })
}
