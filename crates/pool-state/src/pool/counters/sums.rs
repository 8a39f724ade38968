//! Adds the counts of one row to those of another.

use super::{CountHistogram, ModelCounters, TokenCounters};

impl ModelCounters {
    /// Adds the counts of another row.
    pub(super) fn merge(&mut self, other: &Self) {
        self.requests += other.requests;
        for &(status, count) in &other.errors {
            self.errors_of(status, count);
        }
        for (sum, more) in [
            (&mut self.duration_ms, &other.duration_ms),
            (&mut self.ttft_ms, &other.ttft_ms),
            (&mut self.tpot_ms, &other.tpot_ms),
        ] {
            sum.merge(more);
        }
        self.tokens.merge(&other.tokens);
        self.request_bytes += other.request_bytes;
        self.response_bytes += other.response_bytes;
        self.running += other.running;
        add_each(&mut self.slo, &other.slo);
    }
}

impl CountHistogram {
    fn merge(&mut self, other: &Self) {
        add_each(&mut self.counts, &other.counts);
        self.sum += other.sum;
    }
}

impl TokenCounters {
    fn merge(&mut self, other: &Self) {
        self.prompt += other.prompt;
        self.completion += other.completion;
        self.cached += other.cached;
        add_each(&mut self.missed, &other.missed);
    }
}

fn add_each(sums: &mut [u64], more: &[u64]) {
    sums.iter_mut()
        .zip(more)
        .for_each(|(sum, count)| *sum += count);
}
