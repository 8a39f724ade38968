//! Settings of the daemon that apply to every pipeline: latency prediction, and the headroom
//! strategy from the environment.

use scheduler::plugin::ParameterValue;
use scheduler::{PipelineSpec, registry};

/// The environment variable with the default headroom strategy of plugins, as in llm-d.
pub const STRATEGY_VARIABLE: &str = "HEADROOM_SELECTION_STRATEGY";

const STRATEGY: &str = "headroomSelectionStrategy";

/// Settings that apply to every pipeline.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LatencyOptions {
    pub prediction: bool,
    /// The headroom strategy of plugins that do not set one.
    strategy: Option<String>,
}

// === impl LatencyOptions ===

impl LatencyOptions {
    /// Creates options with the strategy from the environment variable, if it is set.
    ///
    /// # Errors
    /// Fails if the strategy is unknown.
    pub fn new(prediction: bool, strategy: Option<String>) -> Result<Self, String> {
        let strategy = strategy
            .map(|strategy| strategy.trim().to_lowercase())
            .filter(|strategy| !strategy.is_empty());
        let given = strategy
            .iter()
            .map(|strategy| (STRATEGY.to_owned(), ParameterValue::Text(strategy.clone())))
            .collect::<Vec<_>>();
        match registry::lookup("slo-scorer").map(|scorer| scorer.build(&given)) {
            Some(Err(why)) => Err(format!("{STRATEGY_VARIABLE}: {why}")),
            _ => Ok(Self {
                prediction,
                strategy,
            }),
        }
    }

    pub fn apply(&self, pipeline: &mut PipelineSpec) {
        pipeline.latency_prediction = self.prediction;
        let Some(strategy) = &self.strategy else {
            return;
        };
        for plugin in &mut pipeline.plugins {
            let takes_it = registry::lookup(&plugin.plugin_type)
                .is_some_and(|row| row.parameters.iter().any(|p| p.name == STRATEGY));
            if takes_it && plugin.parameters.iter().all(|(name, _)| name != STRATEGY) {
                plugin
                    .parameters
                    .push((STRATEGY.to_owned(), ParameterValue::Text(strategy.clone())));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use scheduler::PluginSpec;

    use super::*;

    fn strategies(latency: &LatencyOptions) -> Vec<Option<ParameterValue>> {
        let given = PluginSpec {
            parameters: vec![(STRATEGY.to_owned(), ParameterValue::Text("most".to_owned()))],
            ..PluginSpec::of_type("slo-scorer")
        };
        let plugins = vec![
            given,
            PluginSpec::of_type("slo-scorer"),
            PluginSpec::of_type("latency-scorer"),
            PluginSpec::of_type("queue-scorer"),
        ];
        let mut pipeline = PipelineSpec {
            plugins,
            ..PipelineSpec::default()
        };
        latency.apply(&mut pipeline);
        assert_eq!(pipeline.latency_prediction, latency.prediction);
        pipeline
            .plugins
            .iter()
            .map(|plugin| plugin.parameters.first().map(|(_, value)| value.clone()))
            .collect()
    }

    #[test]
    fn the_environment_says_what_the_file_does_not() {
        let text = |text: &str| Some(ParameterValue::Text(text.to_owned()));
        let of = |strategy: &str| LatencyOptions::new(true, Some(strategy.to_owned())).unwrap();
        assert_eq!(
            strategies(&of("Lowest")),
            [text("most"), text("lowest"), text("lowest"), None]
        );
        assert_eq!(strategies(&of(" ")), [text("most"), None, None, None]);
        assert_eq!(
            strategies(&LatencyOptions::default()),
            [text("most"), None, None, None]
        );
        for known in ["lowest", "least", "highest", "MOST"] {
            assert!(
                LatencyOptions::new(false, Some(known.to_owned())).is_ok(),
                "{known}"
            );
        }
        let refused = LatencyOptions::new(true, Some("best".to_owned())).unwrap_err();
        assert!(
            refused.starts_with(
                "HEADROOM_SELECTION_STRATEGY: parameter `headroomSelectionStrategy` is out of range"
            ),
            "{refused}"
        );
    }
}
