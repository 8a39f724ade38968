//! The state stream: one for each Envoy process, opened by its leader VM.
//!
//! The messages are `Hello` -> `Welcome`, then a `PoolUpdate` for each requested pool, then
//! `Metrics`, learned models and the load of other proxies. The proxy sends acknowledgements,
//! counters, its load, observations and its learned models. [`admission`] limits incoming messages,
//! [`StateSession`] decides what to send, [`StateStream`] joins both, and this module connects them
//! to the sockets. A newer stream of a process replaces the older one, whose connection may be
//! dead.

use std::pin::Pin;
use std::sync::Arc;

use futures::{Stream, StreamExt};
use prost::Message as _;
use proto::state::state_service_server::StateService;
use proto::state::{self, proxy_message};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::shutdown::Shutdown;
use crate::state::log_limits::shown_name;
use crate::state::peer::{QuotaExceeded, QuotaPermit, RemoteAddress, StreamQuota};
use crate::state::shared::DaemonState;

pub mod admission;
pub mod calls;
mod session;
mod stream;
pub use session::{
    EDS_ABSENT_GRACE, FIRST_POOL_UPDATE_WAIT, METRICS_INTERVAL_MIN, RAISES_MAX, StateSession,
};
pub use stream::StateStream;

/// The maximum time that a new stream may take to send its Hello.
const HELLO_WAIT_MAX: std::time::Duration = std::time::Duration::from_secs(5);

/// Serves state streams, and their replacement by HTTP calls (see [`calls`]).
#[derive(Clone, Debug)]
pub struct StateServer {
    shared: Arc<DaemonState>,
    shutdown: Shutdown,
}

/// The messages from a proxy, over a stream or by calls.
trait ProxyMessages: Stream<Item = Result<state::ProxyMessage, Status>> + Send + Unpin {}

impl<S: Stream<Item = Result<state::ProxyMessage, Status>> + Send + Unpin> ProxyMessages for S {}

type DaemonMessages = mpsc::Sender<Result<state::DaemonMessage, Status>>;

// === impl StateServer ===

impl StateServer {
    /// Serves the state in `shared` until `shutdown`.
    #[must_use]
    pub fn new(shared: Arc<DaemonState>, shutdown: Shutdown) -> Self {
        Self { shared, shutdown }
    }

    /// Acquires a permit for a stream, before any message is read.
    fn acquire(&self, remote: &RemoteAddress) -> Result<QuotaPermit, Status> {
        self.shared
            .proxies
            .acquire(StreamQuota::StateStream, &remote.origin, Instant::now())
            .map_err(refusal)
    }

    async fn serve(
        self,
        mut inbound: impl ProxyMessages,
        outbound: DaemonMessages,
        remote: RemoteAddress,
        permit: &QuotaPermit,
    ) -> Result<(), Status> {
        tokio::time::sleep_until(permit.begin(Instant::now())).await;
        let hello = tokio::time::timeout(HELLO_WAIT_MAX, hello(&mut inbound))
            .await
            .map_err(|_| Status::deadline_exceeded("no Hello came"))??;
        // Requests above the rate of the origin stay unread, so HTTP/2 flow control slows the
        // sender down.
        let read_at = permit.message(hello.encoded_len(), Instant::now());
        let (mut conversation, welcome) =
            StateStream::begin(&self.shared, hello, remote, Instant::now())?;
        let _ = outbound.send(Ok(welcome)).await;
        let peer = conversation.peer();
        let node = shown_name(&peer.node_id).to_owned();
        let process = format!("{:016x}", peer.id);
        tracing::info!(node, process, pools = ?conversation.pools(), "proxy connected");
        let ended = self
            .run(&mut conversation, &mut inbound, &outbound, permit, read_at)
            .await;
        tracing::info!(node, process, why = ?ended.as_ref().err().map(Status::message), "proxy left");
        ended
    }

    async fn run(
        &self,
        conversation: &mut StateStream,
        inbound: &mut impl ProxyMessages,
        outbound: &DaemonMessages,
        permit: &QuotaPermit,
        mut read_at: Instant,
    ) -> Result<(), Status> {
        let mut pools = self.shared.pools.views.subscribe();
        let mut eds = self.shared.proxies.eds.subscribe();
        let mut proxies = self.shared.proxies.streams.subscribe();
        let mut relayed = self.shared.proxies.relayed.subscribe();
        let mut shutdown = self.shutdown.clone();
        loop {
            // The value is marked as seen before it is read, so that a change during the read wakes
            // the loop again.
            eds.borrow_and_update();
            // A change is marked as seen only when it may be sent. Until then it stays pending and
            // wakes the loop later.
            let relay_at = conversation.relay_at(Instant::now());
            if relay_at <= Instant::now() {
                relayed.borrow_and_update();
            }
            let views = pools.borrow_and_update().clone();
            // Reserves room first and then makes the message, so that the message has the newest
            // state.
            if let Ok(permit) = outbound.try_reserve()
                && let Some(message) = conversation.next(Instant::now())
            {
                permit.send(Ok(message));
                continue;
            }
            let wake_at = conversation.wake_at(&views, Instant::now());
            // Other proxies report hundreds of times a second. The loop does not wake up for these
            // reports before they may be sent on.
            let full = outbound.capacity() == 0;
            let may_read = read_at <= Instant::now();
            tokio::select! {
                message = inbound.next(), if may_read => match message {
                    Some(message) => {
                        let message = message?;
                        read_at = permit.message(message.encoded_len(), Instant::now());
                        conversation.receive(message, Instant::now())?;
                    }
                    None => return Ok(()),
                },
                changed = pools.changed() => changed.map_err(|_| Status::unavailable("shutting down"))?,
                changed = async { tokio::time::sleep_until(relay_at).await; relayed.changed().await } => {
                    changed.map_err(|_| Status::unavailable("shutting down"))?;
                }
                changed = eds.changed() => changed.map_err(|_| Status::unavailable("shutting down"))?,
                _ = proxies.changed() => if !proxies.borrow_and_update().contains_key(&conversation.stream_id()) {
                    return Err(Status::aborted("a newer stream of this process took over"));
                },
                () = tokio::time::sleep_until(read_at), if !may_read => {}
                _ = outbound.reserve(), if full => {}
                () = tokio::time::sleep_until(wake_at), if !full => {}
                () = outbound.closed() => return Ok(()),
                () = shutdown.begun() => return Err(Status::unavailable("the daemon is shutting down")),
            }
        }
    }
}

#[tonic::async_trait]
impl StateService for StateServer {
    type StreamStream = Pin<Box<dyn Stream<Item = Result<state::DaemonMessage, Status>> + Send>>;

    async fn stream(
        &self,
        request: Request<Streaming<state::ProxyMessage>>,
    ) -> Result<Response<Self::StreamStream>, Status> {
        let remote = RemoteAddress::from_extensions(request.extensions());
        let permit = self.acquire(&remote)?;
        let inbound = request.into_inner();
        let (outbound, messages) = mpsc::channel(1);
        let server = self.clone();
        tokio::spawn(async move {
            let served = server.serve(inbound, outbound.clone(), remote, &permit);
            let ended = served.await;
            drop(permit);
            if let Err(status) = ended {
                let _ = outbound.send(Err(status)).await;
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(messages))))
    }
}

async fn hello(inbound: &mut impl ProxyMessages) -> Result<state::Hello, Status> {
    match inbound.next().await.transpose()?.and_then(|m| m.message) {
        Some(proxy_message::Message::Hello(hello)) => Ok(hello),
        _ => Err(Status::invalid_argument(
            "the first message must be a Hello",
        )),
    }
}

/// Returns the status of a stream that exceeds a limit.
pub(crate) fn refusal(full: QuotaExceeded) -> Status {
    Status::resource_exhausted(full.to_string())
}
