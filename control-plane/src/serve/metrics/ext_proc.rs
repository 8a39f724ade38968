//! Metrics of the daemon's own ext_proc server.

use std::fmt;
use std::sync::atomic::Ordering;

use super::MetricsCollector;
use super::page::{MetricLabels, MetricsPage, count, float};
use ::ext_proc::{SpanQueue, StreamCounts};

// === impl MetricsCollector ===

impl MetricsCollector {
    pub(super) fn ext_proc(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let server = self.shown.ext_proc.as_ref();
        let streams = server.map(|server| server.streams());
        let now = |of: fn(&StreamCounts) -> f64| streams.map(|s| (MetricLabels::new(), of(s)));
        page.gauge(
            "llm_d_epp_extproc_streams_inflight",
            "Open ext_proc streams of gateways.",
            now(|s| float(s.open())),
        )?;
        page.gauge(
            "switchpoint_ext_proc_held_bytes",
            "Bytes held for ext_proc streams.",
            now(|s| count(s.memory().used())),
        )?;
        page.counter(
            "llm_d_epp_extproc_streams",
            "ext_proc streams since start.",
            streams.map(|s| (MetricLabels::new(), s.begun())),
        )?;
        let spans = server
            .and_then(|server| server.spans())
            .map(SpanQueue::counts)
            .into_iter()
            .flat_map(|counts| {
                [
                    ("sent", &counts.sent),
                    ("failed", &counts.failed),
                    ("dropped", &counts.dropped),
                ]
                .map(|(result, count)| {
                    (
                        vec![("result", result.to_owned())],
                        count.load(Ordering::Relaxed),
                    )
                })
            });
        page.counter(
            "switchpoint_spans",
            "Spans of ext_proc requests for --otlp-endpoint, by result.",
            spans,
        )?;
        page.counter(
            "switchpoint_ext_proc_refused",
            "Requests refused by ext_proc.",
            streams.map(|s| (MetricLabels::new(), s.refused())),
        )
    }
}
