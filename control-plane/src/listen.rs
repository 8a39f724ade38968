//! Listeners: plain, TLS, or TLS that demands a client certificate; the same for every protocol above.
//!
//! Certificates are read again when their files change, so that they can be rotated without a restart. New files that do not fit together
//! (a certificate whose key is not there yet) leave the old ones in force, and say so.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use discovery::content::{self, Follow};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;

use crate::shutdown::Shutdown;

mod peer;
pub use peer::{IdentifyLayer, PeerInfo, PeerName, identify};

/// How long a TLS handshake may take; a peer on the same network needs milliseconds.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);

/// Handshakes at once: each is some milliseconds of CPU, and a thousand proxies may come back at the same moment.
const HANDSHAKES_MAX: usize = 256;

/// Connections accepted ahead of the server above.
const ACCEPTED_MAX: usize = 64;

/// Pause after the system refused to accept (mostly: no file descriptor is free).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Certificate files of one listener.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// Our certificate, with its chain, PEM.
    pub cert: PathBuf,
    /// Its key, PEM.
    pub key: PathBuf,
    /// Who signs clients' certificates; when given, every client must show one.
    pub client_ca: Option<PathBuf>,
}

/// How a listener is protected.
#[derive(Clone, Debug)]
pub enum Tls {
    /// Not at all.
    Off,
    /// With these files.
    Files(TlsFiles),
    /// With a certificate made for this life of the process, which nobody can check: nobody on the way can read along, no more.
    SelfSigned,
}

/// Connections ready to be served.
#[derive(Debug)]
pub struct Incoming {
    address: SocketAddr,
    connections: mpsc::Receiver<Connection>,
}

/// A connection, its handshake done.
#[derive(Debug)]
pub enum Connection {
    /// In clear.
    Plain(TcpStream),
    /// By TLS.
    Tls(Box<TlsStream<TcpStream>>),
}

/// Opens a listener. It ends with `shutdown`.
///
/// # Errors
/// Says why the address or the certificates cannot be used.
pub async fn listen(address: SocketAddr, tls: impl Into<Tls>, shutdown: Shutdown) -> io::Result<Incoming> {
    let tls = match tls.into() {
        Tls::Off => None,
        Tls::Files(files) => Some(follow(files, shutdown.clone()).await?),
        Tls::SelfSigned => Some(watch::channel(Arc::new(self_signed().map_err(io::Error::other)?)).1),
    };
    let listener = TcpListener::bind(address).await?;
    let address = listener.local_addr()?;
    let (sender, connections) = mpsc::channel(ACCEPTED_MAX);
    tokio::spawn(accept(listener, tls, sender, shutdown));
    Ok(Incoming { address, connections })
}

async fn accept(
    listener: TcpListener,
    tls: Option<watch::Receiver<Arc<ServerConfig>>>,
    connections: mpsc::Sender<Connection>,
    mut shutdown: Shutdown,
) {
    let handshakes = Arc::new(Semaphore::new(HANDSHAKES_MAX));
    loop {
        let (stream, peer) = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            },
            () = shutdown.begun() => return,
        };
        let _ = stream.set_nodelay(true); // only latency is at stake
        let Some(tls) = &tls else {
            if connections.send(Connection::Plain(stream)).await.is_err() {
                return;
            }
            continue;
        };
        let acceptor = TlsAcceptor::from(Arc::clone(&tls.borrow()));
        let connections = connections.clone();
        let Ok(permit) = Arc::clone(&handshakes).acquire_owned().await else { return };
        tokio::spawn(async move {
            let _permit = permit;
            match tokio::time::timeout(HANDSHAKE_MAX, acceptor.accept(stream)).await {
                Ok(Ok(stream)) => {
                    let _ = connections.send(Connection::Tls(Box::new(stream))).await;
                }
                Ok(Err(error)) => tracing::warn!(%peer, %error, "TLS handshake failed"),
                Err(_) => tracing::warn!(%peer, "TLS handshake took too long"),
            }
        });
    }
}

/// Reads the files, and again whenever they change.
async fn follow(files: TlsFiles, mut shutdown: Shutdown) -> io::Result<watch::Receiver<Arc<ServerConfig>>> {
    let (sender, receiver) = watch::channel(Arc::new(server_config(&files).await.map_err(io::Error::other)?));
    let mut follows: Vec<Follow> =
        [Some(&files.cert), Some(&files.key), files.client_ca.as_ref()].into_iter().flatten().map(Follow::new).collect();
    // What is there at first was just read.
    for follow in &mut follows {
        let _ = follow.changed().await;
    }
    tokio::spawn(async move {
        loop {
            let any = futures::future::select_all(follows.iter_mut().map(|f| Box::pin(f.changed())));
            tokio::select! {
                _ = any => {}
                () = shutdown.begun() => return,
            }
            match server_config(&files).await {
                Ok(config) => {
                    sender.send_replace(Arc::new(config));
                    tracing::info!(cert = %files.cert.display(), "new certificates in force");
                }
                Err(why) => tracing::error!(why, "new certificates cannot be used; the old ones stay"),
            }
        }
    });
    Ok(receiver)
}

async fn server_config(files: &TlsFiles) -> Result<ServerConfig, String> {
    let TlsFiles { cert, key, client_ca } = files;
    let chain = certificates(cert).await?;
    let key_pem = content::read(key).await.map_err(|e| e.to_string())?;
    let key = PrivateKeyDer::from_pem_slice(key_pem.as_bytes()).map_err(|e| format!("{}: {e}", key.display()))?;
    // Installed already is as good: everybody in this process installs the same.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let builder = match client_ca {
        None => ServerConfig::builder().with_no_client_auth(),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for authority in certificates(path).await? {
                roots.add(authority).map_err(|e| format!("{}: {e}", path.display()))?;
            }
            let verifier = WebPkiClientVerifier::builder(Arc::new(roots)).build().map_err(|e| format!("{}: {e}", path.display()))?;
            ServerConfig::builder().with_client_cert_verifier(verifier)
        }
    };
    let config = builder.with_single_cert(chain, key).map_err(|e| format!("{}: {e}", cert.display()))?;
    Ok(with_protocols(config))
}

fn self_signed() -> Result<ServerConfig, String> {
    let _ = rustls::crypto::ring::default_provider().install_default(); // as above
    let made = rcgen::generate_simple_self_signed(["switchpointd".to_owned(), "localhost".to_owned()]).map_err(|e| e.to_string())?;
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der())?;
    let config = ServerConfig::builder().with_no_client_auth().with_single_cert(vec![made.cert.der().clone()], key);
    config.map(with_protocols).map_err(|e| e.to_string())
}

fn with_protocols(mut config: ServerConfig) -> ServerConfig {
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    config
}

async fn certificates(path: &std::path::Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let pem = content::read(path).await.map_err(|e| e.to_string())?;
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    let chain = chain.map_err(|e| format!("{}: {e}", path.display()))?;
    if chain.is_empty() { Err(format!("{}: no certificate in it", path.display())) } else { Ok(chain) }
}

// === impl Tls ===

impl From<Option<TlsFiles>> for Tls {
    fn from(files: Option<TlsFiles>) -> Self {
        files.map_or(Self::Off, Self::Files)
    }
}

// === impl Incoming ===

impl Incoming {
    /// Where it listens; the port is the real one where 0 was asked for.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl futures::Stream for Incoming {
    type Item = io::Result<Connection>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.connections.poll_recv(cx).map(|connection| connection.map(Ok))
    }
}

impl axum::serve::Listener for Incoming {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        match self.connections.recv().await {
            Some(connection) => (connection, self.address),
            None => std::future::pending().await, // the listener is gone: the daemon is stopping
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }
}

// === impl Connection ===

impl Connection {
    fn tcp(&self) -> &TcpStream {
        match self {
            Self::Plain(stream) => stream,
            Self::Tls(stream) => stream.get_ref().0,
        }
    }

    fn name(&self) -> PeerName {
        let Self::Tls(stream) = self else { return PeerName(None) };
        stream.get_ref().1.peer_certificates().and_then(<[_]>::first).map(PeerName::of).unwrap_or_default()
    }
}

impl Connected for Connection {
    type ConnectInfo = PeerInfo;

    fn connect_info(&self) -> PeerInfo {
        PeerInfo { tcp: self.tcp().connect_info(), name: self.name() }
    }
}

impl AsyncRead for Connection {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, buffer),
            Self::Tls(stream) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(cx, buffer),
            Self::Tls(stream) => Pin::new(stream).poll_write(cx, buffer),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
