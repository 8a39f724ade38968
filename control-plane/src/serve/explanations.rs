//! Explanations that operators request over HTTP. The daemon computes them one at a time, on a
//! separate thread. Scrapes, probes and state streams run on the other threads, so they never wait
//! for an explanation.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::Semaphore;

/// The maximum time in which the body of a question arrives, because the daemon accepts no other
/// question meanwhile.
const QUESTION_MAX: Duration = Duration::from_secs(5);

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
    /// Fails if another explanation is being computed, if the body is not a question in JSON or
    /// arrives too slowly, or if `explain` refuses the question.
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
        let body = tokio::time::timeout(QUESTION_MAX, Bytes::from_request(request, &()))
            .await
            .map_err(|_| {
                QuestionRefusal::new(
                    StatusCode::REQUEST_TIMEOUT,
                    "the question took more than 5 seconds to arrive",
                )
            })?
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

/// Returns whether the content type says that the body is JSON. A web page of another site cannot
/// send this type without a preflight request.
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

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use serde_json::json;

    use super::*;

    async fn ask(desk: &ExplanationDesk, body: Body) -> Result<Value, u16> {
        let request = axum::http::Request::post("/api/v1/explain")
            .header(header::CONTENT_TYPE, "application/json")
            .body(body)
            .unwrap();
        let answer = desk.answer(request, |question: Value| Ok(question));
        answer.await.map_err(|refusal| refusal.status.as_u16())
    }

    #[tokio::test(start_paused = true)]
    async fn a_question_that_does_not_arrive_delays_others_for_seconds_only() {
        let desk = ExplanationDesk::default();
        let never = Body::from_stream(tokio_stream::pending::<Result<Bytes, std::io::Error>>());
        let slow = async {
            let answer = tokio::time::timeout(Duration::from_secs(6), ask(&desk, never)).await;
            assert_eq!(answer.unwrap(), Err(408));
        };
        let other = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert_eq!(ask(&desk, Body::from("1")).await, Err(503));
        };
        tokio::join!(slow, other);
        assert_eq!(ask(&desk, Body::from("1")).await, Ok(json!(1)));
    }
}
