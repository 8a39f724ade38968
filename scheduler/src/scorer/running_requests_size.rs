//! `running-requests-size-scorer`: the fewer requests the engine runs, the better.

use crate::endpoint::EndpointIndex;
use crate::plugin::{Context, InvalidParameter, Parameters, Scorer, State, for_people};
use crate::plugin_type::{Kind, Plugin, PluginType};
use crate::scorer::rate_by_load;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "running-requests-size-scorer",
    kind: Kind::Scorer,
    doc: for_people(
        "(max - r) / (max - min) over the candidates, r = requests running in the \
    engine; 1 when all are equal.",
    ),
    source: for_people("llm-d-router, scorer/runningrequests"),
    parameters: &[],
    needs: &[State::RunningRequests],
    build,
};

#[derive(Debug)]
struct RunningRequestsSize;

fn build(_: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    Ok(Plugin::Scorer(Box::new(RunningRequestsSize)))
}

impl Scorer for RunningRequestsSize {
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]) {
        rate_by_load(endpoints, scores, |endpoint| context.metric(endpoint, |m| m.running_requests));
    }
}
