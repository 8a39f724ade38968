//! Picker configurations that consist of scorers only.

use std::path::Path;

use serde_json::{Value, json};

use crate::Result;

/// Scorers of load and cached prefixes, with their weights, for tests that must not depend on
/// learned times or on the default profile.
pub const WEIGHED: [(&str, u32); 4] = [
    ("queue-scorer", 2),
    ("kv-cache-utilization-scorer", 2),
    ("prefix-cache-scorer", 3),
    ("active-request-scorer", 2),
];

/// Writes a configuration with these scorers and weights into `folder`. Returns the path of the
/// configuration.
///
/// # Errors
/// Fails if the folder cannot be written.
pub fn write(scorers: &[(String, u32)], folder: &Path) -> Result<String> {
    let path = folder.join("scorers.yaml");
    let declared: Vec<Value> = scorers
        .iter()
        .map(|(scorer, _)| json!({"type": scorer}))
        .collect();
    let weighed: Vec<Value> = scorers
        .iter()
        .map(|(scorer, weight)| json!({"pluginRef": scorer, "weight": weight}))
        .collect();
    let config = json!({
        "apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig", "plugins": declared,
        "schedulingProfiles": [{"name": "default", "plugins": weighed}],
    });
    std::fs::write(&path, config.to_string())?; // a YAML reader accepts JSON
    Ok(path.display().to_string())
}
