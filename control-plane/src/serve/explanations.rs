//! Explanations that operators request over HTTP. The daemon computes them one at a time, on a
//! separate thread. Scrapes, probes and state streams run on the other threads, so they never wait
//! for an explanation.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::Semaphore;

/// Computes one explanation at a time.
#[derive(Clone, Debug)]
pub struct ExplanationDesk(Arc<Semaphore>);

/// The reason why a question gets no explanation.
#[derive(Debug)]
pub struct QuestionRefusal {
    pub status: StatusCode,
    /// A sentence for the caller.
    pub why: String,
}

// === impl ExplanationDesk ===

impl Default for ExplanationDesk {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(1)))
    }
}

impl ExplanationDesk {
    /// Reads the question in the body of `request`, and computes its answer with `explain`.
    ///
    /// # Errors
    /// Fails if another explanation is being computed, if the body is not a question in JSON, or if
    /// `explain` refuses it.
    pub async fn answer<Q: DeserializeOwned>(
        &self,
        request: Request,
        explain: impl FnOnce(Q) -> Result<Value, QuestionRefusal> + Send + 'static,
    ) -> Result<Value, QuestionRefusal> {
        // The permit is acquired before the body is read, so that memory holds at most one
        // question.
        let turn = Arc::clone(&self.0).try_acquire_owned().map_err(|_| {
            QuestionRefusal::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "another explanation is being computed; try again in a second",
            )
        })?;
        if !is_json(request.headers()) {
            return Err(QuestionRefusal::new(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "send the question with `content-type: application/json`",
            ));
        }
        let body = Bytes::from_request(request, &())
            .await
            .map_err(|r| QuestionRefusal::new(r.status(), r.body_text()))?;
        let computed = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            let question = Json::<Q>::from_bytes(&body)
                .map_err(|r| QuestionRefusal::new(r.status(), r.body_text()));
            drop(body);
            explain(question?.0)
        });
        computed.await.unwrap_or_else(|_| {
            Err(QuestionRefusal::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "the explanation failed",
            ))
        })
    }
}

/// Whether the content type says that the body is JSON. A web page of another site cannot send this
/// type without a preflight request.
fn is_json(headers: &HeaderMap) -> bool {
    let essence = headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.split(';').next());
    essence.is_some_and(|essence| essence.trim().eq_ignore_ascii_case("application/json"))
}

// === impl QuestionRefusal ===

impl QuestionRefusal {
    pub fn new(status: StatusCode, why: impl Into<String>) -> Self {
        Self {
            status,
            why: why.into(),
        }
    }
}
