//! `random-picker`: picks every candidate with equal probability.

use crate::candidates::Candidates;
use crate::decision::RankedList;
use crate::picker::{LIST_LENGTH, list_length, rank};
use crate::plugin::{InvalidParameter, Parameters, Picker, readable};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::rng::Rng;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "random-picker",
    kind: PluginKind::Picker,
    doc: readable("A random order; scores have no effect."),
    source: readable("llm-d-router, picker/random"),
    parameters: &[LIST_LENGTH],
    needs: &[],
    build,
};

#[derive(Debug)]
struct RandomPicker;

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    list_length(parameters)?;
    Ok(Plugin::Picker(Box::new(RandomPicker)))
}

impl Picker for RandomPicker {
    fn pick(&self, candidates: &Candidates, max: usize, rng: &mut Rng) -> Option<RankedList> {
        rank(candidates, max, rng, |_, _| 0.0)
    }
}
