//! The process: its configurations, its pools, and the work of Envoy's main thread.
//!
//! Envoy keeps an old configuration until its last stream has ended. All configurations share the
//! pools; the newest one has the link to the daemon.

use std::collections::VecDeque;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, TryLockError, Weak};
use std::time::Instant;

use exchange::Timestamp;
use front::metrics::Stat;

use crate::abi::{self, ConfigHandle, ConfigScheduler};
use crate::link::{LinkEvent, NativeLink};
use crate::metrics::{MetricIds, ProcessMetrics};
use crate::module_config::{self, ModuleConfig};
use crate::panics::{self, lock};
use crate::pool::NativePool;
use crate::ticker::Ticker;
use crate::waker::{StreamWaker, WakeReason};
use crate::worker::SharedWorker;

/// The maximum number of requests that wait for a pool's first state. Further requests are refused
/// immediately.
const PARKED_MAX: usize = 2_048;

/// The event of a tick. The main thread gets no other.
const TICK: u64 = 1;

static PROCESS: LazyLock<NativeProcess> = LazyLock::new(NativeProcess::new);

pub(crate) struct NativeProcess {
    began: Instant,
    /// A random number, which no other process has.
    pub(crate) id: u64,
    /// The number of configurations so far.
    configured: AtomicU64,
    configs: Mutex<Vec<LoadedConfig>>,
    pools: Mutex<PoolRegistry>,
    parked: Mutex<Vec<ParkedStream>>,
    workers: Mutex<Vec<SharedWorker>>,
    link: Mutex<NativeLink>,
    /// Events of the link that wait until its lock is free.
    inbox: Mutex<VecDeque<LinkEvent>>,
    pub(crate) metrics: ProcessMetrics,
    ticker: Ticker,
}

/// A configuration that Envoy uses, from old to new.
struct LoadedConfig {
    module: Arc<ModuleConfig>,
    handle: ConfigHandle,
    scheduler: ConfigScheduler,
}

#[derive(Default)]
struct PoolRegistry {
    current: Vec<Arc<NativePool>>,
    /// Pools that no new request uses, until their last stream has ended.
    retired: Vec<Arc<NativePool>>,
}

/// A stream that waits for the state of its pool.
struct ParkedStream {
    deadline: Timestamp,
    client: u64,
    pool: Arc<NativePool>,
    stream: Weak<StreamWaker>,
}

/// Returns the state of this process.
pub(crate) fn process() -> &'static NativeProcess {
    &PROCESS
}

/// Returns random bits.
pub(crate) fn entropy() -> u64 {
    RandomState::new().hash_one(0_u8)
}

// === impl PoolRegistry ===

impl PoolRegistry {
    fn named(&self, name: &str) -> Option<&Arc<NativePool>> {
        self.current.iter().find(|pool| *pool.name == *name)
    }

    /// Returns the pools with these names. Makes those that do not exist.
    fn find_or_make(
        &mut self,
        names: impl Iterator<Item = impl AsRef<str>>,
    ) -> Vec<Arc<NativePool>> {
        names
            .map(|name| {
                let name = name.as_ref();
                if let Some(known) = self.named(name) {
                    return Arc::clone(known);
                }
                let pool = Arc::new(NativePool::new(name, entropy()));
                self.current.push(Arc::clone(&pool));
                pool
            })
            .collect()
    }

    /// Retires the pools that are not in `keep`.
    fn retire(&mut self, keep: impl Fn(&NativePool) -> bool) {
        let (current, retired) = self.current.drain(..).partition(|pool| keep(pool));
        self.current = current;
        self.retired.extend::<Vec<_>>(retired);
    }
}

// === impl NativeProcess ===

impl NativeProcess {
    fn new() -> Self {
        Self {
            began: Instant::now(),
            id: entropy().max(1),
            configured: AtomicU64::new(0),
            configs: Mutex::default(),
            pools: Mutex::default(),
            parked: Mutex::default(),
            workers: Mutex::default(),
            link: Mutex::default(),
            inbox: Mutex::default(),
            metrics: ProcessMetrics::new(),
            ticker: Ticker::new(),
        }
    }

    /// The monotonic time. It begins after 0, which means never.
    pub(crate) fn now(&self) -> Timestamp {
        let ns = u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        Timestamp(ns).plus_ms(1)
    }

    pub(crate) fn ticker(&self) -> &Ticker {
        &self.ticker
    }

    /// Takes a configuration that Envoy creates. Returns `None` if it is wrong; the log has the
    /// reason.
    pub(crate) fn add_config(
        &'static self,
        handle: ConfigHandle,
        json: &[u8],
    ) -> Option<Arc<ModuleConfig>> {
        let config = module_config::parse(json)
            .map_err(|why| log::error!("configuration refused: {why}"))
            .ok()?;
        let names = config.pools.iter().map(|pool| &pool.name);
        let pools = lock(&self.pools).find_or_make(names);
        let number = self.configured.fetch_add(1, Ordering::Relaxed);
        let metrics = MetricIds::define(&handle);
        let module = Arc::new(ModuleConfig::new(number, config, metrics, pools));
        if abi::is_validating() {
            return Some(module);
        }
        let scheduler = handle.scheduler()?;
        lock(&self.configs).push(LoadedConfig {
            module: Arc::clone(&module),
            handle,
            scheduler,
        });
        self.ticker.forget_pending();
        self.ticker.start(self);
        Some(module)
    }

    /// Forgets a configuration that Envoy destroys, on any thread. After this, nothing uses it.
    pub(crate) fn remove_config(&self, number: u64) {
        let mut configs = lock(&self.configs);
        configs.retain(|loaded| loaded.module.number != number);
        let names: Vec<String> = configs
            .iter()
            .flat_map(|loaded| loaded.module.names())
            .collect();
        drop(configs);
        self.ticker.forget_pending();
        lock(&self.pools).retire(|pool| names.iter().any(|name| **name == *pool.name));
    }

    /// Returns the newest configuration.
    pub(crate) fn newest(&self) -> Option<Arc<ModuleConfig>> {
        let configs = lock(&self.configs);
        configs.last().map(|loaded| Arc::clone(&loaded.module))
    }

    /// Calls `act` with Envoy's handle of a configuration. Only the main thread may call this.
    /// Returns `None` if the configuration no longer exists.
    pub(crate) fn with_config<R>(
        &self,
        number: u64,
        act: impl FnOnce(&ConfigHandle, &ModuleConfig) -> R,
    ) -> Option<R> {
        let configs = lock(&self.configs);
        let loaded = configs
            .iter()
            .find(|loaded| loaded.module.number == number)?;
        Some(act(&loaded.handle, &loaded.module))
    }

    /// Sends a tick to the main thread if `is_new`. Returns false if no configuration is left.
    pub(crate) fn send_tick(&self, is_new: bool) -> bool {
        let configs = lock(&self.configs);
        let Some(newest) = configs.last() else {
            return false;
        };
        if is_new {
            newest.scheduler.send(TICK);
        }
        true
    }

    /// Returns all pools that a configuration names.
    pub(crate) fn pools(&self) -> Vec<Arc<NativePool>> {
        lock(&self.pools).current.clone()
    }

    /// Adds a worker thread.
    pub(crate) fn add_worker(&self) -> SharedWorker {
        let worker = SharedWorker::default();
        lock(&self.workers).push(Arc::clone(&worker));
        worker
    }

    /// Parks a stream of this client. Returns false if too many streams are parked in total, or if
    /// the client already has half of the places that other clients leave free.
    pub(crate) fn park(
        &self,
        pool: &Arc<NativePool>,
        deadline: Timestamp,
        client: u64,
        stream: Weak<StreamWaker>,
    ) -> bool {
        let mut parked = lock(&self.parked);
        let own = parked.iter().filter(|parked| parked.client == client);
        if parked.len().saturating_add(own.count()) >= PARKED_MAX {
            return false;
        }
        self.metrics.count(Stat::Parked);
        parked.push(ParkedStream {
            deadline,
            client,
            pool: Arc::clone(pool),
            stream,
        });
        true
    }

    /// Wakes the parked streams whose pool has state, or whose time has come.
    pub(crate) fn wake_parked(&self, now: Timestamp) {
        lock(&self.parked).retain(|parked| {
            let Some(stream) = parked.stream.upgrade() else {
                return false;
            };
            let is_due = parked.deadline <= now || parked.pool.has_state();
            if is_due {
                stream.wake(WakeReason::Resume);
            }
            !is_due
        });
    }

    /// Does the due work of the main thread.
    pub(crate) fn on_tick(&self) {
        let now = self.now();
        let due = self.ticker.begin(now);
        if panics::is_rebuild_due() {
            self.rebuild_pools();
        }
        let Some(newest) = self.newest() else { return };
        let mut has_peers = false;
        let mut holds = false;
        for pool in self.pools_to_tick() {
            let activity = pool.tick(due.is_complete, newest.config.sharing, now);
            has_peers |= activity.has_peers;
            holds |= activity.holds;
        }
        if let (true, [only]) = (due.is_complete, self.pools().as_slice()) {
            // Creating an index takes time. With several pools, the first request of each does it.
            let entries = newest.config.prefix_entries;
            only.lock().pool.reserve_prefixes(entries);
        }
        self.wake_parked(now);
        if due.checks {
            self.check_replies();
        }
        self.run_link(|link| link.drive(self, due.is_complete, self.now()));
        if due.is_complete {
            self.with_config(newest.number, |handle, module| {
                self.metrics.flush(handle, &module.metrics);
            });
        }
        self.ticker.set_period(has_peers, holds);
    }

    /// Handles an event of a stream to the daemon. Envoy may call this during a call of the link,
    /// which then takes the event from the inbox.
    pub(crate) fn on_link_event(&self, event: LinkEvent) {
        lock(&self.inbox).push_back(event);
        self.run_link(|_| {});
    }

    /// Calls `act` and handles all events that wait, unless the link is in use.
    fn run_link(&self, act: impl FnOnce(&mut NativeLink)) {
        let mut link = match self.link.try_lock() {
            Ok(link) => link,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        act(&mut link);
        loop {
            // The inbox must not stay locked while its event is handled.
            let event = lock(&self.inbox).pop_front();
            let Some(event) = event else { break };
            link.on_event(self, event, self.now());
        }
    }

    /// Makes workers check whether clients read their replies.
    fn check_replies(&self) {
        let workers = lock(&self.workers).clone();
        for worker in workers {
            let sent = lock(&worker).sent();
            for stream in sent {
                stream.wake(WakeReason::CheckReply);
            }
        }
    }

    fn pools_to_tick(&self) -> Vec<Arc<NativePool>> {
        let mut pools = lock(&self.pools);
        pools.retired.retain(|pool| Arc::strong_count(pool) > 1);
        pools
            .current
            .iter()
            .chain(&pools.retired)
            .cloned()
            .collect()
    }

    /// Replaces all pools by new ones without state, because they may be damaged. Requests that run
    /// keep their old pool. The daemon sends the state again.
    fn rebuild_pools(&self) {
        log::error!("the module panicked several times, and makes its pools again");
        let mut pools = lock(&self.pools);
        pools.retire(|_| false);
        for loaded in lock(&self.configs).iter() {
            let names = loaded.module.names();
            loaded.module.set_pools(pools.find_or_make(names.iter()));
        }
        drop(pools);
        self.run_link(|link| link.close(self));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_are_shared_by_name_and_retired_when_no_configuration_names_them() {
        let mut pools = PoolRegistry::default();
        let first = pools.find_or_make(["a", "b"].into_iter());
        let second = pools.find_or_make(["b", "c"].into_iter());
        assert!(Arc::ptr_eq(&first[1], &second[0]));
        pools.retire(|pool| *pool.name == *"b");
        assert_eq!((pools.current.len(), pools.retired.len()), (1, 2));
        let third = pools.find_or_make(["a"].into_iter());
        assert!(
            !Arc::ptr_eq(&first[0], &third[0]),
            "a retired pool stays so"
        );
    }

    #[test]
    fn no_client_takes_all_places_for_parked_streams() {
        let process = NativeProcess::new();
        let pool = Arc::new(NativePool::new("parked", 1));
        let stream = Arc::new(StreamWaker::new(None));
        let park = |client| {
            let deadline = process.now().plus_ms(60_000);
            process.park(&pool, deadline, client, Arc::downgrade(&stream))
        };
        let of_first = (0..PARKED_MAX).take_while(|_| park(1)).count();
        assert_eq!(of_first, PARKED_MAX / 2);
        assert!(park(2));
        process.wake_parked(process.now());
        assert!(!park(1), "the pool has no state");
        drop(stream);
        process.wake_parked(process.now());
        assert!(lock(&process.parked).is_empty(), "the streams have ended");
    }
}
