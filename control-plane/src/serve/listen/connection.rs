//! One accepted connection.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::time::Sleep;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;

use super::ConnectionPermit;
use super::peer::{PeerInfo, PeerName};

/// The maximum time for which a peer may read none of the bytes that are sent. HTTP/2 flow control
/// holds back a slow stream alone, so a whole connection stalls only if the peer reads nothing at
/// all.
pub const WRITE_STALL_MAX: Duration = Duration::from_secs(30);

/// A connection whose TLS handshake is done. Reads and writes fail when the listener has to close
/// the connection.
#[derive(Debug)]
pub struct ServerConnection {
    io: ConnectionIo,
    permit: Arc<ConnectionPermit>,
    /// The signal to close; `None` once it was received.
    closed: Option<oneshot::Receiver<()>>,
    /// The timer that runs while a write waits for the peer.
    stalled: Option<Pin<Box<Sleep>>>,
}

/// The transport below HTTP.
#[derive(Debug)]
pub(super) enum ConnectionIo {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

// === impl ServerConnection ===

impl ServerConnection {
    pub(super) fn new(
        io: ConnectionIo,
        permit: Arc<ConnectionPermit>,
        closed: oneshot::Receiver<()>,
    ) -> Self {
        Self {
            io,
            permit,
            closed: Some(closed),
            stalled: None,
        }
    }

    /// Fails if the listener wants to close the connection.
    fn poll_closed(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if let Some(closed) = &mut self.closed
            && Pin::new(closed).poll(cx).is_pending()
        {
            return Ok(());
        }
        self.closed = None;
        Err(io::Error::new(
            io::ErrorKind::ConnectionAborted,
            "silent for too long, or one connection too many",
        ))
    }

    /// Limits the time of a write to [`WRITE_STALL_MAX`].
    fn in_time<T>(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let stalled = self
            .stalled
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(WRITE_STALL_MAX)));
        ready!(stalled.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the peer reads nothing",
        )))
    }
}

impl Connected for ServerConnection {
    type ConnectInfo = PeerInfo;

    fn connect_info(&self) -> PeerInfo {
        let name = match &self.io {
            ConnectionIo::Plain(_) => PeerName(None),
            ConnectionIo::Tls(stream) => stream
                .get_ref()
                .1
                .peer_certificates()
                .and_then(<[_]>::first)
                .map(PeerName::from_certificate)
                .unwrap_or_default(),
        };
        let tcp = match &self.io {
            ConnectionIo::Plain(stream) => stream,
            ConnectionIo::Tls(stream) => stream.get_ref().0,
        };
        PeerInfo {
            tcp: tcp.connect_info(),
            name,
            permit: Arc::downgrade(&self.permit),
        }
    }
}

impl AsyncRead for ServerConnection {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.poll_closed(cx)?;
        match &mut this.io {
            ConnectionIo::Plain(stream) => Pin::new(stream).poll_read(cx, buffer),
            ConnectionIo::Tls(stream) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for ServerConnection {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = match &mut this.io {
            ConnectionIo::Plain(stream) => Pin::new(stream).poll_write(cx, buffer),
            ConnectionIo::Tls(stream) => Pin::new(stream).poll_write(cx, buffer),
        };
        this.in_time(cx, written)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let flushed = match &mut this.io {
            ConnectionIo::Plain(stream) => Pin::new(stream).poll_flush(cx),
            ConnectionIo::Tls(stream) => Pin::new(stream).poll_flush(cx),
        };
        this.in_time(cx, flushed)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let shut = match &mut this.io {
            ConnectionIo::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            ConnectionIo::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        };
        this.in_time(cx, shut)
    }
}
