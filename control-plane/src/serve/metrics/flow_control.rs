//! Flow control, under llm-d's names. Fairness ids are no labels: they may be those of users.

use std::fmt;

use pool_state::queues::FLOW_OUTCOMES;

use super::MetricsCollector;
use super::page::{HistogramBuckets, MetricsPage, float, with};

// === impl MetricsCollector ===

impl MetricsCollector {
    pub(super) fn flow_control(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let bands = || {
            self.pools.iter().flat_map(|pool| {
                pool.totals.bands.iter().map(move |(priority, band)| {
                    (
                        vec![
                            ("inference_pool", pool.view.name.to_string()),
                            ("priority", priority.to_string()),
                        ],
                        band,
                    )
                })
            })
        };
        page.gauge(
            "llm_d_epp_flow_control_queue_size",
            "Requests held.",
            bands().map(|(labels, band)| (labels, float(band.held))),
        )?;
        let bytes = bands().map(|(labels, band)| (labels, float(band.bytes)));
        page.gauge(
            "llm_d_epp_flow_control_queue_bytes",
            "Bytes of the bodies of requests held.",
            bytes,
        )?;
        let outcomes = bands().flat_map(|(labels, band)| {
            let counted = FLOW_OUTCOMES
                .iter()
                .zip(band.outcomes)
                .filter(|(_, count)| *count > 0);
            counted
                .map(|(outcome, count)| (with(&labels, "outcome", outcome), count))
                .collect::<Vec<_>>()
        });
        page.counter(
            "llm_d_epp_flow_control_requests",
            "Requests that left flow control, by outcome.",
            outcomes,
        )?;
        let given_up = || bands().filter(|(_, band)| band.given_up + band.given_up_for > 0);
        let issued = given_up().map(|(labels, band)| (labels, band.given_up_for));
        let help =
            "Running requests that were given up, by the priority of the requests that waited.";
        page.counter("llm_d_epp_flow_control_revocations_issued", help, issued)?;
        let confirmed = self.pools.iter().filter_map(|pool| {
            let sum = pool
                .totals
                .bands
                .values()
                .map(|band| band.given_up)
                .sum::<u64>();
            let labels = vec![
                ("inference_pool", pool.view.name.to_string()),
                ("outcome", "confirmed".to_owned()),
            ];
            (sum > 0).then_some((labels, sum))
        });
        page.counter(
            "llm_d_epp_flow_control_revocations",
            "Running requests that were given up. Each is ended at once.",
            confirmed,
        )?;
        let help = "Running requests that were given up for others, by their own priority.";
        page.counter(
            "switchpoint_given_up",
            help,
            given_up().map(|(labels, band)| (labels, band.given_up)),
        )?;
        let times = bands().map(|(labels, band)| {
            (
                with(&labels, "outcome", FLOW_OUTCOMES[0]),
                HistogramBuckets::scaled(&band.queue_ms, 1e-3),
            )
        });
        page.histogram(
            "llm_d_epp_flow_control_request_queue_duration_seconds",
            "Time that requests were held.",
            times,
        )
    }
}
