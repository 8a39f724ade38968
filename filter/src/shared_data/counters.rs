//! Reports the counters of the VMs to the daemon.
//!
//! Each VM writes a cumulative row for each pool into shared data, and the leader sends the rows of
//! all running VMs. So no count is lost if a report is lost or late.

use exchange::{ManagedPool, Timestamp};
use pool_state::queues::BandCounters;
use pool_state::{CountHistogram, LabelSource, ModelCounters, PoolCounters, wire_version};
use prost::Message;
use proto::state;
use scheduler::EndpointRef;
use scheduler::in_flight::EndpointLoad;

use super::vm_table::VmTable;
use crate::host::{Host, WriteCondition};
use crate::vm::replica::PoolReplica;

/// The maximum number of bytes of rows in one report: half of the protocol's limit, so that one
/// more row always fits.
const REPORT_BYTES_MAX: usize = proto::PROXY_MESSAGE_BYTES_MAX / 2;

/// Returns the key of the row that the VM in `slot` writes for a pool.
fn key(pool: &str, slot: u16) -> String {
    super::slot_key(pool, "counters", slot)
}

/// Writes this VM's row for a pool.
pub fn write<H: Host>(host: &H, vm: u64, slot: u16, replica: &mut PoolReplica) {
    // If the host refuses the write, this VM writes the row again a second later.
    let row = state::VmCounters {
        decision: replica.pool.take_sample(),
        ..row(vm, replica)
    };
    let _ = host.share(
        &key(&replica.name, slot),
        &row.encode_to_vec(),
        WriteCondition::Any,
    );
}

/// Returns the rows of one pool from all running VMs, split into as many reports as their size
/// needs.
pub fn gather<H: Host>(
    host: &H,
    pool: &str,
    vm_table: &VmTable,
    now: Timestamp,
) -> Vec<state::Report> {
    let mut reports = Vec::new();
    let mut open = state::Report::default();
    let mut bytes = 0_usize;
    for (slot, _) in vm_table.alive(now) {
        let Ok(Some(shared)) = host.shared(&key(pool, slot)) else {
            continue;
        };
        bytes = bytes.saturating_add(shared.bytes.len());
        open.counters.push(shared.bytes);
        if bytes >= REPORT_BYTES_MAX {
            reports.push(std::mem::take(&mut open));
            bytes = 0;
        }
    }
    if !open.counters.is_empty() {
        reports.push(open);
    }
    reports
}

fn row(vm: u64, replica: &PoolReplica) -> state::VmCounters {
    let pool = &replica.pool;
    let version = replica.version();
    let counters = pool.counters();
    let prefixes = pool.prefixes().stats();
    state::VmCounters {
        pool: replica.name.to_string(),
        vm_id: vm,
        endpoints: endpoints(pool, counters),
        models: counters.models().iter().map(model).collect(),
        dropped: counters
            .dropped()
            .iter()
            .map(|(reason, count)| count_of(reason, *count))
            .collect(),
        pick_us: Some(histogram(&replica.pick_us)),
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
    use super::*;
    use crate::fake::FakeHost;
    use proto::shared_data::VmEntry;

    #[test]
    fn buckets_mean_the_same_on_both_sides_of_the_wire() {
        assert_eq!(
            proto::HISTOGRAM_BOUNDS,
            pool_state::DURATION_BOUNDS_MS.map(f64::from)
        );
    }

    #[test]
    fn rows_of_the_living_are_gathered_and_split_by_size() {
        let host = FakeHost::new();
        let mut vm_table = VmTable::default();
        for vm in 1..=5 {
            let row = VmEntry {
                vm,
                heartbeat: host.now(),
                queue: 0,
                serves: false,
            };
            vm_table = VmTable::write_heartbeat(&host, row).unwrap().1;
        }
        let mut replica = PoolReplica::new("p", 1);
        write(&host, 1, 0, &mut replica);
        host.share(
            &key("p", 1),
            &vec![0; REPORT_BYTES_MAX],
            WriteCondition::Any,
        )
        .unwrap();
        host.share(&key("p", 4), b"x", WriteCondition::Any).unwrap();
        host.share(&key("p", 9), b"of no VM", WriteCondition::Any)
            .unwrap();
        let reports = gather(&host, "p", &vm_table, host.now());
        assert_eq!(
            reports.iter().map(|r| r.counters.len()).collect::<Vec<_>>(),
            [2, 1]
        );
        let first = state::VmCounters::decode(reports[0].counters[0].as_slice()).unwrap();
        assert_eq!((first.pool.as_str(), first.vm_id), ("p", 1));
        host.pass_ms(10_000);
        assert!(
            gather(&host, "p", &vm_table, host.now()).is_empty(),
            "the dead say nothing"
        );
    }
}
