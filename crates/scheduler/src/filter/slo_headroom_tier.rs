//! `slo-headroom-tier-filter`: keeps endpoints that would meet all SLOs, or sometimes, at random,
//! keeps the other endpoints instead.

use crate::candidates::Candidates;
use crate::endpoint::EndpointIndex;
use crate::plugin::{
    Context, Filter, InvalidParameter, Parameter, Parameters, RequiredState, readable,
};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::predictions::EndpointPrediction;
use crate::rng::Rng;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "slo-headroom-tier-filter",
    kind: PluginKind::Filter,
    doc: readable(
        "Keeps endpoints whose TTFT and TPOT headroom is not negative; with probability \
        epsilonExploreNeg it keeps the others instead. An endpoint without a prediction is among \
        the others. The filter keeps all endpoints if none has a prediction, or if all are in the \
        same group.",
    ),
    source: readable("llm-d-router, filter/sloheadroomtier"),
    parameters: &[Parameter::number(
        "epsilonExploreNeg",
        0.01,
        "how often the others are kept instead, 0 to 1",
    )],
    needs: &[
        RequiredState::Latency,
        RequiredState::InFlight,
        RequiredState::PrefixIndex,
        RequiredState::Prompt,
    ],
    build,
};

#[derive(Debug)]
struct SloHeadroomTierFilter {
    exploration: f64,
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    Ok(Plugin::Filter(Box::new(SloHeadroomTierFilter {
        exploration: parameters.number("epsilonExploreNeg", 0.0..=1.0)?,
    })))
}

impl Filter for SloHeadroomTierFilter {
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates, rng: &mut Rng) {
        let meets = |endpoint: EndpointIndex| {
            context
                .prediction(endpoint)
                .is_some_and(EndpointPrediction::meets)
        };
        let met = candidates
            .indices()
            .iter()
            .filter(|&&endpoint| meets(endpoint))
            .count();
        if met > 0 && met < candidates.len() {
            let keeps_met = f64::from(rng.open01()) >= self.exploration;
            candidates.retain(|endpoint| meets(endpoint) == keeps_met);
        }
    }
}
