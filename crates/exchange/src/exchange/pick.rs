//! The pick of an exchange, either at once or when flow control releases the request.

use pool_state::queues::{FlowArrival, QueuedReason, QueuedTicket};
use pool_state::{
    Claim, FlowAdmission, ManagedPool, PickRefusal, PromptSuspicion, RecordedPick, Timestamp,
};
use scheduler::{Decision, FAIRNESS_ID, REQUEST_ID, Request, UnavailableReason};

use super::forward::RequestTraits;
use super::pending_request::PendingRequest;
use super::phase::ExchangePhase;
use super::queued_request::QueuedRequest;
use super::routed_request::{RequestKind, RoutedRequest, SentPrompt};
use super::{BodyArrival, Exchange, ExchangeStep, HeaderFacts, RequestChanges};
use crate::explain::DecisionReason;
use crate::hint;
use crate::reply::Refusal;
use crate::settings::{ExchangeSettings, HeaderTrust};

/// The maximum number of times that a request is planned again because the pool has changed since
/// its plan.
const REPLANS_MAX: u32 = 2;

/// The result of an attempt to send a queued request.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "one exists at a time, on the stack"
)]
pub enum QueuedAttempt {
    /// No request is queued.
    Nothing,
    /// The request is refused, is sent to its endpoint, or stays queued.
    Step(ExchangeStep),
    /// An endpoint has room: [`Exchange::settle_claim`] must follow.
    Claim(ClaimedRequest),
}

/// A queued request that claims room.
#[derive(Debug)]
pub struct ClaimedRequest {
    claim: Claim,
    queued: Box<QueuedRequest>,
    is_sampled: bool,
}

/// A request that was planned and admitted.
#[expect(
    clippy::large_enum_variant,
    reason = "one exists at a time, on the stack"
)]
enum AdmittedRequest {
    Sent(RecordedPick),
    Queued(QueuedTicket),
}

/// Plans an arriving request, and records its plan or queues it.
fn admit(
    pool: &mut ManagedPool,
    request: &Request<'_>,
    arrival: &FlowArrival<'_>,
    why: &mut DecisionReason,
    now: Timestamp,
) -> Result<AdmittedRequest, PickRefusal> {
    for _ in 0..=REPLANS_MAX {
        let planned = pool.plan(request, now, why);
        match pool.admit(planned, request, arrival, now)? {
            FlowAdmission::Go(plan) => {
                let endpoint = plan.endpoint();
                if let Ok(picked) = pool.commit(plan, request, endpoint, now) {
                    return Ok(AdmittedRequest::Sent(picked));
                }
            }
            // There is no shared order here; with one, an arriving request would wait.
            FlowAdmission::Claim(claim) => {
                return Ok(AdmittedRequest::Sent(pool.redeem(claim, request, now)));
            }
            FlowAdmission::Wait(ticket) => return Ok(AdmittedRequest::Queued(ticket)),
        }
    }
    Err(PickRefusal::NoState)
}

// === impl Exchange ===

impl Exchange {
    /// The last step of [`Self::decide`]: picks an endpoint for the hashed request.
    pub fn pick(
        &mut self,
        settings: &ExchangeSettings,
        pool: &mut ManagedPool,
        hint: Option<&[u8]>,
        mut pending: PendingRequest,
        now: Timestamp,
    ) -> ExchangeStep {
        pending.facts.suspicion = self.suspect(pool, &pending, now);
        let subset = hint.map(hint::parse);
        let headers = self.facts.captured_pairs();
        let request = pending.request(subset.as_ref(), &headers, pool);
        let is_recorded = pool.sample_one_in(settings.decision_log.one_in);
        let is_sampled = self.why.record_if(is_recorded, settings, pool, now);
        let arrival = FlowArrival {
            flow: self.facts.flow_id(settings),
            client: self.facts.client.hash,
            request_id: headers
                .iter()
                .find(|(name, _)| *name == REQUEST_ID)
                .map_or("", |(_, id)| id),
            bytes: (pending.body_bytes + pending.memory_bytes() + self.facts.captured_bytes())
                as u64,
            arrived: self.started,
            ttl_ms: self.facts.ttl_ms,
        };
        let admitted = if pending.facts.suspicion == PromptSuspicion::Crashes {
            Err(PickRefusal::CrashingPrompt)
        } else {
            admit(pool, &request, &arrival, &mut self.why, now)
        };
        self.why.keep_sample(
            is_sampled && !matches!(admitted, Ok(AdmittedRequest::Queued(_))),
            is_recorded,
            pool,
        );
        match admitted {
            Ok(AdmittedRequest::Sent(picked)) => self.send(settings, pool, pending, picked, now),
            Ok(AdmittedRequest::Queued(ticket)) => {
                let queued = QueuedRequest {
                    pending: pending.without_body(),
                    subset,
                    is_recorded,
                    since: now,
                };
                self.queue(ticket, Box::new(queued))
            }
            Err(refusal) => self.pick_refused(pool, &pending, refusal),
        }
    }

    /// Tries to send the request that [`ExchangeStep::Hold`] holds.
    pub fn try_queued(
        &mut self,
        settings: &ExchangeSettings,
        pool: &mut ManagedPool,
        now: Timestamp,
    ) -> QueuedAttempt {
        let ExchangePhase::Queued(ticket, mut queued) =
            std::mem::replace(&mut self.phase, ExchangePhase::Ended)
        else {
            return QueuedAttempt::Nothing;
        };
        let is_sampled = self.why.record_if(queued.is_recorded, settings, pool, now);
        // The prompt of a queued request may have crashed engines since the request arrived. A
        // request that was chosen as a probe is not judged again.
        if queued.pending.facts.suspicion == PromptSuspicion::None {
            queued.pending.facts.suspicion = self.suspect(pool, &queued.pending, now);
        }
        let is_crashing = queued.pending.facts.suspicion == PromptSuspicion::Crashes;
        self.why.held = pool.queues().reason(&ticket, now);
        if let Some(refusal) = pool.take_refusal(&ticket) {
            let step = self.pick_refused(pool, &queued.pending, refusal);
            self.why.keep_sample(is_sampled, queued.is_recorded, pool);
            return QueuedAttempt::Step(step);
        }
        let headers = self.facts.captured_pairs();
        let request = queued.request(&headers, pool);
        let planned = if is_crashing {
            Err(PickRefusal::CrashingPrompt)
        } else {
            pool.plan(&request, now, &mut self.why)
        };
        let claim = match pool.admit_queued(ticket, planned, &request, now) {
            Ok(FlowAdmission::Claim(claim)) => claim,
            Ok(FlowAdmission::Wait(ticket)) => {
                self.why.keep_sample(false, queued.is_recorded, pool);
                return QueuedAttempt::Step(self.queue(ticket, queued));
            }
            refused => {
                let refusal = refused.err().unwrap_or(PickRefusal::NoState);
                let step = self.pick_refused(pool, &queued.pending, refusal);
                self.why.keep_sample(is_sampled, queued.is_recorded, pool);
                return QueuedAttempt::Step(step);
            }
        };
        let claimed = ClaimedRequest {
            claim,
            queued,
            is_sampled,
        };
        if pool.queues().has_flow_peers() {
            QueuedAttempt::Claim(claimed)
        } else {
            QueuedAttempt::Step(self.settle_claim(settings, pool, claimed, true, now))
        }
    }

    /// Ends the attempt. If the host could claim the room, the request goes to its endpoint.
    /// Otherwise it stays queued.
    pub fn settle_claim(
        &mut self,
        settings: &ExchangeSettings,
        pool: &mut ManagedPool,
        claimed: ClaimedRequest,
        is_first: bool,
        now: Timestamp,
    ) -> ExchangeStep {
        let ClaimedRequest {
            claim,
            queued,
            is_sampled,
        } = claimed;
        self.why
            .keep_sample(is_first && is_sampled, queued.is_recorded, pool);
        if !is_first {
            return self.queue(pool.give_back(claim), queued);
        }
        let headers = self.facts.captured_pairs();
        let picked = pool.redeem(claim, &queued.request(&headers, pool), now);
        let held_ms = now.ms_since(queued.since);
        let step = self.send(settings, pool, queued.pending, picked, now);
        if let ExchangePhase::Routed(routed) = &mut self.phase {
            routed.set_queued(held_ms);
        }
        step
    }

    /// The time at which flow control began to hold the request, and its priority.
    pub(crate) fn held(&self) -> Option<(Timestamp, i32)> {
        match &self.phase {
            ExchangePhase::Queued(_, queued) => Some((queued.since, queued.pending.priority)),
            _ => None,
        }
    }

    /// The reason why flow control holds the request; `None` if it does not.
    #[must_use]
    pub fn queued_reason(&self, pool: &ManagedPool, now: Timestamp) -> Option<QueuedReason> {
        match &self.phase {
            ExchangePhase::Queued(ticket, _) => pool.queues().reason(ticket, now),
            _ => None,
        }
    }

    /// Holds the request. A pick without room is neither explained nor recorded.
    #[inline(never)] // several callers, and the wasm module should be small
    fn queue(&mut self, ticket: QueuedTicket, queued: Box<QueuedRequest>) -> ExchangeStep {
        let number = ticket.number;
        self.phase = ExchangePhase::Queued(ticket, queued);
        self.why.reasons = None;
        self.why.record = None;
        self.why.candidates = None;
        ExchangeStep::Hold { number }
    }

    fn pick_refused(
        &mut self,
        pool: &mut ManagedPool,
        pending: &PendingRequest,
        refusal: PickRefusal,
    ) -> ExchangeStep {
        if matches!(refusal, PickRefusal::Decision(Decision::Shed(_))) && pending.latency.slo.any()
        {
            pool.counters_mut().count_shed(
                &pending.model,
                pending.target_model(),
                pending.priority,
            );
        }
        match Refusal::from(refusal) {
            Refusal::Unavailable(UnavailableReason::ModelNotServed)
                if pending.target.is_none() && !pool.knows_model(&pending.model) =>
            {
                self.refuse(pool, &Refusal::UnknownModel(pending.model.as_str().into()))
            }
            refusal => self.refuse(pool, &refusal),
        }
    }

    /// Records a pick. Returns the changes with which the request is sent.
    fn send(
        &mut self,
        settings: &ExchangeSettings,
        pool: &mut ManagedPool,
        pending: PendingRequest,
        picked: RecordedPick,
        now: Timestamp,
    ) -> ExchangeStep {
        let kind = self.kind(&pending);
        let traits = RequestTraits {
            is_inference: self.api.is_inference(),
            is_streamed: pending.facts.stream,
            has_output_limit: pending.facts.max_tokens.is_some(),
            is_probe: pending.facts.suspicion == PromptSuspicion::Probe,
        };
        let mut forward = RequestChanges::to(settings, &picked, traits);
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
                pending.names.is_some(),
            );
        }
        let prompt = SentPrompt {
            text_bytes: pending.facts.text_bytes,
            blocks: pending.facts.even_blocks,
            hashes: pending.blocks,
            tokens: pending.prompt_tokens,
        };
        let mut routed = RoutedRequest::new(self.api, counted, picked, prompt, kind, now);
        if self.arrival != BodyArrival::Whole && routed.prompt.tokens > 0 {
            pool.set_prompt(&mut routed.pick.hold, 0);
        }
        self.phase = ExchangePhase::Routed(Box::new(routed.with_model_names(pending.names)));
        ExchangeStep::Forward(forward)
    }

    /// Judges the prompt of a request by the connections lost over it.
    fn suspect(
        &self,
        pool: &mut ManagedPool,
        pending: &PendingRequest,
        now: Timestamp,
    ) -> PromptSuspicion {
        let prompt = pending.blocks.last().copied().unwrap_or(0);
        pool.suspect_prompt(prompt, self.facts.client.hash, now)
    }

    /// Returns the properties that decide whether endpoints accept the request.
    fn kind(&self, pending: &PendingRequest) -> RequestKind {
        let model = scheduler::name_hash(pending.target_model());
        RequestKind {
            accepted_as: model ^ u64::from(self.api.number() << 1 | u8::from(pending.facts.stream)),
            credentials: self.facts.client.credentials,
            client: self.facts.client.hash,
            names_id: pending.facts.names_id,
            wants_output: pending.facts.max_tokens != Some(0),
            reply_tokens_max: pending.facts.reply_tokens_max,
        }
    }
}

// === impl HeaderFacts ===

impl HeaderFacts {
    #[inline(never)] // several callers, and the wasm module should be small
    fn captured_pairs(&self) -> Vec<(&str, &str)> {
        let captured = self.captured.iter();
        captured.map(|(name, value)| (&**name, &**value)).collect()
    }

    /// The number of bytes of the captured headers.
    fn captured_bytes(&self) -> usize {
        self.captured
            .iter()
            .map(|(name, value)| name.len() + value.len())
            .sum()
    }

    /// The fairness id. The proxy's metadata has precedence over the header, which is read only if
    /// it is trusted. The id is empty if neither has one.
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
                .filter(|_| settings.flow.header == HeaderTrust::Trust)
                .find_map(header)
        };
        self.flow.as_deref().or_else(trusted).unwrap_or_default()
    }
}

// === impl DecisionReason ===

impl DecisionReason {
    /// Causes the next decision to be recorded if it is logged, or if a sample is due for the
    /// daemon's console. Returns whether a sample is due.
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

    /// Keeps the record of a sampled decision in the pool, and in this exchange only if the
    /// decision is logged too.
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
