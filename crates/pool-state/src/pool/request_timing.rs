//! Measures a request from its pick to its end: the conditions at the endpoints of its ranked list,
//! and the speed of the served endpoint.
//!
//! The conditions of all listed endpoints are recorded, and those of the served endpoint are
//! reported. A retry takes time that is not measured, so such a request reports its tokens but not
//! its first token.
//!
//! If another endpoint computes the prompt, the time to the first token is a sample of a prefill
//! there, and the gaps between tokens belong to the served endpoint. The transfer between the two
//! endpoints is part of the sample for a prompt that did not wait, but not for prompts that follow
//! each other. The times of the whole request belong to neither endpoint.

use scheduler::latency::{Conditions, FirstToken, Observation, Prediction, RequestEnd, TokenGap};
use scheduler::{EndpointRef, LocalState, Request};

use super::observation::uncached_tokens;
use super::plan::Plan;
use super::{LedgerHold, ManagedPool};
use crate::usage::TokenUsage;
use proto::observation::EncodedObservation;
use scheduler::Timestamp;

/// The number of tokens over which a gap is measured. The number is large enough to average the
/// jitter of single tokens, and small enough that the batch does not change.
const GAP_TOKENS: u32 = 4;

/// The first token after which a gap is measured. Each next gap is measured after twice as many
/// tokens, so a stream of any length costs only a few measurements.
const GAP_FROM_TOKEN: u32 = 2;

#[derive(Debug)]
pub struct RequestTiming {
    picked_at: Timestamp,
    /// The ranked list.
    candidates: Vec<(EndpointRef, Conditions)>,
    /// The endpoint that computes the prompt, if another endpoint serves.
    prefill: Option<(EndpointRef, Conditions)>,
    /// The prediction for the first endpoint of the ranked list.
    predicted: Option<Prediction>,
    /// Whether prompts from other VMs were ahead of this request. This VM does not see their first
    /// tokens.
    is_behind_others: bool,
    /// The position of the endpoint that serves: the first position until a retry is known.
    serving: usize,
    service_ms: Option<f32>,
    tokens: u32,
    next_gap: u32,
    gap_began: Option<(Timestamp, u32)>,
    gap: Option<TokenGap>,
}

/// How a request ended.
#[derive(Debug)]
pub struct RequestEnding<'u> {
    pub ended: RequestEnd,
    /// Time from pick to first token, ms.
    pub ttft_ms: Option<f32>,
    /// Time for each token after the first, ms.
    pub tpot_ms: Option<f32>,
    /// The token counts of the request.
    pub usage: &'u TokenUsage,
}

// === impl RequestTiming ===

impl RequestTiming {
    /// Records that `to` serves, instead of the first endpoint of the list.
    pub(super) fn move_to(&mut self, to: EndpointRef) -> bool {
        let position = self
            .candidates
            .iter()
            .position(|(endpoint, _)| *endpoint == to);
        self.serving = position.unwrap_or(0);
        self.predicted = None;
        position.is_some()
    }

    /// The number of output tokens at which the next gap begins or ends.
    fn next_measured(&self) -> u32 {
        self.gap_began
            .map_or(self.next_gap, |(_, from)| from.saturating_add(GAP_TOKENS))
    }

    fn retried(&self) -> bool {
        self.serving > 0
    }

    fn endpoint(&self) -> Option<EndpointRef> {
        self.candidates
            .get(self.serving)
            .map(|(endpoint, _)| *endpoint)
    }

    /// The endpoint whose prefill time the first token shows.
    fn prefills_at(&self) -> Option<EndpointRef> {
        self.prefill
            .map(|(endpoint, _)| endpoint)
            .or_else(|| self.endpoint())
    }

    fn first_token(&self, conditions: &Conditions, uncached_tokens: f32) -> Option<FirstToken> {
        let prompt_tokens = conditions.prompt_tokens;
        self.service_ms.map(|service_ms| FirstToken {
            uncached_tokens,
            prompt_tokens,
            service_ms,
        })
    }

    fn observation(&self, ending: &RequestEnding<'_>) -> Option<EncodedObservation> {
        let &(endpoint, conditions) = self.candidates.get(self.serving)?;
        let usage = ending.usage;
        let alone = self.prefill.is_none();
        let observation = Observation {
            endpoint,
            conditions,
            ended: ending.ended,
            ttft_ms: ending.ttft_ms.filter(|_| alone && !self.retried()),
            tpot_ms: ending.tpot_ms.filter(|_| alone),
            output_tokens: usage.completion_tokens,
            first_token: self
                .first_token(&conditions, uncached_tokens(&conditions, usage))
                .filter(|_| alone),
            gap: self.gap,
        };
        Some(EncodedObservation {
            observation,
            predicted: self.predicted,
            // The served endpoint reports the transferred tokens as cached.
            prompt_tokens: usage.prompt_tokens.filter(|_| alone),
            cached_tokens: usage.cached_tokens.filter(|_| alone),
            estimated: usage.estimated,
        })
    }

    /// The prefill at another endpoint than the served one, if it was measured.
    fn prefill_observation(&self, ended: RequestEnd) -> Option<EncodedObservation> {
        let (endpoint, conditions) = self.prefill?;
        let first_token = Some(self.first_token(&conditions, conditions.uncached_tokens)?);
        let observation = Observation {
            endpoint,
            conditions,
            ended,
            ttft_ms: None,
            tpot_ms: None,
            output_tokens: None,
            first_token,
            gap: None,
        };
        Some(EncodedObservation {
            observation,
            predicted: None,
            prompt_tokens: None,
            cached_tokens: None,
            estimated: false,
        })
    }
}

// === impl LedgerHold ===

impl LedgerHold {
    /// The number of output tokens until the next measurement of a gap. The caller should report
    /// them to the pool together. [`u32::MAX`] for a request that is not measured.
    #[must_use]
    pub fn tokens_until_measured(&self) -> u32 {
        self.watch.as_ref().map_or(u32::MAX, |watch| {
            watch.next_measured().saturating_sub(watch.tokens)
        })
    }
}

// === impl ManagedPool ===

impl ManagedPool {
    /// Starts to measure a request, before its load counts anywhere. A request is not measured
    /// before the daemon has sent models, or if its prompt has no tokens. Nor is a request on which
    /// an encoder or a data-parallel rank works, or whose stages are both at one endpoint.
    pub(super) fn start_timing(
        &self,
        request: &Request<'_>,
        plan: &Plan,
        now: Timestamp,
    ) -> Option<Box<RequestTiming>> {
        let route = &plan.route;
        let state = self
            .endpoints
            .state
            .as_ref()
            .filter(|_| self.endpoints.models.is_some() && request.prompt_tokens > 0)?;
        if route.prefill == Some(route.ranked.first())
            || !route.encode.is_empty()
            || route.data_parallel.is_some()
        {
            return None;
        }
        let local = LocalState {
            matched_blocks: &plan.lookups.matched,
            metrics_stale: state.metrics_stale(now),
            ..LocalState::new(&self.ledger.in_flight)
        };
        let conditions = |index| {
            Some((
                state.snapshot.endpoint(index)?.id,
                Conditions::at_pick(&state.snapshot, &local, request, index),
            ))
        };
        let candidates: Vec<_> = route.ranked.iter().filter_map(conditions).collect();
        let prefill = route.prefill.and_then(conditions);
        let prompting = prefill.or_else(|| candidates.first().copied());
        let is_behind_others =
            prompting.is_some_and(|(endpoint, _)| self.has_prompts_of_others(endpoint));
        let first = candidates.first().filter(|_| prefill.is_none());
        let predicted = state
            .snapshot
            .latency()
            .zip(first)
            .and_then(|(model, (endpoint, at))| model.predict(*endpoint, at).ok());
        Some(Box::new(RequestTiming {
            picked_at: now,
            candidates,
            prefill,
            predicted,
            is_behind_others,
            serving: 0,
            service_ms: None,
            tokens: 0,
            next_gap: GAP_FROM_TOKEN,
            gap_began: None,
            gap: None,
        }))
    }

    /// Whether prompts from other VMs wait or are computed at the endpoint.
    fn has_prompts_of_others(&self, endpoint: EndpointRef) -> bool {
        self.ledger.in_flight.load(endpoint).prefills.prompts
            != self.ledger.in_flight.own(endpoint).prefills.prompts
    }

    /// Records the first token and measures the prefill. There is no measurement if the endpoint
    /// had or has prompts from other VMs, because this VM does not see their first tokens.
    pub(super) fn observe_first_token(&mut self, held: &mut LedgerHold, now: Timestamp) {
        let Some(watch) = &mut held.watch else { return };
        let Some(endpoint) = watch.prefills_at() else {
            return;
        };
        let slot = usize::from(endpoint.slot.0);
        if self.ledger.first_tokens.len() <= slot {
            self.ledger.first_tokens.resize(slot + 1, Timestamp(0));
        }
        let has_others = watch.is_behind_others || self.has_prompts_of_others(endpoint);
        let Some(last) = self.ledger.first_tokens.get_mut(slot) else {
            return;
        };
        let before = std::mem::replace(last, now);
        if !has_others && !watch.retried() {
            watch.service_ms = Some(ms_between(watch.picked_at.max(before), now));
        }
    }

    /// Records that the output grew. Measures some of the gaps, while no request at the endpoint
    /// waits for its first token.
    pub(super) fn observe_tokens(&self, held: &mut LedgerHold, tokens: u32, now: Timestamp) {
        let Some(watch) = &mut held.watch else { return };
        watch.tokens = watch.tokens.saturating_add(tokens);
        let is_due = watch.next_measured() <= watch.tokens;
        let Some(endpoint) = watch.endpoint().filter(|_| is_due) else {
            return;
        };
        let load = self.ledger.in_flight.load(endpoint);
        let quiet = load.prefills.prompts == 0;
        if let Some((began, from)) = watch.gap_began.take() {
            watch.next_gap = watch.tokens.saturating_mul(2);
            #[expect(
                clippy::cast_precision_loss,
                reason = "requests and tokens of one endpoint"
            )]
            let batch = load.requests as f32;
            let context_tokens = load.decode_tokens as f32;
            let count = (watch.tokens - from) as f32;
            let gap = TokenGap {
                batch,
                context_tokens,
                gap_ms: ms_between(began, now) / count,
            };
            watch.gap = Some(gap).filter(|_| quiet).or(watch.gap);
        } else if quiet {
            watch.gap_began = Some((now, watch.tokens));
        } else {
            watch.next_gap = watch.tokens.saturating_mul(2);
        }
    }

    pub fn observe_end(&mut self, held: &LedgerHold, ending: &RequestEnding<'_>) {
        let has_measured = ending.ended != RequestEnd::Done
            || ending.ttft_ms.is_some()
            || ending.usage.completion_tokens.is_some();
        let Some(watch) = held.watch.as_ref().filter(|_| has_measured) else {
            return;
        };
        let observed = [
            watch.observation(ending),
            watch.prefill_observation(ending.ended),
        ];
        observed
            .into_iter()
            .flatten()
            .for_each(|observed| self.ledger.observations.push(observed));
    }
}

/// Returns the time between two timestamps in milliseconds, with a fraction.
#[expect(
    clippy::cast_precision_loss,
    reason = "minutes in µs; beyond 2^24 nearly right is right enough"
)]
pub fn ms_between(from: Timestamp, to: Timestamp) -> f32 {
    to.us_since(from) as f32 / 1_000.0
}
