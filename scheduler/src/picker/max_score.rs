//! `max-score-picker`: the greatest total first.

use crate::candidates::Candidates;
use crate::decision::Ranked;
use crate::picker::{LIST_LENGTH, list_length, rank};
use crate::plugin::{InvalidParameter, Parameters, Picker, for_people};
use crate::plugin_type::{Kind, Plugin, PluginType};
use crate::rng::Rng;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "max-score-picker",
    kind: Kind::Picker,
    doc: for_people("Highest weighted total first; equal totals in random order."),
    source: for_people("llm-d-router, picker/maxscore"),
    parameters: &[LIST_LENGTH],
    needs: &[],
    build,
};

#[derive(Debug)]
pub(crate) struct MaxScore;

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    list_length(parameters)?;
    Ok(Plugin::Picker(Box::new(MaxScore)))
}

impl Picker for MaxScore {
    fn pick(&self, candidates: &Candidates, max: usize, rng: &mut Rng) -> Option<Ranked> {
        rank(candidates, max, rng, |score, _| score)
    }
}
