//! The running requests with an SLO at each endpoint, the strictest SLO first. Each request has its
//! prediction and its measured latency.
//!
//! A request is in the queue of its endpoint from the pick to the end of the request. The lowest
//! SLOs of the queue are part of the endpoint's [`EndpointLoad`](super::EndpointLoad), which is
//! reported to all workers and proxies.

use crate::latency::Prediction;
use crate::slo::{Slo, TrackedSlo};

/// The maximum number of measured TPOTs kept for each request. Only the newest measurements are
/// needed.
pub const MEASURED_MAX: usize = 8;

/// One running request with an SLO.
#[derive(Clone, Debug, PartialEq)]
pub struct RunningRequest {
    /// The number of the request in this ledger.
    pub id: u64,
    /// The request id that operators know; empty if the request has none.
    pub request_id: Box<str>,
    pub slo: Slo,
    /// The prediction at the time when the request was sent.
    pub predicted: Option<Prediction>,
    /// The measured TTFT in ms; `None` while the request waits for its first token.
    pub ttft_ms: Option<f32>,
    /// The measured times per token after the first token, in ms, oldest first. The list has at
    /// most [`MEASURED_MAX`] times.
    pub tpots_ms: Vec<f32>,
    /// The SLOs of the request that later picks have to respect: those that its endpoint could
    /// meet.
    counts: Slo,
    waits: bool,
}

/// The key of a request in the queues. The key does not depend on the request's endpoint.
#[derive(Clone, Copy, Debug)]
pub(super) struct RunningKey {
    pub(super) id: u64,
    pub(super) promise: TrackedSlo,
}

/// The queues of all endpoints.
#[derive(Debug, Default)]
pub(super) struct RunningQueues {
    by_slot: Vec<Vec<RunningRequest>>,
    numbered: u64,
}

// === impl RunningRequest ===

impl RunningRequest {
    /// Returns the sort key: requests with stricter SLOs come first, requests without an SLO last,
    /// and older requests before younger requests.
    fn order(&self) -> (u32, u32, u64) {
        (
            self.slo.tpot_us.unwrap_or(u32::MAX),
            self.slo.ttft_us.unwrap_or(u32::MAX),
            self.id,
        )
    }

    /// Returns the SLOs that later picks have to respect. The TTFT SLO is among these SLOs only
    /// while the request waits for its first token.
    fn keeps(&self) -> Slo {
        Slo {
            ttft_us: self.counts.ttft_us.filter(|_| self.waits),
            ..self.counts
        }
    }
}

// === impl RunningQueues ===

impl RunningQueues {
    /// Assigns a key to a request with this SLO and prediction.
    pub(super) fn number(&mut self, promise: TrackedSlo) -> RunningKey {
        self.numbered += 1;
        RunningKey {
            id: self.numbered,
            promise,
        }
    }

    pub(super) fn add(&mut self, slot: u16, entry: RunningKey, request_id: Box<str>, waits: bool) {
        let slot = usize::from(slot);
        if self.by_slot.len() <= slot {
            self.by_slot.resize(slot + 1, Vec::new());
        }
        let TrackedSlo {
            slo,
            counts,
            predicted,
        } = entry.promise;
        let running = RunningRequest {
            id: entry.id,
            request_id,
            slo,
            predicted,
            ttft_ms: None,
            tpots_ms: Vec::new(),
            counts,
            waits,
        };
        if let Some(queue) = self.by_slot.get_mut(slot) {
            let at = queue.partition_point(|other| other.order() < running.order());
            queue.insert(at, running);
        }
    }

    /// Removes a request, and returns the request id that operators know.
    pub(super) fn remove(&mut self, slot: u16, id: u64) -> Box<str> {
        let Some(queue) = self.by_slot.get_mut(usize::from(slot)) else {
            return Box::default();
        };
        let at = queue.iter().position(|running| running.id == id);
        at.map(|at| queue.remove(at).request_id).unwrap_or_default()
    }

    /// Records that the first token of a request was sent.
    pub(super) fn started(&mut self, slot: u16, id: u64) {
        if let Some(running) = self.find(slot, id) {
            running.waits = false;
        }
    }

    pub(super) fn first_token_took(&mut self, slot: u16, id: u64, ms: f32) {
        if let Some(running) = self.find(slot, id) {
            running.ttft_ms = Some(ms);
        }
    }

    pub(super) fn tokens_took(&mut self, slot: u16, id: u64, ms: f32) {
        if let Some(running) = self.find(slot, id) {
            if running.tpots_ms.len() >= MEASURED_MAX {
                running.tpots_ms.remove(0);
            }
            running.tpots_ms.push(ms);
        }
    }

    /// Empties the queue of a slot, because another generation starts at this slot.
    pub(super) fn clear(&mut self, slot: u16) {
        if let Some(queue) = self.by_slot.get_mut(usize::from(slot)) {
            queue.clear();
        }
    }

    pub(super) fn queue(&self, slot: u16) -> &[RunningRequest] {
        self.by_slot
            .get(usize::from(slot))
            .map_or(&[], Vec::as_slice)
    }

    /// Returns the strictest SLOs that later picks have to respect at this slot.
    pub(super) fn lowest(&self, slot: u16) -> Slo {
        self.queue(slot)
            .iter()
            .fold(Slo::default(), |lowest, running| {
                lowest.strictest(running.keeps())
            })
    }

    fn find(&mut self, slot: u16, id: u64) -> Option<&mut RunningRequest> {
        self.by_slot
            .get_mut(usize::from(slot))?
            .iter_mut()
            .find(|running| running.id == id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::{EndpointRef, Generation, Slot};
    use crate::in_flight::{InFlight, InFlightTicket};
    use proptest::prelude::*;

    fn endpoint(slot: u16, generation: u32) -> EndpointRef {
        EndpointRef {
            slot: Slot(slot),
            generation: Generation(generation),
        }
    }

    fn slo(ttft_us: u32, tpot_us: u32) -> Slo {
        let some = |us| (us > 0).then_some(us);
        Slo {
            ttft_us: some(ttft_us),
            tpot_us: some(tpot_us),
        }
    }

    fn promise(slo: Slo) -> TrackedSlo {
        TrackedSlo {
            slo,
            counts: slo,
            predicted: None,
        }
    }

    fn tracked(ledger: &mut InFlight, at: EndpointRef, asked: Slo) -> InFlightTicket {
        let mut ticket = ledger.admit(at, 10);
        ledger.track(&mut ticket, promise(asked), "");
        ticket
    }

    fn lowest(ledger: &InFlight, at: EndpointRef) -> Slo {
        let load = ledger.load(at);
        Slo {
            ttft_us: load.ttft_slo_us,
            tpot_us: load.tpot_slo_us,
        }
    }

    #[test]
    fn the_strictest_comes_first_and_each_is_shown_with_all_that_is_known_of_it() {
        let a = endpoint(3, 1);
        let mut ledger = InFlight::default();
        let loose = tracked(&mut ledger, a, slo(9_000, 80_000));
        let strict = tracked(&mut ledger, a, slo(0, 20_000));
        let mut middle = ledger.admit(a, 5);
        let predicted = Prediction {
            ttft_ms: 10.0,
            tpot_ms: 15.0,
            ttft_p90_ms: 20.0,
            tpot_p90_ms: 25.0,
        };
        let asked = slo(500, 50_000);
        ledger.track(
            &mut middle,
            TrackedSlo {
                slo: asked,
                counts: asked,
                predicted: Some(predicted),
            },
            "",
        );
        let unasked = ledger.admit(a, 1);
        let ids = |ledger: &InFlight| {
            ledger
                .running(a)
                .iter()
                .map(|running| running.id)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            ids(&ledger),
            [2, 3, 1],
            "by SLO; one without any is in no queue"
        );
        ledger.first_token(&mut middle, 5);
        ledger.first_token_took(&middle, 12.5);
        (0_u16..10).for_each(|ms| ledger.tokens_took(&middle, f32::from(ms)));
        let shown = &ledger.running(a)[1];
        assert_eq!(
            (shown.slo, shown.predicted, shown.ttft_ms),
            (asked, Some(predicted), Some(12.5))
        );
        assert_eq!(
            shown.tpots_ms,
            [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0],
            "the newest"
        );
        assert_eq!(
            ledger.running(endpoint(3, 2)).len(),
            0,
            "another life has its own"
        );
        [loose, strict, middle, unasked]
            .into_iter()
            .for_each(|ticket| ledger.release(ticket));
        assert_eq!((ids(&ledger), ledger.rows().count()), (vec![], 0));
    }

    #[test]
    fn the_lowest_slo_is_that_of_requests_that_still_wait_for_it() {
        let a = endpoint(3, 1);
        let b = endpoint(4, 1);
        let mut ledger = InFlight::default();
        let mut strict = tracked(&mut ledger, a, slo(100, 20));
        let loose = tracked(&mut ledger, a, slo(900, 50));
        assert_eq!(lowest(&ledger, a), slo(100, 20));
        ledger.first_token(&mut strict, 10);
        assert_eq!(
            lowest(&ledger, a),
            slo(900, 20),
            "its first token came; its others are still to come"
        );
        ledger.transfer(&mut strict, b);
        assert_eq!(
            (lowest(&ledger, a), lowest(&ledger, b)),
            (slo(900, 50), slo(0, 20)),
            "a retry takes its SLO along"
        );
        ledger.release(strict);
        ledger.release(loose);
        assert_eq!(
            (lowest(&ledger, a), lowest(&ledger, b)),
            (slo(0, 0), slo(0, 0))
        );
    }

    #[test]
    fn an_slo_that_no_endpoint_can_meet_does_not_count() {
        let a = endpoint(3, 1);
        let mut ledger = InFlight::default();
        let mut greedy = ledger.admit(a, 10);
        ledger.track(
            &mut greedy,
            TrackedSlo {
                slo: slo(1, 1),
                counts: slo(0, 1),
                predicted: None,
            },
            "",
        );
        let modest = tracked(&mut ledger, a, slo(700, 50));
        assert_eq!(lowest(&ledger, a), slo(700, 1), "each SLO by itself");
        assert_eq!(ledger.running(a)[0].slo, slo(1, 1), "it is still shown");
        ledger.release(greedy);
        ledger.release(modest);
    }

    #[test]
    fn a_crashed_endpoint_has_no_slos_to_keep() {
        let old = endpoint(3, 1);
        let new = endpoint(3, 2);
        let mut ledger = InFlight::default();
        let mut before = tracked(&mut ledger, old, slo(100, 20));
        let after = tracked(&mut ledger, new, slo(900, 50));
        assert_eq!(
            (lowest(&ledger, old), lowest(&ledger, new)),
            (slo(0, 0), slo(900, 50))
        );
        ledger.first_token(&mut before, 10);
        ledger.release(before);
        assert_eq!(
            (lowest(&ledger, new), ledger.running(new).len()),
            (slo(900, 50), 1)
        );
        ledger.release(after);
        assert_eq!(ledger.rows().count(), 0);
    }

    #[derive(Clone, Debug)]
    enum QueueOp {
        Admit(u16, u32, u32),
        Restart(u16),
        FirstToken(prop::sample::Index),
        Transfer(prop::sample::Index, u16),
        Release(prop::sample::Index),
    }

    const SLOTS: u16 = 3;

    fn op() -> impl Strategy<Value = QueueOp> {
        let index = any::<prop::sample::Index>;
        prop_oneof![
            4 => (0..SLOTS, 0..50_u32, 0..50_u32).prop_map(|(slot, ttft, tpot)| QueueOp::Admit(slot, ttft, tpot)),
            1 => (0..SLOTS).prop_map(QueueOp::Restart),
            2 => index().prop_map(QueueOp::FirstToken),
            2 => (index(), 0..SLOTS).prop_map(|(at, slot)| QueueOp::Transfer(at, slot)),
            3 => index().prop_map(QueueOp::Release),
        ]
    }

    proptest! {
        /// Checks that after each sequence of operations, the lowest SLOs are those of the live
        /// requests, that no live request is lost, and that no ended request stays.
        #[test]
        fn the_lowest_slos_are_those_of_live_requests(ops in prop::collection::vec(op(), 0..100)) {
            let mut ledger = InFlight::default();
            let mut lives = vec![1_u32; usize::from(SLOTS)];
            // Each ticket with the endpoint that counts it, its SLO, and whether it waits for its
            // first token.
            let mut live: Vec<(InFlightTicket, EndpointRef, Slo, bool)> = Vec::new();
            for op in ops {
                match op {
                    QueueOp::Admit(slot, ttft, tpot) => {
                        let at = endpoint(slot, lives[usize::from(slot)]);
                        live.push((tracked(&mut ledger, at, slo(ttft, tpot)), at, slo(ttft, tpot), true));
                    }
                    QueueOp::Restart(slot) => {
                        lives[usize::from(slot)] += 1;
                        let at = endpoint(slot, lives[usize::from(slot)]);
                        live.push((tracked(&mut ledger, at, slo(0, 0)), at, slo(0, 0), true));
                    }
                    QueueOp::FirstToken(at) if !live.is_empty() => {
                        let (ticket, _, _, waits) = at.get_mut(&mut live);
                        *waits = false;
                        ledger.first_token(ticket, 10);
                    }
                    QueueOp::Transfer(at, slot) if !live.is_empty() => {
                        let (ticket, from, ..) = at.get_mut(&mut live);
                        *from = endpoint(slot, lives[usize::from(slot)]);
                        ledger.transfer(ticket, *from);
                    }
                    QueueOp::Release(at) if !live.is_empty() => {
                        let (ticket, ..) = live.swap_remove(at.index(live.len()));
                        ledger.release(ticket);
                    }
                    _ => {}
                }
                for slot in 0..SLOTS {
                    let at = endpoint(slot, lives[usize::from(slot)]);
                    let there = || live.iter().filter(|(_, from, ..)| *from == at);
                    let ttft = there().filter(|(.., waits)| *waits).filter_map(|(_, _, slo, _)| slo.ttft_us).min();
                    let tpot = there().filter_map(|(_, _, slo, _)| slo.tpot_us).min();
                    prop_assert_eq!(lowest(&ledger, at), Slo { ttft_us: ttft, tpot_us: tpot });
                    prop_assert_eq!(ledger.running(at).len(), there().filter(|(_, _, slo, _)| slo.any()).count());
                }
            }
            live.into_iter().for_each(|(ticket, ..)| ledger.release(ticket));
            prop_assert_eq!(ledger.rows().count(), 0);
        }
    }
}
