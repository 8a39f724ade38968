//! `running-requests-size-scorer`: an endpoint that runs fewer requests is better.

use crate::endpoint::EndpointIndex;
use crate::metrics::RUNNING_REQUESTS;
use crate::plugin::{Context, RequiredState, Scorer, readable};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::scorer::rate_by_load;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "running-requests-size-scorer",
    kind: PluginKind::Scorer,
    doc: readable(
        "(max - r) / (max - min) over the candidates, r = requests running in the \
    engine; 1 when all are equal.",
    ),
    source: readable("llm-d-router, scorer/runningrequests"),
    parameters: &[],
    needs: &[RequiredState::Metric(&RUNNING_REQUESTS)],
    build: |_| Ok(Plugin::Scorer(Box::new(RunningRequestsSizeScorer))),
};

#[derive(Debug)]
struct RunningRequestsSizeScorer;

impl Scorer for RunningRequestsSizeScorer {
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]) {
        rate_by_load(endpoints, scores, |endpoint| {
            context.metric(endpoint, |m| m.running_requests)
        });
    }
}
