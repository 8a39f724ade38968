//! `max-score-picker`: ranks candidates by total score, highest first.

use crate::candidates::Candidates;
use crate::decision::RankedList;
use crate::picker::{LIST_LENGTH, list_length, rank};
use crate::plugin::{InvalidParameter, Parameters, Picker, readable};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::rng::Rng;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "max-score-picker",
    kind: PluginKind::Picker,
    doc: readable("Highest weighted total first; equal totals in random order."),
    source: readable("llm-d-router, picker/maxscore"),
    parameters: &[LIST_LENGTH],
    needs: &[],
    build,
};

#[derive(Debug)]
pub(crate) struct MaxScorePicker;

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    list_length(parameters)?;
    Ok(Plugin::Picker(Box::new(MaxScorePicker)))
}

impl Picker for MaxScorePicker {
    fn pick(&self, candidates: &Candidates, max: usize, rng: &mut Rng) -> Option<RankedList> {
        rank(candidates, max, rng, |score, _| score)
    }
}
