//! `prefix-cache-scorer`: an endpoint that is estimated to have cached more of the prompt is
//! better.

use crate::endpoint::EndpointIndex;
use crate::plugin::{
    Context, InvalidParameter, Parameter, Parameters, RequiredState, Scorer, readable,
};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::scorer::PREFIX_PRODUCER;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "prefix-cache-scorer",
    kind: PluginKind::Scorer,
    doc: readable(
        "w * min(1, matched tokens / S)^2 + (1 - w) * matched blocks / all blocks, w = matchLengthWeight, S = matchLengthScaleTokens.",
    ),
    source: readable("llm-d-router, scorer/prefix"),
    parameters: &[
        Parameter::number(
            "matchLengthWeight",
            0.0,
            "weight of the length of the match; the rest is the weight of its ratio, 0 to 1",
        ),
        Parameter::number(
            "matchLengthScaleTokens",
            8192.0,
            "matched tokens that give the full score for length, integer from 1",
        ),
        PREFIX_PRODUCER,
    ],
    needs: &[RequiredState::PrefixIndex],
    build,
};

#[derive(Debug)]
struct PrefixCacheScorer {
    length_weight: f64,
    length_scale_tokens: u32,
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    Ok(Plugin::Scorer(Box::new(PrefixCacheScorer {
        length_weight: parameters.number("matchLengthWeight", 0.0..=1.0)?,
        length_scale_tokens: parameters.integer("matchLengthScaleTokens", 1..=u32::MAX)?,
    })))
}

impl PrefixCacheScorer {
    fn rate(&self, matched_blocks: u32, blocks: u32, block_tokens: u32) -> f32 {
        if blocks == 0 {
            return 0.0;
        }
        let ratio = f64::from(matched_blocks.min(blocks)) / f64::from(blocks);
        let matched_tokens = f64::from(matched_blocks.min(blocks)) * f64::from(block_tokens);
        let length = (matched_tokens / f64::from(self.length_scale_tokens)).min(1.0);
        // An f32 is precise enough, because a score is from 0 to 1.
        (self.length_weight * length * length + (1.0 - self.length_weight) * ratio) as f32
    }
}

impl Scorer for PrefixCacheScorer {
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]) {
        let blocks = context.request.blocks();
        for (score, &endpoint) in scores.iter_mut().zip(endpoints) {
            *score = self.rate(
                context.affinity_blocks(endpoint),
                blocks,
                context.request.prefix_block_tokens,
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratio_alone_by_default() {
        let scorer = PrefixCacheScorer {
            length_weight: 0.0,
            length_scale_tokens: 8192,
        };
        assert_eq!(scorer.rate(0, 4, 64), 0.0);
        assert_eq!(scorer.rate(3, 4, 64), 0.75);
        assert_eq!(
            scorer.rate(9, 4, 64),
            1.0,
            "more than there is cannot match"
        );
        assert_eq!(
            scorer.rate(0, 0, 64),
            0.0,
            "a request without blocks matches nothing"
        );
    }

    #[test]
    fn length_counts_squared_up_to_the_scale() {
        let scorer = PrefixCacheScorer {
            length_weight: 1.0,
            length_scale_tokens: 1000,
        };
        assert_eq!(scorer.rate(5, 100, 100), 0.25);
        assert_eq!(scorer.rate(10, 100, 100), 1.0);
        assert_eq!(scorer.rate(100, 100, 100), 1.0);
        let half = PrefixCacheScorer {
            length_weight: 0.5,
            length_scale_tokens: 1000,
        };
        assert_eq!(half.rate(5, 10, 100), 0.5 * 0.25 + 0.5 * 0.5);
    }
}
