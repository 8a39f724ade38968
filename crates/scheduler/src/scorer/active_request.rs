//! `active-request-scorer`: an endpoint with fewer requests in flight is better. The in-flight
//! ledger counts these requests, so their number is never stale or unknown.

use crate::endpoint::EndpointIndex;
use crate::plugin::{
    Context, InvalidParameter, Parameter, Parameters, RequiredState, Scorer, readable,
};
use crate::plugin_type::{Plugin, PluginKind, PluginType};

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "active-request-scorer",
    kind: PluginKind::Scorer,
    doc: readable(
        "1 when c <= idleThreshold, else (max - c) / max * maxBusyScore, c = requests in flight, max over the candidates.",
    ),
    source: readable("llm-d-router, scorer/activerequest"),
    parameters: &[
        Parameter::number(
            "idleThreshold",
            0.0,
            "highest number of requests in flight that counts as idle, integer",
        ),
        Parameter::number(
            "maxBusyScore",
            1.0,
            "upper bound of the score of a busy endpoint, 0 to 1",
        ),
    ],
    needs: &[RequiredState::InFlight],
    build,
};

#[derive(Debug)]
struct ActiveRequestScorer {
    idle_threshold: f32,
    max_busy_score: f32,
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    Ok(Plugin::Scorer(Box::new(ActiveRequestScorer {
        idle_threshold: to_f32(parameters.integer("idleThreshold", 0..=u32::MAX)?),
        max_busy_score: parameters.number("maxBusyScore", 0.0..=1.0)? as f32,
    })))
}

impl ActiveRequestScorer {
    fn rate(&self, requests: f32, max: f32) -> f32 {
        // The division is safe: if `requests` exceeds the threshold, it is above 0, and so is
        // `max`.
        if requests <= self.idle_threshold {
            1.0
        } else {
            (max - requests) / max * self.max_busy_score
        }
    }
}

impl Scorer for ActiveRequestScorer {
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]) {
        let mut max = 0.0_f32;
        for (score, &endpoint) in scores.iter_mut().zip(endpoints) {
            *score = to_f32(context.requests(endpoint));
            max = max.max(*score);
        }
        for score in scores {
            *score = self.rate(*score, max);
        }
    }
}

// Converts a count of requests. The cast is exact up to 2^24, and no proxy has so many requests in
// flight.
fn to_f32(count: u32) -> f32 {
    count as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_gets_one_and_the_busiest_nothing() {
        let scorer = ActiveRequestScorer {
            idle_threshold: 0.0,
            max_busy_score: 1.0,
        };
        assert_eq!(
            [0.0, 1.0, 2.0, 4.0].map(|c| scorer.rate(c, 4.0)),
            [1.0, 0.75, 0.5, 0.0]
        );
        assert_eq!(
            scorer.rate(0.0, 0.0),
            1.0,
            "no endpoint has anything in flight"
        );
        assert_eq!(scorer.rate(to_f32(u32::MAX), to_f32(u32::MAX)), 0.0);
    }

    #[test]
    fn threshold_and_busy_score() {
        let scorer = ActiveRequestScorer {
            idle_threshold: 2.0,
            max_busy_score: 0.5,
        };
        assert_eq!(
            [2.0, 3.0, 4.0].map(|c| scorer.rate(c, 4.0)),
            [1.0, 0.125, 0.0]
        );
    }
}
