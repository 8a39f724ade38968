//! Measures a request from its pick to its end: the conditions at the endpoints of its ranked list,
//! and the speed of the served endpoint.
//!
//! The conditions of all listed endpoints are noted, and those of the served endpoint are reported.
//! A retry takes time that is not measured: such a request reports its tokens, but not its first
//! token.

use scheduler::latency::learn::{Observation, RequestEnd};
use scheduler::latency::step::{FirstToken, TokenGap};
use scheduler::latency::{Conditions, Prediction};
use scheduler::{EndpointRef, LocalState, Request, Route};

use super::observation::uncached_tokens;
use super::{LedgerHold, ManagedPool};
use crate::usage::TokenUsage;
use proto::observation::EncodedObservation;
use scheduler::Timestamp;

/// Tokens over which a gap is measured: long enough to average the jitter of single tokens, short
/// enough that the batch does not change.
const GAP_TOKENS: u32 = 4;

/// The first token after which a gap is measured; each next one is measured after twice as many
/// tokens, so that a stream of any length costs a few measurements.
const GAP_FROM_TOKEN: u32 = 2;

/// One request.
#[derive(Debug)]
pub struct RequestTiming {
    picked_at: Timestamp,
    /// The ranked list.
    candidates: Vec<(EndpointRef, Conditions)>,
    /// The prediction for the first endpoint of the ranked list.
    predicted: Option<Prediction>,
    /// The position of the endpoint that serves; the first until a retry is known.
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
    /// How the request ended.
    pub ended: RequestEnd,
    /// Pick to first token, ms.
    pub ttft_ms: Option<f32>,
    /// Time for each token after the first, ms.
    pub tpot_ms: Option<f32>,
    /// The token counts of the request.
    pub usage: &'u TokenUsage,
}

// === impl RequestTiming ===

impl RequestTiming {
    /// Records that `to` serves, not the first endpoint of the list.
    pub(super) fn move_to(&mut self, to: EndpointRef) -> bool {
        let position = self.candidates.iter().position(|(endpoint, _)| *endpoint == to);
        self.serving = position.unwrap_or(0);
        self.predicted = None;
        position.is_some()
    }

    fn retried(&self) -> bool {
        self.serving > 0
    }

    fn endpoint(&self) -> Option<EndpointRef> {
        self.candidates.get(self.serving).map(|(endpoint, _)| *endpoint)
    }

    fn observation(&self, ending: &RequestEnding<'_>) -> Option<EncodedObservation> {
        let &(endpoint, conditions) = self.candidates.get(self.serving)?;
        let usage = ending.usage;
        let first_token = self.service_ms.map(|service_ms| FirstToken {
            uncached_tokens: uncached_tokens(&conditions, usage),
            prompt_tokens: conditions.prompt_tokens,
            service_ms,
        });
        let ttft_ms = ending.ttft_ms.filter(|_| !self.retried());
        let observation = Observation {
            endpoint,
            conditions,
            ended: ending.ended,
            ttft_ms,
            tpot_ms: ending.tpot_ms,
            output_tokens: usage.completion_tokens,
            first_token,
            gap: self.gap,
        };
        Some(EncodedObservation {
            observation,
            predicted: self.predicted,
            prompt_tokens: usage.prompt_tokens,
            cached_tokens: usage.cached_tokens,
            estimated: usage.estimated,
        })
    }
}

// === impl ManagedPool ===

impl ManagedPool {
    /// Starts to measure a request, before it counts anywhere. A request of several stages is not
    /// measured, because its times belong to no single endpoint.
    pub(super) fn start_timing(&self, request: &Request<'_>, route: &Route, now: Timestamp) -> Option<Box<RequestTiming>> {
        let state = self.state.as_ref().filter(|_| self.learning.models.is_some() && request.prompt_tokens > 0)?;
        if route.prefill.is_some() || !route.encode.is_empty() || route.data_parallel.is_some() {
            return None;
        }
        let local = LocalState {
            matched_blocks: &self.lookups.matched,
            metrics_stale: state.metrics_stale(now),
            ..LocalState::new(&self.in_flight)
        };
        let conditions = |index| Some((state.snapshot.endpoint(index)?.id, Conditions::at_pick(&state.snapshot, &local, request, index)));
        let candidates: Vec<_> = route.ranked.iter().filter_map(conditions).collect();
        let first = candidates.first();
        let predicted = state.snapshot.latency().zip(first).and_then(|(model, (endpoint, at))| model.predict(*endpoint, at).ok());
        Some(Box::new(RequestTiming {
            picked_at: now,
            candidates,
            predicted,
            serving: 0,
            service_ms: None,
            tokens: 0,
            next_gap: GAP_FROM_TOKEN,
            gap_began: None,
            gap: None,
        }))
    }

    /// Records the first token. Measures the prefill, unless the endpoint had prompts of other VMs
    /// meanwhile, whose first tokens this VM does not see.
    pub(super) fn observe_first_token(&mut self, held: &mut LedgerHold, now: Timestamp) {
        let Some(watch) = &mut held.watch else { return };
        let Some(endpoint) = watch.endpoint() else { return };
        let slot = usize::from(endpoint.slot.0);
        if self.learning.first_tokens.len() <= slot {
            self.learning.first_tokens.resize(slot + 1, Timestamp(0));
        }
        let Some(last) = self.learning.first_tokens.get_mut(slot) else { return };
        let before = std::mem::replace(last, now);
        let ours_alone = self.in_flight.load(endpoint).prefills.prompts == self.in_flight.own(endpoint).prefills.prompts;
        if ours_alone && !watch.retried() {
            watch.service_ms = Some(ms_between(watch.picked_at.max(before), now));
        }
    }

    /// Records that the output grew. Measures some of the gaps, while no request at the endpoint
    /// waits for its first token.
    pub(super) fn observe_tokens(&self, held: &mut LedgerHold, tokens: u32, now: Timestamp) {
        let Some(watch) = &mut held.watch else { return };
        watch.tokens = watch.tokens.saturating_add(tokens);
        let is_due = watch.gap_began.map_or(watch.next_gap, |(_, from)| from + GAP_TOKENS) <= watch.tokens;
        let Some(endpoint) = watch.endpoint().filter(|_| is_due) else { return };
        let load = self.in_flight.load(endpoint);
        let quiet = load.prefills.prompts == 0;
        if let Some((began, from)) = watch.gap_began.take() {
            watch.next_gap = watch.tokens.saturating_mul(2);
            #[expect(clippy::cast_precision_loss, reason = "requests and tokens of one endpoint")]
            let (batch, context_tokens, count) = (load.requests as f32, load.decode_tokens as f32, (watch.tokens - from) as f32);
            let gap = TokenGap { batch, context_tokens, gap_ms: ms_between(began, now) / count };
            watch.gap = Some(gap).filter(|_| quiet).or(watch.gap);
        } else if quiet {
            watch.gap_began = Some((now, watch.tokens));
        } else {
            watch.next_gap = watch.tokens.saturating_mul(2);
        }
    }

    /// The request has ended.
    pub fn observe_end(&mut self, held: &LedgerHold, ending: &RequestEnding<'_>) {
        let tells = ending.ended != RequestEnd::Done || ending.ttft_ms.is_some() || ending.usage.completion_tokens.is_some();
        if let Some(observed) = held.watch.as_ref().filter(|_| tells).and_then(|watch| watch.observation(ending)) {
            self.learning.observations.push(observed);
        }
    }
}

/// Milliseconds with their fraction.
#[expect(clippy::cast_precision_loss, reason = "minutes in µs; beyond 2^24 nearly right is right enough")]
pub fn ms_between(from: Timestamp, to: Timestamp) -> f32 {
    to.us_since(from) as f32 / 1_000.0
}
