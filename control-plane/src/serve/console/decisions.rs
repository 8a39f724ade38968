//! Lists recent sampled decisions, and explains one of them or a pasted request.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::cli::explain::{self, ExplainRequest, WaitingCaller};
use crate::serve::explanations::{ExplanationDesk, QuestionRefusal};
use crate::state::decision_log::{SAMPLES_PER_POOL_MAX, SampledDecision};
use crate::state::reports::RequestReports;
use crate::state::shared::DaemonState;

/// A question: a sampled decision by its id, or a request, each with optional variations.
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
pub(super) async fn list(State(reports): State<Arc<RequestReports>>) -> Json<Value> {
    let sampled = reports
        .decisions()
        .newest_first()
        .map(row)
        .collect::<Vec<_>>();
    Json(json!({ "kept_per_pool_max": SAMPLES_PER_POOL_MAX, "decisions": sampled }))
}

fn row(sampled: &SampledDecision) -> Value {
    let SampledDecision {
        id,
        pool,
        at,
        source,
        summary,
        ..
    } = sampled;
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

/// Explains a decision with the exchange and scheduler of the proxies. An explanation changes
/// nothing.
pub(super) async fn explain(
    shared: Arc<DaemonState>,
    explanations: &ExplanationDesk,
    request: Request,
) -> Result<Response, QuestionRefusal> {
    let explain = move |question: ConsoleQuestion, caller: WaitingCaller| {
        let question = question.into_request(&shared.reports)?;
        explain::answer(&shared, &question, &caller)
            .map_err(|why| QuestionRefusal::new(StatusCode::BAD_REQUEST, why))
    };
    explanations.answer(request, explain).await
}

// === impl ConsoleQuestion ===

impl ConsoleQuestion {
    /// Replaces the id of a sampled decision in the question by its record.
    fn into_request(self, reports: &RequestReports) -> Result<ExplainRequest, QuestionRefusal> {
        let Self {
            pool,
            decision,
            request,
            path,
            without,
            config,
        } = self;
        let (pool, request) = match (decision, request) {
            (Some(id), None) => {
                let sampled = reports
                    .decisions()
                    .get(id)
                    .map(|sampled| (sampled.pool.to_string(), sampled.record.to_string()));
                let forgotten = || {
                    QuestionRefusal::new(StatusCode::NOT_FOUND, "this decision is no longer kept")
                };
                let (pool, record) = sampled.ok_or_else(forgotten)?;
                (Some(pool), record)
            }
            (None, Some(request)) => (pool, request),
            _ => {
                return Err(QuestionRefusal::new(
                    StatusCode::BAD_REQUEST,
                    "name a decision, or give a request",
                ));
            }
        };
        let path = path.unwrap_or_else(|| "/v1/completions".to_owned());
        Ok(ExplainRequest {
            pool,
            request,
            path,
            without,
            config,
            ..ExplainRequest::default()
        })
    }
}
