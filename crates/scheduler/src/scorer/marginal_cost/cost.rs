//! The cost of one request at one endpoint, in ms. Each term is one function.
//!
//! ```text
//! cost = wait + prefill + delay + decode + memory + failure
//!
//! wait     W (ttftWeight + queueExternality b)
//! prefill  ttftWeight S (1 + B (W + S/2) / T)
//! delay    b S
//! decode   o w (e0 + e1 (b+1) + e2 (k+n) + b (e1 + e2 n))
//! memory   E / (1-E) c1 (u-m) (1 + Bmean)
//! failure  failureMs f
//!
//! W = v (c0 P / (1 + P/4) + c1 Pu + c2 Pq) (P - 1/2) / P + o w D min(u, missing) / C
//! S = v (c0 + c1 x + c2 (n² - (n-x)²)) + A
//! x = m + (u-m) r / (1+r)
//! D = e0 + e1 (B+1) + e2 (K+n)
//! T = o w D + W + S
//! b = (B + Bmean) / 2,  k = (K + Kmean) / 2
//! ```
//!
//! | symbol | field | meaning |
//! |---|---|---|
//! | u, n | `uncached_tokens`, `prompt_tokens` | prompt tokens that the endpoint has not cached; all prompt tokens |
//! | m | `new_tokens` | prompt tokens that are cached at no candidate: the least u |
//! | r | `reuse_interval` | prompts that an endpoint gets between two requests that a new copy will serve |
//! | x | | tokens that the request is charged for: all requests that will use a copy of a prefix share its cost |
//! | o | `output_tokens` | expected output tokens; 0 at a stage before decode |
//! | v, w | `prefill_speed`, `decode_speed` | how many times as long as an average endpoint this one takes |
//! | c0 c1 c2, e0 e1 e2 | `step` | learned coefficients of a prefill and of a decode step ([`StepModel`]) |
//! | P, Pu, Pq | `load.prefills` | prompts that wait at the endpoint, their uncached tokens, their pairs of tokens |
//! | B, K | `load` | requests in flight at the endpoint, and their tokens of context |
//! | Bmean, Kmean | `mean_batch`, `mean_context` | means of B and K over the candidates |
//! | C | `memory` | KV memory of the engine in tokens |
//! | missing | [`KvMemory::missing_tokens`] | tokens of KV memory that this request needs and the engine lacks |
//! | A | `adapter_ms` | time to load the LoRA adapter |
//! | E | `evicted_share` | share of the computed prompt tokens that had been cached and were evicted |
//! | f | `excess_failure_rate` | failure rate of the endpoint minus twice the rate at the other endpoints |
//!
//! The formula has halves for two reasons. When a request arrives, the prompt that the engine
//! computes is on average half done. The requests at the endpoint end evenly over one lifetime. So
//! during the lifetime of this request, half of the present requests still run on average, and half
//! of the mean number of requests have replaced the others.

use crate::in_flight::{ATTENTION_UNIT, EndpointLoad, PendingPrefills};
use crate::latency::step::StepModel;

/// The limit that the number P of prompts in a queue approaches in the formula, because prompts in
/// one queue share engine steps.
const PROMPTS_PER_STEP: f32 = 4.0;

/// The share of KV memory that is available to prompts. The engine needs the other memory for
/// output tokens.
const PROMPT_MEMORY_SHARE: f32 = 0.9;

/// The maximum share of evicted tokens in the formula. An evicted token is computed again with a
/// probability equal to this share, and the computation evicts another token, and so on. The
/// maximum limits this chain to 20 tokens.
const EVICTED_SHARE_MAX: f32 = 0.95;

/// The weights of the terms: parameters of the plugin. All weights are at least 0.
#[derive(Clone, Copy, Debug)]
pub(super) struct CostWeights {
    pub(super) ttft_weight: f32,
    pub(super) queue_externality: f32,
    pub(super) failure_ms: f32,
}

/// The inputs that are the same at every endpoint.
pub(super) struct RequestInputs<'a> {
    pub(super) step: &'a StepModel,
    pub(super) prompt_tokens: f32,
    /// m: the number of prompt tokens that no endpoint has cached.
    pub(super) new_tokens: f32,
    /// The expected number of output tokens; 0 if the request is at a stage before decode.
    pub(super) output_tokens: f32,
    /// r: the number of prompts that each endpoint gets between two requests for the longest cached
    /// prefix.
    pub(super) reuse_interval: f32,
    /// E: the share of the computed prompt tokens that had been cached and were evicted.
    pub(super) evicted_share: f32,
    /// The mean number of requests in flight over the candidates.
    pub(super) mean_batch: f32,
    /// The mean number of tokens of context of the requests in flight at a candidate.
    pub(super) mean_context: f32,
}

/// The inputs that differ by endpoint.
pub(super) struct EndpointInputs {
    pub(super) load: LoadInputs,
    /// The times of this endpoint for a prefill and for a decode step, as multiples of an average
    /// endpoint's times.
    pub(super) speed: (f32, f32),
    pub(super) uncached_tokens: f32,
    pub(super) adapter_ms: f32,
    /// The KV memory of the endpoint's engine, or the mean of the others. `None` if no engine of
    /// the pool reports its KV memory.
    pub(super) memory: Option<KvMemory>,
    /// The failure rate of this endpoint minus the rate of the other endpoints, 0 to 1.
    pub(super) excess_failure_rate: f32,
}

/// The numbers of an endpoint's load on which the cost depends. Only these numbers are copied,
/// because to copy the whole load would take as long as to read all other data of the endpoint.
pub(super) struct LoadInputs {
    /// B: the number of requests in flight.
    pub(super) requests: u32,
    /// K: the number of tokens of context of the requests in flight.
    pub(super) context_tokens: f32,
    /// Pu: the number of uncached tokens of the prompts in the queue.
    pub(super) queued_tokens: f32,
    /// W / v without the time for memory, in ms.
    pub(super) queued_ms: f32,
}

/// The KV memory of an engine as the engine reports it, in tokens.
#[derive(Clone, Copy)]
pub(super) struct KvMemory {
    pub(super) capacity: f32,
    pub(super) used: f32,
}

/// The cost of one request at one endpoint, by term, in ms.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cost {
    pub(super) wait: f32,
    pub(super) prefill: f32,
    pub(super) delay: f32,
    pub(super) decode: f32,
    pub(super) memory: f32,
    pub(super) failure: f32,
}

/// The times and the load that several terms need.
struct CostTimes {
    /// B: the number of requests in flight at the endpoint.
    batch: f32,
    /// b: the mean number of requests that will run beside this request.
    expected_batch: f32,
    /// W: the waiting time, in ms.
    waiting_ms: f32,
    /// S: the time of the request's prefill, and of loading its adapter, at the endpoint in ms.
    service_ms: f32,
    /// T: the lifetime of the request at the endpoint, in ms.
    lifetime_ms: f32,
}

// === impl Cost ===

impl Cost {
    /// Returns the cost of `request` at `endpoint`.
    #[inline(always)] // inlined, so that the terms stay in registers
    pub(super) fn estimate(
        weights: &CostWeights,
        request: &RequestInputs<'_>,
        endpoint: &EndpointInputs,
    ) -> Self {
        let times = CostTimes::from_inputs(request, endpoint);
        Self {
            wait: wait(weights, &times),
            prefill: prefill(weights, &times),
            delay: delay(&times),
            decode: decode(request, endpoint, &times),
            memory: memory(request, endpoint),
            failure: weights.failure_ms * endpoint.excess_failure_rate,
        }
    }

    pub(super) fn total(&self) -> f32 {
        self.wait + self.prefill + self.delay + self.decode + self.memory + self.failure
    }

    /// Returns every term with the name that `explain` prints.
    pub(super) fn terms(&self) -> [(&'static str, f32); 6] {
        [
            ("wait_ms", self.wait),
            ("prefill_ms", self.prefill),
            ("delay_ms", self.delay),
            ("decode_ms", self.decode),
            ("memory_ms", self.memory),
            ("failure_ms", self.failure),
        ]
    }
}

/// Returns the cost of waiting: the prompts that wait at the endpoint must finish first, and a long
/// queue becomes a large batch.
fn wait(weights: &CostWeights, times: &CostTimes) -> f32 {
    times.waiting_ms * (weights.ttft_weight + weights.queue_externality * times.expected_batch)
}

/// Returns the time of the request's own prefill, and the delay of later requests: those that
/// arrive at the endpoint before this prefill is done get their first tokens later. B requests
/// arrive in each lifetime T.
fn prefill(weights: &CostWeights, times: &CostTimes) -> f32 {
    let arrivals = times.batch * (times.waiting_ms + times.service_ms / 2.0) / times.lifetime_ms;
    weights.ttft_weight * times.service_ms * (1.0 + arrivals)
}

/// Returns the time by which the request's prefill delays the requests that will run at the
/// endpoint.
fn delay(times: &CostTimes) -> f32 {
    times.expected_batch * times.service_ms
}

/// Returns the time of the request's own decode steps, and the time that the request adds to the
/// decode steps of the other requests at the endpoint.
fn decode(request: &RequestInputs<'_>, endpoint: &EndpointInputs, times: &CostTimes) -> f32 {
    let ([_, e1, e2], (_, w)) = (request.step.decode(), endpoint.speed);
    let context = (endpoint.load.context_tokens + request.mean_context) / 2.0;
    let own_ms = request
        .step
        .decode_ms(times.expected_batch + 1.0, context + request.prompt_tokens);
    let others_ms = times.expected_batch * (e1 + e2 * request.prompt_tokens);
    request.output_tokens * w * (own_ms + others_ms)
}

/// Returns the cost of evicting other prefixes for a new copy of a prefix. An evicted token is
/// computed again with probability E, the share of the computed tokens that had been evicted. The
/// computation delays the mean batch.
fn memory(request: &RequestInputs<'_>, endpoint: &EndpointInputs) -> f32 {
    let [_, c1, _] = request.step.prefill();
    let evicted = request.evicted_share.min(EVICTED_SHARE_MAX);
    let again_tokens = endpoint.uncached_tokens - request.new_tokens;
    evicted / (1.0 - evicted) * c1 * again_tokens * (1.0 + request.mean_batch)
}

// === impl LoadInputs ===

impl LoadInputs {
    pub(super) fn from_load(load: &EndpointLoad, step: &StepModel) -> Self {
        Self {
            requests: load.requests,
            context_tokens: float(
                load.decode_tokens
                    .saturating_add(load.prefills.prompt_tokens),
            ),
            queued_tokens: float(load.prefills.uncached_tokens),
            queued_ms: queued_prefills_ms(step, &load.prefills),
        }
    }
}

// === impl RequestInputs ===

impl RequestInputs<'_> {
    /// Returns x, the tokens that the request is charged for if `uncached_tokens` are not cached.
    /// This request and 1/r more requests will use the new copy, and each is charged an equal part.
    /// So this request is charged 1 / (1 + 1/r) of the copy.
    fn charged_tokens(&self, uncached_tokens: f32) -> f32 {
        let again_tokens = (uncached_tokens - self.new_tokens).max(0.0);
        self.new_tokens + again_tokens * (self.reuse_interval / (1.0 + self.reuse_interval))
    }
}

// === impl CostTimes ===

impl CostTimes {
    fn from_inputs(request: &RequestInputs<'_>, endpoint: &EndpointInputs) -> Self {
        let (step, (v, w)) = (request.step, endpoint.speed);
        let batch = float(u64::from(endpoint.load.requests));
        let prefill_ms = step.prefill_ms(
            request.charged_tokens(endpoint.uncached_tokens),
            request.prompt_tokens,
        );
        let service_ms = v * prefill_ms + endpoint.adapter_ms;
        let step_ms = step.decode_ms(
            batch + 1.0,
            endpoint.load.context_tokens + request.prompt_tokens,
        );
        let decode_ms = request.output_tokens * w * step_ms;
        // The request waits for a part of one lifetime, because in about one lifetime all present
        // requests end and free their memory.
        let memory_ms = endpoint.memory.map_or(0.0, |memory| {
            decode_ms * memory.missing_share(request, endpoint)
        });
        let waiting_ms = v * endpoint.load.queued_ms + memory_ms;
        Self {
            batch,
            expected_batch: (batch + request.mean_batch) / 2.0,
            waiting_ms,
            service_ms,
            lifetime_ms: (decode_ms + waiting_ms + service_ms).max(f32::MIN_POSITIVE),
        }
    }
}

/// Returns the time in which an average endpoint computes the prompts in its queue, in ms. The
/// constant c0 was learned from single prompts, but prompts in a queue share steps. The engine is
/// assumed to have done half of one prompt.
fn queued_prefills_ms(step: &StepModel, prefills: &PendingPrefills) -> f32 {
    if prefills.prompts == 0 {
        return 0.0;
    }
    let [c0, c1, c2] = step.prefill();
    let prompts = float(u64::from(prefills.prompts));
    let whole_ms = c0 * prompts / (1.0 + prompts / PROMPTS_PER_STEP)
        + c1 * float(prefills.uncached_tokens)
        + c2 * (float(prefills.attention) * float(ATTENTION_UNIT));
    whole_ms * (prompts - 0.5) / prompts
}

// === impl KvMemory ===

impl KvMemory {
    /// Returns the mean over the engines that report their KV memory; `None` if no engine reports
    /// it.
    pub(super) fn mean(endpoints: &[EndpointInputs]) -> Option<Self> {
        let reported = || endpoints.iter().filter_map(|endpoint| endpoint.memory);
        let count = float(reported().count() as u64);
        let mean = |field: fn(Self) -> f32| reported().map(field).sum::<f32>() / count;
        (count > 0.0).then(|| Self {
            capacity: mean(|memory| memory.capacity),
            used: mean(|memory| memory.used),
        })
    }

    /// Returns the missing tokens as a share of the capacity.
    fn missing_share(&self, request: &RequestInputs<'_>, endpoint: &EndpointInputs) -> f32 {
        self.missing_tokens(request, endpoint) / self.capacity
    }

    /// Returns the tokens of KV memory that the request needs but that are not free. The result is
    /// at most the tokens that the prompt itself needs. A larger shortage delays every request, and
    /// moving this request to an endpoint that has not cached its prefix would take even more
    /// memory. Prompts in the queue are assumed to have about half of their memory already.
    fn missing_tokens(&self, request: &RequestInputs<'_>, endpoint: &EndpointInputs) -> f32 {
        let taken = self.used + endpoint.load.queued_tokens / 2.0;
        let missing = taken + endpoint.uncached_tokens + request.output_tokens
            - PROMPT_MEMORY_SHARE * self.capacity;
        // This does not use `clamp`, which would panic if a limit were NaN.
        missing.max(0.0).min(endpoint.uncached_tokens)
    }
}

// Converts a count to an f32. The seven digits of an f32 are far more than a cost needs.
pub(super) fn float(count: u64) -> f32 {
    count as f32
}

#[cfg(test)]
mod tests;
