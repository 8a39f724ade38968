//! The targets of the scraper. The URL is built from parts and checked to lead to the endpoint's
//! own host and port, so nothing in discovery or metadata can send the scraper elsewhere.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use reqwest::Url;
use scheduler::EndpointRef;

use super::engine::{EngineSpec, EngineTable};

/// One endpoint to scrape.
#[derive(Clone, Debug)]
pub struct ScrapeTarget {
    /// Slot and generation: a new generation is a new target.
    pub id: EndpointRef,
    /// For the log.
    pub name: Arc<str>,
    /// Its URL.
    pub url: MetricsUrl,
    /// Its metric names.
    pub engine: Arc<EngineSpec>,
}

/// How the metrics of endpoints are found, unless discovery says otherwise.
#[derive(Clone, Debug)]
pub struct MetricsDiscovery {
    /// Metric names by engine.
    pub engines: Arc<EngineTable>,
    /// Their location.
    pub location: MetricsLocation,
}

/// Where engines serve their metrics, if not where the engine table says.
#[derive(Clone, Debug, Default)]
pub struct MetricsLocation {
    /// TLS?
    pub https: bool,
    /// Port, if neither the engine's usual one nor the endpoint's own.
    pub port: Option<u16>,
    /// Path, if not the engine's usual one.
    pub path: Option<String>,
}

/// Address of an exposition: the endpoint's own host, no query, no credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetricsUrl(Url);

/// An address or path that makes no valid metrics URL; its author has to change it.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidMetricsUrl {
    /// Not `host:port`.
    #[error("{0:?} is not host:port")]
    Address(String),
    /// Not an absolute path, or more than a path.
    #[error("metrics path {0:?} must start with / and hold neither query nor fragment")]
    Path(String),
}

impl MetricsLocation {
    /// The URL for an endpoint at `address` (`ip:port`, IPv6 in brackets, or `host:port`).
    ///
    /// # Errors
    /// [`InvalidMetricsUrl`] quotes the part that is wrong.
    pub fn url(&self, address: &str, engine: &EngineSpec) -> Result<MetricsUrl, InvalidMetricsUrl> {
        let (host, port) = host_and_port(address).ok_or_else(|| InvalidMetricsUrl::Address(address.into()))?;
        let port = self.port.or(engine.metrics_port).unwrap_or(port);
        let path = self.path.as_deref().unwrap_or(engine.metrics_path);
        if !path.starts_with('/') || path.contains(['?', '#', '\\']) || path.chars().any(char::is_control) {
            return Err(InvalidMetricsUrl::Path(path.into()));
        }
        let scheme = if self.https { "https" } else { "http" };
        let url = Url::parse(&format!("{scheme}://{host}:{port}{path}")).map_err(|_| InvalidMetricsUrl::Address(address.into()))?;
        Ok(MetricsUrl(url))
    }
}

impl MetricsUrl {
    pub(super) fn whole(&self) -> Url {
        self.0.clone()
    }

    /// `?name[]=a&name[]=b`: the Python and Java client libraries answer with only those series,
    /// others ignore it.
    pub(super) fn filtered(&self, engine: &EngineSpec) -> Url {
        let mut url = self.0.clone();
        url.query_pairs_mut().extend_pairs(engine.names().into_iter().map(|name| ("name[]", name)));
        url
    }
}

/// The host as in a URL, and the port. Host names contain letters, digits, dots and hyphens only.
fn host_and_port(address: &str) -> Option<(String, u16)> {
    if let Ok(socket) = address.parse::<SocketAddr>() {
        let host = match socket.ip() {
            IpAddr::V4(ip) => ip.to_string(),
            IpAddr::V6(ip) => format!("[{ip}]"),
        };
        return Some((host, socket.port()));
    }
    let (host, port) = address.rsplit_once(':')?;
    let legal = !host.is_empty() && host.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_'));
    Some((host.to_owned(), port.parse().ok()?)).filter(|_| legal)
}

impl fmt::Display for MetricsUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
