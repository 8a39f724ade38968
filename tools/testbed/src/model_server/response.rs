//! HTTP responses of every kind.

use axum::body::Body;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use serde_json::{Value, json};

use super::request::{ApiError, ModelApi};

pub(super) const EVENT_STREAM: &str = "text/event-stream; charset=utf-8";

pub(super) fn with_status(status: StatusCode, mut reply: Response<Body>) -> Response<Body> {
    *reply.status_mut() = status;
    reply
}

pub(super) fn status_reply(status: StatusCode, message: &str) -> Response<Body> {
    let error = ApiError {
        status,
        message: message.to_owned(),
        param: None,
    };
    with_status(status, json_reply(&error.body(ModelApi::Chat)))
}

pub(super) fn json_reply(value: &Value) -> Response<Body> {
    typed("application/json", value.to_string().into())
}

pub(super) fn typed(content_type: &'static str, body: Body) -> Response<Body> {
    let mut reply = Response::new(body);
    reply
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    reply
}

/// Returns headers as pairs in order of arrival, with every value of a name.
pub(super) fn header_pairs(headers: &HeaderMap) -> Value {
    headers
        .iter()
        .map(|(name, value)| json!([name.as_str(), String::from_utf8_lossy(value.as_bytes())]))
        .collect()
}
