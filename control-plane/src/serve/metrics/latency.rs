//! The quality of learning and prediction of each pool's latencies.

use std::fmt;

use super::MetricsCollector;
use super::page::{HistogramBuckets, MetricsPage, Rows, by, count, flag};
use crate::learn::latency::{PredictedTarget, PredictionScore, RATIO_BOUNDS};

// === impl MetricsCollector ===

impl MetricsCollector {
    pub(super) fn latency(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let rows = &self.rows(|pool| pool.learner.as_ref());
        page.counter(
            "switchpoint_latency_observations",
            "Observations of ended requests from proxies, by result.",
            by(rows, "result", |p| p.counts.rows()),
        )?;
        page.counter(
            "switchpoint_latency_abstentions",
            "Requests with a measured TTFT or TPOT and without a latency prediction, by reason.",
            by(rows, "reason", |p| {
                p.abstained.iter().map(|(reason, count)| (*reason, *count))
            }),
        )?;
        page.counters(
            rows,
            [
                (
                    "switchpoint_latency_models",
                    "Models published to proxies.",
                    |p| p.published,
                ),
                (
                    "switchpoint_latency_models_oversized",
                    "Models too large to publish.",
                    |p| p.oversized,
                ),
            ],
        )?;
        page.gauges(
            rows,
            [
                (
                    "switchpoint_latency_model_bytes",
                    "Size of the last published model.",
                    |p| count(p.bytes),
                ),
                (
                    "switchpoint_latency_predicts",
                    "1 while there is a latency model.",
                    |p| flag(p.predicts),
                ),
            ],
        )?;
        self.scores(page)?;
        self.compared(page)
    }

    fn scores(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let rows = &self.rows(|pool| pool.learner.as_ref());
        // The empty endpoint name means the whole pool.
        let endpoints = by(rows, "endpoint_name", |p| {
            let endpoints = p.endpoints.iter().map(|(name, scores)| (&**name, scores));
            endpoints.chain([("", &p.pool)])
        });
        let mut scores: Rows<PredictionScore> =
            by(&endpoints, "target", |scores| by_target(*scores));
        page.counter(
            "switchpoint_latency_predictions",
            "Predictions compared with a measurement.",
            scores
                .iter()
                .map(|(labels, score)| (labels.clone(), score.count)),
        )?;
        scores.retain(|(_, score)| score.recent > 0);
        page.gauges(
            &scores,
            [
                (
                    "switchpoint_latency_mape",
                    "Mean absolute error of the newest predictions, relative to the measurement.",
                    |s| s.mape,
                ),
                (
                    "switchpoint_latency_pinball90_milliseconds",
                    "Pinball loss at 0.9 of the newest predictions.",
                    |s| s.pinball90_ms,
                ),
                (
                    "switchpoint_latency_coverage90",
                    "Share of the newest requests that took no longer than the predicted P90.",
                    |s| s.coverage90,
                ),
            ],
        )
    }

    /// Writes predictions and outcomes of the same requests.
    fn compared(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let rows = &self.rows(|pool| pool.learner.as_ref());
        let compared = by(rows, "target", |p| by_target(p.compared));
        page.histograms(
            &compared,
            [
                (
                    "switchpoint_latency_predicted_seconds",
                    "Predictions at the pick, of requests with a known outcome.",
                    |c| HistogramBuckets::scaled(&c.predicted_ms, 1e-3),
                ),
                (
                    "switchpoint_latency_actual_seconds",
                    "Measured times of the same requests.",
                    |c| HistogramBuckets::scaled(&c.actual_ms, 1e-3),
                ),
                (
                    "switchpoint_latency_actual_to_predicted_ratio",
                    "Measured time divided by predicted time.",
                    |c| HistogramBuckets::new(RATIO_BOUNDS.into_iter(), &c.ratios, c.ratio_sum),
                ),
            ],
        )
    }
}

/// Returns values in the order of [`PredictedTarget::ALL`], with the names of their targets.
fn by_target<V>(values: [V; 2]) -> impl Iterator<Item = (&'static str, V)> {
    PredictedTarget::ALL
        .into_iter()
        .map(PredictedTarget::name)
        .zip(values)
}
