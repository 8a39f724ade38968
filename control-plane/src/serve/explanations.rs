//! Explanations that operators request over HTTP. The daemon computes them one at a time, on a
//! separate thread. Scrapes, probes and state streams run on the other threads, so they never wait
//! for an explanation.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::Semaphore;

use crate::cli::explain::{WaitingCaller, check_answer};

/// The maximum time in which the body of a question arrives, because the daemon accepts no other
/// question meanwhile.
const QUESTION_MAX: Duration = Duration::from_secs(5);

/// The maximum time of a computation. The largest question takes seconds. Together with
/// [`QUESTION_MAX`], this is less than the time that `switchpointd explain` waits.
const COMPUTATION_MAX: Duration = Duration::from_secs(20);

/// Computes one explanation at a time.
#[derive(Clone, Debug)]
pub struct ExplanationDesk {
    turn: Arc<Semaphore>,
    /// The maximum time of a computation.
    computation_max: Duration,
}

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
        Self {
            turn: Arc::new(Semaphore::new(1)),
            computation_max: COMPUTATION_MAX,
        }
    }
}

impl ExplanationDesk {
    /// Reads the question in the body of `request`, and computes its answer with `explain`. If the
    /// computation takes too long, `explain` learns that its caller no longer waits. No other
    /// explanation begins before `explain` has returned.
    ///
    /// # Errors
    /// Fails if another explanation is being computed, if the body is not a question in JSON or
    /// arrives too slowly, if the computation takes too long, if `explain` refuses the question, or
    /// if the answer is too long.
    pub async fn answer<Q: DeserializeOwned>(
        &self,
        request: Request,
        explain: impl FnOnce(Q, WaitingCaller) -> Result<Value, QuestionRefusal> + Send + 'static,
    ) -> Result<Response, QuestionRefusal> {
        // The permit is acquired before the body is read, so that memory holds at most one
        // question.
        let turn = Arc::clone(&self.turn).try_acquire_owned().map_err(|_| {
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
        let (_waits, caller) = WaitingCaller::pair();
        let computed = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            let question = Json::<Q>::from_bytes(&body)
                .map_err(|r| QuestionRefusal::new(r.status(), r.body_text()));
            drop(body);
            written(&explain(question?.0, caller)?)
        });
        let computed = tokio::time::timeout(self.computation_max, computed).await;
        let computed = computed.map_err(|_| {
            QuestionRefusal::new(
                StatusCode::SERVICE_UNAVAILABLE,
                format!(
                    "the explanation took more than {:?}; ask a shorter question",
                    self.computation_max
                ),
            )
        })?;
        let text = computed.unwrap_or_else(|_| Err(QuestionRefusal::failed()))?;
        let media_type = (header::CONTENT_TYPE, "application/json");
        Ok(([media_type], text).into_response())
    }
}

/// Returns the answer as JSON, unless it is too long.
fn written(answer: &Value) -> Result<Vec<u8>, QuestionRefusal> {
    let text = serde_json::to_vec(answer).map_err(|_| QuestionRefusal::failed())?;
    let checked = check_answer(text.len());
    checked.map_err(|why| QuestionRefusal::new(StatusCode::BAD_REQUEST, why))?;
    Ok(text)
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

    fn failed() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "the explanation failed")
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use serde_json::json;

    use super::*;
    use crate::cli::explain::ANSWER_BYTES_MAX;

    fn request(body: Body) -> Request {
        axum::http::Request::post("/api/v1/explain")
            .header(header::CONTENT_TYPE, "application/json")
            .body(body)
            .unwrap()
    }

    async fn ask(desk: &ExplanationDesk, body: Body) -> Result<Value, u16> {
        let answer = desk.answer(request(body), |question: Value, _| Ok(question));
        let answer = answer.await.map_err(|refusal| refusal.status.as_u16())?;
        let bytes = axum::body::to_bytes(answer.into_body(), usize::MAX).await;
        Ok(serde_json::from_slice(&bytes.unwrap()).unwrap())
    }

    #[tokio::test]
    async fn an_answer_that_is_too_long_is_refused() {
        let desk = ExplanationDesk::default();
        for (bytes, refused) in [(ANSWER_BYTES_MAX, false), (ANSWER_BYTES_MAX + 1, true)] {
            let answer = desk.answer(request(Body::from("1")), move |_: Value, _| {
                Ok(json!("x".repeat(bytes - 2)))
            });
            assert_eq!(answer.await.is_err(), refused, "{bytes} bytes");
        }
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

    #[tokio::test]
    async fn an_explanation_that_takes_too_long_is_refused_and_its_computation_stops() {
        const PATIENCE: Duration = Duration::from_secs(60);
        let desk = ExplanationDesk {
            computation_max: Duration::from_millis(20),
            ..ExplanationDesk::default()
        };
        let (stopped, computation) = tokio::sync::oneshot::channel();
        let endless = move |question: Value, caller: WaitingCaller| {
            let began = std::time::Instant::now();
            while caller.check().is_ok() && began.elapsed() < PATIENCE {
                std::thread::yield_now();
            }
            let _ = stopped.send(caller.check().is_err());
            Ok(question)
        };
        let refused = desk.answer(request(Body::from("1")), endless).await;
        assert_eq!(refused.unwrap_err().status.as_u16(), 503);
        assert_eq!(computation.await, Ok(true));
        let next = async {
            while ask(&desk, Body::from("1")).await != Ok(json!(1)) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(PATIENCE, next).await.unwrap();
    }
}
