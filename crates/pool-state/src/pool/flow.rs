//! Flow control of a pool: holds a request whose endpoint has no room, and sends it later.

use scheduler::flow::{
    BandHeld, FlowControl, FlowCost, RoomAsk, RoomLimits, SharedOrder, UsageCeiling,
};
use scheduler::{EndpointRef, LocalState, Request, Timestamp};

use super::{DecisionObserver, LedgerHold, ManagedPool, RecordedPick};
use crate::queues::{ClaimedEntry, FlowArrival, FlowOutcome, FlowQueues, FlowTurn, HeldTicket};
use crate::refusal::PickRefusal;

/// The result for a request that arrives.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "without flow control every request is picked, and a box would be an allocation for each"
)]
pub enum FlowAdmission {
    /// An endpoint was picked.
    Picked(RecordedPick),
    /// The request is held.
    Held(HeldTicket),
}

/// A pick for a held request that no other VM may make too: [`ManagedPool::settle_claim`] must
/// follow.
#[derive(Debug)]
pub struct HeldClaim {
    picked: RecordedPick,
    entry: ClaimedEntry,
}

/// The request that seeks room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RoomSeeker {
    /// A request that arrives. If it needs a claim, it is not sent now.
    Arrival { needs_claim: bool },
    /// The held request of this number.
    Held(u64),
}

/// The limits for a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct RoomCheck {
    pub(super) limits: RoomLimits,
    /// Whether room is left to other proxies for a while.
    pub(super) is_over_share: bool,
    pub(super) seeker: RoomSeeker,
}

// === impl ManagedPool ===

impl ManagedPool {
    /// The rules of flow control; `None` where it is off.
    #[must_use]
    pub fn flow_control(&self) -> Option<&FlowControl> {
        self.snapshot()?.pipeline().flow_control()
    }

    /// The requests held.
    #[must_use]
    pub fn queues(&self) -> &FlowQueues {
        &self.queues
    }

    /// Whether a host must call [`Self::next_due`].
    #[must_use]
    pub fn has_due(&self) -> bool {
        self.queues.is_due() || self.queues.has_freed()
    }

    /// Looks at the endpoints where requests made room: a pass begins if any request fits there. A
    /// host that shares its queues publishes its load and reads the others' before, because each
    /// of two VMs may free a part of what a request needs.
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

    /// Whether no request fits at the endpoint, however small. False where that is not certain:
    /// with stages at several endpoints, and with a limit that differs from try to try.
    pub(super) fn is_full(
        &self,
        endpoint: EndpointRef,
        limits: RoomLimits,
        now: Timestamp,
    ) -> bool {
        let Some(state) = &self.state else {
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
            ..LocalState::new(&self.in_flight)
        };
        scheduler::is_full(&state.snapshot, local, index, limits)
    }

    /// The number of the next held request that its host must resume; `None` if there is none for
    /// now. Call it until then.
    pub fn next_due(&mut self, now: Timestamp) -> Option<u64> {
        self.look_at_freed(now);
        let control = self
            .state
            .as_ref()
            .and_then(|state| state.snapshot.pipeline().flow_control());
        match control {
            Some(control) => self.queues.next_due(control, now),
            None => {
                self.queues.end_all(now);
                self.queues.next_to_resume()
            }
        }
    }

    /// Picks like [`Self::pick`], or holds the request until its endpoint has room. Without flow
    /// control, no request is held.
    ///
    /// # Errors
    /// Why the request is refused.
    pub fn pick_or_hold(
        &mut self,
        request: &Request<'_>,
        model: &str,
        arrival: &FlowArrival<'_>,
        now: Timestamp,
        observer: &mut impl DecisionObserver,
    ) -> Result<FlowAdmission, PickRefusal> {
        if self.flow_control().is_none() {
            return self
                .pick(request, model, now, observer)
                .map(FlowAdmission::Picked);
        }
        // A request that needs a claim is held first, if only for a moment.
        let is_shared = self.queues.is_shared();
        let mut full_at = None;
        let mut lacks_room = false;
        let mut is_full = false;
        if is_shared || self.queues.may_pass(request.priority, now) {
            match self.pick_with_room(
                request,
                model,
                RoomSeeker::Arrival {
                    needs_claim: is_shared,
                },
                now,
                observer,
            ) {
                Err(PickRefusal::Full(endpoint)) => {
                    full_at = Some(endpoint);
                    lacks_room = true;
                    is_full = true;
                }
                Err(PickRefusal::TooLarge(endpoint)) => {
                    full_at = Some(endpoint);
                    lacks_room = true;
                }
                Err(PickRefusal::Left(endpoint)) => full_at = Some(endpoint),
                Err(refusal) if refusal.is_without_endpoints() && self.waits_for_first() => {}
                picked => {
                    let picked = self.charged(picked?, request, (arrival.flow_id(), true), now);
                    return Ok(FlowAdmission::Picked(self.watched(picked, None)));
                }
            }
        } else {
            self.check_final(request, now, observer)?;
        }
        let cost = FlowCost {
            prompt: f64::from(request.prompt_tokens),
            output: self.expected_output(request),
        };
        let Some(control) = self
            .state
            .as_ref()
            .and_then(|state| state.snapshot.pipeline().flow_control())
        else {
            return Err(PickRefusal::NoState);
        };
        let held = self.queues.hold(
            control,
            (arrival, request.priority, request.slo.ttft_us, cost),
            full_at,
            now,
        );
        let (ticket, is_near) = held.map_err(PickRefusal::Held)?;
        match full_at.filter(|_| is_full) {
            Some(endpoint) => {
                self.found_full(&ticket, endpoint, now);
                // Another VM that made room since may not know that this one holds a request.
                if self.queues.is_shared() {
                    self.queues.room_freed(endpoint);
                }
            }
            None => self.queues.look(),
        }
        if lacks_room {
            self.ask_for_room(&ticket, (full_at, is_full), now);
        }
        // The first of its band was tried just now.
        if is_shared || !is_near || ticket.is_first {
            return Ok(FlowAdmission::Held(ticket));
        }
        let picked = self.pick_held(&ticket, request, model, now, observer)?;
        Ok(picked.map_or(FlowAdmission::Held(ticket), FlowAdmission::Picked))
    }

    /// Whether requests wait while no endpoint of the pool is ready: a pool that scales from zero.
    fn waits_for_first(&self) -> bool {
        self.flow_control()
            .is_some_and(|control| control.no_endpoint_ttl_ms() > 0)
    }

    /// Whether waiting cannot help the request. It is refused at once then, with and without flow
    /// control.
    pub(super) fn is_final(&self, refusal: &PickRefusal) -> bool {
        refusal.is_final() || refusal.is_without_endpoints() && !self.waits_for_first()
    }

    /// Picks for a held request, where no other VM picks; `None` if it stays held.
    ///
    /// # Errors
    /// Why the request is refused. It is not held any more.
    pub fn pick_held(
        &mut self,
        ticket: &HeldTicket,
        request: &Request<'_>,
        model: &str,
        now: Timestamp,
        observer: &mut impl DecisionObserver,
    ) -> Result<Option<RecordedPick>, PickRefusal> {
        let claim = self.claim_held(ticket, request, model, now, observer)?;
        Ok(claim.and_then(|claim| self.settle_claim(ticket, claim, true, &[], now)))
    }

    /// Picks for a held request and publishes nothing: the host does, and says in
    /// [`Self::settle_claim`] whether the room is this request's. `None` if it stays held.
    ///
    /// # Errors
    /// Why the request is refused. It is not held any more.
    pub fn claim_held(
        &mut self,
        ticket: &HeldTicket,
        request: &Request<'_>,
        model: &str,
        now: Timestamp,
        observer: &mut impl DecisionObserver,
    ) -> Result<Option<HeldClaim>, PickRefusal> {
        if let Some(refusal) = self.queues.take_refusal(ticket.number) {
            return Err(PickRefusal::Held(refusal));
        }
        if self.queues.take_to_check(ticket) {
            let checked = self.check_final(request, now, observer);
            return checked
                .map(|()| None)
                .inspect_err(|refusal| self.given_up(ticket, refusal, now));
        }
        match self.pick_with_room(
            request,
            model,
            RoomSeeker::Held(ticket.number),
            now,
            observer,
        ) {
            Ok(picked) => {
                let Some(entry) = self.queues.take_for_claim(ticket) else {
                    self.take_back(picked.hold, &[]);
                    return Err(PickRefusal::NoState);
                };
                let picked = self.charged(picked, request, (ticket.flow_id(), false), now);
                Ok(Some(HeldClaim { picked, entry }))
            }
            Err(PickRefusal::Full(endpoint)) => {
                self.found_full(ticket, endpoint, now);
                self.ask_for_room(ticket, (Some(endpoint), true), now);
                Ok(None)
            }
            Err(PickRefusal::TooLarge(endpoint)) => {
                self.queues.found_full(ticket, Some(endpoint), now);
                self.ask_for_room(ticket, (Some(endpoint), false), now);
                Ok(None)
            }
            Err(PickRefusal::Left(endpoint)) => {
                self.queues.found_full(ticket, Some(endpoint), now);
                Ok(None)
            }
            Err(refusal)
                if refusal == PickRefusal::NoState
                    || refusal.is_without_endpoints() && self.waits_for_first() =>
            {
                self.queues.found_full(ticket, None, now);
                Ok(None)
            }
            Err(refusal) => {
                self.given_up(ticket, &refusal, now);
                Err(refusal)
            }
        }
    }

    /// A held request is refused, because waiting cannot help it any more.
    fn given_up(&mut self, ticket: &HeldTicket, refusal: &PickRefusal, now: Timestamp) {
        let is_empty = refusal.is_without_endpoints();
        let outcome = if is_empty {
            FlowOutcome::EvictedNoEndpoints
        } else {
            FlowOutcome::EvictedOther
        };
        self.queues.remove(ticket, outcome, now);
    }

    /// The endpoint has no room for any request of the band of this one.
    fn found_full(&mut self, ticket: &HeldTicket, endpoint: EndpointRef, now: Timestamp) {
        self.queues.found_full(ticket, Some(endpoint), now);
        self.queues.endpoint_full(endpoint, ticket.priority());
    }

    /// Ends a claim. Returns the pick if the room is the request's; otherwise it stays held.
    /// `blocks` are those of its prompt.
    pub fn settle_claim(
        &mut self,
        ticket: &HeldTicket,
        claim: HeldClaim,
        is_claimed: bool,
        blocks: &[u64],
        now: Timestamp,
    ) -> Option<RecordedPick> {
        let HeldClaim { picked, entry } = claim;
        if is_claimed {
            self.queues.claimed(ticket, &entry, now);
            return Some(self.watched(picked, Some(ticket.number)));
        }
        self.queues.put_back(ticket, entry);
        self.take_back(picked.hold, blocks);
        None
    }

    /// A request was sent: with eviction, it may be given up until its first byte. `number` is its
    /// number, if it was held.
    fn watched(&mut self, mut picked: RecordedPick, number: Option<u64>) -> RecordedPick {
        let charge = picked
            .hold
            .charge
            .filter(|_| self.flow_control().is_some_and(FlowControl::evicts));
        picked.hold.revocable =
            charge.and_then(|charge| self.queues.watch(&charge, picked.hold.endpoint(), number));
        picked
    }

    /// The request has its first response byte: it is not given up any more.
    pub fn record_first_byte(&mut self, held: &mut LedgerHold) {
        held.revocable
            .take()
            .into_iter()
            .for_each(|number| self.queues.forget(number));
    }

    /// Takes a request that must be given up; the caller then ends it. Returns when its client may
    /// try again, in seconds; `None` if it goes on.
    pub fn take_revoked(&mut self, held: &LedgerHold) -> Option<u32> {
        self.queues.take_marked(held.revocable?)
    }

    /// A held request found no room at this endpoint: with eviction, a running one may be given up
    /// for it.
    fn ask_for_room(
        &mut self,
        ticket: &HeldTicket,
        (endpoint, is_full): (Option<EndpointRef>, bool),
        now: Timestamp,
    ) {
        if let Some(pipeline) = self
            .snapshot()
            .map(|snapshot| snapshot.pipeline())
            .filter(|pipeline| pipeline.flow_control().is_some_and(FlowControl::evicts))
        {
            let endpoint = endpoint.filter(|_| pipeline.needs_room_at_endpoint());
            self.queues.ask_for_room(ticket, (endpoint, is_full), now);
        }
    }

    /// Another VM asks for room. False if a further one must be asked: no running request is given
    /// up here. The caller knows by the load reports whether any request waits.
    pub fn give_room(&mut self, ask: RoomAsk, now: Timestamp) -> bool {
        !self.queues.any_held() || self.queues.give_up_for(ask, now)
    }

    /// Takes the asks for room that other VMs of the process must hear.
    pub fn take_asks(&mut self) -> Vec<RoomAsk> {
        self.queues.take_asks()
    }

    /// Sets whether other VMs serve requests, and whether one of them holds any.
    pub fn set_flow_peers(&mut self, has_peers: bool, others_hold: bool) {
        self.queues.set_peers(has_peers, others_hold);
    }

    /// Reads what the other VMs hold.
    pub fn read_order(&mut self, order: &SharedOrder, vm: u64, now: Timestamp) {
        if let Some(control) = self
            .state
            .as_ref()
            .and_then(|state| state.snapshot.pipeline().flow_control())
        {
            self.queues.read_order(control, order, vm, now);
            self.queues.enter_round(order);
        }
    }

    /// Decides on the next step of the host for held requests, while [`FlowQueues::is_shared`].
    /// `order` was read just now. `may_resume`: the host may resume a request now.
    pub fn flow_turn(
        &mut self,
        order: &mut SharedOrder,
        (vm, may_resume): (u64, bool),
        now: Timestamp,
    ) -> FlowTurn {
        match self
            .state
            .as_ref()
            .and_then(|state| state.snapshot.pipeline().flow_control())
        {
            Some(control) => self.queues.turn(control, order, (vm, may_resume), now),
            None if !may_resume => FlowTurn::WakeSelf,
            None => {
                self.queues.end_all(now);
                self.queues
                    .next_to_resume()
                    .map_or(FlowTurn::Rest, FlowTurn::Resume)
            }
        }
    }

    /// Puts what this VM holds into the order, to be written. Returns the VM to wake after that.
    pub fn write_order(&mut self, order: &mut SharedOrder, vm: u64, now: Timestamp) -> Option<u64> {
        let control = self
            .state
            .as_ref()
            .and_then(|state| state.snapshot.pipeline().flow_control());
        control.and_then(|control| self.queues.write_order(control, order, vm, now))
    }

    /// Leaves held requests to the next tick, because the order cannot be read.
    pub fn rest(&mut self) {
        self.queues.rest();
    }

    /// Records whether the order was written.
    pub fn order_written(&mut self, written: bool) {
        self.queues.order_written(written);
    }

    /// A tick: room that was left to other proxies may be this one's now. Not for a wake-up: VMs
    /// would wake each other for new rounds as long as room is left.
    pub fn retry_left_room(&mut self) {
        self.queues.retry_left_room();
    }

    /// Has the order read soon: another VM woke this one, or a tick has come.
    pub fn look_at_order(&mut self) {
        if self.queues.is_shared() {
            self.queues.look();
        }
    }

    /// Forgets a held request whose client left.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "taking the ticket is what rules out a second end"
    )]
    pub fn drop_held(&mut self, ticket: HeldTicket, now: Timestamp) {
        self.queues
            .remove(&ticket, FlowOutcome::EvictedContextCancelled, now);
    }

    fn pick_with_room(
        &mut self,
        request: &Request<'_>,
        model: &str,
        seeker: RoomSeeker,
        now: Timestamp,
        observer: &mut impl DecisionObserver,
    ) -> Result<RecordedPick, PickRefusal> {
        let control = self
            .state
            .as_ref()
            .and_then(|state| state.snapshot.pipeline().flow_control());
        let limits = control.map_or(RoomLimits::ALL, |control| {
            self.queues.limits(control, request.priority, now)
        });
        let is_over_share = self
            .queues
            .is_over_share(request.priority, || self.running());
        let picked = self.pick_observed(
            request,
            model,
            Some(RoomCheck {
                limits,
                is_over_share,
                seeker,
            }),
            now,
            observer,
        )?;
        // The last room is gone: others need not try.
        let endpoint = picked.hold.endpoint();
        if matches!(seeker, RoomSeeker::Held(_)) && self.is_full(endpoint, limits, now) {
            self.queues.endpoint_full(endpoint, request.priority);
        }
        Ok(picked)
    }

    /// The running requests of all proxies, as far as known.
    fn running(&self) -> u64 {
        let endpoints = self
            .snapshot()
            .map_or(&[][..], |snapshot| snapshot.endpoints());
        endpoints
            .iter()
            .map(|endpoint| u64::from(self.in_flight.load(endpoint.id).requests))
            .sum()
    }

    /// Sets what other proxies hold, how many requests of theirs run, and the age of that in µs.
    pub fn set_outside(&mut self, bands: &[BandHeld], running: u64, delay_us: u64) {
        self.queues.set_outside(bands, (running, delay_us));
    }

    /// Sets how many proxies there are, this one included, if nothing is received from the others;
    /// 0 otherwise.
    pub fn set_alone(&mut self, of: u32) {
        self.queues.set_alone(of);
    }

    /// Whether an older request that waits has a claim on the endpoint.
    pub(super) fn is_claimed(
        &self,
        endpoint: EndpointRef,
        priority: i32,
        check: RoomCheck,
    ) -> bool {
        let number = if let RoomSeeker::Held(number) = check.seeker {
            Some(number)
        } else {
            None
        };
        self.queues.is_claimed(endpoint, priority, number)
    }

    fn expected_output(&self, request: &Request<'_>) -> f64 {
        let mean = self
            .snapshot()
            .map_or(0.0, |snapshot| f64::from(snapshot.step().output_tokens()));
        request
            .max_tokens
            .map_or(mean, |max| mean.min(f64::from(max)))
    }

    /// Charges the flow of a request that was picked; `passes`: without being held.
    fn charged(
        &mut self,
        mut picked: RecordedPick,
        request: &Request<'_>,
        (flow, passes): (u64, bool),
        now: Timestamp,
    ) -> RecordedPick {
        let output = self.expected_output(request);
        let Some(control) = self
            .state
            .as_ref()
            .and_then(|state| state.snapshot.pipeline().flow_control())
        else {
            return picked;
        };
        #[expect(
            clippy::cast_precision_loss,
            reason = "token counts stay far below 2^52"
        )]
        let cost = FlowCost {
            prompt: picked.hold.load().prefills.uncached_tokens as f64,
            output,
        };
        picked.hold.charge = self.queues.charge(
            control,
            (flow, request.priority, passes),
            (request.prompt_tokens, cost),
            now,
        );
        picked
    }

    /// Settles the charge of a request that has ended.
    pub(super) fn settle_charge(&mut self, charge: crate::queues::FlowCharge, context_tokens: u64) {
        let control = self
            .state
            .as_ref()
            .and_then(|state| state.snapshot.pipeline().flow_control());
        if let Some(control) = control {
            self.queues.settle(control, charge, context_tokens);
        }
    }

    /// Gives up held requests whose time is over, and tries the others again: the net under lost
    /// wake-ups.
    pub(super) fn tick_queues(&mut self, now: Timestamp) {
        if !self.queues.is_empty() {
            let is_empty = self.snapshot().is_none_or(|snapshot| !snapshot.has_ready());
            self.queues.expire(is_empty, now);
            self.queues.room_changed();
        }
    }
}
