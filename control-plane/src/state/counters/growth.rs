//! Limits how fast the counts of a VM grow. A proxy may report any counts, but a VM, which is one
//! worker of a proxy, counts no more than a worker handles in the time between two reports.
//!
//! A count beyond the limit is cut, and the next reports make up for it. So an honest VM loses
//! nothing. A report does not say how old its VM is, so the first report of a VM has only the limit
//! of what a VM counts in years (`CountLimit::OF_VM`). These first counts are no growth: they are
//! subtracted where growth matters (`CounterStore::first_reports`), and the scaler does not see
//! them. In `/metrics` they are one jump of a counter, as when an old proxy connects to a new
//! daemon.

use std::time::Duration;

use super::totals::{CounterTotals, ModelTotals, TotalsHistogram, TotalsLabel};

/// The growth of each number of requests in a ms: ten times what a busy worker handles.
const REQUESTS_PER_MS: u64 = 100;

/// The growth of tokens, bytes and times in a ms: 10 GB of bodies per second.
const AMOUNT_PER_MS: u64 = 10_000_000;

/// The growth of the sum of a histogram in a second, as [`AMOUNT_PER_MS`].
const SUM_PER_S: f64 = 1e10;

/// A VM may exceed the limits for a short time, by the growth of this duration. Reports arrive
/// unevenly, and long requests may end together.
pub(super) const GROWTH_BURST: Duration = Duration::from_secs(10);

/// The time for which the counts of a VM may have grown.
#[derive(Debug)]
struct GrowthLimit {
    allowed: Duration,
    /// The least time in which the counts can have grown by so much.
    used: Duration,
}

// === impl CounterTotals ===

impl CounterTotals {
    /// Cuts the growth of each count since `before` to what a VM counts in the time `allowed`.
    /// Returns the part of this time that the growth takes.
    pub(super) fn cut_growth(&mut self, before: &Self, allowed: Duration) -> Duration {
        let mut limit = GrowthLimit {
            allowed,
            used: Duration::ZERO,
        };
        for (id, row) in &mut self.endpoints {
            let before = before.endpoints.get(id).copied().unwrap_or_default();
            limit.cut_requests(
                [&mut row.picked, &mut row.served, &mut row.failed],
                [before.picked, before.served, before.failed],
            );
        }
        limit.cut_models(self, before);
        for (reason, count) in &mut self.dropped {
            let before = before.dropped.get(reason).copied().unwrap_or_default();
            limit.cut_requests([count], [before]);
        }
        for (priority, row) in &mut self.bands {
            let before = before.bands.get(priority).copied().unwrap_or_default();
            limit.cut_requests(row.outcomes.each_mut(), before.outcomes);
            limit.cut_requests(
                [&mut row.given_up, &mut row.given_up_for],
                [before.given_up, before.given_up_for],
            );
            limit.cut_histogram(&mut row.queue_ms, &before.queue_ms);
        }
        limit.cut_histogram(&mut self.pick_us, &before.pick_us);
        limit.cut_amounts(
            [&mut self.prefix_evictions, &mut self.placements_dropped],
            [before.prefix_evictions, before.placements_dropped],
        );
        limit.used
    }
}

// === impl GrowthLimit ===

impl GrowthLimit {
    fn cut_models(&mut self, now: &mut CounterTotals, before: &CounterTotals) {
        // The counts of models without a row of their own any more are part of `other` now.
        let other = TotalsLabel::other();
        let mut other_before = before.models.get(&other).cloned().unwrap_or_default();
        for (label, row) in &before.models {
            if !now.models.contains_key(label) {
                other_before.add(row, false);
            }
        }
        let none = ModelTotals::default();
        for (label, row) in &mut now.models {
            let before = if *label == other {
                &other_before
            } else {
                before.models.get(label).unwrap_or(&none)
            };
            self.cut_model(row, before);
        }
    }

    fn cut_model(&mut self, now: &mut ModelTotals, before: &ModelTotals) {
        self.cut_requests([&mut now.requests], [before.requests]);
        self.cut_requests(now.slo.each_mut(), before.slo);
        for (status, count) in &mut now.errors {
            let before = before.errors.get(status).copied().unwrap_or_default();
            self.cut_requests([count], [before]);
        }
        self.cut_histogram(&mut now.duration_ms, &before.duration_ms);
        self.cut_histogram(&mut now.ttft_ms, &before.ttft_ms);
        self.cut_histogram(&mut now.tpot_ms, &before.tpot_ms);
        self.cut_amounts(
            [&mut now.prompt_tokens, &mut now.completion_tokens],
            [before.prompt_tokens, before.completion_tokens],
        );
        self.cut_amounts([&mut now.cached_tokens], [before.cached_tokens]);
        self.cut_amounts(now.missed_tokens.each_mut(), before.missed_tokens);
        self.cut_amounts(
            [&mut now.request_bytes, &mut now.response_bytes],
            [before.request_bytes, before.response_bytes],
        );
    }

    fn cut_histogram(&mut self, now: &mut TotalsHistogram, before: &TotalsHistogram) {
        self.cut_requests(now.counts.each_mut(), before.counts);
        let more = (now.sum - before.sum).max(0.0);
        let time = Duration::try_from_secs_f64(more / SUM_PER_S).unwrap_or(Duration::MAX);
        if time > self.allowed {
            now.sum = before.sum + SUM_PER_S * self.allowed.as_secs_f64();
        }
        self.used = self.used.max(time.min(self.allowed));
    }

    fn cut_requests<const N: usize>(&mut self, counts: [&mut u64; N], before: [u64; N]) {
        for (count, before) in counts.into_iter().zip(before) {
            self.cut_count(count, before, REQUESTS_PER_MS);
        }
    }

    fn cut_amounts<const N: usize>(&mut self, counts: [&mut u64; N], before: [u64; N]) {
        for (count, before) in counts.into_iter().zip(before) {
            self.cut_count(count, before, AMOUNT_PER_MS);
        }
    }

    fn cut_count(&mut self, count: &mut u64, before: u64, per_ms: u64) {
        let time = Duration::from_millis(count.saturating_sub(before).div_ceil(per_ms));
        if time > self.allowed {
            let allowed_ms = u64::try_from(self.allowed.as_millis()).unwrap_or(u64::MAX);
            *count = before.saturating_add(per_ms.saturating_mul(allowed_ms));
        }
        self.used = self.used.max(time.min(self.allowed));
    }
}

#[cfg(test)]
mod tests {
    use scheduler::{Generation, Slot};

    use super::super::totals::EndpointTotals;
    use super::*;

    fn picked(picked: u64) -> CounterTotals {
        let row = EndpointTotals {
            picked,
            ..EndpointTotals::default()
        };
        let mut totals = CounterTotals::default();
        totals.endpoints.insert((Generation(1), Slot(0)), row);
        totals
    }

    #[test]
    fn a_count_grows_by_what_a_worker_handles_in_the_time() {
        let second = Duration::from_secs(1);
        let mut now = picked(50_007);
        let used = now.cut_growth(&picked(7), second);
        assert_eq!((now, used), (picked(50_007), second / 2));
        let mut now = picked(u64::MAX);
        now.pick_us.sum = 1e17;
        let used = now.cut_growth(&picked(7), second);
        assert_eq!(used, second);
        assert_eq!(now.pick_us.sum, SUM_PER_S);
        now.pick_us.sum = 0.0;
        assert_eq!(now, picked(100_007));
        let mut now = picked(3);
        assert_eq!(now.cut_growth(&picked(7), second), Duration::ZERO);
        assert_eq!(now, picked(3), "a VM that was restarted may have less");
    }

    #[test]
    fn counts_that_move_to_other_models_are_no_growth() {
        let label = |model: &str| TotalsLabel {
            model: model.to_owned(),
            ..TotalsLabel::other()
        };
        let row = |requests: u64| ModelTotals {
            requests,
            ..ModelTotals::default()
        };
        let many = 1 << 30;
        let mut before = CounterTotals::default();
        before.models.insert(label("m"), row(many));
        before.models.insert(TotalsLabel::other(), row(5));
        let mut now = CounterTotals::default();
        now.models.insert(TotalsLabel::other(), row(many + 6));
        let used = now.cut_growth(&before, Duration::from_secs(1));
        assert_eq!(now.models[&TotalsLabel::other()].requests, many + 6);
        assert_eq!(used, Duration::from_millis(1));
    }
}
