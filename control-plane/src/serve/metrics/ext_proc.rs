//! Metrics of the daemon's own ext_proc server.

use std::fmt;
use std::sync::atomic::Ordering;

use super::MetricsCollector;
use super::page::{MetricLabels, MetricsPage, Rows, by, count, float};

// === impl MetricsCollector ===

impl MetricsCollector {
    pub(super) fn ext_proc(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let server = self.shown.ext_proc.as_deref();
        let streams = server.map(|server| (MetricLabels::new(), &**server.streams()));
        let streams = &streams.into_iter().collect::<Rows<_>>();
        page.gauges(
            streams,
            [
                (
                    "llm_d_epp_extproc_streams_inflight",
                    "Open ext_proc streams of gateways.",
                    |s| float(s.open()),
                ),
                (
                    "switchpoint_ext_proc_held_bytes",
                    "Bytes held for ext_proc streams.",
                    |s| count(s.memory().used()),
                ),
            ],
        )?;
        page.counters(
            streams,
            [(
                "llm_d_epp_extproc_streams",
                "ext_proc streams since start.",
                |s| s.begun(),
            )],
        )?;
        let spans = server.and_then(|server| server.spans());
        let spans = spans.map(|spans| (MetricLabels::new(), &**spans.counts()));
        page.counter(
            "switchpoint_spans",
            "Spans of ext_proc requests for --otlp-endpoint, by result.",
            by(&spans.into_iter().collect::<Rows<_>>(), "result", |spans| {
                [
                    ("sent", &spans.sent),
                    ("failed", &spans.failed),
                    ("dropped", &spans.dropped),
                ]
                .map(|(result, count)| (result, count.load(Ordering::Relaxed)))
            }),
        )?;
        page.counters(
            streams,
            [(
                "switchpoint_ext_proc_refused",
                "Requests refused by ext_proc.",
                |s| s.refused(),
            )],
        )
    }
}
