//! Reports the counters of the VMs to the daemon.
//!
//! Each VM writes a cumulative row for each pool into shared data, and the leader sends the rows of
//! all running VMs. So no count is lost if a report is lost or late.

use exchange::Timestamp;
use front::counter_rows;
use prost::Message;
use proto::state;

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
    let decision = replica.pool.take_sample();
    let version = replica.version();
    let row = state::VmCounters {
        decision,
        ..counter_rows::row(&replica.name, vm, version, &replica.pool, &replica.pick_us)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::FakeHost;
    use proto::shared_data::VmEntry;

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
