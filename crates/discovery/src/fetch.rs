//! Fetches the metadata of an instance with one conditional GET to its own address, within limits.
//!
//! The request follows no redirect, uses no proxy from the environment and resolves no name, so
//! only the instance itself can answer.

use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Empty, LengthLimitError, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, ETAG, HeaderMap, IF_NONE_MATCH};
use hyper::{Request, Response, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};

use crate::metadata::{METADATA_BYTES_MAX, Metadata};
use crate::table::{MetadataRequest, MetadataResponse};

/// The maximum time that one fetch may take, from connecting to the last byte.
pub(crate) const FETCH_DEADLINE: Duration = Duration::from_secs(2);

/// The maximum number of fetches that run at the same time. The metadata of a pool of a thousand
/// instances arrives within about a second, with at most this many times [`METADATA_BYTES_MAX`] of
/// memory.
pub(crate) const FETCHES_MAX: usize = 32;

/// The longest entity tag kept, in bytes. The entity tags of [`crate::serve`] have about 40 bytes.
const ETAG_BYTES_MAX: usize = 256;

/// Fetches metadata from instances.
#[derive(Clone, Debug)]
pub(crate) struct MetadataFetcher(Client<HttpConnector, Empty<Bytes>>);

// === impl MetadataFetcher ===

impl MetadataFetcher {
    pub(crate) fn new() -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(FETCH_DEADLINE));
        connector.set_nodelay(true);
        // Idle connections are not kept, because there is only one request every half minute.
        Self(
            Client::builder(TokioExecutor::new())
                .timer(TokioTimer::new())
                .pool_max_idle_per_host(0)
                .build(connector),
        )
    }

    pub(crate) async fn fetch(&self, fetch: &MetadataRequest) -> MetadataResponse {
        match tokio::time::timeout(FETCH_DEADLINE, self.ask(fetch)).await {
            Ok(answer) => answer.unwrap_or_else(MetadataResponse::Failed),
            Err(_) => MetadataResponse::Failed(format!(
                "no complete answer from {} in {FETCH_DEADLINE:?}",
                fetch.address
            )),
        }
    }

    async fn ask(&self, fetch: &MetadataRequest) -> Result<MetadataResponse, String> {
        let mut request = Request::get(format!("http://{}/metadata", fetch.address))
            .header(ACCEPT, "application/json");
        if let Some(etag) = &fetch.etag {
            request = request.header(IF_NONE_MATCH, etag);
        }
        let request = request.body(Empty::new()).map_err(|e| e.to_string())?;
        let response = self
            .0
            .request(request)
            .await
            .map_err(|e| format!("{}: {}", fetch.address, innermost(&e)))?;
        match response.status() {
            StatusCode::OK => read(response).await,
            StatusCode::NOT_MODIFIED if fetch.etag.is_some() => Ok(MetadataResponse::Unchanged),
            StatusCode::NOT_FOUND => Ok(MetadataResponse::Absent),
            status if status.is_redirection() => Err(format!(
                "{} answered {status}, and redirects are not followed",
                fetch.address
            )),
            status => Err(format!("{} answered {status}", fetch.address)),
        }
    }
}

async fn read(response: Response<Incoming>) -> Result<MetadataResponse, String> {
    let etag = entity_tag(response.headers());
    let body = Limited::new(response.into_body(), METADATA_BYTES_MAX)
        .collect()
        .await
        .map_err(|e| {
            if e.is::<LengthLimitError>() {
                format!("answer longer than {METADATA_BYTES_MAX} bytes")
            } else {
                format!("answer broke off: {e}")
            }
        })?;
    let metadata = Metadata::parse(&body.to_bytes()).map_err(|e| e.to_string())?;
    Ok(MetadataResponse::Is(Arc::new(metadata), etag))
}

fn entity_tag(headers: &HeaderMap) -> Option<String> {
    headers
        .get(ETAG)?
        .to_str()
        .ok()
        .filter(|tag| tag.len() <= ETAG_BYTES_MAX)
        .map(str::to_owned)
}

/// Returns the innermost cause, for example "Connection refused" instead of "client error
/// (Connect)".
fn innermost(error: &(dyn std::error::Error + 'static)) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}
