//! The counts that a proxy's VM reports, as totals. The daemon checks the reports and cuts them to
//! limits.

use std::collections::BTreeMap;

use proto::state;
use scheduler::{ENDPOINTS_MAX, Generation, Slot};

use super::totals::{
    BANDS_MAX, BandTotals, CountLimit, CounterTotals, EndpointTotals, ModelTotals, OTHER,
    TotalsHistogram, TotalsLabel, add_counts,
};

/// The maximum number of models kept of one VM.
const MODELS_PER_VM_MAX: usize = pool_state::MODELS_MAX + 1;

/// The longest model name or reason kept, in bytes. Longer names and reasons are truncated.
const NAME_BYTES_MAX: usize = 256;

/// The longest list of a VM's running requests that is kept, in bytes. The limit is several times
/// the size that a filter writes.
const RUNNING_BYTES_MAX: usize = 64 << 10;

// === impl CounterTotals ===

impl CounterTotals {
    pub(super) fn from_vm(counters: state::VmCounters) -> Self {
        let state::VmCounters {
            endpoints,
            models,
            dropped,
            pick_us,
            prefix_entries,
            prefix_evictions,
            placements_dropped,
            running,
            bands,
            ..
        } = counters;
        let pick_us = TotalsHistogram::from_message(pick_us);
        let mut totals = Self {
            vms: 1,
            pick_us,
            prefix_entries,
            prefix_evictions,
            placements_dropped,
            ..Self::default()
        };
        if (1..=RUNNING_BYTES_MAX).contains(&running.len()) {
            totals.running.push(running.into());
        }
        for e in endpoints.into_iter().take(ENDPOINTS_MAX) {
            let Ok(slot) = u16::try_from(e.slot) else {
                continue;
            };
            let key = (Generation(e.generation), Slot(slot));
            totals
                .endpoints
                .insert(key, EndpointTotals::from_counters(e));
        }
        totals.bands.extend(
            bands
                .into_iter()
                .take(BANDS_MAX)
                .map(|band| (band.priority, BandTotals::from_counters(band))),
        );
        for m in models {
            let bytes_max = if m.listed {
                NAME_BYTES_MAX
            } else {
                pool_state::UNLISTED_NAME_BYTES_MAX
            };
            let label = TotalsLabel {
                model: cut(&m.model, bytes_max),
                target: cut(&m.target_model, bytes_max),
                priority: m.priority,
            };
            totals
                .model_mut(&label, m.listed, MODELS_PER_VM_MAX)
                .add(&ModelTotals::from_counters(m), true);
        }
        add_counts(
            &mut totals.dropped,
            dropped.into_iter().map(|c| (shorten(&c.key), c.count)),
        );
        totals.cut(CountLimit::OF_VM);
        totals
    }
}

// === impl EndpointTotals ===

impl EndpointTotals {
    fn from_counters(e: state::EndpointCounters) -> Self {
        let state::EndpointCounters {
            picked,
            served,
            failed,
            requests,
            prefill_tokens,
            decode_tokens,
            prompts,
            tracked,
            unread,
            ..
        } = e;
        EndpointTotals {
            picked,
            served,
            failed,
            requests,
            prefill_tokens,
            decode_tokens,
            prompts,
            tracked,
            unread,
        }
    }
}

// === impl BandTotals ===

impl BandTotals {
    fn from_counters(band: state::BandCounters) -> Self {
        let mut totals = Self {
            held: band.held,
            bytes: band.bytes,
            oldest_ms: band.oldest_ms,
            full_at: band.full_slot.map(|slot| (slot, band.full_generation)),
            given_up: band.given_up,
            given_up_for: band.given_up_for,
            queue_ms: TotalsHistogram::from_message(band.queue_ms),
            ..Self::default()
        };
        band.outcomes
            .iter()
            .zip(&mut totals.outcomes)
            .for_each(|(count, total)| *total = *count);
        totals
    }
}

// === impl ModelTotals ===

impl ModelTotals {
    fn from_counters(m: state::ModelCounters) -> Self {
        let mut errors = BTreeMap::new();
        add_counts(
            &mut errors,
            m.errors.into_iter().map(|c| (status(&c.key), c.count)),
        );
        Self {
            listed: m.listed,
            requests: m.requests,
            errors,
            duration_ms: TotalsHistogram::from_message(m.duration_ms),
            ttft_ms: TotalsHistogram::from_message(m.ttft_ms),
            tpot_ms: TotalsHistogram::from_message(m.tpot_ms),
            prompt_tokens: m.prompt_tokens,
            completion_tokens: m.completion_tokens,
            cached_tokens: m.cached_tokens,
            request_bytes: m.request_bytes,
            response_bytes: m.response_bytes,
            running: m.running,
            slo: std::array::from_fn(|at| m.slo.get(at).copied().unwrap_or(0)),
            missed_tokens: std::array::from_fn(|at| m.missed_tokens.get(at).copied().unwrap_or(0)),
        }
    }
}

// === impl TotalsHistogram ===

impl TotalsHistogram {
    fn from_message(message: Option<state::Histogram>) -> Self {
        let mut histogram = Self::default();
        if let Some(state::Histogram { counts, sum }) = message {
            histogram
                .counts
                .iter_mut()
                .zip(counts)
                .for_each(|(bucket, count)| *bucket = count);
            histogram.sum = if sum.is_finite() && sum >= 0.0 {
                sum
            } else {
                0.0
            };
        }
        histogram
    }
}

/// Returns the label of an HTTP status. A status that is not assigned is counted as [`OTHER`],
/// because each status adds a row of metrics for each model.
fn status(key: &str) -> String {
    let is_assigned = key.parse().is_ok_and(|status: u16| {
        matches!(status, 100..=103 | 200..=208 | 226 | 300..=308 | 400..=418 | 421..=426 | 428 | 429 | 431 | 451 | 499 | 500..=511 | 520..=530)
    });
    if is_assigned { key } else { OTHER }.to_owned()
}

fn shorten(name: &str) -> String {
    cut(name, NAME_BYTES_MAX)
}

fn cut(name: &str, bytes_max: usize) -> String {
    name.get(..name.floor_char_boundary(bytes_max))
        .unwrap_or_default()
        .to_owned()
}
