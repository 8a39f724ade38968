//! Metrics that show whether discovery and the files of each pool can be read.

use std::fmt;
use std::time::SystemTime;

use discovery::BackendStatus;

use super::MetricsCollector;
use super::page::{MetricsPage, Rows, by, count, flag, float};

// === impl MetricsCollector ===

impl MetricsCollector {
    pub(super) fn sources(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let pools = &self.rows(Some);
        page.gauges(
            pools,
            [
                (
                    "switchpoint_pool_revision",
                    "Grows with every change of a pool.",
                    |p| float(p.view.revision),
                ),
                ("switchpoint_vms", "Filter VMs that reported lately.", |p| {
                    float(p.totals.vms)
                }),
                (
                    "switchpoint_pool_complete",
                    "1 once a pool has a complete set of endpoints.",
                    |p| flag(p.view.sources.complete),
                ),
            ],
        )?;
        page.gauge(
            "switchpoint_source_ok",
            "0 while the newest content of a source cannot be used; the last one stays.",
            by(pools, "source", |p| {
                let sources = &p.view.sources;
                [
                    ("discovery", flag(sources.discovery_error.is_none())),
                    ("config", flag(sources.config.error.is_none())),
                    ("objects", flag(sources.objects.error.is_none())),
                ]
            }),
        )?;
        page.counters(
            pools,
            [(
                "switchpoint_source_errors",
                "Contents of sources that could not be used.",
                |p| p.view.sources.errors,
            )],
        )?;
        page.gauges(
            pools,
            [(
                "switchpoint_objects_without_pool",
                "Objects that name no pool of this daemon.",
                |p| count(p.view.sources.objects_without_pool.values().sum()),
            )],
        )?;
        self.discovery(page)?;
        self.configs(page)
    }

    /// Writes the age of discovery's data. During an outage of the backend the last known set stays
    /// in use, and the age grows.
    fn discovery(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let discovery = &self.shown.discovery;
        let pools = discovery
            .components
            .iter()
            .map(|(pool, components)| (vec![("pool", pool.to_string())], components));
        let components: Rows<BackendStatus> =
            by(&pools.collect::<Rows<_>>(), "component", |components| {
                components
                    .iter()
                    .map(|(name, followed)| (name, followed.status().borrow().clone()))
            });
        let components: Rows<&BackendStatus> = components
            .iter()
            .map(|(labels, status)| (labels.clone(), status))
            .collect();
        let values = |of: fn(&BackendStatus) -> Option<f64>| {
            components
                .iter()
                .filter_map(move |(labels, status)| Some((labels.clone(), of(status)?)))
        };
        page.gauge(
            "switchpoint_discovery_age_seconds",
            "Time since the last contact with the backend of a component.",
            values(|status| Some(status.last_contact?.elapsed().ok()?.as_secs_f64())),
        )?;
        let cluster = discovery.cluster_protocol;
        let others = components.iter().filter_map(|(labels, status)| {
            let protocol = status.requirements.as_ref()?.protocol;
            Some((labels.clone(), flag(protocol != cluster)))
        });
        page.gauge(
            "switchpoint_protocol_mismatch",
            "1 if the InferencePool's servers use another protocol than the pool's cluster.",
            others,
        )?;
        page.gauge(
            "switchpoint_discovery_connected",
            "0 while the backend of a component cannot be reached or read.",
            values(|status| Some(flag(status.synced && status.error.is_none()))),
        )
    }

    fn configs(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let rows = &self
            .rows(|pool| Some(&pool.view.sources.config).filter(|config| config.file.is_some()));
        page.gauges(
            rows,
            [
                (
                    "switchpoint_config_last_reload_successful",
                    "0 while the newest content of the file cannot be used.",
                    |config| flag(config.error.is_none()),
                ),
                (
                    "switchpoint_config_last_reload_success_timestamp_seconds",
                    "When content of the file was last applied.",
                    |config| unix_seconds(config.taken_at),
                ),
            ],
        )?;
        page.counter(
            "switchpoint_config_reloads",
            "Reloads of the file, by result; the start counts as the first.",
            by(rows, "result", |config| {
                [("success", config.taken), ("failure", config.refused)]
            }),
        )
    }
}

pub(super) fn unix_seconds(at: SystemTime) -> f64 {
    at.duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs_f64()
}
