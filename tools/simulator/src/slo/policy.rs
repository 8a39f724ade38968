//! The policies of the SLO experiment, by name.

use scheduler::plugin::ParameterValue;
use scheduler::registry;
use scheduler::{PipelineSpec, PluginSpec, ProfilePlugin, ProfileSpec};

/// A policy of the SLO experiment.
#[derive(Clone, Debug)]
pub(crate) enum SloPolicy {
    /// The profiles of the proposal, or a profile of the newer plugins, with parameters.
    Slo(PipelineSpec),
    /// The profile without a configuration, or weighted scorers of load and prefix.
    Scored(PipelineSpec),
    /// Each endpoint in turn.
    Turns,
}

const PROPOSED: [&str; 2] = ["slo-scorer", "weighted-random-picker"];
const NEWER: [&str; 4] = [
    "slo-headroom-tier-filter",
    "latency-scorer",
    "max-score-picker",
    ADMITTER,
];

/// The scorers of `weighed` with their weights: the default before `marginal-cost-scorer`.
const WEIGHED: [(&str, f64); 4] = [
    ("queue-scorer", 2.0),
    ("kv-cache-utilization-scorer", 2.0),
    ("prefix-cache-scorer", 3.0),
    ("active-request-scorer", 2.0),
];

/// Declared as a plugin, but part of no profile.
const ADMITTER: &str = "latency-slo-admitter";

// === impl SloPolicy ===

impl SloPolicy {
    /// The policy of this name: `default`, `weighed`, `turns`, `slo` (the proposal's example) or
    /// `newer`. The last two take parameters: `slo:headroomSelectionStrategy=most`.
    ///
    /// # Errors
    /// When there is no such policy or parameter.
    pub(crate) fn named(name: &str) -> Result<Self, String> {
        let (name, parameters) = name.split_once(':').unwrap_or((name, ""));
        let pair = |pair: &str| {
            let (key, value) = pair
                .split_once('=')
                .ok_or_else(|| format!("`{pair}` is no key=value"))?;
            Ok((
                key.to_owned(),
                value.parse().map_or_else(
                    |_| ParameterValue::Text(value.to_owned()),
                    ParameterValue::Number,
                ),
            ))
        };
        let parameters: Vec<(String, ParameterValue)> = parameters
            .split(',')
            .filter(|pair| !pair.is_empty())
            .map(pair)
            .collect::<Result<_, String>>()?;
        match name {
            "default" => Ok(Self::Scored(PipelineSpec::default())),
            "weighed" => {
                let plugins = WEIGHED.map(|(scorer, weight)| (PluginSpec::of_type(scorer), weight));
                Ok(Self::Scored(PipelineSpec::of_one_profile(
                    "weighed",
                    plugins.into(),
                    1,
                )))
            }
            "turns" => Ok(Self::Turns),
            "slo" => proposal(&PROPOSED, &parameters).map(Self::Slo),
            "newer" => proposal(&NEWER, &parameters).map(Self::Slo),
            _ => Err(format!(
                "`{name}` is neither slo, newer, default, weighed nor turns"
            )),
        }
    }

    pub(super) fn pipeline(&self) -> PipelineSpec {
        match self {
            Self::Slo(spec) | Self::Scored(spec) => spec.clone(),
            Self::Turns => PipelineSpec::default(),
        }
    }
}

/// The proposal's example with these plugins in its SLO profile. Each parameter goes to the plugins
/// that have it.
fn proposal(slo: &[&str], parameters: &[(String, ParameterValue)]) -> Result<PipelineSpec, String> {
    let default = [
        "queue-scorer",
        "kv-cache-utilization-scorer",
        "prefix-cache-scorer",
    ];
    let others = [
        "predicted-latency-producer",
        "slo-request-tracker",
        "slo-aware-profile-handler",
    ];
    let all = || default.iter().chain(&others).chain(slo).copied();
    let has = |name: &str, key: &str| {
        registry::lookup(name)
            .is_some_and(|of| of.parameters.iter().any(|parameter| parameter.name == key))
    };
    if let Some((unknown, _)) = parameters
        .iter()
        .find(|(key, _)| !all().any(|name| has(name, key)))
    {
        return Err(format!("no plugin here has a parameter `{unknown}`"));
    }
    let with_parameters = |name: &str| PluginSpec {
        parameters: parameters
            .iter()
            .filter(|(key, _)| has(name, key))
            .cloned()
            .collect(),
        ..PluginSpec::of_type(name)
    };
    let part = |name: &str| ProfilePlugin {
        name: name.to_owned(),
        weight: 1.0,
    };
    let in_profile = slo.iter().filter(|name| **name != ADMITTER);
    Ok(PipelineSpec {
        plugins: all().map(with_parameters).collect(),
        profiles: vec![
            ProfileSpec {
                name: "default".to_owned(),
                plugins: default.iter().map(|name| part(name)).collect(),
            },
            ProfileSpec {
                name: "slo".to_owned(),
                plugins: in_profile.map(|name| part(name)).collect(),
            },
        ],
        profile_handler: "slo-aware-profile-handler".to_owned(),
        latency_prediction: true,
        ..PipelineSpec::default()
    })
}
