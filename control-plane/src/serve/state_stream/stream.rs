//! A proxy's stream without the sockets: distributes the messages from the proxy, and makes the
//! messages for it.

use std::sync::Arc;
use std::time::SystemTime;

use proto::state::{self, daemon_message};
use tokio::time::Instant;
use tonic::Status;

use super::StateSession;
use super::admission::{self, Admission, AdmittedMessage, ProxyScope};
use crate::state::life::unix_ms;
use crate::state::log_limits::{ShownNames, shown_name};
use crate::state::peer::{ProxyProcess, RemoteAddress};
use crate::state::pool_views::PoolViews;
use crate::state::proxies::{ConnectedProxy, PoolMembership};
use crate::state::shared::DaemonState;

/// A proxy's stream, from its Hello until it is dropped.
#[derive(Debug)]
pub struct StateStream {
    shared: Arc<DaemonState>,
    peer: ProxyProcess,
    scope: ProxyScope,
    session: StateSession,
    /// The key of the stream's row in the table of proxies; dropping the stream removes the row.
    stream_id: u64,
    /// The memberships in pools that share load; dropping the stream ends them.
    _memberships: Vec<PoolMembership>,
    /// Pool updates that the proxy refused.
    refusals: u64,
}

// === impl StateStream ===

impl StateStream {
    /// Begins the stream after the Hello of a proxy at `remote`. Adds the stream to the table of
    /// proxies in place of any older one of the same process. Also returns the first message for
    /// the proxy.
    ///
    /// # Errors
    /// Fails if the Hello breaks a rule of the protocol.
    pub fn begin(
        shared: &Arc<DaemonState>,
        hello: state::Hello,
        remote: RemoteAddress,
        now: Instant,
    ) -> Result<(Self, state::DaemonMessage), Status> {
        let mut hello = admission::hello(hello)?;
        let peer = shared.proxies.origins.peer(&hello, remote);
        let (unknown_pools, refused_pools) = scope(shared, &mut hello, &peer, now);
        let session = StateSession::new(peer.clone(), hello.pools.iter().cloned(), now);
        let stream_id = shared.life.next_stream_id();
        let proxy = ConnectedProxy {
            peer: peer.clone(),
            release: hello.release,
            since: SystemTime::now(),
            pools: session.status(),
        };
        shared.proxies.streams.send_modify(|proxies| {
            proxies.retain(|_, other| other.peer.id != peer.id);
            proxies.insert(stream_id, proxy);
        });
        let memberships = hello
            .pools
            .iter()
            .map(|pool| shared.proxies.join(pool, &peer, stream_id, now))
            .collect();
        let welcome = state::Welcome {
            schema: hello.schema,
            release: env!("CARGO_PKG_VERSION").to_owned(),
            unknown_pools,
            refused_pools,
        };
        let welcome = state::DaemonMessage {
            message: Some(daemon_message::Message::Welcome(welcome)),
        };
        let scope = ProxyScope::new(hello.pools);
        Ok((
            Self {
                shared: Arc::clone(shared),
                peer,
                scope,
                session,
                stream_id,
                _memberships: memberships,
                refusals: 0,
            },
            welcome,
        ))
    }

    /// Returns the proxy process at the other end.
    #[must_use]
    pub fn peer(&self) -> &ProxyProcess {
        &self.peer
    }

    #[must_use]
    pub fn pools(&self) -> &[String] {
        self.scope.pools()
    }

    /// Returns the key of the stream's row in the table of proxies. If the row is missing, a newer
    /// stream of the process has replaced this stream.
    #[must_use]
    pub fn stream_id(&self) -> u64 {
        self.stream_id
    }

    /// Processes a message from the proxy.
    ///
    /// # Errors
    /// Fails if the message breaks a rule of the protocol. The stream must then end.
    pub fn receive(&mut self, message: state::ProxyMessage, now: Instant) -> Result<(), Status> {
        let Admission {
            message: said,
            refused,
        } = self.scope.admit(message)?;
        if refused > 0 {
            let mut counters = self.shared.reports.counters();
            let count = if matches!(said, Some(AdmittedMessage::Report(_))) {
                &mut counters.reports_invalid
            } else {
                &mut counters.messages_refused
            };
            *count = count.saturating_add(refused);
        }
        match said {
            Some(AdmittedMessage::Ack(ack)) => self.ack(ack, now),
            Some(AdmittedMessage::Report(report)) => {
                self.shared.reports.report(&self.peer, report, now);
            }
            Some(AdmittedMessage::Share(share)) => {
                let views = self.shared.pools.views.borrow();
                let view = views.get(&share.pool);
                self.shared.proxies.share(self.peer.id, share, view, now);
            }
            Some(AdmittedMessage::Observations(observations)) => {
                let ProxyProcess { id, remote, .. } = &self.peer;
                self.shared
                    .learned
                    .observed(*id, &remote.origin, observations);
            }
            Some(AdmittedMessage::Models(models)) => {
                let origin = &self.peer.remote.origin;
                self.shared.learned.claimed(origin, models);
            }
            None => {}
        }
        Ok(())
    }

    /// Returns the newest message that is due, if any.
    pub fn next(&mut self, now: Instant) -> Option<state::DaemonMessage> {
        let message = self.session.next(&self.shared, now)?;
        // Peer load is sent some hundred times a second, and does not change the status.
        if !matches!(message.message, Some(daemon_message::Message::PeerLoad(_))) {
            self.update();
        }
        Some(message)
    }

    /// Returns the time when the proxy may next get the load of other proxies.
    #[must_use]
    pub fn relay_at(&self, now: Instant) -> Instant {
        self.session.relay_at(now)
    }

    /// Returns the time when to call [`Self::next`] again if nothing changes.
    #[must_use]
    pub fn wake_at(&self, pools: &PoolViews, now: Instant) -> Instant {
        self.session.wake_at(pools, now)
    }

    fn ack(&mut self, mut ack: state::Ack, now: Instant) {
        ack.held = ack
            .held
            .filter(|held| proto::terms::is_credible(held.term, unix_ms()));
        if !ack.refused.is_empty() {
            self.refusals += 1;
            self.shared.reports.counters().pool_updates_refused += 1;
            // Logs the first refusal of a stream and then fewer and fewer, because a peer can
            // refuse as fast as it can send.
            if self.refusals.is_power_of_two() && self.shared.proxies.refusal_lines.admit(now) {
                tracing::error!(
                    pool = ack.pool,
                    why = ack.refused,
                    held_term = ack.held.map(|held| held.term),
                    process = format!("{:016x}", self.peer.id),
                    "a proxy refused a pool update and keeps its last one"
                );
            }
        }
        if self.session.ack(ack, now).is_some() {
            self.update();
        }
    }

    fn update(&self) {
        self.shared.proxies.streams.send_if_modified(|proxies| {
            let Some(proxy) = proxies.get_mut(&self.stream_id) else {
                return false;
            };
            let status = self.session.status();
            let changed = proxy.pools != status;
            proxy.pools = status;
            changed
        });
    }
}

/// Keeps the pools of `hello` that this daemon serves and that the proxy has access to. Returns the
/// unknown pools, and the refused pools.
fn scope(
    shared: &DaemonState,
    hello: &mut state::Hello,
    peer: &ProxyProcess,
    now: Instant,
) -> (Vec<String>, Vec<String>) {
    let requested = std::mem::take(&mut hello.pools);
    let served = &shared.pools.names;
    let origin = &peer.remote.origin;
    let sorted = shared.proxies.clients.sort(requested, origin, served);
    hello.pools = sorted.allowed;
    let node = shown_name(&peer.node_id);
    let lines = &shared.proxies.refusal_lines;
    if !sorted.unknown.is_empty() && lines.admit(now) {
        tracing::warn!(node, unknown = ?ShownNames(&sorted.unknown), known = ?served, "a proxy requests pools that are not configured here");
    }
    if !sorted.refused.is_empty() {
        shared.reports.counters().pools_refused += sorted.refused.len() as u64;
        if lines.admit(now) {
            tracing::warn!(node, peer = %peer.remote, certificate = origin.certificate.as_deref(), refused = ?ShownNames(&sorted.refused), "a proxy requests pools to which its certificate gives no access (--state-tls-client-names)");
        }
    }
    (sorted.unknown, sorted.refused)
}

impl Drop for StateStream {
    fn drop(&mut self) {
        // If a newer stream has replaced this stream, the row is missing.
        self.shared
            .proxies
            .streams
            .send_if_modified(|proxies| proxies.remove(&self.stream_id).is_some());
    }
}
