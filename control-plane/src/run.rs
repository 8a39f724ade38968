//! The wiring: which task feeds which, and who stops whom.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use discovery::{Changes, Instance, MetricsLocation as Located, NAMESPACE_DEFAULT};
use envoy_types::pb::envoy::service::endpoint::v3::endpoint_discovery_service_server::EndpointDiscoveryServiceServer;
use proto::MESSAGE_BYTES_MAX;
use proto::state::state_service_server::StateServiceServer;
use scheduler::ProfileSpec;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tonic::transport::server::TcpIncoming;

use crate::admin;
use crate::args::{EndpointsFrom, Serve};
use crate::eds::EdsServer;
use crate::feed::{Feed, SCRAPE_EVENTS_MAX, Scraping};
use crate::pool::{Pool, Settings};
use crate::push::StateServer;
use crate::scrape::engine::{DEFAULT_ENGINE, ENGINE_LABEL, Engines};
use crate::scrape::{EndpointTls, Intervals, MetricsLocation, ScrapeConfig, Scraper};
use crate::shared::Shared;
use crate::shutdown::{self, Shutdown};

/// How often a silent connection is asked whether it lives, and how long it may take to answer: a proxy that vanished without a word is
/// noticed within the sum, well before the removal of an endpoint stops waiting for it.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long tasks may take to stop. Streams end at once; only a scrape or a write to disk takes time.
const SHUTDOWN_DEADLINE: Duration = Duration::from_secs(5);

/// Why the daemon could not start, or had to stop.
#[derive(Debug, thiserror::Error)]
pub enum Fatal {
    /// The command line asks for something that cannot be.
    #[error("{0}")]
    Usage(String),
    /// A listener could not be opened.
    #[error("cannot listen on {address} ({what}): {source}")]
    Listen {
        /// Which.
        what: &'static str,
        /// Where.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// Signals cannot be heard.
    #[error("cannot listen for signals: {0}")]
    Signals(io::Error),
    /// A task ended that never should.
    #[error("{0} ended unexpectedly")]
    TaskEnded(&'static str),
}

/// Runs the daemon until it is told to stop.
///
/// # Errors
/// [`Fatal`] says why it could not start, or had to stop.
pub async fn serve(args: Serve) -> Result<(), Fatal> {
    let Serve { endpoints, pool, listen_state, listen_admin, scrape_interval, scrape_interval_busy, staleness_max, log: _ } = args;
    let changes = changes(endpoints).await?;
    let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let name: Arc<str> = pool.into();
    let shared = Shared::new(u64::try_from(unix.as_millis()).unwrap_or(u64::MAX), rand::random(), vec![Arc::clone(&name)]);

    let state_listener = listen("state", listen_state).await?;
    let admin_listener = listen("admin", listen_admin).await?;
    let (trigger, shutdown) = shutdown::channel();
    let mut tasks: JoinSet<&'static str> = JoinSet::new();

    let scrape = ScrapeConfig {
        intervals: Intervals { idle: scrape_interval, busy: scrape_interval_busy },
        tls: EndpointTls::default(),
        ..ScrapeConfig::default()
    };
    let (scraper, _busy, _stats) = Scraper::try_new(&scrape).map_err(|e| Fatal::Usage(e.to_string()))?;
    let (targets, targets_seen) = watch::channel(Arc::from([]));
    let (events, scrapes) = mpsc::channel(SCRAPE_EVENTS_MAX);
    let engines = Engines::try_new(&[], DEFAULT_ENGINE, ENGINE_LABEL).map_err(|e| Fatal::Usage(e.to_string()))?;
    let settings = Settings {
        name,
        profile: ProfileSpec::default_profile(),
        staleness_max,
        incarnation_first: u32::try_from(unix.as_secs()).unwrap_or(1),
    };
    let feed = Feed {
        pool: Pool::new(settings),
        shared: Arc::clone(&shared),
        targets,
        scraping: Scraping { engines: Arc::new(engines), location: MetricsLocation::default() },
    };
    let stop = shutdown.clone();
    tasks.spawn(async move {
        feed.run(changes, scrapes, stop).await;
        "feed"
    });
    tasks.spawn(async move {
        scraper.run(targets_seen, events).await;
        "scraper"
    });
    tasks.spawn(serve_state(state_listener, Arc::clone(&shared), shutdown.clone()));
    tasks.spawn(serve_admin(admin_listener, Arc::clone(&shared), shutdown));
    tracing::info!(state = %listen_state, admin = %listen_admin, term = shared.term, "serving");

    let ended = tokio::select! {
        signal = signalled() => signal.map(|name| tracing::info!(signal = name, "stopping")),
        Some(task) = tasks.join_next() => Err(Fatal::TaskEnded(task.unwrap_or("a task that panicked"))),
    };
    trigger.pull();
    let all = async { while tasks.join_next().await.is_some() {} };
    if tokio::time::timeout(SHUTDOWN_DEADLINE, all).await.is_err() {
        tracing::warn!(after = ?SHUTDOWN_DEADLINE, "some tasks did not stop in time; leaving them");
    }
    ended
}

async fn changes(from: EndpointsFrom) -> Result<Changes, Fatal> {
    let EndpointsFrom { endpoints_file, endpoint } = from;
    if let Some(path) = endpoints_file {
        return Ok(discovery::file::follow(path));
    }
    let mut instances = Vec::with_capacity(endpoint.len());
    for given in endpoint {
        let address = resolve(&given).await?;
        instances.push(Instance {
            name: given,
            namespace: NAMESPACE_DEFAULT.to_owned(),
            address,
            labels: Vec::new(),
            metrics: Located::default(),
        });
    }
    discovery::validate(&instances).map_err(Fatal::Usage)?;
    Ok(discovery::fixed(instances))
}

/// Envoy is handed addresses, never names, so that header and host are the same bytes.
async fn resolve(given: &str) -> Result<SocketAddr, Fatal> {
    let unusable = |why: String| Fatal::Usage(format!("--endpoint {given}: {why}"));
    let mut addresses = tokio::net::lookup_host(given).await.map_err(|e| unusable(format!("{e} (give HOST:PORT)")))?;
    addresses.next().ok_or_else(|| unusable("the name has no address".to_owned()))
}

async fn listen(what: &'static str, address: SocketAddr) -> Result<TcpListener, Fatal> {
    TcpListener::bind(address).await.map_err(|source| Fatal::Listen { what, address, source })
}

async fn serve_state(listener: TcpListener, shared: Arc<Shared>, mut shutdown: Shutdown) -> &'static str {
    let state = StateServiceServer::new(StateServer::new(Arc::clone(&shared), shutdown.clone()))
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX);
    let eds = EndpointDiscoveryServiceServer::new(EdsServer::new(shared, shutdown.clone())).max_decoding_message_size(MESSAGE_BYTES_MAX);
    let served = tonic::transport::Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .add_service(state)
        .add_service(eds)
        .serve_with_incoming_shutdown(TcpIncoming::from(listener).with_nodelay(Some(true)), async move { shutdown.begun().await })
        .await;
    if let Err(error) = served {
        tracing::error!(%error, "state listener failed");
    }
    "state listener"
}

async fn serve_admin(listener: TcpListener, shared: Arc<Shared>, mut shutdown: Shutdown) -> &'static str {
    let served = axum::serve(listener, admin::router(shared)).with_graceful_shutdown(async move { shutdown.begun().await }).await;
    if let Err(error) = served {
        tracing::error!(%error, "admin listener failed");
    }
    "admin listener"
}

async fn signalled() -> Result<&'static str, Fatal> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate()).map_err(Fatal::Signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(Fatal::Signals)?;
    Ok(tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    })
}
