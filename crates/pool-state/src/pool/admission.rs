//! Decides whether a planned request may go now, or waits until its endpoint has room. Without flow
//! control, each request may go.

use scheduler::flow::{FlowControl, FlowCost, RoomLimits};
use scheduler::{EndpointRef, Request, Timestamp};

use super::flow::flow_control;
use super::{LedgerHold, ManagedPool, Plan, RecordedPick};
use crate::queues::{ClaimedEntry, FlowArrival, FlowOutcome, QueuedTicket, SentFlow, Waiting};
use crate::refusal::PickRefusal;

/// The decision on a request that arrives or is queued.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "without flow control every request goes, and a box would be an allocation for each"
)]
pub enum FlowAdmission {
    /// The request may go: [`ManagedPool::commit`] records its plan.
    Go(Plan),
    /// The request was queued, and its endpoint has room.
    Claim(Claim),
    /// The request waits.
    Wait(QueuedTicket),
}

/// The room at an endpoint that a queued request tries to take. The request has left its queue, and
/// its load is already in the ledger. The host publishes that load and then writes the order of all
/// VMs' requests, so a reader of the order also sees the load. If no other VM wrote first, the host
/// redeems the claim. Otherwise the host gives the claim back.
#[derive(Debug)]
#[must_use = "the request is in no queue"]
pub struct Claim {
    plan: Plan,
    picked: RecordedPick,
    ticket: QueuedTicket,
    entry: ClaimedEntry,
}

/// The reason why a request may not go to the planned endpoint now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NoRoom {
    /// The endpoint has no room for any request of the band.
    Full,
    /// The endpoint has no room for this request, but may have room for a smaller one.
    TooLarge,
    /// The room is left to an older request, or to another proxy.
    Left,
}

// === impl ManagedPool ===

impl ManagedPool {
    /// Decides whether an arriving request, with its plan, may go now.
    ///
    /// # Errors
    /// Returns the reason why the request is refused.
    pub fn admit(
        &mut self,
        planned: Result<Plan, PickRefusal>,
        request: &Request<'_>,
        arrival: &FlowArrival<'_>,
        now: Timestamp,
    ) -> Result<FlowAdmission, PickRefusal> {
        if self.flow_control().is_none() {
            return planned.map(FlowAdmission::Go);
        }
        // While VMs share an order of queued requests, each request is queued first, often only for
        // a moment.
        let is_shared = self.queues.is_shared();
        let is_tried = is_shared || self.queues.may_pass(request.priority, now);
        let mut no_room = None;
        let planned = match planned {
            Err(refusal) if self.is_final(&refusal) => return Err(refusal),
            Err(refusal) if is_tried && !refusal.is_without_endpoints() => return Err(refusal),
            Ok(mut plan) if is_tried => match self.find_room(&plan, request, None, now) {
                Ok(_) => {
                    plan.flow = Some(arrival.flow_id());
                    return Ok(FlowAdmission::Go(plan));
                }
                Err(why) => {
                    no_room = Some((plan.endpoint, why));
                    Ok(plan)
                }
            },
            planned => planned,
        };
        let queued = self.queue(request, arrival, no_room, now);
        match queued {
            // The first request of its band was tried just now.
            Ok((ticket, is_near)) if !is_shared && is_near && !ticket.is_first => {
                self.admit_queued(ticket, planned, request, now)
            }
            queued => {
                planned.into_iter().for_each(|plan| self.discard(plan));
                queued.map(|(ticket, _)| FlowAdmission::Wait(ticket))
            }
        }
    }

    /// Queues an arriving request. Returns the ticket, and whether the request is so near to the
    /// head of its band that it is tried at once.
    fn queue(
        &mut self,
        request: &Request<'_>,
        arrival: &FlowArrival<'_>,
        no_room: Option<(EndpointRef, NoRoom)>,
        now: Timestamp,
    ) -> Result<(QueuedTicket, bool), PickRefusal> {
        let cost = FlowCost {
            prompt: f64::from(request.prompt_tokens),
            output: self.expected_output(request),
        };
        let control = flow_control(&self.endpoints);
        let waiting = Waiting {
            priority: request.priority,
            ttft_slo_us: request.slo.ttft_us,
            cost,
            full_at: no_room.map(|(endpoint, _)| endpoint),
        };
        let queued = self
            .queues
            .hold(control.ok_or(PickRefusal::NoState)?, arrival, waiting, now);
        let (ticket, is_near) = queued.map_err(PickRefusal::Queue)?;
        match no_room {
            Some((endpoint, NoRoom::Full)) => {
                self.found_no_room(&ticket, endpoint, NoRoom::Full, now);
                // Another VM may have made room since this VM last looked, without knowing that
                // this VM holds a request.
                if self.queues.is_shared() {
                    self.queues.room_freed(endpoint);
                }
            }
            Some((endpoint, NoRoom::TooLarge)) => {
                self.queues.look();
                self.ask_for_room(&ticket, endpoint, NoRoom::TooLarge, now);
            }
            Some((_, NoRoom::Left)) | None => self.queues.look(),
        }
        Ok((ticket, is_near))
    }

    /// Whether requests wait while the pool has no ready endpoint, as in a pool that scales from
    /// zero.
    fn waits_for_first(&self) -> bool {
        self.flow_control()
            .is_some_and(|control| control.no_endpoint_ttl_ms() > 0)
    }

    /// Whether waiting cannot help the request. Such a request is refused at once, with and without
    /// flow control.
    fn is_final(&self, refusal: &PickRefusal) -> bool {
        refusal.is_final() || refusal.is_without_endpoints() && !self.waits_for_first()
    }

    /// Takes the refusal of a queued request whose wait has ended, so that no plan is needed for
    /// it.
    pub fn take_refusal(&mut self, ticket: &QueuedTicket) -> Option<PickRefusal> {
        let refusal = self.queues.take_refusal(ticket.number);
        refusal.map(PickRefusal::Queue)
    }

    /// Decides whether a queued request, with its plan, may go now. While other VMs serve requests
    /// ([`FlowQueues::has_flow_peers`]), the shared order of queued requests decides this.
    ///
    /// # Errors
    /// Returns the reason why the request is refused. After that it is no longer queued.
    pub fn admit_queued(
        &mut self,
        ticket: QueuedTicket,
        planned: Result<Plan, PickRefusal>,
        request: &Request<'_>,
        now: Timestamp,
    ) -> Result<FlowAdmission, PickRefusal> {
        if let Some(refusal) = self.take_refusal(&ticket) {
            planned.into_iter().for_each(|plan| self.discard(plan));
            return Err(refusal);
        }
        let is_checked = self.queues.take_to_check(&ticket);
        let plan = match planned {
            Ok(plan) => plan,
            Err(refusal) if is_checked && !self.is_final(&refusal) => {
                return Ok(FlowAdmission::Wait(ticket));
            }
            Err(refusal)
                if refusal == PickRefusal::NoState
                    || refusal.is_without_endpoints() && self.waits_for_first() =>
            {
                self.queues.found_full(&ticket, None, now);
                return Ok(FlowAdmission::Wait(ticket));
            }
            Err(refusal) => {
                self.given_up(&ticket, &refusal, now);
                return Err(refusal);
            }
        };
        if !is_checked {
            match self.find_room(&plan, request, Some(ticket.number), now) {
                Ok(limits) => return self.claim(ticket, plan, limits, request, now),
                Err(why) => self.found_no_room(&ticket, plan.endpoint, why, now),
            }
        }
        self.discard(plan);
        Ok(FlowAdmission::Wait(ticket))
    }

    /// Refuses a queued request because waiting can no longer help it.
    fn given_up(&mut self, ticket: &QueuedTicket, refusal: &PickRefusal, now: Timestamp) {
        let outcome = if refusal.is_without_endpoints() {
            FlowOutcome::EvictedNoEndpoints
        } else {
            FlowOutcome::EvictedOther
        };
        self.queues.remove(ticket, outcome, now);
    }

    /// Records that a queued request may not go to the planned endpoint now.
    #[inline(never)] // several callers, and the wasm module should be small
    fn found_no_room(
        &mut self,
        ticket: &QueuedTicket,
        endpoint: EndpointRef,
        why: NoRoom,
        now: Timestamp,
    ) {
        self.queues.found_full(ticket, Some(endpoint), now);
        if why == NoRoom::Full {
            self.queues.endpoint_full(endpoint, ticket.priority());
        }
        if why != NoRoom::Left {
            self.ask_for_room(ticket, endpoint, why, now);
        }
    }

    fn claim(
        &mut self,
        ticket: QueuedTicket,
        plan: Plan,
        limits: RoomLimits,
        request: &Request<'_>,
        now: Timestamp,
    ) -> Result<FlowAdmission, PickRefusal> {
        let Some(mut picked) = self.reserve(&plan, request, now) else {
            self.discard(plan);
            return Ok(FlowAdmission::Wait(ticket));
        };
        // The endpoint has no room left, so other requests need not try it.
        if self.is_full(plan.endpoint, limits, now) {
            self.queues.endpoint_full(plan.endpoint, request.priority);
        }
        let Some(entry) = self.queues.take_for_claim(&ticket) else {
            self.withdraw(picked);
            self.discard(plan);
            return Err(PickRefusal::NoState);
        };
        self.charge(&mut picked.hold, request, ticket.flow_id(), true, now);
        Ok(FlowAdmission::Claim(Claim {
            plan,
            picked,
            ticket,
            entry,
        }))
    }

    /// Gives the room of a claim to the request, and records its plan.
    #[inline(never)] // several callers, and the wasm module should be small
    pub fn redeem(&mut self, claim: Claim, request: &Request<'_>, now: Timestamp) -> RecordedPick {
        let Claim {
            plan,
            mut picked,
            ticket,
            entry,
        } = claim;
        self.queues.claimed(&ticket, &entry, now);
        self.watch(&mut picked.hold, Some(ticket.number));
        // The load was published with the claim, but the placement and a possible probe were not.
        self.ledger.changes += 1;
        self.record(plan, picked, request, now)
    }

    /// Puts the request of a claim back into the queue, because another VM took the room first.
    pub fn give_back(&mut self, claim: Claim) -> QueuedTicket {
        self.queues.put_back(&claim.ticket, claim.entry);
        self.withdraw(claim.picked);
        self.discard(claim.plan);
        claim.ticket
    }

    /// Records that a request is sent. With eviction, the pool may give the request up until its
    /// first response byte. `number` is the request's number, if it was queued.
    #[inline(never)] // several callers, and the wasm module should be small
    pub(super) fn watch(&mut self, hold: &mut LedgerHold, number: Option<u64>) {
        let charge = hold
            .charge
            .filter(|_| self.flow_control().is_some_and(FlowControl::evicts));
        hold.revocable =
            charge.and_then(|charge| self.queues.watch(&charge, hold.endpoint(), number));
    }

    /// Records that a queued request found no room at this endpoint. With eviction, a running
    /// request may be given up for it.
    fn ask_for_room(
        &mut self,
        ticket: &QueuedTicket,
        endpoint: EndpointRef,
        why: NoRoom,
        now: Timestamp,
    ) {
        if let Some(pipeline) = self
            .snapshot()
            .map(|snapshot| snapshot.pipeline())
            .filter(|pipeline| pipeline.flow_control().is_some_and(FlowControl::evicts))
        {
            let endpoint = pipeline.needs_room_at_endpoint().then_some(endpoint);
            self.queues
                .ask_for_room(ticket, endpoint, why == NoRoom::Full, now);
        }
    }

    /// Looks for room where the plan sends a request. `number` is the request's number, if it is
    /// queued. Returns the limits within which there is room.
    #[inline(never)] // several callers, and the wasm module should be small
    fn find_room(
        &mut self,
        plan: &Plan,
        request: &Request<'_>,
        number: Option<u64>,
        now: Timestamp,
    ) -> Result<RoomLimits, NoRoom> {
        let priority = request.priority;
        let control = flow_control(&self.endpoints);
        let limits = control.map_or(RoomLimits::ALL, |control| {
            self.queues.limits(control, priority, now)
        });
        let known = || (self.highest_priority(), self.running());
        let is_over_share = self.queues.is_over_share(priority, known);
        if !self.view().has_room(plan, request, limits, now) {
            let is_full = self.is_full(plan.endpoint, limits, now);
            return Err(if is_full {
                NoRoom::Full
            } else {
                NoRoom::TooLarge
            });
        }
        let is_left = (number.is_none() && self.queues.is_shared())
            || self.queues.is_claimed(plan.endpoint, priority, number)
            || (is_over_share && self.queues.leaves_room(priority, now));
        if is_left {
            Err(NoRoom::Left)
        } else {
            Ok(limits)
        }
    }

    /// The highest priority of the pool's objects; at least 0, which requests without one have.
    fn highest_priority(&self) -> i32 {
        self.snapshot()
            .map_or(0, |snapshot| snapshot.objects().highest_priority())
    }

    /// Records which part of all proxies' running requests this proxy has. The caller knows the
    /// load of the other proxies.
    #[inline(never)] // rare, and the wasm module should be small
    pub fn record_part(&mut self) {
        let all = self.running();
        let own = all.saturating_sub(self.in_flight().outside_requests());
        self.queues.set_part(own as f64 / all.max(1) as f64);
    }

    /// The running requests of all proxies, as far as known.
    #[inline(never)] // several callers, and the wasm module should be small
    fn running(&self) -> u64 {
        let endpoints = self
            .snapshot()
            .map_or(&[][..], |snapshot| snapshot.endpoints());
        endpoints
            .iter()
            .map(|endpoint| u64::from(self.ledger.in_flight.load(endpoint.id).requests))
            .sum()
    }

    #[inline(never)] // several callers, and the wasm module should be small
    fn expected_output(&self, request: &Request<'_>) -> f64 {
        let mean = self
            .snapshot()
            .map_or(0.0, |snapshot| f64::from(snapshot.step().output_tokens()));
        request
            .max_tokens
            .map_or(mean, |max| mean.min(f64::from(max)))
    }

    /// Charges the flow of a request that is sent.
    #[inline(never)] // several callers, and the wasm module should be small
    pub(super) fn charge(
        &mut self,
        hold: &mut LedgerHold,
        request: &Request<'_>,
        flow: u64,
        was_queued: bool,
        now: Timestamp,
    ) {
        let output = self.expected_output(request);
        let Some(control) = flow_control(&self.endpoints) else {
            return;
        };
        #[expect(
            clippy::cast_precision_loss,
            reason = "token counts stay far below 2^52"
        )]
        // A prompt that its engine refuses is no load, but costs its flow as if it were computed.
        let prompt = match hold.load().prefills {
            prefills if prefills.prompt_tokens == 0 => f64::from(request.prompt_tokens),
            prefills => prefills.uncached_tokens as f64,
        };
        let sent = SentFlow {
            flow,
            priority: request.priority,
            was_queued,
            prompt_tokens: request.prompt_tokens,
            cost: FlowCost { prompt, output },
        };
        hold.charge = self.queues.charge(control, &sent, now);
    }
}
