//! The routes of a registered process: `/metadata`, which discovery fetches, and `/health`, for its
//! readiness probe.
//!
//! A process can add the routes to its existing server, or serve them on a port of their own with
//! [`serve`].
//!
//! | request | answer |
//! |---|---|
//! | `GET /metadata` | 200, the JSON object, `ETag: "<generation>-<revision>"`; 304 if `If-None-Match` has it |
//! | `GET /health` | 200 `{"status":"ready"}`, or 503 `{"status":"notready"}` |

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::registry::{Announcement, InstanceHandle, InstanceStatus};

/// Returns the routes of an instance. After its handle is dropped, they report that it is not
/// ready.
pub fn router(handle: &InstanceHandle) -> Router {
    Router::new()
        .route("/metadata", get(metadata))
        .route("/health", get(health))
        .with_state(handle.follow())
}

/// Serves the routes of an instance until the future is dropped.
///
/// # Errors
/// Returns the error of the listener.
pub async fn serve(listener: TcpListener, handle: &InstanceHandle) -> std::io::Result<()> {
    axum::serve(listener, router(handle)).await
}

async fn metadata(
    State(said): State<watch::Receiver<Announcement>>,
    headers: HeaderMap,
) -> Response {
    let said = said.borrow().clone();
    let etag = format!("\"{}-{}\"", said.generation, said.revision);
    let asked = headers
        .get_all(header::IF_NONE_MATCH)
        .iter()
        .filter_map(|v| v.to_str().ok())
        .flat_map(|v| v.split(','));
    if asked
        .map(str::trim)
        .any(|tag| tag.trim_start_matches("W/") == etag || tag == "*")
    {
        return (StatusCode::NOT_MODIFIED, [(header::ETAG, etag)]).into_response();
    }
    match serde_json::to_string(said.metadata.map()) {
        Ok(body) => (
            [
                (header::ETAG, etag),
                (header::CONTENT_TYPE, "application/json".to_owned()),
            ],
            body,
        )
            .into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn health(State(said): State<watch::Receiver<Announcement>>) -> Response {
    // Without a handle the instance cannot be ready.
    let status = if said.has_changed().is_err() {
        InstanceStatus::NotReady
    } else {
        said.borrow().status
    };
    let code = if status == InstanceStatus::Ready {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    (
        code,
        [(header::CONTENT_TYPE, "application/json")],
        format!("{{\"status\":\"{status}\"}}"),
    )
        .into_response()
}
