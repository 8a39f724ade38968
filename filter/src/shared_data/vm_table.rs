//! The table of the VMs of this process: one row for each VM, which the VM updates by heartbeats.
//!
//! The first [`VM_SLOTS_MAX`] rows are VM slots. The names of the data that a VM shares (queue,
//! counters, load report, ring) contain the number of its slot. So the set of names is fixed, as it
//! must be, because the host never frees a key of shared data. Further VMs have rows without a
//! slot. VMs without a slot pick with the state that they have read themselves, and share nothing.
//! VMs without a slot wake only at their ticks, and take the first slot that becomes free. A row
//! without a heartbeat for [`EXPIRY_MS`] is free. A VM that was stalled for that long finds another
//! VM in its row and enrols again.

use exchange::Timestamp;
use proto::shared_data::VmEntry;

use crate::host::{Host, Result, WriteCondition};

/// The number of VM slots of a process. Each worker thread and the main thread have a VM. The
/// number is more than twice the number of VMs on 192 cores, because all VMs may be replaced at the
/// same time, and slots of lost VMs are free only after [`EXPIRY_MS`]. The table has 32 bytes for
/// each row, and each VM reads it every 100 ms.
pub const VM_SLOTS_MAX: usize = 512;
/// The number of rows of the table, including rows without a slot. If the process has more VMs, the
/// table leaves out the VMs beyond this number.
const ROWS_MAX: usize = 2 * VM_SLOTS_MAX;
/// The interval at which a VM writes its heartbeat, in ms.
pub const HEARTBEAT_MS: u64 = 1_000;
/// The time without a heartbeat after which a VM is lost, in ms. The time is that of five
/// heartbeats, so that a VM survives a long blocking call on its thread.
pub const EXPIRY_MS: u64 = 5_000;

const KEY: &str = "switchpoint/1/vms";
/// The maximum number of attempts at a compare-and-swap. Conflicts are rare, because they come from
/// the heartbeats of other VMs: one per second from each VM.
const TRIES_MAX: usize = 16;

/// This VM's copy of the table at the last reading.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VmTable {
    rows: Vec<VmEntry>,
}

// === impl VM table ===

impl VmTable {
    /// Writes `row` into the row of its VM, or enrols the VM in the first free row. Returns the
    /// slot, if the VM has a slot, and the new table. Returns `None` if nothing was written,
    /// because other VMs wrote at each attempt, or because the proxy refused the write.
    pub fn write_heartbeat<H: Host>(host: &H, row: VmEntry) -> Option<(Option<u16>, Self)> {
        for _ in 0..TRIES_MAX {
            let (mut vm_table, expect) = Self::load(host).ok()?;
            let vm_slot = vm_table.place(row);
            if host
                .share(KEY, &VmEntry::write_table(&vm_table.rows), expect)
                .is_ok()
            {
                return Some((vm_slot, vm_table));
            }
        }
        None
    }

    /// Reads the current table.
    pub fn read<H: Host>(host: &H) -> Result<Self> {
        Self::load(host).map(|(vm_table, _)| vm_table)
    }

    /// Returns the running VMs with a slot, by slot.
    pub fn alive(&self, now: Timestamp) -> impl Iterator<Item = (u16, VmEntry)> + '_ {
        (0_u16..)
            .zip(self.rows.iter().copied())
            .take(VM_SLOTS_MAX)
            .filter(move |(_, row)| is_alive(row, now))
    }

    /// Counts the running VMs without a slot.
    #[must_use]
    pub fn without_vm_slot(&self, now: Timestamp) -> usize {
        self.rows
            .iter()
            .skip(VM_SLOTS_MAX)
            .filter(|row| is_alive(row, now))
            .count()
    }

    /// Adds the row of a VM to this copy of the table.
    #[cfg(feature = "drill")]
    pub fn insert(&mut self, row: VmEntry) {
        let _ = self.place(row);
    }

    /// Writes `row` in place of its VM's previous row. A new VM gets a free slot or, if no slot is
    /// free, a row without a slot. Returns the slot, if the VM has a slot.
    fn place(&mut self, row: VmEntry) -> Option<u16> {
        let enrolled = self.rows.iter().position(|r| r.vm == row.vm);
        let in_slot = enrolled.filter(|at| *at < VM_SLOTS_MAX);
        let free = || {
            self.rows
                .iter()
                .position(|r| !is_alive(r, row.heartbeat))
                .unwrap_or(self.rows.len())
        };
        let at = in_slot.unwrap_or_else(|| free().min(enrolled.unwrap_or(ROWS_MAX)));
        if at >= ROWS_MAX {
            return None;
        }
        if let Some(left) = enrolled
            .filter(|left| *left != at)
            .and_then(|left| self.rows.get_mut(left))
        {
            *left = VmEntry::default();
        }
        if at == self.rows.len() {
            self.rows.push(VmEntry::default());
        }
        *self.rows.get_mut(at)? = row;
        u16::try_from(at).ok().filter(|_| at < VM_SLOTS_MAX)
    }

    fn load<H: Host>(host: &H) -> Result<(Self, WriteCondition)> {
        Ok(match host.shared(KEY)? {
            None => (Self::default(), WriteCondition::Absent),
            Some(shared) => (
                Self {
                    rows: VmEntry::read_table(&shared.bytes, ROWS_MAX),
                },
                WriteCondition::Token(shared.token),
            ),
        })
    }
}

fn is_alive(row: &VmEntry, now: Timestamp) -> bool {
    row.vm != 0 && now.ms_since(row.heartbeat) < EXPIRY_MS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::FakeHost;

    impl VmTable {
        /// Puts a VM into a slot of the shared table. Replaces a VM that is already in the slot.
        pub fn vm_slot(host: &FakeHost, slot: u16, row: VmEntry) {
            let (mut vm_table, _) = Self::load(host).unwrap();
            vm_table.rows.resize(
                vm_table.rows.len().max(usize::from(slot) + 1),
                VmEntry::default(),
            );
            vm_table.rows[usize::from(slot)] = row;
            host.share(
                KEY,
                &VmEntry::write_table(&vm_table.rows),
                WriteCondition::Any,
            )
            .unwrap();
        }
    }

    fn at(ms: u64) -> Timestamp {
        Timestamp(0).plus_ms(1_000_000 + ms)
    }

    fn row(vm: u64, ms: u64) -> VmEntry {
        VmEntry {
            vm,
            heartbeat: at(ms),
            queue: 7,
            serves: false,
        }
    }

    fn slot(host: &FakeHost, row: VmEntry) -> Option<u16> {
        VmTable::write_heartbeat(host, row).unwrap().0
    }

    #[test]
    fn everyone_has_a_slot_of_their_own_and_keeps_it() {
        let host = FakeHost::new();
        assert_eq!(
            [1, 2, 3].map(|vm| slot(&host, row(vm, 0))),
            [Some(0), Some(1), Some(2)]
        );
        assert_eq!(slot(&host, row(2, 1_000)), Some(1));
        let vm_table = VmTable::write_heartbeat(&host, row(1, 5_500)).unwrap().1;
        assert_eq!(
            vm_table
                .alive(at(5_500))
                .map(|(s, r)| (s, r.vm))
                .collect::<Vec<_>>(),
            [(0, 1), (1, 2)]
        );
    }

    #[test]
    fn a_dead_row_is_reused_and_its_late_owner_enrols_again() {
        let host = FakeHost::new();
        slot(&host, row(1, 0));
        slot(&host, row(2, 4_000));
        assert_eq!(slot(&host, row(3, 5_000)), Some(0));
        assert_eq!(slot(&host, row(1, 5_100)), Some(2));
    }

    #[test]
    fn enrolling_while_another_does_loses_neither() {
        let host = FakeHost::new();
        host.before_next_share({
            let host = host.clone();
            move || assert_eq!(slot(&host, row(2, 0)), Some(0))
        });
        assert_eq!(slot(&host, row(1, 0)), Some(1));
    }

    #[test]
    fn the_vms_of_a_host_with_192_cores_all_have_a_vm_slot_while_all_of_them_are_replaced() {
        let host = FakeHost::new();
        for vm in 1..=2 * 193 {
            assert_eq!(slot(&host, row(vm, 0)).map(u64::from), Some(vm - 1));
        }
        let vm_table = VmTable::read(&host).unwrap();
        assert_eq!(
            (
                vm_table.alive(at(0)).count(),
                vm_table.without_vm_slot(at(0))
            ),
            (2 * 193, 0)
        );
        // VMs that are lost also lose their slots, and new VMs take these slots.
        assert_eq!(slot(&host, row(1_000, EXPIRY_MS)), Some(0));
    }

    #[test]
    fn who_finds_no_vm_slot_is_known_and_takes_the_first_that_comes_free() {
        let host = FakeHost::new();
        let last = VM_SLOTS_MAX as u64;
        for vm in 1..=last {
            assert!(slot(&host, row(vm, 0)).is_some());
        }
        assert_eq!([901, 902].map(|vm| slot(&host, row(vm, 0))), [None, None]);
        assert_eq!(slot(&host, row(5, 10)), Some(4), "a VM keeps its slot");
        let vm_table = VmTable::read(&host).unwrap();
        assert_eq!(
            (
                vm_table.alive(at(10)).count(),
                vm_table.without_vm_slot(at(10))
            ),
            (VM_SLOTS_MAX, 2)
        );
        // VM 7 stops, and the other VMs continue.
        for vm in (1..=last).filter(|vm| *vm != 7) {
            slot(&host, row(vm, 4_000));
        }
        assert_eq!(
            [901, 902].map(|vm| slot(&host, row(vm, 4_000))),
            [None, None]
        );
        assert_eq!(
            [902, 901].map(|vm| slot(&host, row(vm, 5_000))),
            [Some(6), None]
        );
        let vm_table = VmTable::read(&host).unwrap();
        assert_eq!(
            (
                vm_table.alive(at(5_000)).count(),
                vm_table.without_vm_slot(at(5_000))
            ),
            (VM_SLOTS_MAX, 1)
        );
    }

    #[test]
    fn more_than_the_table_has_rows_for_are_turned_away() {
        let host = FakeHost::new();
        for vm in 1..=ROWS_MAX as u64 + 10 {
            slot(&host, row(vm, 0));
        }
        let vm_table = VmTable::read(&host).unwrap();
        assert_eq!(
            (vm_table.rows.len(), vm_table.without_vm_slot(at(0))),
            (ROWS_MAX, ROWS_MAX - VM_SLOTS_MAX)
        );
    }

    #[test]
    fn a_heartbeat_that_others_are_in_the_way_of_says_so() {
        let host = FakeHost::new();
        slot(&host, row(1, 0));
        host.fail(&[crate::fake::FakeCall::Share]);
        assert_eq!(VmTable::write_heartbeat(&host, row(1, 1_000)), None);
    }

    #[test]
    fn garbage_in_the_table_is_survived() {
        let host = FakeHost::new();
        host.share(KEY, &[0xff; 100_001], WriteCondition::Any)
            .unwrap();
        let (_, vm_table) = VmTable::write_heartbeat(&host, row(1, 0)).unwrap();
        assert!(vm_table.rows.len() <= ROWS_MAX);
    }
}
