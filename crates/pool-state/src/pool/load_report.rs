//! The load report of a pool: the requests in flight of one VM, or of all other proxies together,
//! and the endpoint failures that they know. [`proto::load_report`] defines its bytes.
//!
//! A report has the whole load, so the next report repairs a missed one. A report has the id of its
//! VM and a timestamp, so readers know who wrote it, and whether that VM still runs. The cost of a
//! report depends only on the changes. The writer changes the bytes in place, each endpoint keeps
//! its position, and the reader compares the bytes with its last reading. Correctness depends on
//! none of this.

use proto::load_report::{
    FailureEntry, LOAD_BYTES, LoadReportHead, LoadReportLayout, SLOS_BYTES, append_failure,
    append_slos, decode_failure, decode_load, decode_slos, difference, encode_load,
};
use scheduler::in_flight::{EndpointLoad, InFlight, PeerLoads};
use scheduler::sort::sort_by;
use scheduler::{ENDPOINTS_MAX, EndpointRef, Timestamp};

use super::ejection::Ejection;

/// The maximum number of empty loads in a report. With more, the report is rebuilt without them.
/// This many take 2 KB, which is too little to matter.
const EMPTY_LOADS_MAX: usize = 64;

/// The number of loads compared in one step, because most are unchanged.
const AT_ONCE: usize = 8;

/// The report that a VM writes.
#[derive(Debug, Default)]
pub struct OwnLoadReport {
    loads: Vec<[u8; LOAD_BYTES]>,
    /// The position of each slot's load in the report.
    places: Vec<Option<u16>>,
    /// How many of the loads are empty.
    empty: usize,
    slos: Vec<(EndpointRef, EndpointLoad)>,
    bytes: Vec<u8>,
}

/// The report from another VM, as last read.
#[derive(Debug, Default)]
pub struct PeerLoadReport {
    layout: LoadReportLayout,
    bytes: Vec<u8>,
    counts: bool,
}

/// The sum of reports, for code that makes no picks from them: the daemon, and the VM that reports
/// for its process.
#[derive(Debug, Default)]
pub struct LoadReportSum {
    present: Vec<EndpointRef>,
    others: PeerLoads,
    /// Loads with an SLO that were added directly, without a report.
    added: Vec<(EndpointRef, EndpointLoad)>,
}

// === impl OwnLoadReport ===

impl OwnLoadReport {
    /// Whether the sum has no load.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.loads.len() == self.empty
    }

    /// Applies the changes and returns the bytes of the report.
    pub(super) fn write(
        &mut self,
        head: LoadReportHead,
        in_flight: &mut InFlight,
        ejections: &[Ejection],
    ) -> &[u8] {
        in_flight.take_changed(|endpoint, load| self.set(endpoint, load));
        if self.empty > EMPTY_LOADS_MAX {
            *self = Self::default();
            in_flight
                .rows()
                .for_each(|(endpoint, load)| self.set(endpoint, load));
        }
        let ejections = ejections.get(..ENDPOINTS_MAX).unwrap_or(ejections);
        self.bytes.clear();
        LoadReportLayout {
            head,
            loads: self.loads.len(),
            slos: self.slos.len(),
            failures: ejections.len(),
        }
        .append(&mut self.bytes);
        self.bytes.extend_from_slice(self.loads.as_flattened());
        self.slos
            .iter()
            .for_each(|(endpoint, load)| append_slos(&mut self.bytes, *endpoint, load));
        ejections
            .iter()
            .for_each(|ejection| append_failure(&mut self.bytes, &(*ejection).into()));
        &self.bytes
    }

    pub(super) fn set(&mut self, endpoint: EndpointRef, load: EndpointLoad) {
        let slot = usize::from(endpoint.slot.0);
        if self.places.len() <= slot {
            self.places.resize(slot + 1, None);
        }
        let bytes = encode_load(endpoint, &load);
        let Some(place) = self.places.get_mut(slot) else {
            return;
        };
        let known = place.and_then(|place| self.loads.get_mut(usize::from(place)));
        if let Some(known) = known {
            self.empty -= usize::from(is_empty(known));
            *known = bytes;
            self.slos.retain(|(known, _)| known.slot != endpoint.slot);
        } else {
            *place = u16::try_from(self.loads.len()).ok();
            self.loads.push(bytes);
        }
        self.empty += usize::from(is_empty(&bytes));
        if load.ttft_slo_us.is_some() || load.tpot_slo_us.is_some() {
            self.slos.push((endpoint, load));
        }
    }
}

// === impl PeerLoadReport ===

impl PeerLoadReport {
    /// The head of a report, before its loads.
    #[must_use]
    pub fn head(&self) -> LoadReportHead {
        self.layout.head
    }

    #[must_use]
    pub fn counts(&self) -> bool {
        self.counts
    }

    /// The number of loads, SLOs and failures.
    pub(super) fn entries(&self) -> u64 {
        (self.layout.loads + self.layout.slos + self.layout.failures) as u64
    }

    /// Whether the report has no load.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.layout.loads == 0
    }

    /// The requests of all endpoints.
    #[must_use]
    pub fn requests(&self) -> u64 {
        let mut sum = 0;
        self.each_load(|_, load| sum += u64::from(load.requests));
        sum
    }

    /// The failures in the report.
    pub fn ejections(&self) -> impl Iterator<Item = Ejection> + '_ {
        self.layout
            .failures(&self.bytes)
            .iter()
            .filter_map(decode_failure)
            .map(Ejection::from)
    }

    /// Replaces the last read bytes by `bytes`. An invalid report counts as empty and without a
    /// writer. `counts` says whether its load is included from now on. Returns whether SLOs must be
    /// computed again.
    pub(super) fn replace(&mut self, bytes: Vec<u8>, counts: bool, others: &mut PeerLoads) -> bool {
        let next = Self::parse(bytes).unwrap_or_default();
        let slos = self.layout.slos(&self.bytes) != next.layout.slos(&next.bytes);
        match (self.counts, counts) {
            (true, true) if self.is_outside() == next.is_outside() => {
                self.apply_difference(&next, others);
            }
            (was, is) => {
                if was {
                    self.subtract_from(others);
                }
                if is {
                    next.add_loads_to(others);
                }
            }
        }
        let turned = self.counts != counts && next.layout.slos > 0;
        *self = Self { counts, ..next };
        slos || turned
    }

    /// Sets whether the load of the report is included. Returns whether SLOs must be computed
    /// again.
    pub(super) fn count(&mut self, counts: bool, others: &mut PeerLoads) -> bool {
        match (std::mem::replace(&mut self.counts, counts), counts) {
            (true, false) => self.subtract_from(others),
            (false, true) => self.add_loads_to(others),
            _ => return false,
        }
        self.layout.slos > 0
    }

    /// Adds the loads and SLOs of the report to `others`, if the report is included there.
    pub(super) fn add_to(&self, others: &mut PeerLoads) {
        if self.counts {
            self.add_loads_to(others);
            self.add_slos_to(others);
        }
    }

    /// Adds the SLOs of the report to `others`, if its load is included there.
    pub(super) fn add_slos_to(&self, others: &mut PeerLoads) {
        if self.counts {
            let slos = self.layout.slos(&self.bytes).iter().filter_map(decode_slos);
            slos.for_each(|(endpoint, slos)| match self.is_outside() {
                true => others.add_peer_slos(endpoint, slos),
                false => others.add(endpoint, slos),
            });
        }
    }

    fn parse(bytes: Vec<u8>) -> Option<Self> {
        LoadReportLayout::parse(&bytes).map(|layout| Self {
            layout,
            bytes,
            counts: false,
        })
    }

    pub(super) fn slo_bytes(&self) -> &[[u8; SLOS_BYTES]] {
        self.layout.slos(&self.bytes)
    }

    fn load_bytes(&self) -> &[[u8; LOAD_BYTES]] {
        self.layout.loads(&self.bytes)
    }

    pub(super) fn each_load(&self, mut each: impl FnMut(EndpointRef, EndpointLoad)) {
        for (endpoint, load) in self.load_bytes().iter().filter_map(decode_load) {
            each(endpoint, load);
        }
    }

    fn add_loads_to(&self, others: &mut PeerLoads) {
        self.each_load(|endpoint, load| {
            self.change(endpoint, &EndpointLoad::default(), &load, others);
        });
    }

    fn subtract_from(&self, others: &mut PeerLoads) {
        self.each_load(|endpoint, load| {
            self.change(endpoint, &load, &EndpointLoad::default(), others);
        });
    }

    /// Replaces a load of this report or of the previous report. Reports from other VMs of the
    /// process are trusted. Reports from other proxies are unproven claims.
    fn change(
        &self,
        endpoint: EndpointRef,
        was: &EndpointLoad,
        is: &EndpointLoad,
        others: &mut PeerLoads,
    ) {
        if self.is_outside() {
            others.claim(endpoint, was, is, self.written_us());
        } else {
            others.replace(endpoint, was, is);
        }
    }

    /// Whether the report is the sum of the reports of the other proxies.
    fn is_outside(&self) -> bool {
        self.head().vm == LoadReportHead::OUTSIDE
    }

    fn written_us(&self) -> u64 {
        self.head().written.us_since(Timestamp(0))
    }

    /// Subtracts each load that is not in `next`, and adds each load that is only in `next`.
    fn apply_difference(&self, next: &Self, others: &mut PeerLoads) {
        let old = self.load_bytes();
        let new = next.load_bytes();
        let common = old.len().min(new.len());
        // Reading reports takes most of its time in this loop, and most entries have not changed.
        for (was, is) in old.chunks(AT_ONCE).zip(new.chunks(AT_ONCE)) {
            if was
                .iter()
                .zip(is)
                .fold(0, |all, (was, is)| all | difference(was, is))
                == 0
            {
                continue;
            }
            for (was, is) in was.iter().zip(is) {
                if difference(was, is) != 0 {
                    next.replace_entry(Some(was), Some(is), others);
                }
            }
        }
        old.iter()
            .skip(common)
            .for_each(|was| next.replace_entry(Some(was), None, others));
        new.iter()
            .skip(common)
            .for_each(|is| next.replace_entry(None, Some(is), others));
    }

    /// Replaces one entry of this report by one of its successor.
    fn replace_entry(
        &self,
        was: Option<&[u8; LOAD_BYTES]>,
        is: Option<&[u8; LOAD_BYTES]>,
        others: &mut PeerLoads,
    ) {
        let was = was.and_then(decode_load);
        let is = is.and_then(decode_load);
        let (endpoint, before, load) = match (was, is) {
            (Some((endpoint, was)), Some((same, is))) if endpoint == same => {
                self.change(endpoint, &was, &is, others);
                (endpoint, was, is)
            }
            (was, is) => {
                let nothing = EndpointLoad::default();
                was.into_iter()
                    .for_each(|(endpoint, was)| self.change(endpoint, &was, &nothing, others));
                let Some((endpoint, is)) = is else { return };
                self.change(endpoint, &nothing, &is, others);
                (endpoint, nothing, is)
            }
        };
        if load.requests > before.requests && !self.is_outside() && others.estimates_picks() {
            let picked = EndpointLoad {
                requests: load.requests - before.requests,
                prefill_tokens: load.prefill_tokens.saturating_sub(before.prefill_tokens),
                prefills: load.prefills.without(before.prefills),
                ..EndpointLoad::default()
            };
            others.picked(endpoint, picked, self.written_us());
        }
    }
}

// === impl LoadReportSum ===

impl LoadReportSum {
    /// Starts again with these generations of endpoints, and with those `rows` that are included in
    /// the sum.
    pub fn reset<'r>(
        &mut self,
        present: Vec<EndpointRef>,
        rows: impl IntoIterator<Item = &'r PeerLoadReport>,
    ) {
        self.others.start(&present);
        self.added.clear();
        self.present = present;
        rows.into_iter()
            .for_each(|row| row.add_to(&mut self.others));
    }

    /// Replaces the bytes of `row`, and includes its load in the sum.
    pub fn read(&mut self, row: &mut PeerLoadReport, bytes: Vec<u8>) {
        row.replace(bytes, true, &mut self.others);
    }

    /// Sets whether the load of a report is included in the sum.
    pub fn count(&mut self, row: &mut PeerLoadReport, counts: bool) {
        row.count(counts, &mut self.others);
    }

    pub fn add(&mut self, endpoint: EndpointRef, load: EndpointLoad) {
        self.others.add(endpoint, load);
        if load.ttft_slo_us.is_some() || load.tpot_slo_us.is_some() {
            let slos = EndpointLoad {
                ttft_slo_us: load.ttft_slo_us,
                tpot_slo_us: load.tpot_slo_us,
                ..EndpointLoad::default()
            };
            self.added.push((endpoint, slos));
        }
    }

    #[must_use]
    pub fn load(&self, endpoint: EndpointRef) -> EndpointLoad {
        self.others.load(endpoint)
    }

    /// Returns the sum as a report. The SLOs of the report come from the `rows` that are included,
    /// because a minimum cannot be maintained by differences. The failures of the report include
    /// the `own` failures: the latest failure of each endpoint, unless another proxy reported it.
    pub fn row<'r>(
        &mut self,
        head: LoadReportHead,
        rows: impl IntoIterator<Item = &'r PeerLoadReport>,
        own: &[Ejection],
    ) -> Vec<u8> {
        self.others.forget_slos();
        self.added
            .iter()
            .for_each(|(endpoint, slos)| self.others.add(*endpoint, *slos));
        let mut failures = own.to_vec();
        for row in rows {
            row.add_slos_to(&mut self.others);
            if row.counts {
                failures.extend(row.ejections());
            }
        }
        failures.retain(|failure| !failure.outside);
        sort_by(&mut failures, |a, b| (a.endpoint, a) < (b.endpoint, b));
        failures.dedup_by(|later, kept| {
            let is_same = later.endpoint == kept.endpoint;
            if is_same {
                *kept = *later;
            }
            is_same
        });
        let mut sum = OwnLoadReport::default();
        for endpoint in &self.present {
            let load = self.others.load(*endpoint);
            if load != EndpointLoad::default() {
                sum.set(*endpoint, load);
            }
        }
        sum.write(head, &mut InFlight::default(), &failures)
            .to_vec()
    }
}

fn is_empty(entry: &[u8; LOAD_BYTES]) -> bool {
    decode_load(entry).is_none_or(|(_, load)| load == EndpointLoad::default())
}

// === impl Ejection ===

impl From<FailureEntry> for Ejection {
    fn from(
        FailureEntry {
            endpoint,
            since,
            until,
            failures,
            outside,
            by_answers,
        }: FailureEntry,
    ) -> Self {
        Self {
            at: since,
            failures,
            until,
            endpoint,
            outside,
            by_answers,
            is_own: false,
        }
    }
}

impl From<Ejection> for FailureEntry {
    fn from(
        Ejection {
            at,
            failures,
            until,
            endpoint,
            outside,
            by_answers,
            is_own: _,
        }: Ejection,
    ) -> Self {
        Self {
            endpoint,
            since: at,
            until,
            failures,
            outside,
            by_answers,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use proto::load_report::{FAILURE_BYTES, PEER_EJECTION_MS_MAX, PROMPTS_MAX};
    use scheduler::in_flight::{InFlightTicket, PendingPrefills};
    use scheduler::{Generation, Slot};

    const HEAD: usize = LoadReportHead::BYTES;

    const HEAD_OF_7: LoadReportHead = LoadReportHead {
        vm: 7,
        written: Timestamp(8),
        ring: 9,
    };

    fn at(slot: u16, generation: u32) -> EndpointRef {
        EndpointRef {
            slot: Slot(slot),
            generation: Generation(generation),
        }
    }

    fn started() -> PeerLoads {
        let mut others = PeerLoads::default();
        others.start(&(0..8).map(|slot| at(slot, 1)).collect::<Vec<_>>());
        others
    }

    fn sums(others: &PeerLoads) -> Vec<EndpointLoad> {
        (0..8).map(|slot| others.load(at(slot, 1))).collect()
    }

    #[test]
    fn a_report_has_outstanding_load_and_failures() {
        let mut ledger = InFlight::default();
        let mut own = OwnLoadReport::default();
        let mut peer = PeerLoadReport::default();
        let mut others = started();
        let mut ticket = ledger.admit(at(3, 1), 500);
        let _other = ledger.admit(at(5, u32::MAX), 1);
        ledger.decoded(&mut ticket, 20);
        let failed = Ejection {
            at: Timestamp(1),
            failures: 2,
            until: Timestamp(u64::MAX),
            endpoint: at(1023, 9),
            outside: true,
            by_answers: true,
            is_own: false,
        };
        let bytes = own.write(HEAD_OF_7, &mut ledger, &[failed]).to_vec();
        assert_eq!(bytes.len(), HEAD + 2 * LOAD_BYTES + FAILURE_BYTES);
        assert!(!peer.replace(bytes, true, &mut others));
        assert_eq!(
            (peer.head(), peer.ejections().collect::<Vec<_>>()),
            (HEAD_OF_7, vec![failed])
        );
        let prefills = PendingPrefills::from_tokens(500, 500);
        assert_eq!(
            others.load(at(3, 1)),
            EndpointLoad {
                requests: 1,
                prefill_tokens: 500,
                decode_tokens: 20,
                prefills,
                ..EndpointLoad::default()
            }
        );
        assert_eq!(
            others.load(at(5, 1)),
            EndpointLoad::default(),
            "of another life"
        );
        ledger.release(ticket);
        assert!(!own.is_idle());
        peer.replace(
            own.write(HEAD_OF_7, &mut ledger, &[]).to_vec(),
            true,
            &mut others,
        );
        assert_eq!(sums(&others), vec![EndpointLoad::default(); 8]);
    }

    #[test]
    fn the_lowest_slos_of_counted_reports_are_reported() {
        let mut others = started();
        let mut one = PeerLoadReport::default();
        let mut two = PeerLoadReport::default();
        let row = |ttft, tpot| {
            let mut own = OwnLoadReport::default();
            own.set(
                at(2, 1),
                EndpointLoad {
                    requests: 1,
                    ttft_slo_us: ttft,
                    tpot_slo_us: tpot,
                    ..EndpointLoad::default()
                },
            );
            own.write(HEAD_OF_7, &mut InFlight::default(), &[]).to_vec()
        };
        let slos = |others: &PeerLoads| {
            (
                others.load(at(2, 1)).ttft_slo_us,
                others.load(at(2, 1)).tpot_slo_us,
            )
        };
        assert!(
            one.replace(row(Some(500), None), true, &mut others)
                && two.replace(row(Some(300), Some(20)), true, &mut others)
        );
        one.add_slos_to(&mut others);
        two.add_slos_to(&mut others);
        assert_eq!(slos(&others), (Some(300), Some(20)));
        assert!(two.count(false, &mut others));
        others.forget_slos();
        one.add_slos_to(&mut others);
        two.add_slos_to(&mut others);
        assert_eq!(slos(&others), (Some(500), None));
    }

    #[test]
    fn slos_are_computed_again_when_they_change_or_the_report_starts_or_stops_to_count() {
        let mut others = started();
        let mut peer = PeerLoadReport::default();
        let row = |requests, ttft_slo_us, failures: &[Ejection]| {
            let mut own = OwnLoadReport::default();
            own.set(
                at(2, 1),
                EndpointLoad {
                    requests,
                    ttft_slo_us,
                    ..EndpointLoad::default()
                },
            );
            own.write(HEAD_OF_7, &mut InFlight::default(), failures)
                .to_vec()
        };
        let failed = Ejection {
            at: Timestamp(1),
            failures: 1,
            until: Timestamp(9),
            endpoint: at(3, 1),
            outside: false,
            by_answers: false,
            is_own: false,
        };
        for (requests, slo, counts, anew) in [
            (1, None, true, false),
            (1, None, false, false),
            (1, Some(500), false, true),
            (2, Some(500), false, false),
            (2, Some(500), true, true),
            (3, Some(500), true, false),
            (3, Some(400), true, true),
            (3, Some(400), false, true),
            (3, None, true, true),
        ] {
            assert_eq!(
                peer.replace(row(requests, slo, &[failed]), counts, &mut others),
                anew,
                "{requests} {slo:?} {counts}"
            );
            assert_eq!(
                peer.ejections().collect::<Vec<_>>(),
                [failed],
                "wherever they stand behind the SLOs"
            );
            assert!(!peer.is_idle());
        }
        peer.replace(
            OwnLoadReport::default()
                .write(HEAD_OF_7, &mut InFlight::default(), &[])
                .to_vec(),
            true,
            &mut others,
        );
        assert!(peer.is_idle());
    }

    #[test]
    fn picks_of_another_worker_stand_for_those_of_other_proxies_too() {
        let row = |vm, slot, requests, prefill_tokens| {
            let mut own = OwnLoadReport::default();
            let prefills = PendingPrefills {
                prompts: requests,
                ..PendingPrefills::default()
            };
            own.set(
                at(slot, 1),
                EndpointLoad {
                    requests,
                    prefill_tokens,
                    prefills,
                    ..EndpointLoad::default()
                },
            );
            own.write(
                LoadReportHead { vm, ..HEAD_OF_7 },
                &mut InFlight::default(),
                &[],
            )
            .to_vec()
        };
        let mut others = started();
        let mut peer = PeerLoadReport::default();
        let load = |others: &PeerLoads, slot| {
            (
                others.load(at(slot, 1)).requests,
                others.load(at(slot, 1)).prefill_tokens,
            )
        };
        peer.replace(row(7, 2, 1, 10), true, &mut others);
        assert_eq!(load(&others, 2), (1, 10), "there is no other proxy");
        others.estimate_picks(2, 1_000, 0);
        peer.replace(row(7, 2, 3, 15), true, &mut others);
        assert_eq!(
            load(&others, 2),
            (3 + 2 * 2, 15 + 2 * 5),
            "two more, each once here and once at each of two proxies"
        );
        assert_eq!(others.load(at(2, 1)).prefills.prompts, 3 + 2 * 2);
        peer.replace(row(7, 2, 3, 40), true, &mut others);
        assert_eq!(load(&others, 2), (7, 50), "the same requests are no pick");
        peer.replace(row(7, 2, 2, 20), true, &mut others);
        assert_eq!(load(&others, 2), (6, 30), "nor is an end");
        peer.replace(row(7, 5, 1, 6), true, &mut others);
        assert_eq!(
            (load(&others, 2), load(&others, 5)),
            ((4, 10), (3, 18)),
            "in its place another endpoint"
        );
        PeerLoadReport::default().replace(
            row(LoadReportHead::OUTSIDE, 4, 6, 60),
            true,
            &mut others,
        );
        assert_eq!(
            load(&others, 4),
            (6, 60),
            "what the other proxies tell is theirs already"
        );
    }

    #[test]
    fn a_sum_of_rows_is_a_row() {
        let row = |slot, requests, ttft| {
            let mut own = OwnLoadReport::default();
            own.set(
                at(slot, 1),
                EndpointLoad {
                    requests,
                    prefill_tokens: 10,
                    ttft_slo_us: ttft,
                    ..EndpointLoad::default()
                },
            );
            own.set(
                at(7, 1),
                EndpointLoad {
                    requests: 1,
                    ..EndpointLoad::default()
                },
            );
            own.write(HEAD_OF_7, &mut InFlight::default(), &[]).to_vec()
        };
        let mut sum = LoadReportSum::default();
        let mut one = PeerLoadReport::default();
        let mut two = PeerLoadReport::default();
        let mut others = started();
        sum.reset((0..8).map(|slot| at(slot, 1)).collect(), []);
        sum.read(&mut one, row(2, 3, Some(40)));
        sum.read(&mut two, row(2, 4, Some(30)));
        sum.add(
            at(5, 1),
            EndpointLoad {
                requests: 9,
                ttft_slo_us: Some(70),
                tpot_slo_us: Some(8),
                ..EndpointLoad::default()
            },
        );
        let mut whole = PeerLoadReport::default();
        whole.replace(sum.row(HEAD_OF_7, [&one, &two], &[]), true, &mut others);
        whole.add_slos_to(&mut others);
        assert_eq!(
            others.load(at(2, 1)),
            EndpointLoad {
                requests: 7,
                prefill_tokens: 20,
                ttft_slo_us: Some(30),
                ..EndpointLoad::default()
            }
        );
        assert_eq!([5, 7].map(|slot| others.load(at(slot, 1)).requests), [9, 2]);
        assert_eq!(
            (
                others.load(at(5, 1)).ttft_slo_us,
                others.load(at(5, 1)).tpot_slo_us
            ),
            (Some(70), Some(8))
        );
        sum.count(&mut two, false);
        whole.replace(sum.row(HEAD_OF_7, [&one, &two], &[]), true, &mut others);
        assert_eq!(
            others.load(at(2, 1)).requests,
            3,
            "without the one that asks"
        );
        sum.reset(vec![at(7, 1)], [&one, &two]);
        whole.replace(sum.row(HEAD_OF_7, [&one, &two], &[]), true, &mut others);
        assert_eq!(
            sums(&others)
                .iter()
                .map(|load| load.requests)
                .collect::<Vec<_>>(),
            [0, 0, 0, 0, 0, 0, 0, 1]
        );
    }

    #[test]
    fn failures_go_from_process_to_process_by_the_clock_of_each_and_not_in_circles() {
        let failure = |slot, ms, outside| Ejection {
            at: Timestamp(0).plus_ms(ms),
            failures: 1,
            until: Timestamp(0).plus_ms(ms + 1_000),
            endpoint: at(slot, 1),
            outside,
            by_answers: false,
            is_own: false,
        };
        let mut one = PeerLoadReport::default();
        let mut two = PeerLoadReport::default();
        let mut others = started();
        let row = |failures: &[Ejection]| {
            OwnLoadReport::default()
                .write(HEAD_OF_7, &mut InFlight::default(), failures)
                .to_vec()
        };
        one.replace(
            row(&[failure(1, 500, false), failure(2, 500, true)]),
            true,
            &mut others,
        );
        two.replace(
            row(&[failure(1, 700, false), failure(3, 100, false)]),
            true,
            &mut others,
        );
        let written_row = LoadReportSum::default().row(
            LoadReportHead {
                written: Timestamp(0).plus_ms(800),
                ..HEAD_OF_7
            },
            [&one, &two],
            &[failure(3, 600, false)],
        );
        let mut read = PeerLoadReport::default();
        read.replace(written_row.clone(), true, &mut others);
        let expected = [failure(1, 700, false), failure(3, 600, false)];
        assert_eq!(
            read.ejections().collect::<Vec<_>>(),
            expected,
            "the last of each, and none of another proxy's"
        );

        let mut received = written_row;
        assert!(
            LoadReportHead {
                written: Timestamp(0).plus_ms(5_800),
                ..HEAD_OF_7
            }
            .receive(&mut received)
        );
        read.replace(received, true, &mut others);
        assert_eq!(
            read.head(),
            LoadReportHead {
                written: Timestamp(0).plus_ms(5_800),
                ..HEAD_OF_7
            }
        );
        assert_eq!(
            read.ejections().collect::<Vec<_>>(),
            [failure(1, 5_700, false), failure(3, 5_600, false)]
        );
        let answered = Ejection {
            at: Timestamp(0),
            failures: 0,
            until: Timestamp(0),
            ..failure(1, 0, false)
        };
        let mut received = row(&[answered, failure(2, u64::MAX >> 30, false)]);
        assert!(HEAD_OF_7.receive(&mut received));
        read.replace(received, true, &mut others);
        let read: Vec<_> = read.ejections().collect();
        assert_eq!(
            (read[0], read[1].at),
            (answered, HEAD_OF_7.written),
            "nothing is of a moment to come"
        );
    }

    #[test]
    fn nothing_another_process_says_lasts_longer_than_half_a_minute_or_counts_for_more_than_a_proxy_can_have()
     {
        let now = Timestamp(0).plus_ms(5_000_000);
        let head = LoadReportHead {
            written: now,
            ..HEAD_OF_7
        };
        let said = [
            (0, u64::MAX),
            (u64::MAX, u64::MAX),
            (1, now.0),
            (u64::MAX, 1),
        ];
        for (written, (at_, until)) in [0, 1, now.0, u64::MAX]
            .into_iter()
            .flat_map(|w| said.map(|s| (w, s)))
        {
            let failure = Ejection {
                at: Timestamp(at_),
                failures: u32::MAX,
                until: Timestamp(until),
                endpoint: at(1, 1),
                outside: false,
                by_answers: false,
                is_own: false,
            };
            let from = LoadReportHead {
                written: Timestamp(written),
                ..HEAD_OF_7
            };
            let mut row = OwnLoadReport::default()
                .write(from, &mut InFlight::default(), &[failure])
                .to_vec();
            assert!(head.receive(&mut row));
            let mut read = PeerLoadReport::default();
            read.replace(row, true, &mut started());
            let written_row = read.ejections().next().unwrap();
            assert!(
                written_row.at <= now,
                "{written} {at_} {until}: {written_row:?}"
            );
            assert!(
                written_row.until <= now.plus_ms(PEER_EJECTION_MS_MAX),
                "{written} {at_} {until}: {written_row:?}"
            );
        }
        // The largest values of many reports must add up without overflow. An overflow would be
        // missing when one of the reports leaves.
        let prefills = PendingPrefills {
            prompts: u32::MAX,
            ..PendingPrefills::default()
        };
        let load = EndpointLoad {
            requests: u32::MAX,
            prefills,
            ..EndpointLoad::default()
        };
        let mut row = Vec::new();
        LoadReportLayout {
            head: LoadReportHead {
                vm: 7,
                ..LoadReportHead::default()
            },
            loads: 1,
            ..LoadReportLayout::default()
        }
        .append(&mut row);
        row.extend_from_slice(&encode_load(at(2, 1), &load));
        assert!(head.receive(&mut row));
        let mut read = PeerLoadReport::default();
        let mut others = started();
        read.replace(row, true, &mut others);
        assert_eq!(others.load(at(2, 1)).prefills.prompts, PROMPTS_MAX);
        assert!(
            u64::from(PROMPTS_MAX) * 4_096 < u64::from(u32::MAX),
            "as many rows as a daemon serves streams"
        );
    }

    #[test]
    fn endpoints_that_are_idle_for_good_leave_the_row() {
        let mut ledger = InFlight::default();
        let mut own = OwnLoadReport::default();
        let kept = ledger.admit(at(900, 1), 5);
        for slot in 0..=EMPTY_LOADS_MAX as u16 {
            let ticket = ledger.admit(at(slot, 1), 5);
            own.write(HEAD_OF_7, &mut ledger, &[]);
            ledger.release(ticket);
        }
        assert_eq!(
            own.write(HEAD_OF_7, &mut ledger, &[]).len(),
            HEAD + LOAD_BYTES
        );
        ledger.release(kept);
        assert_eq!(
            own.write(HEAD_OF_7, &mut ledger, &[]).len(),
            HEAD + LOAD_BYTES
        );
        assert!(own.is_idle());
    }

    /// A VM's report, and the copy that another VM reads.
    #[derive(Default)]
    struct ReportVm {
        ledger: InFlight,
        own: OwnLoadReport,
        peer: PeerLoadReport,
        tickets: Vec<InFlightTicket>,
        last: Vec<u8>,
    }

    #[derive(Clone, Debug)]
    enum ReportStep {
        Admit(u16, u32, u32),
        Release(prop::sample::Index),
        Transfer(prop::sample::Index, u16),
        Tell,
        Count(bool),
        Garbage(Vec<u8>),
    }

    fn step() -> impl Strategy<Value = ReportStep> {
        prop_oneof![
            4 => (0..8_u16, 1..3_u32, 0..1000_u32).prop_map(|(slot, life, tokens)| ReportStep::Admit(slot, life, tokens)),
            3 => any::<prop::sample::Index>().prop_map(ReportStep::Release),
            1 => (any::<prop::sample::Index>(), 0..8_u16).prop_map(|(i, slot)| ReportStep::Transfer(i, slot)),
            4 => Just(ReportStep::Tell),
            1 => any::<bool>().prop_map(ReportStep::Count),
            1 => prop::collection::vec(any::<u8>(), 0..200).prop_map(ReportStep::Garbage),
        ]
    }

    proptest! {
        /// Reports change, get lost or are corrupted in any order. The counts always equal those of
        /// the last read reports, as if these were read for the first time.
        #[test]
        fn differences_add_up_to_the_row(steps in prop::collection::vec((0..2_usize, step()), 0..80)) {
            let mut others = started();
            let mut vms = [ReportVm::default(), ReportVm::default()];
            for (vm, step) in steps {
                let ReportVm { ledger, own, peer, tickets, last } = &mut vms[vm];
                match step {
                    ReportStep::Admit(slot, life, tokens) => tickets.push(ledger.admit(at(slot, life), tokens)),
                    ReportStep::Release(i) if !tickets.is_empty() => ledger.release(tickets.swap_remove(i.index(tickets.len()))),
                    ReportStep::Transfer(i, slot) if !tickets.is_empty() => ledger.transfer(i.get_mut(tickets), at(slot, 1)),
                    ReportStep::Tell => {
                        *last = own.write(HEAD_OF_7, ledger, &[]).to_vec();
                        peer.replace(last.clone(), peer.counts(), &mut others);
                        prop_assert_eq!(own.is_idle(), ledger.rows().count() == 0);
                    }
                    ReportStep::Count(counts) => drop(peer.count(counts, &mut others)),
                    ReportStep::Garbage(bytes) => {
                        *last = bytes;
                        peer.replace(last.clone(), true, &mut others);
                    }
                    _ => {}
                }
                let mut anew = started();
                for ReportVm { peer, last, .. } in &vms {
                    PeerLoadReport::default().replace(last.clone(), peer.counts(), &mut anew);
                }
                prop_assert_eq!(sums(&others), sums(&anew));
            }
            for ReportVm { ledger, own, peer, tickets, .. } in &mut vms {
                tickets.drain(..).for_each(|ticket| ledger.release(ticket));
                peer.replace(own.write(HEAD_OF_7, ledger, &[]).to_vec(), true, &mut others);
            }
            prop_assert_eq!(sums(&others), vec![EndpointLoad::default(); 8], "when all has ended nothing is left");
        }
    }
}
