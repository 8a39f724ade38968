//! What each VM has outstanding and whom it saw fail, a row each in shared data: written by its VM whenever that changes, read by the others.
//!
//! A row is absolute, so one that is missed is mended by the next. It names its VM and its moment: of a VM that is gone, or silent for
//! [`ROW_EXPIRY_MS`], the load counts no more, and a VM that takes over a seat overwrites what was there. A VM that trapped with streams open
//! therefore leaves nothing behind.

use exchange::Time;
use exchange::pool::Ejection;
use scheduler::in_flight::Load;
use scheduler::{ENDPOINTS_MAX, EndpointRef, Incarnation, Slot};

use super::words;

/// A row that was not written again for this long counts nothing: ten ticks, at each of which a VM that has anything outstanding writes.
pub const ROW_EXPIRY_MS: u64 = 1_000;

/// Words before the rows of endpoints.
const HEAD: usize = 4;
/// Words of one endpoint's load.
const LOAD: usize = 4;
/// Words of one endpoint's failures.
const EJECTION: usize = 4;

/// How far a ring is written: which segment is the newest, and how many bytes it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// Grows by one with each segment begun; 0 is before the first.
    pub segment: u32,
    /// Bytes in it.
    pub bytes: u32,
}

/// One VM's row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Row {
    /// Whose.
    pub vm: u64,
    /// When it was written.
    pub written: Time,
    /// How far its ring of placements is.
    pub ring: Position,
    /// What it has outstanding.
    pub loads: Vec<(EndpointRef, Load)>,
    /// What it knows of failures.
    pub ejections: Vec<Ejection>,
}

// === impl Row ===

impl Row {
    /// Does its load count?
    #[must_use]
    pub fn is_fresh(&self, now: Time) -> bool {
        now.ms_since(self.written) < ROW_EXPIRY_MS
    }

    /// The bytes of a row.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let words =
            HEAD.saturating_add(self.loads.len().saturating_mul(LOAD)).saturating_add(self.ejections.len().saturating_mul(EJECTION));
        let mut bytes = Vec::with_capacity(words.saturating_mul(words::WORD));
        words::append(&mut bytes, &[self.vm, self.written.0, pair(self.ring.segment, self.ring.bytes)]);
        words::append(&mut bytes, &[pair(narrow(self.loads.len() as u64), narrow(self.ejections.len() as u64))]);
        for (endpoint, load) in &self.loads {
            let tokens = pair(narrow(load.prefill_tokens), narrow(load.decode_tokens));
            let slos = pair(load.ttft_slo_us.unwrap_or(0), load.tpot_slo_us.unwrap_or(0));
            words::append(&mut bytes, &[place(*endpoint), u64::from(load.requests), tokens, slos]);
        }
        for ejection in &self.ejections {
            words::append(&mut bytes, &[place(ejection.endpoint), ejection.at.0, ejection.until.0, u64::from(ejection.failures)]);
        }
        bytes
    }

    /// Reads a row into this one, whose memory is used again. False, and an empty row, when it is none: more is said to be there than is, or
    /// than there can be.
    pub fn read(&mut self, bytes: &[u8]) -> bool {
        let complete = self.read_whole(bytes).is_some();
        if !complete {
            *self = Self::default();
        }
        complete
    }

    fn read_whole(&mut self, bytes: &[u8]) -> Option<()> {
        self.loads.clear();
        self.ejections.clear();
        let ([vm, written, ring, counts], mut rest) = words::split::<HEAD>(bytes)?;
        (self.vm, self.written) = (vm, Time(written));
        (self.ring.segment, self.ring.bytes) = unpair(ring);
        let (loads, ejections) = unpair(counts);
        if loads as usize > ENDPOINTS_MAX || ejections as usize > ENDPOINTS_MAX {
            return None;
        }
        for _ in 0..loads {
            let ([at, requests, tokens, slos], tail) = words::split::<LOAD>(rest)?;
            let ((prefill, decode), (ttft, tpot)) = (unpair(tokens), unpair(slos));
            let load = Load {
                requests: narrow(requests),
                prefill_tokens: u64::from(prefill),
                decode_tokens: u64::from(decode),
                ttft_slo_us: (ttft > 0).then_some(ttft),
                tpot_slo_us: (tpot > 0).then_some(tpot),
            };
            self.loads.push((endpoint(at)?, load));
            rest = tail;
        }
        for _ in 0..ejections {
            let ([at, since, until, failures], tail) = words::split::<EJECTION>(rest)?;
            let ejection = Ejection { at: Time(since), failures: narrow(failures), until: Time(until), endpoint: endpoint(at)? };
            self.ejections.push(ejection);
            rest = tail;
        }
        rest.is_empty().then_some(())
    }
}

/// An endpoint in one word.
pub(super) fn place(endpoint: EndpointRef) -> u64 {
    pair(u32::from(endpoint.slot.0), endpoint.incarnation.0)
}

/// The endpoint of a word; `None` for a slot that no snapshot has.
pub(super) fn endpoint(word: u64) -> Option<EndpointRef> {
    let (slot, incarnation) = unpair(word);
    let slot = u16::try_from(slot).ok().filter(|slot| usize::from(*slot) < ENDPOINTS_MAX)?;
    Some(EndpointRef { slot: Slot(slot), incarnation: Incarnation(incarnation) })
}

pub(super) fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | (u64::from(high) << 32)
}

#[expect(clippy::cast_possible_truncation, reason = "halves of a word")]
pub(super) fn unpair(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

fn narrow(count: u64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(slot: u16) -> EndpointRef {
        EndpointRef { slot: Slot(slot), incarnation: Incarnation(u32::MAX) }
    }

    prop_compose! {
        fn a_load()(slot in 0..ENDPOINTS_MAX as u16, requests: u32, prefill: u32, decode: u32, slos: [Option<u32>; 2]) -> (EndpointRef, Load) {
            let [ttft_slo_us, tpot_slo_us] = slos.map(|slo| slo.filter(|slo| *slo > 0));
            (at(slot), Load { requests, prefill_tokens: u64::from(prefill), decode_tokens: u64::from(decode), ttft_slo_us, tpot_slo_us })
        }
    }

    prop_compose! {
        fn an_ejection()(slot in 0..ENDPOINTS_MAX as u16, since: u64, until: u64, failures: u32) -> Ejection {
            Ejection { at: Time(since), failures, until: Time(until), endpoint: at(slot) }
        }
    }

    prop_compose! {
        fn a_row()(
            vm: u64, written: u64, segment: u32, bytes: u32,
            loads in prop::collection::vec(a_load(), 0..20),
            ejections in prop::collection::vec(an_ejection(), 0..5),
        ) -> Row {
            Row { vm, written: Time(written), ring: Position { segment, bytes }, loads, ejections }
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(row in a_row(), used in a_row()) {
            let mut read = used;
            prop_assert!(read.read(&row.to_bytes()));
            prop_assert_eq!(read, row);
        }

        #[test]
        fn a_row_cut_anywhere_or_with_more_behind_is_none(row in a_row(), cut: prop::sample::Index) {
            let bytes = row.to_bytes();
            let mut read = row;
            prop_assert!(!read.read(&bytes[..cut.index(bytes.len())]));
            prop_assert_eq!(&read, &Row::default());
            prop_assert!(!read.read(&[&bytes[..], &[0]].concat()));
        }
    }

    #[test]
    fn counts_that_lie_and_slots_that_are_none_are_refused() {
        let mut row = Row::default();
        assert!(!row.read(&words::write(&[1, 2, 3, pair(u32::MAX, 0)], &[])));
        assert!(!row.read(&words::write(&[1, 2, 3, pair(0, ENDPOINTS_MAX as u32 + 1)], &[])));
        assert!(!row.read(&words::write(&[1, 2, 3, pair(1, 0), ENDPOINTS_MAX as u64, 1, 1, 0], &[])));
        assert!(row.read(&words::write(&[1, 2, 3, pair(1, 0), ENDPOINTS_MAX as u64 - 1, 1, 1, 0], &[])));
    }

    #[test]
    fn a_row_that_nobody_renews_counts_no_more() {
        let row = Row { written: Time(0).plus_ms(50), ..Row::default() };
        assert!(row.is_fresh(Time(0).plus_ms(50 + ROW_EXPIRY_MS - 1)) && !row.is_fresh(Time(0).plus_ms(50 + ROW_EXPIRY_MS)));
    }
}
