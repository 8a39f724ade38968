//! The pick of an exchange: at once, or when flow control releases the request.

use pool_state::queues::{FlowArrival, HeldReason};
use pool_state::{FlowAdmission, HeldClaim, ManagedPool, PickRefusal, RecordedPick, Timestamp};
use scheduler::{FAIRNESS_ID, REQUEST_ID, UnavailableReason};

use super::pending_request::PendingRequest;
use super::phase::ExchangePhase;
use super::queued_request::QueuedRequest;
use super::routed_request::{RequestKind, RoutedRequest, SentPrompt};
use super::{Exchange, ExchangeStep, HeaderFacts, RequestChanges};
use crate::explain::DecisionReason;
use crate::hint;
use crate::reply::Refusal;
use crate::settings::{ExchangeSettings, FairnessHeader};

/// The result of a pick for a held request.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "one exists at a time, on the stack"
)]
pub enum HeldAttempt {
    /// No request is held.
    Nothing,
    /// The request is refused, or stays held.
    Step(ExchangeStep),
    /// An endpoint has room: [`Exchange::settle_held`] must follow.
    Claim(HeldPick),
}

/// A pick for a held request, until it is settled.
#[derive(Debug)]
pub struct HeldPick {
    claim: HeldClaim,
    held: Box<QueuedRequest>,
    is_sampled: bool,
}

// === impl Exchange ===

impl Exchange {
    /// The last step of [`Self::decide`]: picks an endpoint for the hashed request.
    pub fn pick(
        &mut self,
        settings: &ExchangeSettings,
        pool: &mut ManagedPool,
        hint: Option<&[u8]>,
        pending: PendingRequest,
        now: Timestamp,
    ) -> ExchangeStep {
        let subset = hint.map(hint::parse);
        let headers: Vec<(&str, &str)> = self
            .facts
            .captured
            .iter()
            .map(|(name, value)| (&**name, &**value))
            .collect();
        let request = pending.request(subset.as_ref(), &headers, pool);
        let is_recorded = pool.sample_one_in(settings.decision_log.one_in);
        let is_sampled = self.why.record_if(is_recorded, settings, pool, now);
        let arrival = FlowArrival {
            flow: self.facts.flow_id(settings),
            request_id: headers
                .iter()
                .find(|(name, _)| *name == REQUEST_ID)
                .map_or("", |(_, id)| id),
            bytes: (pending.body_bytes + pending.memory_bytes() + self.facts.captured_bytes())
                as u64,
            arrived: self.started,
            ttl_ms: self.facts.ttl_ms,
        };
        let outcome = pool.pick_or_hold(&request, &pending.model, &arrival, now, &mut self.why);
        self.why.keep_sample(
            is_sampled && !matches!(outcome, Ok(FlowAdmission::Held(_))),
            is_recorded,
            pool,
        );
        match outcome {
            Ok(FlowAdmission::Picked(picked)) => self.send(settings, pool, pending, picked, now),
            Ok(FlowAdmission::Held(ticket)) => {
                let number = ticket.number;
                let request = QueuedRequest {
                    ticket,
                    pending: pending.without_body(),
                    subset,
                    is_recorded,
                    since: now,
                };
                self.queue(Box::new(request));
                ExchangeStep::Hold { number }
            }
            Err(refusal) => self.pick_refused(pool, &pending, refusal),
        }
    }

    /// Picks for the request that [`ExchangeStep::Hold`] holds.
    pub fn claim_held(
        &mut self,
        settings: &ExchangeSettings,
        pool: &mut ManagedPool,
        now: Timestamp,
    ) -> HeldAttempt {
        let ExchangePhase::Queued(held) = std::mem::replace(&mut self.phase, ExchangePhase::Ended)
        else {
            return HeldAttempt::Nothing;
        };
        let headers: Vec<(&str, &str)> = self
            .facts
            .captured
            .iter()
            .map(|(name, value)| (&**name, &**value))
            .collect();
        let request = held.pending.request(held.subset.as_ref(), &headers, pool);
        let is_sampled = self.why.record_if(held.is_recorded, settings, pool, now);
        self.why.held = pool.queues().reason(&held.ticket, now);
        let outcome = pool.claim_held(
            &held.ticket,
            &request,
            &held.pending.model,
            now,
            &mut self.why,
        );
        let step = match outcome {
            Ok(Some(claim)) => {
                return HeldAttempt::Claim(HeldPick {
                    claim,
                    held,
                    is_sampled,
                });
            }
            Ok(None) => return HeldAttempt::Step(self.hold_on(pool, held)),
            Err(refusal) => self.pick_refused(pool, &held.pending, refusal),
        };
        self.why.keep_sample(is_sampled, held.is_recorded, pool);
        HeldAttempt::Step(step)
    }

    /// Ends the attempt: the request goes on if the host could claim its room, and otherwise stays
    /// held.
    pub fn settle_held(
        &mut self,
        settings: &ExchangeSettings,
        pool: &mut ManagedPool,
        (pick, is_claimed): (HeldPick, bool),
        now: Timestamp,
    ) -> ExchangeStep {
        let HeldPick {
            claim,
            held,
            is_sampled,
        } = pick;
        match pool.settle_claim(&held.ticket, claim, is_claimed, &held.pending.blocks, now) {
            Some(picked) => {
                self.why.keep_sample(is_sampled, held.is_recorded, pool);
                let held_ms = now.ms_since(held.since);
                let step = self.send(settings, pool, held.pending, picked, now);
                if let ExchangePhase::Routed(routed) = &mut self.phase {
                    routed.set_held(held_ms);
                }
                step
            }
            None => self.hold_on(pool, held),
        }
    }

    fn hold_on(&mut self, pool: &mut ManagedPool, held: Box<QueuedRequest>) -> ExchangeStep {
        let number = held.ticket.number;
        self.why.keep_sample(false, held.is_recorded, pool);
        self.queue(held);
        ExchangeStep::Hold { number }
    }

    /// Since when the request is held by flow control, and its priority.
    pub(crate) fn held(&self) -> Option<(Timestamp, i32)> {
        match &self.phase {
            ExchangePhase::Queued(held) => Some((held.since, held.pending.priority)),
            _ => None,
        }
    }

    /// Why flow control holds the request; `None` if it does not.
    #[must_use]
    pub fn held_reason(&self, pool: &ManagedPool, now: Timestamp) -> Option<HeldReason> {
        match &self.phase {
            ExchangePhase::Queued(held) => pool.queues().reason(&held.ticket, now),
            _ => None,
        }
    }

    /// Holds the request. A pick without room is neither explained nor recorded.
    fn queue(&mut self, request: Box<QueuedRequest>) {
        self.phase = ExchangePhase::Queued(request);
        self.why.reasons = None;
        self.why.record = None;
        self.why.candidates = None;
    }

    fn pick_refused(
        &mut self,
        pool: &mut ManagedPool,
        pending: &PendingRequest,
        refusal: PickRefusal,
    ) -> ExchangeStep {
        match Refusal::from(refusal) {
            Refusal::Unavailable(UnavailableReason::ModelNotServed)
                if pending.target.is_none() && !pool.knows_model(&pending.model) =>
            {
                self.refuse(pool, &Refusal::UnknownModel(pending.model.as_str().into()))
            }
            refusal => self.refuse(pool, &refusal),
        }
    }

    /// Records a pick. Returns the changes with which the request goes on.
    fn send(
        &mut self,
        settings: &ExchangeSettings,
        pool: &mut ManagedPool,
        pending: PendingRequest,
        picked: RecordedPick,
        now: Timestamp,
    ) -> ExchangeStep {
        let kind = self.kind(&pending);
        let mut forward = RequestChanges::to(
            settings,
            &picked,
            self.api.is_inference(),
            pending.facts.stream,
        );
        let counted = pool.counters_mut().count_sent(
            &pending.model,
            pending.target_model(),
            pending.priority,
            pending.body_bytes,
        );
        if let Some(splice) = pending.splice {
            forward.rewrite(
                splice,
                self.facts.declared_bytes.map(|_| pending.body_bytes),
            );
        }
        let prompt = SentPrompt {
            text_bytes: pending.facts.text_bytes,
            blocks: pending.facts.even_blocks,
            hashes: pending.blocks,
            tokens: pending.prompt_tokens,
        };
        let routed = RoutedRequest::new(self.api, counted, picked, prompt, kind, now);
        self.phase = ExchangePhase::Routed(Box::new(routed.with_model_names(pending.names)));
        ExchangeStep::Forward(forward)
    }

    /// Returns what decides whether endpoints accept the request.
    fn kind(&self, pending: &PendingRequest) -> RequestKind {
        let model = scheduler::name_hash(pending.target_model());
        RequestKind {
            accepted_as: model ^ u64::from(self.api.number() << 1 | u8::from(pending.facts.stream)),
            credentials: self.facts.credentials,
            names_id: pending.facts.names_id,
            wants_output: pending.facts.max_tokens != Some(0),
        }
    }
}

// === impl HeaderFacts ===

impl HeaderFacts {
    /// The bytes of the captured headers.
    fn captured_bytes(&self) -> usize {
        self.captured
            .iter()
            .map(|(name, value)| name.len() + value.len())
            .sum()
    }

    /// The fairness id: that of the proxy's metadata, else of the header, where it is trusted;
    /// empty if there is none.
    pub(super) fn flow_id(&self, settings: &ExchangeSettings) -> &str {
        let header = |name: &&str| {
            self.captured
                .iter()
                .find(|(known, _)| **known == **name)
                .map(|(_, value)| &**value)
        };
        let trusted = || {
            FAIRNESS_ID
                .iter()
                .filter(|_| settings.flow.header == FairnessHeader::Trust)
                .find_map(header)
        };
        self.flow.as_deref().or_else(trusted).unwrap_or_default()
    }
}

// === impl DecisionReason ===

impl DecisionReason {
    /// Has the next decision recorded if it is logged, or due for the daemon's console. Returns
    /// whether it is due.
    fn record_if(
        &mut self,
        logged: bool,
        settings: &ExchangeSettings,
        pool: &mut ManagedPool,
        now: Timestamp,
    ) -> bool {
        let sampled = pool.is_sample_due(now);
        self.recorded = (logged || sampled).then(|| settings.decision_log.headers.as_str().into());
        sampled
    }

    /// Keeps the record of a sampled decision, which stays here only if it is logged, too.
    fn keep_sample(&mut self, sampled: bool, logged: bool, pool: &mut ManagedPool) {
        if sampled {
            pool.keep_sample(if logged {
                self.record.clone()
            } else {
                self.record.take()
            });
        }
    }
}
