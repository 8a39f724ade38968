//! `weighted-random-picker`: draws a random sample without replacement, weighted by total score.

use crate::candidates::Candidates;
use crate::decision::RankedList;
use crate::picker::{LIST_LENGTH, list_length, rank};
use crate::plugin::{InvalidParameter, Parameters, Picker, readable};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::rng::Rng;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "weighted-random-picker",
    kind: PluginKind::Picker,
    doc: readable(
        "A random sample without replacement, weighted by total w: highest U^(1/w) first, U \
        uniform in (0, 1). Totals of 0 come last, in random order.",
    ),
    source: readable(
        "Efraimidis and Spirakis, 2006 (algorithm A-Res); llm-d-router, picker/weightedrandom",
    ),
    parameters: &[LIST_LENGTH],
    needs: &[],
    build,
};

#[derive(Debug)]
struct WeightedRandomPicker;

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    list_length(parameters)?;
    Ok(Plugin::Picker(Box::new(WeightedRandomPicker)))
}

impl Picker for WeightedRandomPicker {
    fn pick(&self, candidates: &Candidates, max: usize, rng: &mut Rng) -> Option<RankedList> {
        // The key is ln(U) / w. This key has the same order as U^(1/w), and does not underflow for
        // small weights.
        rank(candidates, max, rng, |weight, rng| {
            if weight > 0.0 {
                libm::logf(rng.open01()) / weight
            } else {
                f32::NEG_INFINITY
            }
        })
    }

    fn draws(&self) -> bool {
        true
    }
}
