//! `queue-scorer`: the shorter the engine's queue, the better.

use crate::endpoint::EndpointIndex;
use crate::plugin::{Context, InvalidParameter, Parameters, Scorer, State, for_people};
use crate::plugin_type::{Kind, Plugin, PluginType};
use crate::scorer::rate_by_load;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "queue-scorer",
    kind: Kind::Scorer,
    doc: for_people("(max - q) / (max - min) over the candidates, q = requests waiting in the engine; 1 when all are equal."),
    source: for_people("llm-d-router, scorer/queuedepth"),
    parameters: &[],
    needs: &[State::QueueDepth],
    build,
};

#[derive(Debug)]
struct Queue;

fn build(_: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    Ok(Plugin::Scorer(Box::new(Queue)))
}

impl Scorer for Queue {
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]) {
        rate_by_load(endpoints, scores, |endpoint| context.metric(endpoint, |m| m.queue_depth));
    }
}
