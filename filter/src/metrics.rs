//! The metrics of the filter ([`METRICS`]) in one VM.
//!
//! Counters and histograms are sums over all VMs of a process; the leader sets the gauges. The
//! counters of picks and of tokens are up to one tick late ([`FilterMetrics::collect`]).

use std::cell::Cell;

use front::metrics::METRICS;
pub use front::metrics::Stat;

use crate::host::Host;

/// The metrics of the filter in one VM. A metric that the proxy refused to create has no number.
#[derive(Debug)]
pub struct FilterMetrics<H> {
    host: H,
    numbers: Vec<Option<u32>>,
    /// The amounts that [`Self::collect`] has collected since the last flush, by metric.
    collected: Vec<Cell<i64>>,
}

// === impl FilterMetrics ===

impl<H: Host> FilterMetrics<H> {
    /// Finds or creates every statistic.
    pub fn new(host: H) -> Self {
        let numbers: Vec<_> = METRICS
            .iter()
            .map(|metric| host.metric(metric.kind, metric.name).ok())
            .collect();
        let collected = vec![Cell::new(0); numbers.len()];
        Self {
            host,
            numbers,
            collected,
        }
    }

    pub fn count(&self, stat: Stat) {
        self.add(stat, 1);
    }

    pub fn add(&self, stat: Stat, amount: u32) {
        if let (Some(number), 1..) = (self.number(stat), amount) {
            let _ = self.host.metric_add(number, i64::from(amount));
        }
    }

    /// Adds to a counter at the next [`Self::flush`]. Use this function for events of every
    /// request, because it needs one host call per tick instead of one per request. A VM that traps
    /// loses the amounts that it collected.
    pub fn collect(&self, stat: Stat, amount: u32) {
        if let Some(sum) = self.collected.get(stat as usize) {
            sum.set(sum.get().saturating_add(i64::from(amount)));
        }
    }

    /// Adds the collected counts to the counters of the proxy. Counts that the proxy refuses are
    /// added at the next flush.
    pub fn flush(&self) {
        for (number, sum) in self.numbers.iter().zip(&self.collected) {
            if let (Some(number), amount @ 1..) = (number, sum.get())
                && self.host.metric_add(*number, amount).is_ok()
            {
                sum.set(0);
            }
        }
    }

    /// Sets a gauge to `value`, or records `value` in a histogram.
    pub fn record(&self, stat: Stat, value: u64) {
        if let Some(number) = self.number(stat) {
            let _ = self.host.metric_record(number, value);
        }
    }

    fn number(&self, stat: Stat) -> Option<u32> {
        self.numbers.get(stat as usize).copied().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_collected_is_added_once_and_kept_if_the_proxy_refuses() {
        use crate::fake::{FakeCall, FakeHost};
        let host = FakeHost::new();
        let metrics = FilterMetrics::new(host.clone());
        let value = || host.metric_value("switchpoint_prompt_tokens_total");
        metrics.collect(Stat::PromptTokens, 7);
        metrics.collect(Stat::PromptTokens, u32::MAX);
        assert_eq!(value(), 0);
        host.fail(&[FakeCall::MetricAdd]);
        metrics.flush();
        host.fail(&[]);
        assert_eq!(value(), 0);
        metrics.flush();
        metrics.flush();
        assert_eq!(value(), 7 + u64::from(u32::MAX));
        metrics.collect(Stat::PromptTokens, 1);
        metrics.collect(Stat::CachedTokens, 0);
        host.record_calls();
        metrics.flush();
        assert_eq!(
            (value(), host.take_calls().len()),
            (8 + u64::from(u32::MAX), 1)
        );
    }
}
