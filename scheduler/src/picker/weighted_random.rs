//! `weighted-random-picker`: a sample without replacement, each candidate as likely as its total is great.

use crate::candidates::Candidates;
use crate::decision::Ranked;
use crate::picker::{LIST_LENGTH, list_length, rank};
use crate::plugin::{InvalidParameter, Parameters, Picker, for_people};
use crate::plugin_type::{Kind, Plugin, PluginType};
use crate::rng::Rng;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "weighted-random-picker",
    kind: Kind::Picker,
    doc: for_people(
        "A random sample without replacement, weighted by total w: highest U^(1/w) first, U \
        uniform in (0, 1). Totals of 0 come last, in random order.",
    ),
    source: for_people(
        "Efraimidis and Spirakis, \"Weighted random sampling with a reservoir\", 2006 (algorithm A-Res); llm-d-router, picker/weightedrandom",
    ),
    parameters: &[LIST_LENGTH],
    needs: &[],
    build,
};

#[derive(Debug)]
struct WeightedRandom;

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    list_length(parameters)?;
    Ok(Plugin::Picker(Box::new(WeightedRandom)))
}

impl Picker for WeightedRandom {
    fn pick(&self, candidates: &Candidates, max: usize, rng: &mut Rng) -> Option<Ranked> {
        // ln(U) / w orders as U^(1/w) does and does not underflow for small weights.
        rank(candidates, max, rng, |weight, rng| if weight > 0.0 { libm::logf(rng.open01()) / weight } else { f32::NEG_INFINITY })
    }

    fn draws(&self) -> bool {
        true
    }
}
