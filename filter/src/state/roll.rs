//! The roll of this process's VMs: one shared table, a row each, kept by heartbeats.
//!
//! A VM's slot numbers its queue and its counters, so that their names are a fixed set: shared data frees no key. A row without a heartbeat for
//! [`EXPIRY_MS`] is free; a VM that was stalled for so long finds another in its row and enrols again.

use exchange::Time;

use super::words;
use crate::host::{Expect, Host, Result};

/// The most VMs of a process: each worker thread has one, and the main thread. Beyond it a VM is not woken (its ticks still look) nor counted.
pub const VMS_MAX: usize = 128;
/// How often a VM shows that it is alive.
pub const HEARTBEAT_MS: u64 = 1_000;
/// A VM silent for this long is gone: five heartbeats, so that a long blocking call on its thread does not evict it.
pub const EXPIRY_MS: u64 = 5_000;

/// Where the table is.
const KEY: &str = "switchpoint/1/vms";
/// Tries at a compare-and-swap. Conflicts come from other VMs' heartbeats, one a second each.
const TRIES_MAX: usize = 16;
/// Words of a row.
const ROW: usize = 4;

/// A VM's row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Row {
    /// Random identity; 0 is nobody.
    pub vm: u64,
    /// Its last heartbeat.
    pub beat: Time,
    /// The queue that wakes it; 0 before it has one.
    pub queue: u32,
    /// Has it ever served a request?
    pub serves: bool,
}

/// The table as last read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Roll {
    rows: Vec<Row>,
}

// === impl Roll ===

impl Roll {
    /// Writes `row` where its VM is enrolled, or enrols it in the first free row. The slot, and the table as it is then; no slot when the
    /// table is full or would not be written.
    pub fn beat<H: Host>(host: &H, row: Row) -> (Option<u16>, Self) {
        let mut roll = Self::default();
        for _ in 0..TRIES_MAX {
            let Ok((read, expect)) = Self::load(host) else { break };
            roll = read;
            let Some(slot) = roll.place(row) else { break };
            if host.share(KEY, &roll.to_bytes(), expect).is_ok() {
                return (Some(slot), roll);
            }
        }
        (None, roll)
    }

    /// The table as it is.
    pub fn look<H: Host>(host: &H) -> Result<Self> {
        Self::load(host).map(|(roll, _)| roll)
    }

    /// Everyone alive, by slot.
    pub fn alive(&self, now: Time) -> impl Iterator<Item = (u16, Row)> + '_ {
        (0_u16..).zip(self.rows.iter().copied()).filter(move |(_, row)| row.is_alive(now))
    }

    /// Enrols a VM in this copy of the table.
    #[cfg(feature = "drill")]
    pub fn enrol(&mut self, row: Row) {
        let _ = self.place(row);
    }

    /// Puts a VM at a seat of the shared table, whoever was there.
    #[cfg(test)]
    pub fn seat(host: &crate::fake::FakeHost, slot: u16, row: Row) {
        let (mut roll, _) = Self::load(host).unwrap();
        roll.rows.resize(roll.rows.len().max(usize::from(slot) + 1), Row::default());
        roll.rows[usize::from(slot)] = row;
        host.share(KEY, &roll.to_bytes(), Expect::Any).unwrap();
    }

    fn place(&mut self, row: Row) -> Option<u16> {
        let enrolled = self.rows.iter().position(|r| r.vm == row.vm);
        let free = || self.rows.iter().position(|r| !r.is_alive(row.beat));
        let slot = enrolled.or_else(free).unwrap_or(self.rows.len());
        if slot >= VMS_MAX {
            return None;
        }
        if slot == self.rows.len() {
            self.rows.push(Row::default());
        }
        *self.rows.get_mut(slot)? = row;
        u16::try_from(slot).ok()
    }

    fn load<H: Host>(host: &H) -> Result<(Self, Expect)> {
        Ok(match host.shared(KEY)? {
            None => (Self::default(), Expect::Absent),
            Some(shared) => (Self::from_bytes(&shared.bytes), Expect::Token(shared.token)),
        })
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        let (mut rows, mut rest) = (Vec::new(), bytes);
        while let Some(([vm, beat, queue, serves], tail)) = words::split::<ROW>(rest) {
            rest = tail;
            rows.push(Row { vm, beat: Time(beat), queue: u32::try_from(queue).unwrap_or(0), serves: serves == 1 });
        }
        rows.truncate(VMS_MAX);
        Self { rows }
    }

    fn to_bytes(&self) -> Vec<u8> {
        let words: Vec<u64> = self.rows.iter().flat_map(|r| [r.vm, r.beat.0, u64::from(r.queue), u64::from(r.serves)]).collect();
        words::write(&words, &[])
    }
}

// === impl Row ===

impl Row {
    fn is_alive(&self, now: Time) -> bool {
        self.vm != 0 && now.ms_since(self.beat) < EXPIRY_MS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::FakeHost;

    fn at(ms: u64) -> Time {
        Time(0).plus_ms(1_000_000 + ms)
    }

    fn row(vm: u64, ms: u64) -> Row {
        Row { vm, beat: at(ms), queue: 7, serves: false }
    }

    fn slot(host: &FakeHost, row: Row) -> Option<u16> {
        Roll::beat(host, row).0
    }

    #[test]
    fn everyone_has_a_slot_of_their_own_and_keeps_it() {
        let host = FakeHost::new();
        assert_eq!([1, 2, 3].map(|vm| slot(&host, row(vm, 0))), [Some(0), Some(1), Some(2)]);
        assert_eq!(slot(&host, row(2, 1_000)), Some(1));
        let roll = Roll::beat(&host, row(1, 5_500)).1;
        assert_eq!(roll.alive(at(5_500)).map(|(s, r)| (s, r.vm)).collect::<Vec<_>>(), [(0, 1), (1, 2)]);
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
    fn a_full_table_takes_nobody_in() {
        let host = FakeHost::new();
        for vm in 1..=VMS_MAX as u64 {
            assert!(slot(&host, row(vm, 0)).is_some());
        }
        assert_eq!(slot(&host, row(999, 0)), None);
        assert_eq!(slot(&host, row(5, 10)), Some(4));
    }

    #[test]
    fn garbage_in_the_table_is_survived() {
        let host = FakeHost::new();
        host.share(KEY, &[0xff; 100_001], Expect::Any).unwrap();
        let (_, roll) = Roll::beat(&host, row(1, 0));
        assert!(roll.rows.len() <= VMS_MAX);
    }
}
