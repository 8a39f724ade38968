//! The state that a pool shares with the other workers and proxies that pick from it: load reports,
//! failures and placements. The host transports them.

use std::collections::VecDeque;

use scheduler::EndpointRef;
use scheduler::in_flight::EndpointLoad;

use super::{
    Ejection, LoadReportHead, ManagedPool, OwnLoadReport, PeerLoadReport, adapters,
    crash_correlation, stored_answers,
};
use scheduler::Timestamp;

/// The most hashes in placements that wait to be published. A host takes them after each pick;
/// otherwise the oldest are dropped and counted.
const QUEUED_BLOCKS_MAX: usize = 4 * scheduler::prefix::BLOCKS_MAX;

/// The changes that this VM has to publish, and whether placements of other proxies are missing.
#[derive(Debug, Default)]
pub(super) struct PeerSharing {
    /// See [`ManagedPool::changes`].
    pub(super) changes: u64,
    pub(super) placements: PlacementQueue,
    /// Whether other proxies pick too and their placements do not arrive here.
    pub(super) peers_unreachable: bool,
}

/// A prompt that an endpoint was sent, or a mark that other VMs keep for the endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    pub endpoint: EndpointRef,
    /// The hashes of the prompt's blocks, first block first. Or one mark, which is no hash: the
    /// model of a request that the endpoint was sent (`pool/adapters.rs`), or a prompt that cost
    /// the endpoint its connection (`pool/crash_correlation.rs`), or an answer that the endpoint
    /// may keep (`pool/stored_answers.rs`). The upper half of a mark is a constant that says which
    /// of them it is.
    pub blocks: Box<[u64]>,
    /// How many of the blocks, from the first, the endpoint had cached before, as estimated.
    pub known: u32,
}

/// Placements that wait to be published.
#[derive(Debug, Default)]
pub(super) struct PlacementQueue {
    /// Whether the host publishes them.
    enabled: bool,
    placements: VecDeque<Placement>,
    blocks: usize,
    /// The number of placements that were dropped for newer ones.
    dropped: u64,
}

// === impl ManagedPool ===

impl ManagedPool {
    /// A number that grows with every change that others should see at once: picks, first tokens,
    /// ends of requests, failures.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.sharing.changes
    }

    /// Updates `row` to the current load and failures and returns its bytes.
    pub fn write_load_report<'r>(
        &mut self,
        row: &'r mut OwnLoadReport,
        head: LoadReportHead,
    ) -> &'r [u8] {
        row.write(head, &mut self.in_flight, self.failures.ejections.rows())
    }

    /// Replaces the load report of another VM by `bytes`. The caller decides whether its load
    /// `counts`. Returns whether [`Self::recompute_peer_slos`] must follow.
    pub fn read_load_report(
        &mut self,
        row: &mut PeerLoadReport,
        bytes: Vec<u8>,
        counts: bool,
    ) -> bool {
        let slos = row.replace(bytes, counts, self.in_flight.others_mut());
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
        row.count(counts, self.in_flight.others_mut())
    }

    /// Makes each pick of this process stand for one pick of each of `proxies` other proxies until
    /// it is `delay_us` old: see [`scheduler::in_flight::PeerLoads`].
    pub fn estimate_peer_picks(&mut self, proxies: u32, delay_us: u64, now: Timestamp) {
        let proxies = self.queues.stands_for(proxies);
        self.in_flight
            .others_mut()
            .stand_for(proxies, delay_us, now.us_since(Timestamp(0)));
    }

    /// Computes the lowest SLOs of others again, from all their reports.
    pub fn recompute_peer_slos<'r>(&mut self, rows: impl IntoIterator<Item = &'r PeerLoadReport>) {
        let others = self.in_flight.others_mut();
        others.forget_slos();
        rows.into_iter().for_each(|row| row.add_slos_to(others));
    }

    /// Counts all reports of others again: after [`Self::install`], when endpoints have other
    /// generations.
    pub fn recount_load_reports<'r>(&mut self, rows: impl IntoIterator<Item = &'r PeerLoadReport>) {
        let others = self.in_flight.others_mut();
        others.start(self.state.as_ref().map_or(&[], |state| &state.refs));
        rows.into_iter().for_each(|row| row.add_to(others));
    }

    /// Sets the load of all others, summed up elsewhere: for a host that reads no reports.
    pub fn set_peer_loads(&mut self, loads: impl IntoIterator<Item = (EndpointRef, EndpointLoad)>) {
        self.recount_load_reports([]);
        let others = self.in_flight.others_mut();
        loads
            .into_iter()
            .for_each(|(endpoint, load)| others.add(endpoint, load));
        self.queues.others_freed();
    }

    /// Applies another worker's record of an endpoint's failures.
    pub fn learn_ejection(&mut self, ejection: Ejection, now: Timestamp) {
        if self.knows(ejection.endpoint) && self.failures.ejections.learn(ejection, now) {
            self.sharing.changes += 1;
        }
    }

    /// Records that another worker or proxy sent `endpoint` a prompt of these blocks. A single
    /// block that is a mark is no prompt: see [`Placement::blocks`].
    pub fn record_peer_placement(&mut self, endpoint: EndpointRef, blocks: &[u64], now: Timestamp) {
        let Some(at) = self
            .state
            .as_ref()
            .and_then(|state| state.refs.iter().position(|id| *id == endpoint))
        else {
            return;
        };
        match blocks {
            [mark] if adapters::is_model_mark(*mark) => self.adapters.record_model(at, *mark),
            [mark] if crash_correlation::is_mark(*mark) => {
                self.failures.crashing.record(*mark, endpoint, now);
            }
            [mark] if stored_answers::is_mark(*mark) => self.stored_answers.record(*mark, endpoint),
            _ => {
                self.in_flight.picked(endpoint);
                self.prefixes.record(endpoint, blocks);
            }
        }
    }

    /// Records that `endpoint` gave an answer that it may keep, whose id has this hash.
    pub fn record_stored_answer(&mut self, endpoint: EndpointRef, id: u64) {
        let mark = stored_answers::mark(id);
        self.stored_answers.record(mark, endpoint);
        self.sharing.placements.push(endpoint, &[mark], 0);
        self.sharing.changes += 1;
    }

    /// Sets whether placements of other proxies are missing here. While they are, a prompt that is
    /// cached nowhere goes to the rendezvous endpoint of its head
    /// ([`scheduler::prefix::rendezvous_endpoint`]), as it does in every proxy that misses
    /// placements.
    pub fn set_peers_unreachable(&mut self, unreachable: bool) {
        self.sharing.peers_unreachable = unreachable;
    }

    /// Sets whether placements are kept for publishing.
    pub fn set_placement_publishing(&mut self, wanted: bool) {
        if self.sharing.placements.enabled != wanted {
            self.sharing.placements = PlacementQueue {
                enabled: wanted,
                dropped: self.sharing.placements.dropped,
                ..PlacementQueue::default()
            };
        }
    }

    /// The placements made here since the last call.
    pub fn take_placements(&mut self) -> VecDeque<Placement> {
        self.sharing.placements.blocks = 0;
        std::mem::take(&mut self.sharing.placements.placements)
    }

    /// How many placements were dropped for newer ones because they were not taken in time.
    #[must_use]
    pub fn placements_dropped(&self) -> u64 {
        self.sharing.placements.dropped
    }
}

// === impl PlacementQueue ===

impl PlacementQueue {
    pub(super) fn push(&mut self, endpoint: EndpointRef, blocks: &[u64], known: u32) {
        if !self.enabled {
            return;
        }
        // A placement without blocks still counts as a request: its prompt is not read, or shorter
        // than a block.
        self.blocks += blocks.len().max(1);
        self.placements.push_back(Placement {
            endpoint,
            blocks: blocks.into(),
            known,
        });
        while self.blocks > QUEUED_BLOCKS_MAX {
            let Some(oldest) = self.placements.pop_front() else {
                return;
            };
            self.blocks -= oldest.blocks.len().max(1);
            self.dropped += 1;
        }
    }
}
