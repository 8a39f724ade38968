//! Sockets that can fail: an accept loop that can close its listening socket, and connections that
//! end with a TCP reset.
//!
//! To reset a connection is to set SO_LINGER to 0 and close it. Because hyper owns the TCP stream,
//! the reset happens when hyper drops it: after [`ServedConnection::reset`], the drop sends the
//! last bytes, if any, and then RST. With HTTP/2 this ends all streams of the connection.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use http::{Request, Response};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

/// The length of the accept queue, which is Linux's default. The server must not drop connections
/// in a burst.
const BACKLOG: u32 = 4096;
/// Delay before the next try after a failed accept, for example because no file descriptor is free.
const ACCEPT_RETRY: Duration = Duration::from_millis(20);
/// The maximum number of streams of an HTTP/2 connection. With hyper's default of 200, a burst
/// would queue in the proxy.
const H2_STREAMS_MAX: u32 = 4096;

/// A connection as seen by its requests.
#[derive(Debug, Default)]
pub(super) struct ServedConnection {
    pub id: u64,
    resetting: AtomicBool,
    parting: OnceLock<Bytes>,
    wake: Notify,
}

impl ServedConnection {
    /// Ends the connection with RST, after writing `parting` directly to the socket.
    pub(super) fn reset(&self, parting: &'static [u8]) {
        let _ = self.parting.set(Bytes::from_static(parting)); // only the first reset has an effect
        self.resetting.store(true, Ordering::Release);
        self.wake.notify_one();
    }
}

/// Commands to the accept loop, each with a channel that reports when the command is done.
pub(super) type SocketCommands = mpsc::UnboundedReceiver<(SocketCommand, oneshot::Sender<()>)>;

#[derive(Debug)]
pub(super) enum SocketCommand {
    /// Close the listening socket and reset all connections except `spare`. Open the socket again
    /// after `reopen_after`.
    Close {
        reopen_after: Option<Duration>,
        spare: Option<u64>,
    },
    Open,
    /// Reset all connections except `spare`.
    ResetAll {
        spare: Option<u64>,
    },
    /// Accept no more connections, let requests end, then stop.
    Drain,
}

enum ListenState {
    Open(TcpListener),
    /// The socket is bound but does not listen. So connections are refused, and no other process
    /// can take the port.
    Closed {
        held: Option<TcpSocket>,
        until: Option<Instant>,
    },
}

impl ListenState {
    async fn accept(&self) -> io::Result<TcpStream> {
        match self {
            Self::Open(listener) => Ok(listener.accept().await?.0),
            Self::Closed { .. } => std::future::pending().await,
        }
    }

    async fn reopens(&self) {
        match self {
            Self::Closed {
                until: Some(until), ..
            } => tokio::time::sleep_until(*until).await,
            _ => std::future::pending().await,
        }
    }

    fn close(self, address: SocketAddr, reopen_after: Option<Duration>) -> Self {
        drop(self);
        let until = reopen_after.map(|after| Instant::now() + after);
        Self::Closed {
            held: bind(address)
                .inspect_err(|error| tracing::warn!(%address, %error, "cannot hold the port"))
                .ok(),
            until,
        }
    }

    fn open(self, address: SocketAddr) -> Self {
        let Self::Closed { held, .. } = self else {
            return self;
        };
        match held
            .map_or_else(|| bind(address), Ok)
            .and_then(|socket| socket.listen(BACKLOG))
        {
            Ok(listener) => Self::Open(listener),
            Err(error) => {
                tracing::warn!(%address, %error, "cannot listen again; retrying");
                Self::Closed {
                    held: None,
                    until: Some(Instant::now() + ACCEPT_RETRY),
                }
            }
        }
    }
}

fn bind(address: SocketAddr) -> io::Result<TcpSocket> {
    let socket = if address.is_ipv4() {
        TcpSocket::new_v4()?
    } else {
        TcpSocket::new_v6()?
    };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    Ok(socket)
}

pub(super) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    bind(address)?.listen(BACKLOG)
}

/// Serves connections until [`SocketCommand::Drain`] arrives. Dropping the future closes all
/// connections.
pub(super) async fn serve<H, F>(
    address: SocketAddr,
    listener: TcpListener,
    mut orders: SocketCommands,
    handler: H,
) where
    H: Fn(Arc<ServedConnection>, Request<Incoming>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<Body>> + Send + 'static,
{
    let mut door = ListenState::Open(listener);
    let mut connections = JoinSet::new();
    let (resets, _) = watch::channel(None);
    let (drain, _) = watch::channel(());
    for id in 1.. {
        let accepted = loop {
            tokio::select! {
                accepted = door.accept() => break accepted,
                () = door.reopens() => door = door.open(address),
                Some(_) = connections.join_next() => {}
                order = orders.recv() => {
                    let (order, done) = order.unzip();
                    match order {
                        Some(SocketCommand::Close { reopen_after, spare }) => {
                            door = door.close(address, reopen_after);
                            resets.send_replace(spare);
                        }
                        Some(SocketCommand::Open) => door = door.open(address),
                        Some(SocketCommand::ResetAll { spare }) => { resets.send_replace(spare); }
                        Some(SocketCommand::Drain) | None => {
                            drop(door);
                            drain.send_replace(());
                            while connections.join_next().await.is_some() {}
                            return;
                        }
                    }
                    let _ = done.map(|done| done.send(())); // the sender may be gone
                }
            }
        };
        match accepted {
            Ok(stream) => {
                let connection = Arc::new(ServedConnection {
                    id,
                    ..ServedConnection::default()
                });
                let ends = ConnectionEnd {
                    resets: resets.subscribe(),
                    drain: drain.subscribe(),
                };
                connections.spawn(serve_connection(stream, connection, ends, handler.clone()));
            }
            Err(error) => {
                tracing::debug!(%error, "accept failed");
                tokio::time::sleep(ACCEPT_RETRY).await;
            }
        }
    }
}

/// The channels by which the accept loop ends a connection.
struct ConnectionEnd {
    /// Receives a value when all connections must be reset: the id of the connection that stays
    /// open, or `None`.
    resets: watch::Receiver<Option<u64>>,
    drain: watch::Receiver<()>,
}

async fn serve_connection<H, F>(
    stream: TcpStream,
    connection: Arc<ServedConnection>,
    mut ends: ConnectionEnd,
    handler: H,
) where
    H: Fn(Arc<ServedConnection>, Request<Incoming>) -> F + Send + Sync + 'static,
    F: Future<Output = Response<Body>> + Send + 'static,
{
    let _ = stream.set_nodelay(true); // an error costs only latency
    let socket = TokioIo::new(FaultySocket {
        stream,
        connection: connection.clone(),
    });
    let for_requests = connection.clone();
    let service = hyper::service::service_fn(move |request| {
        let reply = handler(for_requests.clone(), request);
        async move { Ok::<_, Infallible>(reply.await) }
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http2().max_concurrent_streams(H2_STREAMS_MAX);
    let mut serving = pin!(builder.serve_connection(socket, service));
    loop {
        tokio::select! {
            biased;
            () = connection.wake.notified() => return,
            reset = ends.resets.changed() => {
                let spared = reset.is_ok() && *ends.resets.borrow_and_update() == Some(connection.id);
                if !spared {
                    connection.reset(b"");
                    return;
                }
            }
            Ok(()) = ends.drain.changed() => serving.as_mut().graceful_shutdown(),
            ended = serving.as_mut() => {
                if let Err(error) = ended {
                    tracing::debug!(%error, "connection ended");
                }
                return;
            }
        }
    }
}

/// A TCP stream that can end with a reset.
struct FaultySocket {
    stream: TcpStream,
    connection: Arc<ServedConnection>,
}

impl Drop for FaultySocket {
    fn drop(&mut self) {
        if self.connection.resetting.load(Ordering::Acquire) {
            if let Some(parting) = self
                .connection
                .parting
                .get()
                .filter(|parting| !parting.is_empty())
            {
                let _ = self.stream.try_write(parting); // if the socket buffer is full, the client gets no parting bytes
            }
            let _ = self.stream.set_zero_linger(); // if this fails, the connection closes without a reset, and the test sees that
        }
    }
}

impl AsyncRead for FaultySocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for FaultySocket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
