//! Metrics of requests and picks, by model and by endpoint.

use std::fmt;

use pool_state::MISS_CAUSES;

use super::page::{HistogramBuckets, MetricLabels, MetricsPage, Rows, by, float, with};
use super::{MetricsCollector, PoolCounts, pool_label};
use crate::state::counters::{EndpointTotals, ModelTotals};

// === impl MetricsCollector ===

impl MetricsCollector {
    pub(super) fn requests(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let rows = &self.model_rows();
        page.counters(rows, [("llm_d_epp_request", "Requests.", |m| m.requests)])?;
        page.counter(
            "llm_d_epp_request_error",
            "Requests answered with an error, by HTTP status.",
            by(rows, "error_code", |m| {
                m.errors.iter().map(|(code, count)| (code, *count))
            }),
        )?;
        page.gauges(
            rows,
            [("llm_d_epp_request_running", "Requests outstanding.", |m| {
                float(m.running)
            })],
        )?;
        page.histograms(
            rows,
            [
                (
                    "llm_d_epp_request_duration_seconds",
                    "Time from a request to the end of its response, the time included in which it was held.",
                    |m| HistogramBuckets::scaled(&m.duration_ms, 1e-3),
                ),
                (
                    "llm_d_epp_request_ttft_seconds",
                    "Time to the first token, the time included in which the request was held.",
                    |m| HistogramBuckets::scaled(&m.ttft_ms, 1e-3),
                ),
                (
                    "llm_d_epp_request_streaming_tpot_seconds",
                    "Time for each token after the first.",
                    |m| HistogramBuckets::scaled(&m.tpot_ms, 1e-3),
                ),
            ],
        )?;
        page.counter(
            "switchpoint_slo_requests",
            "Requests with an SLO: met, missed, or shed.",
            by(rows, "outcome", |m| {
                let has_slo = m.slo.iter().any(|count| *count > 0);
                let outcomes = ["met", "missed", "shed"].into_iter().zip(m.slo);
                outcomes.filter(move |_| has_slo)
            }),
        )?;
        page.counter(
            "switchpoint_missed_tokens",
            "Tokens of prompts that the engine had not cached, by cause.",
            by(rows, "cause", |m| {
                MISS_CAUSES.into_iter().zip(m.missed_tokens)
            }),
        )?;
        self.sizes(page)
    }

    fn sizes(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let rows = &self.model_rows();
        let sums = |of: fn(&ModelTotals) -> u64| {
            rows.iter().map(move |(labels, m)| {
                let sum = HistogramBuckets::sum_only(of(m), m.requests);
                (labels.clone(), sum)
            })
        };
        page.histogram(
            "llm_d_epp_request_size_bytes",
            "Request bodies.",
            sums(|m| m.request_bytes),
        )?;
        page.histogram(
            "llm_d_epp_response_size_bytes",
            "Response bodies.",
            sums(|m| m.response_bytes),
        )?;
        page.histogram(
            "llm_d_epp_request_input_tokens",
            "Tokens of prompts.",
            sums(|m| m.prompt_tokens),
        )?;
        page.histogram(
            "llm_d_epp_request_output_tokens",
            "Tokens generated.",
            sums(|m| m.completion_tokens),
        )?;
        page.histogram(
            "llm_d_epp_request_cached_tokens",
            "Tokens of prompts that the engine had cached.",
            sums(|m| m.cached_tokens),
        )
    }

    pub(super) fn scheduler(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let pools = &self.rows(Some);
        page.histograms(
            pools,
            [(
                "llm_d_epp_scheduler_e2e_duration_seconds",
                "Time of a pick.",
                |pool| HistogramBuckets::scaled(&pool.totals.pick_us, 1e-6),
            )],
        )?;
        page.counter(
            "llm_d_epp_scheduler_attempts",
            "Picks, by first endpoint of the ranked list.",
            self.pools.iter().flat_map(attempts),
        )?;
        let indexes = self.pools.iter().map(|pool| {
            let scorer = "prefix-cache-scorer";
            let labels = with(&pool_label(pool), "plugin_name", scorer);
            (
                with(&labels, "plugin_type", scorer),
                float(pool.totals.prefix_entries),
            )
        });
        page.gauge(
            "llm_d_epp_prefix_indexer_size",
            "Entries of the fullest prefix index.",
            indexes,
        )?;
        page.counters(
            pools,
            [(
                "switchpoint_prefix_evictions",
                "Entries evicted from prefix indexes.",
                |pool| pool.totals.prefix_evictions,
            )],
        )?;
        page.counter(
            "switchpoint_requests_dropped",
            "Requests refused by the filters, by reason.",
            by(pools, "reason", |pool| {
                let dropped = pool.totals.dropped.iter();
                dropped.map(|(reason, count)| (reason, *count))
            }),
        )
    }

    pub(super) fn endpoints(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let bare: Rows<EndpointTotals> = self
            .pools
            .iter()
            .flat_map(|pool| {
                pool.view.members.iter().map(move |m| {
                    let labels = vec![
                        ("pool", pool.view.name.to_string()),
                        ("endpoint_name", m.instance.name.clone()),
                        ("namespace", m.instance.namespace.clone()),
                    ];
                    (labels, pool.endpoint(m.id))
                })
            })
            .collect();
        let rows = by(&bare, "producer_name", |e| [("inflight-load-producer", e)]);
        page.gauges(
            &rows,
            [
                (
                    "llm_d_epp_inflight_requests",
                    "Requests outstanding at an endpoint.",
                    |e| float(e.requests),
                ),
                (
                    "llm_d_epp_inflight_tokens",
                    "Tokens outstanding at an endpoint.",
                    |e| float(e.prefill_tokens.saturating_add(e.decode_tokens)),
                ),
            ],
        )?;
        page.counters(
            &bare,
            [
                (
                    "switchpoint_endpoint_served",
                    "Requests an endpoint answered.",
                    |e| e.served,
                ),
                (
                    "switchpoint_endpoint_failed",
                    "Requests an endpoint refused or reset before a response.",
                    |e| e.failed,
                ),
            ],
        )
    }

    fn model_rows(&self) -> Rows<&ModelTotals> {
        let rows = self.pools.iter().flat_map(|pool| {
            pool.totals.models.iter().map(|(label, totals)| {
                let labels = vec![
                    ("pool", pool.view.name.to_string()),
                    ("model_name", label.model.clone()),
                    ("target_model_name", label.target.clone()),
                    ("priority", label.priority.to_string()),
                ];
                (labels, totals)
            })
        });
        rows.collect()
    }
}

/// Returns the picks of a pool by endpoint, and the requests that got no pick.
fn attempts(pool: &PoolCounts) -> Rows<u64> {
    let labels = |status: &str, endpoint: &str, namespace: &str, port: String| -> MetricLabels {
        vec![
            ("status", status.to_owned()),
            ("target_model_name", String::new()),
            ("endpoint_name", endpoint.to_owned()),
            ("namespace", namespace.to_owned()),
            ("port", port),
            ("pool", pool.view.name.to_string()),
        ]
    };
    let picked = pool.view.members.iter().map(|m| {
        let port = m.instance.address.port().to_string();
        let labels = labels("success", &m.instance.name, &m.instance.namespace, port);
        (labels, pool.endpoint(m.id).picked)
    });
    let dropped = pool.totals.dropped.values().sum();
    picked
        .chain([(labels("failure", "", "", String::new()), dropped)])
        .collect()
}
