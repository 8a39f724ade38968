//! Writes the picker configurations of Switchpoint.

use std::path::Path;

use serde_json::{Value, json};
use testbed::Result;

use super::LlmDProfile;

/// Parameters of llm-d's recommended policy. The TTFT penalty is llm-d's default. The throughput is
/// the number of tokens that an engine with the profile `qwen3-32b-h200` prefills in a second, in
/// steps of 8,192 tokens.
const TTFT_PENALTY_MS: u32 = 14_000;
const PREFILL_TOKENS_PER_S: u32 = 11_800;
// === impl LlmDProfile ===

impl LlmDProfile {
    /// Returns the profile's plugins with weights and parameters. The filter plugin's weight has no
    /// effect.
    pub(super) fn plugins(self) -> Vec<(&'static str, u32, Value)> {
        match self {
            Self::Default => {
                let scorers = [
                    ("queue-scorer", 2),
                    ("kv-cache-utilization-scorer", 2),
                    ("prefix-cache-scorer", 3),
                ];
                scorers
                    .into_iter()
                    .map(|(scorer, weight)| (scorer, weight, json!({})))
                    .collect()
            }
            Self::Recommended => {
                let affinity = json!({"maxTTFTPenaltyMs": TTFT_PENALTY_MS, "peakPrefillThroughput": PREFILL_TOKENS_PER_S});
                vec![
                    ("prefix-cache-affinity-filter", 1, affinity),
                    ("token-load-scorer", 1, json!({})),
                ]
            }
        }
    }
}

/// Parses parameters of the form `key=number,key=number`.
pub(super) fn parameters_of(text: &str) -> Result<Value> {
    let pair = |pair: &str| {
        let (key, number) = pair
            .split_once('=')
            .ok_or_else(|| format!("`{pair}` is no key=number"))?;
        Ok::<_, testbed::Error>((key.to_owned(), json!(number.parse::<f64>()?)))
    };
    Ok(Value::Object(
        text.split(',')
            .filter(|text| !text.is_empty())
            .map(pair)
            .collect::<Result<_>>()?,
    ))
}

/// Writes a picker configuration for engines that serve metrics at `metrics_port`. The
/// configuration has one profile with these plugins, weights and parameters. Without plugins, the
/// default policy applies. Returns the path of the file, or `None` if the configuration would be
/// empty.
pub(super) fn write_plugins(
    plugins: &[(&str, u32, Value)],
    metrics_port: Option<u16>,
    folder: &Path,
) -> Result<Option<String>> {
    let source = metrics_port
        .map(|port| json!({"type": "metrics-data-source", "parameters": {"port": port}}));
    let declared = plugins
        .iter()
        .map(|(plugin, _, parameters)| json!({"type": plugin, "parameters": parameters}))
        .chain(source);
    let declared: Vec<Value> = declared.collect();
    if declared.is_empty() {
        return Ok(None);
    }
    let weighed: Vec<Value> = plugins
        .iter()
        .map(|(plugin, weight, _)| json!({"pluginRef": plugin, "weight": weight}))
        .collect();
    let mut config = json!({"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig", "plugins": declared});
    if !weighed.is_empty() {
        config["schedulingProfiles"] = json!([{"name": "default", "plugins": weighed}]);
    }
    let path = folder.join("picker.yaml");
    std::fs::write(&path, config.to_string())?; // JSON is YAML
    Ok(Some(path.display().to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_policy_is_kept_where_metrics_have_a_port_of_their_own() {
        let folder = tempfile::tempdir().expect("a folder");
        assert_eq!(
            write_plugins(&[], None, folder.path()).expect("nothing to write"),
            None
        );
        let path = write_plugins(&[], Some(9100), folder.path())
            .expect("a file")
            .expect("a path");
        let config: Value =
            serde_json::from_str(&std::fs::read_to_string(path).expect("the file")).expect("JSON");
        assert_eq!(
            config["plugins"],
            json!([{"type": "metrics-data-source", "parameters": {"port": 9100}}])
        );
        assert_eq!(config["schedulingProfiles"], Value::Null);
    }

    #[test]
    fn parameters_are_numbers_by_name() {
        assert_eq!(
            parameters_of("a=1,b=2.5").expect("parameters"),
            json!({"a": 1.0, "b": 2.5})
        );
        assert!(parameters_of("a").is_err() && parameters_of("a=x").is_err());
    }
}
