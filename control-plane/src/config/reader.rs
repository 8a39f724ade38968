//! Reads a file: answers for each item and collects the configuration.
//!
//! This module has what every part of the reader needs: the report, and typed access to nodes. The
//! parts are [`sections`] (driven by the table of the file's shape), [`plugins`] (declarations),
//! [`profiles`], [`flow_control`], and [`scraping`] (engines' metrics).

use std::collections::BTreeSet;

use scheduler::plugin::closest;

use self::plugins::DeclaredPlugin;
use super::older::{self, MovedParameter};
use super::reference_items::{
    FEATURE_GATES, FLOW_CONTROL_GATE, ItemSupport, PluginRole, plugin_types,
};
use super::schema::{API_VERSIONS, ConfigDialect, FILE, KIND, SchemaShape};
use super::yaml::{self, YamlKey, YamlNode, YamlValue};
use super::{CompiledConfig, ConfigItem, ConfigProblem, ConfigReport, ItemStatus};
use crate::scrape::MetricsLocation;
use crate::scrape::engine::EngineTable;

mod flow_control;
mod plugins;
mod profiles;
mod scraping;
mod sections;

/// The largest plugin name or text parameter, in bytes, so that a pipeline of the size that
/// [`scheduler`] allows fits a message beside a full pool update.
const TEXT_BYTES_MAX: usize = 1024;

/// The most names listed for an unknown name without a near match.
const NAMES_LISTED_MAX: usize = 12;

/// Reads one file.
#[derive(Debug)]
struct ConfigReader {
    report: ConfigReport,
    dialect: ConfigDialect,
    plugins: Vec<DeclaredPlugin>,
    /// Names of the plugins that something refers to.
    referred: BTreeSet<String>,
    /// Whether the feature gate `flowControl` is on.
    flow_control: bool,
    engines: Option<EngineTable>,
    location: MetricsLocation,
}

/// Reads a file's text. Returns the report, and the configuration as far as it is valid.
pub(super) fn read(text: &str) -> (ConfigReport, Option<CompiledConfig>) {
    let mut reader = ConfigReader {
        report: ConfigReport::default(),
        dialect: ConfigDialect::V1Alpha1,
        plugins: Vec::new(),
        referred: BTreeSet::new(),
        flow_control: false,
        engines: None,
        location: MetricsLocation::default(),
    };
    let config = match yaml::parse(text) {
        Ok(mut root) => {
            reader.moved(older::move_parameters(&mut root));
            reader.file(&root)
        }
        Err((line, message)) => {
            reader.problem("", line, message);
            None
        }
    };
    reader.report.errors.sort_by_key(|problem| problem.line);
    reader.report.items.sort_by_key(|item| item.line);
    (reader.report, config)
}

// === impl ConfigReader ===

impl ConfigReader {
    fn file(&mut self, root: &YamlNode) -> Option<CompiledConfig> {
        if let Some((path, line)) = embedded(root, "") {
            let advice = "is the configuration: write it into a file of its own; `switchpoint-migrate` takes it out of values and objects";
            self.problem(&path, line, advice);
            return None;
        }
        self.api_version(root);
        self.constant(root, "kind", &[KIND]);
        if let Some(gates) = root.get("featureGates") {
            self.feature_gates(gates);
        }
        if let Some(plugins) = root.get("plugins") {
            self.plugins(plugins);
        }
        self.shaped(root, "", &SchemaShape::Map(FILE));
        let pipeline = self.pipeline(root);
        self.unused();
        Some(CompiledConfig {
            pipeline: pipeline?,
            scraping: self.scraping()?,
            text: None,
        })
    }

    /// Reports the parameters with older names.
    fn moved(&mut self, moved: Vec<MovedParameter>) {
        for MovedParameter {
            path,
            line,
            now,
            counts,
        } in moved
        {
            if counts {
                self.item(
                    &path,
                    line,
                    ItemStatus::Implemented,
                    format!("the older name of {now}"),
                );
            } else {
                self.item(&path, line, ItemStatus::NoEffect, format!("{now} counts"));
            }
        }
    }

    fn api_version(&mut self, root: &YamlNode) {
        let versions = API_VERSIONS.map(|(version, _)| version);
        let given = self.constant(root, "apiVersion", &versions);
        if let Some((_, dialect)) = API_VERSIONS
            .iter()
            .find(|(version, _)| given == Some(*version))
        {
            self.dialect = *dialect;
        }
    }

    fn constant<'n>(
        &mut self,
        root: &'n YamlNode,
        name: &str,
        allowed: &[&str],
    ) -> Option<&'n str> {
        match root.get(name) {
            Some(YamlNode {
                value: YamlValue::Text(text),
                ..
            }) if allowed.contains(&text.as_str()) => return Some(text),
            Some(
                node @ YamlNode {
                    value: YamlValue::Text(text),
                    ..
                },
            ) => {
                let near = closest(text, allowed.iter().copied())
                    .map(|near| format!("; did you mean {near:?}?"))
                    .unwrap_or_default();
                self.problem(
                    name,
                    node.line,
                    format!("must be {}, not {text:?}{near}", allowed.join(" or ")),
                );
            }
            Some(node) => self.problem(
                name,
                node.line,
                format!(
                    "must be {}, not {}",
                    allowed.join(" or "),
                    node.value.kind()
                ),
            ),
            None => self.problem(name, 0, format!("is missing: {}", allowed.join(" or "))),
        }
        None
    }

    fn feature_gates(&mut self, gates: &YamlNode) {
        for (i, gate) in self.list(gates, "featureGates").iter().enumerate() {
            let path = format!("featureGates[{i}]");
            let Some(text) = self.text(gate, &path) else {
                continue;
            };
            let (name, value) = text.split_once('=').unwrap_or((&text, "true"));
            let on = match value.trim().to_ascii_lowercase().as_str() {
                "true" | "t" | "1" => true,
                "false" | "f" | "0" => false,
                _ => {
                    self.problem(
                        &path,
                        gate.line,
                        format!("{value:?} is neither true nor false"),
                    );
                    continue;
                }
            };
            match FEATURE_GATES.iter().find(|(known, _)| *known == name) {
                Some(_) if !on => {
                    self.item(&path, gate.line, ItemStatus::NoEffect, "the gate is off");
                }
                Some((known, fate)) => {
                    self.flow_control |= *known == FLOW_CONTROL_GATE;
                    self.fate(&path, gate.line, *fate);
                }
                None => self.problem(
                    &path,
                    gate.line,
                    unknown("feature gate", name, FEATURE_GATES.iter().map(|(n, _)| *n)),
                ),
            }
        }
    }

    // --- the report

    fn problem(&mut self, path: &str, line: u64, message: impl Into<String>) {
        self.report.errors.push(ConfigProblem {
            path: path.to_owned(),
            line,
            message: message.into(),
        });
    }

    fn item(&mut self, path: &str, line: u64, status: ItemStatus, reason: impl Into<String>) {
        self.report.items.push(ConfigItem {
            path: path.to_owned(),
            line,
            status,
            reason: reason.into(),
            substitute: None,
        });
    }

    fn fate(&mut self, path: &str, line: u64, fate: ItemSupport) {
        match fate {
            ItemSupport::Implemented(reason) => {
                self.item(path, line, ItemStatus::Implemented, reason);
            }
            ItemSupport::FlowControl(reason) if self.flow_control => {
                self.item(path, line, ItemStatus::Implemented, reason);
            }
            ItemSupport::FlowControl(_) => {
                self.item(path, line, ItemStatus::NoEffect, flow_control::GATE_IS_OFF);
            }
            ItemSupport::NoEffect(reason) => self.item(path, line, ItemStatus::NoEffect, reason),
            ItemSupport::Refused(reason, instead) => self.report.items.push(ConfigItem {
                path: path.to_owned(),
                line,
                status: ItemStatus::Refused,
                reason: reason.to_owned(),
                substitute: Some(instead.to_owned()),
            }),
        }
    }

    // --- nodes as what they must be

    fn map<'n>(
        &mut self,
        node: &'n YamlNode,
        path: &str,
        allowed: &[&str],
    ) -> Option<&'n [(YamlKey, YamlNode)]> {
        let YamlValue::Map(entries) = &node.value else {
            self.problem(
                path,
                node.line,
                format!("must be a map, not {}", node.value.kind()),
            );
            return None;
        };
        for (key, _) in entries
            .iter()
            .filter(|(key, _)| !allowed.contains(&key.name.as_str()))
        {
            self.problem(
                &below(path, &key.name),
                key.line,
                unknown("field", &key.name, allowed.iter().copied()),
            );
        }
        Some(entries)
    }

    fn list<'n>(&mut self, node: &'n YamlNode, path: &str) -> &'n [YamlNode] {
        match &node.value {
            YamlValue::List(list) => list,
            YamlValue::Null => &[],
            other => {
                self.problem(
                    path,
                    node.line,
                    format!("must be a list, not {}", other.kind()),
                );
                &[]
            }
        }
    }

    fn text(&mut self, node: &YamlNode, path: &str) -> Option<String> {
        match &node.value {
            YamlValue::Text(text) if text.len() <= TEXT_BYTES_MAX => Some(text.clone()),
            YamlValue::Text(text) => {
                self.problem(
                    path,
                    node.line,
                    format!("{} bytes; at most {TEXT_BYTES_MAX} are allowed", text.len()),
                );
                None
            }
            other => {
                self.problem(
                    path,
                    node.line,
                    format!("must be text, not {}", other.kind()),
                );
                None
            }
        }
    }

    /// Reads a reference to a declared plugin. `allowed` are the roles that the plugin may have.
    fn reference(&mut self, node: &YamlNode, path: &str, allowed: &[PluginRole]) -> Option<String> {
        let name = self.text(node, path)?;
        let Some(declared) = self.plugins.iter().find(|p| p.name == name) else {
            if allowed.iter().any(|role| role.made_on_demand(&name)) {
                return Some(name);
            }
            let fits = |plugin_type: &str| {
                PluginRole::of(plugin_type).is_some_and(|role| allowed.contains(&role))
            };
            let names: Vec<&str> = self
                .plugins
                .iter()
                .filter(|p| fits(&p.plugin_type))
                .map(|p| p.name.as_str())
                .collect();
            // If a plugin type is nearer than any declared name, suggest the type: the plugin is
            // not declared, or the name is misspelt.
            let near_type = closest(
                &name,
                plugin_types().filter(|plugin_type| fits(plugin_type)),
            );
            let message = match (closest(&name, names.iter().copied()), near_type) {
                (None, Some(near)) if near == name => {
                    format!(
                        "{name:?} is a plugin type, but no plugin of that name is declared under plugins"
                    )
                }
                (None, Some(near)) => {
                    format!("unknown plugin name {name:?}; did you mean the type {near:?}?")
                }
                _ => unknown("plugin name", &name, names),
            };
            self.problem(path, node.line, message);
            return None;
        };
        self.referred.insert(name.clone());
        match PluginRole::of(&declared.plugin_type) {
            _ if declared.is_refused() => None, // reported already; the substitute may be of another kind
            Some(role) if !allowed.contains(&role) => {
                let wanted = allowed
                    .iter()
                    .map(PluginRole::to_string)
                    .collect::<Vec<_>>()
                    .join(" or ");
                let message = format!(
                    "{name:?} (line {}) is {role} ({}), not {wanted}",
                    declared.line, declared.plugin_type
                );
                self.problem(path, node.line, message);
                None
            }
            _ => Some(name),
        }
    }
}

/// The path and line of a configuration inside another file: a text, as in chart values and
/// ConfigMaps, or a map, as in an LLMInferenceService.
fn embedded(node: &YamlNode, path: &str) -> Option<(String, u64)> {
    let is_kind = |node: &YamlNode| matches!(&node.value, YamlValue::Text(text) if text == KIND);
    match &node.value {
        YamlValue::Text(text) => text
            .contains(&format!("kind: {KIND}"))
            .then(|| (path.to_owned(), node.line)),
        YamlValue::Map(_) if !path.is_empty() && node.get("kind").is_some_and(is_kind) => {
            Some((path.to_owned(), node.line))
        }
        YamlValue::List(list) => list
            .iter()
            .enumerate()
            .find_map(|(i, node)| embedded(node, &format!("{path}[{i}]"))),
        YamlValue::Map(entries) => entries.iter().find_map(|(key, node)| {
            let here = below(path, &key.name);
            embedded(node, &here).map(|(found, line)| {
                if found == here {
                    (found, key.line)
                } else {
                    (found, line)
                }
            })
        }),
        _ => None,
    }
}

/// The path of the field `name` in `path`.
pub(crate) fn below(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_owned()
    } else {
        format!("{path}.{name}")
    }
}

/// The message for an unknown name.
pub fn unknown<'a>(
    what: &str,
    name: &str,
    known: impl IntoIterator<Item = &'a str> + Clone,
) -> String {
    match closest(name, known.clone()) {
        Some(near) => format!("unknown {what} {name:?}; did you mean {near:?}?"),
        None => {
            let known: Vec<&str> = known.into_iter().take(NAMES_LISTED_MAX).collect();
            let known = if known.is_empty() {
                "none".to_owned()
            } else {
                known.join(", ")
            };
            format!("unknown {what} {name:?}; known are {known}")
        }
    }
}
