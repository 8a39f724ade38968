//! What the front knows: one [`exchange::ManagedPool`] for each pool, as each worker of a proxy has one.
//!
//! The front is a proxy of the daemon's own. It is told what proxies are told, by the same [`StateSession`], refuses what they would refuse, acknowledges
//! as they do (so no slot is lent anew while it is still in use here), and counts as they count. Since no Envoy's EDS stream is known to be
//! the one that asks, it hears of a new endpoint after the delay that stands in for an acknowledgement.
//!
//! A pool is behind a lock that is held for one step of one exchange, some tens of µs, and never while anything is waited for.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use discovery::BackendStatus;
use exchange::Timestamp;
use pool_state::{CountHistogram, DURATION_BOUNDS_MS, EncodedObservation};
use proto::state::{self, daemon_message};
use scheduler::prefix::ENTRIES_DEFAULT;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, MissedTickBehavior};

use super::authority::ServiceAuthority;
use super::counts::StreamCounts;
use super::peers::LocalPeer;
use super::session::StreamSession;
use super::wire;
use crate::pool::watched::WatchedComponents;
use crate::serve::health::HealthChecks;
use crate::serve::state_stream::StateSession;
use crate::shutdown::Shutdown;
use crate::state::counters::CounterTotals;
use crate::state::peer::{Origin, ProxyProcess};
use crate::state::peer_relay::SHARE_INTERVAL;
use crate::state::shared::DaemonState;

/// The most requests that wait for a pool's first state at once, each with its body; beyond it they are answered at once.
const PARKED_MAX: usize = 1_024;

/// How often a pool is tidied: its prefix index in slices, its ejections.
const TICK: Duration = Duration::from_millis(100);

/// How often what was counted is told: as the filters do.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// A moment beyond anything that happens here.
fn far() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}

/// What the front goes by among the proxies; no Envoy has this node id.
const NODE: &str = "switchpointd/ext_proc";

/// The front, shared by its streams.
#[derive(Debug)]
pub struct ExtProcServer {
    pools: BTreeMap<Arc<str>, Arc<ServedPool>>,
    destination_namespace: String,
    /// By pool: what its source asks of gateways, where it is discovered.
    sources: OnceLock<Vec<(Arc<ServedPool>, watch::Receiver<BackendStatus>)>>,
    began: Instant,
    /// Places to wait in.
    parking: Arc<Semaphore>,
    streams: Arc<StreamCounts>,
    /// Open streams, each by its number.
    talks: Mutex<HashMap<u64, Weak<StreamSession>>>,
}

/// One pool of it.
#[derive(Debug)]
pub struct ServedPool {
    inner: Mutex<ServedPoolState>,
    has_state: watch::Sender<bool>,
}

/// What is behind the lock.
#[derive(Debug)]
pub struct ServedPoolState {
    /// What requests are decided with.
    pub pool: exchange::ManagedPool,
    /// Time a pick took, in µs.
    pick_us: CountHistogram,
    peers: LocalPeer,
    used: bool,
}

// === impl ExtProcServer ===

impl ExtProcServer {
    /// Nothing is known yet of these pools.
    #[must_use]
    pub fn new(pools: &[Arc<str>]) -> Arc<Self> {
        Self::with_namespace(pools, None)
    }

    /// A front that tells destinations in this metadata namespace, where one is given.
    #[must_use]
    pub fn with_namespace(pools: &[Arc<str>], destination_namespace: Option<String>) -> Arc<Self> {
        let pools = pools.iter().map(|name| (Arc::clone(name), Arc::new(ServedPool::new()))).collect();
        Arc::new(Self {
            pools,
            destination_namespace: destination_namespace.unwrap_or_else(|| wire::DESTINATION_NAMESPACE.to_owned()),
            sources: OnceLock::new(),
            began: Instant::now(),
            parking: Arc::new(Semaphore::new(PARKED_MAX)),
            streams: Arc::default(),
            talks: Mutex::default(),
        })
    }

    /// The metadata namespace of destinations, and of the endpoint that served.
    #[must_use]
    pub fn destination_namespace(&self) -> &str {
        &self.destination_namespace
    }

    /// The pool of that name; without a name the only one.
    #[must_use]
    pub fn pool(&self, name: Option<&str>) -> Option<&Arc<ServedPool>> {
        match name {
            Some(name) => self.pools.get(name),
            None if self.pools.len() == 1 => self.pools.values().next(),
            None => None,
        }
    }

    /// From now on a pool is also found by the Service that its InferencePool names.
    pub fn follow(&self, components: &BTreeMap<Arc<str>, WatchedComponents>) {
        let of_pool = |(name, pool): (&Arc<str>, &Arc<ServedPool>)| {
            let components = components.get(name).into_iter().flatten();
            components.map(|(_, followed)| (Arc::clone(pool), followed.status())).collect::<Vec<_>>()
        };
        let _ = self.sources.set(self.pools.iter().flat_map(of_pool).collect()); // there is one daemon
    }

    /// The pool whose picker is the Service of this authority, if that is one pool's alone.
    #[must_use]
    pub fn pool_of_service(&self, authority: &str) -> Option<&Arc<ServedPool>> {
        let asked = ServiceAuthority::parse(authority)?;
        let is_asked = |status: &watch::Receiver<BackendStatus>| {
            status
                .borrow()
                .requirements
                .as_ref()
                .and_then(|of_pool| of_pool.picker.as_ref())
                .is_some_and(|service| asked.names_service(service))
        };
        let mut pools = self.sources.get()?.iter().filter(|(_, status)| is_asked(status)).map(|(pool, _)| pool);
        pools.next().filter(|_| pools.next().is_none())
    }

    /// Is anything known of every pool?
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.pools.values().all(|pool| pool.has_state())
    }

    /// This moment, as exchanges know time.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        Timestamp(u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// The moment of the runtime's clock that is `time`.
    #[must_use]
    pub fn instant_of(&self, time: Timestamp) -> Instant {
        self.began + Duration::from_nanos(time.0)
    }

    /// A place for one more request that waits for state, if there is one.
    pub(super) fn parking_place(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.parking).try_acquire_owned().ok()
    }

    /// Its streams, counted.
    #[must_use]
    pub fn streams(&self) -> &Arc<StreamCounts> {
        &self.streams
    }

    /// Has `talk` looked after by [`Self::expire`], under this number.
    pub(super) fn register(&self, number: u64, talk: Weak<StreamSession>) {
        self.sessions().insert(number, talk);
    }

    /// It is over.
    pub(super) fn forget(&self, number: u64) {
        self.sessions().remove(&number);
    }

    /// Ends the streams whose time is up.
    pub fn expire(&self) {
        let now = self.now();
        let talks: Vec<Arc<StreamSession>> = self.sessions().values().filter_map(Weak::upgrade).collect();
        talks.iter().for_each(|talk| talk.expire(now));
    }

    fn sessions(&self) -> MutexGuard<'_, HashMap<u64, Weak<StreamSession>>> {
        self.talks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Follows the daemon's state until `shutdown`, and tells `health` whether every pool has some.
    pub async fn follow_state(self: Arc<Self>, shared: Arc<DaemonState>, mut shutdown: Shutdown, health: HealthChecks) {
        // 0 is nobody among processes.
        let process_id = rand::random::<u64>().max(1);
        let mut session =
            StateSession::new(ProxyProcess::front(NODE, process_id), self.pools.keys().map(ToString::to_string), Instant::now());
        let (mut pools, mut relayed) = (shared.pools.subscribe(), shared.peers.relayed.subscribe());
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut reported, mut ready) = (Instant::now(), false);
        loop {
            let views = pools.borrow_and_update().clone();
            // Only when it may be passed on: what came too soon wakes us then.
            if session.relay_at(Instant::now()) <= Instant::now() {
                relayed.borrow_and_update();
            }
            while let Some(message) = session.next(&shared, Instant::now()) {
                if let Some(ack) = self.apply(message) {
                    session.ack(ack);
                }
                shared.front_has(session.status());
            }
            if self.is_ready() != ready {
                ready = !ready;
                health.ready(ready).await;
            }
            let relay_at = session.relay_at(Instant::now());
            let share_at = if self.publish(&shared, process_id) { Instant::now() + SHARE_INTERVAL } else { far() };
            tokio::select! {
                changed = pools.changed() => if changed.is_err() { return },
                // Others tell hundreds of times a second: no look at any of it before it may be passed on.
                changed = async { tokio::time::sleep_until(relay_at).await; relayed.changed().await } => if changed.is_err() { return },
                () = tokio::time::sleep_until(share_at) => {}
                () = tokio::time::sleep_until(session.wake_at(&views, Instant::now())) => {}
                _ = tick.tick() => {
                    self.tidy(&shared, process_id);
                    if reported.elapsed() >= REPORT_INTERVAL {
                        reported = Instant::now();
                        self.report(&shared);
                        self.expire();
                    }
                }
                () = shutdown.begun() => return,
            }
        }
    }

    /// Takes over a message as a proxy does: whole, or not at all. The answer to it, if it wants one.
    pub fn apply(&self, message: state::DaemonMessage) -> Option<state::Ack> {
        match message.message? {
            daemon_message::Message::PoolUpdate(pool_update) => {
                let (name, version) = (pool_update.pool.clone(), pool_update.version);
                let refused = match (self.pools.get(name.as_str()), proto::pool_update(pool_update)) {
                    (Some(pool), Ok(pool_update)) => {
                        let ServedPoolState { pool: inner, peers, .. } = &mut *pool.lock();
                        inner.install(pool_update.snapshot, pool_update.hash_secret, pool_update.staleness_max_ms);
                        peers.recount(inner);
                        pool.has_state.send_replace(true);
                        String::new()
                    }
                    (None, _) => "no such pool here".to_owned(),
                    (_, Err(why)) => why.to_string(),
                };
                if !refused.is_empty() {
                    tracing::error!(pool = name, why = refused, "the ext_proc front cannot use a pool update; it keeps the one it had");
                }
                Some(state::Ack { pool: name, version, refused, held: None })
            }
            daemon_message::Message::Metrics(metrics) => {
                let mut pool = self.pools.get(metrics.pool.as_str())?.lock();
                let measured = proto::metrics(&metrics, pool.pool.snapshot()?);
                match measured {
                    Ok(snapshot) => pool.pool.refresh(snapshot, self.now()),
                    Err(why) => tracing::error!(pool = metrics.pool, %why, "the ext_proc front cannot use metrics"),
                }
                None
            }
            daemon_message::Message::PeerLoad(told) => {
                let ServedPoolState { pool, peers, .. } = &mut *self.pools.get(told.pool.as_str())?.lock();
                peers.receive(pool, told, self.now());
                None
            }
            daemon_message::Message::LearnedModels(learned) => {
                let mut pool = self.pools.get(learned.pool.as_str())?.lock();
                match proto::learned(learned) {
                    Ok(learned) => pool.pool.install_models(learned.step, learned.latency),
                    Err(why) => tracing::error!(%why, "the ext_proc front cannot use what was learned; it keeps what it had"),
                }
                None
            }
            daemon_message::Message::Welcome(_) => None,
        }
    }

    fn tidy(&self, shared: &DaemonState, process_id: u64) {
        let now = self.now();
        for (name, pool) in &self.pools {
            let ServedPoolState { pool, peers, used, .. } = &mut *pool.lock();
            pool.tick(now);
            peers.expire(pool, now);
            observed(name, pool).into_iter().for_each(|observations| shared.observed(process_id, observations));
            // Proxies share only with those who pick: not with a front that nobody asks.
            if *used && peers.join() {
                shared.relay().join(name, (process_id, &Origin::default()), Instant::now());
                shared.peers.relayed.send_replace(());
            }
        }
    }

    /// Tells the proxies of each pool what changed here. Says whether any of them hears.
    fn publish(&self, shared: &DaemonState, process_id: u64) -> bool {
        let mut heard = false;
        for (name, pool) in &self.pools {
            let share = {
                let ServedPoolState { pool, peers, .. } = &mut *pool.lock();
                heard |= peers.has_peers();
                peers.next_report(name, pool, self.now())
            };
            if let Some(share) = share {
                shared.relay().receive(process_id, share, Instant::now());
                shared.peers.relayed.send_replace(());
            }
        }
        heard
    }

    fn report(&self, shared: &DaemonState) {
        for (name, pool) in &self.pools {
            let totals = {
                let inner = pool.lock();
                inner.used.then(|| CounterTotals::from_pool(&inner.pool, &inner.pick_us))
            };
            if let Some(totals) = totals {
                shared.front_counted(name, totals, Instant::now());
            }
        }
    }
}

/// What ended requests of the front saw since the last time. It counts as one VM of its process.
fn observed(name: &str, pool: &mut exchange::ManagedPool) -> Option<state::Observations> {
    let (first, rows) = pool.take_observations();
    let rows: Vec<u8> = rows.iter().flat_map(EncodedObservation::to_bytes).collect();
    (!rows.is_empty()).then(|| state::Observations { pool: name.to_owned(), vm_id: 0, first, rows })
}

// === impl ServedPool ===

impl ServedPool {
    fn new() -> Self {
        let pool = exchange::ManagedPool::new(rand::random(), 0);
        let inner = Mutex::new(ServedPoolState { pool, pick_us: CountHistogram::default(), peers: LocalPeer::default(), used: false });
        Self { inner, has_state: watch::Sender::new(false) }
    }

    /// For one step.
    pub fn lock(&self) -> MutexGuard<'_, ServedPoolState> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Is anything known of it?
    #[must_use]
    pub fn has_state(&self) -> bool {
        *self.has_state.borrow()
    }

    /// Waits until something is.
    pub async fn state(&self) {
        let _ = self.has_state.subscribe().wait_for(|has| *has).await; // we hold the sender, so it cannot be gone
    }
}

// === impl ServedPoolState ===

impl ServedPoolState {
    /// Before the first exchange that is decided here: the index of a pool that is never used costs nothing.
    pub(super) fn prepare_index(&mut self) {
        self.used = true;
        self.pool.reserve_prefixes(ENTRIES_DEFAULT);
    }

    /// Notes that a pick took `us` microseconds.
    #[expect(clippy::cast_precision_loss, reason = "a pick is far below 2^52 µs")]
    pub(super) fn record_pick_time(&mut self, us: u64) {
        self.pick_us.record(us as f64, &DURATION_BOUNDS_MS);
    }
}
