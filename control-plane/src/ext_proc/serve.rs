//! The front's listeners and tasks.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use exchange::{DestinationFormat, ObjectiveHeader, Settings};
use tokio::task::JoinSet;
use tonic::transport::Server;

use super::{CONNECTION_WINDOW_BYTES, ExtProcServer, Front, STREAM_WINDOW_BYTES, STREAMS_PER_CONNECTION_MAX, health};
use crate::args::{self, ExtProcArgs};
use crate::listen::{Incoming, Tls, TlsFiles, listen};
use crate::run::Fatal;
use crate::shared::Shared;
use crate::shutdown::Shutdown;

/// How often a silent connection is asked whether it lives, and how long it may take to answer: the picks of a gateway that vanished without a
/// word count for no longer than the sum.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);

/// The front, listening.
#[derive(Debug)]
pub struct Listening {
    ext_proc: Incoming,
    health: Option<Incoming>,
    settings: Settings,
}

// === impl Listening ===

impl Listening {
    /// Opens the listeners; `None` where none is wanted.
    ///
    /// # Errors
    /// [`Fatal::Listen`] says which cannot be opened.
    pub async fn open(args: ExtProcArgs, shutdown: &Shutdown) -> Result<Option<Self>, Fatal> {
        let Some(address) = args.listen_ext_proc.0 else { return Ok(None) };
        let health = match args.listen_health.0 {
            Some(address) => Some(open("health", address, Tls::Off, shutdown).await?),
            None => None,
        };
        let settings = settings(&args);
        let ext_proc = open("ext-proc", address, tls(args), shutdown).await?;
        Ok(Some(Self { ext_proc, health, settings }))
    }

    /// Where gateways ask.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.ext_proc.address()
    }

    /// Where health is asked for.
    #[must_use]
    pub fn health_address(&self) -> Option<SocketAddr> {
        self.health.as_ref().map(Incoming::address)
    }

    /// Serves until `shutdown`.
    pub async fn spawn(self, tasks: &mut JoinSet<&'static str>, shared: &Arc<Shared>, shutdown: &Shutdown) {
        let Self { ext_proc, health: probes, settings } = self;
        let front = Front::new(&shared.pool_names);
        let _ = shared.front_streams.set(Arc::clone(front.streams())); // there is one front
        let (health, asked) = health().await;
        let server = ExtProcServer::new(Arc::clone(&front), &settings, shutdown.clone()).into_service();
        let router = Server::builder()
            .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
            .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
            .max_concurrent_streams(STREAMS_PER_CONNECTION_MAX)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .add_service(server)
            .add_service(asked.clone());
        let mut stop = shutdown.clone();
        tasks.spawn(async move {
            ended(router.serve_with_incoming_shutdown(ext_proc, async move { stop.begun().await }).await, "ext_proc listener")
        });
        if let Some(probes) = probes {
            let (router, mut stop) = (Server::builder().add_service(asked), shutdown.clone());
            tasks.spawn(async move {
                ended(router.serve_with_incoming_shutdown(probes, async move { stop.begun().await }).await, "health listener")
            });
        }
        let (shared, stop) = (Arc::clone(shared), shutdown.clone());
        tasks.spawn(async move {
            front.keep(shared, stop, health).await;
            "the ext_proc front"
        });
    }
}

fn ended(served: Result<(), tonic::transport::Error>, what: &'static str) -> &'static str {
    if let Err(error) = served {
        tracing::error!(%error, what, "failed");
    }
    what
}

async fn open(what: &'static str, address: SocketAddr, tls: Tls, shutdown: &Shutdown) -> Result<Incoming, Fatal> {
    listen(address, tls, shutdown.clone()).await.map_err(|source| Fatal::Listen { what, address, source })
}

fn tls(args: ExtProcArgs) -> Tls {
    let ExtProcArgs { ext_proc_tls_cert, ext_proc_tls_key, ext_proc_tls_client_ca, ext_proc_plaintext, .. } = args;
    match ext_proc_tls_cert.zip(ext_proc_tls_key) {
        Some((cert, key)) => Tls::Files(TlsFiles { cert, key, client_ca: ext_proc_tls_client_ca }),
        None if ext_proc_plaintext => Tls::Off,
        None => Tls::SelfSigned,
    }
}

/// Those of all exchanges, but for what the command line says.
fn settings(args: &ExtProcArgs) -> Settings {
    Settings {
        destination_format: match args.ext_proc_destination_format {
            args::DestinationFormat::Single => DestinationFormat::Single,
            args::DestinationFormat::List => DestinationFormat::List,
        },
        objective_header: match args.ext_proc_objective_header {
            args::ObjectiveHeader::Ignore => ObjectiveHeader::Ignore,
            args::ObjectiveHeader::Trust => ObjectiveHeader::Trust,
        },
        explain: args.ext_proc_explain,
        ..Settings::default()
    }
}
