//! The placements that each VM publishes to the other VMs. A placement says which endpoint got the
//! blocks of a prompt. Each VM has a ring of fixed size, which consists of segments in shared data.
//!
//! A segment names its VM, and has a number that grows with each new segment. The index of the
//! segment in the ring is this number modulo [`SEGMENTS`]. The VM's load report has the write
//! position of its ring, so a reader never reads beyond that position. A segment with another
//! number than expected was overwritten before it was read. The reader counts and skips this gap.
//! Because the reader lacks the placements of the gap, for some seconds it uses rendezvous
//! endpoints for prompts that are cached nowhere ([`super::load_sharing`]).

use proto::placements::PlacementKind;
use proto::shared_data::{
    PlacementEntry, RECORD_BLOCKS_MAX, RingPosition, SEGMENT_HEAD_BYTES, SegmentHead,
};
use scheduler::EndpointRef;

use super::RingOwner;
use crate::host::{Host, WriteCondition};

/// The maximum number of bytes of a segment. The VM writes the segment again with each placement,
/// which takes about 0.15 µs. Reading a segment takes 0.8 µs.
const SEGMENT_BYTES_MAX: usize = 8 << 10;
/// The number of segments of a ring. A ring takes 1 MB for each pool and each VM that picks, and
/// has room for 300 prompts of 400 blocks. A worker that does not pick reads every 100 ms, so a
/// worker that picks may place 3,000 prompts of this length per second.
pub const SEGMENTS: u64 = 128;
/// The cost of reading a segment in a reader's budget, in blocks. The host call takes as long as
/// inserting this number of blocks into the index.
const LOOK_BLOCKS: usize = 32;

/// The ring that this VM writes for one pool.
#[derive(Debug)]
pub struct PlacementRingWriter {
    pool: Box<str>,
    vm: u64,
    vm_slot: u16,
    position: RingPosition,
    segment: Vec<u8>,
    /// Whether the current segment has placements that were not written to shared data yet.
    is_unwritten: bool,
}

/// A reader of another VM's ring, which keeps the position up to which it has read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlacementRingReader {
    vm: u64,
    at: RingPosition,
    /// The number of the newest segment when the reader first read the other VM's ring. If older
    /// segments are overwritten, they do not count as lost.
    met: u64,
}

/// A placement, or a piece of a long placement.
#[derive(Clone, Copy, Debug)]
pub struct PlacementRecord<'r> {
    pub kind: PlacementKind,
    /// The endpoint that got the blocks.
    pub endpoint: EndpointRef,
    pub blocks: &'r [u64],
    /// The blocks that the endpoint had not cached, according to the estimate.
    pub new: &'r [u64],
}

/// The budget of a reading, and the number of gaps that the reading found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadBudget {
    /// The number of blocks that may still be read. The record that exceeds this number is the last
    /// record of the reading.
    pub blocks: usize,
    /// The number of segments that were overwritten before they were read.
    pub gaps: u32,
}

fn key(pool: &str, vm_slot: u16, segment: u64) -> String {
    super::segment_key(pool, "ring", vm_slot, segment % SEGMENTS)
}

// === impl PlacementRingWriter ===

impl PlacementRingWriter {
    /// Creates an empty ring for `pool`.
    #[must_use]
    pub fn new(pool: &str) -> Self {
        Self {
            pool: pool.into(),
            vm: 0,
            vm_slot: 0,
            position: RingPosition::default(),
            segment: Vec::new(),
            is_unwritten: false,
        }
    }

    /// Sets the number and the slot of this VM. The slot is part of the keys that this VM writes.
    pub fn set_vm_slot(&mut self, vm: u64, vm_slot: u16) {
        if (self.vm, self.vm_slot) != (vm, vm_slot) {
            self.vm = vm;
            self.vm_slot = vm_slot;
            self.segment.clear();
            self.is_unwritten = false;
        }
    }

    #[must_use]
    pub fn vm(&self) -> u64 {
        self.vm
    }

    #[must_use]
    pub fn position(&self) -> RingPosition {
        self.position
    }

    /// Appends a placement: `endpoint` got these blocks, and had cached the first `known` of them,
    /// according to the estimate. [`Self::flush`] writes the placement, or this function if the
    /// segment is full.
    pub fn append<H: Host>(
        &mut self,
        host: &H,
        kind: PlacementKind,
        endpoint: EndpointRef,
        blocks: &[u64],
        known: u32,
    ) {
        let mut known = known as usize;
        // A pick without blocks is published too (its prompt was not read), because the order of
        // picks counts.
        for piece in blocks
            .chunks(RECORD_BLOCKS_MAX)
            .chain(blocks.is_empty().then_some(blocks))
        {
            if self.segment.is_empty()
                || self
                    .segment
                    .len()
                    .saturating_add(PlacementEntry::bytes(piece.len()))
                    > SEGMENT_BYTES_MAX
            {
                self.flush(host);
                self.begin();
            }
            let known_here = known.min(piece.len());
            known = known.saturating_sub(known_here);
            self.is_unwritten = true;
            PlacementEntry::append(
                &mut self.segment,
                kind,
                endpoint,
                piece,
                u32::try_from(known_here).unwrap_or(u32::MAX),
            );
        }
    }

    /// Writes the current segment, if it has placements that were not written yet. This often
    /// writes nothing, because the end of a request adds no placement.
    pub fn flush<H: Host>(&mut self, host: &H) {
        if std::mem::take(&mut self.is_unwritten) {
            self.position.bytes = u32::try_from(self.segment.len()).unwrap_or(u32::MAX);
            // If the host refuses the write, readers find a gap instead of the segment until the
            // next flush.
            let key = key(&self.pool, self.vm_slot, self.position.segment);
            self.is_unwritten = host
                .share(&key, &self.segment, WriteCondition::Any)
                .is_err();
        }
    }

    fn begin(&mut self) {
        self.position.segment = self.position.segment.wrapping_add(1);
        self.segment.clear();
        self.is_unwritten = false;
        SegmentHead {
            vm: self.vm,
            number: self.position.segment,
        }
        .append(&mut self.segment);
    }
}

// === impl PlacementRingReader ===

impl PlacementRingReader {
    /// Reads the placements that the VM wrote since the last call, up to `end` and within the
    /// budget. For a new VM, the reading starts at the VM's oldest segment. Calls `take` with each
    /// record; `take` returns the cost of the record in blocks. Returns true if nothing was left to
    /// read.
    pub fn read<H: Host>(
        &mut self,
        host: &H,
        owner: RingOwner<'_>,
        end: RingPosition,
        budget: &mut ReadBudget,
        mut take: impl FnMut(PlacementRecord<'_>) -> usize,
    ) -> bool {
        let oldest = end
            .segment
            .saturating_sub(SEGMENTS.saturating_sub(1))
            .max(1);
        if self.vm != owner.vm {
            *self = Self {
                vm: owner.vm,
                at: RingPosition {
                    segment: oldest,
                    bytes: 0,
                },
                met: end.segment,
            };
        }
        if self.at.segment < oldest {
            let gaps = oldest.saturating_sub(self.at.segment.max(self.met));
            budget.gaps = budget
                .gaps
                .saturating_add(u32::try_from(gaps).unwrap_or(u32::MAX));
            self.at = RingPosition {
                segment: oldest,
                bytes: 0,
            };
        }
        while self.at < end {
            if budget.blocks == 0 {
                return false;
            }
            budget.blocks = budget.blocks.saturating_sub(LOOK_BLOCKS);
            match self.segment(
                host,
                &key(owner.pool, owner.vm_slot, self.at.segment),
                budget,
                &mut take,
            ) {
                Some(false) => return false,
                Some(true) => {}
                None => {
                    budget.gaps = budget
                        .gaps
                        .saturating_add(u32::from(self.at.segment >= self.met));
                }
            }
            if self.at.segment >= end.segment {
                self.at = self.at.max(end);
            } else {
                self.at = RingPosition {
                    segment: self.at.segment.saturating_add(1),
                    bytes: 0,
                };
            }
        }
        true
    }

    /// Reads the new records of a segment. Returns false if the budget ended before the segment
    /// did, and `None` if the bytes are not the expected segment.
    fn segment<H: Host>(
        &mut self,
        host: &H,
        key: &str,
        budget: &mut ReadBudget,
        take: &mut impl FnMut(PlacementRecord<'_>) -> usize,
    ) -> Option<bool> {
        let shared = host.shared(key).ok()??;
        let (head, _) = SegmentHead::split(&shared.bytes)?;
        if head
            != (SegmentHead {
                vm: self.vm,
                number: self.at.segment,
            })
        {
            return None;
        }
        let begun = (self.at.bytes as usize).max(SEGMENT_HEAD_BYTES);
        let mut rest = shared.bytes.get(begun..)?;
        let mut blocks = Vec::new();
        while !rest.is_empty() {
            if budget.blocks == 0 {
                return Some(false);
            }
            let (entry, tail) = PlacementEntry::split(rest)?;
            blocks.clear();
            blocks.extend(entry.blocks.iter().map(|word| u64::from_le_bytes(*word)));
            let new = blocks.get(entry.known as usize..).unwrap_or_default();
            let taken = take(PlacementRecord {
                kind: entry.kind,
                endpoint: entry.endpoint,
                blocks: &blocks,
                new,
            });
            budget.blocks = budget.blocks.saturating_sub(taken.max(1));
            rest = tail;
            self.at.bytes = u32::try_from(shared.bytes.len().saturating_sub(rest.len())).ok()?;
        }
        Some(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::FakeHost;
    use proptest::prelude::*;
    use scheduler::{Generation, Slot};

    const PLENTY: usize = 1 << 30;

    const OWNER: RingOwner<'_> = RingOwner {
        pool: "p",
        vm_slot: 2,
        vm: 7,
    };

    fn at(slot: u16) -> EndpointRef {
        EndpointRef {
            slot: Slot(slot),
            generation: Generation(3),
        }
    }

    fn writer() -> PlacementRingWriter {
        let mut writer = PlacementRingWriter::new("p");
        writer.set_vm_slot(7, 2);
        writer
    }

    fn tell(host: &FakeHost, writer: &mut PlacementRingWriter, slot: u16, blocks: &[u64]) {
        writer.append(host, PlacementKind::Unconfirmed, at(slot), blocks, 0);
        writer.flush(host);
    }

    /// Returns all new records, the number of gaps, and whether nothing was left to read.
    fn read(
        host: &FakeHost,
        reader: &mut PlacementRingReader,
        end: RingPosition,
        blocks: usize,
    ) -> (Vec<(u16, Vec<u64>)>, u32, bool) {
        let mut budget = ReadBudget { blocks, gaps: 0 };
        let mut read = Vec::new();
        let all = reader.read(host, OWNER, end, &mut budget, |record| {
            read.push((record.endpoint.slot.0, record.blocks.to_vec()));
            record.blocks.len()
        });
        (read, budget.gaps, all)
    }

    #[test]
    fn a_segment_is_written_again_only_with_a_new_placement_or_after_a_refusal() {
        use crate::fake::FakeCall;
        let host = FakeHost::new();
        let mut writer = writer();
        tell(&host, &mut writer, 1, &[10]);
        writer.flush(&host);
        assert_eq!(host.writes.get(), 1, "nothing is new");
        tell(&host, &mut writer, 1, &[11]);
        assert_eq!(host.writes.get(), 2);
        host.fail(&[FakeCall::Share]);
        tell(&host, &mut writer, 2, &[20]);
        host.fail(&[]);
        writer.flush(&host);
        let read = read(
            &host,
            &mut PlacementRingReader::default(),
            writer.position(),
            PLENTY,
        );
        assert_eq!(
            read,
            (vec![(1, vec![10]), (1, vec![11]), (2, vec![20])], 0, true)
        );
        assert_eq!(host.writes.get(), 3);
    }

    #[test]
    fn each_placement_is_read_once_by_each_reader() {
        let host = FakeHost::new();
        let mut writer = writer();
        let mut one = PlacementRingReader::default();
        let mut two = PlacementRingReader::default();
        assert_eq!(
            read(&host, &mut one, writer.position(), PLENTY),
            (vec![], 0, true)
        );
        tell(&host, &mut writer, 1, &[10, 11]);
        assert_eq!(
            read(&host, &mut one, writer.position(), PLENTY),
            (vec![(1, vec![10, 11])], 0, true)
        );
        assert_eq!(
            read(&host, &mut one, writer.position(), PLENTY),
            (vec![], 0, true)
        );
        tell(&host, &mut writer, 2, &[20]);
        assert_eq!(
            read(&host, &mut one, writer.position(), PLENTY),
            (vec![(2, vec![20])], 0, true)
        );
        tell(&host, &mut writer, 3, &[]);
        assert_eq!(
            read(&host, &mut one, writer.position(), PLENTY),
            (vec![(3, vec![])], 0, true),
            "a prompt that is not read"
        );
        assert_eq!(
            read(&host, &mut two, writer.position(), PLENTY),
            (vec![(1, vec![10, 11]), (2, vec![20]), (3, vec![])], 0, true)
        );
    }

    #[test]
    fn a_reader_that_is_too_slow_counts_what_it_lost_and_goes_on() {
        let host = FakeHost::new();
        let mut writer = writer();
        let mut reader = PlacementRingReader::default();
        tell(&host, &mut writer, 1, &[1]);
        read(&host, &mut reader, writer.position(), PLENTY);
        // Each placement fills more than half of a segment.
        for i in 0..SEGMENTS + 9 {
            tell(&host, &mut writer, 2, &vec![i; 600]);
        }
        let (got, gaps, all) = read(&host, &mut reader, writer.position(), PLENTY);
        assert_eq!((got.len() as u64, gaps, all), (SEGMENTS, 9, true));
        assert_eq!(got.last().map(|(_, blocks)| blocks[0]), Some(SEGMENTS + 8));
        let keys = host.shared.borrow().len() as u64;
        assert_eq!(keys, SEGMENTS, "a fixed set of names");
        assert!(
            host.shared
                .borrow()
                .values()
                .all(|(bytes, _)| bytes.len() <= SEGMENT_BYTES_MAX)
        );
    }

    /// Tests segment numbers above 32 bits, because a busy ring reaches 2^32 segments within weeks.
    #[test]
    fn a_ring_is_read_on_beyond_any_number_that_32_bits_hold() {
        let host = FakeHost::new();
        let mut writer = writer();
        let mut reader = PlacementRingReader::default();
        writer.position.segment = u64::from(u32::MAX) - 3;
        for i in 0..9 {
            tell(&host, &mut writer, 2, &vec![i; 600]);
            let position = RingPosition::of_word(writer.position().to_word());
            assert_eq!(position, writer.position());
            assert_eq!(
                read(&host, &mut reader, position, PLENTY),
                (vec![(2, vec![i; 600])], 0, true),
                "{position:?}"
            );
        }
        assert!(writer.position().segment > u64::from(u32::MAX));
        let full = RingPosition {
            segment: 1,
            bytes: u32::try_from(SEGMENT_BYTES_MAX).unwrap(),
        };
        assert_eq!(RingPosition::of_word(full.to_word()), full);
    }

    #[test]
    fn what_was_overwritten_before_a_reader_came_is_no_loss_of_its_own() {
        let host = FakeHost::new();
        let mut writer = writer();
        let mut reader = PlacementRingReader::default();
        for i in 0..SEGMENTS + 9 {
            tell(&host, &mut writer, 2, &vec![i; 600]);
        }
        let (_, gaps, all) = read(&host, &mut reader, writer.position(), 600);
        assert_eq!(
            (gaps, all),
            (0, false),
            "it has read a part of the ring for the first time"
        );
        for i in 0..SEGMENTS {
            tell(&host, &mut writer, 2, &vec![i; 600]);
        }
        let (_, gaps, all) = read(&host, &mut reader, writer.position(), PLENTY);
        assert_eq!(
            (gaps, all),
            (1, true),
            "the segment that was the newest then"
        );
    }

    #[test]
    fn a_budget_ends_a_reading_between_two_records_and_the_next_goes_on_there() {
        let host = FakeHost::new();
        let mut writer = writer();
        let mut reader = PlacementRingReader::default();
        for i in 0..10 {
            tell(&host, &mut writer, 1, &[i; 100]);
        }
        let mut got = Vec::new();
        let mut turns = 0;
        loop {
            let (some, gaps, all) = read(&host, &mut reader, writer.position(), 250);
            assert_eq!(gaps, 0);
            got.extend(some.into_iter().map(|(_, blocks)| blocks[0]));
            turns += 1;
            if all {
                break;
            }
        }
        assert_eq!((got, turns > 3), ((0..10).collect(), true));
    }

    #[test]
    fn what_was_known_before_is_told_apart_over_all_pieces() {
        for (known, new) in [
            (0, 2_500),
            (999, 1_501),
            (1_000, 1_500),
            (2_100, 400),
            (2_500, 0),
            (9_000, 0),
        ] {
            let host = FakeHost::new();
            let mut writer = writer();
            let mut reader = PlacementRingReader::default();
            writer.append(
                &host,
                PlacementKind::Confirmed,
                at(1),
                &vec![5; 2_500],
                known,
            );
            writer.flush(&host);
            let mut budget = ReadBudget {
                blocks: PLENTY,
                gaps: 0,
            };
            let mut counts = (0, 0);
            reader.read(&host, OWNER, writer.position(), &mut budget, |record| {
                counts = (counts.0 + record.blocks.len(), counts.1 + record.new.len());
                record.blocks.len()
            });
            assert_eq!(counts, (2_500, new), "{known}");
        }
    }

    #[test]
    fn a_vm_slot_with_a_new_owner_is_a_new_ring() {
        let host = FakeHost::new();
        let mut old = writer();
        let mut reader = PlacementRingReader::default();
        for i in 0..5 {
            tell(&host, &mut old, 1, &vec![i; 900]);
        }
        read(&host, &mut reader, old.position(), PLENTY);
        let mut new = PlacementRingWriter::new("p");
        new.set_vm_slot(8, 2);
        new.append(&host, PlacementKind::Confirmed, at(4), &[44], 0);
        new.flush(&host);
        let mut budget = ReadBudget {
            blocks: PLENTY,
            gaps: 0,
        };
        let mut read = Vec::new();
        let mut take = |record: PlacementRecord<'_>| {
            read.push(record.endpoint.slot.0);
            record.blocks.len()
        };
        assert!(reader.read(
            &host,
            RingOwner { vm: 8, ..OWNER },
            new.position(),
            &mut budget,
            &mut take
        ));
        assert_eq!((read, budget.gaps), (vec![4], 0));
    }

    #[test]
    fn a_position_that_lies_costs_a_bounded_look() {
        let host = FakeHost::new();
        let mut reader = PlacementRingReader::default();
        for word in [u64::MAX, u64::MAX << 16, 1 << 16 | 9, 5 << 16 | 5] {
            let end = RingPosition::of_word(word);
            let (got, gaps, all) = read(&host, &mut reader, end, PLENTY);
            assert_eq!(
                (got.len(), u64::from(gaps) <= SEGMENTS, all),
                (0, true, true)
            );
        }
    }

    proptest! {
        /// Checks that no placement is lost, cut or doubled if the ring has enough room, whatever
        /// the lengths of the placements.
        #[test]
        fn what_is_placed_is_read(chains in prop::collection::vec((0..1024_u16, prop::collection::vec(any::<u64>(), 1..3000)), 0..20)) {
            let host = FakeHost::new();
            let mut writer = writer();
            let mut reader = PlacementRingReader::default();
            let mut written = Vec::new();
            let mut received = Vec::new();
            for (slot, blocks) in chains {
                tell(&host, &mut writer, slot, &blocks);
                written.extend(blocks.into_iter().map(|block| (slot, block)));
                let (read, gaps, all) = read(&host, &mut reader, writer.position(), PLENTY);
                prop_assert!(gaps == 0 && all);
                received.extend(read.into_iter().flat_map(|(slot, blocks)| blocks.into_iter().map(move |block| (slot, block))));
            }
            prop_assert_eq!(written, received);
        }

        #[test]
        fn any_bytes_in_a_segment_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..200), end: (u64, u32)) {
            let host = FakeHost::new();
            let mut reader = PlacementRingReader::default();
            let good = proto::words::write(&[7, 1], &bytes);
            for key in 0..SEGMENTS {
                host.share(&super::key("p", 2, key), &good, WriteCondition::Any).unwrap();
            }
            read(&host, &mut reader, RingPosition { segment: end.0, bytes: end.1 }, PLENTY);
            read(&host, &mut reader, RingPosition::of_word(end.0), PLENTY);
            read(&host, &mut reader, RingPosition { segment: 2, bytes: 300 }, PLENTY);
        }
    }
}
