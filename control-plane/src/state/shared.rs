//! What the daemon's tasks share: three tables in watch channels, each row with one writer.
//!
//! | table | a row is | written by | read by |
//! |---|---|---|---|
//! | [`PoolViews`] | a pool's newest view | that pool's task | state streams, EDS streams, admin, persistence |
//! | [`EdsStreams`] | an Envoy's EDS stream | that stream | state streams (ordering), admin |
//! | [`Proxies`] | a proxy's state stream | that stream | pools (slots of the departed), admin |
//!
//! Readers are woken only by change and always read whole rows, so no old state is queued.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use discovery::backend::AppProtocol;
use proto::state;
use scheduler::Version;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::learn::directory::LearnerDirectory;
use crate::pool::watched::WatchedComponents;
use crate::pool::writer::PoolView;
use crate::scrape::{BusyHint, ScrapeStats};
use crate::serve::ext_proc::StreamCounts;
use crate::state::counters::{CounterStore, CounterTotals, VmReport};
use crate::state::peer::{Origin, OriginQuotas, ProxyProcess, RemoteAddress, STREAMS_MAX};
use crate::state::peer_relay::PeerRelay;

/// The newest view of every pool, by name.
#[derive(Clone, Debug, Default)]
pub struct PoolViews(BTreeMap<Arc<str>, Arc<PoolView>>);

/// The connected state streams, by stream.
pub type Proxies = BTreeMap<u64, ConnectedProxy>;

/// How long the acknowledgements of a closed EDS stream stand for its Envoy: Envoy waits up to 30 s before it reconnects, and until then
/// it keeps the hosts it had.
pub const EDS_LINGER: Duration = Duration::from_secs(35);

/// Everything the tasks share.
#[derive(Debug)]
pub struct DaemonState {
    /// This life of the daemon.
    pub life: DaemonLife,
    /// Names of the configured pools, whether or not they have a set yet.
    pub pool_names: Vec<Arc<str>>,
    /// Every pool.
    pub pools: watch::Sender<PoolViews>,
    /// Envoys' EDS streams.
    pub eds: watch::Sender<EdsStreams>,
    /// Proxies' state streams.
    pub proxies: watch::Sender<Proxies>,
    /// What each origin of streams uses of the daemon.
    pub origins: Arc<OriginQuotas>,
    /// What proxies report to each other.
    pub peers: PeerReports,
    /// What was learned.
    pub learning: LearnedPools,
    /// How the operator set up discovery.
    pub discovery: DiscoverySetup,
    /// The daemon's own ext_proc server.
    pub ext_proc: ExtProcState,
    counters: Mutex<CounterStore>,
    scrapers: BTreeMap<Arc<str>, ScraperHandle>,
}

/// One life of the daemon, from start to stop: its keys, and the numbers it gives out.
#[derive(Debug)]
pub struct DaemonLife {
    /// Grows with each start.
    pub term: u64,
    /// Keys the hashes of prompt blocks; the same for all pools and proxies.
    pub hash_secret: u128,
    sequence: AtomicU64,
    stream_id: AtomicU64,
}

/// What proxies report to each other through the daemon.
#[derive(Debug)]
pub struct PeerReports {
    relay: Mutex<PeerRelay>,
    /// Wakes the streams that have something to send to their proxies.
    pub relayed: watch::Sender<()>,
}

/// What was learned of each pool.
#[derive(Debug)]
pub struct LearnedPools {
    /// The models of each pool, by the task that learns them.
    pub models: watch::Sender<BTreeMap<Arc<str>, Arc<state::LearnedModels>>>,
    /// The tasks that learn; empty where learning is off.
    pub learners: OnceLock<LearnerDirectory>,
}

/// How the operator set up discovery.
#[derive(Debug, Default)]
pub struct DiscoverySetup {
    /// What Envoy's clusters speak to model servers, as the operator says; HTTP/1.1 by default.
    pub cluster_protocol: OnceLock<AppProtocol>,
    /// The components of pools that are discovered, once they are followed.
    pub components: OnceLock<Arc<BTreeMap<Arc<str>, WatchedComponents>>>,
}

/// The daemon's own ext_proc server; empty where it does not run.
#[derive(Debug, Default)]
pub struct ExtProcState {
    /// What it has of each pool, as a proxy has it.
    pools: Mutex<BTreeMap<String, ProxyPool>>,
    /// Its streams, counted.
    pub streams: OnceLock<Arc<StreamCounts>>,
}

/// What others need of a pool's scraper.
#[derive(Clone, Debug)]
pub struct ScraperHandle {
    /// Tells it who was picked.
    pub busy: BusyHint,
    /// Its counters.
    pub stats: Arc<ScrapeStats>,
}

/// What a proxy's state stream is at.
#[derive(Clone, Debug)]
pub struct ConnectedProxy {
    /// Who it is.
    pub peer: ProxyProcess,
    /// Since when.
    pub since: SystemTime,
    /// What it has, by pool asked for.
    pub pools: BTreeMap<String, ProxyPool>,
}

/// What a proxy has of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProxyPool {
    /// The pool update sent last, and the pool revision it was made of.
    pub sent: Option<(Version, u64)>,
    /// The newest pool update in force there, likewise.
    pub acked: Option<(Version, u64)>,
    /// Endpoints held back until its Envoy knows them.
    pub withheld: usize,
    /// Why it refused the last pool update, if it did.
    pub refused: Option<String>,
}

/// Every Envoy's EDS streams.
///
/// Envoy does not say which process an EDS stream is of. Those that share a connection with a state stream are of its process; where there is none,
/// those of the same origin and node id are taken for it.
#[derive(Clone, Debug, Default)]
pub struct EdsStreams {
    /// The open ones, by stream.
    pub open: BTreeMap<u64, EdsStream>,
    /// The open ones of each Envoy, as far as Envoys are told apart.
    by_envoy: BTreeMap<(Origin, String), BTreeSet<u64>>,
    closed: BTreeMap<(Origin, String, String), ClosedEdsStream>,
}

#[derive(Clone, Debug)]
struct ClosedEdsStream {
    at: Instant,
    acked: u64,
}

/// What an Envoy's EDS stream is at.
#[derive(Clone, Debug)]
pub struct EdsStream {
    /// Envoy's node id.
    pub node_id: String,
    /// Where it connects from.
    pub remote: RemoteAddress,
    /// Since when.
    pub since: SystemTime,
    /// What it has, by pool subscribed to.
    pub pools: BTreeMap<String, EdsAck>,
}

/// What an Envoy has of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EdsAck {
    /// The newest EDS revision it acknowledged; 0 is none.
    pub acked: u64,
    /// Why it refused the last, if it did.
    pub refused: Option<String>,
    /// It has not taken over the newest it was sent for longer than [`crate::serve::eds::EDS_ACK_WAIT_MAX`].
    pub late: bool,
}

/// What the EDS streams of a proxy say about a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyEds {
    /// None is subscribed, or none answers: Envoy gets its hosts from elsewhere, or has not asked yet.
    None,
    /// All acknowledged this revision, or a newer one.
    Acked(u64),
}

// === impl DaemonState ===

impl DaemonState {
    /// Nothing connected, nothing known of the pools named by `scrapers`.
    #[must_use]
    pub fn new(term: u64, hash_secret: u128, scrapers: BTreeMap<Arc<str>, ScraperHandle>) -> Arc<Self> {
        Arc::new(Self {
            life: DaemonLife { term, hash_secret, sequence: AtomicU64::new(0), stream_id: AtomicU64::new(0) },
            pool_names: scrapers.keys().map(Arc::clone).collect(),
            pools: watch::Sender::new(PoolViews::default()),
            eds: watch::Sender::new(EdsStreams::default()),
            proxies: watch::Sender::new(Proxies::new()),
            origins: Arc::default(),
            peers: PeerReports { relay: Mutex::new(PeerRelay::default()), relayed: watch::Sender::new(()) },
            learning: LearnedPools { models: watch::Sender::new(BTreeMap::new()), learners: OnceLock::new() },
            discovery: DiscoverySetup::default(),
            ext_proc: ExtProcState::default(),
            counters: Mutex::new(CounterStore::default()),
            scrapers,
        })
    }

    /// A version newer than every other of this term.
    pub fn next_version(&self) -> Version {
        Version { term: self.life.term, sequence: self.life.sequence.fetch_add(1, Ordering::Relaxed) + 1 }
    }

    /// A name for a stream.
    pub fn next_stream_id(&self) -> u64 {
        self.life.stream_id.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// What is counted.
    pub fn counters(&self) -> MutexGuard<'_, CounterStore> {
        self.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What proxies tell each other.
    pub fn relay(&self) -> MutexGuard<'_, PeerRelay> {
        self.peers.relay.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A process reported. Whoever was picked is looked at more often.
    pub fn report(&self, peer: &ProxyProcess, report: Vec<state::VmCounters>, now: Instant) {
        // What takes long is done before others are kept waiting.
        let totals: Vec<_> = report.into_iter().map(VmReport::from_vm).collect();
        let picked = self.counters().report(peer, totals, now);
        for (pool, id) in picked {
            if let Some(scraper) = self.scrapers.get(&*pool) {
                scraper.busy.hint(id);
            }
        }
    }

    /// Queues the observations of a process. Never waits.
    pub fn observed(&self, process_id: u64, observations: state::Observations) {
        if let Some(learners) = self.learning.learners.get() {
            learners.enqueue(process_id, observations);
        }
    }

    /// Our own front counted this of a pool.
    pub fn front_counted(&self, pool: &str, totals: CounterTotals, now: Instant) {
        let picked = self.counters().report_local(pool, totals, now);
        if let Some(scraper) = self.scrapers.get(pool) {
            picked.into_iter().for_each(|id| scraper.busy.hint(id));
        }
    }

    /// Our own front has this of the pools.
    pub fn front_has(&self, pools: BTreeMap<String, ProxyPool>) {
        *self.ext_proc.pools.lock().unwrap_or_else(PoisonError::into_inner) = pools;
    }

    /// Counters of a pool's scraper.
    #[must_use]
    pub fn scrape_stats(&self, pool: &str) -> Option<&ScrapeStats> {
        self.scrapers.get(pool).map(|scraper| &*scraper.stats)
    }

    /// Puts a pool's new view before the readers.
    pub fn publish(&self, view: PoolView) {
        self.pools.send_modify(|pools| {
            pools.0.insert(Arc::clone(&view.name), Arc::new(view));
        });
    }

    /// Has every connected proxy that asked for `pool` a pool update of `revision` or newer in force, our own front among them?
    #[must_use]
    pub fn acknowledged(&self, pool: &str, revision: u64) -> bool {
        let (proxies, front) = (self.proxies.borrow(), self.ext_proc.pools.lock().unwrap_or_else(PoisonError::into_inner));
        let mut rows = proxies.values().map(|proxy| &proxy.pools).chain([&*front]).filter_map(|pools| pools.get(pool));
        rows.all(|row| row.acked.is_some_and(|(_, acked)| acked >= revision))
    }
}

// === impl PoolViews ===

impl PoolViews {
    /// The pool of that name, once it has a complete set.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&PoolView> {
        self.0.get(name).map(AsRef::as_ref).filter(|view| view.sources.complete)
    }

    /// All of them, complete or not.
    pub fn iter(&self) -> impl Iterator<Item = &PoolView> {
        self.0.values().map(AsRef::as_ref)
    }
}

// === impl EdsStreams ===

impl EdsStreams {
    /// What the streams of `peer` say about `pool`. Streams closed a moment ago count as they were.
    #[must_use]
    pub fn of(&self, peer: &ProxyProcess, pool: &str, now: Instant) -> ProxyEds {
        let ProxyProcess { node_id, remote, .. } = peer;
        let envoy = (remote.origin.clone(), node_id.clone());
        let streams = self.by_envoy.get(&envoy).into_iter().flatten().filter_map(|id| self.open.get(id));
        let acks = streams.filter_map(|stream| Some((stream.is_of(remote), stream.pools.get(pool)?)));
        let [mut own, mut any] = [EdsAckSummary::default(); 2];
        for (is_own, ack) in acks {
            if is_own {
                // What its Envoy refused it does not have, however long ago.
                own.add(ack, ack.late && ack.refused.is_none());
            } else {
                any.add(ack, ack.late);
            }
        }
        let acks = if own.streams > 0 { own } else { any };
        match (acks.least, self.closed.get(&(envoy.0, envoy.1, pool.to_owned()))) {
            (Some(acked), _) => ProxyEds::Acked(acked),
            (None, Some(closed)) if acks.streams == 0 && now.saturating_duration_since(closed.at) < EDS_LINGER => {
                ProxyEds::Acked(closed.acked)
            }
            _ => ProxyEds::None,
        }
    }

    /// Takes a stream in.
    pub fn open(&mut self, stream_id: u64, stream: EdsStream) {
        self.by_envoy.entry(stream.envoy()).or_default().insert(stream_id);
        self.open.insert(stream_id, stream);
    }

    /// Takes a stream out, remembering for a while what it had acknowledged.
    pub fn close(&mut self, stream_id: u64, now: Instant) {
        self.closed.retain(|_, closed| now.saturating_duration_since(closed.at) < EDS_LINGER);
        let Some(stream) = self.open.remove(&stream_id) else { return };
        let envoy = stream.envoy();
        if let Some(streams) = self.by_envoy.get_mut(&envoy) {
            streams.remove(&stream_id);
            if streams.is_empty() {
                self.by_envoy.remove(&envoy);
            }
        }
        // One that acknowledged nothing says nothing of what its Envoy has.
        for (pool, ack) in stream.pools.into_iter().filter(|(_, ack)| ack.acked > 0 && !ack.late) {
            if self.closed.len() < STREAMS_MAX {
                self.closed.insert((envoy.0.clone(), envoy.1.clone(), pool), ClosedEdsStream { at: now, acked: ack.acked });
            }
        }
    }
}

/// What some streams have acknowledged.
#[derive(Clone, Copy, Debug, Default)]
struct EdsAckSummary {
    streams: usize,
    /// The least of those that count.
    least: Option<u64>,
}

impl EdsAckSummary {
    fn add(&mut self, ack: &EdsAck, is_left_out: bool) {
        self.streams += 1;
        if !is_left_out {
            self.least = Some(self.least.map_or(ack.acked, |least| least.min(ack.acked)));
        }
    }
}

// === impl EdsStream ===

impl EdsStream {
    fn envoy(&self) -> (Origin, String) {
        (self.remote.origin.clone(), self.node_id.clone())
    }

    /// Is it on that very connection?
    fn is_of(&self, remote: &RemoteAddress) -> bool {
        self.remote.socket.is_some() && self.remote.socket == remote.socket
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: &str = "n";

    fn remote(last: u8, port: u16) -> RemoteAddress {
        RemoteAddress::new(None, Some(([10, 0, 0, last], port).into()))
    }

    fn peer(remote: RemoteAddress) -> ProxyProcess {
        ProxyProcess { node_id: NODE.to_owned(), process_id: 1, id: 1, remote }
    }

    fn stream(remote: RemoteAddress, acked: u64) -> EdsStream {
        let pools = BTreeMap::from([("p".to_owned(), EdsAck { acked, ..EdsAck::default() })]);
        EdsStream { node_id: NODE.to_owned(), remote, since: SystemTime::UNIX_EPOCH, pools }
    }

    #[test]
    fn a_proxy_has_what_all_streams_of_its_connection_have_else_those_of_its_origin_and_node() {
        let now = Instant::now();
        let mut eds = EdsStreams::default();
        assert_eq!(eds.of(&peer(remote(1, 1)), "p", now), ProxyEds::None);
        eds.open(1, stream(remote(1, 1), 5));
        eds.open(2, stream(remote(1, 1), 4));
        eds.open(3, stream(remote(1, 2), 3));
        eds.open(4, stream(remote(2, 1), 1));
        eds.open(5, EdsStream { node_id: "other".to_owned(), ..stream(remote(1, 1), 0) });
        assert_eq!(eds.of(&peer(remote(1, 1)), "p", now), ProxyEds::Acked(4));
        assert_eq!(eds.of(&peer(remote(1, 9)), "p", now), ProxyEds::Acked(3));
        assert_eq!(eds.of(&peer(remote(3, 1)), "p", now), ProxyEds::None);
        assert_eq!(eds.of(&peer(remote(1, 1)), "another pool", now), ProxyEds::None);
    }

    #[test]
    fn one_that_does_not_answer_counts_no_more_and_one_that_refuses_only_for_its_own_connection() {
        let now = Instant::now();
        let mut eds = EdsStreams::default();
        let mut late = stream(remote(1, 1), 0);
        late.pools.get_mut("p").unwrap().late = true;
        eds.open(1, late.clone());
        assert_eq!(eds.of(&peer(remote(1, 1)), "p", now), ProxyEds::None);
        late.pools.get_mut("p").unwrap().refused = Some("no".to_owned());
        eds.open(1, late);
        assert_eq!(eds.of(&peer(remote(1, 1)), "p", now), ProxyEds::Acked(0));
        assert_eq!(eds.of(&peer(remote(1, 2)), "p", now), ProxyEds::None);
        eds.open(2, stream(remote(1, 2), 8));
        assert_eq!(eds.of(&peer(remote(1, 3)), "p", now), ProxyEds::Acked(8));
    }

    #[test]
    fn a_closed_stream_stands_for_its_envoy_until_envoy_must_be_back() {
        let now = Instant::now();
        let mut eds = EdsStreams::default();
        let peer = peer(remote(1, 9));
        eds.open(1, stream(remote(1, 1), 5));
        eds.open(2, stream(remote(1, 2), 3));
        eds.close(1, now);
        assert_eq!(eds.of(&peer, "p", now), ProxyEds::Acked(3), "an open stream says more than a closed one");
        eds.close(2, now);
        assert_eq!(eds.of(&peer, "p", now + EDS_LINGER / 2), ProxyEds::Acked(3));
        assert_eq!(eds.of(&peer, "p", now + EDS_LINGER), ProxyEds::None);
        eds.open(3, stream(remote(1, 1), 0));
        eds.close(3, now);
        assert_eq!(eds.of(&peer, "p", now), ProxyEds::Acked(3), "one that acknowledged nothing says nothing");
        eds.close(9, now); // never opened
        assert!(eds.by_envoy.is_empty());
    }
}
