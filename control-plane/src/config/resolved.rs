//! The complete pipeline: the file, its defaults, and implicit plugins. `switchpointd check` and
//! `/debug/config` show this pipeline.

use std::fmt::Write;

use scheduler::flow::FLOW_CONTROL;
use scheduler::plugin::{ParameterDefault, ParameterValue, RequiredState};
use scheduler::registry::{self, PluginKind, PluginType};
use scheduler::{PipelineSpec, PluginSpec, ProfileSpec};
use serde::Serialize;

use super::reference_items::kind_name;

/// A complete pipeline.
#[derive(Debug, PartialEq, Serialize)]
pub struct ResolvedConfig {
    pub profile_handler: String,
    pub saturation_detector: String,
    /// The length of the ranked list if a picker sets none.
    pub ranked_max: u32,
    /// The profiles, in the order of the file.
    pub profiles: Vec<ResolvedProfile>,
    /// The declared plugins in the order of the file, then the implicit plugins.
    pub plugins: Vec<ResolvedPlugin>,
}

#[derive(Debug, PartialEq, Serialize)]
pub struct ResolvedProfile {
    pub name: String,
    /// The plugins of the profile: filters in their order, scorers, the picker.
    pub plugins: Vec<ResolvedProfilePlugin>,
}

/// The role of a plugin in a profile.
#[derive(Debug, PartialEq, Serialize)]
pub struct ResolvedProfilePlugin {
    pub name: String,
    pub kind: &'static str,
    /// The weight of the plugin, if it is a scorer.
    pub weight: Option<f64>,
}

/// A plugin with all its parameters.
#[derive(Debug, PartialEq, Serialize)]
pub struct ResolvedPlugin {
    pub name: String,
    #[serde(rename = "type")]
    pub plugin_type: String,
    pub kind: &'static str,
    /// Whether the plugin is implicit.
    pub auto_created: bool,
    /// All parameters, in the order of the reference page.
    pub parameters: Vec<ResolvedParameter>,
    /// The state that the plugin reads.
    pub needs: Vec<String>,
}

/// A parameter with its current value.
#[derive(Debug, PartialEq, Serialize)]
pub struct ResolvedParameter {
    pub name: &'static str,
    /// The value from the file, else the default; null if the parameter has neither value.
    pub value: serde_json::Value,
    /// Whether the file sets the parameter.
    pub given: bool,
}

/// The kinds of plugins that every pipeline has, with the type used if none is declared.
const ALWAYS: [(PluginKind, &str); 3] = [
    (PluginKind::ProfileHandler, "single-profile-handler"),
    (PluginKind::Picker, "max-score-picker"),
    (PluginKind::Detector, "utilization-detector"),
];

/// The saturation detector that flow control uses if none is declared.
const FLOW_DETECTOR: &str = "backlog-detector";

/// The producers that llm-d creates for their consumers: plugin type, and the state that it
/// produces.
const PRODUCERS: [(&str, RequiredState); 4] = [
    ("predicted-latency-producer", RequiredState::Latency),
    ("approx-prefix-cache-producer", RequiredState::PrefixIndex),
    ("inflight-load-producer", RequiredState::InFlight),
    ("token-producer", RequiredState::Prompt),
];

// === impl ResolvedConfig ===

impl ResolvedConfig {
    /// Completes the pipeline `spec`.
    #[must_use]
    pub fn from_spec(spec: &PipelineSpec) -> Self {
        let mut plugins: Vec<ResolvedPlugin> = spec
            .plugins
            .iter()
            .filter_map(|plugin| resolved(plugin, false))
            .collect();
        let [handler, picker, detector] = ALWAYS.map(|(_, plugin_type)| plugin_type);
        let holds = spec
            .plugins
            .iter()
            .any(|plugin| plugin.plugin_type == FLOW_CONTROL);
        let detector = if holds { FLOW_DETECTOR } else { detector };
        let mut make = |missing: bool, plugin_type: &str| {
            let made = missing
                .then(|| resolved(&PluginSpec::of_type(plugin_type), true))
                .flatten();
            plugins.extend(made);
        };
        let kind_of = |name: &str| kind(spec, name);
        let has_picker = |profile: &ProfileSpec| {
            profile
                .plugins
                .iter()
                .any(|part| kind_of(&part.name) == Some(PluginKind::Picker))
        };
        make(spec.profile_handler.is_empty(), handler);
        make(!spec.profiles.iter().all(has_picker), picker);
        make(spec.saturation_detector.is_empty(), detector);
        for (producer, state) in PRODUCERS {
            // A producer may need a producer that comes later in the list.
            let needed = plugins
                .iter()
                .any(|plugin| plugin.needs.contains(&state.to_string()));
            if needed && !plugins.iter().any(|plugin| plugin.plugin_type == producer) {
                plugins.extend(resolved(&PluginSpec::of_type(producer), true));
            }
        }
        let profiles = spec.profiles.iter().map(|profile| {
            let mut parts: Vec<ResolvedProfilePlugin> = profile
                .plugins
                .iter()
                .map(|part| part_of(spec, &part.name, part.weight))
                .collect();
            if !has_picker(profile) {
                parts.push(ResolvedProfilePlugin {
                    name: picker.to_owned(),
                    kind: kind_name(PluginKind::Picker),
                    weight: None,
                });
            }
            ResolvedProfile {
                name: profile.name.clone(),
                plugins: parts,
            }
        });
        let or =
            |name: &str, default: &str| if name.is_empty() { default } else { name }.to_owned();
        Self {
            profile_handler: or(&spec.profile_handler, handler),
            saturation_detector: or(&spec.saturation_detector, detector),
            ranked_max: spec.ranked_max,
            profiles: profiles.collect(),
            plugins,
        }
    }

    /// Returns the pipeline as readable text.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = format!(
            "profile handler      {}\nsaturation detector  {}\nranked list          {} endpoints\n",
            self.profile_handler, self.saturation_detector, self.ranked_max
        );
        // Writing to a String cannot fail.
        for profile in &self.profiles {
            let _ = writeln!(text, "profile {}", profile.name);
            for ResolvedProfilePlugin { name, kind, weight } in &profile.plugins {
                let weight = weight.map(|weight| format!(" * {weight}"));
                let _ = writeln!(text, "  {kind:<7} {name}{}", weight.unwrap_or_default());
            }
        }
        for plugin in &self.plugins {
            text.push_str("plugin ");
            text.push_str(&plugin.name);
            if plugin.name != plugin.plugin_type {
                let _ = write!(text, " ({})", plugin.plugin_type);
            }
            let made = if plugin.auto_created {
                ", created by default"
            } else {
                ""
            };
            let _ = writeln!(text, ": {}{made}", plugin.kind);
            if !plugin.needs.is_empty() {
                let _ = writeln!(text, "  needs {}", plugin.needs.join("; "));
            }
            for ResolvedParameter { name, value, given } in &plugin.parameters {
                let default = if *given { "" } else { " (default)" };
                let _ = writeln!(text, "  {name} = {value}{default}");
            }
        }
        text
    }
}

fn resolved(spec: &PluginSpec, auto_created: bool) -> Option<ResolvedPlugin> {
    let PluginType {
        kind,
        parameters,
        needs,
        ..
    } = registry::lookup(&spec.plugin_type)?;
    let parameters = parameters.iter().map(|parameter| {
        let given = spec
            .parameters
            .iter()
            .find(|(name, _)| name == parameter.name)
            .map(|(_, value)| json_of(value));
        ResolvedParameter {
            name: parameter.name,
            given: given.is_some(),
            value: given.unwrap_or_else(|| json_of_default(&parameter.default)),
        }
    });
    Some(ResolvedPlugin {
        name: spec.name().to_owned(),
        plugin_type: spec.plugin_type.clone(),
        kind: kind_name(*kind),
        auto_created,
        parameters: parameters.collect(),
        needs: needs.iter().map(ToString::to_string).collect(),
    })
}

fn part_of(spec: &PipelineSpec, name: &str, weight: f64) -> ResolvedProfilePlugin {
    let kind = kind(spec, name);
    ResolvedProfilePlugin {
        name: name.to_owned(),
        kind: kind.map_or("unknown", kind_name),
        weight: (kind == Some(PluginKind::Scorer)).then_some(weight),
    }
}

fn kind(spec: &PipelineSpec, name: &str) -> Option<PluginKind> {
    let plugin = spec.plugins.iter().find(|plugin| plugin.name() == name)?;
    registry::lookup(&plugin.plugin_type).map(|row| row.kind)
}

fn json_of(value: &ParameterValue) -> serde_json::Value {
    match value {
        ParameterValue::Number(number) => json_of_number(*number),
        ParameterValue::Flag(flag) => (*flag).into(),
        ParameterValue::Text(text) => text.as_str().into(),
        ParameterValue::List(values) => values.iter().map(json_of).collect(),
        ParameterValue::Map(entries) => serde_json::Value::Object(
            entries
                .iter()
                .map(|(key, value)| (key.clone(), json_of(value)))
                .collect(),
        ),
    }
}

fn json_of_default(default: &ParameterDefault) -> serde_json::Value {
    match default {
        ParameterDefault::Number(number) => json_of_number(*number),
        ParameterDefault::Flag(flag) => (*flag).into(),
        ParameterDefault::Text(text) => (*text).into(),
        ParameterDefault::Required
        | ParameterDefault::RequiredNumber
        | ParameterDefault::Structured(_) => serde_json::Value::Null,
    }
}

/// Returns a number as JSON. Whole numbers have no decimal point.
#[expect(
    clippy::cast_possible_truncation,
    reason = "whole and within 2^53, where every f64 is an i64"
)]
fn json_of_number(number: f64) -> serde_json::Value {
    const EXACT_MAX: f64 = 9_007_199_254_740_992.0; // 2^53
    if number.fract() == 0.0 && number.abs() <= EXACT_MAX {
        (number as i64).into()
    } else {
        number.into()
    }
}
