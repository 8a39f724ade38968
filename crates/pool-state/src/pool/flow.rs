//! Flow control of a pool: when queued requests are tried again, and the order of all VMs.

use scheduler::flow::{FlowControl, RoomLimits, SharedOrder, UsageCeiling};
use scheduler::{EndpointRef, LocalState, Timestamp};

use super::endpoints::Endpoints;
use super::{LedgerHold, ManagedPool};
use crate::queues::{FlowCharge, FlowOutcome, FlowQueues, FlowTurn, QueuedTicket};

// === impl ManagedPool ===

impl ManagedPool {
    /// The rules of flow control; `None` where it is off.
    #[must_use]
    pub fn flow_control(&self) -> Option<&FlowControl> {
        flow_control(&self.endpoints)
    }

    /// The queues, for changes.
    pub fn queues_mut(&mut self) -> &mut FlowQueues {
        &mut self.queues
    }

    /// The queues of the requests that flow control holds.
    #[must_use]
    pub fn queues(&self) -> &FlowQueues {
        &self.queues
    }

    /// Whether a host must call [`Self::next_due`].
    #[must_use]
    pub fn has_due(&self) -> bool {
        self.queues.is_due() || self.queues.has_freed()
    }

    /// Checks the endpoints where requests made room. If any request fits there, a pass over the
    /// queued requests begins. A host that shares its queues must first publish its load and read
    /// the load of the other VMs, because each of two VMs may free a part of what a request needs.
    pub fn look_at_freed(&mut self, now: Timestamp) {
        if self.has_freed_room(now) {
            self.queues.room_changed();
        }
        self.queues.forget_freed();
    }

    /// Whether any request fits at an endpoint where requests made room.
    #[must_use]
    pub fn has_freed_room(&self, now: Timestamp) -> bool {
        self.queues
            .freed()
            .iter()
            .any(|endpoint| !self.is_full(*endpoint, RoomLimits::ALL, now))
    }

    /// Whether no request fits at the endpoint, even the smallest one. Returns false if that is not
    /// certain: if requests have stages at several endpoints, or if the limit differs from try to
    /// try.
    #[inline(never)] // several callers, and the wasm module should be small
    pub(super) fn is_full(
        &self,
        endpoint: EndpointRef,
        limits: RoomLimits,
        now: Timestamp,
    ) -> bool {
        let Some(state) = &self.endpoints.state else {
            return false;
        };
        let is_certain = matches!(limits.ceiling, UsageCeiling::Fixed(_))
            && !state.snapshot.pipeline().disaggregates();
        let index = state
            .snapshot
            .table()
            .indices()
            .zip(&state.refs)
            .find(|(_, known)| **known == endpoint);
        let Some((index, _)) = index.filter(|_| is_certain) else {
            return false;
        };
        let local = LocalState {
            metrics_stale: state.metrics_stale(now),
            ..LocalState::new(&self.ledger.in_flight)
        };
        scheduler::is_full(&state.snapshot, local, index, limits)
    }

    /// The number of the next held request that its host must resume; `None` if there is none for
    /// now. Call it repeatedly until it returns `None`.
    pub fn next_due(&mut self, now: Timestamp) -> Option<u64> {
        self.look_at_freed(now);
        let control = flow_control(&self.endpoints);
        match control {
            Some(control) => self.queues.next_due(control, now),
            None => {
                self.queues.end_all(now);
                self.queues.next_to_resume()
            }
        }
    }

    /// Records that the request has its first response byte, so it can no longer be given up.
    pub fn record_first_byte(&mut self, held: &mut LedgerHold) {
        held.revocable
            .take()
            .into_iter()
            .for_each(|number| self.queues.forget(number));
    }

    /// If the request must be given up, returns when its client may try again, in seconds; the
    /// caller then ends it. `None` if the request continues.
    pub fn take_revoked(&mut self, held: &LedgerHold) -> Option<u32> {
        self.queues.take_marked(held.revocable?)
    }

    /// Reads from `order` which requests the other VMs hold.
    pub fn read_order(&mut self, order: &SharedOrder, vm: u64, now: Timestamp) {
        if let Some(control) = flow_control(&self.endpoints) {
            self.queues.read_order(control, order, vm, now);
            self.queues.enter_round(order);
        }
    }

    /// Decides on the next step of the host for held requests, while [`FlowQueues::is_shared`]. The
    /// host has read `order` just before. `may_resume` says whether the host may resume a request
    /// now.
    pub fn flow_turn(
        &mut self,
        order: &mut SharedOrder,
        vm: u64,
        may_resume: bool,
        now: Timestamp,
    ) -> FlowTurn {
        match flow_control(&self.endpoints) {
            Some(control) => self.queues.turn(control, order, vm, may_resume, now),
            None => {
                self.queues.end_all(now);
                self.queues.turn_without_control(may_resume)
            }
        }
    }

    /// Writes the requests that this VM holds into the order. Returns the VM to wake after the
    /// order is written.
    pub fn write_order(&mut self, order: &mut SharedOrder, vm: u64, now: Timestamp) -> Option<u64> {
        let control = flow_control(&self.endpoints);
        control.and_then(|control| self.queues.write_order(control, order, vm, now))
    }

    /// Forgets a held request whose client left.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "taking the ticket is what rules out a second end"
    )]
    pub fn drop_queued(&mut self, ticket: QueuedTicket, now: Timestamp) {
        self.queues
            .remove(&ticket, FlowOutcome::EvictedContextCancelled, now);
    }

    /// Corrects the charge of a request that has ended or is suspended.
    #[inline(never)] // several callers, and the wasm module should be small
    pub(super) fn settle_charge(&mut self, charge: FlowCharge, context_tokens: u64) {
        let control = flow_control(&self.endpoints);
        if let Some(control) = control {
            self.queues.settle(control, charge, context_tokens);
        }
    }

    /// Gives up held requests whose time is over, and tries the others again. This covers wake-ups
    /// that were lost.
    pub(super) fn tick_queues(&mut self, now: Timestamp) {
        if !self.queues.is_empty() {
            let is_empty = self.snapshot().is_none_or(|snapshot| !snapshot.has_ready());
            self.queues.expire(is_empty, now);
            self.queues.room_changed();
        }
    }
}

/// The rules of flow control; `None` where it is off.
pub(super) fn flow_control(endpoints: &Endpoints) -> Option<&FlowControl> {
    endpoints.snapshot()?.pipeline().flow_control()
}
