//! The state that a pool shares with the other workers and proxies that pick from it: load reports,
//! failures and placements. The host transports them.

use std::collections::VecDeque;

use proto::placements::PlacementKind;
use scheduler::EndpointRef;
use scheduler::in_flight::EndpointLoad;

use super::{
    Ejection, LoadReportHead, ManagedPool, OwnLoadReport, PeerLoadReport, Placement, adapters,
    crash_correlation, stored_answers,
};
use scheduler::Timestamp;

// === impl ManagedPool ===

impl ManagedPool {
    /// A number that grows with every change that others should see at once: picks, first tokens,
    /// ends of requests, failures.
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

    /// Replaces the load report of another VM by `bytes`. The caller decides whether its load
    /// `counts`. Returns whether [`Self::recompute_peer_slos`] must follow.
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

    /// Sets whether the load of a report counts. Returns whether [`Self::recompute_peer_slos`] must
    /// follow.
    pub fn count_load_report(&mut self, row: &mut PeerLoadReport, counts: bool) -> bool {
        row.count(counts, self.ledger.others_mut())
    }

    /// Makes each pick of this process stand for one pick of each of `proxies` other proxies until
    /// it is `delay_us` old: see [`scheduler::in_flight::PeerLoads`].
    pub fn estimate_peer_picks(&mut self, proxies: u32, delay_us: u64, now: Timestamp) {
        let proxies = self.queues.stands_for(proxies);
        self.ledger
            .others_mut()
            .stand_for(proxies, delay_us, now.us_since(Timestamp(0)));
    }

    /// Computes the lowest SLOs of others again, from all their reports.
    pub fn recompute_peer_slos<'r>(&mut self, rows: impl IntoIterator<Item = &'r PeerLoadReport>) {
        let others = self.ledger.others_mut();
        others.forget_slos();
        rows.into_iter().for_each(|row| row.add_slos_to(others));
    }

    /// Counts all reports of others again: after [`Self::install`], when endpoints have other
    /// generations.
    pub fn recount_load_reports<'r>(&mut self, rows: impl IntoIterator<Item = &'r PeerLoadReport>) {
        let others = self.ledger.others_mut();
        others.start(self.endpoints.refs());
        rows.into_iter().for_each(|row| row.add_to(others));
    }

    /// Sets the load of all others, summed up elsewhere: for a host that reads no reports.
    pub fn set_peer_loads(&mut self, loads: impl IntoIterator<Item = (EndpointRef, EndpointLoad)>) {
        self.recount_load_reports([]);
        let others = self.ledger.others_mut();
        loads
            .into_iter()
            .for_each(|(endpoint, load)| others.add(endpoint, load));
        self.queues.others_freed();
    }

    /// Applies another worker's record of an endpoint's failures. That another proxy saw failures
    /// of an endpoint that succeeds here changes nothing.
    pub fn learn_ejection(&mut self, ejection: Ejection, now: Timestamp) {
        let failures = &self.endpoints.failures;
        let is_refuted = ejection.outside
            && ejection.failures > 0
            && failures.health.succeeded_lately(ejection.endpoint, now);
        if !is_refuted
            && self.endpoints.knows(ejection.endpoint)
            && self.endpoints.failures.ejections.learn(ejection, now)
        {
            self.ledger.changes += 1;
        }
    }

    /// Records that another worker or proxy sent `endpoint` a prompt of these blocks, and what is
    /// known of that. A single block that is a mark is no prompt: see [`Placement::blocks`].
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
        match blocks {
            [mark] if adapters::is_model_mark(*mark) => {
                self.cache.adapters.record_model(at.get(), *mark);
            }
            [mark] if crash_correlation::is_mark(*mark) => {
                self.endpoints
                    .failures
                    .crashing
                    .record(*mark, endpoint, now);
            }
            [mark] if stored_answers::is_mark(*mark) => {
                self.cache.stored_answers.record(*mark, endpoint);
            }
            _ => {
                // Its pick is published as unconfirmed.
                if kind == PlacementKind::Unconfirmed {
                    self.ledger.in_flight.picked(endpoint);
                }
                self.cache.record_peer(kind, endpoint, blocks);
            }
        }
    }

    /// Records that `endpoint` gave an answer that it may keep, whose id has this hash.
    pub fn record_stored_answer(&mut self, endpoint: EndpointRef, id: u64) {
        self.cache.record_stored_answer(endpoint, id);
        self.ledger.changes += 1;
    }

    /// Sets whether placements of other proxies are missing here. While they are, a prompt that is
    /// cached nowhere goes to the rendezvous endpoint of its head
    /// ([`scheduler::prefix::rendezvous_endpoint`]), as it does in every proxy that misses
    /// placements.
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

    /// How many placements were dropped for newer ones because they were not taken in time.
    #[must_use]
    pub fn placements_dropped(&self) -> u64 {
        self.cache.placements.dropped()
    }
}
