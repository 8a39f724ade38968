//! The ORCA load reports that engines put into their replies (`endpoint-load-metrics`).

use scheduler::EndpointMetrics;

use crate::number;

/// The longest report read, in bytes. vLLM's is about 100.
const REPORT_BYTES_MAX: usize = 4_096;

/// The metrics of a report that are read.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct OrcaLoad {
    kv_cache_utilization: Option<f32>,
    queue_depth: Option<f32>,
}

/// Reads a report in TEXT form: `TEXT named_metrics.kv_cache_usage_perc=0.4,
/// named_metrics.num_requests_waiting=2`. `None` if the report has no known metric.
pub(crate) fn parse(report: &[u8]) -> Option<OrcaLoad> {
    let text = std::str::from_utf8(report.get(..report.len().min(REPORT_BYTES_MAX))?).ok()?;
    let mut load = OrcaLoad::default();
    for (name, value) in text
        .trim_start()
        .strip_prefix("TEXT")?
        .split(',')
        .filter_map(|item| item.split_once('='))
    {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "what is too large becomes infinite, and is passed over"
        )]
        let value = number::parse(value.trim().as_bytes()).map(|value| value as f32);
        let Some(value) = value.filter(|value| value.is_finite() && *value >= 0.0) else {
            continue;
        };
        match name.trim().trim_start_matches("named_metrics.") {
            "kv_cache_usage_perc" => load.kv_cache_utilization = Some(value.min(1.0)),
            "num_requests_waiting" => load.queue_depth = Some(value),
            _ => {}
        }
    }
    (load != OrcaLoad::default()).then_some(load)
}

// === impl OrcaLoad ===

impl OrcaLoad {
    /// Writes the known values into `metrics`.
    pub(crate) fn apply(self, metrics: &mut EndpointMetrics) {
        metrics.kv_cache_utilization = self.kv_cache_utilization.or(metrics.kv_cache_utilization);
        metrics.queue_depth = self.queue_depth.or(metrics.queue_depth);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_vllm_writes_it() {
        let load = parse(
            b"TEXT named_metrics.kv_cache_usage_perc=0.4, named_metrics.num_requests_waiting=2",
        )
        .unwrap();
        assert_eq!(
            load,
            OrcaLoad {
                kv_cache_utilization: Some(0.4),
                queue_depth: Some(2.0)
            }
        );
    }

    #[test]
    fn lies_are_not_believed() {
        for lie in [
            "",
            "TEXT",
            "JSON {}",
            "TEXT kv_cache_usage_perc=NaN",
            "TEXT kv_cache_usage_perc=inf, num_requests_waiting=-1",
            "TEXT =",
        ] {
            assert_eq!(parse(lie.as_bytes()), None, "{lie}");
        }
        assert_eq!(
            parse(b"TEXT kv_cache_usage_perc=7")
                .unwrap()
                .kv_cache_utilization,
            Some(1.0)
        );
    }
}
