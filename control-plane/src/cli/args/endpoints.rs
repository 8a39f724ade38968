//! Options for the endpoints of pools: their source, how they are scraped, and the objects that
//! apply to them.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::values::duration;

/// The source of endpoints: exactly one of these.
#[derive(Clone, Debug, Args)]
#[group(required = true, multiple = false)]
pub struct EndpointsArgs {
    /// YAML file with a list of endpoints; the daemon reads it again when its content changes.
    #[arg(long, env = "SWITCHPOINT_ENDPOINTS_FILE", value_name = "FILE")]
    pub endpoints_file: Option<PathBuf>,

    /// A model server. Repeat the option for several. A host name is resolved once, at start.
    #[arg(
        long,
        env = "SWITCHPOINT_ENDPOINT",
        value_name = "HOST:PORT",
        value_delimiter = ','
    )]
    pub endpoint: Vec<String>,

    /// A YAML file with a list of pools, each with its own endpoints and configuration, instead of
    /// --pool and --config.
    #[arg(long, env = "SWITCHPOINT_POOLS", value_name = "FILE", conflicts_with_all = ["pool", "config"])]
    pub pools: Option<PathBuf>,
}

/// Scraping.
#[derive(Debug, Args)]
#[command(next_help_heading = "Scraping")]
pub struct ScrapeArgs {
    /// How often an idle endpoint is scraped.
    #[arg(long, env = "SWITCHPOINT_SCRAPE_INTERVAL", value_name = "DURATION", default_value = "1s", value_parser = duration)]
    pub scrape_interval: Duration,

    /// How often an endpoint with work is scraped.
    #[arg(long, env = "SWITCHPOINT_SCRAPE_INTERVAL_BUSY", value_name = "DURATION", default_value = "100ms", value_parser = duration)]
    pub scrape_interval_busy: Duration,

    /// Metrics older than this count as unknown: their endpoint counts neither as idle nor as full.
    #[arg(long, env = "SWITCHPOINT_STALENESS_MAX", value_name = "DURATION", default_value = "5s", value_parser = duration)]
    pub staleness_max: Duration,

    /// Port where engines publish KV-cache events by ZeroMQ (vLLM's and SGLang's
    /// `--kv-events-config`), unless an endpoint has the label switchpoint/kv-events-port. Events
    /// show at once that an engine restarted or cleared its cache.
    #[arg(long, env = "SWITCHPOINT_KV_EVENTS_PORT", value_name = "PORT")]
    pub kv_events_port: Option<u16>,

    /// Port where engines replay lost KV-cache events (`replay_endpoint`), unless an endpoint has
    /// the label switchpoint/kv-events-replay-port.
    #[arg(long, env = "SWITCHPOINT_KV_EVENTS_REPLAY_PORT", value_name = "PORT")]
    pub kv_events_replay_port: Option<u16>,

    /// TLS towards endpoints.
    #[command(flatten)]
    pub endpoint_tls: EndpointTlsArgs,
}

/// TLS towards endpoints that serve their metrics by https (`metrics: {scheme: https}`, or
/// `metrics-data-source` in --config).
#[derive(Debug, Args)]
#[command(next_help_heading = "TLS towards endpoints")]
pub struct EndpointTlsArgs {
    /// Trust servers whose certificates are signed by this CA, PEM. If not given, the system's CAs
    /// are trusted.
    #[arg(long, env = "SWITCHPOINT_ENDPOINT_TLS_CA", value_name = "FILE")]
    pub endpoint_tls_ca: Option<PathBuf>,

    /// Client certificate that the daemon shows to endpoints when it scrapes them, PEM.
    #[arg(
        long,
        env = "SWITCHPOINT_ENDPOINT_TLS_CERT",
        value_name = "FILE",
        requires = "endpoint_tls_key"
    )]
    pub endpoint_tls_cert: Option<PathBuf>,

    /// Private key of --endpoint-tls-cert, PEM.
    #[arg(
        long,
        env = "SWITCHPOINT_ENDPOINT_TLS_KEY",
        value_name = "FILE",
        requires = "endpoint_tls_cert"
    )]
    pub endpoint_tls_key: Option<PathBuf>,

    /// Do not check the certificates of these servers.
    #[arg(long, env = "SWITCHPOINT_ENDPOINT_TLS_INSECURE")]
    pub endpoint_tls_insecure: bool,
}
