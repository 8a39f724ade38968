//! Metrics of the engines of each pool, as their scrapes report them.

use std::fmt;

use scheduler::EndpointMetrics;

use super::page::{HistogramBuckets, MetricLabels, MetricsPage, Rows, by, count, float, moments};
use super::{MetricsCollector, PoolCounts};
use crate::scrape::{DURATION_BUCKETS_MS, ScrapeCounts};

/// A gauge of an endpoint: the end of its name, the end of its help text, and its value.
type EndpointGauge = (
    &'static str,
    &'static str,
    fn(&EndpointMetrics) -> Option<f32>,
);

const COLUMNS: [EndpointGauge; 3] = [
    (
        "kv_cache_utilization",
        "KV-cache utilization, 0 to 1",
        |m| m.kv_cache_utilization,
    ),
    ("queue_size", "requests waiting in the engines", |m| {
        m.queue_depth
    }),
    ("running_requests", "requests running in the engines", |m| {
        m.running_requests
    }),
];

// === impl MetricsCollector ===

impl MetricsCollector {
    pub(super) fn pools(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let pools = &self.rows(Some);
        // llm-d names the label of its pool metrics `name`.
        let named = &self
            .pools
            .iter()
            .map(|pool| (vec![("name", pool.view.name.to_string())], pool))
            .collect::<Rows<_>>();
        for (name, help, of) in COLUMNS {
            let moments = named.iter().filter_map(|(labels, pool)| {
                let known = pool.view.metrics.iter().filter_map(of);
                Some((labels, moments(known)?))
            });
            let moments: Vec<(&MetricLabels, (f64, f64))> = moments.collect();
            page.gauge(
                &format!("llm_d_epp_average_{name}"),
                &format!("Mean over endpoints: {help}."),
                moments.iter().map(|(l, (mean, _))| ((*l).clone(), *mean)),
            )?;
            page.gauge(
                &format!("llm_d_epp_std_dev_{name}"),
                &format!("Standard deviation over endpoints: {help}."),
                moments
                    .iter()
                    .map(|(l, (_, deviation))| ((*l).clone(), *deviation)),
            )?;
        }
        page.gauges(
            named,
            [(
                "llm_d_epp_ready_endpoints",
                "Endpoints that may be picked.",
                |pool| count(pool.view.members.len()),
            )],
        )?;
        page.gauges(
            pools,
            [(
                "switchpoint_endpoints_unconfirmed",
                "Endpoints that discovery reports as not ready, kept because they answer their scrapes.",
                unconfirmed,
            )],
        )?;
        page.gauge(
            "llm_d_epp_per_endpoint_queue_size",
            "Requests waiting in an engine.",
            by(named, "model_server_endpoint", |pool| {
                let members = pool.view.members.iter().zip(pool.view.metrics.iter());
                members.filter_map(|(member, metrics)| {
                    Some((&member.instance.name, f64::from(metrics.queue_depth?)))
                })
            }),
        )
    }

    pub(super) fn scrapes(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let rows = &self.rows(|pool| pool.scrapes.as_ref());
        let failures = |s: &ScrapeCounts| s.failures.iter().map(|(_, count)| count).sum::<u64>();
        let failures = rows.iter().map(|(_, s)| failures(s)).sum();
        let source = vec![("source_type", "metrics-data-source".to_owned())];
        page.counter(
            "llm_d_epp_datalayer_poll_errors",
            "Scrapes that failed.",
            [(source, failures)],
        )?;
        page.counters(rows, [("switchpoint_scrapes", "Scrapes.", |s| s.polls)])?;
        page.counter(
            "switchpoint_scrape_failures",
            "Scrapes that failed, by reason.",
            by(rows, "reason", |s| s.failures.iter().copied()),
        )?;
        page.counter(
            "switchpoint_scrape_pages",
            "Pages requested: filtered (needed families only) or whole.",
            by(rows, "kind", |s| {
                [("filtered", s.pages_filtered), ("whole", s.full_pages)]
            }),
        )?;
        page.counters(
            rows,
            [
                ("switchpoint_scrape_bytes", "Bytes of pages read.", |s| {
                    s.bytes
                }),
                (
                    "switchpoint_scrape_lines_skipped",
                    "Lines that could not be read.",
                    |s| s.lines_skipped,
                ),
                (
                    "switchpoint_endpoint_restarts",
                    "Restarts of engines.",
                    |s| s.restarts,
                ),
            ],
        )?;
        page.histograms(
            rows,
            [(
                "switchpoint_scrape_duration_seconds",
                "Time of a scrape, from the request to the end of the page.",
                |s| {
                    let bounds = DURATION_BUCKETS_MS.iter().map(|&ms| float(ms) / 1e3);
                    HistogramBuckets::new(bounds, &s.duration_buckets, float(s.duration_us) / 1e6)
                },
            )],
        )
    }
}

fn unconfirmed(pool: &PoolCounts) -> f64 {
    let members = pool.view.members.iter();
    count(members.filter(|m| m.instance.unconfirmed.is_some()).count())
}
