//! Reads declared plugins, and reports on each plugin and all of its parameters.

use scheduler::PLUGINS_MAX;
use scheduler::plugin::{self, InvalidParameter};
use scheduler::registry::{self, PluginType};

use super::{ConfigReader, TEXT_BYTES_MAX};
use crate::config::reference_items::{
    ItemSupport, NO_EFFECT, PARAMETERS, ParameterReference, PluginRole, REFERENCES,
    ReferencePlugin, foreign, plugin_types,
};
use crate::config::yaml::{YamlNode, YamlValue};
use crate::config::{ItemStatus, LocatedNode, unknown};

#[derive(Debug)]
pub(super) struct DeclaredPlugin {
    pub(super) name: String,
    pub(super) plugin_type: String,
    /// The parameters as a YAML map, which may be empty.
    pub(super) parameters: YamlNode,
    /// Parameters that the scheduler does not have: path, line, and what is reported. `parameters`
    /// does not contain them.
    answered: Vec<(String, u64, ItemSupport)>,
    pub(super) path: String,
    pub(super) line: u64,
}

/// Parameters in the form that the scheduler takes.
pub(super) type GivenParameters = Vec<(String, plugin::ParameterValue)>;

// === impl DeclaredPlugin ===

impl DeclaredPlugin {
    /// Returns the parameters with their paths.
    pub(super) fn located(&self) -> LocatedNode<'_> {
        LocatedNode {
            path: format!("{}.parameters", self.path),
            node: &self.parameters,
        }
    }

    /// Returns the path of a parameter.
    fn parameter(&self, name: &str) -> String {
        format!("{}.parameters.{name}", self.path)
    }

    /// Returns the role of the plugin's type; `None` if the type is unknown.
    pub(super) fn role(&self) -> Option<PluginRole> {
        PluginRole::from_plugin_type(&self.plugin_type)
    }

    /// Returns the parameters for the scheduler, without the values that the scheduler cannot take.
    /// A name of an extractor is replaced by its type, because the scheduler finds extractors by
    /// type.
    pub(super) fn given(&self, all: &[Self]) -> GivenParameters {
        let entries = self
            .parameters
            .entries()
            .iter()
            .filter_map(|(key, node)| Some((key.name.clone(), value(node)?)));
        let mut given: GivenParameters = entries.collect();
        for (name, value) in &mut given {
            let names_extractor = |(t, way, target): &&(&str, &[&str], ParameterReference)| {
                (t.is_empty() || *t == self.plugin_type)
                    && **way == [name.as_str()]
                    && *target == ParameterReference::Plugin(PluginRole::Extractor)
            };
            if let (Some(_), plugin::ParameterValue::Text(text)) =
                (REFERENCES.iter().find(names_extractor), value)
                && let Some(extractor) = all.iter().find(|p| p.name == *text)
            {
                text.clone_from(&extractor.plugin_type);
            }
        }
        given
    }

    pub(super) fn is(&self, kind: registry::PluginKind) -> bool {
        self.role() == Some(PluginRole::Scheduling(kind))
    }

    /// Returns whether the plugin's type is refused.
    pub(super) fn is_refused(&self) -> bool {
        registry::lookup(&self.plugin_type).is_none()
            && matches!(
                foreign(&self.plugin_type),
                Some(ReferencePlugin {
                    support: ItemSupport::Refused(..),
                    ..
                })
            )
    }
}

// === impl ConfigReader ===

impl ConfigReader {
    pub(super) fn plugins(&mut self, plugins: &LocatedNode<'_>) {
        let list = self.report.list(Some(plugins));
        if list.len() > PLUGINS_MAX {
            let message = format!("{} plugins, at most {PLUGINS_MAX} are allowed", list.len());
            self.report.wrong(plugins, message);
        }
        for plugin in list.into_iter().take(PLUGINS_MAX) {
            let Some(declared) = self.declared(plugin) else {
                continue;
            };
            if let Some(other) = self.plugins.iter().find(|p| p.name == declared.name) {
                let message = format!(
                    "the name {:?} is taken by {} (line {})",
                    declared.name, other.path, other.line
                );
                self.report.problem(&declared.path, declared.line, message);
            }
            self.plugins.push(declared);
        }
        // The plugins are checked only after all are read, because a plugin may refer to a later
        // one.
        let all = std::mem::take(&mut self.plugins);
        for declared in &all {
            self.plugin_type(declared, &all);
        }
        self.plugins = all;
    }

    fn declared(&mut self, plugin: LocatedNode<'_>) -> Option<DeclaredPlugin> {
        self.report.map(&plugin, &["name", "type", "parameters"])?;
        let plugin_type = self.report.required(&plugin, "type")?;
        let plugin_type = self.text(&plugin_type)?;
        let name = match plugin.get("name") {
            Some(name) => self.text(&name)?,
            None => String::new(),
        };
        let name = if name.is_empty() {
            plugin_type.clone()
        } else {
            name
        };
        let line = plugin.node.line;
        let mut parameters = YamlNode {
            line,
            value: YamlValue::Map(Vec::new()),
        };
        if let Some(given) = plugin.get("parameters") {
            if !matches!(given.node.value, YamlValue::Map(_)) {
                self.report.wrong_type(&given, "a map");
                return None;
            }
            parameters = given.node.clone();
        }
        let mut answered = Vec::new();
        for row in PARAMETERS
            .iter()
            .filter(|row| row.plugin_type == plugin_type)
        {
            let taken = parameters.value.take(row.way);
            answered.extend(
                taken.map(|(key, node)| (row.way.join("."), key.line, row.answer(&node.value))),
            );
        }
        Some(DeclaredPlugin {
            name,
            plugin_type,
            parameters,
            answered,
            path: plugin.path,
            line,
        })
    }

    /// Reports what Switchpoint does with a declared plugin.
    fn plugin_type(&mut self, declared: &DeclaredPlugin, all: &[DeclaredPlugin]) {
        let DeclaredPlugin {
            plugin_type,
            path,
            line,
            ..
        } = declared;
        match (registry::lookup(plugin_type), foreign(plugin_type)) {
            (Some(row), _) if row.kind != registry::PluginKind::FlowControl => {
                self.report
                    .item(path, *line, ItemStatus::Implemented, row.doc);
                self.parameters(declared, row, all);
            }
            (_, Some(ReferencePlugin { support: fate, .. })) => {
                self.fate(path, *line, *fate);
                match (plugin_type.as_str(), fate) {
                    ("core-metrics-extractor", _) => self.extractor(declared),
                    ("metrics-data-source", _) => self.data_source(declared),
                    (_, ItemSupport::NoEffect(_)) => {
                        for (key, entry) in declared.located().entries() {
                            let reason = format!("{plugin_type} has no effect here");
                            self.report
                                .item(&entry.path, key.line, ItemStatus::NoEffect, reason);
                        }
                    }
                    _ => {}
                }
            }
            (_, None) => {
                let message = unknown("plugin type", plugin_type, plugin_types());
                self.report.problem(&format!("{path}.type"), *line, message);
            }
        }
    }

    fn parameters(&mut self, declared: &DeclaredPlugin, row: &PluginType, all: &[DeclaredPlugin]) {
        let mut wrong = self.unusable(declared);
        let mut given = declared.given(all);
        given.retain(|(name, _)| !wrong.contains(name));
        // `build` returns one error at a time. Each round reports this error, leaves out the
        // parameter, and builds again.
        while let Err(error) = row.build(&given) {
            let at = error_path(&error);
            let top = at.split(['.', '[']).next().unwrap_or_default().to_owned();
            let value = declared.parameters.get(&top).map(|node| &node.value);
            let names_refused = all
                .iter()
                .any(|p| p.is_refused() && value == Some(&YamlValue::Text(p.name.clone())));
            if !wrong.contains(&top) && !names_refused {
                let line = declared.parameters.line_of(&at).unwrap_or(declared.line);
                self.report
                    .problem(&declared.parameter(&at), line, error.to_string());
            }
            let before = given.len();
            given.retain(|(name, _)| *name != top);
            wrong.push(top);
            if given.len() == before {
                break;
            }
        }
        for (key, entry) in declared.located().entries() {
            let parameter = row
                .parameters
                .iter()
                .find(|parameter| parameter.name == key.name && !wrong.contains(&key.name));
            let Some(doc) = parameter.map(|parameter| parameter.doc) else {
                continue;
            };
            let (status, doc) = match doc.strip_prefix(NO_EFFECT) {
                Some(reason) => (ItemStatus::NoEffect, reason),
                None => (ItemStatus::Implemented, doc),
            };
            self.report.item(&entry.path, key.line, status, doc);
        }
        for (name, line, support) in &declared.answered {
            self.fate(&declared.parameter(name), *line, *support);
        }
    }

    /// Reports the parameters whose values the scheduler cannot take, and returns their names.
    fn unusable(&mut self, declared: &DeclaredPlugin) -> Vec<String> {
        let mut wrong = Vec::new();
        for (key, entry) in declared.located().entries() {
            if value(entry.node).is_none() && entry.node.value != YamlValue::Null {
                let message =
                    format!("has an empty value, or a text of more than {TEXT_BYTES_MAX} bytes");
                self.report.problem(&entry.path, key.line, message);
                wrong.push(key.name.clone());
            }
        }
        wrong
    }

    /// Checks that every item that a parameter names exists and has the right kind.
    pub(super) fn parameter_references(&mut self, profiles: &[&str]) {
        let plugins = std::mem::take(&mut self.plugins);
        let mut found = Vec::new();
        for declared in &plugins {
            for (plugin_type, way, target) in REFERENCES {
                if plugin_type.is_empty() || *plugin_type == declared.plugin_type {
                    let at = declared.located().at(way);
                    found.extend(at.map(|at| (at.path, at.node.clone(), *target)));
                }
            }
        }
        self.plugins = plugins;
        for (path, node, target) in found {
            let at = LocatedNode { path, node: &node };
            match (node.text(), target) {
                (None | Some(""), _) => {} // a value of another type is reported where parameters are read
                (Some(_), ParameterReference::Plugin(role)) => {
                    drop(self.reference(&at, &[role]));
                }
                (Some(name), ParameterReference::Profile) => {
                    if !profiles.contains(&name) {
                        let message = unknown("profile", name, profiles.iter().copied());
                        self.report.wrong(&at, message);
                    }
                }
            }
        }
    }

    /// Reports plugins without effect: plugins that work only when an item refers to them, while no
    /// item does.
    pub(super) fn unused(&mut self) {
        use registry::PluginKind::{
            Decider, Detector, Fairness, Filter, Ordering, Parser, Picker, Scorer, UsageLimit,
        };
        for declared in &self.plugins {
            let Some(PluginRole::Scheduling(kind)) = declared.role() else {
                continue;
            };
            let reason = if !self.flow_control && matches!(kind, Fairness | Ordering | UsageLimit) {
                super::flow_control::GATE_IS_OFF.to_owned()
            } else if matches!(
                kind,
                Filter
                    | Scorer
                    | Picker
                    | Decider
                    | Detector
                    | Parser
                    | Fairness
                    | Ordering
                    | UsageLimit
            ) && registry::lookup(&declared.plugin_type).is_some()
                && !self.referred.contains(&declared.name)
            {
                format!("nothing refers to {:?}", declared.name)
            } else {
                continue;
            };
            for item in &mut self.report.items {
                if item.path == declared.path {
                    item.status = ItemStatus::NoEffect;
                    item.reason.clone_from(&reason);
                }
            }
        }
    }
}

/// Returns the value for the scheduler; `None` if it is empty or a text that is too long.
fn value(node: &YamlNode) -> Option<plugin::ParameterValue> {
    match &node.value {
        YamlValue::Null => None,
        YamlValue::Flag(flag) => Some(plugin::ParameterValue::Flag(*flag)),
        YamlValue::Number(number) => Some(plugin::ParameterValue::Number(*number)),
        YamlValue::Text(text) => {
            (text.len() <= TEXT_BYTES_MAX).then(|| plugin::ParameterValue::Text(text.clone()))
        }
        YamlValue::List(list) => list
            .iter()
            .map(value)
            .collect::<Option<_>>()
            .map(plugin::ParameterValue::List),
        YamlValue::Map(entries) => {
            let entries = entries
                .iter()
                .map(|(key, node)| Some((key.name.clone(), value(node)?)));
            entries
                .collect::<Option<_>>()
                .map(plugin::ParameterValue::Map)
        }
    }
}

/// Returns the path of the parameter that an error is about: `conditions[1].metric`.
fn error_path(error: &InvalidParameter) -> String {
    match error {
        InvalidParameter::Within { path, error } => format!("{path}.{}", error_path(error)),
        InvalidParameter::Unknown { name, .. }
        | InvalidParameter::Duplicate(name)
        | InvalidParameter::Missing(name)
        | InvalidParameter::TooLarge(name)
        | InvalidParameter::WrongType { name, .. }
        | InvalidParameter::OutOfRange { name, .. } => name.clone(),
    }
}
