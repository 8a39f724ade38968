//! The counts of this process's own ext_proc server, as totals. These counts need no checks.

use exchange::ManagedPool;
use pool_state::{
    CountHistogram, EndpointCounters, LabelSource, ModelCounters, ModelLabel, queues,
};

use super::totals::{
    BandTotals, CounterTotals, EndpointTotals, ModelTotals, TotalsHistogram, TotalsLabel,
};

// === impl CounterTotals ===

impl CounterTotals {
    #[must_use]
    pub fn from_pool(pool: &ManagedPool, pick_us: &CountHistogram) -> Self {
        let counters = pool.counters();
        let prefixes = pool.prefixes().stats();
        let endpoint = |c: &EndpointCounters| {
            let load = pool.in_flight().own(c.endpoint);
            let row = EndpointTotals {
                picked: c.picked,
                served: c.served,
                failed: c.failed,
                requests: u64::from(load.requests),
                prefill_tokens: load.prefill_tokens,
                decode_tokens: load.decode_tokens,
                prompts: u64::from(load.prefills.prompts),
                tracked: pool.in_flight().running(c.endpoint).len() as u64,
                unread: u64::from(pool.in_flight().suspended(c.endpoint)),
            };
            ((c.endpoint.generation, c.endpoint.slot), row)
        };
        Self {
            vms: 1,
            endpoints: counters.endpoints().iter().map(endpoint).collect(),
            models: counters
                .models()
                .iter()
                .map(|m| (TotalsLabel::of_local(&m.label), ModelTotals::of_local(m)))
                .collect(),
            dropped: counters
                .dropped()
                .iter()
                .map(|(reason, count)| ((*reason).to_owned(), *count))
                .collect(),
            pick_us: TotalsHistogram::of_local(pick_us),
            prefix_entries: prefixes.entries as u64,
            prefix_evictions: prefixes.evictions,
            placements_dropped: pool.placements_dropped(),
            running: vec![exchange::record::running(pool).into()],
            bands: pool
                .queues()
                .counters()
                .map(|band| (band.priority, BandTotals::of_local(band)))
                .collect(),
        }
    }
}

// === impl BandTotals ===

impl BandTotals {
    fn of_local(band: &queues::BandCounters) -> Self {
        let full_at = band.oldest.and_then(|oldest| oldest.full_at);
        Self {
            held: band.queued,
            bytes: band.bytes,
            oldest_ms: band.oldest.map_or(0, |oldest| oldest.ms),
            full_at: full_at.map(|endpoint| (endpoint.slot.0.into(), endpoint.generation.0)),
            outcomes: band.outcomes,
            given_up: band.given_up,
            given_up_for: band.given_up_for,
            queue_ms: TotalsHistogram::of_local(&band.queue_ms),
        }
    }
}

// === impl TotalsLabel ===

impl TotalsLabel {
    fn of_local(label: &ModelLabel) -> Self {
        Self {
            model: label.model.to_string(),
            target: label.target_model.to_string(),
            priority: label.priority,
        }
    }
}

// === impl ModelTotals ===

impl ModelTotals {
    fn of_local(m: &ModelCounters) -> Self {
        Self {
            listed: m.source == LabelSource::Listed,
            requests: m.requests,
            errors: m
                .errors
                .iter()
                .map(|(status, count)| (status.to_string(), *count))
                .collect(),
            duration_ms: TotalsHistogram::of_local(&m.duration_ms),
            ttft_ms: TotalsHistogram::of_local(&m.ttft_ms),
            tpot_ms: TotalsHistogram::of_local(&m.tpot_ms),
            prompt_tokens: m.tokens.prompt,
            completion_tokens: m.tokens.completion,
            cached_tokens: m.tokens.cached,
            request_bytes: m.request_bytes,
            response_bytes: m.response_bytes,
            running: m.running,
            slo: m.slo,
            missed_tokens: m.tokens.missed,
        }
    }
}

// === impl TotalsHistogram ===

impl TotalsHistogram {
    fn of_local(histogram: &CountHistogram) -> Self {
        Self {
            counts: histogram.counts,
            sum: histogram.sum,
        }
    }
}
