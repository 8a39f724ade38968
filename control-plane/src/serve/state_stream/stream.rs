//! A proxy's stream without the sockets: what it says goes where it belongs, what it is to be sent comes out.

use std::sync::Arc;
use std::time::SystemTime;

use proto::state::{self, daemon_message};
use tokio::time::Instant;
use tonic::Status;

use super::StateSession;
use super::admission::{self, Admission, AdmittedMessage, ProxyScope};
use crate::state::peer::{ProxyProcess, RemoteAddress};
use crate::state::shared::{ConnectedProxy, DaemonState, PoolViews};

/// A proxy's stream, from its Hello until it is dropped.
#[derive(Debug)]
pub struct StateStream {
    shared: Arc<DaemonState>,
    peer: ProxyProcess,
    scope: ProxyScope,
    session: StateSession,
    /// Its row in the table of proxies, gone with it.
    stream_id: u64,
    /// Pool updates it refused.
    refusals: u64,
}

// === impl StateStream ===

impl StateStream {
    /// A proxy at `remote` said hello. It is in the table of proxies from now on, and any older stream of it no longer. What it is to be told first
    /// comes back, too.
    ///
    /// # Errors
    /// Says which rule of the protocol the Hello breaks.
    pub fn begin(
        shared: &Arc<DaemonState>,
        hello: state::Hello,
        remote: RemoteAddress,
        now: Instant,
    ) -> Result<(Self, state::DaemonMessage), Status> {
        let (hello, unknown_pools) = admission::hello(hello, &shared.pool_names)?;
        let peer = shared.origins.peer(&hello, remote);
        if !unknown_pools.is_empty() {
            tracing::warn!(node = peer.node_id, unknown = ?unknown_pools, known = ?shared.pool_names, "a proxy asks for pools that are not configured here");
        }
        let session = StateSession::new(peer.clone(), hello.pools.iter().cloned(), now);
        let stream_id = shared.next_stream_id();
        let proxy = ConnectedProxy { peer: peer.clone(), since: SystemTime::now(), pools: session.status() };
        shared.proxies.send_modify(|proxies| {
            proxies.retain(|_, other| other.peer.id != peer.id);
            proxies.insert(stream_id, proxy);
        });
        for pool in &hello.pools {
            shared.relay().join(pool, (peer.id, &peer.remote.origin), now);
        }
        shared.peers.relayed.send_replace(());
        let welcome = state::Welcome { schema: proto::SCHEMA, release: env!("CARGO_PKG_VERSION").to_owned(), unknown_pools };
        let welcome = state::DaemonMessage { message: Some(daemon_message::Message::Welcome(welcome)) };
        let scope = ProxyScope::new(hello.pools);
        Ok((Self { shared: Arc::clone(shared), peer, scope, session, stream_id, refusals: 0 }, welcome))
    }

    /// Who it is with.
    #[must_use]
    pub fn peer(&self) -> &ProxyProcess {
        &self.peer
    }

    /// The pools it is about.
    #[must_use]
    pub fn pools(&self) -> &[String] {
        self.scope.pools()
    }

    /// Its row in the table of proxies; not there any more: a newer stream of the process took over.
    #[must_use]
    pub fn stream_id(&self) -> u64 {
        self.stream_id
    }

    /// The proxy said this.
    ///
    /// # Errors
    /// Says why the stream must end.
    pub fn receive(&mut self, message: state::ProxyMessage, now: Instant) -> Result<(), Status> {
        let Admission { message: said, refused } = self.scope.admit(message)?;
        if refused > 0 {
            let mut counters = self.shared.counters();
            let count = if matches!(said, Some(AdmittedMessage::Report(_))) {
                &mut counters.reports_invalid
            } else {
                &mut counters.messages_refused
            };
            *count = count.saturating_add(refused);
        }
        match said {
            Some(AdmittedMessage::Ack(ack)) => self.ack(ack),
            Some(AdmittedMessage::Report(report)) => self.shared.report(&self.peer, report, now),
            Some(AdmittedMessage::Share(share)) => {
                self.shared.relay().receive(self.peer.id, share, now);
                self.shared.peers.relayed.send_replace(());
            }
            Some(AdmittedMessage::Observations(observations)) => self.shared.observed(self.peer.id, observations),
            None => {}
        }
        Ok(())
    }

    /// The newest message that is due, if any.
    pub fn next(&mut self, now: Instant) -> Option<state::DaemonMessage> {
        let message = self.session.next(&self.shared, now)?;
        // Some hundred a second, and none of them changes what is known of the proxy.
        if !matches!(message.message, Some(daemon_message::Message::PeerLoad(_))) {
            self.update();
        }
        Some(message)
    }

    /// When the proxy may be told of others again.
    #[must_use]
    pub fn relay_at(&self, now: Instant) -> Instant {
        self.session.relay_at(now)
    }

    /// When to ask again though nobody changed anything.
    #[must_use]
    pub fn wake_at(&self, pools: &PoolViews, now: Instant) -> Instant {
        self.session.wake_at(pools, now)
    }

    fn ack(&mut self, ack: state::Ack) {
        if !ack.refused.is_empty() {
            self.refusals += 1;
            self.shared.counters().pool_updates_refused += 1;
            // The first of a stream, then ever fewer: a peer can refuse as fast as it can speak.
            if self.refusals.is_power_of_two() {
                tracing::error!(
                    pool = ack.pool,
                    why = ack.refused,
                    held_term = ack.held.map(|held| held.term),
                    process = format!("{:016x}", self.peer.process_id),
                    "a proxy refused a pool update; it keeps the one it had"
                );
            }
        }
        if self.session.ack(ack).is_some() {
            self.update();
        }
    }

    fn update(&self) {
        self.shared.proxies.send_if_modified(|proxies| {
            let Some(proxy) = proxies.get_mut(&self.stream_id) else { return false };
            let status = self.session.status();
            let changed = proxy.pools != status;
            proxy.pools = status;
            changed
        });
    }
}

impl Drop for StateStream {
    fn drop(&mut self) {
        let mut gone = None;
        self.shared.proxies.send_if_modified(|proxies| {
            gone = proxies.remove(&self.stream_id);
            gone.is_some()
        });
        // Replaced by a newer stream of the process, it is not in the table any more: the process stays.
        if let Some(proxy) = gone {
            for pool in proxy.pools.keys() {
                self.shared.relay().leave(pool, proxy.peer.id);
            }
            self.shared.peers.relayed.send_replace(());
        }
    }
}
