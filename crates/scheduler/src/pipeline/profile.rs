//! Builds a profile from its specification.

use super::spec::{
    InvalidPipeline, PLUGINS_MAX, PipelineSpec, ProfilePlugin, ProfileSpec, WEIGHT_MAX, no_such,
};
use crate::picker;
use crate::plugin::{Filter, Scorer};
use crate::plugin_type::Plugin;
use crate::run::Profile;
use crate::settings::ProducerSetting;

/// Builds a profile from the plugins that it names.
pub(super) fn build(
    profile: &ProfileSpec,
    pipeline: &PipelineSpec,
) -> Result<Profile, InvalidPipeline> {
    if profile.plugins.len() > PLUGINS_MAX {
        return Err(InvalidPipeline::TooManyPlugins(profile.plugins.len()));
    }
    let ranked_max = usize::try_from(pipeline.ranked_max)
        .map_err(|_| InvalidPipeline::RankedMax(pipeline.ranked_max))?;
    let mut built = Profile {
        name: profile.name.as_str().into(),
        filters: Vec::new(),
        scorers: Vec::new(),
        shedders: Vec::new(),
        picker: Box::new(picker::max_score::MaxScorePicker),
        listed: None,
        ranked_max,
    };
    let mut picker_name: Option<&str> = None;
    for part in &profile.plugins {
        let by = || format!("profile `{}`", profile.name);
        let plugin = pipeline
            .plugins
            .iter()
            .find(|plugin| plugin.name() == part.name);
        let plugin = plugin.ok_or_else(|| no_such("plugin", &part.name, &by()))?;
        let (made, parameters) = plugin.build()?;
        let mut filter: Option<Box<dyn Filter>> = None;
        let mut scorer: Option<Box<dyn Scorer>> = None;
        match made.split().0 {
            Plugin::Filter(made) => filter = Some(made),
            Plugin::Detector(made) => filter = Some(made),
            Plugin::Scorer(made) => scorer = Some(made),
            Plugin::FilteringScorer(first, second) => {
                filter = Some(first);
                scorer = Some(second);
            }
            Plugin::SheddingScorer(made, shedder) => {
                scorer = Some(made);
                built.shedders.push(shedder);
            }
            Plugin::Picker(picker) => {
                if let Some(first) = picker_name.replace(&part.name) {
                    return Err(InvalidPipeline::TwoPickers(
                        first.to_owned(),
                        part.name.clone(),
                    ));
                }
                built.picker = picker;
                built.listed =
                    picker::list_length(&parameters).map_err(|error| plugin.refuse(error))?;
            }
            // These plugins are ignored: in llm-d's configuration files, profiles also name these
            // plugins, but they have no effect in a profile.
            Plugin::Producer(ProducerSetting::Latency(_) | ProducerSetting::Tracker) => {}
            _ => return Err(no_such("filter, scorer or picker", &part.name, &by())),
        }
        let name: Box<str> = part.name.as_str().into();
        built
            .filters
            .extend(filter.map(|filter| (name.clone(), filter)));
        if let Some(scorer) = scorer {
            built.scorers.push((name, part.weight()?, scorer));
        }
    }
    built.ranked_max = built.listed.unwrap_or(ranked_max);
    Ok(built)
}

impl ProfilePlugin {
    fn weight(&self) -> Result<f32, InvalidPipeline> {
        if !(0.0..=f64::from(WEIGHT_MAX)).contains(&self.weight) {
            return Err(InvalidPipeline::Weight {
                plugin: self.name.clone(),
            });
        }
        // The cast is precise enough, because an f32 has enough digits for a weight.
        let weight = self.weight as f32;
        Ok(weight)
    }
}
