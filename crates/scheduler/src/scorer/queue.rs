//! `queue-scorer`: an endpoint with a shorter engine queue is better.

use crate::endpoint::EndpointIndex;
use crate::metrics::QUEUE_DEPTH;
use crate::plugin::{Context, RequiredState, Scorer, readable};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::scorer::rate_by_load;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "queue-scorer",
    kind: PluginKind::Scorer,
    doc: readable(
        "(max - q) / (max - min) over the candidates, q = requests waiting in the engine; 1 when all are equal.",
    ),
    source: readable("llm-d-router, scorer/queuedepth"),
    parameters: &[],
    needs: &[RequiredState::Metric(&QUEUE_DEPTH)],
    build: |_| Ok(Plugin::Scorer(Box::new(QueueScorer))),
};

#[derive(Debug)]
struct QueueScorer;

impl Scorer for QueueScorer {
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]) {
        rate_by_load(endpoints, scores, |endpoint| {
            context.metric(endpoint, |m| m.queue_depth)
        });
    }
}
