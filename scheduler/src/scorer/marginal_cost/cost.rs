//! The cost of one request at one endpoint, in ms. Each term is one function.
//!
//! ```text
//! cost = max(queue + prefill + interference + displacement + decode - refresh, W + S) + failure
//!
//! queue         W (1 + queueExternality (B + Bmean) / 2)
//! prefill       S (1 + arrivalExternality B W / T)
//! interference  externality (ownBatchShare B S + (1 - ownBatchShare) Bmean (S + Smean) / 2)
//! displacement  displacement r / (1 + r) c1 u
//! decode        decodeWeight o w (D + B (e1 + e2 n) / 2)
//! refresh       refresh a (1 - U/C) (Sn - Su)
//!                 (1 + externality (ownBatchShare B + (1 - ownBatchShare) Bmean))
//! failure       failureMs f
//!
//! W = v (c0 P / (1 + P/4) + c1 Pu + c2 Pq) + memoryWeight o w D min(u, missing) / C
//! S = v (c0 + c1 u + c2 (n² - (n-u)²)) + A            Smean is S at v = 1
//! D = e0 + e1 (B+1) + e2 (K+n)
//! T = o w D + W + S
//! ```
//!
//! | symbol | field | meaning |
//! |---|---|---|
//! | u, n | `uncached_tokens`, `prompt_tokens` | prompt tokens that are not cached here; all prompt tokens |
//! | o | `output_tokens` | expected output tokens; 0 at a stage before decode |
//! | v, w | `prefill_speed`, `decode_speed` | how many times as long as an average endpoint this one takes |
//! | c0 c1 c2, e0 e1 e2 | `step` | learned coefficients of a prefill and of a decode step ([`StepModel`]) |
//! | P, Pu, Pq | `load.prefills` | prompts that wait here, their uncached tokens, their pairs of tokens |
//! | B, K | `load` | requests in flight here, and their tokens of context |
//! | Bmean | `mean_batch` | mean of B over the candidates |
//! | C, U | `memory` | KV memory of the engine in tokens, and how much of it is in use |
//! | missing | [`KvMemory::missing_tokens`] | tokens of KV memory that this request needs and the engine lacks |
//! | A | `adapter_ms` | time to load the LoRA adapter |
//! | Sn, Su | `full_prefill_ms`, `prefill_ms` | v times the prefill of all n, and of the u uncached tokens, without A |
//! | a | `prefix_age` | what was cached here since the prefix was last used, as a share of what fits |
//! | r | `reuse_interval` | prompts per endpoint since the longest cached prefix was last used |
//! | f | `excess_failure_rate` | failure rate here minus the rate at the other endpoints |

use crate::in_flight::{ATTENTION_UNIT, EndpointLoad, PendingPrefills};
use crate::latency::step::StepModel;

/// A queue of prompts counts as at most this many where only their number matters: prompts in one
/// queue share engine steps.
const PROMPTS_PER_STEP: f32 = 4.0;

/// The share of KV memory that is available to prompts. The engine needs the rest for output
/// tokens.
const PROMPT_MEMORY_SHARE: f32 = 0.9;

/// The weights of the terms: parameters of the plugin. All are at least 0.
#[derive(Clone, Copy, Debug)]
pub(super) struct CostWeights {
    pub(super) externality: f32,
    pub(super) own_batch_share: f32,
    pub(super) arrival_externality: f32,
    pub(super) queue_externality: f32,
    pub(super) displacement: f32,
    pub(super) decode_weight: f32,
    pub(super) failure_ms: f32,
    pub(super) memory_weight: f32,
    pub(super) refresh: f32,
}

/// The inputs that are the same at every endpoint.
pub(super) struct RequestInputs<'a> {
    pub(super) step: &'a StepModel,
    pub(super) prompt_tokens: f32,
    /// Expected output tokens; 0 at a stage before decode.
    pub(super) output_tokens: f32,
    /// Prompts per endpoint since the longest cached prefix was last used; infinite for a new
    /// prefix.
    pub(super) reuse_interval: f32,
    /// Mean number of requests in flight over the candidates.
    pub(super) mean_batch: f32,
}

/// The inputs that differ by endpoint.
pub(super) struct EndpointInputs {
    pub(super) load: LoadInputs,
    /// The time of this endpoint for a prefill and for a decode step, as multiples of an average
    /// endpoint's.
    pub(super) speed: (f32, f32),
    pub(super) uncached_tokens: f32,
    pub(super) adapter_ms: f32,
    /// `None` if no engine of the pool reports its KV memory.
    pub(super) memory: Option<KvMemory>,
    /// Failure rate here minus the rate at the other endpoints, 0 to 1.
    pub(super) excess_failure_rate: f32,
    /// The blocks cached here since the prefix was last used, as a share of the cache's capacity; 0
    /// if no other endpoint has the prefix.
    pub(super) prefix_age: f32,
}

/// The numbers that count of an endpoint's load. A copy of the whole load would take as long as
/// reading everything else of the endpoint.
pub(super) struct LoadInputs {
    /// B.
    pub(super) requests: u32,
    /// K.
    pub(super) context_tokens: f32,
    /// Pu.
    pub(super) queued_tokens: f32,
    /// W / v, without memory.
    pub(super) queued_ms: f32,
}

/// KV memory of an engine as the engine reports it, in tokens.
#[derive(Clone, Copy)]
pub(super) struct KvMemory {
    pub(super) capacity: f32,
    pub(super) used: f32,
}

/// The cost of one request at one endpoint, by term, in ms.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cost {
    pub(super) queue: f32,
    pub(super) prefill: f32,
    pub(super) interference: f32,
    pub(super) displacement: f32,
    pub(super) decode: f32,
    pub(super) refresh: f32,
    pub(super) failure: f32,
    /// W + S: the time to the first token. No advantage makes a request cheaper than that.
    lowest: f32,
}

/// The times that several terms need.
struct CostTimes {
    /// B.
    batch: f32,
    /// W.
    waiting_ms: f32,
    /// S.
    service_ms: f32,
    /// Smean.
    mean_service_ms: f32,
    /// Su / v.
    prefill_ms: f32,
    /// o w D.
    decode_ms: f32,
}

// === impl Cost ===

impl Cost {
    /// The cost of `request` at `endpoint`.
    #[inline(always)] // so that the terms stay in registers
    pub(super) fn of(weights: &CostWeights, request: &RequestInputs<'_>, endpoint: &EndpointInputs) -> Self {
        let times = CostTimes::of(weights, request, endpoint);
        Self {
            queue: queue(weights, request, &times),
            prefill: prefill(weights, &times),
            interference: interference(weights, request, &times),
            displacement: displacement(weights, request, endpoint),
            decode: decode(weights, request, endpoint, &times),
            refresh: refresh(weights, request, endpoint, &times),
            failure: failure(weights, endpoint),
            lowest: times.waiting_ms + times.service_ms,
        }
    }

    /// All terms together.
    pub(super) fn total(&self) -> f32 {
        let work = self.queue + self.prefill + self.interference + self.displacement + self.decode;
        (work - self.refresh).max(self.lowest) + self.failure
    }

    /// Every term with its name, as `explain` prints them.
    pub(super) fn terms(&self) -> [(&'static str, f32); 7] {
        [
            ("queue_ms", self.queue),
            ("prefill_ms", self.prefill),
            ("interference_ms", self.interference),
            ("displacement_ms", self.displacement),
            ("decode_ms", self.decode),
            ("refresh_ms", -self.refresh),
            ("failure_ms", self.failure),
        ]
    }
}

/// The prompts ahead have to finish first, and a long queue becomes a large batch.
fn queue(weights: &CostWeights, request: &RequestInputs<'_>, times: &CostTimes) -> f32 {
    times.waiting_ms * (1.0 + weights.queue_externality * (times.batch + request.mean_batch) / 2.0)
}

/// The request's own prefill, and the requests that arrive while it waits: B of them in each
/// lifetime T.
fn prefill(weights: &CostWeights, times: &CostTimes) -> f32 {
    let lifetime_ms = (times.decode_ms + times.waiting_ms + times.service_ms).max(f32::MIN_POSITIVE);
    let arrivals = times.batch * (times.waiting_ms / lifetime_ms);
    times.service_ms * (1.0 + weights.arrival_externality * arrivals)
}

/// The request's prefill delays running requests: those here, and, as later requests choose other
/// endpoints, those of the whole pool. An average endpoint would do that work in Smean.
fn interference(weights: &CostWeights, request: &RequestInputs<'_>, times: &CostTimes) -> f32 {
    let (own, others) = delayed_requests(weights, request, times);
    weights.externality * (own * times.service_ms + others * (times.service_ms + times.mean_service_ms) / 2.0)
}

/// A new copy of this prefix evicts other prefixes. For a prefix that is used often (small r) the
/// copy pays off.
fn displacement(weights: &CostWeights, request: &RequestInputs<'_>, endpoint: &EndpointInputs) -> f32 {
    let [_, c1, _] = request.step.prefill();
    let r = request.reuse_interval;
    let rarity = if r.is_finite() { r / (1.0 + r) } else { 1.0 };
    rarity * weights.displacement * c1 * endpoint.uncached_tokens
}

/// The request's own decode steps, and the time that it adds to the steps of the requests beside
/// it.
fn decode(weights: &CostWeights, request: &RequestInputs<'_>, endpoint: &EndpointInputs, times: &CostTimes) -> f32 {
    let ([_, e1, e2], (_, w)) = (request.step.decode(), endpoint.speed);
    let others_ms = request.output_tokens * w * times.batch * (e1 + e2 * request.prompt_tokens) / 2.0;
    weights.decode_weight * (times.decode_ms + others_ms)
}

/// Where several endpoints have the prefix, using the oldest copy keeps it from being evicted. Its
/// value is the cost of computing the prefix again, in proportion to the free memory.
fn refresh(weights: &CostWeights, request: &RequestInputs<'_>, endpoint: &EndpointInputs, times: &CostTimes) -> f32 {
    let (v, _) = endpoint.speed;
    let full_prefill_ms = request.step.prefill_ms(request.prompt_tokens, request.prompt_tokens);
    let saved_ms = v * (full_prefill_ms - times.prefill_ms);
    let free = 1.0 - endpoint.memory.map_or(0.0, |memory| memory.used / memory.capacity);
    let (own, others) = delayed_requests(weights, request, times);
    weights.refresh * endpoint.prefix_age * free * saved_ms * (1.0 + weights.externality * (own + others))
}

/// Requests that fail here in excess of the other endpoints cost the client a wait.
fn failure(weights: &CostWeights, endpoint: &EndpointInputs) -> f32 {
    weights.failure_ms * endpoint.excess_failure_rate
}
/// How many running requests a prefill here delays: at this endpoint, and elsewhere in the pool.
fn delayed_requests(weights: &CostWeights, request: &RequestInputs<'_>, times: &CostTimes) -> (f32, f32) {
    (weights.own_batch_share * times.batch, (1.0 - weights.own_batch_share) * request.mean_batch)
}

// === impl LoadInputs ===

impl LoadInputs {
    pub(super) fn of(load: &EndpointLoad, step: &StepModel) -> Self {
        Self {
            requests: load.requests,
            context_tokens: float(load.decode_tokens.saturating_add(load.prefills.prompt_tokens)),
            queued_tokens: float(load.prefills.uncached_tokens),
            queued_ms: queued_prefills_ms(step, &load.prefills),
        }
    }
}

// === impl CostTimes ===

impl CostTimes {
    fn of(weights: &CostWeights, request: &RequestInputs<'_>, endpoint: &EndpointInputs) -> Self {
        let (step, (v, w)) = (request.step, endpoint.speed);
        let batch = float(u64::from(endpoint.load.requests));
        let prefill_ms = step.prefill_ms(endpoint.uncached_tokens, request.prompt_tokens);
        let step_ms = step.decode_ms(batch + 1.0, endpoint.load.context_tokens + request.prompt_tokens).max(f32::MIN_POSITIVE);
        let decode_ms = request.output_tokens * w * step_ms;
        // All requests here together free their memory in about one lifetime.
        let memory_ms = endpoint.memory.map_or(0.0, |memory| decode_ms * memory.missing_share(request, endpoint));
        Self {
            batch,
            waiting_ms: v * endpoint.load.queued_ms + weights.memory_weight * memory_ms,
            service_ms: v * prefill_ms + endpoint.adapter_ms,
            mean_service_ms: prefill_ms + endpoint.adapter_ms,
            prefill_ms,
            decode_ms,
        }
    }
}

/// Prefill time of the prompts in a queue at an average endpoint, in ms. The constant c0 was
/// learned from single prompts; prompts in a queue share steps.
fn queued_prefills_ms(step: &StepModel, prefills: &PendingPrefills) -> f32 {
    let [c0, c1, c2] = step.prefill();
    let prompts = float(u64::from(prefills.prompts));
    c0 * prompts / (1.0 + prompts / PROMPTS_PER_STEP)
        + c1 * float(prefills.uncached_tokens)
        + c2 * (float(prefills.attention) * float(ATTENTION_UNIT))
}

// === impl KvMemory ===

impl KvMemory {
    /// The mean over the engines that report their memory; `None` if none does.
    pub(super) fn mean(endpoints: &[EndpointInputs]) -> Option<Self> {
        let reported = || endpoints.iter().filter_map(|endpoint| endpoint.memory);
        let count = float(reported().count() as u64);
        let mean = |field: fn(Self) -> f32| reported().map(field).sum::<f32>() / count;
        (count > 0.0).then(|| Self { capacity: mean(|memory| memory.capacity), used: mean(|memory| memory.used) })
    }

    /// The missing tokens as a share of the capacity.
    fn missing_share(&self, request: &RequestInputs<'_>, endpoint: &EndpointInputs) -> f32 {
        self.missing_tokens(request, endpoint) / self.capacity
    }

    /// Tokens of KV memory that the request needs and does not find free; at most what the prompt
    /// itself needs. A shortage beyond that delays every request, and moving this one to an
    /// endpoint that has not cached its prefix would take even more memory. Prompts in the queue
    /// have about half of their memory already.
    fn missing_tokens(&self, request: &RequestInputs<'_>, endpoint: &EndpointInputs) -> f32 {
        let taken = self.used + endpoint.load.queued_tokens / 2.0;
        let missing = taken + endpoint.uncached_tokens + request.output_tokens - PROMPT_MEMORY_SHARE * self.capacity;
        // Not `clamp`, which panics if its limits are no numbers.
        missing.max(0.0).min(endpoint.uncached_tokens)
    }
}

/// A count as an f32.
#[expect(clippy::cast_precision_loss, reason = "costs need far fewer than the seven digits of an f32")]
pub(super) fn float(count: u64) -> f32 {
    count as f32
}

#[cfg(test)]
mod tests;
