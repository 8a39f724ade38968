//! The state that a pool shares with the other workers and proxies that pick from it: load reports,
//! failures and placements. The host transports them.

use std::collections::VecDeque;

use proto::placements::PlacementKind;
use scheduler::EndpointRef;
use scheduler::in_flight::EndpointLoad;

use super::ejection::OUTSIDE_REST_MS;
use super::{
    Ejection, LoadReportHead, ManagedPool, OwnLoadReport, PeerLoadReport, Placement, adapters,
    crash_correlation, shared_streak, stored_answers,
};
use scheduler::Timestamp;

/// The bounds of the time for which load that other proxies claim may stay unconfirmed by scrapes,
/// in ms. Within these bounds, the time is half the age at which a scrape is too old. With the
/// default intervals, the next scrape and its message take a quarter of that time.
const PATIENCE_MS: std::ops::RangeInclusive<u64> = 1_000..=5_000;

/// The kind that a placement from another proxy has here; `None` for a kind that only workers of
/// one process accept from each other, and for a placement without blocks. A mark is always taken
/// as [`PlacementKind::OverShare`], so that it displaces nothing that this process saw. A
/// withdrawal takes away no claim that this process or another peer has made too.
pub(crate) fn peer_kind(kind: PlacementKind, blocks: &[u64]) -> Option<PlacementKind> {
    match blocks {
        [] => None,
        [mark] if shared_streak::is_mark(*mark) => None,
        [mark]
            if adapters::is_model_mark(*mark)
                || crash_correlation::is_mark(*mark)
                || stored_answers::is_mark(*mark) =>
        {
            Some(PlacementKind::OverShare)
        }
        _ => match kind {
            PlacementKind::Withdrawn => Some(PlacementKind::PeerWithdrawn),
            PlacementKind::PeerWithdrawn => None,
            kind => Some(kind),
        },
    }
}

// === impl ManagedPool ===

impl ManagedPool {
    /// A number that grows with every change that others should see at once: picks, first tokens,
    /// ends of requests, and failures.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.ledger.changes
    }

    /// Updates `row` to the current load and failures and returns its bytes.
    pub fn write_load_report<'r>(
        &mut self,
        row: &'r mut OwnLoadReport,
        head: LoadReportHead,
    ) -> &'r [u8] {
        row.write(
            head,
            &mut self.ledger.in_flight,
            self.endpoints.failures.ejections.rows(),
        )
    }

    /// Replaces the load report of another VM by `bytes`. `counts` says whether its load is
    /// included. Returns whether [`Self::recompute_peer_slos`] must follow.
    pub fn read_load_report(
        &mut self,
        row: &mut PeerLoadReport,
        bytes: Vec<u8>,
        counts: bool,
    ) -> bool {
        let slos = row.replace(bytes, counts, self.ledger.others_mut());
        if row.head().vm == LoadReportHead::OUTSIDE {
            self.queues.others_freed();
        } else {
            self.queues.peer_changed();
        }
        slos
    }

    /// Sets whether the load of a report is included. Returns whether [`Self::recompute_peer_slos`]
    /// must follow.
    pub fn count_load_report(&mut self, row: &mut PeerLoadReport, counts: bool) -> bool {
        row.count(counts, self.ledger.others_mut())
    }

    /// Makes each pick of this process count for one pick of each of `proxies` other proxies, until
    /// it is `delay_us` old: see [`scheduler::in_flight::PeerLoads`].
    pub fn estimate_peer_picks(&mut self, proxies: u32, delay_us: u64, now: Timestamp) {
        let proxies = self.queues.proxies_per_pick(proxies);
        self.ledger
            .others_mut()
            .estimate_picks(proxies, delay_us, now.us_since(Timestamp(0)));
    }

    /// Computes the lowest SLOs at other proxies again, from all their reports.
    pub fn recompute_peer_slos<'r>(&mut self, rows: impl IntoIterator<Item = &'r PeerLoadReport>) {
        let others = self.ledger.others_mut();
        others.forget_slos();
        rows.into_iter().for_each(|row| row.add_slos_to(others));
        self.drop_impossible_slos();
    }

    /// Drops the SLOs from other proxies that an idle endpoint could not meet. Such SLOs would keep
    /// requests away without any benefit.
    #[inline(never)] // several callers, and the wasm module should be small
    fn drop_impossible_slos(&mut self) {
        if let Some(state) = &self.endpoints.state {
            let others = self.ledger.others_mut();
            others.retain_peer_slos(|endpoint, slo| {
                scheduler::possible_slo(&state.snapshot, endpoint, slo)
            });
        }
    }

    /// Adds up all reports from other VMs and proxies again. Call this after [`Self::install`],
    /// because endpoints may have other generations.
    pub fn recount_load_reports<'r>(&mut self, rows: impl IntoIterator<Item = &'r PeerLoadReport>) {
        let others = self.ledger.others_mut();
        others.start(self.endpoints.refs());
        rows.into_iter().for_each(|row| row.add_to(others));
        self.drop_impossible_slos();
    }

    /// Sets the load of all other VMs and proxies. For hosts that read no reports, but receive the
    /// sum.
    pub fn set_peer_loads(&mut self, loads: impl IntoIterator<Item = (EndpointRef, EndpointLoad)>) {
        self.recount_load_reports([]);
        let others = self.ledger.others_mut();
        loads
            .into_iter()
            .for_each(|(endpoint, load)| others.add(endpoint, load));
        self.queues.others_freed();
    }

    /// Compares the load that other proxies claim with the metrics, which arrived at `now`.
    pub(super) fn judge_claims(&mut self, now: Timestamp) {
        let Some(state) = &self.endpoints.state else {
            return;
        };
        let patience_ms = state.staleness_max_ms / 2;
        let patience_us = patience_ms.clamp(*PATIENCE_MS.start(), *PATIENCE_MS.end()) * 1_000;
        let now_us = now.us_since(Timestamp(0));
        let in_flight = &mut self.ledger.in_flight;
        for (endpoint, metrics) in state.refs.iter().zip(state.snapshot.metrics()) {
            in_flight.judge_claims(*endpoint, metrics, patience_us, now_us);
        }
    }

    /// Applies another worker's record of an endpoint's failures. If the endpoint's last answer
    /// here was a success within [`OUTSIDE_REST_MS`], failures that another proxy saw change
    /// nothing.
    pub fn learn_ejection(&mut self, ejection: Ejection, now: Timestamp) {
        let failures = &self.endpoints.failures;
        let is_quiet = |endpoint| failures.health.is_quiet(endpoint, now);
        let ejection = ejection.shortened(is_quiet);
        let is_refuted = ejection.outside
            && ejection.failures > 0
            && failures
                .health
                .succeeds(ejection.endpoint, OUTSIDE_REST_MS, now);
        if !is_refuted
            && self.endpoints.knows(ejection.endpoint)
            && self.endpoints.failures.ejections.learn(ejection, now)
        {
            self.ledger.changes += 1;
        }
    }

    /// Records that another worker or proxy sent `endpoint` a prompt with these blocks. `kind` is
    /// the evidence for that. A single block that is a mark is not a prompt: see
    /// [`Placement::blocks`]. Marks from other proxies count as over their share, so they displace
    /// nothing that this process saw.
    pub fn record_peer_placement(
        &mut self,
        kind: PlacementKind,
        endpoint: EndpointRef,
        blocks: &[u64],
        now: Timestamp,
    ) {
        let Some(at) = self.endpoints.index(endpoint) else {
            return;
        };
        let from_peer = kind == PlacementKind::OverShare;
        match blocks {
            [mark] if adapters::is_model_mark(*mark) => {
                self.cache.adapters.record_model(at.get(), *mark, from_peer);
            }
            [mark] if crash_correlation::is_mark(*mark) => {
                let crashing = &mut self.endpoints.failures.crashing;
                crashing.record(*mark, endpoint, from_peer, now);
            }
            [mark] if shared_streak::is_mark(*mark) => {
                let health = &mut self.endpoints.failures.health;
                shared_streak::receive(health, kind, endpoint, *mark, now);
            }
            [mark] if stored_answers::is_mark(*mark) => {
                self.cache.stored_answers.record(*mark, endpoint, from_peer);
            }
            _ => {
                // The other worker publishes each pick as an unconfirmed placement.
                if kind == PlacementKind::Unconfirmed {
                    self.ledger.in_flight.picked(endpoint);
                }
                self.cache.record_peer(kind, endpoint, blocks);
            }
        }
    }

    /// Records that `endpoint` gave this client (a hash) an answer that it may keep, whose id has
    /// this hash.
    pub fn record_stored_answer(&mut self, endpoint: EndpointRef, id: u64, client: u64) {
        self.cache.record_stored_answer(endpoint, id, client);
        self.ledger.changes += 1;
    }

    /// Sets whether placements from other proxies are missing here. While they are missing, a
    /// prompt that is cached nowhere goes to the rendezvous endpoint of its head
    /// ([`scheduler::prefix::rendezvous_endpoint`]). Every proxy without placements does the same.
    pub fn set_peers_unreachable(&mut self, unreachable: bool) {
        self.cache.peers_unreachable = unreachable;
    }

    /// Sets whether placements are kept for publishing.
    pub fn set_placement_publishing(&mut self, wanted: bool) {
        self.cache.placements.set_enabled(wanted);
    }

    /// The placements made here since the last call.
    pub fn take_placements(&mut self) -> VecDeque<Placement> {
        self.cache.placements.take()
    }

    /// How many placements were dropped in favour of newer ones, because they were not taken in
    /// time.
    #[must_use]
    pub fn placements_dropped(&self) -> u64 {
        self.cache.placements.dropped()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use scheduler::{
        Endpoint, EndpointMetrics, Generation, Pipeline, PipelineSpec, Readiness, Slot, Snapshot,
        Version,
    };

    use super::*;
    use crate::peers::PeerReport;
    use crate::pool::EjectionCause;
    use crate::pool::LoadReportSum;
    use crate::pool::witnesses::{RequestFailure, Witness};

    const AT: EndpointRef = EndpointRef {
        slot: Slot(0),
        generation: Generation(1),
    };

    fn at(ms: u64) -> Timestamp {
        Timestamp(0).plus_ms(1_000_000 + ms)
    }

    /// A pool of one endpoint whose metrics show this many requests.
    fn snapshot(requests: f32) -> Snapshot {
        let endpoint = Endpoint {
            id: AT,
            name: "pod".into(),
            address: "10.0.0.1:8000".into(),
            readiness: Readiness::Ready,
            labels: Box::default(),
            models: std::sync::Arc::default(),
            age_ms: 60_000,
        };
        let metrics = EndpointMetrics {
            running_requests: Some(requests),
            ..EndpointMetrics::default()
        };
        let pipeline = Pipeline::build(&PipelineSpec::default()).unwrap();
        Snapshot::try_new(Version::default(), vec![endpoint], vec![metrics], pipeline).unwrap()
    }

    fn pool() -> ManagedPool {
        let mut pool = ManagedPool::new(1, 0);
        pool.install(snapshot(0.0), 0, 5_000);
        pool.recount_load_reports([]);
        pool
    }

    #[test]
    fn what_succeeds_here_is_not_ejected_because_it_fails_elsewhere() {
        let mut pool = pool();
        pool.endpoints.failures.health.record_success(AT, 7, at(0));
        let failed = |ms, outside| Ejection {
            at: at(ms),
            failures: 1,
            until: at(ms + 1_000),
            endpoint: AT,
            outside,
            by_answers: true,
            is_own: false,
        };
        for ms in [500, OUTSIDE_REST_MS] {
            pool.learn_ejection(failed(ms, true), at(ms));
            assert!(pool.ejections().is_empty(), "{ms} ms after a success");
        }
        let later = OUTSIDE_REST_MS + 1;
        pool.learn_ejection(failed(later, true), at(later));
        assert_eq!(pool.ejections().len(), 1, "that success was long ago");
        let mut pool = self::pool();
        pool.endpoints.failures.health.record_success(AT, 7, at(0));
        pool.learn_ejection(failed(500, false), at(500));
        assert_eq!(pool.ejections().len(), 1, "another worker saw it");
        let mut pool = self::pool();
        let health = &mut pool.endpoints.failures.health;
        health.record_success(AT, 7, at(0));
        let failure = RequestFailure::Answer(Witness::Prompt(0), 1);
        health.record_failure(AT, failure, at(400));
        pool.learn_ejection(failed(500, true), at(500));
        assert_eq!(pool.ejections().len(), 1, "a failure here confirms it");
    }

    /// Ejects the endpoint through a worker that sends few requests, for 20 s. Returns the record.
    fn eject_when_quiet(quiet: &mut ManagedPool) -> Ejection {
        let failures = &mut quiet.endpoints.failures;
        for _ in 0..6 {
            let cause = EjectionCause::by_answers(failures.health.is_quiet(AT, at(0)));
            failures.ejections.probe_failed(AT, cause, 0.0, at(0));
        }
        quiet.ejections()[0]
    }

    /// Lets 16 requests succeed at another endpoint.
    fn make_busy(pool: &mut ManagedPool, ms: u64) {
        let other = EndpointRef {
            slot: Slot(1),
            ..AT
        };
        for prompt in 0..16 {
            let health = &mut pool.endpoints.failures.health;
            health.record_success(other, prompt, at(ms));
        }
    }

    #[test]
    fn a_busy_worker_probes_after_five_seconds_what_a_quiet_one_ejected_for_longer() {
        let [mut quiet, mut busy, mut third] = [pool(), pool(), pool()];
        let row = eject_when_quiet(&mut quiet);
        make_busy(&mut busy, 0);
        for ms in [1, 2] {
            busy.learn_ejection(row, at(ms));
            third.learn_ejection(row, at(ms));
        }
        let is_ejected = |pool: &ManagedPool, ms| {
            let ejections = &pool.endpoints.failures.ejections;
            ejections.is_ejected(AT, at(ms))
        };
        assert!(is_ejected(&busy, 4_999));
        assert!(is_ejected(&quiet, 19_999) && is_ejected(&third, 19_999));
        // What the busy worker reports does not shorten the ejection for the others.
        third.learn_ejection(busy.ejections()[0], at(3));
        assert!(is_ejected(&third, 19_999));
        let probed = at(5_400);
        let ejections = &mut busy.endpoints.failures.ejections;
        assert!(ejections.is_probe(AT, probed), "200 to 400 ms later");
        let succeeds = ejections.record_answer(AT, true, probed, probed);
        assert!(succeeds, "the endpoint works again");
        third.learn_ejection(busy.ejections()[0], probed);
        assert!(!is_ejected(&third, 5_401), "the others know it at once");
    }

    #[test]
    fn an_ejection_becomes_shorter_when_traffic_comes() {
        let [mut quiet, mut other] = [pool(), pool()];
        let row = eject_when_quiet(&mut quiet);
        other.learn_ejection(row, at(1));
        for pool in [&mut quiet, &mut other] {
            pool.tick(at(6_000));
            assert!(pool.endpoints.failures.ejections.is_ejected(AT, at(6_000)));
            make_busy(pool, 6_001);
            pool.tick(at(6_002));
            assert!(!pool.endpoints.failures.ejections.is_ejected(AT, at(6_002)));
        }
        other.learn_ejection(row, at(6_003));
        let ejections = &other.endpoints.failures.ejections;
        assert!(
            !ejections.is_ejected(AT, at(6_003)),
            "the old record is none"
        );
    }

    proptest! {
        /// Another proxy says at any times, with any clock, that an endpoint has failed. While each
        /// of its answers here is a success and the pauses between them are not too long, requests
        /// never avoid it.
        #[test]
        fn no_words_of_another_proxy_eject_what_answers_well_here(
            steps in prop::collection::vec(
                (0..=OUTSIDE_REST_MS, prop::collection::vec((0..=OUTSIDE_REST_MS, any::<i16>(), 0..9_u32), 0..4)),
                1..40,
            ),
        ) {
            let mut pool = pool();
            let mut ms = 100_000;
            for (pause, mut said) in steps {
                pool.endpoints.failures.health.record_success(AT, 7, at(ms));
                said.sort_unstable();
                for (after, early, failures) in said {
                    let now = at(ms + after.min(pause));
                    let said = Ejection {
                        at: at((ms + after).saturating_add_signed(early.into())),
                        failures,
                        until: Timestamp(u64::MAX),
                        endpoint: AT,
                        outside: true,
                        by_answers: failures % 2 == 0,
                        is_own: false,
                    };
                    pool.learn_ejection(said, now);
                    prop_assert!(!pool.endpoints.failures.ejections.is_ejected(AT, now));
                }
                ms += pause;
            }
        }
    }

    /// Repeats another proxy's report, and returns the load that counts after each of the scrapes.
    fn counted(requests: u32, shown: f32, scrapes: u64) -> Vec<u32> {
        let mut pool = pool();
        let mut peer = PeerReport::of_proxies();
        let mut sum = LoadReportSum::default();
        sum.reset(vec![AT], []);
        let load = EndpointLoad {
            requests,
            ..EndpointLoad::default()
        };
        sum.add(AT, load);
        (1..=scrapes)
            .map(|scrape| {
                let now = at(250 * scrape);
                let head = LoadReportHead {
                    vm: LoadReportHead::OUTSIDE,
                    written: now,
                    ring: 0,
                };
                let row = sum.row(head, [], &[]);
                peer.read(&mut pool, row, now);
                peer.count(&mut pool, now);
                pool.refresh(snapshot(shown), now);
                pool.in_flight().load(AT).requests
            })
            .collect()
    }

    #[test]
    fn a_claim_that_scrapes_refute_counts_as_what_they_show() {
        let honest = counted(64, 64.0, 40);
        assert!(honest.iter().all(|count| *count == 64), "{honest:?}");
        let late = counted(64, 0.0, 6);
        assert!(late.iter().all(|count| *count == 64), "{late:?}");
        let lie = counted(0xffff, 0.0, 20);
        assert!(lie[0] <= 256 && lie[19] == 0, "{lie:?}");
        let half = counted(40, 10.0, 20);
        assert_eq!(half[19], 10);
        let mut pool = pool();
        let mut peer = PeerReport::of_proxies();
        peer.read(&mut pool, vec![1, 2, 3], at(0));
        assert!(!peer.count(&mut pool, at(0)));
        assert_eq!(pool.in_flight().load(AT).requests, 0);
    }
}
