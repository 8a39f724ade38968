//! `slo-headroom-tier-filter`: keeps those that would serve the request within all SLOs, and now and then the others.

use crate::candidates::Candidates;
use crate::endpoint::EndpointIndex;
use crate::plugin::{Context, Default, Filter, InvalidParameter, Parameter, Parameters, State, for_people};
use crate::plugin_type::{Kind, Plugin, PluginType};
use crate::predictions::EndpointPrediction;
use crate::rng::Rng;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "slo-headroom-tier-filter",
    kind: Kind::Filter,
    doc: for_people(
        "Keeps endpoints whose TTFT and TPOT headroom is not negative; with probability \
        epsilonExploreNeg it keeps the others instead. An endpoint without a prediction is among \
        the others. It keeps all if there is no prediction at all, or if all are in the same \
        group.",
    ),
    source: for_people("llm-d-router, filter/sloheadroomtier"),
    parameters: &[Parameter {
        name: "epsilonExploreNeg",
        default: Default::Number(0.01),
        doc: for_people("how often the endpoints without headroom are kept instead, 0 to 1"),
    }],
    needs: &[State::Latency, State::InFlight, State::PrefixIndex, State::Prompt],
    build,
};

#[derive(Debug)]
struct SloHeadroomTier {
    exploration: f64,
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    Ok(Plugin::Filter(Box::new(SloHeadroomTier { exploration: parameters.number("epsilonExploreNeg", 0.0..=1.0)? })))
}

impl Filter for SloHeadroomTier {
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates, rng: &mut Rng) {
        let meets = |endpoint: EndpointIndex| context.prediction(endpoint).is_some_and(EndpointPrediction::meets);
        let met = candidates.indices().iter().filter(|&&endpoint| meets(endpoint)).count();
        if met > 0 && met < candidates.len() {
            let keeps_met = f64::from(rng.open01()) >= self.exploration;
            candidates.retain(|endpoint| meets(endpoint) == keeps_met);
        }
    }
}
