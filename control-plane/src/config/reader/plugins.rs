//! Declared plugins: the answer for each plugin and for all of its parameters.

use scheduler::PLUGINS_MAX;
use scheduler::plugin::{self, InvalidParameter};
use scheduler::registry::{self, PluginType};

use super::{ConfigReader, TEXT_BYTES_MAX, below, unknown};
use crate::config::ItemStatus;
use crate::config::reference_items::{
    ItemSupport, NO_EFFECT, PARAMETERS, ParameterReference, PluginRole, REFERENCES,
    ReferencePlugin, foreign, plugin_types,
};
use crate::config::yaml::{YamlKey, YamlNode, YamlValue};

#[derive(Debug)]
pub(super) struct DeclaredPlugin {
    pub(super) name: String,
    pub(super) plugin_type: String,
    /// A map, which may be empty.
    pub(super) parameters: YamlNode,
    /// Parameters that the scheduler does not have: path, line and answer. They are not in
    /// `parameters`.
    answered: Vec<(String, u64, ItemSupport)>,
    pub(super) path: String,
    pub(super) line: u64,
}

/// Parameters in the form that the scheduler takes.
pub(super) type GivenParameters = Vec<(String, plugin::ParameterValue)>;

// === impl DeclaredPlugin ===

impl DeclaredPlugin {
    /// The parameters with their keys.
    pub(super) fn entries(&self) -> &[(YamlKey, YamlNode)] {
        self.parameters.entries()
    }

    /// The path of a parameter.
    pub(super) fn parameter(&self, name: &str) -> String {
        format!("{}.parameters.{name}", self.path)
    }

    /// The parameters for the scheduler, without values that it cannot take. A name of an extractor
    /// is replaced by its type, because the scheduler finds extractors by type.
    pub(super) fn given(&self, all: &[Self]) -> GivenParameters {
        let entries = self
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

    /// Whether the plugin's type is refused.
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
    pub(super) fn plugins(&mut self, plugins: &YamlNode) {
        let list = self.list(plugins, "plugins");
        if list.len() > PLUGINS_MAX {
            self.problem(
                "plugins",
                plugins.line,
                format!("{} plugins, at most {PLUGINS_MAX} are allowed", list.len()),
            );
        }
        for (i, plugin) in list.iter().take(PLUGINS_MAX).enumerate() {
            let path = format!("plugins[{i}]");
            let Some(declared) = self.declared(plugin, path) else {
                continue;
            };
            if let Some(other) = self.plugins.iter().find(|p| p.name == declared.name) {
                let message = format!(
                    "the name {:?} is taken by {} (line {})",
                    declared.name, other.path, other.line
                );
                self.problem(&declared.path, declared.line, message);
            }
            self.plugins.push(declared);
        }
        // Check the plugins only after all are read: a plugin may refer to a later one.
        let all = std::mem::take(&mut self.plugins);
        for declared in &all {
            self.plugin_type(declared, &all);
        }
        self.plugins = all;
    }

    fn declared(&mut self, plugin: &YamlNode, path: String) -> Option<DeclaredPlugin> {
        self.map(plugin, &path, &["name", "type", "parameters"])?;
        let Some(plugin_type) = plugin.get("type") else {
            self.problem(&path, plugin.line, "has no type");
            return None;
        };
        let plugin_type = self.text(plugin_type, &below(&path, "type"))?;
        let name = match plugin.get("name") {
            Some(name) => self.text(name, &below(&path, "name"))?,
            None => String::new(),
        };
        let name = if name.is_empty() {
            plugin_type.clone()
        } else {
            name
        };
        let mut parameters = plugin.get("parameters").cloned().unwrap_or(YamlNode {
            line: plugin.line,
            value: YamlValue::Map(Vec::new()),
        });
        if !matches!(parameters.value, YamlValue::Map(_)) {
            self.problem(
                &below(&path, "parameters"),
                parameters.line,
                format!("must be a map, not {}", parameters.value.kind()),
            );
            return None;
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
            path,
            line: plugin.line,
        })
    }

    /// Reports the answer for a declared plugin.
    fn plugin_type(&mut self, declared: &DeclaredPlugin, all: &[DeclaredPlugin]) {
        let DeclaredPlugin {
            plugin_type,
            path,
            line,
            ..
        } = declared;
        match (registry::lookup(plugin_type), foreign(plugin_type)) {
            (Some(row), _) if row.kind != registry::PluginKind::FlowControl => {
                self.item(path, *line, ItemStatus::Implemented, row.doc);
                self.parameters(declared, row, all);
            }
            (_, Some(ReferencePlugin { support: fate, .. })) => {
                self.fate(path, *line, *fate);
                match (plugin_type.as_str(), fate) {
                    ("core-metrics-extractor", _) => self.extractor(declared),
                    ("metrics-data-source", _) => self.data_source(declared),
                    (_, ItemSupport::NoEffect(_)) => self.ignored_parameters(declared),
                    (
                        _,
                        ItemSupport::Implemented(_)
                        | ItemSupport::FlowControl(_)
                        | ItemSupport::Refused(..),
                    ) => {}
                }
            }
            (_, None) => self.problem(
                &below(path, "type"),
                *line,
                unknown("plugin type", plugin_type, plugin_types()),
            ),
        }
    }

    fn parameters(&mut self, declared: &DeclaredPlugin, row: &PluginType, all: &[DeclaredPlugin]) {
        let mut wrong = self.unusable(declared);
        let mut given = declared.given(all);
        given.retain(|(name, _)| !wrong.contains(name));
        // `build` returns one error at a time: report it, leave out its parameter, and try again.
        while let Err(error) = row.build(&given) {
            let at = error_path(&error);
            let top = at.split(['.', '[']).next().unwrap_or_default().to_owned();
            let value = declared.parameters.get(&top).map(|node| &node.value);
            let names_refused = all
                .iter()
                .any(|p| p.is_refused() && value == Some(&YamlValue::Text(p.name.clone())));
            if !wrong.contains(&top) && !names_refused {
                let line = declared.parameters.line_of(&at).unwrap_or(declared.line);
                self.problem(&declared.parameter(&at), line, error.to_string());
            }
            let before = given.len();
            given.retain(|(name, _)| *name != top);
            wrong.push(top);
            if given.len() == before {
                break;
            }
        }
        for (key, _) in declared
            .entries()
            .iter()
            .filter(|(key, _)| !wrong.contains(&key.name))
        {
            let path = declared.parameter(&key.name);
            let doc = row
                .parameters
                .iter()
                .find(|parameter| parameter.name == key.name)
                .map(|parameter| parameter.doc);
            match doc.map(|doc| (doc, doc.strip_prefix(NO_EFFECT))) {
                Some((_, Some(reason))) => self.item(&path, key.line, ItemStatus::NoEffect, reason),
                Some((doc, None)) => self.item(&path, key.line, ItemStatus::Implemented, doc),
                None => {}
            }
        }
        for (name, line, support) in &declared.answered {
            self.fate(&declared.parameter(name), *line, *support);
        }
    }

    /// Reports the parameters whose values the scheduler cannot take, and returns their names.
    fn unusable(&mut self, declared: &DeclaredPlugin) -> Vec<String> {
        let mut wrong = Vec::new();
        for (key, node) in declared.entries() {
            if value(node).is_none() && node.value != YamlValue::Null {
                let message =
                    format!("has an empty value, or a text of more than {TEXT_BYTES_MAX} bytes");
                self.problem(&declared.parameter(&key.name), key.line, message);
                wrong.push(key.name.clone());
            }
        }
        wrong
    }

    fn ignored_parameters(&mut self, declared: &DeclaredPlugin) {
        for (key, _) in declared.entries() {
            let reason = format!("{} has no effect here", declared.plugin_type);
            self.item(
                &declared.parameter(&key.name),
                key.line,
                ItemStatus::NoEffect,
                reason,
            );
        }
    }

    /// Checks that every item to which parameters refer exists and has the right kind.
    pub(super) fn parameter_references(&mut self, profiles: &[&str]) {
        let plugins = std::mem::take(&mut self.plugins);
        let wanted = |declared: &DeclaredPlugin| {
            REFERENCES
                .iter()
                .filter(|(t, ..)| t.is_empty() || *t == declared.plugin_type)
                .collect::<Vec<_>>()
        };
        let mut found: Vec<(String, YamlNode, ParameterReference)> = Vec::new();
        for declared in &plugins {
            for (_, way, target) in wanted(declared) {
                found.extend(
                    declared
                        .parameters
                        .at(way)
                        .map(|node| (declared.parameter(&way.join(".")), node.clone(), *target)),
                );
            }
        }
        self.plugins = plugins;
        for (path, node, target) in found {
            match (&node.value, target) {
                (YamlValue::Text(name), _) if name.is_empty() => {}
                (YamlValue::Text(_), ParameterReference::Plugin(role)) => {
                    drop(self.reference(&node, &path, &[role]));
                }
                (YamlValue::Text(name), ParameterReference::Profile)
                    if !profiles.contains(&name.as_str()) =>
                {
                    self.problem(
                        &path,
                        node.line,
                        unknown("profile", name, profiles.iter().copied()),
                    );
                }
                _ => {} // a value of another type is reported where parameters are read
            }
        }
    }

    /// Reports plugins without effect: those that work only when another item refers to them, and
    /// that no item refers to.
    pub(super) fn unused(&mut self) {
        use registry::PluginKind::{
            Decider, Detector, Fairness, Filter, Ordering, Parser, Picker, Scorer, UsageLimit,
        };
        let unused = self.plugins.iter().filter(|p| {
            let referred = matches!(
                PluginRole::of(&p.plugin_type),
                Some(PluginRole::Scheduling(
                    Filter
                        | Scorer
                        | Picker
                        | Decider
                        | Detector
                        | Parser
                        | Fairness
                        | Ordering
                        | UsageLimit
                ))
            );
            referred
                && registry::lookup(&p.plugin_type).is_some()
                && !self.referred.contains(&p.name)
        });
        let unused: Vec<(String, String)> =
            unused.map(|p| (p.path.clone(), p.name.clone())).collect();
        for item in &mut self.report.items {
            if let Some((_, name)) = unused.iter().find(|(path, _)| *path == item.path) {
                item.status = ItemStatus::NoEffect;
                item.reason = format!("nothing refers to {name:?}");
            }
        }
        if !self.flow_control {
            let policy = |p: &&DeclaredPlugin| {
                matches!(
                    PluginRole::of(&p.plugin_type),
                    Some(PluginRole::Scheduling(Fairness | Ordering | UsageLimit))
                )
            };
            let policies: Vec<&str> = self
                .plugins
                .iter()
                .filter(policy)
                .map(|p| p.path.as_str())
                .collect();
            for item in self
                .report
                .items
                .iter_mut()
                .filter(|item| policies.contains(&item.path.as_str()))
            {
                item.status = ItemStatus::NoEffect;
                item.reason = super::flow_control::GATE_IS_OFF.to_owned();
            }
        }
    }
}

/// The value for the scheduler; `None` if it is empty or a text that is too long.
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

/// The path of the parameter that an error is about: `conditions[1].metric`.
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
