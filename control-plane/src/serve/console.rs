//! The console: a web page at `/` of the admin listener, and its data as JSON under `/api/v1`.
//!
//! ```text
//!  console/src ── npm run build ──▶ console/dist ── include_bytes ──▶ /, /console.js, /console.css
//!  pools, proxies, counters ─────────────────────▶ /api/v1/overview      what is, now
//!  TrafficHistory ───────────────────────────────▶ /api/v1/history       the last hour
//!  ConfigStatus ─────────────────────────────────▶ /api/v1/configs       the text of each configuration
//!  DecisionLog ──────────────────────────────────▶ /api/v1/decisions     sampled decisions
//!  the exchange and scheduler of the proxies ────▶ /api/v1/explain       one decision, or a request, with variations
//! ```
//! The files of the page hold no data, so they need no token. The data needs the same
//! authentication as other pages of the listener. `control-plane/console/api.schema.json` describes
//! the data. Prompt text is neither kept nor returned.

mod configs;
mod decisions;
mod history;
mod overview;

use std::sync::Arc;

use axum::extract::{DefaultBodyLimit, Request};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use axum::{Json, Router};

use self::overview::OverviewTables;
use crate::cli::explain::QUESTION_BYTES_MAX;
use crate::serve::explanations::QuestionRefusal;
use crate::serve::shown_state::ShownState;

/// A file of the page.
struct Asset {
    path: &'static str,
    media_type: &'static str,
    bytes: &'static [u8],
}

/// The files of the page. `npm run build` in `control-plane/console` writes the script; a test
/// compares it with its source.
static ASSETS: [Asset; 4] = [
    Asset {
        path: "/",
        media_type: "text/html; charset=utf-8",
        bytes: include_bytes!("../../console/page/index.html"),
    },
    Asset {
        path: "/console.js",
        media_type: "text/javascript; charset=utf-8",
        bytes: include_bytes!("../../console/dist/console.js"),
    },
    Asset {
        path: "/console.css",
        media_type: "text/css; charset=utf-8",
        bytes: include_bytes!("../../console/page/console.css"),
    },
    Asset {
        path: "/icon.svg",
        media_type: "image/svg+xml",
        bytes: include_bytes!("../../console/page/icon.svg"),
    },
];

/// The policy that the browser enforces for the page: the page runs only its own script, connects
/// only to its own origin, and cannot be framed.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

pub(super) fn router(shown: &ShownState) -> Router {
    let shared = &shown.shared;
    let tables = Arc::clone(shared);
    let desk = shown.explanations.clone();
    let explain = async move |request| match decisions::explain(tables, &desk, request).await {
        Ok(answer) => answer,
        Err(QuestionRefusal { status, why }) => refused(status, &why),
    };
    let overview = OverviewTables {
        shared: Arc::clone(shared),
        snapshot: shown.snapshot.clone(),
    };
    let api = Router::new()
        .route(
            "/api/v1/overview",
            get(overview::answer).with_state(overview),
        )
        .route(
            "/api/v1/history",
            get(history::answer).with_state(Arc::clone(&shown.traffic)),
        )
        .route(
            "/api/v1/decisions",
            get(decisions::list).with_state(Arc::clone(&shared.reports)),
        )
        .route(
            "/api/v1/configs",
            get(configs::answer).with_state(Arc::clone(&shared.pools)),
        )
        .route(
            "/api/v1/explain",
            post(explain).layer(DefaultBodyLimit::max(QUESTION_BYTES_MAX)),
        )
        .method_not_allowed_fallback(|| async {
            refused(
                StatusCode::METHOD_NOT_ALLOWED,
                "this route has another method",
            )
        })
        .route("/api/v1/", any(no_route))
        .route("/api/v1/{*rest}", any(no_route));
    let page = ASSETS.iter().fold(Router::new(), |router, asset| {
        router.route(asset.path, get(|headers| send(asset, headers)))
    });
    api.merge(page).layer(from_fn(secure))
}

/// Returns whether a path is a file of the page. The files of the page hold no data, so they need
/// no token.
pub(super) fn is_asset(path: &str) -> bool {
    ASSETS.iter().any(|asset| asset.path == path)
}

/// Sends a file, or answers that the browser has the current file. A new daemon may have other
/// files, so the browser requests the files each time.
async fn send(asset: &'static Asset, headers: HeaderMap) -> Response {
    let tag = format!("\"{:016x}\"", fingerprint(asset.bytes));
    let known = headers
        .get(header::IF_NONE_MATCH)
        .is_some_and(|value| value.as_bytes() == tag.as_bytes());
    let caching = [
        (header::ETAG, tag),
        (header::CACHE_CONTROL, "no-cache".to_owned()),
    ];
    if known {
        return (StatusCode::NOT_MODIFIED, caching).into_response();
    }
    (
        caching,
        [(header::CONTENT_TYPE, asset.media_type)],
        asset.bytes,
    )
        .into_response()
}

/// Returns an FNV-1a hash, which distinguishes releases of a file. The strength of the hash does
/// not matter.
fn fingerprint(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Adds headers against framing, foreign scripts and content sniffing.
async fn secure(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers
        .entry(header::CACHE_CONTROL)
        .or_insert(HeaderValue::from_static("no-store"));
    response
}

async fn no_route() -> Response {
    refused(
        StatusCode::NOT_FOUND,
        "no such route: overview, history, decisions, configs, and explain are there",
    )
}

/// Creates an error that the page shows.
fn refused(status: StatusCode, why: &str) -> Response {
    (status, Json(serde_json::json!({ "error": why }))).into_response()
}
