//! The page `/debug/scaling`: the scaling signals, and the numbers that they are computed from. The
//! signals of a standby lack the requests of proxies.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use learning::scaling::ScalingGoal;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::scaling::{EndpointGroup, ScalingSignals};

/// Returns all groups, by pool.
pub async fn scaling(State(signals): State<Arc<ScalingSignals>>) -> Json<Value> {
    let now = Instant::now();
    let rows = signals.by_pool(now).flat_map(|(pool, groups)| {
        groups
            .iter()
            .map(|group| group_row(pool, group, &signals.goal))
            .collect::<Vec<_>>()
    });
    let ScalingGoal {
        ttft_s,
        drain_s,
        startup_s,
        spare,
        replicas: (least, most),
    } = signals.goal;
    let goal = json!({ "ttft_s": ttft_s, "drain_s": drain_s, "startup_s": startup_s, "spare": spare, "replicas_min": least, "replicas_max": most });
    Json(json!({ "leads": signals.leads(), "goal": goal, "groups": rows.collect::<Vec<_>>() }))
}

fn group_row(pool: &str, group: &EndpointGroup, goal: &ScalingGoal) -> Value {
    let signal = group.signal(goal);
    let sum = |of: fn(&learning::scaling::OutstandingWork) -> f64| {
        group.endpoints.iter().map(of).sum::<f64>()
    };
    json!({
        "pool": pool,
        "role": group.key.0.name(),
        "models": group.models(),
        "endpoints": group.endpoints.len(),
        "endpoints_unknown": group.endpoints.iter().filter(|endpoint| endpoint.reported.is_none()).count(),
        "starting": group.starting.len(),
        "requests": sum(|endpoint| endpoint.requests),
        "held": group.held,
        "prompts": sum(|endpoint| endpoint.prompts),
        "uncached_tokens": sum(|endpoint| endpoint.uncached_tokens),
        "arriving": {
            "per_second": group.mix.per_second,
            "prompt_tokens": group.mix.prompt_tokens,
            "uncached_tokens": group.mix.uncached_tokens,
            "output_tokens": group.mix.output_tokens,
        },
        "backlog_seconds": signal.backlog_s,
        "busy_replicas": signal.busy,
        "utilization": signal.utilization,
        "desired_replicas": signal.desired,
    })
}
