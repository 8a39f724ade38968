//! The tables that the streams of proxies and Envoys write: their status, the resources of each
//! origin, and the messages between proxies.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use proto::state;
use scheduler::Version;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::pool::writer::PoolView;
use crate::state::client_names::ClientNames;
use crate::state::eds_streams::EdsStreams;
use crate::state::log_limits::RefusalLines;
use crate::state::peer::{
    Origin, OriginQuotas, ProxyProcess, QuotaExceeded, QuotaPermit, StreamQuota,
};
use crate::state::peer_relay::{PeerRelay, RelayMember};

/// The connected state streams, by stream id.
pub type Proxies = BTreeMap<u64, ConnectedProxy>;

/// The streams of proxies and Envoys.
#[derive(Debug, Default)]
pub struct ProxyTables {
    /// The client certificates that give access to pools.
    pub(crate) clients: ClientNames,
    pub streams: watch::Sender<Proxies>,
    pub eds: watch::Sender<EdsStreams>,
    pub origins: Arc<OriginQuotas>,
    /// The lines in the log about refusals by and of proxies and Envoys.
    pub(crate) refusal_lines: RefusalLines,
    /// The state that the daemon's own ext_proc server has of each pool, in the same form as for a
    /// proxy. The map is empty if the server does not run.
    own: Mutex<BTreeMap<String, ProxyPool>>,
    relay: Mutex<PeerRelay>,
    /// Wakes the state streams when the relay has new load or placements.
    pub relayed: watch::Sender<()>,
}

/// The status of a proxy's state stream.
#[derive(Clone, Debug)]
pub struct ConnectedProxy {
    pub peer: ProxyProcess,
    /// The release of the filter; empty if the filter is too old to send it.
    pub release: String,
    /// The time when the stream was opened.
    pub since: SystemTime,
    /// The state that the proxy has, by requested pool.
    pub pools: BTreeMap<String, ProxyPool>,
}

/// The state of a pool that a proxy has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProxyPool {
    /// The pool update that was sent last, and the pool revision from which it was made.
    pub sent: Option<(Version, u64)>,
    /// The newest pool update that the proxy acknowledged, and the pool revision that it was made
    /// from.
    pub acked: Option<(Version, u64)>,
    /// The time when the proxy acknowledged that update.
    pub acked_at: Option<Instant>,
    /// The number of endpoints that are withheld until the proxy's Envoy has them.
    pub withheld: usize,
    /// The reason why the proxy refused the last pool update; `None` if the proxy did not refuse
    /// it.
    pub refused: Option<String>,
}

/// The membership of a stream's process in a pool whose load it shares. The membership ends with
/// the stream, or when a newer stream of the process replaces the stream.
#[derive(Debug)]
pub struct PoolMembership {
    tables: Arc<ProxyTables>,
    pool: String,
    process_id: u64,
    stream_id: u64,
}

// === impl PoolMembership ===

impl Drop for PoolMembership {
    fn drop(&mut self) {
        self.tables
            .relay()
            .leave(&self.pool, self.process_id, self.stream_id);
        self.tables.relayed.send_replace(());
    }
}

// === impl ProxyTables ===

impl ProxyTables {
    /// Creates the tables without streams. Only `clients` get pools.
    #[must_use]
    pub fn new(clients: ClientNames) -> Self {
        Self {
            clients,
            ..Self::default()
        }
    }

    /// Acquires a permit for a peer of `origin`, before any message is read. All peers whose
    /// certificates give access to no pool share the permits and the rate of one origin.
    ///
    /// # Errors
    /// Returns [`QuotaExceeded`] if the origin's share or all permits are in use.
    pub fn acquire(
        &self,
        kind: StreamQuota,
        origin: &Origin,
        now: Instant,
    ) -> Result<QuotaPermit, QuotaExceeded> {
        if self.clients.has_pools(origin) {
            self.origins.acquire(kind, origin, now)
        } else {
            self.origins.acquire(kind, &Origin::default(), now)
        }
    }

    pub fn relay(&self) -> MutexGuard<'_, PeerRelay> {
        self.relay.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a process to those that share the load of a pool, until the returned value is dropped.
    #[must_use]
    pub fn join(
        self: &Arc<Self>,
        pool: &str,
        peer: &ProxyProcess,
        stream_id: u64,
        now: Instant,
    ) -> PoolMembership {
        let member = RelayMember {
            process_id: peer.id,
            stream_id,
            origin: &peer.remote.origin,
        };
        self.relay().join(pool, member, now);
        self.relayed.send_replace(());
        PoolMembership {
            tables: Arc::clone(self),
            pool: pool.to_owned(),
            process_id: peer.id,
            stream_id,
        }
    }

    /// Passes the load of a process to the other processes, but only the load at endpoints of
    /// `view`.
    pub fn share(
        &self,
        process_id: u64,
        report: state::LoadReport,
        view: Option<&PoolView>,
        now: Instant,
    ) {
        let mut relay = self.relay();
        if let Some(view) = view {
            relay.follow(view);
        }
        relay.receive(process_id, report, now);
        drop(relay);
        self.relayed.send_replace(());
    }

    /// Replaces the state that this process's own ext_proc server has of each pool.
    pub fn set_own(&self, pools: BTreeMap<String, ProxyPool>) {
        *self.own() = pools;
    }

    /// Returns whether every proxy that requested `pool`, and this process's own ext_proc server,
    /// has acknowledged a pool update of `revision` or newer.
    #[must_use]
    pub fn acknowledged(&self, pool: &str, revision: u64) -> bool {
        let proxies = self.streams.borrow();
        let own = self.own();
        let mut rows = proxies
            .values()
            .map(|proxy| &proxy.pools)
            .chain([&*own])
            .filter_map(|pools| pools.get(pool));
        rows.all(|row| row.acked.is_some_and(|(_, acked)| acked >= revision))
    }

    fn own(&self) -> MutexGuard<'_, BTreeMap<String, ProxyPool>> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::peer::UPLOADS_PER_ORIGIN_MAX;

    #[test]
    fn clients_without_pools_share_the_permits_of_one_origin() {
        let clients = ClientNames::try_new(vec!["proxy".parse().unwrap()], &[]).unwrap();
        let tables = ProxyTables::new(clients);
        let take = |certificate: &str, last| {
            let origin = Origin {
                certificate: Some(certificate.into()),
                address: Some([10, 0, 0, last].into()),
            };
            tables.acquire(StreamQuota::Upload, &origin, Instant::now())
        };
        let strangers: Vec<QuotaPermit> = (1..=99)
            .filter_map(|last| take(&format!("stranger-{last}"), last).ok())
            .collect();
        assert_eq!(strangers.len(), UPLOADS_PER_ORIGIN_MAX);
        assert!(take("proxy", 1).is_ok());
    }
}
