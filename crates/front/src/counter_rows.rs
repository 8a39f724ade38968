//! The row of counters that a proxy sends to the daemon for each pool.

use exchange::ManagedPool;
use pool_state::queues::BandCounters;
use pool_state::{CountHistogram, LabelSource, ModelCounters, PoolCounters, wire_version};
use proto::state;
use scheduler::in_flight::EndpointLoad;
use scheduler::{EndpointRef, Version};

/// Returns the row of a pool. `vm` is the number of the VM, or of the process if all its workers
/// share one pool; `version` is that of the pool update in force.
#[must_use]
pub fn row(
    name: &str,
    vm: u64,
    version: Version,
    pool: &ManagedPool,
    pick_us: &CountHistogram,
) -> state::VmCounters {
    let counters = pool.counters();
    let prefixes = pool.prefixes().stats();
    state::VmCounters {
        pool: name.to_owned(),
        vm_id: vm,
        endpoints: endpoints(pool, counters),
        models: counters.models().iter().map(model).collect(),
        dropped: counters
            .dropped()
            .iter()
            .map(|(reason, count)| count_of(reason, *count))
            .collect(),
        pick_us: Some(histogram(pick_us)),
        prefix_entries: prefixes.entries as u64,
        prefix_evictions: prefixes.evictions,
        version: Some(wire_version(version)),
        prompt_tokens: counters.prompt_tokens,
        matched_tokens: counters.matched_tokens,
        placements_dropped: pool.placements_dropped(),
        running: exchange::record::running(pool),
        bands: pool.queues().counters().map(band).collect(),
        decision: String::new(),
    }
}

fn endpoints(pool: &ManagedPool, counters: &PoolCounters) -> Vec<state::EndpointCounters> {
    let row = |endpoint: EndpointRef, load: EndpointLoad| state::EndpointCounters {
        slot: u32::from(endpoint.slot.0),
        generation: endpoint.generation.0,
        requests: u64::from(load.requests),
        prefill_tokens: load.prefill_tokens,
        decode_tokens: load.decode_tokens,
        prompts: u64::from(load.prefills.prompts),
        tracked: pool.in_flight().running(endpoint).len() as u64,
        unread: u64::from(pool.in_flight().suspended(endpoint)),
        ..state::EndpointCounters::default()
    };
    let counted = counters
        .endpoints()
        .iter()
        .map(|c| state::EndpointCounters {
            picked: c.picked,
            served: c.served,
            failed: c.failed,
            ..row(c.endpoint, pool.in_flight().own(c.endpoint))
        });
    // These endpoints have left the pool while requests are still in flight at them.
    let is_removed = |at: &EndpointRef| counters.endpoints().iter().all(|c| c.endpoint != *at);
    let removed = pool
        .in_flight()
        .rows()
        .filter(|(at, _)| is_removed(at))
        .map(|(at, load)| row(at, load));
    counted.chain(removed).collect()
}

fn model(m: &ModelCounters) -> state::ModelCounters {
    state::ModelCounters {
        model: m.label.model.to_string(),
        target_model: m.label.target_model.to_string(),
        priority: m.label.priority,
        listed: m.source == LabelSource::Listed,
        requests: m.requests,
        errors: m
            .errors
            .iter()
            .map(|(status, count)| count_of(&status.to_string(), *count))
            .collect(),
        duration_ms: Some(histogram(&m.duration_ms)),
        ttft_ms: Some(histogram(&m.ttft_ms)),
        tpot_ms: Some(histogram(&m.tpot_ms)),
        prompt_tokens: m.tokens.prompt,
        completion_tokens: m.tokens.completion,
        cached_tokens: m.tokens.cached,
        request_bytes: m.request_bytes,
        response_bytes: m.response_bytes,
        running: m.running,
        slo: m.slo.to_vec(),
        missed_tokens: m.tokens.missed.to_vec(),
    }
}

fn band(b: &BandCounters) -> state::BandCounters {
    state::BandCounters {
        priority: b.priority,
        held: b.queued,
        bytes: b.bytes,
        outcomes: b.outcomes.to_vec(),
        queue_ms: Some(histogram(&b.queue_ms)),
        oldest_ms: b.oldest.map_or(0, |oldest| oldest.ms),
        full_slot: b
            .oldest
            .and_then(|oldest| oldest.full_at)
            .map(|endpoint| endpoint.slot.0.into()),
        full_generation: b
            .oldest
            .and_then(|oldest| oldest.full_at)
            .map_or(0, |endpoint| endpoint.generation.0),
        given_up: b.given_up,
        given_up_for: b.given_up_for,
    }
}

fn count_of(key: &str, count: u64) -> state::Count {
    state::Count {
        key: key.to_owned(),
        count,
    }
}

fn histogram(h: &CountHistogram) -> state::Histogram {
    state::Histogram {
        counts: h.counts.to_vec(),
        sum: h.sum,
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn buckets_mean_the_same_on_both_sides_of_the_wire() {
        assert_eq!(
            proto::HISTOGRAM_BOUNDS,
            pool_state::DURATION_BOUNDS_MS.map(f64::from)
        );
    }
}
