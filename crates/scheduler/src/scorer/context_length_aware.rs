//! `context-length-aware`: prefers endpoints whose label says that they are set up for prompts of
//! the request's length.
//!
//! The label names a range of prompt lengths. An endpoint whose range contains the prompt always
//! gets a higher score than an endpoint whose range does not. Of two ranges that contain the
//! prompt, a narrower range, and a range with more room above the prompt, is better. Of two ranges
//! that do not, the range nearer to the prompt's length is better. With `enableFiltering` the
//! plugin also drops endpoints whose range excludes the prompt, before the first scorer runs.

use crate::candidates::Candidates;
use crate::endpoint::EndpointIndex;
use crate::plugin::{
    Context, Filter, InvalidParameter, Parameter, Parameters, RequiredState, Scorer, readable,
};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::rng::Rng;
use crate::scorer::UNKNOWN;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "context-length-aware",
    kind: PluginKind::Scorer,
    doc: readable(
        "Inside the label's range min-max: 0.3 + 0.7 * (0.7 / (1 + (max - min) / 10000) + 0.3 * \
        (max - t) / (max - min)), t = prompt tokens; 1 if min = max. Outside: 0.3 / (1 + d / \
        1000), d = tokens to the nearer end. 0.5 without the label, 0 if the label is not a \
        range.",
    ),
    source: readable("llm-d-router, scorer/contextlengthaware"),
    parameters: &[
        Parameter::text(
            "label",
            "llm-d.ai/context-length-range",
            "label with the range of prompt tokens, min-max",
        ),
        Parameter::flag(
            "enableFiltering",
            false,
            "also drop endpoints whose range excludes the prompt; endpoints without the label stay",
        ),
    ],
    needs: &[RequiredState::Labels, RequiredState::Prompt],
    build,
};

/// The maximum score of an endpoint whose range does not contain the prompt, and the minimum score
/// of an endpoint whose range does.
const OUT_OF_RANGE_BELOW: f64 = 0.3;
/// The weight of the range's width in the score of an endpoint whose range contains the prompt. The
/// room above the prompt has the rest of the weight.
const WIDTH_SHARE: f64 = 0.7;
/// The width of a range that halves the width's part of the score, in tokens.
/// [`DISTANCE_SCALE_TOKENS`] is the distance from a range that halves the score.
const WIDTH_SCALE_TOKENS: f64 = 10_000.0;
const DISTANCE_SCALE_TOKENS: f64 = 1_000.0;

#[derive(Clone, Debug)]
struct ContextLengthAwareScorer {
    label: Box<str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ContextLengthRange {
    min: u32,
    max: u32,
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    let plugin = ContextLengthAwareScorer {
        label: parameters.text("label")?.into(),
    };
    Ok(if parameters.flag("enableFiltering")? {
        Plugin::FilteringScorer(Box::new(plugin.clone()), Box::new(plugin))
    } else {
        Plugin::Scorer(Box::new(plugin))
    })
}

// === impl ContextLengthRange ===

impl ContextLengthRange {
    fn parse(label: &str) -> Option<Self> {
        let (min, max) = label.split_once('-')?;
        let range = Self {
            min: min.trim().parse().ok()?,
            max: max.trim().parse().ok()?,
        };
        (range.min <= range.max).then_some(range)
    }

    fn contains(self, tokens: u32) -> bool {
        (self.min..=self.max).contains(&tokens)
    }

    fn rate(self, tokens: u32) -> f32 {
        let score = if !self.contains(tokens) {
            let distance = f64::from(tokens.abs_diff(if tokens > self.max {
                self.max
            } else {
                self.min
            }));
            OUT_OF_RANGE_BELOW / (1.0 + distance / DISTANCE_SCALE_TOKENS)
        } else if self.min == self.max {
            1.0
        } else {
            let width = f64::from(self.max - self.min);
            let room = f64::from(self.max - tokens) / width;
            let fit = WIDTH_SHARE / (1.0 + width / WIDTH_SCALE_TOKENS) + (1.0 - WIDTH_SHARE) * room;
            OUT_OF_RANGE_BELOW + (1.0 - OUT_OF_RANGE_BELOW) * fit
        };
        // An f32 is precise enough, because a score is from 0 to 1.
        score as f32
    }
}

impl Scorer for ContextLengthAwareScorer {
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]) {
        for (score, &endpoint) in scores.iter_mut().zip(endpoints) {
            *score = match context.label(endpoint, &self.label) {
                None => UNKNOWN,
                Some(label) => ContextLengthRange::parse(label)
                    .map_or(0.0, |range| range.rate(context.request.prompt_tokens)),
            };
        }
    }
}

impl Filter for ContextLengthAwareScorer {
    fn filter(&self, context: &Context<'_>, candidates: &mut Candidates, _: &mut Rng) {
        let tokens = context.request.prompt_tokens;
        let fits = |label: &str| {
            ContextLengthRange::parse(label).is_some_and(|range| range.contains(tokens))
        };
        candidates.retain(|endpoint| context.label(endpoint, &self.label).is_none_or(fits));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(label: &str, tokens: u32) -> f32 {
        ContextLengthRange::parse(label).unwrap().rate(tokens)
    }

    #[test]
    fn in_range_beats_out_of_range_whatever_the_width() {
        assert!(rate("0-4000000000", 4_000_000_000) > OUT_OF_RANGE_BELOW as f32);
        assert!(rate("0-4000000000", 4_000_000_000) > rate("0-8192", 8193));
        assert_eq!(rate("2048-2048", 2048), 1.0);
    }

    #[test]
    fn narrower_and_roomier_is_better_in_range_nearer_is_better_out_of_it() {
        assert!(rate("0-2048", 1000) > rate("0-8192", 1000));
        assert!(rate("0-8192", 1000) > rate("0-8192", 8000));
        assert!(rate("0-2048", 3000) > rate("0-1024", 3000));
        assert!(rate("8192-16384", 8000) > rate("8192-16384", 100));
        assert_eq!(
            rate("1000-2000", 0),
            0.15,
            "1,000 tokens away halves the 0.3"
        );
        assert_eq!(rate("1000-2000", 3000), 0.15);
    }

    #[test]
    fn the_formula_at_both_ends() {
        assert_eq!(rate("0-10000", 0), (0.3 + 0.7 * (0.7 / 2.0 + 0.3)) as f32);
        assert_eq!(rate("0-10000", 10000), (0.3 + 0.7 * (0.7 / 2.0)) as f32);
    }

    #[test]
    fn labels_that_are_not_a_range() {
        for label in [
            "",
            "2048",
            "8192-2048",
            "a-b",
            "0-1-2",
            "-5-10",
            "0-99999999999",
            "0 to 5",
        ] {
            assert_eq!(ContextLengthRange::parse(label), None, "{label}");
        }
        assert_eq!(
            ContextLengthRange::parse(" 0 - 2048 "),
            Some(ContextLengthRange { min: 0, max: 2048 })
        );
    }
}
