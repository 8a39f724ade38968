//! The state that the daemon's tasks share: five tables, each with its writers. Other tasks get
//! only the tables that they need.
//!
//! | table | row | writer | readers |
//! |---|---|---|---|
//! | [`DaemonLife`] | term and keys | the daemon | all |
//! | [`PoolTable`] | a pool's newest view | that pool's task | state streams, EDS streams, admin, persistence |
//! | [`ProxyTables`] | a stream of a proxy or an Envoy | that stream | pools (slots of departed endpoints), other streams, admin |
//! | [`RequestReports`] | a process's counters | its stream | admin, scaling |
//! | [`LearnedPools`] | a pool's models | that pool's learner | state streams, scaling, admin |
//!
//! A change wakes the readers, which always read whole rows, so no queue of old state builds up.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::learn::learned_pools::LearnedPools;
use crate::state::client_names::ClientNames;
use crate::state::life::DaemonLife;
use crate::state::pool_views::PoolTable;
use crate::state::proxies::ProxyTables;
use crate::state::reports::{RequestReports, ScraperHandle};

/// The tables.
#[derive(Debug)]
pub struct DaemonState {
    pub life: Arc<DaemonLife>,
    pub pools: Arc<PoolTable>,
    pub proxies: Arc<ProxyTables>,
    pub reports: Arc<RequestReports>,
    pub learned: Arc<LearnedPools>,
}

// === impl DaemonState ===

impl DaemonState {
    /// Creates the state of a new daemon that stands by after `term`: no connections, and no views
    /// of the pools that `scrapers` names. Only `clients` get these pools.
    #[must_use]
    pub fn new(
        term: u64,
        hash_secret: u128,
        scrapers: BTreeMap<Arc<str>, ScraperHandle>,
        clients: ClientNames,
    ) -> Arc<Self> {
        let names = scrapers.keys().map(Arc::clone).collect();
        let pools = Arc::new(PoolTable::new(names));
        Arc::new(Self {
            life: Arc::new(DaemonLife::new(term, hash_secret)),
            pools: Arc::clone(&pools),
            proxies: Arc::new(ProxyTables::new(clients)),
            reports: Arc::new(RequestReports::new(pools, scrapers)),
            learned: Arc::default(),
        })
    }
}
