//! The `/metrics` page for Prometheus, in OpenMetrics.
//!
//! Metrics with the same meaning as llm-d's have llm-d's names (`llm_d_epp_*`, llm-d-router
//! `docs/metrics.md`). The names of all other metrics begin with `switchpoint_`. Metrics of
//! requests have one more label than in llm-d, `pool`, because one daemon serves several pools.
//! Histograms of tokens have only the unbounded bucket, because proxies report only sums, which are
//! enough for rates and means.

mod daemon;
mod ext_proc;
mod flow_control;
mod kv_events;
mod latency;
mod page;
mod pools;
mod requests;
mod scaling;
mod sources;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Registry;
use tokio::time::Instant;

use self::page::{MetricLabels, MetricsPage, Rows};
use crate::kv_events::KvEventRow;
use crate::learn::directory::LearnerReport as Learner;
use crate::pool::writer::PoolView;
use crate::scrape::ScrapeCounts;
use crate::serve::shown_state::ShownState;
use crate::state::counters::{CounterTotals, EndpointTotals};

/// All values at one point in time.
#[derive(Debug)]
struct MetricsCollector {
    shown: ShownState,
    pools: Vec<PoolCounts>,
}

#[derive(Debug)]
struct PoolCounts {
    view: PoolView,
    totals: CounterTotals,
    scrapes: Option<ScrapeCounts>,
    /// The publishers of KV events, by the address of their endpoint.
    kv_events: BTreeMap<SocketAddr, KvEventRow>,
    learner: Option<Learner>,
}

/// Returns the text of `/metrics`.
///
/// # Errors
/// There is no error in practice, because the page is written to memory. The encoder's signature
/// has an error.
pub fn page(shown: &ShownState) -> Result<String, fmt::Error> {
    let now = Instant::now();
    let shared = &shown.shared;
    let views: Vec<PoolView> = shared.pools.all();
    let counters = shared.reports.counters();
    let pools = views.into_iter().map(|view| PoolCounts {
        totals: counters.totals(&view.name, now),
        scrapes: shared
            .reports
            .scrape_stats(&view.name)
            .map(|stats| stats.counts()),
        kv_events: shared.reports.kv_events(&view.name),
        learner: shared.learned.report(&view.name),
        view,
    });
    let pools = pools.collect();
    drop(counters);
    let exposition = MetricsCollector {
        shown: shown.clone(),
        pools,
    };
    let mut registry = Registry::default();
    registry.register_collector(Box::new(exposition));
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry)?;
    Ok(text)
}

impl Collector for MetricsCollector {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let mut page = MetricsPage(encoder);
        self.requests(&mut page)?;
        self.pools(&mut page)?;
        self.scheduler(&mut page)?;
        self.flow_control(&mut page)?;
        self.endpoints(&mut page)?;
        self.scrapes(&mut page)?;
        self.kv_events(&mut page)?;
        self.latency(&mut page)?;
        self.scaling(&mut page)?;
        self.relayed(&mut page)?;
        self.daemon(&mut page)
    }
}

// === impl MetricsCollector ===

impl MetricsCollector {
    /// Returns a row for each pool for which `of` returns a value.
    fn rows<'c, T>(&'c self, of: impl Fn(&'c PoolCounts) -> Option<T>) -> Rows<T> {
        self.pools
            .iter()
            .filter_map(|pool| Some((pool_label(pool), of(pool)?)))
            .collect()
    }
}

// === impl PoolCounts ===

impl PoolCounts {
    fn endpoint(&self, id: scheduler::EndpointRef) -> EndpointTotals {
        self.totals
            .endpoints
            .get(&(id.generation, id.slot))
            .copied()
            .unwrap_or_default()
    }
}

fn pool_label(pool: &PoolCounts) -> MetricLabels {
    vec![("pool", pool.view.name.to_string())]
}
