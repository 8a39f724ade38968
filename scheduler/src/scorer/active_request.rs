//! `active-request-scorer`: the fewer requests this proxy has outstanding, the better. Counted by us, so never stale and never unknown.

use crate::plugin::{Context, Default, InvalidParameter, Kind, Parameter, Parameters, Plugin, PluginType, Scorer};
use crate::snapshot::EndpointIndex;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "active-request-scorer",
    kind: Kind::Scorer,
    doc: "1 when c <= idleThreshold, else (max - c) / max * maxBusyScore, c = requests in flight, max over the candidates.",
    source: "llm-d-router, scorer/activerequest",
    parameters: &[
        Parameter {
            name: "idleThreshold",
            default: Default::Number(0.0),
            doc: "requests in flight that still count as idle, a whole number",
        },
        Parameter { name: "maxBusyScore", default: Default::Number(1.0), doc: "the score that busy endpoints stay below, 0 to 1" },
    ],
    build,
};

#[derive(Debug)]
struct ActiveRequest {
    idle_threshold: u32,
    max_busy_score: f64,
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    Ok(Plugin::Scorer(Box::new(ActiveRequest {
        idle_threshold: parameters.integer("idleThreshold", 0..=u32::MAX)?,
        max_busy_score: parameters.number("maxBusyScore", 0.0..=1.0)?,
    })))
}

impl ActiveRequest {
    fn rate(&self, requests: u32, max: u32) -> f32 {
        if requests <= self.idle_threshold {
            return 1.0;
        }
        // Not idle, so `max` is above 0. In f64, where counts are exact.
        #[expect(clippy::cast_possible_truncation, reason = "a score, 0 to 1")]
        let score = (f64::from(max.saturating_sub(requests)) / f64::from(max) * self.max_busy_score) as f32;
        score
    }
}

impl Scorer for ActiveRequest {
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]) {
        let requests = |endpoint| context.load(endpoint).requests;
        let max = endpoints.iter().map(|&endpoint| requests(endpoint)).max().unwrap_or(0);
        for (score, &endpoint) in scores.iter_mut().zip(endpoints) {
            *score = self.rate(requests(endpoint), max);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_gets_one_and_the_busiest_nothing() {
        let scorer = ActiveRequest { idle_threshold: 0, max_busy_score: 1.0 };
        assert_eq!([0, 1, 2, 4].map(|c| scorer.rate(c, 4)), [1.0, 0.75, 0.5, 0.0]);
        assert_eq!(scorer.rate(0, 0), 1.0, "nobody has anything in flight");
        assert_eq!(scorer.rate(u32::MAX, u32::MAX), 0.0);
    }

    #[test]
    fn threshold_and_busy_score() {
        let scorer = ActiveRequest { idle_threshold: 2, max_busy_score: 0.5 };
        assert_eq!([2, 3, 4].map(|c| scorer.rate(c, 4)), [1.0, 0.125, 0.0]);
    }
}
