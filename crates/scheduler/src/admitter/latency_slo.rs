//! `latency-slo-admitter`: refuses a sheddable request that no endpoint would serve within its
//! SLOs.

use crate::endpoint::EndpointIndex;
use crate::metrics::KV_CACHE_UTILIZATION;
use crate::plugin::{Admitter, Context, RequiredState, producer_name, readable};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::rng::Rng;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "latency-slo-admitter",
    kind: PluginKind::Admitter,
    doc: readable(
        "Refuses a request of negative priority with an SLO if every endpoint would miss it, has \
        requests in flight and uses 2 % or more of its KV cache. An endpoint without a prediction \
        prevents the refusal.",
    ),
    source: readable("llm-d-router, admitter/latencyslo"),
    parameters: &[producer_name("latencyPredictionInfoProducerName")],
    needs: &[
        RequiredState::Latency,
        RequiredState::InFlight,
        RequiredState::Metric(&KV_CACHE_UTILIZATION),
        RequiredState::PrefixIndex,
        RequiredState::Prompt,
    ],
    build: |_| Ok(Plugin::Admitter(Box::new(LatencySloAdmitter))),
};

/// The KV cache use below which an endpoint is cold. Predictions for a cold endpoint do not justify
/// a refusal. The value is llm-d's.
const COLD_KV_CACHE: f32 = 0.02;

#[derive(Debug)]
struct LatencySloAdmitter;

impl Admitter for LatencySloAdmitter {
    fn admits(&self, context: &Context<'_>, endpoints: &[EndpointIndex], _: &mut Rng) -> bool {
        let cold = |endpoint| {
            context
                .metric(endpoint, |m| m.kv_cache_utilization)
                .is_some_and(|used| used < COLD_KV_CACHE)
        };
        let misses = |endpoint| {
            context
                .prediction(endpoint)
                .is_some_and(|predicted| !predicted.is_valid())
                && !cold(endpoint)
        };
        let sheddable = context.request.priority < 0 && context.request.slo.any();
        !sheddable || !endpoints.iter().all(|&endpoint| misses(endpoint))
    }
}
