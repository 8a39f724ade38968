//! What the daemon's tasks share: three tables in watch channels, each row with one writer.
//!
//! | table | a row is | written by | read by |
//! |---|---|---|---|
//! | [`Pools`] | a pool's newest view | that pool's task | state streams, EDS streams, admin, persistence |
//! | [`EdsStreams`] | an Envoy's EDS stream | that stream | state streams (ordering), admin |
//! | [`Proxies`] | a proxy's state stream | that stream | pools (slots of the departed), admin |
//!
//! Readers are woken only by change and always read whole rows, so nobody queues old state for anybody.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use proto::state;
use scheduler::Version;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::counters::{Counters, Totals};
use crate::ext_proc::Streams;
use crate::latency::Learners;
use crate::pool::PoolView;
use crate::relay::Relay;
use crate::scrape::{BusyHint, ScrapeStats};
use crate::sources::Components;

/// The newest view of every pool, by name.
#[derive(Clone, Debug, Default)]
pub struct Pools(BTreeMap<Arc<str>, Arc<PoolView>>);

/// The connected state streams, by stream.
pub type Proxies = BTreeMap<u64, Proxy>;

/// The most streams of one kind served at once: far above the proxies of a cluster, far below what memory holds.
pub const STREAMS_MAX: usize = 4096;

/// How long the acknowledgements of a closed EDS stream stand for its node: Envoy waits up to 30 s before it reconnects, and until then
/// it keeps the hosts it had.
pub const EDS_LINGER: Duration = Duration::from_secs(35);

/// Everything the tasks share.
#[derive(Debug)]
pub struct Shared {
    /// This life of the daemon.
    pub term: u64,
    /// Keys the hashes of prompt blocks; the same for all pools and proxies.
    pub hash_secret: u64,
    /// Names of the pools there are, whether or not they have a set yet.
    pub pool_names: Vec<Arc<str>>,
    /// Every pool.
    pub pools: watch::Sender<Pools>,
    /// Envoys' EDS streams.
    pub eds: watch::Sender<EdsStreams>,
    /// Proxies' state streams.
    pub proxies: watch::Sender<Proxies>,
    sequence: AtomicU64,
    stream_id: AtomicU64,
    counters: Mutex<Counters>,
    /// What our own front has, as a proxy has it; nothing where there is no front.
    front: Mutex<BTreeMap<String, ProxyPool>>,
    /// Its streams, counted; nothing where there is no front.
    pub front_streams: OnceLock<Arc<Streams>>,
    relay: Mutex<Relay>,
    /// What was learned of each pool, by the task that learns it.
    pub learned: watch::Sender<BTreeMap<Arc<str>, Arc<state::Learned>>>,
    /// Those who learn; nothing where nobody does.
    pub learners: OnceLock<Learners>,
    /// The components of pools that are discovered, once they are followed.
    pub components: OnceLock<Arc<BTreeMap<Arc<str>, Components>>>,
    /// Wakes those who have something to tell their proxies.
    pub relayed: watch::Sender<()>,
    scrapers: BTreeMap<Arc<str>, ScraperHandle>,
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
pub struct Proxy {
    /// Envoy's node id.
    pub node_id: String,
    /// Its process.
    pub process_id: u64,
    /// Where it connects from.
    pub peer: String,
    /// Since when.
    pub since: SystemTime,
    /// What it has, by pool asked for.
    pub pools: BTreeMap<String, ProxyPool>,
}

/// What a proxy has of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProxyPool {
    /// The roster sent last, and the pool generation it was made of.
    pub sent: Option<(Version, u64)>,
    /// The newest roster in force there, likewise.
    pub acked: Option<(Version, u64)>,
    /// Endpoints held back until its Envoy knows them.
    pub withheld: usize,
    /// Why it refused the last roster, if it did.
    pub refused: Option<String>,
}

/// Every node's EDS streams.
#[derive(Clone, Debug, Default)]
pub struct EdsStreams {
    /// The open ones, by stream.
    pub open: BTreeMap<u64, EdsStream>,
    closed: BTreeMap<(String, String), Closed>,
}

#[derive(Clone, Debug)]
struct Closed {
    at: Instant,
    acked: u64,
}

/// What an Envoy's EDS stream is at.
#[derive(Clone, Debug)]
pub struct EdsStream {
    /// Envoy's node id.
    pub node_id: String,
    /// Where it connects from.
    pub peer: String,
    /// Since when.
    pub since: SystemTime,
    /// What it has, by pool subscribed to.
    pub pools: BTreeMap<String, EdsAck>,
}

/// What an Envoy has of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EdsAck {
    /// The newest EDS generation it acknowledged; 0 is none.
    pub acked: u64,
    /// Why it refused the last, if it did.
    pub refused: Option<String>,
}

/// What the EDS streams of a node say about a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeEds {
    /// None is subscribed: Envoy gets its hosts from elsewhere, or has not asked yet.
    None,
    /// All acknowledged this generation, or a newer one.
    Acked(u64),
}

// === impl Shared ===

impl Shared {
    /// Nothing connected, nothing known of the pools named by `scrapers`.
    #[must_use]
    pub fn new(term: u64, hash_secret: u64, scrapers: BTreeMap<Arc<str>, ScraperHandle>) -> Arc<Self> {
        Arc::new(Self {
            term,
            hash_secret,
            pool_names: scrapers.keys().map(Arc::clone).collect(),
            pools: watch::Sender::new(Pools::default()),
            eds: watch::Sender::new(EdsStreams::default()),
            proxies: watch::Sender::new(Proxies::new()),
            sequence: AtomicU64::new(0),
            stream_id: AtomicU64::new(0),
            counters: Mutex::new(Counters::default()),
            front: Mutex::default(),
            front_streams: OnceLock::new(),
            relay: Mutex::new(Relay::default()),
            learned: watch::Sender::new(BTreeMap::new()),
            learners: OnceLock::new(),
            components: OnceLock::new(),
            relayed: watch::Sender::new(()),
            scrapers,
        })
    }

    /// A version newer than every other of this term.
    pub fn next_version(&self) -> Version {
        Version { term: self.term, sequence: self.sequence.fetch_add(1, Ordering::Relaxed) + 1 }
    }

    /// A name for a stream.
    pub fn next_stream_id(&self) -> u64 {
        self.stream_id.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// What is counted.
    pub fn counters(&self) -> MutexGuard<'_, Counters> {
        self.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What proxies tell each other.
    pub fn relay(&self) -> MutexGuard<'_, Relay> {
        self.relay.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A process reported. Whoever was picked is looked at more often.
    pub fn report(&self, process_id: u64, report: &state::Report, now: Instant) {
        let picked = self.counters().report(process_id, report, now);
        for (pool, id) in picked {
            if let Some(scraper) = self.scrapers.get(pool.as_str()) {
                scraper.busy.picked(id);
            }
        }
    }

    /// A process told what ended requests saw. Never waits.
    pub fn observed(&self, process_id: u64, observations: state::Observations) {
        if let Some(learners) = self.learners.get() {
            learners.told(process_id, observations);
        }
    }

    /// Our own front counted this of a pool.
    pub fn front_counted(&self, pool: &str, totals: Totals, now: Instant) {
        let picked = self.counters().front(pool, totals, now);
        if let Some(scraper) = self.scrapers.get(pool) {
            picked.into_iter().for_each(|id| scraper.busy.picked(id));
        }
    }

    /// Our own front has this of the pools.
    pub fn front_has(&self, pools: BTreeMap<String, ProxyPool>) {
        *self.front.lock().unwrap_or_else(PoisonError::into_inner) = pools;
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

    /// Has every connected proxy that asked for `pool` a roster of `generation` or newer in force, our own front among them?
    #[must_use]
    pub fn acknowledged(&self, pool: &str, generation: u64) -> bool {
        let (proxies, front) = (self.proxies.borrow(), self.front.lock().unwrap_or_else(PoisonError::into_inner));
        let mut rows = proxies.values().map(|proxy| &proxy.pools).chain([&*front]).filter_map(|pools| pools.get(pool));
        rows.all(|row| row.acked.is_some_and(|(_, acked)| acked >= generation))
    }
}

// === impl Pools ===

impl Pools {
    /// The pool of that name, once it has a complete set.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&PoolView> {
        self.0.get(name).map(AsRef::as_ref).filter(|view| view.complete)
    }

    /// All of them, complete or not.
    pub fn iter(&self) -> impl Iterator<Item = &PoolView> {
        self.0.values().map(AsRef::as_ref)
    }
}

// === impl EdsStreams ===

impl EdsStreams {
    /// What the streams of `node_id` say about `pool`. Streams closed a moment ago count as they were.
    #[must_use]
    pub fn of_node(&self, node_id: &str, pool: &str, now: Instant) -> NodeEds {
        let open = self.open.values().filter(|s| s.node_id == node_id).filter_map(|s| s.pools.get(pool));
        if let Some(acked) = open.map(|ack| ack.acked).min() {
            return NodeEds::Acked(acked);
        }
        match self.closed.get(&(node_id.to_owned(), pool.to_owned())) {
            Some(closed) if now.saturating_duration_since(closed.at) < EDS_LINGER => NodeEds::Acked(closed.acked),
            _ => NodeEds::None,
        }
    }

    /// Takes a stream out, remembering for a while what it had acknowledged.
    pub fn close(&mut self, stream_id: u64, now: Instant) {
        self.closed.retain(|_, closed| now.saturating_duration_since(closed.at) < EDS_LINGER);
        let Some(stream) = self.open.remove(&stream_id) else { return };
        for (pool, ack) in stream.pools {
            if self.closed.len() < STREAMS_MAX {
                self.closed.insert((stream.node_id.clone(), pool), Closed { at: now, acked: ack.acked });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(node_id: &str, acked: u64) -> EdsStream {
        let pools = BTreeMap::from([("p".to_owned(), EdsAck { acked, refused: None })]);
        EdsStream { node_id: node_id.to_owned(), peer: String::new(), since: SystemTime::UNIX_EPOCH, pools }
    }

    #[test]
    fn a_node_has_acknowledged_what_all_its_streams_have() {
        let now = Instant::now();
        let mut eds = EdsStreams::default();
        assert_eq!(eds.of_node("n", "p", now), NodeEds::None);
        eds.open.extend([(1, stream("n", 5)), (2, stream("n", 3)), (3, stream("other", 1))]);
        assert_eq!(eds.of_node("n", "p", now), NodeEds::Acked(3));
        assert_eq!(eds.of_node("n", "another pool", now), NodeEds::None);
    }

    #[test]
    fn a_closed_stream_stands_for_its_node_until_envoy_must_be_back() {
        let now = Instant::now();
        let mut eds = EdsStreams::default();
        eds.open.extend([(1, stream("n", 5)), (2, stream("n", 3))]);
        eds.close(1, now);
        assert_eq!(eds.of_node("n", "p", now), NodeEds::Acked(3), "an open stream says more than a closed one");
        eds.close(2, now);
        assert_eq!(eds.of_node("n", "p", now + EDS_LINGER / 2), NodeEds::Acked(3));
        assert_eq!(eds.of_node("n", "p", now + EDS_LINGER), NodeEds::None);
        eds.close(9, now); // never opened
    }
}
