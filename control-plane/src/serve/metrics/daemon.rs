//! Metrics of the daemon itself and of the proxies and Envoys that are connected.

use std::fmt;
use std::time::SystemTime;

use tokio::time::Instant;

use super::MetricsCollector;
use super::page::{MetricLabels, MetricsPage, count, flag, float};
use super::sources::unix_seconds;
use crate::cli::build::COMMIT;
use crate::state::eds_streams::ProxyEds;
use crate::state::proxies::ConnectedProxy;

// === impl MetricsCollector ===

impl MetricsCollector {
    pub(super) fn relayed(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let relay = &self.shown.shared.proxies;
        let dropped = self.rows(|pool| {
            let relayed = relay.relay().dropped(&pool.view.name);
            Some(pool.totals.placements_dropped.saturating_add(relayed))
        });
        page.counter(
            "switchpoint_placements_dropped",
            "Placements that were not shared with other workers because there were too many.",
            dropped,
        )?;
        page.counter(
            "switchpoint_placements_over_share",
            "Placements of a proxy beyond its share of an endpoint's cache, which other proxies get as claims.",
            self.rows(|pool| Some(relay.relay().over_share(&pool.view.name))),
        )
    }

    pub(super) fn daemon(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let commit = COMMIT.to_owned();
        let release = vec![("commit", commit.clone()), ("build_ref", version.clone())];
        page.gauge("llm_d_epp_info", "The build.", [(release, 1.0)])?;
        let build = vec![("version", version), ("commit", commit)];
        page.gauge(
            "switchpoint_build_info",
            "The version and the commit of the daemon.",
            [(build, 1.0)],
        )?;
        let life = &self.shown.shared.life;
        page.gauge(
            "switchpoint_leads",
            "1 while the daemon leads, 0 while it stands by.",
            [(MetricLabels::new(), flag(life.leads()))],
        )?;
        page.gauge(
            "switchpoint_term",
            "The newest term that the daemon knows: its own while it leads.",
            [(MetricLabels::new(), float(life.term()))],
        )?;
        self.ext_proc(page)?;
        self.peers(page)?;
        self.sources(page)?;
        self.errors(page)?;
        let written = self.shown.snapshot.as_ref();
        let age = written.map(|file| {
            let age = unix_seconds(SystemTime::now()) - float(file.written_unix_ms()) / 1e3;
            (MetricLabels::new(), age.max(0.0))
        });
        page.gauge(
            "switchpoint_snapshot_age_seconds",
            "Time since the snapshot file was written; it is written on change.",
            age,
        )
    }

    /// Writes metrics of the connected proxies and Envoys.
    fn peers(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let tables = &self.shown.shared.proxies;
        let proxies = tables.streams.borrow().clone();
        let eds = tables.eds.borrow().clone();
        let proxies_of = |pool: &str| {
            let proxies = proxies.values();
            proxies
                .filter(|proxy| proxy.pools.contains_key(pool))
                .collect::<Vec<&ConnectedProxy>>()
        };
        let per_pool = |of: &dyn Fn(&str) -> usize| self.rows(|p| Some(count(of(&p.view.name))));
        page.gauge(
            "switchpoint_proxies",
            "State streams open.",
            per_pool(&|pool| proxies_of(pool).len()),
        )?;
        let acks = |pool: &str| {
            let streams = eds.open.values();
            streams
                .filter_map(|stream| Some(stream.pools.get(pool)?.late))
                .collect::<Vec<bool>>()
        };
        page.gauge(
            "switchpoint_eds_streams",
            "EDS streams open.",
            per_pool(&|pool| acks(pool).len()),
        )?;
        page.gauge(
            "switchpoint_eds_streams_unanswered",
            "EDS streams whose Envoy does not apply its responses: pool updates no longer wait for it.",
            per_pool(&|pool| acks(pool).iter().filter(|late| **late).count()),
        )?;
        let now = Instant::now();
        page.gauge(
            "switchpoint_proxies_without_eds",
            "Proxies whose Envoy has no EDS stream here: its hosts come from elsewhere, perhaps from another daemon.",
            per_pool(&|pool| {
                let proxies = proxies_of(pool).into_iter();
                proxies
                    .filter(|proxy| eds.state_of(&proxy.peer, pool, now) == ProxyEds::None)
                    .count()
            }),
        )?;
        page.gauge(
            "switchpoint_endpoints_withheld",
            "Endpoints withheld from proxies whose Envoy does not have them yet.",
            per_pool(&|pool| {
                let proxies = proxies_of(pool).into_iter();
                proxies.map(|proxy| proxy.pools[pool].withheld).sum()
            }),
        )?;
        let refused = tables.origins.refused();
        page.counter(
            "switchpoint_streams_refused",
            "Streams and calls refused because there were too many.",
            refused.map(|(kind, count)| (vec![("kind", kind.name().to_owned())], count)),
        )
    }

    fn errors(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let plain = {
            let c = self.shown.shared.reports.counters();
            [
                (
                    "switchpoint_pool_updates_refused",
                    "Pool updates that a proxy refused.",
                    c.pool_updates_refused,
                ),
                (
                    "switchpoint_eds_refused",
                    "EDS responses that an Envoy refused.",
                    c.eds_refused,
                ),
                ("switchpoint_reports", "Reports of proxies.", c.reports),
                (
                    "switchpoint_reports_invalid",
                    "Parts of reports that could not be read, or named a pool that the proxy does not have.",
                    c.reports_invalid,
                ),
                (
                    "switchpoint_peer_messages_refused",
                    "Other messages of proxies that were too large, or named a pool that the proxy does not have.",
                    c.messages_refused,
                ),
                (
                    "switchpoint_pools_refused",
                    "Pools that a proxy requested although its certificate gives no access.",
                    c.pools_refused,
                ),
                (
                    "switchpoint_eds_unanswered",
                    "EDS responses that an Envoy did not apply in time.",
                    c.eds_unanswered,
                ),
                (
                    "switchpoint_snapshot_write_errors",
                    "Writes of the snapshot file that failed.",
                    c.snapshot_write_errors,
                ),
            ]
        };
        for (name, help, value) in plain {
            page.counter(name, help, [(MetricLabels::new(), value)])?;
        }
        Ok(())
    }
}
