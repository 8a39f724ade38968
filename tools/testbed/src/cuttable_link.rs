//! A TCP link that tests can cut and tap. While the link is cut, it holds bytes back and keeps
//! connections open, as if packets were lost.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::Result;
use crate::ports::ReservedPort;

/// The maximum number of bytes of one read.
const PIECE_BYTES: usize = 16 * 1024;

/// A link with two ends. A client that connects to this end reaches the server at the other end,
/// unless the link is cut.
#[derive(Debug)]
pub struct CuttableLink {
    end: ReservedPort,
    other: Arc<Mutex<Option<SocketAddr>>>,
    connected: watch::Sender<bool>,
    sent: SentBytes,
    task: JoinHandle<()>,
}

/// The bytes that passed from this end to the other end.
type SentBytes = Arc<Mutex<Vec<u8>>>;

// === impl CuttableLink ===

impl CuttableLink {
    /// Creates a link whose other end is not connected: clients that connect wait. The caller must
    /// be in a tokio runtime.
    ///
    /// # Errors
    /// Fails if no port is free.
    pub async fn lay() -> Result<Self> {
        let end = ReservedPort::lease()?;
        let listener = TcpListener::bind(end.address()).await?;
        let other = Arc::<Mutex<Option<SocketAddr>>>::default();
        let whole = watch::Sender::new(false);
        let said = SentBytes::default();
        let task = tokio::spawn(accept(listener, other.clone(), whole.clone(), said.clone()));
        Ok(Self {
            end,
            other,
            connected: whole,
            sent: said,
            task,
        })
    }

    /// Returns the address of this end, to which clients connect.
    pub fn address(&self) -> SocketAddr {
        self.end.address()
    }

    /// Connects the other end to a server.
    pub fn connect_to(&self, other: SocketAddr) {
        *self.other.lock().unwrap_or_else(PoisonError::into_inner) = Some(other);
        self.mend();
    }

    /// Returns all bytes that have passed from this end to the other so far, on all connections.
    pub fn sent_bytes(&self) -> Vec<u8> {
        self.sent
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Cuts the link: no byte passes from now on.
    pub fn cut(&self) {
        self.connected.send_replace(false);
    }

    /// Reconnects the link: the bytes that were held back pass, and so do all later bytes.
    pub fn mend(&self) {
        self.connected.send_replace(true);
    }
}

impl Drop for CuttableLink {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(
    listener: TcpListener,
    other: Arc<Mutex<Option<SocketAddr>>>,
    whole: watch::Sender<bool>,
    said: SentBytes,
) {
    while let Ok((near, _)) = listener.accept().await {
        let other = other.clone();
        let mut intact = whole.subscribe();
        let receivers = (whole.subscribe(), whole.subscribe());
        let said = said.clone();
        tokio::spawn(async move {
            if intact.wait_for(|whole| *whole).await.is_err() {
                return;
            }
            let other = *other.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(other) = other else { return };
            let Ok(far) = TcpStream::connect(other).await else {
                return;
            };
            let _ = (near.set_nodelay(true), far.set_nodelay(true)); // an error costs only latency
            let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), far.into_split());
            tokio::join!(
                carry(near_in, far_out, receivers.0, Some(said)),
                carry(far_in, near_out, receivers.1, None)
            );
        });
    }
}

/// Copies bytes in one direction until the sender closes the connection.
async fn carry(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut intact: watch::Receiver<bool>,
    said: Option<SentBytes>,
) {
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        let read = from.read(&mut piece).await.unwrap_or(0);
        // The end of a stream, too, passes only while the link is not cut.
        if intact.wait_for(|whole| *whole).await.is_err() {
            return;
        }
        let passed = piece.get(..read).unwrap_or_default();
        if let Some(said) = &said {
            said.lock()
                .unwrap_or_else(PoisonError::into_inner)
                .extend_from_slice(passed);
        }
        if read == 0 || to.write_all(passed).await.is_err() {
            return;
        }
    }
}
