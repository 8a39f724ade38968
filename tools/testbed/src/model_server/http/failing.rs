//! Answers of a server with a fault.

use axum::body::Body;
use http::{HeaderValue, Response, StatusCode, Version, header};

use crate::model_server::faults::{FaultMode, ServerFault};
use crate::model_server::response::{status_reply, with_status};
use crate::model_server::socket::ServedConnection;

/// Half of the head of an HTTP/1 response.
const PARTIAL_HEAD: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-str";
/// A HEADERS frame on stream 1 that announces 64 bytes but has only three.
const PARTIAL_FRAME: &[u8] = &[0, 0, 64, 1, 4, 0, 0, 0, 1, 0x88, 0x5f, 0x8b];

/// Applies the fault. Returns the answer, or `None` if the mode does not apply to requests.
pub(super) async fn fail(
    fault: &ServerFault,
    connection: &ServedConnection,
    version: Version,
) -> Option<Response<Body>> {
    match fault.mode {
        FaultMode::None | FaultMode::Refuse | FaultMode::ResetMidStream => return None,
        FaultMode::Hang => {}
        FaultMode::ResetBeforeHeaders => connection.reset(b""),
        FaultMode::ResetMidHeaders => connection.reset(if version == Version::HTTP_2 {
            PARTIAL_FRAME
        } else {
            PARTIAL_HEAD
        }),
        FaultMode::Status => return Some(fault_reply(fault)),
    }
    std::future::pending().await
}

fn fault_reply(fault: &ServerFault) -> Response<Body> {
    let status = fault
        .status
        .and_then(|status| StatusCode::from_u16(status).ok())
        .unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
    let mut reply = match &fault.body {
        Some(body) => with_status(status, Response::new(Body::from(body.clone()))),
        None => status_reply(status, "A fault was ordered."),
    };
    if let Some(retry_after) = fault.retry_after {
        reply
            .headers_mut()
            .insert(header::RETRY_AFTER, HeaderValue::from(retry_after));
    }
    reply
}
