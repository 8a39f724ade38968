//! The network between two parts, to be cut: bytes that are under way stay there, and connections stand, as when packets are lost. And to be tapped.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::Result;
use crate::ports::ReservedPort;

/// What one read takes at most, in bytes.
const PIECE_BYTES: usize = 16 * 1024;

/// A cable. Whoever connects to this end talks to whoever listens at the other, as long as it is whole.
#[derive(Debug)]
pub struct CuttableLink {
    end: ReservedPort,
    other: Arc<Mutex<Option<SocketAddr>>>,
    connected: watch::Sender<bool>,
    sent: SentBytes,
    task: JoinHandle<()>,
}

/// What went from this end to the other.
type SentBytes = Arc<Mutex<Vec<u8>>>;

// === impl CuttableLink ===

impl CuttableLink {
    /// Lays a cable whose other end is in the air: what connects waits. Must be called in a tokio runtime.
    ///
    /// # Errors
    /// If there is no port.
    pub async fn lay() -> Result<Self> {
        let end = ReservedPort::lease()?;
        let listener = TcpListener::bind(end.address()).await?;
        let (other, whole) = (Arc::<Mutex<Option<SocketAddr>>>::default(), watch::Sender::new(false));
        let said = SentBytes::default();
        let task = tokio::spawn(accept(listener, other.clone(), whole.clone(), said.clone()));
        Ok(Self { end, other, connected: whole, sent: said, task })
    }

    /// Where to connect.
    pub fn address(&self) -> SocketAddr {
        self.end.address()
    }

    /// Puts the other end where somebody listens.
    pub fn connect_to(&self, other: SocketAddr) {
        *self.other.lock().unwrap_or_else(PoisonError::into_inner) = Some(other);
        self.mend();
    }

    /// All bytes so far that went from this end to the other, on all connections.
    pub fn sent_bytes(&self) -> Vec<u8> {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Nothing passes from now on.
    pub fn cut(&self) {
        self.connected.send_replace(false);
    }

    /// What was held back passes, and all that comes.
    pub fn mend(&self) {
        self.connected.send_replace(true);
    }
}

impl Drop for CuttableLink {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(listener: TcpListener, other: Arc<Mutex<Option<SocketAddr>>>, whole: watch::Sender<bool>, said: SentBytes) {
    while let Ok((near, _)) = listener.accept().await {
        let (other, mut intact, receivers, said) = (other.clone(), whole.subscribe(), (whole.subscribe(), whole.subscribe()), said.clone());
        tokio::spawn(async move {
            if intact.wait_for(|whole| *whole).await.is_err() {
                return;
            }
            let other = *other.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(other) = other else { return };
            let Ok(far) = TcpStream::connect(other).await else { return };
            let _ = (near.set_nodelay(true), far.set_nodelay(true)); // only latency is at stake
            let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), far.into_split());
            tokio::join!(carry(near_in, far_out, receivers.0, Some(said)), carry(far_in, near_out, receivers.1, None));
        });
    }
}

/// One way, until its sender has no more.
async fn carry(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut intact: watch::Receiver<bool>, said: Option<SentBytes>) {
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        let read = from.read(&mut piece).await.unwrap_or(0);
        // An end, too, is only heard of through a cable that is whole.
        if intact.wait_for(|whole| *whole).await.is_err() {
            return;
        }
        let passed = piece.get(..read).unwrap_or_default();
        if let Some(said) = &said {
            said.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(passed);
        }
        if read == 0 || to.write_all(passed).await.is_err() {
            return;
        }
    }
}
