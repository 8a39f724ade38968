//! The targets of the scraper. The URL of a scrape is built from parts and always has the
//! endpoint's own host. So discovery and metadata cannot send the scraper to another host.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use reqwest::Url;
use scheduler::EndpointRef;

use super::engine::{EngineSpec, EngineTable};

/// The path of the list of models, the same for all engines.
const MODELS_PATH: &str = "/v1/models";

/// One endpoint to scrape.
#[derive(Clone, Debug)]
pub struct ScrapeTarget {
    /// The slot and the generation. A new generation is a new target.
    pub id: EndpointRef,
    /// The name of the endpoint, for the log.
    pub name: Arc<str>,
    pub url: MetricsUrl,
    /// The endpoint's engine, with its metric names.
    pub engine: Arc<EngineSpec>,
}

/// The rules for finding the metrics of endpoints, unless discovery sets the location for an
/// endpoint.
#[derive(Clone, Debug)]
pub struct MetricsDiscovery {
    pub engines: Arc<EngineTable>,
    pub location: MetricsLocation,
}

/// The location of engines' metrics, where it differs from the engine table.
#[derive(Clone, Debug, Default)]
pub struct MetricsLocation {
    /// Whether the metrics are fetched with TLS.
    pub https: bool,
    /// The port. `None` means the engine's usual port, or the endpoint's own port if the engine has
    /// no usual port.
    pub port: Option<u16>,
    /// The path. `None` means the engine's usual path.
    pub path: Option<String>,
}

/// The URL of a metrics page, and of the list of models: host of the endpoint, no query, no
/// credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetricsUrl {
    page: Url,
    /// The URL of the list of models, at the endpoint's own port and with the scheme of the
    /// metrics.
    models: Url,
}

/// A metrics path that is not absolute, or has a query or a fragment.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("metrics path {0:?} must start with / and hold neither query nor fragment")]
pub struct InvalidMetricsPath(String);

impl MetricsLocation {
    /// Returns the URL for an endpoint at `address`.
    ///
    /// # Errors
    /// Returns [`InvalidMetricsPath`], which quotes the path, if the path gives no valid URL.
    pub fn url(
        &self,
        address: SocketAddr,
        engine: &EngineSpec,
    ) -> Result<MetricsUrl, InvalidMetricsPath> {
        let port = self.port.or(engine.metrics_port).unwrap_or(address.port());
        let path = self.path.as_deref().unwrap_or(engine.metrics_path);
        let invalid = || InvalidMetricsPath(path.into());
        if !path.starts_with('/')
            || path.contains(['?', '#', '\\'])
            || path.chars().any(char::is_control)
        {
            return Err(invalid());
        }
        let scheme = if self.https { "https" } else { "http" };
        let url = |port: u16, path: &str| {
            let host = SocketAddr::new(address.ip(), port);
            Url::parse(&format!("{scheme}://{host}{path}")).map_err(|_| invalid())
        };
        Ok(MetricsUrl {
            page: url(port, path)?,
            models: url(address.port(), MODELS_PATH)?,
        })
    }
}

impl MetricsUrl {
    pub(super) fn full_page(&self) -> Url {
        self.page.clone()
    }

    pub(super) fn models(&self) -> Url {
        self.models.clone()
    }

    /// Returns the URL with `?name[]=a&name[]=b`. The Python and Java client libraries answer with
    /// only the named series. Other servers ignore the query.
    pub(super) fn filtered(&self, engine: &EngineSpec) -> Url {
        let mut url = self.page.clone();
        url.query_pairs_mut()
            .extend_pairs(engine.names().into_iter().map(|name| ("name[]", name)));
        url
    }
}

impl fmt::Display for MetricsUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.page.fmt(f)
    }
}
