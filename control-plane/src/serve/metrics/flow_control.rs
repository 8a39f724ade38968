//! Metrics of flow control, under llm-d's names. Fairness ids are not labels, because they may be
//! ids of users.

use std::fmt;

use pool_state::queues::FLOW_OUTCOMES;

use super::MetricsCollector;
use super::page::{HistogramBuckets, MetricsPage, Rows, by, float};
use crate::state::counters::BandTotals;

// === impl MetricsCollector ===

impl MetricsCollector {
    pub(super) fn flow_control(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let pools = self
            .pools
            .iter()
            .map(|pool| (vec![("inference_pool", pool.view.name.to_string())], pool));
        let pools = &pools.collect::<Rows<_>>();
        let bands = by(pools, "priority", |pool| {
            let bands = pool.totals.bands.iter();
            bands.map(|(priority, band)| (priority.to_string(), band))
        });
        page.gauges(
            &bands,
            [
                (
                    "llm_d_epp_flow_control_queue_size",
                    "Requests held.",
                    |band| float(band.held),
                ),
                (
                    "llm_d_epp_flow_control_queue_bytes",
                    "Bytes of the bodies of requests held.",
                    |band| float(band.bytes),
                ),
            ],
        )?;
        page.counter(
            "llm_d_epp_flow_control_requests",
            "Requests that left flow control, by outcome.",
            by(&bands, "outcome", |band| {
                let counted = FLOW_OUTCOMES.into_iter().zip(band.outcomes);
                counted.filter(|(_, count)| *count > 0)
            }),
        )?;
        let mut given_up: Rows<&BandTotals> = bands.clone();
        given_up.retain(|(_, band)| band.given_up + band.given_up_for > 0);
        page.counters(
            &given_up,
            [(
                "llm_d_epp_flow_control_revocations_issued",
                "Running requests that were given up, by the priority of the requests that waited.",
                |band| band.given_up_for,
            )],
        )?;
        page.counter(
            "llm_d_epp_flow_control_revocations",
            "Running requests that were given up. Each is ended at once.",
            by(pools, "outcome", |pool| {
                let bands = pool.totals.bands.values();
                let sum = bands.map(|band| band.given_up).sum::<u64>();
                (sum > 0).then_some(("confirmed", sum))
            }),
        )?;
        page.counters(
            &given_up,
            [(
                "switchpoint_given_up",
                "Running requests that were given up for others, by their own priority.",
                |band| band.given_up,
            )],
        )?;
        page.histograms(
            &by(&bands, "outcome", |band| [(FLOW_OUTCOMES[0], band)]),
            [(
                "llm_d_epp_flow_control_request_queue_duration_seconds",
                "Time that requests were held.",
                |band| HistogramBuckets::scaled(&band.queue_ms, 1e-3),
            )],
        )
    }
}
