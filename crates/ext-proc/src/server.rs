//! The state of the ext_proc server: one [`ManagedPool`] for each pool, as each worker of a proxy
//! has one.
//!
//! The server applies, refuses and acknowledges the daemon's messages as a proxy does, so that the
//! daemon reuses no slot that the server still uses.
//!
//! A pool is behind a lock that is held for one step of one exchange, some tens of µs, and never
//! across a wait.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use exchange::{ManagedPool, Timestamp};
use pool_state::{
    Applied, AppliedVersions, CountHistogram, DURATION_BOUNDS_MS, DaemonUpdate, EncodedObservation,
    LocalPeer, RejectedMessage,
};
use proto::state;
use scheduler::prefix::ENTRIES_DEFAULT;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::Instant;

use super::counts::StreamCounts;
use super::open_streams::OpenStreams;
use super::retry_copies::RetryCopies;
use super::span::SpanQueue;
use super::wire;

/// The maximum number of requests that wait for a pool's first state at once, each with its body.
/// Further requests are answered at once.
const PARKED_MAX: usize = 1_024;

/// After this time the server is ready as soon as one pool has state. A reachable source is read
/// within seconds. A source that cannot be read must not prevent picks in the other pools.
const ALL_POOLS_WAIT_MAX: Duration = Duration::from_secs(30);

/// The server prunes its list of streams with held requests once the list is longer than this
/// constant plus twice the number of requests held now. Until then, streams whose requests were
/// sent stay in the list.
const ENDED_STREAMS_MAX: usize = 64;

/// Knows which pool a gateway wants by the Service that it calls.
pub trait ServiceDirectory: Debug + Send + Sync {
    /// The pool whose picker is the Service of this authority, if exactly one pool names it.
    fn pool_of_service(&self, authority: &str) -> Option<Arc<str>>;
}

/// The ext_proc server, shared by its streams.
#[derive(Debug)]
pub struct ExtProcServer {
    pools: BTreeMap<Arc<str>, Arc<ServedPool>>,
    destination_namespace: String,
    /// Finds pools by their Services; unset if no pool has one.
    services: OnceLock<Box<dyn ServiceDirectory>>,
    began: Instant,
    /// Permits for requests that wait for state.
    parking: Arc<Semaphore>,
    streams: Arc<StreamCounts>,
    open_streams: OpenStreams,
    retry_copies: Arc<RetryCopies>,
    /// The queue for the spans of traced requests; unset without a collector.
    spans: OnceLock<SpanQueue>,
}

#[derive(Debug)]
pub struct ServedPool {
    inner: Mutex<ServedPoolState>,
    has_state: watch::Sender<bool>,
}

/// The part of a pool that the lock protects.
#[derive(Debug)]
pub struct ServedPoolState {
    /// The state for decisions.
    pub pool: ManagedPool,
    applied: AppliedVersions,
    /// Times of picks, in µs.
    pick_us: CountHistogram,
    peers: LocalPeer,
    used: bool,
    /// The streams of held requests, by number.
    held: BTreeMap<u64, Weak<Notify>>,
}

// === impl ExtProcServer ===

impl ExtProcServer {
    /// A server of these pools, without state yet.
    #[must_use]
    pub fn new(pools: &[Arc<str>]) -> Arc<Self> {
        Self::with_namespace(pools, None)
    }

    /// A server that sets destinations in this metadata namespace, or in the default one for
    /// `None`.
    #[must_use]
    pub fn with_namespace(pools: &[Arc<str>], destination_namespace: Option<String>) -> Arc<Self> {
        let pools = pools
            .iter()
            .map(|name| (Arc::clone(name), Arc::new(ServedPool::new())))
            .collect();
        Arc::new(Self {
            pools,
            destination_namespace: destination_namespace
                .unwrap_or_else(|| wire::DESTINATION_NAMESPACE.to_owned()),
            services: OnceLock::new(),
            began: Instant::now(),
            parking: Arc::new(Semaphore::new(PARKED_MAX)),
            streams: Arc::default(),
            open_streams: OpenStreams::default(),
            retry_copies: Arc::default(),
            spans: OnceLock::new(),
        })
    }

    /// Makes spans of traced requests from now on.
    pub fn trace(&self, spans: SpanQueue) {
        let _ = self.spans.set(spans); // it is set only once, at the start
    }

    /// The queue for the spans of traced requests; `None` without a collector.
    #[must_use]
    pub fn spans(&self) -> Option<&SpanQueue> {
        self.spans.get()
    }

    /// The metadata namespace of destinations and of the served endpoint.
    #[must_use]
    pub fn destination_namespace(&self) -> &str {
        &self.destination_namespace
    }

    /// The pool with this name. Without a name, the only pool, if there is just one.
    #[must_use]
    pub fn pool(&self, name: Option<&str>) -> Option<&Arc<ServedPool>> {
        match name {
            Some(name) => self.pools.get(name),
            None if self.pools.len() == 1 => self.pools.values().next(),
            None => None,
        }
    }

    /// Makes [`Self::pool_of_service`] ask `services`.
    pub fn find_by(&self, services: Box<dyn ServiceDirectory>) {
        let _ = self.services.set(services); // it is set only once, at the start
    }

    /// The pool whose picker is the Service of this authority, if exactly one pool names it.
    #[must_use]
    pub fn pool_of_service(&self, authority: &str) -> Option<&Arc<ServedPool>> {
        let name = self.services.get()?.pool_of_service(authority)?;
        self.pools.get(&name)
    }

    /// All pools, by name.
    pub fn pools(&self) -> impl Iterator<Item = (&Arc<str>, &Arc<ServedPool>)> {
        self.pools.iter()
    }

    /// Whether requests can be decided: every pool has state, or, after [`ALL_POOLS_WAIT_MAX`], at
    /// least one pool has.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        let mut pools = self.pools.values();
        if self.began.elapsed() < ALL_POOLS_WAIT_MAX {
            pools.all(|pool| pool.has_state())
        } else {
            pools.any(|pool| pool.has_state())
        }
    }

    /// The current time on the clock of exchanges.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        Timestamp(u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// Converts `time` to the runtime's clock.
    #[must_use]
    pub fn instant_of(&self, time: Timestamp) -> Instant {
        self.began + Duration::from_nanos(time.0)
    }

    /// Takes a permit for one more parked request; `None` if none is left.
    pub(super) fn parking_place(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.parking).try_acquire_owned().ok()
    }

    /// The counts of the server's streams.
    #[must_use]
    pub fn streams(&self) -> &Arc<StreamCounts> {
        &self.streams
    }

    pub(super) fn open_streams(&self) -> &OpenStreams {
        &self.open_streams
    }

    pub(super) fn retry_copies(&self) -> &Arc<RetryCopies> {
        &self.retry_copies
    }

    /// Refuses the requests of these streams, because others need the room of their bodies.
    pub(super) fn refuse_bodies(&self, numbers: &[u64], now: Timestamp) {
        let streams = numbers
            .iter()
            .filter_map(|number| self.open_streams.get(*number));
        streams.for_each(|stream| stream.refuse_body(now));
    }

    /// Ends the streams that have waited for their proxy too long.
    pub fn expire(&self) {
        self.open_streams.expire(self.now());
    }

    /// Applies a message completely or not at all, as a proxy does. Returns the acknowledgement.
    pub fn apply(&self, message: state::DaemonMessage) -> Option<state::Ack> {
        let update = match DaemonUpdate::decode(message, |name| {
            self.pools.get(name).map(|pool| pool.lock())
        }) {
            Ok(update) => update,
            Err(rejected) => return refuse(rejected),
        };
        let Some(served) = self.pools.get(update.pool()?) else {
            return update.refuse("no such pool here").and_then(refuse);
        };
        let ack = update.ack();
        let mut state = served.lock();
        let ServedPoolState {
            pool,
            applied,
            peers,
            ..
        } = &mut *state;
        match update {
            DaemonUpdate::Peers(message) => peers.receive(pool, message, self.now()),
            update => {
                if applied.apply(pool, update, self.now()) == Applied::PoolUpdate {
                    peers.recount(pool);
                    served.has_state.send_replace(true);
                }
            }
        }
        state.release_next(self.now());
        ack
    }
}

/// Logs why a message was refused. Returns the refusal for the daemon.
fn refuse(rejected: RejectedMessage) -> Option<state::Ack> {
    let RejectedMessage { pool, why, .. } = &rejected;
    tracing::error!(
        pool,
        why,
        "the ext_proc server refuses a message from the daemon; the current state stays in force"
    );
    rejected.ack()
}

// === impl ServedPool ===

impl ServedPool {
    fn new() -> Self {
        let inner = Mutex::new(ServedPoolState {
            pool: ManagedPool::new(rand::random(), 0),
            applied: AppliedVersions::default(),
            pick_us: CountHistogram::default(),
            peers: LocalPeer::default(),
            used: false,
            held: BTreeMap::new(),
        });
        Self {
            inner,
            has_state: watch::Sender::new(false),
        }
    }

    /// Locks the pool, for one step of an exchange.
    pub fn lock(&self) -> MutexGuard<'_, ServedPoolState> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[must_use]
    pub fn has_state(&self) -> bool {
        *self.has_state.borrow()
    }

    /// Waits until the pool has state.
    pub async fn state(&self) {
        // The sender is in `self`, so the channel cannot be closed.
        let _ = self.has_state.subscribe().wait_for(|has| *has).await;
    }
}

// === impl ServedPoolState ===

impl AsRef<ManagedPool> for ServedPoolState {
    fn as_ref(&self) -> &ManagedPool {
        &self.pool
    }
}

impl ServedPoolState {
    /// Does the periodic work for a slice of the prefix index, the ejections, and requests that may
    /// have room. Returns whether the pool has joined the proxies that share their load.
    pub fn tick(&mut self, now: Timestamp) -> bool {
        self.pool.tick(now);
        self.release_next(now);
        self.peers.expire(&mut self.pool, now);
        // Proxies share only with proxies that pick. A server that no gateway uses does not join.
        self.used && self.peers.join()
    }

    /// Takes the observations of requests that ended since the last call. The ext_proc server
    /// counts as one VM of its process.
    pub fn take_observations(&mut self, name: &str) -> Option<state::Observations> {
        let (first, rows) = self.pool.take_observations();
        let rows: Vec<u8> = rows.iter().flat_map(EncodedObservation::to_bytes).collect();
        (!rows.is_empty()).then(|| state::Observations {
            pool: name.to_owned(),
            vm_id: 0,
            first,
            rows,
        })
    }

    /// The changes that other proxies have not received, if any.
    pub fn next_report(&mut self, name: &str, now: Timestamp) -> Option<state::LoadReport> {
        self.peers.next_report(name, &mut self.pool, now)
    }

    /// Whether other proxies share their load with this server.
    #[must_use]
    pub fn has_peers(&self) -> bool {
        self.peers.has_peers()
    }

    /// The times of picks, in µs; `None` if no request has come.
    #[must_use]
    pub fn pick_times(&self) -> Option<&CountHistogram> {
        self.used.then_some(&self.pick_us)
    }

    /// Creates the prefix index before the first decision, so that a pool that is never used has
    /// none.
    pub(super) fn prepare_index(&mut self) {
        self.used = true;
        self.pool.reserve_prefixes(ENTRIES_DEFAULT);
    }

    /// Records what wakes the stream of a held request.
    pub(super) fn hold(&mut self, number: u64, wakes: &Arc<Notify>) {
        if self.held.len() > 2 * self.pool.queues().queued() + ENDED_STREAMS_MAX {
            self.held.retain(|_, wakes| wakes.strong_count() > 0);
        }
        self.held.insert(number, Arc::downgrade(wakes));
    }

    /// Wakes the stream of the next held request that may have room now. The woken stream wakes the
    /// next stream, so that the picks have the order of the queues.
    pub(super) fn release_next(&mut self, now: Timestamp) {
        while let Some(number) = self.pool.next_due(now) {
            if let Some(wakes) = self.held.get(&number).and_then(Weak::upgrade) {
                return wakes.notify_one();
            }
        }
    }

    /// Records that a pick took `us` microseconds.
    #[expect(clippy::cast_precision_loss, reason = "a pick is far below 2^52 µs")]
    pub(super) fn record_pick_time(&mut self, us: u64) {
        self.pick_us.record(us as f64, &DURATION_BOUNDS_MS);
    }
}
