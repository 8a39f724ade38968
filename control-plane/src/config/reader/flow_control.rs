//! Reads the section `flowControl` into the plugin that the scheduler has for it.

use scheduler::PluginSpec;
use scheduler::flow::FLOW_CONTROL;
use scheduler::plugin::ParameterValue;
use scheduler::registry;

use super::ConfigReader;
use super::plugins::GivenParameters;
use crate::config::schema::SchemaShape;
use crate::config::yaml::{YamlNode, YamlValue};
use crate::config::{ItemStatus, LocatedNode};

/// The reason why items of the section have no effect without the feature gate. Without the gate
/// these items have no effect in llm-d either.
pub(super) const GATE_IS_OFF: &str = "it needs the feature gate flowControl";

/// The effect of eviction in Switchpoint. llm-d also ends requests that have begun to answer.
const EVICTION: &str = "running requests of negative priority are given up for higher ones that wait, only before their first byte: \
                        429 and evicted";
const NO_EVICTION: &str = "running requests are not given up for others";

/// The behaviour while no endpoint is ready. In llm-d, requests then wait as long as for room.
const NO_ENDPOINT: &str = "not given: while no endpoint is ready, requests get 503 at once; for a pool that scales from zero, give the time \
                           of a start";

/// The request timeout in the shipped files, and the longest wait after which a request still has
/// time to run.
const TIMEOUT: &str = "300 s in the shipped files";
const WAIT_MS_MAX: f64 = 290_000.0;

/// The wait that replaces "no limit", in ms: one day, which is more than any proxy waits.
const UNLIMITED_MS: f64 = 86_400_000.0;

/// The fields of the section and of a band: their names in the file, and as parameters.
const SECTION: [(&str, &str); 6] = [
    ("maxRequests", "maxRequests"),
    ("maxBytes", "maxBytes"),
    ("defaultRequestTTL", "ttlMs"),
    ("noEndpointRequestTTL", "noEndpointTtlMs"),
    ("usageLimitPolicyPluginRef", "usageLimit"),
    ("enableEviction", "eviction"),
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
    pub(super) fn flow_control(&mut self, root: &LocatedNode<'_>) -> Option<PluginSpec> {
        let section = root.get("flowControl");
        if let Some(eviction) = section.as_ref().and_then(|s| s.get("enableEviction")) {
            let (status, reason) = match eviction.node.value {
                _ if !self.flow_control => (ItemStatus::NoEffect, GATE_IS_OFF),
                YamlValue::Flag(true) => (ItemStatus::Implemented, EVICTION),
                _ => (ItemStatus::Implemented, NO_EVICTION),
            };
            self.answer(&eviction, status, reason);
        }
        if !self.flow_control {
            return None;
        }
        let mut parameters = GivenParameters::new();
        if let Some(section) = &section {
            parameters = given(section.node, &SECTION);
        }
        if self.is_foreign() {
            parameters.push(("minimumShare".to_owned(), ParameterValue::Number(0.0)));
        }
        self.waits(section.as_ref().unwrap_or(root).node.line, &mut parameters);
        if let Some(section) = &section {
            self.bands(section, &mut parameters);
        }
        Some(PluginSpec {
            parameters,
            ..PluginSpec::of_type(FLOW_CONTROL)
        })
    }

    /// Adds the parameters of priority bands.
    fn bands(&mut self, section: &LocatedNode<'_>, parameters: &mut GivenParameters) {
        let band = |band: &YamlNode| ParameterValue::Map(given(band, &BAND));
        for (name, parameter) in [
            ("defaultPriorityBand", "defaultBand"),
            ("defaultNegativePriorityBand", "defaultNegativeBand"),
        ] {
            let node = section.node.get(name);
            parameters.extend(node.map(|node| (parameter.to_owned(), band(node))));
        }
        let Some(listed) = section.get("priorityBands") else {
            return;
        };
        if !matches!(listed.node.value, YamlValue::List(_)) {
            return; // reported when its type was checked
        }
        let mut bands = Vec::new();
        for at in listed.items() {
            if at.get("priority").is_none() {
                self.report.wrong(&at, "has no priority");
            }
            bands.push(band(at.node));
        }
        parameters.push(("bands".to_owned(), ParameterValue::List(bands)));
    }

    /// Returns whether the file declares no plugin of Switchpoint. A file without such plugins must
    /// have the meaning that it has in llm-d.
    fn is_foreign(&self) -> bool {
        let ours = |plugin_type: &str| {
            registry::lookup(plugin_type).is_some_and(|row| row.source.starts_with("Switchpoint"))
        };
        !self
            .plugins
            .iter()
            .any(|declared| ours(&declared.plugin_type))
    }

    /// Reports that the longest wait is missing, or that a proxy's timeout is likely to end the
    /// wait earlier.
    fn waits(&mut self, line: u64, parameters: &mut GivenParameters) {
        let ttl = parameters.iter().find(|(name, _)| name == "ttlMs");
        let note = match ttl.map(|(_, ttl)| ttl) {
            None => Some("not given: requests wait at most 60 s".to_owned()),
            Some(ParameterValue::Number(ms)) if *ms == 0.0 => Some(format!(
                "no limit: a proxy's timeout ends the wait, {TIMEOUT}"
            )),
            Some(ParameterValue::Number(ms)) if *ms > WAIT_MS_MAX => {
                Some(format!("longer than a proxy's timeout may be, {TIMEOUT}"))
            }
            Some(_) => None,
        };
        if let Some(note) = note {
            let path = "flowControl.defaultRequestTTL";
            self.report.item(path, line, ItemStatus::Implemented, note);
        }
        match parameters
            .iter_mut()
            .find(|(name, _)| name == "noEndpointTtlMs")
        {
            None => {
                let path = "flowControl.noEndpointRequestTTL";
                self.report
                    .item(path, line, ItemStatus::Implemented, NO_ENDPOINT);
            }
            // As in llm-d, 0s means no limit.
            Some((_, ttl)) if *ttl == ParameterValue::Number(0.0) => {
                *ttl = ParameterValue::Number(UNLIMITED_MS);
            }
            Some(_) => {}
        }
    }
}

/// Returns the given fields as parameters. Values of another type were reported before.
fn given(node: &YamlNode, fields: &[(&str, &str)]) -> GivenParameters {
    let value = |name: &str, node: &YamlNode| match &node.value {
        YamlValue::Number(number) => Some(ParameterValue::Number(*number)),
        YamlValue::Flag(flag) => Some(ParameterValue::Flag(*flag)),
        YamlValue::Text(text) if name.ends_with("TTL") => {
            SchemaShape::duration_ms(text).map(ParameterValue::Number)
        }
        YamlValue::Text(text) if name.starts_with("max") => {
            SchemaShape::quantity(text).map(ParameterValue::Number)
        }
        YamlValue::Text(text) if !text.is_empty() => Some(ParameterValue::Text(text.clone())),
        _ => None,
    };
    fields
        .iter()
        .filter_map(|(name, parameter)| {
            Some(((*parameter).to_owned(), value(name, node.get(name)?)?))
        })
        .collect()
}
