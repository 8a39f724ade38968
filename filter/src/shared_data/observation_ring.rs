//! Passes observations (measured times of ended requests) from each VM to the daemon. Each VM
//! writes its observations into a ring of fixed size, which consists of segments in shared data.
//!
//! The observations, or rows, are numbered from 0 for the lifetime of their VM, and a segment has
//! the number of its first row. So a slow reader, or a new leader, finds the oldest existing row.
//! The daemon sees from the numbers which rows were lost, and which rows it already has. The daemon
//! learns from a sample of the rows as well as from all rows, so no writer waits, and the oldest
//! rows are overwritten.

use proto::observation::OBSERVATION_BYTES;
use proto::shared_data::{OBSERVATION_SEGMENT_ROWS as SEGMENT_ROWS, SegmentHead};
use proto::state;

use super::RingOwner;
use crate::host::{Host, WriteCondition};

/// The number of segments of a ring. If the leader reads every 100 ms, a ring has room for 5,000
/// requests per second in each VM and pool.
const SEGMENTS: u64 = 16;
/// The ring that this VM writes for one pool.
#[derive(Debug, Default)]
pub struct ObservationRingWriter {
    vm: u64,
    vm_slot: u16,
    next: u64,
    segment: Vec<u8>,
}

/// A reader of another VM's ring, which keeps the position up to which it has read.
#[derive(Clone, Copy, Debug, Default)]
pub struct ObservationRingReader {
    vm: u64,
    next: u64,
}

fn key(pool: &str, vm_slot: u16, number: u64) -> String {
    let segment = number / SEGMENT_ROWS % SEGMENTS;
    super::segment_key(pool, "observations", vm_slot, segment)
}

// === impl ObservationRingWriter ===

impl ObservationRingWriter {
    /// Appends `rows` to the owner's ring, and writes the segment.
    pub fn append<H: Host>(
        &mut self,
        host: &H,
        owner: RingOwner<'_>,
        rows: impl IntoIterator<Item = [u8; OBSERVATION_BYTES]>,
    ) {
        let RingOwner { pool, vm_slot, vm } = owner;
        if (self.vm, self.vm_slot) != (vm, vm_slot) {
            *self = Self {
                vm,
                vm_slot,
                ..Self::default()
            };
        }
        let before = self.next;
        for row in rows {
            if self.next.is_multiple_of(SEGMENT_ROWS) {
                if self.next > before {
                    self.flush(host, pool);
                }
                self.segment.clear();
                SegmentHead {
                    vm,
                    number: self.next,
                }
                .append(&mut self.segment);
            }
            self.segment.extend_from_slice(&row);
            self.next = self.next.saturating_add(1);
        }
        if self.next > before {
            self.flush(host, pool);
        }
    }

    fn flush<H: Host>(&self, host: &H, pool: &str) {
        // If the host refuses the write, the readers find a gap in the numbers.
        let _ = host.share(
            &key(pool, self.vm_slot, self.next.saturating_sub(1)),
            &self.segment,
            WriteCondition::Any,
        );
    }
}

// === impl ObservationRingReader ===

impl ObservationRingReader {
    /// Returns the observations that the VM wrote since the last call, at most the whole ring.
    /// Returns `None` if the VM wrote no observations.
    pub fn read<H: Host>(&mut self, host: &H, owner: RingOwner<'_>) -> Option<state::Observations> {
        let RingOwner { pool, vm_slot, vm } = owner;
        if self.vm != vm {
            *self = Self { vm, next: 0 };
        }
        let mut message = state::Observations {
            pool: pool.to_owned(),
            vm_id: vm,
            first: self.next,
            rows: Vec::new(),
        };
        // The loop goes twice around the ring: once to find the oldest segment, and once to read.
        for _ in 0..SEGMENTS.saturating_mul(2) {
            let Some((first, rows)) = segment(host, &key(pool, vm_slot, self.next), vm) else {
                break;
            };
            let begun = self.next.saturating_sub(self.next % SEGMENT_ROWS);
            if first > begun {
                let oldest =
                    first.saturating_sub(SEGMENTS.saturating_sub(1).saturating_mul(SEGMENT_ROWS));
                self.next = oldest.max(begun.saturating_add(SEGMENT_ROWS));
                // Rows before a gap go into a separate message, because the numbers in a message
                // are consecutive.
                if !message.rows.is_empty() {
                    break;
                }
                message.first = self.next;
                continue;
            }
            let known = usize::try_from(self.next.saturating_sub(begun))
                .unwrap_or(usize::MAX)
                .saturating_mul(OBSERVATION_BYTES);
            let new = rows
                .get(known..)
                .filter(|_| first == begun)
                .unwrap_or_default();
            message.rows.extend_from_slice(new);
            let count = new.len().checked_div(OBSERVATION_BYTES).unwrap_or(0) as u64;
            self.next = self.next.saturating_add(count);
            if count == 0 || !self.next.is_multiple_of(SEGMENT_ROWS) {
                break;
            }
        }
        (!message.rows.is_empty()).then_some(message)
    }
}

/// Returns the number of a segment's first row, and its rows. Returns `None` if the segment belongs
/// to another VM or is invalid.
fn segment<H: Host>(host: &H, key: &str, vm: u64) -> Option<(u64, Vec<u8>)> {
    let shared = host.shared(key).ok()??;
    let (head, rows) = SegmentHead::split(&shared.bytes)?;
    let is_valid = head.vm == vm
        && head.number.is_multiple_of(SEGMENT_ROWS)
        && rows.len().is_multiple_of(OBSERVATION_BYTES)
        && (rows.len().checked_div(OBSERVATION_BYTES).unwrap_or(0) as u64) <= SEGMENT_ROWS;
    is_valid.then(|| (head.number, rows.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::FakeHost;
    use proptest::prelude::*;

    const AT: RingOwner<'_> = RingOwner {
        pool: "p",
        vm_slot: 2,
        vm: 7,
    };

    fn row(number: u64) -> [u8; OBSERVATION_BYTES] {
        let mut row = [0; OBSERVATION_BYTES];
        row[..8].copy_from_slice(&number.to_le_bytes());
        row
    }

    fn write(host: &FakeHost, writer: &mut ObservationRingWriter, numbers: std::ops::Range<u64>) {
        writer.append(host, AT, numbers.map(row));
    }

    /// Reads the ring, and returns the number of the first row and the contents of all rows.
    fn read(host: &FakeHost, reader: &mut ObservationRingReader) -> Option<(u64, Vec<u64>)> {
        let message = reader.read(host, AT)?;
        let rows = message.rows.as_chunks::<OBSERVATION_BYTES>().0;
        Some((
            message.first,
            rows.iter()
                .map(|row| u64::from_le_bytes(row[..8].try_into().unwrap()))
                .collect(),
        ))
    }

    #[test]
    fn each_row_is_read_once_and_numbered() {
        let host = FakeHost::new();
        let mut writer = ObservationRingWriter::default();
        let mut reader = ObservationRingReader::default();
        assert_eq!(read(&host, &mut reader), None);
        write(&host, &mut writer, 0..3);
        assert_eq!(read(&host, &mut reader), Some((0, vec![0, 1, 2])));
        assert_eq!(read(&host, &mut reader), None);
        write(&host, &mut writer, 3..100);
        assert_eq!(
            read(&host, &mut reader),
            Some((3, (3..100).collect())),
            "over the ends of segments"
        );
        let mut late = ObservationRingReader::default();
        assert_eq!(
            read(&host, &mut late),
            Some((0, (0..100).collect())),
            "a leader that has just begun"
        );
    }

    #[test]
    fn the_oldest_go_and_what_is_left_says_where_it_begins() {
        let host = FakeHost::new();
        let mut writer = ObservationRingWriter::default();
        let mut reader = ObservationRingReader::default();
        write(&host, &mut writer, 0..10);
        read(&host, &mut reader);
        let room = SEGMENTS * SEGMENT_ROWS;
        write(&host, &mut writer, 10..2 * room);
        let mut got = Vec::new();
        while let Some((first, rows)) = read(&host, &mut reader) {
            assert_eq!(first, rows[0], "numbers in a message run on");
            got.extend(rows);
        }
        assert_eq!(got, (room..2 * room).collect::<Vec<_>>());
        assert_eq!(
            host.shared.borrow().len() as u64,
            SEGMENTS,
            "a fixed set of names"
        );
        let largest = state::Observations {
            rows: vec![0; got.len() * OBSERVATION_BYTES],
            ..state::Observations::default()
        };
        assert!(
            largest.rows.len() <= proto::observation::OBSERVATIONS_MAX * OBSERVATION_BYTES,
            "no message is more than the daemon takes"
        );
    }

    #[test]
    fn another_vm_at_the_vm_slot_is_another_ring() {
        let host = FakeHost::new();
        let mut old = ObservationRingWriter::default();
        let mut reader = ObservationRingReader::default();
        write(&host, &mut old, 0..50);
        read(&host, &mut reader);
        let mut new = ObservationRingWriter::default();
        new.append(&host, RingOwner { vm: 8, ..AT }, [row(900)]);
        assert_eq!(
            reader
                .read(&host, RingOwner { vm: 8, ..AT })
                .map(|message| (message.vm_id, message.first, message.rows.len())),
            Some((8, 0, OBSERVATION_BYTES))
        );
        assert_eq!(
            read(&host, &mut reader),
            None,
            "nothing of the VM that is gone"
        );
    }

    proptest! {
        #[test]
        fn nothing_is_lost_doubled_or_out_of_order_while_it_is_read_in_time(counts in prop::collection::vec(0..200_u64, 1..20)) {
            let host = FakeHost::new();
            let mut writer = ObservationRingWriter::default();
            let mut reader = ObservationRingReader::default();
            let mut next = 0;
            let mut got = Vec::new();
            for count in counts {
                write(&host, &mut writer, next..next + count);
                next += count;
                while let Some((_, rows)) = read(&host, &mut reader) {
                    got.extend(rows);
                }
            }
            prop_assert_eq!(got, (0..next).collect::<Vec<_>>());
        }

        #[test]
        fn any_bytes_in_a_segment_are_survived(head: (u64, u64), bytes in prop::collection::vec(any::<u8>(), 0..400), whole: bool) {
            let host = FakeHost::new();
            let mut reader = ObservationRingReader::default();
            let head = if whole { [7, head.1 / SEGMENT_ROWS * SEGMENT_ROWS] } else { [head.0, head.1] };
            for segment in 0..SEGMENTS {
                host.share(&key("p", 2, segment * SEGMENT_ROWS), &proto::words::write(&head, &bytes), WriteCondition::Any).unwrap();
            }
            for _ in 0..3 {
                let _ = reader.read(&host, AT);
            }
        }
    }
}
