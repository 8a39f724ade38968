//! `lora-affinity-scorer`: best where the adapter is loaded, then where there is room for it.

use crate::plugin::{Context, InvalidParameter, Kind, Parameters, Plugin, PluginType, Scorer, State};
use crate::scorer::rate;
use crate::snapshot::{EndpointIndex, LoraMetrics};

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "lora-affinity-scorer",
    kind: Kind::Scorer,
    doc: "1 where the requested adapter runs; 0.8 where running + waiting adapters < the most that fit; 0.6 where it waits; else 0.",
    source: "llm-d-router, scorer/loraaffinity",
    parameters: &[],
    needs: &[State::Adapters],
    build,
};

const RUNNING: f32 = 1.0;
const ROOM: f32 = 0.8;
const WAITING: f32 = 0.6;
const FULL: f32 = 0.0;

#[derive(Debug)]
struct LoraAffinity;

fn build(_: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    Ok(Plugin::Scorer(Box::new(LoraAffinity)))
}

impl LoraAffinity {
    fn rate(model: &str, lora: &LoraMetrics) -> f32 {
        let lists = |adapters: &[Box<str>]| adapters.iter().any(|adapter| **adapter == *model);
        if lists(&lora.running) {
            RUNNING
        } else if lora.running.len() + lora.waiting.len() < usize::try_from(lora.max).unwrap_or(usize::MAX) {
            ROOM
        } else if lists(&lora.waiting) {
            WAITING
        } else {
            FULL
        }
    }
}

impl Scorer for LoraAffinity {
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]) {
        rate(endpoints, scores, |endpoint| {
            let lora = context.metrics(endpoint)?.lora.as_ref()?;
            Some(Self::rate(context.request.model, lora))
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(running: &[&str], waiting: &[&str], max: u32) -> f32 {
        let boxed = |names: &[&str]| names.iter().map(|&n| n.into()).collect();
        LoraAffinity::rate("sql", &LoraMetrics { running: boxed(running), waiting: boxed(waiting), max })
    }

    #[test]
    fn running_room_waiting_full() {
        assert_eq!(rate(&["chat", "sql"], &[], 2), RUNNING, "running counts even where nothing more fits");
        assert_eq!(rate(&["chat"], &[], 2), ROOM);
        assert_eq!(rate(&["chat"], &["sql"], 3), ROOM, "room comes before waiting, as in the reference");
        assert_eq!(rate(&["chat"], &["sql"], 2), WAITING);
        assert_eq!(rate(&["chat"], &["code"], 2), FULL);
        assert_eq!(rate(&[], &[], 0), FULL);
        assert_eq!(rate(&["sql-v2", "SQL"], &[], 2), FULL, "names are compared whole");
    }
}
