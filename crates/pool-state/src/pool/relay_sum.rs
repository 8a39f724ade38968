//! Adds up the load reports of many processes. The daemon sends each process the sum without its
//! own report, as the load of all others.
//!
//! Adding a report takes time in proportion to the report's size, and writing a sum takes time in
//! proportion to the pool's size. The number of reports matters only by its logarithm.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use proto::load_report::{
    FAILURE_BYTES, LOAD_BYTES, LoadReportHead, LoadReportLayout, SLOS_BYTES, decode_slos,
};
use proto::words;
use scheduler::in_flight::{EndpointLoad, InFlight, PeerLoads};
use scheduler::{ENDPOINTS_MAX, EndpointRef, Generation};

use super::ejection::Ejection;
use super::load_report::{OwnLoadReport, PeerLoadReport};

/// The sum of the reports of many processes. Each report has its own writer.
#[derive(Debug, Default)]
pub struct RelaySum {
    present: Vec<EndpointRef>,
    /// The generation of the endpoint in each slot.
    generations: Vec<Option<Generation>>,
    loads: PeerLoads,
    /// The SLOs and failures, by slot. They cannot be added up.
    extremes: Vec<SlotExtremes>,
    /// How many entries of reports were added, removed or written so far.
    entries: u64,
}

/// The SLOs and failures that processes report for one endpoint.
#[derive(Debug, Default)]
struct SlotExtremes {
    ttft_slo_us: Ranking<Reverse<u32>>,
    tpot_slo_us: Ranking<Reverse<u32>>,
    failures: Ranking<Ejection>,
}

/// Values of several writers, the greatest last.
#[derive(Debug)]
struct Ranking<T>(BTreeSet<(T, u64)>);

// === impl RelaySum ===

impl RelaySum {
    /// Starts again with these generations of endpoints, and with those `rows` that are included in
    /// the sum.
    pub fn reset<'r>(
        &mut self,
        present: Vec<EndpointRef>,
        rows: impl IntoIterator<Item = &'r PeerLoadReport>,
    ) {
        self.loads.start(&present);
        self.generations.clear();
        self.extremes.clear();
        for endpoint in &present {
            let slot = usize::from(endpoint.slot.0);
            if slot >= ENDPOINTS_MAX {
                continue;
            }
            if self.generations.len() <= slot {
                self.generations.resize(slot + 1, None);
                self.extremes.resize_with(slot + 1, SlotExtremes::default);
            }
            if let Some(generation) = self.generations.get_mut(slot) {
                *generation = Some(endpoint.generation);
            }
        }
        self.present = present;
        for row in rows.into_iter().filter(|row| row.counts()) {
            self.entries += row.entries();
            row.each_load(|endpoint, load| self.loads.add(endpoint, load));
            self.rank(row, true);
        }
    }

    /// The entries of a report for endpoints that are present, each endpoint once. `None` if the
    /// bytes are not a report.
    #[must_use]
    pub fn of_present(&self, report: &[u8]) -> Option<Vec<u8>> {
        let layout = LoadReportLayout::parse(report)?;
        let loads: Vec<[u8; LOAD_BYTES]> = self.once(layout.loads(report));
        let slos: Vec<[u8; SLOS_BYTES]> = self.once(layout.slos(report));
        let failures: Vec<[u8; FAILURE_BYTES]> = self.once(layout.failures(report));
        let mut kept = Vec::new();
        LoadReportLayout {
            head: layout.head,
            loads: loads.len(),
            slos: slos.len(),
            failures: failures.len(),
        }
        .append(&mut kept);
        kept.extend_from_slice(loads.as_flattened());
        kept.extend_from_slice(slos.as_flattened());
        kept.extend_from_slice(failures.as_flattened());
        Some(kept)
    }

    /// Replaces the bytes of `row`, and includes its load in the sum.
    pub fn read(&mut self, row: &mut PeerLoadReport, bytes: Vec<u8>) {
        if row.counts() {
            self.rank(row, false);
        }
        self.entries += row.entries();
        row.replace(bytes, true, &mut self.loads);
        self.entries += row.entries();
        self.rank(row, true);
    }

    /// How many entries of reports were added, removed or written so far: the cost of the sum. It
    /// grows by the sizes of one report and of the pool for each message, however many reports
    /// there are.
    #[must_use]
    pub fn entries(&self) -> u64 {
        self.entries
    }

    /// Removes a report from the sum.
    pub fn remove(&mut self, row: &mut PeerLoadReport) {
        if row.counts() {
            self.rank(row, false);
            row.count(false, &mut self.loads);
        }
    }

    /// The sum as a report, without the report `own` if there is one.
    pub fn row_without(&mut self, head: LoadReportHead, own: Option<&PeerLoadReport>) -> Vec<u8> {
        let own = own.filter(|own| own.counts());
        self.entries += self.present.len() as u64;
        if let Some(own) = own {
            self.entries += 2 * own.entries();
            own.each_load(|endpoint, load| self.loads.subtract(endpoint, load));
        }
        let writer = own.map(|own| own.head().vm);
        let mut sum = OwnLoadReport::default();
        let mut failures = Vec::new();
        for endpoint in &self.present {
            let mut load = self.loads.load(*endpoint);
            if let Some(extremes) = self.extremes.get(usize::from(endpoint.slot.0)) {
                load.ttft_slo_us = extremes.ttft_slo_us.without(writer).map(|slo| slo.0);
                load.tpot_slo_us = extremes.tpot_slo_us.without(writer).map(|slo| slo.0);
                failures.extend(extremes.failures.without(writer));
            }
            if load != EndpointLoad::default() {
                sum.set(*endpoint, load);
            }
        }
        if let Some(own) = own {
            own.each_load(|endpoint, load| self.loads.add(endpoint, load));
        }
        sum.write(head, &mut InFlight::default(), &failures)
            .to_vec()
    }

    /// The first entry of each endpoint that is present.
    fn once<const N: usize>(&self, entries: &[[u8; N]]) -> Vec<[u8; N]> {
        let mut is_new = vec![true; self.generations.len()];
        let mut kept = Vec::new();
        for entry in entries {
            let endpoint = entry
                .first_chunk()
                .and_then(|word| words::endpoint(u64::from_le_bytes(*word)));
            if let Some((endpoint, _)) = endpoint
                && self.counts(endpoint)
                && let Some(is_new) = is_new.get_mut(usize::from(endpoint.slot.0))
                && std::mem::replace(is_new, false)
            {
                kept.push(*entry);
            }
        }
        kept
    }

    fn counts(&self, endpoint: EndpointRef) -> bool {
        let known = self.generations.get(usize::from(endpoint.slot.0));
        known.is_some_and(|known| *known == Some(endpoint.generation))
    }

    /// Adds or removes the SLOs and failures of a report.
    fn rank(&mut self, row: &PeerLoadReport, is_added: bool) {
        let writer = row.head().vm;
        for (endpoint, slos) in row.slo_bytes().iter().filter_map(decode_slos) {
            if self.counts(endpoint)
                && let Some(extremes) = self.extremes.get_mut(usize::from(endpoint.slot.0))
            {
                let ttft = slos.ttft_slo_us.map(Reverse);
                let tpot = slos.tpot_slo_us.map(Reverse);
                extremes.ttft_slo_us.set(ttft, writer, is_added);
                extremes.tpot_slo_us.set(tpot, writer, is_added);
            }
        }
        for failure in row.ejections().filter(|failure| !failure.outside) {
            if self.counts(failure.endpoint)
                && let Some(extremes) = self.extremes.get_mut(usize::from(failure.endpoint.slot.0))
            {
                extremes.failures.set(Some(failure), writer, is_added);
            }
        }
    }
}

// === impl Ranking ===

impl<T> Default for Ranking<T> {
    fn default() -> Self {
        Self(BTreeSet::new())
    }
}

impl<T: Ord + Copy> Ranking<T> {
    /// Adds or removes the value of a writer.
    fn set(&mut self, value: Option<T>, writer: u64, is_added: bool) {
        let Some(value) = value else { return };
        let entry = (value, writer);
        if is_added {
            self.0.insert(entry);
        } else {
            self.0.remove(&entry);
        }
    }

    /// The greatest value of any other writer.
    fn without(&self, writer: Option<u64>) -> Option<T> {
        let mut others = self.0.iter().rev().filter(|(_, of)| Some(*of) != writer);
        others.next().map(|(value, _)| *value)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::cmp::Ordering;

    use proptest::prelude::*;
    use scheduler::{Slot, Timestamp};

    use super::super::LoadReportSum;
    use super::*;

    const ENDPOINTS: u16 = 5;

    fn at(slot: u16, generation: u32) -> EndpointRef {
        EndpointRef {
            slot: Slot(slot),
            generation: Generation(generation),
        }
    }

    fn present() -> Vec<EndpointRef> {
        (0..ENDPOINTS).map(|slot| at(slot, 1)).collect()
    }

    fn head(vm: u64) -> LoadReportHead {
        LoadReportHead {
            vm,
            ..LoadReportHead::default()
        }
    }

    fn failure(endpoint: EndpointRef, since: u64) -> Ejection {
        Ejection {
            at: Timestamp(since),
            failures: 1,
            until: Timestamp(since + 5),
            endpoint,
            outside: false,
            by_answers: false,
            is_own: false,
        }
    }

    /// The report of a process: loads by slot with SLOs, and failures by slot.
    type Reported = (Vec<(u16, u32, Option<u32>)>, Vec<(u16, u64)>);

    fn reported() -> impl Strategy<Value = Reported> {
        (
            prop::collection::vec((0..ENDPOINTS, 0..9_u32, prop::option::of(1..50_u32)), 0..6),
            prop::collection::vec((0..ENDPOINTS, 0..99_u64), 0..6),
        )
    }

    fn bytes(writer: u64, reported: &Reported) -> Vec<u8> {
        let (loads, failed) = reported;
        let mut own = OwnLoadReport::default();
        for (slot, requests, slo) in loads {
            let load = EndpointLoad {
                requests: *requests,
                ttft_slo_us: *slo,
                tpot_slo_us: slo.map(|slo| slo * 3),
                ..EndpointLoad::default()
            };
            own.set(at(*slot, 1), load);
        }
        let mut failures: Vec<Ejection> = Vec::new();
        for (slot, since) in failed {
            if failures.iter().all(|known| known.endpoint.slot.0 != *slot) {
                failures.push(failure(at(*slot, 1), *since));
            }
        }
        own.write(head(writer), &mut InFlight::default(), &failures)
            .to_vec()
    }

    #[derive(Clone, Debug)]
    enum Change {
        Read(usize, Reported),
        Remove(usize),
        Reset,
    }

    fn changes() -> impl Strategy<Value = Vec<Change>> {
        let change = prop_oneof![
            6 => (0..4_usize, reported()).prop_map(|(of, report)| Change::Read(of, report)),
            1 => (0..4_usize).prop_map(Change::Remove),
            1 => Just(Change::Reset),
        ];
        prop::collection::vec(change, 1..30)
    }

    fn read_back(report: Vec<u8>) -> (Vec<EndpointLoad>, Vec<Ejection>) {
        let mut row = PeerLoadReport::default();
        let mut loads = PeerLoads::default();
        loads.start(&present());
        row.replace(report, true, &mut loads);
        row.add_slos_to(&mut loads);
        let mut failures: Vec<Ejection> = row.ejections().collect();
        failures.sort();
        (
            present().iter().map(|at| loads.load(*at)).collect(),
            failures,
        )
    }

    proptest! {
        #[test]
        fn the_sum_without_one_is_the_sum_of_the_others(changes in changes()) {
            let mut sum = RelaySum::default();
            let mut rows: Vec<PeerLoadReport> = (0..4).map(|_| PeerLoadReport::default()).collect();
            sum.reset(present(), &rows);
            for change in changes {
                match change {
                    Change::Read(of, report) => sum.read(&mut rows[of], bytes(of as u64, &report)),
                    Change::Remove(of) => sum.remove(&mut rows[of]),
                    Change::Reset => sum.reset(present(), &rows),
                }
                for own in 0..4 {
                    let others = || rows.iter().enumerate().filter(|(at, _)| *at != own).map(|(_, row)| row);
                    let mut anew = LoadReportSum::default();
                    anew.reset(present(), others());
                    let expected = anew.row(head(9), others(), &[]);
                    let found = sum.row_without(head(9), Some(&rows[own]));
                    prop_assert_eq!(read_back(found), read_back(expected));
                }
            }
        }
    }

    thread_local! {
        static COMPARISONS: Cell<u64> = const { Cell::new(0) };
    }

    /// A value that counts its comparisons.
    #[derive(Clone, Copy, PartialEq, Eq)]
    struct Compared(u64);

    impl Ord for Compared {
        fn cmp(&self, other: &Self) -> Ordering {
            COMPARISONS.set(COMPARISONS.get() + 1);
            self.0.cmp(&other.0)
        }
    }

    impl PartialOrd for Compared {
        fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
            Some(self.cmp(other))
        }
    }

    #[test]
    fn twice_as_many_writers_cost_twice_the_comparisons() {
        let comparisons = |writers: u64| {
            let before = COMPARISONS.get();
            let mut ranking = Ranking::default();
            for writer in 0..writers {
                // The values come in no order.
                let value = Some(Compared(writer * 7_919 % writers));
                ranking.set(value, writer, true);
            }
            for writer in 0..writers {
                assert!(ranking.without(Some(writer)).is_some());
            }
            for writer in 0..writers {
                let value = Some(Compared(writer * 7_919 % writers));
                ranking.set(value, writer, false);
            }
            COMPARISONS.get() - before
        };
        let [few, many] = [512, 1_024].map(comparisons);
        assert!(few > 0 && many < 3 * few, "{few}, then {many}");
    }

    #[test]
    fn a_report_keeps_one_entry_for_each_endpoint_of_the_pool() {
        let mut sum = RelaySum::default();
        sum.reset(present(), []);
        let load = EndpointLoad {
            requests: 1,
            ttft_slo_us: Some(5),
            ..EndpointLoad::default()
        };
        // A thousand failures and loads of endpoints that never existed, some of them twice.
        let endpoints = || {
            (0..1_000_u16)
                .map(|slot| at(slot, u32::from(slot % 2)))
                .chain([at(1, 1), at(1, 1)])
        };
        let mut report = Vec::new();
        LoadReportLayout {
            head: head(7),
            loads: 1_002,
            slos: 1_002,
            failures: 1_002,
        }
        .append(&mut report);
        for endpoint in endpoints() {
            report.extend(proto::load_report::encode_load(endpoint, &load));
        }
        for endpoint in endpoints() {
            proto::load_report::append_slos(&mut report, endpoint, &load);
        }
        for endpoint in endpoints() {
            proto::load_report::append_failure(&mut report, &failure(endpoint, 3).into());
        }
        let kept = sum.of_present(&report).unwrap();
        let layout = LoadReportLayout::parse(&kept).unwrap();
        assert_eq!(
            (layout.loads, layout.slos, layout.failures, layout.head),
            (2, 2, 2, head(7)),
            "slots 1 and 3"
        );
        assert_eq!(sum.of_present(b"no report"), None);
    }
}
