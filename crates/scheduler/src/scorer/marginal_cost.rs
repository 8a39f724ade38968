//! `marginal-cost-scorer`: the best endpoint is where the request costs least. The cost is the time
//! of the request itself, and the time by which it delays the requests that are already at the
//! endpoint.
//!
//! [`cost`] has the formula, its terms and its symbols. Most inputs are known at the pick from the
//! in-flight ledger, the prefix index and the step model, which the daemon learns online. Metrics
//! of the engine improve the cost estimate but are not needed. Token counts are estimates. The step
//! model is learned from the same estimates, so a different tokenizer only changes the coefficients
//! of the step model.
//!
//! - Score: lowest cost / cost. The score 1 is the best, and an endpoint that costs twice as much
//!   gets 0.5.
//! - Costs within 2 % or 1 ms of the lowest are equal, because the model is not more exact. Among
//!   equal endpoints, the endpoint with the fewest requests in flight is best, then the endpoint
//!   that was picked least recently. So endpoints that all seem free get an even load.
//! - If an endpoint recomputes tokens that another endpoint has cached (`u - m`), this work delays
//!   the requests of the endpoint. Where memory is scarce, the recomputed tokens also evict tokens
//!   that will be computed again. These costs keep requests where their prefix is cached. The cost
//!   of a prefix that many requests share is divided among them, so the prefix is copied to
//!   endpoints with less load.
//! - An endpoint that fails immediately has no requests in flight and would look cheapest. So the
//!   term `failure` adds the time that a patient client would have waited for a reply.
//! - An adapter costs nothing if the endpoint has loaded it, or if this proxy recently used it at
//!   this endpoint. Loading an adapter costs `adapterLoadMs`. A load that evicts another adapter
//!   costs sixteen times as much, because the evicted adapter will be needed again and will evict a
//!   third adapter. The factor comes from simulation: 8 is too low if loads take twice as long as
//!   configured, and 32 keeps requests in queues.

mod cost;

use cost::{Cost, CostWeights, EndpointInputs, KvMemory, LoadInputs, RequestInputs, float};

use crate::decision::CostTerms;
use crate::endpoint::EndpointIndex;
use crate::local_state::AdapterRoom;
use crate::metrics::KV_CACHE_UTILIZATION;
use crate::plugin::{
    Context, InvalidParameter, Parameter, Parameters, RequiredState, Scorer, readable,
};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::scorer::PREFIX_PRODUCER;
use crate::sort::sort_by;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "marginal-cost-scorer",
    kind: PluginKind::Scorer,
    doc: readable(
        "The lowest cost of the candidates / the endpoint's cost. [The cost](#the-cost-of-marginal-cost-scorer) is the time in ms that the request takes, plus the delay of others.",
    ),
    source: readable("Switchpoint; [the race](race.md)"),
    parameters: &[
        Parameter::number(
            "ttftWeight",
            4.0,
            "cost of one ms until the first token, relative to one ms of decoding, 0 to 100",
        ),
        Parameter::number(
            "queueExternality",
            0.2,
            "cost of one ms of waiting for each request in flight (half here, half the mean of the pool), 0 to 100",
        ),
        Parameter::number(
            "adapterLoadMs",
            100.0,
            "time to load a LoRA adapter, ms; sixteen times that where another is evicted; 0 to 600000",
        ),
        Parameter::number(
            "failureMs",
            10_000.0,
            "cost of a failure in excess of the other endpoints, ms, 0 to 600000",
        ),
        without_effect("externality"),
        without_effect("ownBatchShare"),
        without_effect("arrivalExternality"),
        without_effect("displacement"),
        without_effect("decodeWeight"),
        without_effect("memoryWeight"),
        without_effect("refresh"),
        PREFIX_PRODUCER,
    ],
    needs: &[
        RequiredState::InFlight,
        RequiredState::PrefixIndex,
        RequiredState::Prompt,
        RequiredState::StepModel,
        RequiredState::Adapters,
        RequiredState::AdapterRooms,
        RequiredState::Metric(&KV_CACHE_UTILIZATION),
    ],
    build,
};

/// Declares a parameter of the previous version, which configurations may still set.
const fn without_effect(name: &'static str) -> Parameter {
    Parameter::number(
        name,
        0.0,
        "no effect: measured or derived now, and refused by the next version; 0 to 1000",
    )
}

/// The factor of the time to load an adapter if the loaded adapter evicts another adapter.
const EVICTING_LOAD_FACTOR: f32 = 16.0;

/// The share of the lowest cost by which equal costs may differ. A cost that exceeds the lowest by
/// at most this share, or by [`EQUAL_MS`], counts as equal, because the step model is not more
/// exact.
const EQUAL_SHARE: f32 = 0.02;
const EQUAL_MS: f32 = 1.0;

/// The maximum difference between the scores of endpoints with equal cost. This difference is less
/// than [`EQUAL_SHARE`], so these scores stay above the score of every endpoint that costs more.
const EQUAL_SPAN: f32 = 0.01;

#[derive(Debug)]
struct MarginalCostScorer {
    weights: CostWeights,
    adapter_load_ms: f32,
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    // An f32 is precise enough, because the parameters have a few digits.
    let number = |name, max| {
        parameters
            .number(name, 0.0..=max)
            .map(|number| number as f32)
    };
    for name in [
        "externality",
        "ownBatchShare",
        "arrivalExternality",
        "displacement",
        "decodeWeight",
        "memoryWeight",
        "refresh",
    ] {
        number(name, 1_000.0)?;
    }
    Ok(Plugin::Scorer(Box::new(MarginalCostScorer {
        weights: CostWeights {
            ttft_weight: number("ttftWeight", 100.0)?,
            queue_externality: number("queueExternality", 100.0)?,
            failure_ms: number("failureMs", 600_000.0)?,
        },
        adapter_load_ms: number("adapterLoadMs", 600_000.0)?,
    })))
}

// === impl MarginalCostScorer ===

impl Scorer for MarginalCostScorer {
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]) {
        let inputs = self.endpoint_inputs(context, endpoints);
        let request = request_inputs(context, &inputs);
        let mut lowest = f32::INFINITY;
        for (score, endpoint) in scores.iter_mut().zip(&inputs) {
            let cost = Cost::estimate(&self.weights, &request, endpoint).total();
            // The cost is limited, because extreme coefficients can make it overflow.
            *score = if cost.is_finite() { cost } else { f32::MAX };
            lowest = lowest.min(*score);
        }
        let equal = lowest + EQUAL_MS.max(EQUAL_SHARE * lowest);
        let mut equals = Vec::with_capacity(endpoints.len());
        for ((score, &endpoint), input) in scores.iter_mut().zip(endpoints).zip(&inputs) {
            if *score <= equal {
                let last_pick = context
                    .table
                    .id(endpoint)
                    .map_or(0, |id| context.local.in_flight.last_pick(id));
                equals.push(((input.load.requests, last_pick), score));
            } else {
                *score = lowest / *score;
            }
        }
        score_equals(equals);
    }

    fn cost_terms(&self, context: &Context<'_>, endpoints: &[EndpointIndex]) -> Vec<CostTerms> {
        let inputs = self.endpoint_inputs(context, endpoints);
        let request = request_inputs(context, &inputs);
        let terms = |endpoint| {
            Cost::estimate(&self.weights, &request, endpoint)
                .terms()
                .to_vec()
        };
        endpoints
            .iter()
            .copied()
            .zip(inputs.iter().map(terms))
            .collect()
    }
}

impl MarginalCostScorer {
    /// Returns the inputs of each candidate, in the order of the candidates.
    fn endpoint_inputs(
        &self,
        context: &Context<'_>,
        endpoints: &[EndpointIndex],
    ) -> Vec<EndpointInputs> {
        let step = context.table.step();
        let inputs = |&endpoint: &EndpointIndex| EndpointInputs {
            load: LoadInputs::from_load(&context.load(endpoint), step),
            speed: context
                .table
                .endpoint(endpoint)
                .map_or((1.0, 1.0), |e| step.speed(e.id)),
            uncached_tokens: float(u64::from(context.tokens_without_affinity(endpoint))),
            adapter_ms: self.adapter_ms(context, endpoint),
            memory: kv_memory(context, endpoint),
            excess_failure_rate: context.local.failing(endpoint),
        };
        let mut inputs: Vec<EndpointInputs> = endpoints.iter().map(inputs).collect();
        let mean_memory = KvMemory::mean(&inputs);
        for input in &mut inputs {
            input.memory = input.memory.or(mean_memory);
        }
        inputs
    }

    fn adapter_ms(&self, context: &Context<'_>, endpoint: EndpointIndex) -> f32 {
        match context.local.adapter_room(endpoint) {
            AdapterRoom::Unknown | AdapterRoom::Loaded => 0.0,
            _ if reports_adapter(context, endpoint) => 0.0,
            AdapterRoom::Free => self.adapter_load_ms,
            AdapterRoom::Full { .. } => EVICTING_LOAD_FACTOR * self.adapter_load_ms,
        }
    }
}

fn request_inputs<'a>(context: &Context<'a>, endpoints: &[EndpointInputs]) -> RequestInputs<'a> {
    let step = context.table.step();
    let count = float(endpoints.len() as u64).max(1.0);
    let in_flight: u64 = endpoints
        .iter()
        .map(|endpoint| u64::from(endpoint.load.requests))
        .sum();
    let context_tokens: f32 = endpoints
        .iter()
        .map(|endpoint| endpoint.load.context_tokens)
        .sum();
    RequestInputs {
        step,
        prompt_tokens: float(u64::from(context.request.prompt_tokens)),
        new_tokens: endpoints
            .iter()
            .map(|endpoint| endpoint.uncached_tokens)
            .fold(f32::INFINITY, f32::min),
        output_tokens: if context.early_stage {
            0.0
        } else {
            step.output_tokens()
        },
        reuse_interval: context.local.reuse_interval.max(0.0),
        evicted_share: context.local.evicted_share.max(0.0),
        mean_batch: float(in_flight) / count,
        mean_context: context_tokens / count,
    }
}

/// Returns the KV memory that the engine reports. Returns `None` if the engine does not report it,
/// or if the metrics are stale.
fn kv_memory(context: &Context<'_>, endpoint: EndpointIndex) -> Option<KvMemory> {
    let metrics = context.metrics(endpoint)?;
    let capacity = float(u64::from(metrics.kv_blocks?) * u64::from(metrics.kv_block_tokens?));
    let used = context
        .metric(endpoint, |metrics| metrics.kv_cache_utilization)?
        .min(1.0)
        * capacity;
    (capacity > 0.0).then_some(KvMemory { capacity, used })
}

/// Scores the endpoints with equal cost by their keys. The lowest key gets 1, and equal keys get
/// equal scores.
fn score_equals(mut equals: Vec<((u32, u64), &mut f32)>) {
    sort_by(&mut equals, |(one, _), (other, _)| one < other);
    let count = float(equals.len() as u64);
    let mut rank = 0;
    let mut previous = None;
    for (at, (key, score)) in (0_u64..).zip(equals) {
        if previous.replace(key) != Some(key) {
            rank = at;
        }
        *score = 1.0 - EQUAL_SPAN * float(rank) / count;
    }
}

/// Whether the engine reports that it runs the request's adapter.
fn reports_adapter(context: &Context<'_>, endpoint: EndpointIndex) -> bool {
    let lora = context
        .metrics(endpoint)
        .and_then(|metrics| metrics.lora.as_ref());
    lora.is_some_and(|lora| {
        lora.running
            .iter()
            .any(|adapter| **adapter == *context.request.model)
    })
}
