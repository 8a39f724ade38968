//! `load-aware-scorer`: an endpoint with a shorter engine queue is better. The queue is compared
//! with a fixed length instead of the other endpoints.

use crate::endpoint::EndpointIndex;
use crate::metrics::QUEUE_DEPTH;
use crate::plugin::{
    Context, InvalidParameter, Parameter, Parameters, RequiredState, Scorer, readable,
};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::scorer::rate;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "load-aware-scorer",
    kind: PluginKind::Scorer,
    doc: readable("0.5 * (1 - min(q, threshold) / threshold), q = requests waiting in the engine."),
    source: readable("llm-d-router, scorer/loadaware"),
    parameters: &[Parameter::number(
        "threshold",
        128.0,
        "requests waiting at which an endpoint counts as full, integer from 1",
    )],
    needs: &[RequiredState::Metric(&QUEUE_DEPTH)],
    build,
};

/// The score of an endpoint with an empty queue. The score is below 1, so that other scorers have
/// more weight.
const IDLE: f32 = 0.5;

#[derive(Debug)]
struct LoadAwareScorer {
    threshold: f32,
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    // The cast is exact where it matters: up to 2^24, and no queue is longer.
    let threshold = parameters.integer("threshold", 1..=u32::MAX)? as f32;
    Ok(Plugin::Scorer(Box::new(LoadAwareScorer { threshold })))
}

impl LoadAwareScorer {
    fn rate(&self, queue: f32) -> f32 {
        IDLE * (1.0 - queue.min(self.threshold) / self.threshold)
    }
}

impl Scorer for LoadAwareScorer {
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]) {
        rate(endpoints, scores, |endpoint| {
            context
                .metric(endpoint, |m| m.queue_depth)
                .map(|queue| self.rate(queue))
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn falls_from_a_half_to_nothing_at_the_threshold() {
        let scorer = LoadAwareScorer { threshold: 128.0 };
        assert_eq!(
            [0.0, 32.0, 64.0, 128.0, 129.0, f32::MAX].map(|q| scorer.rate(q)),
            [0.5, 0.375, 0.25, 0.0, 0.0, 0.0]
        );
        assert_eq!(LoadAwareScorer { threshold: 1.0 }.rate(1.0), 0.0);
    }
}
