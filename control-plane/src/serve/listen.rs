//! Listeners with plaintext, TLS, or TLS with client certificates. Every protocol uses the same
//! listeners.
//!
//! The accept loop waits for nothing but the next connection. Before its first request, the cost of
//! a connection is bounded in time by [`FIRST_REQUEST_WAIT_MAX`] and in number by
//! [`ConnectionBudget`]. After the first request, HTTP/2 pings, TCP keepalive and
//! [`WRITE_STALL_MAX`] bound the cost.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use rustls::ServerConfig;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_rustls::TlsAcceptor;

use crate::shutdown::Shutdown;

mod budget;
mod client_verifier;
mod connection;
mod connection_limits;
mod peer;
mod tls;
pub use budget::{ConnectionBudget, ListenerName, raise_descriptors};
pub use connection::{ServerConnection, WRITE_STALL_MAX};
pub use connection_limits::FIRST_REQUEST_WAIT_MAX;
pub use peer::{IdentifyLayer, PeerInfo, PeerName, identify};
pub use tls::{ServerTls, TlsFiles};

use connection::ConnectionIo;
use connection_limits::{ClosedConnections, ConnectionLimits};

/// The maximum number of connections with a finished handshake that wait for the server. Further
/// connections wait in their own tasks.
const READY_MAX: usize = 64;

/// The pause after the system refused to accept a connection, mostly because there was no free file
/// descriptor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The interval at which connections without a request are closed.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// The interval at which the log reports the number of closed connections.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// The maximum number of failed handshakes that are logged one by one in [`REPORT_INTERVAL`].
/// Operators see the cause, and a flood does not fill the disk.
const FAILURES_SHOWN_MAX: u64 = 10;

/// The idle time before TCP keepalive begins to probe. On connections without HTTP/2 pings, a peer
/// that disappeared is noticed after this time + interval * probes.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 3;

/// Connections ready to be served.
#[derive(Debug)]
pub struct IncomingConnections {
    address: SocketAddr,
    connections: mpsc::Receiver<ServerConnection>,
}

/// The permit of a connection to be open at its listener. The permit is returned when it is
/// dropped.
#[derive(Debug)]
struct ConnectionPermit {
    rooms: Arc<Mutex<ConnectionLimits>>,
    address: IpAddr,
    number: u64,
    requested: AtomicBool,
}

/// The accept loop of one listener.
struct Acceptor {
    listener: ListenerName,
    socket: TcpListener,
    tls: Option<watch::Receiver<Arc<ServerConfig>>>,
    rooms: Arc<Mutex<ConnectionLimits>>,
    ready: mpsc::Sender<ServerConnection>,
    /// The number of handshakes that failed since the last report.
    failed: Arc<AtomicU64>,
}

/// Opens a listener, which ends with `shutdown`.
///
/// # Errors
/// Fails if the address cannot be bound, or if the certificates are invalid.
pub async fn listen(
    listener: ListenerName,
    address: SocketAddr,
    tls: impl Into<ServerTls>,
    shutdown: Shutdown,
) -> io::Result<IncomingConnections> {
    let tls = tls::configuration(tls.into(), &shutdown).await?;
    let socket = TcpListener::bind(address).await?;
    let address = socket.local_addr()?;
    let (ready, connections) = mpsc::channel(READY_MAX);
    let rooms = Arc::new(Mutex::new(ConnectionLimits::new(listener.budget())));
    let accepting = Acceptor {
        listener,
        socket,
        tls,
        rooms,
        ready,
        failed: Arc::default(),
    };
    tokio::spawn(accepting.run(shutdown));
    Ok(IncomingConnections {
        address,
        connections,
    })
}

// === impl Acceptor ===

impl Acceptor {
    async fn run(self, mut shutdown: Shutdown) {
        let mut sweep = tokio::time::interval(SWEEP_INTERVAL);
        sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut reported = ClosedConnections::default();
        let mut reported_at = Instant::now();
        let mut refused = false;
        loop {
            tokio::select! {
                accepted = self.socket.accept() => match accepted {
                    Ok((stream, peer)) => {
                        refused = false;
                        self.admit(stream, peer);
                    }
                    Err(error) => {
                        if !std::mem::replace(&mut refused, true) {
                            tracing::warn!(listener = self.listener.name(), %error, "cannot accept connections");
                        }
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                },
                _ = sweep.tick() => {
                    lock(&self.rooms).sweep(Instant::now());
                    if reported_at.elapsed() >= REPORT_INTERVAL {
                        reported_at = Instant::now();
                        self.report(&mut reported);
                    }
                }
                () = shutdown.begun() => return,
                () = self.ready.closed() => return,
            }
        }
    }

    /// Admits a connection and starts a task for its handshake.
    fn admit(&self, stream: TcpStream, peer: SocketAddr) {
        let address = peer.ip().to_canonical();
        let Some((number, closed)) = lock(&self.rooms).admit(address, Instant::now()) else {
            return;
        };
        let permit = Arc::new(ConnectionPermit {
            rooms: Arc::clone(&self.rooms),
            address,
            number,
            requested: AtomicBool::new(false),
        });
        let acceptor = self
            .tls
            .as_ref()
            .map(|tls| TlsAcceptor::from(Arc::clone(&tls.borrow())));
        let ready = self.ready.clone();
        let failed = Arc::clone(&self.failed);
        tokio::spawn(async move {
            match shake_hands(stream, acceptor, permit, closed).await {
                Ok(Some(connection)) => drop(ready.send(connection).await),
                Ok(None) => {}
                Err(error) => {
                    if failed.fetch_add(1, Ordering::Relaxed) < FAILURES_SHOWN_MAX {
                        tracing::warn!(%peer, %error, "TLS handshake failed");
                    }
                }
            }
        });
    }

    /// Logs one line for all connections closed since the last report, so that a flood of
    /// connections does not fill the log.
    fn report(&self, reported: &mut ClosedConnections) {
        let closed = lock(&self.rooms).closed();
        let failed = self.failed.swap(0, Ordering::Relaxed);
        let not_shown = failed.saturating_sub(FAILURES_SHOWN_MAX);
        if closed == *reported && not_shown == 0 {
            return;
        }
        tracing::warn!(
            listener = self.listener.name(),
            silent = closed.silent - reported.silent,
            too_many = closed.crowded - reported.crowded,
            handshakes_failed_not_shown = not_shown,
            "connections closed"
        );
        *reported = closed;
    }
}

/// Prepares the socket and does the TLS handshake. Returns `None` if the connection had to be
/// closed meanwhile.
async fn shake_hands(
    stream: TcpStream,
    acceptor: Option<TlsAcceptor>,
    permit: Arc<ConnectionPermit>,
    mut closed: oneshot::Receiver<()>,
) -> io::Result<Option<ServerConnection>> {
    let _ = stream.set_nodelay(true); // an error costs only latency
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE_IDLE)
        .with_interval(KEEPALIVE_INTERVAL)
        .with_retries(KEEPALIVE_PROBES);
    SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
    let io = match acceptor {
        None => ConnectionIo::Plain(stream),
        Some(acceptor) => tokio::select! {
            accepted = acceptor.accept(stream) => ConnectionIo::Tls(Box::new(accepted?)),
            _ = &mut closed => return Ok(None),
        },
    };
    Ok(Some(ServerConnection::new(io, permit, closed)))
}

fn lock(rooms: &Mutex<ConnectionLimits>) -> MutexGuard<'_, ConnectionLimits> {
    rooms.lock().unwrap_or_else(PoisonError::into_inner)
}

// === impl ConnectionPermit ===

impl ConnectionPermit {
    /// Records that the connection made a request.
    fn mark_requested(&self) {
        if !self.requested.swap(true, Ordering::Relaxed) {
            lock(&self.rooms).mark_requested(self.address, self.number);
        }
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        lock(&self.rooms).remove(self.address, self.number);
    }
}

// === impl IncomingConnections ===

impl IncomingConnections {
    /// Returns the address of the listener, with the actual port if port 0 was configured.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl futures::Stream for IncomingConnections {
    type Item = io::Result<ServerConnection>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.connections
            .poll_recv(cx)
            .map(|connection| connection.map(Ok))
    }
}
