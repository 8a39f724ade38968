//! `random-picker`: any candidate, each as likely.

use crate::candidates::Candidates;
use crate::decision::Ranked;
use crate::picker::{LIST_LENGTH, list_length, rank};
use crate::plugin::{InvalidParameter, Parameters, Picker, for_people};
use crate::plugin_type::{Kind, Plugin, PluginType};
use crate::rng::Rng;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "random-picker",
    kind: Kind::Picker,
    doc: for_people("A random order; scores have no effect."),
    source: for_people("llm-d-router, picker/random"),
    parameters: &[LIST_LENGTH],
    needs: &[],
    build,
};

#[derive(Debug)]
struct Random;

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    list_length(parameters)?;
    Ok(Plugin::Picker(Box::new(Random)))
}

impl Picker for Random {
    fn pick(&self, candidates: &Candidates, max: usize, rng: &mut Rng) -> Option<Ranked> {
        rank(candidates, max, rng, |_, _| 0.0)
    }
}
