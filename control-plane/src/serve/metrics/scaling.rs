//! Metrics of the scaling signals. Only the leader knows these signals, because proxies report to
//! no other daemon.

use std::fmt;

use learning::scaling::ScalingSignal;
use tokio::time::Instant;

use super::page::{MetricLabels, MetricsPage};
use super::{MetricsCollector, pool_label};

/// A gauge of a scaling signal: its name, its help text and its value.
type SignalGauge = (
    &'static str,
    &'static str,
    fn(&ScalingSignal) -> Option<f64>,
);

const GAUGES: [SignalGauge; 3] = [
    (
        "switchpoint_backlog_seconds",
        "Time in which the replicas of a group could do all work that is outstanding.",
        |s| s.backlog_s,
    ),
    (
        "switchpoint_busy_replicas",
        "Replicas that the arriving requests of a group keep busy.",
        |s| Some(s.busy),
    ),
    (
        "switchpoint_desired_replicas",
        "Replicas that a group needs for the goal of --scale-ttft, not rounded.",
        |s| Some(s.desired),
    ),
];

// === impl MetricsCollector ===

impl MetricsCollector {
    pub(super) fn scaling(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let signals = Some(&self.shown.signals).filter(|signals| signals.leads());
        let now = Instant::now();
        let mut rows: Vec<(MetricLabels, ScalingSignal)> = Vec::new();
        for (pool, signals) in self.pools.iter().flat_map(|pool| Some((pool, signals?))) {
            for group in signals.groups(&pool.view.name, now) {
                let mut labels = pool_label(pool);
                labels.extend([
                    ("role", group.key.0.name().to_owned()),
                    ("model_name", group.models()),
                ]);
                rows.push((labels, group.signal(&signals.goal)));
            }
        }
        for (name, help, of) in GAUGES {
            page.gauge(
                name,
                help,
                rows.iter()
                    .filter_map(|(labels, signal)| Some((labels.clone(), of(signal)?))),
            )?;
        }
        Ok(())
    }
}
