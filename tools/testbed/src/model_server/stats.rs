//! The counters of an engine since its start: the numbers of its `/metrics` page. Times are wall
//! time, as a client sees them.

use super::engine::{FinishReason, SequenceEvent, SequenceTimeline};

const COUNTS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5,
];
const ITERATION: &[f64] = &[
    1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0,
];
const PARAMS_N: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0];
const FIRST_TOKEN: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
const PER_TOKEN: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
];
const LATENCY: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
];

/// The histograms of a vLLM page with their buckets and help, in the order of the page.
pub(super) const HISTOGRAMS: [(&str, &[f64], &str); 15] = [
    (
        "vllm:request_prompt_tokens",
        COUNTS,
        "Number of prefill tokens processed.",
    ),
    (
        "vllm:request_generation_tokens",
        COUNTS,
        "Number of generation tokens processed.",
    ),
    (
        "vllm:iteration_tokens_total",
        ITERATION,
        "Histogram of number of tokens per engine_step.",
    ),
    (
        "vllm:request_max_num_generation_tokens",
        COUNTS,
        "Histogram of maximum number of requested generation tokens.",
    ),
    (
        "vllm:request_params_n",
        PARAMS_N,
        "Histogram of the n request parameter.",
    ),
    (
        "vllm:request_params_max_tokens",
        COUNTS,
        "Histogram of the max_tokens request parameter.",
    ),
    (
        "vllm:time_to_first_token_seconds",
        FIRST_TOKEN,
        "Histogram of time to first token in seconds.",
    ),
    (
        "vllm:inter_token_latency_seconds",
        PER_TOKEN,
        "Histogram of inter-token latency in seconds.",
    ),
    (
        "vllm:request_time_per_output_token_seconds",
        PER_TOKEN,
        "Histogram of time_per_output_token_seconds per request.",
    ),
    (
        "vllm:e2e_request_latency_seconds",
        LATENCY,
        "Histogram of e2e request latency in seconds.",
    ),
    (
        "vllm:request_queue_time_seconds",
        LATENCY,
        "Histogram of time spent in WAITING phase for request.",
    ),
    (
        "vllm:request_inference_time_seconds",
        LATENCY,
        "Histogram of time spent in RUNNING phase for request.",
    ),
    (
        "vllm:request_prefill_time_seconds",
        LATENCY,
        "Histogram of time spent in PREFILL phase for request.",
    ),
    (
        "vllm:request_decode_time_seconds",
        LATENCY,
        "Histogram of time spent in DECODE phase for request.",
    ),
    (
        "vllm:request_prefill_kv_computed_tokens",
        COUNTS,
        "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
    ),
];

#[derive(Clone, Debug)]
pub(super) struct StatsHistogram {
    pub bounds: &'static [f64],
    /// One count for each bucket; the last count is for values above all bounds. The counts are not
    /// cumulative.
    pub counts: Vec<u64>,
    pub sum: f64,
}

impl StatsHistogram {
    fn observe(&mut self, value: f64) {
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        self.counts[bucket] += 1;
        self.sum += value;
    }
}

/// A histogram of how late, in wall time, the engine's events were handled because the machine was
/// too busy. Its buckets are [`Self::BUCKET_MS`] wide; the last bucket has all greater delays.
#[derive(Clone, Debug)]
pub(super) struct Lateness {
    counts: [u64; Self::BUCKETS],
}

impl Lateness {
    const BUCKETS: usize = 200;
    const BUCKET_MS: f64 = 0.25;

    fn new() -> Self {
        Self {
            counts: [0; Self::BUCKETS],
        }
    }

    pub(super) fn record_ms(&mut self, late_ms: f64) {
        let bucket = ((late_ms / Self::BUCKET_MS) as usize).min(Self::BUCKETS - 1);
        self.counts[bucket] += 1;
    }

    /// Returns the 99th percentile in ms, rounded up to a bucket; 0 if there was no event.
    pub(super) fn p99_ms(&self) -> f64 {
        let all: u64 = self.counts.iter().sum();
        let rank = all - all / 100;
        let mut seen = 0;
        let buckets = self.counts.iter().take_while(|count| {
            seen += **count;
            seen < rank
        });
        if all == 0 {
            0.0
        } else {
            (buckets.count() + 1) as f64 * Self::BUCKET_MS
        }
    }
}

/// The parameters of a request, for the histograms of these parameters.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestParameters {
    pub n: u32,
    pub max_tokens: u32,
}

#[derive(Clone, Debug)]
pub(super) struct EngineStats {
    /// The start time, in seconds since 1970.
    pub started_at: f64,
    pub prompt_tokens: u64,
    pub generation_tokens: u64,
    pub prefix_queries: u64,
    pub prefix_hits: u64,
    /// The numbers of requests that ended with stop, length and abort, in this order.
    pub finished: [u64; 3],
    /// A histogram of how late the steps of the engine ended.
    pub late: Lateness,
    pub histograms: Vec<StatsHistogram>,
    ms_scale: f64,
}

impl EngineStats {
    /// Creates empty counters. `ms_scale` is wall seconds per engine ms.
    pub(super) fn new(started_at: f64, ms_scale: f64) -> Self {
        let empty = |&(_, bounds, _): &(_, &'static [f64], _)| StatsHistogram {
            bounds,
            counts: vec![0; bounds.len() + 1],
            sum: 0.0,
        };
        Self {
            started_at,
            prompt_tokens: 0,
            generation_tokens: 0,
            prefix_queries: 0,
            prefix_hits: 0,
            finished: [0; 3],
            late: Lateness::new(),
            histograms: HISTOGRAMS.iter().map(empty).collect(),
            ms_scale,
        }
    }

    fn observe(&mut self, name: &str, value: f64) {
        if let Some(position) = HISTOGRAMS
            .iter()
            .position(|(other, ..)| other.strip_prefix("vllm:") == Some(name))
        {
            self.histograms[position].observe(value);
        }
    }

    fn observe_ms(&mut self, name: &str, ms: f64) {
        self.observe(name, ms.max(0.0) * self.ms_scale);
    }

    pub(super) fn record_parameters(&mut self, asked: RequestParameters) {
        self.observe("request_params_n", f64::from(asked.n));
        self.observe("request_params_max_tokens", f64::from(asked.max_tokens));
        self.observe(
            "request_max_num_generation_tokens",
            f64::from(asked.max_tokens),
        );
    }

    pub(super) fn admitted(&mut self, prompt_tokens: u32, cached_tokens: u32) {
        self.prefix_queries += u64::from(prompt_tokens);
        self.prefix_hits += u64::from(cached_tokens);
        self.observe(
            "request_prefill_kv_computed_tokens",
            f64::from(prompt_tokens - cached_tokens),
        );
    }

    pub(super) fn record(&mut self, event: &SequenceEvent) {
        match *event {
            SequenceEvent::Stepped { tokens } => {
                self.observe("iteration_tokens_total", f64::from(tokens));
            }
            SequenceEvent::Admitted { .. } => {} // `admitted` counts this event, with the length of the prompt
            SequenceEvent::Token {
                first, since_ms, ..
            } => {
                self.generation_tokens += 1;
                self.observe_ms(
                    if first {
                        "time_to_first_token_seconds"
                    } else {
                        "inter_token_latency_seconds"
                    },
                    since_ms,
                );
            }
            SequenceEvent::Finished {
                finish,
                prompt_tokens,
                generated,
                timeline,
                at_ms,
                ..
            } => {
                self.finished[finish as usize] += 1;
                if finish != FinishReason::Abort {
                    self.completed(prompt_tokens, generated, timeline, at_ms);
                }
            }
        }
    }

    fn completed(
        &mut self,
        prompt_tokens: u32,
        generated: u32,
        timeline: SequenceTimeline,
        at_ms: f64,
    ) {
        self.prompt_tokens += u64::from(prompt_tokens);
        self.observe("request_prompt_tokens", f64::from(prompt_tokens));
        self.observe("request_generation_tokens", f64::from(generated));
        self.observe_ms("e2e_request_latency_seconds", at_ms - timeline.arrived_ms);
        self.observe_ms(
            "request_queue_time_seconds",
            timeline.admitted_ms - timeline.queued_ms,
        );
        self.observe_ms(
            "request_inference_time_seconds",
            at_ms - timeline.admitted_ms,
        );
        self.observe_ms(
            "request_prefill_time_seconds",
            timeline.first_token_ms - timeline.admitted_ms,
        );
        let decode_ms = at_ms - timeline.first_token_ms;
        self.observe_ms("request_decode_time_seconds", decode_ms);
        if generated > 1 {
            self.observe_ms(
                "request_time_per_output_token_seconds",
                decode_ms / f64::from(generated - 1),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lateness_is_that_of_the_latest_hundredth() {
        let mut late = Lateness::new();
        assert_eq!(late.p99_ms(), 0.0);
        for _ in 0..980 {
            late.record_ms(0.1);
        }
        (0..20).for_each(|_| late.record_ms(7.0));
        assert_eq!(late.p99_ms(), 7.25);
        late.record_ms(1e9);
        assert_eq!(
            late.p99_ms(),
            7.25,
            "one event far behind is not a hundredth"
        );
    }
}
