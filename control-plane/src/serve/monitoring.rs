//! The listeners for probes, Prometheus and operators: health, admin and metrics. These listeners
//! are open from the start, before the pools have been read.
//!
//! When the daemon has started, the listeners stay open and only their answers change. So a probe
//! never finds the port closed.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tonic::codegen::Service;
use tonic::service::Routes;
use tonic::transport::Server;

use crate::cli::args::{AdminTls, ServeArgs};
use crate::error::FatalError;
use crate::serve::admin;
use crate::serve::admin_token::{self, BearerToken};
use crate::serve::foreign_pages::{self, AdminHosts};
use crate::serve::health::HealthChecks;
use crate::serve::listen::{
    IncomingConnections, ListenerName, ServerTls, TlsFiles, identify, listen,
};
use crate::serve::shown_state::ShownState;
use crate::shutdown::Shutdown;

/// The interval at which an idle connection is pinged. The answer may take [`KEEPALIVE_TIMEOUT`]. A
/// proxy that disappeared is noticed within the sum of both times, long before the removal of an
/// endpoint stops waiting for the proxy.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// The maximum time that the answer to a ping may take: see [`KEEPALIVE_INTERVAL`].
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);

/// The maximum number of open HTTP/2 streams of one connection. An Envoy needs a few: the state
/// stream or some calls, and an EDS stream. An answer that the client does not read stays in
/// memory.
const STREAMS_PER_CONNECTION_MAX: u32 = 64;

/// The maximum number of open HTTP/2 streams of one connection to the health listener. A probe
/// needs one stream. Without a limit, a pod could fill the memory with `Watch` streams, which never
/// end and need no certificate.
const HEALTH_STREAMS_PER_CONNECTION_MAX: u32 = 16;

/// The maximum time that a request may take, including its body. The slowest page takes
/// milliseconds.
const REQUEST_MAX: Duration = Duration::from_secs(30);

/// The listeners and their answers.
#[derive(Debug)]
pub struct MonitoringServer {
    /// The address of the admin routes.
    pub admin_address: SocketAddr,
    /// The address of the metrics listener, if there is one.
    pub metrics_address: Option<SocketAddr>,
    /// The address of gRPC health, if it is served.
    pub health_address: Option<SocketAddr>,
    /// The services that gRPC health reports.
    pub health: HealthChecks,
    admin: watch::Sender<Router>,
    metrics: watch::Sender<Router>,
}

// === impl MonitoringServer ===

impl MonitoringServer {
    /// Opens the listeners. At first they answer that the daemon is alive but not ready.
    ///
    /// # Errors
    /// Returns [`FatalError`] if a listener cannot be opened, or the token cannot be read.
    pub async fn open(
        args: &ServeArgs,
        tasks: &mut JoinSet<&'static str>,
        shutdown: &Shutdown,
    ) -> Result<Self, FatalError> {
        let tls = admin_tls(&args.admin_tls);
        let token = match args.admin_tls.admin_token_file.clone() {
            Some(file) => Some(
                BearerToken::follow(file, shutdown.clone())
                    .await
                    .map_err(|why| FatalError::Usage(format!("--admin-token-file: {why}")))?,
            ),
            None => None,
        };
        let (admin, admin_pages) = watch::channel(admin::starting());
        let (metrics, metrics_pages) = watch::channel(admin::starting());
        let health = HealthChecks::new().await;

        let incoming = open(ListenerName::Admin, args.listen_admin, tls, shutdown).await?;
        let admin_address = incoming.address();
        tasks.spawn(serve_pages(
            incoming,
            guarded(current(admin_pages), admin_hosts(&args.admin_tls), token),
            "admin listener",
            shutdown.clone(),
        ));
        let metrics_address = match args.listen_metrics.0 {
            None => None,
            Some(address) => {
                let incoming =
                    open(ListenerName::Metrics, address, ServerTls::Off, shutdown).await?;
                let address = incoming.address();
                tasks.spawn(serve_pages(
                    incoming,
                    current(metrics_pages),
                    "metrics listener",
                    shutdown.clone(),
                ));
                Some(address)
            }
        };
        let health_address = match args.ext_proc.listen_health.0 {
            None => None,
            Some(address) => {
                let incoming =
                    open(ListenerName::Health, address, ServerTls::Off, shutdown).await?;
                let address = incoming.address();
                tasks.spawn(serve_health(incoming, health.clone(), shutdown.clone()));
                Some(address)
            }
        };
        let shown = |address: Option<SocketAddr>| address.map(tracing::field::display);
        tracing::info!(admin = %admin_address, metrics = shown(metrics_address), health = shown(health_address), "answering probes");
        Ok(Self {
            admin_address,
            metrics_address,
            health_address,
            health,
            admin,
            metrics,
        })
    }

    /// Switches the listeners to the state of this daemon, which has started.
    pub fn shows(&self, state: ShownState) {
        let _starting = self
            .metrics
            .send_replace(admin::metrics_router(state.clone()));
        let _starting = self.admin.send_replace(admin::router(state));
    }
}

/// Forwards each request to the current routes.
fn current(pages: watch::Receiver<Router>) -> Router {
    Router::new().fallback(move |request: Request| {
        let mut router = pages.borrow().clone();
        async move { router.call(request).await }
    })
}

fn guarded(router: Router, hosts: AdminHosts, token: Option<BearerToken>) -> Router {
    let router = match token {
        Some(token) => router.layer(from_fn_with_state(token, admin_token::guard)),
        None => router,
    };
    router.layer(from_fn_with_state(hosts, foreign_pages::guard))
}

fn admin_hosts(args: &AdminTls) -> AdminHosts {
    if args.admin_token_file.is_some() || args.admin_tls_cert.is_some() {
        return AdminHosts::Any;
    }
    AdminHosts::Only(args.admin_hosts.as_slice().into())
}

fn admin_tls(args: &AdminTls) -> ServerTls {
    let AdminTls {
        admin_tls_cert,
        admin_tls_key,
        admin_tls_client_ca,
        ..
    } = args.clone();
    admin_tls_cert
        .zip(admin_tls_key)
        .map(|(cert, key)| TlsFiles {
            cert,
            key,
            client_ca: admin_tls_client_ca,
        })
        .into()
}

/// Opens one listener of the daemon.
///
/// # Errors
/// Returns [`FatalError::Listen`] if the listener cannot be opened.
pub async fn open(
    listener: ListenerName,
    address: SocketAddr,
    tls: impl Into<ServerTls>,
    shutdown: &Shutdown,
) -> Result<IncomingConnections, FatalError> {
    listen(listener, address, tls, shutdown.clone())
        .await
        .map_err(|source| FatalError::Listen {
            what: listener.name(),
            address,
            source,
        })
}

async fn serve_pages(
    incoming: IncomingConnections,
    router: Router,
    what: &'static str,
    mut shutdown: Shutdown,
) -> &'static str {
    let served = server()
        .accept_http1(true)
        .layer(identify())
        .add_routes(Routes::from(router.layer(from_fn(in_time))))
        .serve_with_incoming_shutdown(incoming, async move { shutdown.begun().await })
        .await;
    ended(served, what)
}

async fn in_time(request: Request, next: Next) -> Response {
    match tokio::time::timeout(REQUEST_MAX, next.run(request)).await {
        Ok(response) => response,
        Err(_) => (StatusCode::REQUEST_TIMEOUT, "the request took too long\n").into_response(),
    }
}

async fn serve_health(
    incoming: IncomingConnections,
    health: HealthChecks,
    mut shutdown: Shutdown,
) -> &'static str {
    let served = server()
        .max_concurrent_streams(HEALTH_STREAMS_PER_CONNECTION_MAX)
        .layer(identify())
        .add_service(health.service())
        .serve_with_incoming_shutdown(incoming, async move { shutdown.begun().await })
        .await;
    ended(served, "health listener")
}

/// Creates a server that notices dead connections, and limits the streams of each connection.
pub fn server() -> Server {
    Server::builder()
        .max_concurrent_streams(STREAMS_PER_CONNECTION_MAX)
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
}

/// Logs the error of a listener's task, if any, and returns its name.
pub fn ended(served: Result<(), tonic::transport::Error>, what: &'static str) -> &'static str {
    if let Err(error) = served {
        tracing::error!(%error, what, "failed");
    }
    what
}
