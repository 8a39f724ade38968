//! The reports of proxies, and of the daemon's own ext_proc server, on their requests.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use proto::state;
use tokio::time::Instant;

use crate::kv_events::{KvEventRow, KvEventStats};
use crate::scrape::{BusyHint, ScrapeStats};
use crate::state::counters::{CounterStore, CounterTotals, VmReport};
use crate::state::decision_log::DecisionLog;
use crate::state::peer::{Origin, ProxyProcess};
use crate::state::pool_views::PoolTable;

/// The counters and sampled decisions that were reported, and the scrapers, which scrape an
/// endpoint sooner after a pick.
#[derive(Debug)]
pub struct RequestReports {
    counters: Mutex<CounterStore>,
    decisions: Mutex<DecisionLog>,
    pools: Arc<PoolTable>,
    scrapers: BTreeMap<Arc<str>, ScraperHandle>,
}

/// The parts of a pool's scraper, and of its subscriber to KV events, that other tasks use.
#[derive(Clone, Debug)]
pub struct ScraperHandle {
    /// Reports picked endpoints to the scraper.
    pub busy: BusyHint,
    pub stats: Arc<ScrapeStats>,
    pub kv_events: Arc<KvEventStats>,
}

// === impl RequestReports ===

impl RequestReports {
    #[must_use]
    pub fn new(pools: Arc<PoolTable>, scrapers: BTreeMap<Arc<str>, ScraperHandle>) -> Self {
        Self {
            pools,
            counters: Mutex::default(),
            decisions: Mutex::default(),
            scrapers,
        }
    }

    pub fn counters(&self) -> MutexGuard<'_, CounterStore> {
        self.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the counters of a pool, each summed over all VMs that have reported it.
    #[must_use]
    pub fn totals(&self, pool: &str, now: Instant) -> CounterTotals {
        self.counters().totals(pool, now)
    }

    pub fn decisions(&self) -> MutexGuard<'_, DecisionLog> {
        self.decisions
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the report of a process, and scrapes the picked endpoints more often.
    pub fn report(&self, peer: &ProxyProcess, mut report: Vec<state::VmCounters>, now: Instant) {
        for vm in &mut report {
            self.keep_decision(
                &vm.pool,
                &peer.node_id,
                &peer.remote.origin,
                &std::mem::take(&mut vm.decision),
                now,
            );
        }
        // Counts are not recorded before the endpoints of a pool are known. The first report of a
        // VM must be complete, because later reports are compared with it.
        let views = self.pools.views.borrow().clone();
        report.retain(|vm| views.get(&vm.pool).is_some());
        // The reports are parsed before the counters are locked, so that other tasks do not wait.
        let totals: Vec<_> = report.into_iter().map(VmReport::from_vm).collect();
        let mut counters = self.counters();
        let mut reported: Vec<&str> = totals.iter().map(VmReport::pool).collect();
        reported.dedup();
        for view in reported.iter().filter_map(|pool| views.get(pool)) {
            counters.follow(view, now);
        }
        let picked = counters.report(peer, totals, now);
        drop(counters);
        for (pool, id) in picked {
            if let Some(scraper) = self.scrapers.get(&*pool) {
                scraper.busy.hint(id);
            }
        }
    }

    /// Keeps a sampled decision of a pool that is served. An empty record means no decision.
    pub fn keep_decision(
        &self,
        pool: &str,
        source: &str,
        origin: &Origin,
        record: &str,
        now: Instant,
    ) {
        if let Some((pool, _)) = self.scrapers.get_key_value(pool)
            && !record.is_empty()
        {
            self.decisions().keep(pool, source, origin, record, now);
        }
    }

    /// Records the counters of a pool that this process's own ext_proc server counted.
    pub fn record_own(&self, pool: &str, totals: CounterTotals, now: Instant) {
        let picked = self.counters().report_local(pool, totals, now);
        if let Some(scraper) = self.scrapers.get(pool) {
            picked.into_iter().for_each(|id| scraper.busy.hint(id));
        }
    }

    /// Returns the counters of a pool's scraper.
    #[must_use]
    pub fn scrape_stats(&self, pool: &str) -> Option<&ScrapeStats> {
        self.scrapers.get(pool).map(|scraper| &*scraper.stats)
    }

    /// Returns what is known of the publishers of KV events of a pool, by the address of their
    /// endpoint.
    #[must_use]
    pub fn kv_events(&self, pool: &str) -> BTreeMap<SocketAddr, KvEventRow> {
        let scraper = self.scrapers.get(pool);
        scraper.map_or_else(BTreeMap::new, |scraper| scraper.kv_events.rows())
    }
}
