//! `token-load-scorer`: an endpoint with less prefill work, including this request, is better.

use crate::endpoint::EndpointIndex;
use crate::plugin::{
    Context, InvalidParameter, Parameter, Parameters, RequiredState, Scorer, readable,
};
use crate::plugin_type::{Plugin, PluginKind, PluginType};

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "token-load-scorer",
    kind: PluginKind::Scorer,
    doc: readable(
        "1 - min(t, T) / T, t = uncached prompt tokens in flight + those of this request, T = queueThresholdTokens.",
    ),
    source: readable("llm-d-router, scorer/tokenload"),
    parameters: &[Parameter::number(
        "queueThresholdTokens",
        4_194_304.0,
        "prompt tokens in flight at which an endpoint counts as full, integer from 1",
    )],
    needs: &[
        RequiredState::InFlight,
        RequiredState::PrefixIndex,
        RequiredState::Prompt,
    ],
    build,
};

#[derive(Debug)]
struct TokenLoadScorer {
    threshold_tokens: u32,
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    Ok(Plugin::Scorer(Box::new(TokenLoadScorer {
        threshold_tokens: parameters.integer("queueThresholdTokens", 1..=u32::MAX)?,
    })))
}

impl TokenLoadScorer {
    fn rate(&self, tokens: u64) -> f32 {
        let over = u32::try_from(tokens)
            .unwrap_or(u32::MAX)
            .min(self.threshold_tokens);
        // An f32 is precise enough, because a score is from 0 to 1.
        (1.0 - f64::from(over) / f64::from(self.threshold_tokens)) as f32
    }
}

impl Scorer for TokenLoadScorer {
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]) {
        for (score, &endpoint) in scores.iter_mut().zip(endpoints) {
            let in_flight = context.load(endpoint).prefill_tokens;
            *score =
                self.rate(in_flight.saturating_add(u64::from(context.uncached_tokens(endpoint))));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn falls_to_nothing_at_the_threshold() {
        let scorer = TokenLoadScorer {
            threshold_tokens: 1000,
        };
        assert_eq!(
            [0, 250, 1000, 1001, u64::MAX].map(|t| scorer.rate(t)),
            [1.0, 0.75, 0.0, 0.0, 0.0]
        );
    }
}
