//! The section `flowControl`, in the form that the scheduler takes: a plugin of its own.

use scheduler::PluginSpec;
use scheduler::flow::FLOW_CONTROL;
use scheduler::plugin::ParameterValue;

use super::ConfigReader;
use super::plugins::GivenParameters;
use crate::config::ItemStatus;
use crate::config::reference_items::{ItemSupport, NO_EVICTION};
use crate::config::schema::SchemaShape;
use crate::config::yaml::{YamlNode, YamlValue};

/// Why items of the section have no effect. In llm-d they have none without the gate either.
pub(super) const GATE_IS_OFF: &str = "it counts only with the feature gate flowControl";

/// The fields of the section and of a band: in the file, and as parameters.
const SECTION: [(&str, &str); 5] = [
    ("maxRequests", "maxRequests"),
    ("maxBytes", "maxBytes"),
    ("defaultRequestTTL", "ttlMs"),
    ("noEndpointRequestTTL", "noEndpointTtlMs"),
    ("usageLimitPolicyPluginRef", "usageLimit"),
];
const BAND: [(&str, &str); 6] = [
    ("priority", "priority"),
    ("maxRequests", "maxRequests"),
    ("maxBytes", "maxBytes"),
    ("defaultRequestTTL", "ttlMs"),
    ("fairnessPolicyRef", "fairness"),
    ("orderingPolicyRef", "ordering"),
];

// === impl ConfigReader ===

impl ConfigReader {
    /// Returns the section as a plugin, if the feature gate is on.
    pub(super) fn flow_control(&mut self, root: &YamlNode) -> Option<PluginSpec> {
        let section = root.get("flowControl");
        if let Some(eviction) = section.and_then(|section| section.get("enableEviction")) {
            match eviction.value {
                YamlValue::Flag(true) if self.flow_control => {
                    self.fate("flowControl.enableEviction", eviction.line, ItemSupport::Refused(NO_EVICTION, "false"));
                }
                YamlValue::Flag(true) => self.item("flowControl.enableEviction", eviction.line, ItemStatus::NoEffect, GATE_IS_OFF),
                _ => self.item("flowControl.enableEviction", eviction.line, ItemStatus::NoEffect, NO_EVICTION),
            }
        }
        if !self.flow_control {
            return None;
        }
        let mut parameters = section.map(|section| given(section, &SECTION)).unwrap_or_default();
        // As in llm-d, the wait for an endpoint is that of requests, unless it is given.
        let has = |name: &str| parameters.iter().any(|(known, _)| known == name);
        if !has("noEndpointTtlMs") {
            let ttl = parameters.iter().find(|(name, _)| name == "ttlMs").map(|(_, value)| value.clone());
            parameters.extend(ttl.map(|value| ("noEndpointTtlMs".to_owned(), value)));
        }
        let band = |name: &str, parameter: &str| {
            let node = section?.get(name)?;
            Some((parameter.to_owned(), ParameterValue::Map(given(node, &BAND))))
        };
        parameters.extend(band("defaultPriorityBand", "defaultBand"));
        parameters.extend(band("defaultNegativePriorityBand", "defaultNegativeBand"));
        if let Some(YamlNode { value: YamlValue::List(bands), .. }) = section.and_then(|section| section.get("priorityBands")) {
            for (at, band) in bands.iter().enumerate().filter(|(_, band)| band.get("priority").is_none()) {
                self.problem(&format!("flowControl.priorityBands[{at}]"), band.line, "has no priority");
            }
            let bands = bands.iter().map(|band| ParameterValue::Map(given(band, &BAND))).collect();
            parameters.push(("bands".to_owned(), ParameterValue::List(bands)));
        }
        Some(PluginSpec { parameters, ..PluginSpec::of_type(FLOW_CONTROL) })
    }
}

/// The given fields as parameters. Values of another type were reported before.
fn given(node: &YamlNode, fields: &[(&str, &str)]) -> GivenParameters {
    let value = |name: &str, node: &YamlNode| match &node.value {
        YamlValue::Number(number) => Some(ParameterValue::Number(*number)),
        YamlValue::Text(text) if name.ends_with("TTL") => SchemaShape::duration_ms(text).map(ParameterValue::Number),
        YamlValue::Text(text) if name.starts_with("max") => SchemaShape::quantity(text).map(ParameterValue::Number),
        YamlValue::Text(text) if !text.is_empty() => Some(ParameterValue::Text(text.clone())),
        _ => None,
    };
    fields.iter().filter_map(|(name, parameter)| Some(((*parameter).to_owned(), value(name, node.get(name)?)?))).collect()
}
