//! The state that the daemon's tasks share: three tables in watch channels; each row has one
//! writer.
//!
//! | table | row | writer | readers |
//! |---|---|---|---|
//! | [`PoolViews`] | a pool's newest view | that pool's task | state streams, EDS streams, admin, persistence |
//! | [`EdsStreams`] | an Envoy's EDS stream | that stream | state streams (ordering), admin |
//! | [`Proxies`] | a proxy's state stream | that stream | pools (slots of departed endpoints), admin |
//!
//! A change wakes the readers, which always read whole rows, so no queue of old state builds up.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use discovery::backend::AppProtocol;
use ext_proc::{SpanCounts, StreamCounts};
use proto::state;
use scheduler::Version;
use scheduler::latency::step::StepModel;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::learn::directory::LearnerDirectory;
use crate::pool::discovery_source::WatchedComponents;
use crate::pool::writer::PoolView;
use crate::scaling::ScalingSignals;
use crate::scrape::{BusyHint, ScrapeStats};
use crate::state::counters::{CounterStore, CounterTotals, VmReport};
use crate::state::decision_log::DecisionLog;
use crate::state::peer::{Origin, OriginQuotas, ProxyProcess, RemoteAddress, STREAMS_MAX};
use crate::state::peer_relay::PeerRelay;
use crate::state::traffic::TrafficHistory;

/// The newest view of each pool, by name.
#[derive(Clone, Debug, Default)]
pub struct PoolViews(BTreeMap<Arc<str>, Arc<PoolView>>);

/// The connected state streams, by stream id.
pub type Proxies = BTreeMap<u64, ConnectedProxy>;

/// How long the acknowledgements of a closed EDS stream still count for its Envoy. Envoy waits up
/// to 30 s before it reconnects, and until then it keeps its hosts.
pub const EDS_LINGER: Duration = Duration::from_secs(35);

/// The state that all tasks share. It has many fields because each is a table with another writer.
#[derive(Debug)]
pub struct DaemonState {
    /// Term, keys and numbers of this daemon.
    pub life: DaemonLife,
    /// The names of all configured pools, with or without a complete set of endpoints.
    pub pool_names: Vec<Arc<str>>,
    pub pools: watch::Sender<PoolViews>,
    /// The EDS streams of Envoys.
    pub eds: watch::Sender<EdsStreams>,
    /// The state streams of proxies.
    pub proxies: watch::Sender<Proxies>,
    /// The resources used by each origin.
    pub origins: Arc<OriginQuotas>,
    /// Load reports and placements of proxies.
    pub peers: PeerReports,
    /// Learned models.
    pub learning: LearnedPools,
    /// How the operator set up discovery.
    pub discovery: DiscoverySetup,
    /// The daemon's own ext_proc server.
    pub ext_proc: ExtProcState,
    counters: Mutex<CounterStore>,
    console: ConsoleState,
    scrapers: BTreeMap<Arc<str>, ScraperHandle>,
}

/// One run of the daemon, from start to stop: whether it leads, and the numbers it gives out. Only
/// [`crate::daemon`] begins and ends terms.
#[derive(Debug)]
pub struct DaemonLife {
    leadership: watch::Sender<Leadership>,
    sequence: AtomicU64,
    stream_id: AtomicU64,
}

/// Whether the daemon leads, and what a leader decides for all proxies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leadership {
    /// Whether the daemon leads now.
    pub leads: bool,
    /// The newest term that the daemon knows: its own while it leads. It never shrinks.
    pub term: u64,
    /// Keys the hashes of prompt blocks; the same for all pools and proxies.
    pub hash_secret: u128,
}

/// Load reports and placements that proxies send to each other through the daemon.
#[derive(Debug)]
pub struct PeerReports {
    relay: Mutex<PeerRelay>,
    /// Wakes the state streams when the relay has new load or placements.
    pub relayed: watch::Sender<()>,
}

/// The learned models of each pool, and what is computed from them.
#[derive(Debug, Default)]
pub struct LearnedPools {
    /// The models of each pool; the learning task of the pool writes them.
    pub models: watch::Sender<BTreeMap<Arc<str>, Arc<state::LearnedModels>>>,
    /// The learners; unset until they are started.
    pub learners: OnceLock<LearnerDirectory>,
    /// The signals to scale by; unset until their traffic is recorded.
    pub scaling: OnceLock<Arc<ScalingSignals>>,
}

/// The data that only the console shows.
#[derive(Debug, Default)]
struct ConsoleState {
    traffic: Mutex<TrafficHistory>,
    decisions: Mutex<DecisionLog>,
}

/// How the operator set up discovery.
#[derive(Debug, Default)]
pub struct DiscoverySetup {
    /// The protocol of Envoy's clusters towards model servers, from the command line; HTTP/1.1 if
    /// unset.
    pub cluster_protocol: OnceLock<AppProtocol>,
    /// The discovered components of all pools, once they are followed.
    pub components: OnceLock<Arc<BTreeMap<Arc<str>, WatchedComponents>>>,
}

/// The daemon's own ext_proc server; empty where it does not run.
#[derive(Debug, Default)]
pub struct ExtProcState {
    /// The state that the server has of each pool, in the same form as that of a proxy.
    pools: Mutex<BTreeMap<String, ProxyPool>>,
    /// The counts of its streams; unset without an ext_proc server.
    pub streams: OnceLock<Arc<StreamCounts>>,
    /// The counts of its spans; unset without a collector.
    pub spans: OnceLock<Arc<SpanCounts>>,
}

/// The parts of a pool's scraper that other tasks use.
#[derive(Clone, Debug)]
pub struct ScraperHandle {
    /// Reports picked endpoints to the scraper.
    pub busy: BusyHint,
    /// The counters of the scraper.
    pub stats: Arc<ScrapeStats>,
}

/// The status of a proxy's state stream.
#[derive(Clone, Debug)]
pub struct ConnectedProxy {
    pub peer: ProxyProcess,
    /// The release of the filter; empty if the filter is too old to send it.
    pub release: String,
    /// When the stream was opened.
    pub since: SystemTime,
    /// The state that the proxy has, by requested pool.
    pub pools: BTreeMap<String, ProxyPool>,
}

/// The state of a pool that a proxy has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProxyPool {
    /// The pool update sent last, and the pool revision that it was made from.
    pub sent: Option<(Version, u64)>,
    /// The newest pool update that the proxy acknowledged, and the pool revision that it was made
    /// from.
    pub acked: Option<(Version, u64)>,
    /// When it acknowledged that.
    pub acked_at: Option<Instant>,
    /// Endpoints withheld until the proxy's Envoy has them.
    pub withheld: usize,
    /// Why the proxy refused the last pool update; `None` if it did not.
    pub refused: Option<String>,
}

/// The EDS streams of all Envoys.
///
/// Envoy does not say which process an EDS stream belongs to. Streams on the same connection as a
/// state stream belong to its process. If there is none, streams of the same origin and node id are
/// assumed to belong to it.
#[derive(Clone, Debug, Default)]
pub struct EdsStreams {
    /// The open streams, by stream id.
    pub open: BTreeMap<u64, EdsStream>,
    /// The open streams of each Envoy, identified by origin and node id.
    by_envoy: BTreeMap<(Origin, String), BTreeSet<u64>>,
    closed: BTreeMap<(Origin, String, String), ClosedEdsStream>,
}

#[derive(Clone, Debug)]
struct ClosedEdsStream {
    at: Instant,
    acked: u64,
}

/// The status of an Envoy's EDS stream.
#[derive(Clone, Debug)]
pub struct EdsStream {
    /// Envoy's node id.
    pub node_id: String,
    /// The address that the Envoy connects from.
    pub remote: RemoteAddress,
    /// When the stream was opened.
    pub since: SystemTime,
    /// The state that the Envoy has, by subscribed pool.
    pub pools: BTreeMap<String, EdsAck>,
}

/// The EDS state of a pool that an Envoy has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EdsAck {
    /// The newest EDS revision that the Envoy acknowledged; 0 means none.
    pub acked: u64,
    /// Why the Envoy refused the last response; `None` if it did not.
    pub refused: Option<String>,
    /// Whether the Envoy has not applied the newest response for longer than
    /// [`crate::serve::eds::EDS_ACK_WAIT_MAX`].
    pub late: bool,
}

/// The EDS state of a pool that the streams of a proxy's Envoy have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyEds {
    /// No stream subscribes to the pool, or none answers: Envoy gets its hosts from elsewhere, or
    /// has not subscribed yet.
    None,
    /// All streams acknowledged this revision or a newer one.
    Acked(u64),
}

// === impl DaemonState ===

impl DaemonState {
    /// The state of a new daemon that stands by after `term`: no connections, and no views of the
    /// pools that `scrapers` names.
    #[must_use]
    pub fn new(
        term: u64,
        hash_secret: u128,
        scrapers: BTreeMap<Arc<str>, ScraperHandle>,
    ) -> Arc<Self> {
        Arc::new(Self {
            life: DaemonLife {
                leadership: watch::Sender::new(Leadership {
                    leads: false,
                    term,
                    hash_secret,
                }),
                sequence: AtomicU64::new(0),
                stream_id: AtomicU64::new(0),
            },
            pool_names: scrapers.keys().map(Arc::clone).collect(),
            pools: watch::Sender::new(PoolViews::default()),
            eds: watch::Sender::new(EdsStreams::default()),
            proxies: watch::Sender::new(Proxies::new()),
            origins: Arc::default(),
            peers: PeerReports {
                relay: Mutex::new(PeerRelay::default()),
                relayed: watch::Sender::new(()),
            },
            learning: LearnedPools::default(),
            discovery: DiscoverySetup::default(),
            ext_proc: ExtProcState::default(),
            counters: Mutex::default(),
            console: ConsoleState::default(),
            scrapers,
        })
    }

    /// A version newer than all earlier ones of this daemon.
    pub fn next_version(&self) -> Version {
        Version {
            term: self.life.term(),
            sequence: self.life.sequence.fetch_add(1, Ordering::Relaxed) + 1,
        }
    }

    /// Whether the daemon has clients: proxies because it leads, or gateways by ext_proc.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.life.leads() || self.ext_proc.streams.get().is_some()
    }

    pub fn next_stream_id(&self) -> u64 {
        self.life.stream_id.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Locks the counters.
    pub fn counters(&self) -> MutexGuard<'_, CounterStore> {
        self.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the traffic of the last hour.
    pub fn traffic(&self) -> MutexGuard<'_, TrafficHistory> {
        self.console
            .traffic
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the sampled decisions.
    pub fn decisions(&self) -> MutexGuard<'_, DecisionLog> {
        self.console
            .decisions
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a sample of every pool to the traffic of the last hour.
    pub fn sample_traffic(&self, now: Instant) {
        for pool in &self.pool_names {
            let (totals, earlier) = {
                let counters = self.counters();
                (counters.totals(pool, now), counters.first_reports(pool))
            };
            self.traffic().record(pool, &totals, &earlier, now);
        }
    }

    /// Locks the relay between proxies.
    pub fn relay(&self) -> MutexGuard<'_, PeerRelay> {
        self.peers
            .relay
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the report of a process, and scrapes the picked endpoints more often.
    pub fn report(&self, peer: &ProxyProcess, mut report: Vec<state::VmCounters>, now: Instant) {
        for vm in &mut report {
            self.keep_decision(
                &vm.pool,
                &peer.node_id,
                &std::mem::take(&mut vm.decision),
                now,
            );
        }
        // Parse before the lock is taken, so that other tasks do not wait.
        let totals: Vec<_> = report.into_iter().map(VmReport::from_vm).collect();
        let picked = self.counters().report(peer, totals, now);
        for (pool, id) in picked {
            if let Some(scraper) = self.scrapers.get(&*pool) {
                scraper.busy.hint(id);
            }
        }
    }

    /// Keeps a sampled decision of a pool that is served; an empty record is none.
    pub fn keep_decision(&self, pool: &str, source: &str, record: &str, now: Instant) {
        if let Some(pool) = self
            .pool_names
            .iter()
            .find(|name| ***name == *pool)
            .filter(|_| !record.is_empty())
        {
            self.decisions().keep(pool, source, record, now);
        }
    }

    /// Queues the observations of a process. Never waits.
    pub fn observed(&self, process_id: u64, observations: state::Observations) {
        if let Some(learners) = self.learning.learners.get() {
            learners.enqueue(process_id, observations);
        }
    }

    /// Queues the learned models that a proxy has, if the daemon lacks them. Never waits.
    pub fn claimed(&self, models: state::LearnedModels) {
        if let Some(learners) = self.learning.learners.get() {
            learners.enqueue_models(models);
        }
    }

    /// Records the counters of a pool that this process's own ext_proc server counted.
    pub fn record_ext_proc_counters(&self, pool: &str, totals: CounterTotals, now: Instant) {
        let picked = self.counters().report_local(pool, totals, now);
        if let Some(scraper) = self.scrapers.get(pool) {
            picked.into_iter().for_each(|id| scraper.busy.hint(id));
        }
    }

    /// Replaces the state that this process's own ext_proc server has of each pool.
    pub fn set_ext_proc_pools(&self, pools: BTreeMap<String, ProxyPool>) {
        *self
            .ext_proc
            .pools
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = pools;
    }

    /// The counters of a pool's scraper.
    #[must_use]
    pub fn scrape_stats(&self, pool: &str) -> Option<&ScrapeStats> {
        self.scrapers.get(pool).map(|scraper| &*scraper.stats)
    }

    /// Publishes a new view of a pool to the readers.
    pub fn publish(&self, view: PoolView) {
        self.pools.send_modify(|pools| {
            pools.0.insert(Arc::clone(&view.name), Arc::new(view));
        });
    }

    /// Whether every proxy that requested `pool`, and this process's own ext_proc server, has
    /// acknowledged a pool update of `revision` or newer.
    #[must_use]
    pub fn acknowledged(&self, pool: &str, revision: u64) -> bool {
        let proxies = self.proxies.borrow();
        let own = self
            .ext_proc
            .pools
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut rows = proxies
            .values()
            .map(|proxy| &proxy.pools)
            .chain([&*own])
            .filter_map(|pools| pools.get(pool));
        rows.all(|row| row.acked.is_some_and(|(_, acked)| acked >= revision))
    }
}

// === impl LearnedPools ===

impl LearnedPools {
    /// The step model of a pool; the default one until it is learned.
    #[must_use]
    pub fn step_model(&self, pool: &str) -> Arc<StepModel> {
        let words = self
            .models
            .borrow()
            .get(pool)
            .map(|models| StepModel::from_words(&models.step));
        Arc::new(words.and_then(Result::ok).unwrap_or_default())
    }
}

// === impl DaemonLife ===

impl DaemonLife {
    /// Whether the daemon leads now.
    #[must_use]
    pub fn leads(&self) -> bool {
        self.leadership.borrow().leads
    }

    /// The newest term that the daemon knows.
    #[must_use]
    pub fn term(&self) -> u64 {
        self.leadership.borrow().term
    }

    /// The key of the hashes of prompt blocks.
    #[must_use]
    pub fn hash_secret(&self) -> u128 {
        self.leadership.borrow().hash_secret
    }

    /// Wakes its holder when the daemon begins or ends to lead.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<Leadership> {
        self.leadership.subscribe()
    }

    /// Begins a term, which must be newer than all that the daemon knows.
    pub fn begin_term(&self, term: u64, hash_secret: u128) {
        self.leadership.send_modify(|now| {
            *now = Leadership {
                term,
                hash_secret,
                ..*now
            }
        });
    }

    /// Records whether the daemon leads.
    pub fn set_leads(&self, leads: bool) {
        self.leadership.send_modify(|now| now.leads = leads);
    }
}

// === impl PoolViews ===

impl PoolViews {
    /// The pool of this name, if it has a complete set of endpoints.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&PoolView> {
        self.0
            .get(name)
            .map(AsRef::as_ref)
            .filter(|view| view.sources.complete)
    }

    /// All views, complete or not.
    pub fn iter(&self) -> impl Iterator<Item = &PoolView> {
        self.0.values().map(AsRef::as_ref)
    }
}

// === impl EdsStreams ===

impl EdsStreams {
    /// The state of `pool` that the streams of `peer`'s Envoy have. Streams closed less than
    /// [`EDS_LINGER`] ago count with their last state.
    #[must_use]
    pub fn of(&self, peer: &ProxyProcess, pool: &str, now: Instant) -> ProxyEds {
        let ProxyProcess {
            node_id, remote, ..
        } = peer;
        let envoy = (remote.origin.clone(), node_id.clone());
        let streams = self
            .by_envoy
            .get(&envoy)
            .into_iter()
            .flatten()
            .filter_map(|id| self.open.get(id));
        let acks =
            streams.filter_map(|stream| Some((stream.is_of(remote), stream.pools.get(pool)?)));
        let [mut own, mut any] = [EdsAckSummary::default(); 2];
        for (is_own, ack) in acks {
            if is_own {
                // An Envoy that refused a set has not applied it, however long ago that was.
                own.add(ack, ack.late && ack.refused.is_none());
            } else {
                any.add(ack, ack.late);
            }
        }
        let acks = if own.streams > 0 { own } else { any };
        match (
            acks.least,
            self.closed.get(&(envoy.0, envoy.1, pool.to_owned())),
        ) {
            (Some(acked), _) => ProxyEds::Acked(acked),
            (None, Some(closed))
                if acks.streams == 0 && now.saturating_duration_since(closed.at) < EDS_LINGER =>
            {
                ProxyEds::Acked(closed.acked)
            }
            _ => ProxyEds::None,
        }
    }

    /// Adds a stream.
    pub fn open(&mut self, stream_id: u64, stream: EdsStream) {
        self.by_envoy
            .entry(stream.envoy())
            .or_default()
            .insert(stream_id);
        self.open.insert(stream_id, stream);
    }

    /// Removes a stream. What it acknowledged still counts for [`EDS_LINGER`].
    pub fn close(&mut self, stream_id: u64, now: Instant) {
        self.closed
            .retain(|_, closed| now.saturating_duration_since(closed.at) < EDS_LINGER);
        let Some(stream) = self.open.remove(&stream_id) else {
            return;
        };
        let envoy = stream.envoy();
        if let Some(streams) = self.by_envoy.get_mut(&envoy) {
            streams.remove(&stream_id);
            if streams.is_empty() {
                self.by_envoy.remove(&envoy);
            }
        }
        // A stream that acknowledged nothing gives no information about its Envoy.
        for (pool, ack) in stream
            .pools
            .into_iter()
            .filter(|(_, ack)| ack.acked > 0 && !ack.late)
        {
            if self.closed.len() < STREAMS_MAX {
                self.closed.insert(
                    (envoy.0.clone(), envoy.1.clone(), pool),
                    ClosedEdsStream {
                        at: now,
                        acked: ack.acked,
                    },
                );
            }
        }
    }
}

/// A summary of what some streams acknowledged.
#[derive(Clone, Copy, Debug, Default)]
struct EdsAckSummary {
    streams: usize,
    /// The least revision among the streams that count.
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

    /// Whether the stream is on the connection `remote`.
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
        ProxyProcess {
            node_id: NODE.to_owned(),
            process_id: 1,
            id: 1,
            remote,
        }
    }

    fn stream(remote: RemoteAddress, acked: u64) -> EdsStream {
        let pools = BTreeMap::from([(
            "p".to_owned(),
            EdsAck {
                acked,
                ..EdsAck::default()
            },
        )]);
        EdsStream {
            node_id: NODE.to_owned(),
            remote,
            since: SystemTime::UNIX_EPOCH,
            pools,
        }
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
        eds.open(
            5,
            EdsStream {
                node_id: "other".to_owned(),
                ..stream(remote(1, 1), 0)
            },
        );
        assert_eq!(eds.of(&peer(remote(1, 1)), "p", now), ProxyEds::Acked(4));
        assert_eq!(eds.of(&peer(remote(1, 9)), "p", now), ProxyEds::Acked(3));
        assert_eq!(eds.of(&peer(remote(3, 1)), "p", now), ProxyEds::None);
        assert_eq!(
            eds.of(&peer(remote(1, 1)), "another pool", now),
            ProxyEds::None
        );
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
        assert_eq!(
            eds.of(&peer, "p", now),
            ProxyEds::Acked(3),
            "open streams count before closed ones"
        );
        eds.close(2, now);
        assert_eq!(eds.of(&peer, "p", now + EDS_LINGER / 2), ProxyEds::Acked(3));
        assert_eq!(eds.of(&peer, "p", now + EDS_LINGER), ProxyEds::None);
        eds.open(3, stream(remote(1, 1), 0));
        eds.close(3, now);
        assert_eq!(
            eds.of(&peer, "p", now),
            ProxyEds::Acked(3),
            "a stream that acknowledged nothing is ignored"
        );
        eds.close(9, now); // never opened
        assert!(eds.by_envoy.is_empty());
    }
}
