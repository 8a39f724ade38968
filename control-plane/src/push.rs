//! The state stream: one for each Envoy process, opened by the VM that leads there.
//!
//! `Hello` -> `Welcome`, then a `Roster` for each pool asked for, then `Metrics`; `Ack` and `Report` come back. What to send is
//! [`Session`]'s to say; here it meets the sockets. A newer stream of a process replaces the older one, whose connection may be long dead.

use std::pin::Pin;
use std::sync::Arc;
use std::time::SystemTime;

use futures::{Stream, StreamExt};
use proto::state::state_service_server::StateService;
use proto::state::{self, daemon_message, proxy_message};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::shared::{Proxy, STREAMS_MAX, Shared};
use crate::shutdown::Shutdown;

pub mod calls;
mod session;
pub use session::{EDS_ABSENT_GRACE, FIRST_ROSTER_WAIT, METRICS_INTERVAL_MIN, Session};

/// How long a new stream may take to say hello.
const HELLO_WAIT_MAX: std::time::Duration = std::time::Duration::from_secs(5);

/// The most pools one proxy may ask for: a guard against nonsense, above what one Envoy serves.
const POOLS_ASKED_MAX: usize = 256;

/// The longest node id and pool name taken, in bytes.
const NAME_BYTES_MAX: usize = 1024;

/// Serves state streams, and the calls that stand for them: see [`calls`].
#[derive(Clone, Debug)]
pub struct StateServer {
    shared: Arc<Shared>,
    shutdown: Shutdown,
}

/// What a proxy says, by whatever way it comes.
trait Inbound: Stream<Item = Result<state::ProxyMessage, Status>> + Send + Unpin {}

impl<S: Stream<Item = Result<state::ProxyMessage, Status>> + Send + Unpin> Inbound for S {}

type Outbound = mpsc::Sender<Result<state::DaemonMessage, Status>>;

/// A stream's row in the table of proxies, gone when the stream is.
struct Row {
    shared: Arc<Shared>,
    stream_id: u64,
}

// === impl StateServer ===

impl StateServer {
    /// Serves what `shared` holds until `shutdown`.
    #[must_use]
    pub fn new(shared: Arc<Shared>, shutdown: Shutdown) -> Self {
        Self { shared, shutdown }
    }

    async fn serve(self, mut inbound: impl Inbound, outbound: Outbound, peer: String) -> Result<(), Status> {
        let hello =
            tokio::time::timeout(HELLO_WAIT_MAX, hello(&mut inbound)).await.map_err(|_| Status::deadline_exceeded("no Hello came"))??;
        let _ = outbound.send(Ok(self.welcome(&hello))).await;
        let mut session = Session::new(hello.node_id.clone(), hello.process_id, hello.pools.iter().cloned(), Instant::now());
        let row = Row::insert(&self.shared, &hello, &session, peer)?;
        tracing::info!(node = hello.node_id, process = format!("{:016x}", hello.process_id), pools = ?hello.pools, "proxy connected");
        let ended = self.run(&mut session, &mut inbound, &outbound, &row, hello.process_id).await;
        tracing::info!(node = hello.node_id, process = format!("{:016x}", hello.process_id), why = ?ended.as_ref().err().map(Status::message), "proxy left");
        ended
    }

    async fn run(
        &self,
        session: &mut Session,
        inbound: &mut impl Inbound,
        outbound: &Outbound,
        row: &Row,
        process_id: u64,
    ) -> Result<(), Status> {
        let mut pools = self.shared.pools.subscribe();
        let mut eds = self.shared.eds.subscribe();
        let mut proxies = self.shared.proxies.subscribe();
        let mut relayed = self.shared.relayed.subscribe();
        let mut shutdown = self.shutdown.clone();
        loop {
            // Seen before it is read: a change meanwhile wakes us again.
            eds.borrow_and_update();
            // Only when it may be passed on: what came too soon wakes us then.
            let relay_at = session.relay_at(Instant::now());
            if relay_at <= Instant::now() {
                relayed.borrow_and_update();
            }
            let views = pools.borrow_and_update().clone();
            // Room first, then the message: what is sent is as new as the moment it can be.
            if let Ok(permit) = outbound.try_reserve()
                && let Some(message) = session.next(&self.shared, Instant::now())
            {
                // Some hundred a second, and none of them changes what is known of the proxy.
                let of_others = matches!(message.message, Some(daemon_message::Message::Peers(_)));
                permit.send(Ok(message));
                if !of_others {
                    row.update(session);
                }
                continue;
            }
            let wake_at = session.wake_at(&views, Instant::now());
            // Others tell hundreds of times a second: no look at any of it before it may be passed on.
            let full = outbound.capacity() == 0;
            tokio::select! {
                message = inbound.next() => match message {
                    Some(message) => self.receive(session, message?, process_id, row)?,
                    None => return Ok(()),
                },
                changed = pools.changed() => changed.map_err(|_| Status::unavailable("shutting down"))?,
                changed = async { tokio::time::sleep_until(relay_at).await; relayed.changed().await } => {
                    changed.map_err(|_| Status::unavailable("shutting down"))?;
                }
                changed = eds.changed() => changed.map_err(|_| Status::unavailable("shutting down"))?,
                _ = proxies.changed() => if !proxies.borrow_and_update().contains_key(&row.stream_id) {
                    return Err(Status::aborted("a newer stream of this process took over"));
                },
                _ = outbound.reserve(), if full => {}
                () = tokio::time::sleep_until(wake_at), if !full => {}
                () = outbound.closed() => return Ok(()),
                () = shutdown.begun() => return Err(Status::unavailable("the daemon is shutting down")),
            }
        }
    }

    fn receive(&self, session: &mut Session, message: state::ProxyMessage, process_id: u64, row: &Row) -> Result<(), Status> {
        match message.message {
            Some(proxy_message::Message::Ack(ack)) => {
                if !ack.refused.is_empty() {
                    tracing::error!(
                        pool = ack.pool,
                        why = ack.refused,
                        process = format!("{process_id:016x}"),
                        "a proxy refused a roster; it keeps the one it had"
                    );
                    self.shared.counters().rosters_refused += 1;
                }
                if session.ack(ack).is_some() {
                    row.update(session);
                }
                Ok(())
            }
            Some(proxy_message::Message::Report(report)) => {
                self.shared.report(process_id, &report, Instant::now());
                Ok(())
            }
            Some(proxy_message::Message::Share(share)) => {
                self.shared.relay().told(process_id, share, Instant::now());
                self.shared.relayed.send_replace(());
                Ok(())
            }
            Some(proxy_message::Message::Observations(observations)) => {
                self.shared.observed(process_id, observations);
                Ok(())
            }
            Some(proxy_message::Message::Hello(_)) => Err(Status::invalid_argument("a second Hello")),
            None => Ok(()), // a newer filter may say more than this daemon understands
        }
    }

    fn welcome(&self, hello: &state::Hello) -> state::DaemonMessage {
        let known = |name: &String| self.shared.pool_names.iter().any(|n| **n == **name);
        let unknown_pools: Vec<String> = hello.pools.iter().filter(|name| !known(name)).cloned().collect();
        if !unknown_pools.is_empty() {
            tracing::warn!(node = hello.node_id, unknown = ?unknown_pools, known = ?self.shared.pool_names, "a proxy asks for pools that are not configured here");
        }
        let welcome = state::Welcome { schema: proto::SCHEMA, release: env!("CARGO_PKG_VERSION").to_owned(), unknown_pools };
        state::DaemonMessage { message: Some(daemon_message::Message::Welcome(welcome)) }
    }
}

#[tonic::async_trait]
impl StateService for StateServer {
    type StreamStream = Pin<Box<dyn Stream<Item = Result<state::DaemonMessage, Status>> + Send>>;

    async fn stream(&self, request: Request<Streaming<state::ProxyMessage>>) -> Result<Response<Self::StreamStream>, Status> {
        let peer = request.remote_addr().map_or_else(|| "unknown".to_owned(), |a| a.to_string());
        let inbound = request.into_inner();
        let (outbound, messages) = mpsc::channel(1);
        let server = self.clone();
        tokio::spawn(async move {
            if let Err(status) = server.serve(inbound, outbound.clone(), peer).await {
                let _ = outbound.send(Err(status)).await;
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(messages))))
    }
}

async fn hello(inbound: &mut impl Inbound) -> Result<state::Hello, Status> {
    let first = inbound.next().await.transpose()?.and_then(|m| m.message);
    let Some(proxy_message::Message::Hello(hello)) = first else {
        return Err(Status::invalid_argument("the first message must be a Hello"));
    };
    if hello.schema != proto::SCHEMA {
        return Err(Status::failed_precondition(format!(
            "the filter speaks state schema {}, this daemon (switchpointd {}) schema {}: run filter and daemon of one release",
            hello.schema,
            env!("CARGO_PKG_VERSION"),
            proto::SCHEMA
        )));
    }
    if hello.pools.len() > POOLS_ASKED_MAX {
        return Err(Status::invalid_argument(format!("asked for {} pools, at most {POOLS_ASKED_MAX}", hello.pools.len())));
    }
    if hello.pools.iter().chain([&hello.node_id]).any(|name| name.len() > NAME_BYTES_MAX) {
        return Err(Status::invalid_argument(format!("a node id or pool name is longer than {NAME_BYTES_MAX} bytes")));
    }
    Ok(hello)
}

// === impl Row ===

impl Row {
    fn insert(shared: &Arc<Shared>, hello: &state::Hello, session: &Session, peer: String) -> Result<Self, Status> {
        let stream_id = shared.next_stream_id();
        let proxy =
            Proxy { node_id: hello.node_id.clone(), process_id: hello.process_id, peer, since: SystemTime::now(), pools: session.status() };
        let inserted = shared.proxies.send_if_modified(|proxies| {
            proxies.retain(|_, other| other.process_id != hello.process_id);
            let room = proxies.len() < STREAMS_MAX;
            if room {
                proxies.insert(stream_id, proxy);
            }
            room
        });
        if !inserted {
            return Err(Status::resource_exhausted(format!("{STREAMS_MAX} proxies are connected already; try another daemon")));
        }
        for pool in hello.pools.iter().filter(|asked| shared.pool_names.iter().any(|name| **name == ***asked)) {
            shared.relay().join(pool, hello.process_id, Instant::now());
        }
        shared.relayed.send_replace(());
        Ok(Self { shared: Arc::clone(shared), stream_id })
    }

    fn update(&self, session: &Session) {
        self.shared.proxies.send_if_modified(|proxies| {
            let Some(proxy) = proxies.get_mut(&self.stream_id) else { return false };
            let status = session.status();
            let changed = proxy.pools != status;
            proxy.pools = status;
            changed
        });
    }
}

impl Drop for Row {
    fn drop(&mut self) {
        let mut gone = None;
        self.shared.proxies.send_if_modified(|proxies| {
            gone = proxies.remove(&self.stream_id);
            gone.is_some()
        });
        // Replaced by a newer stream of the process, it is not in the table any more: the process stays.
        if let Some(proxy) = gone {
            for pool in proxy.pools.keys() {
                self.shared.relay().leave(pool, proxy.process_id);
            }
            self.shared.relayed.send_replace(());
        }
    }
}
