//! Recent sampled decisions, and the explanation of one of them or of a pasted request.

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::{BytesRejection, JsonRejection};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use super::refused;
use crate::cli::explain::{self, ExplainRequest};
use crate::serve::admin::AdminServer;
use crate::state::decision_log::{SAMPLES_PER_POOL_MAX, SampledDecision};

/// A question: a sampled decision by its id, or a request; and variations.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct ConsoleQuestion {
    pool: Option<String>,
    /// The id of a sampled decision.
    decision: Option<u64>,
    /// The body of a request, or a decision record from an access log.
    request: Option<String>,
    path: Option<String>,
    without: Vec<String>,
    config: Option<String>,
}

/// Lists the sampled decisions, newest first.
pub(super) async fn list(State(AdminServer { shared, .. }): State<AdminServer>) -> Json<Value> {
    let sampled = shared.decisions().newest_first().map(row).collect::<Vec<_>>();
    Json(json!({ "kept_per_pool_max": SAMPLES_PER_POOL_MAX, "decisions": sampled }))
}

fn row(sampled: &SampledDecision) -> Value {
    let SampledDecision { id, pool, at, source, summary, .. } = sampled;
    json!({
        "id": id,
        "pool": &**pool,
        "at_ms": super::overview::unix_ms(*at),
        "source": source,
        "model": summary.model,
        "prompt_tokens": summary.prompt_tokens,
        "priority": summary.priority,
        "endpoints": summary.endpoints,
        "cached_tokens_max": summary.cached_tokens_max,
        "picked": summary.picked,
    })
}

/// Explains a decision with the exchange and scheduler of the proxies. It changes nothing, so any
/// content type will do.
pub(super) async fn explain(State(AdminServer { shared, .. }): State<AdminServer>, body: Result<Bytes, BytesRejection>) -> Response {
    let body = match body {
        Ok(body) => body,
        Err(rejected) => return refused(rejected.status(), &rejected.body_text()),
    };
    let question: Result<Json<ConsoleQuestion>, JsonRejection> = Json::from_bytes(&body);
    let ConsoleQuestion { pool, decision, request, path, without, config } = match question {
        Ok(Json(question)) => question,
        Err(rejected) => return refused(rejected.status(), &rejected.body_text()),
    };
    let (pool, request) = match (decision, request) {
        (Some(id), None) => match shared.decisions().get(id).map(|sampled| (sampled.pool.to_string(), sampled.record.to_string())) {
            Some((pool, record)) => (Some(pool), record),
            None => return refused(StatusCode::NOT_FOUND, "this decision is no longer kept"),
        },
        (None, Some(request)) => (pool, request),
        _ => return refused(StatusCode::BAD_REQUEST, "name a decision, or give a request"),
    };
    let path = path.unwrap_or_else(|| "/v1/completions".to_owned());
    let question = ExplainRequest { pool, request, path, without, config, ..ExplainRequest::default() };
    match explain::answer(&shared, &question) {
        Ok(answer) => Json(answer).into_response(),
        Err(why) => refused(StatusCode::BAD_REQUEST, &why),
    }
}
