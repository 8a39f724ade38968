//! Reads a file, reports on each item, and collects the configuration.
//!
//! Every part of the reader needs this module, which has the report and typed access to nodes. The
//! parts are [`sections`] (which follows the table of the file's shape), [`plugins`]
//! (declarations), [`profiles`], [`flow_control`], and [`scraping`] (engines' metrics).

use std::collections::BTreeSet;

use scheduler::plugin::closest;

use self::plugins::DeclaredPlugin;
use super::older::{self, MovedParameter};
use super::reference_items::{
    FEATURE_GATES, FLOW_CONTROL_GATE, ItemSupport, PluginRole, plugin_types,
};
use super::schema::{API_VERSIONS, ConfigDialect, FILE, KIND, SchemaShape};
use super::yaml::{self, YamlValue};
use super::{CompiledConfig, ConfigItem, ConfigReport, ItemStatus, LocatedNode, unknown};
use crate::scrape::MetricsLocation;
use crate::scrape::engine::EngineTable;

mod flow_control;
mod plugins;
mod profiles;
mod scraping;
mod sections;

/// The largest plugin name or text parameter, in bytes. With this limit, the largest pipeline that
/// [`scheduler`] allows fits a message beside a full pool update.
const TEXT_BYTES_MAX: usize = 1024;

/// Reads one configuration file.
#[derive(Debug, Default)]
struct ConfigReader {
    report: ConfigReport,
    dialect: ConfigDialect,
    plugins: Vec<DeclaredPlugin>,
    /// The names of the plugins that something refers to.
    referred: BTreeSet<String>,
    /// Whether the feature gate `flowControl` is on.
    flow_control: bool,
    engines: Option<EngineTable>,
    location: MetricsLocation,
}

/// Reads a file's text. Returns the report, and the configuration as far as it is valid.
pub(super) fn read(text: &str) -> (ConfigReport, Option<CompiledConfig>) {
    let mut reader = ConfigReader::default();
    let config = match yaml::parse(text) {
        Ok(mut root) => {
            reader.moved(older::move_parameters(&mut root));
            reader.file(&LocatedNode::root(&root))
        }
        Err((line, message)) => {
            reader.report.problem("", line, message);
            None
        }
    };
    reader.report.errors.sort_by_key(|problem| problem.line);
    reader.report.items.sort_by_key(|item| item.line);
    (reader.report, config)
}

// === impl ConfigReader ===

impl ConfigReader {
    fn file(&mut self, root: &LocatedNode<'_>) -> Option<CompiledConfig> {
        if let Some((path, line)) = embedded(root) {
            let advice = "is the configuration: write it into a file of its own; `switchpoint-migrate` takes it out of values and objects";
            self.report.problem(&path, line, advice);
            return None;
        }
        self.api_version(root);
        self.constant(root, "kind", &[KIND]);
        if let Some(gates) = root.get("featureGates") {
            self.feature_gates(&gates);
        }
        if let Some(plugins) = root.get("plugins") {
            self.plugins(&plugins);
        }
        self.shaped(root, &SchemaShape::Map(FILE));
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
            let (status, reason) = if counts {
                (ItemStatus::Implemented, format!("the older name of {now}"))
            } else {
                (ItemStatus::NoEffect, format!("{now} is used instead"))
            };
            self.report.item(&path, line, status, reason);
        }
    }

    fn api_version(&mut self, root: &LocatedNode<'_>) {
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
        root: &LocatedNode<'n>,
        name: &str,
        allowed: &[&str],
    ) -> Option<&'n str> {
        let wanted = allowed.join(" or ");
        let Some(given) = root.get(name) else {
            self.report
                .problem(name, 0, format!("is missing: {wanted}"));
            return None;
        };
        let found = match given.node.text() {
            Some(text) if allowed.contains(&text) => return Some(text),
            Some(text) => match closest(text, allowed.iter().copied()) {
                Some(near) => format!("{text:?}; did you mean {near:?}?"),
                None => format!("{text:?}"),
            },
            None => given.node.value.kind().to_owned(),
        };
        self.report
            .wrong(&given, format!("must be {wanted}, not {found}"));
        None
    }

    fn feature_gates(&mut self, gates: &LocatedNode<'_>) {
        for gate in self.report.list(Some(gates)) {
            let Some(text) = self.text(&gate) else {
                continue;
            };
            let (name, value) = text.split_once('=').unwrap_or((&text, "true"));
            let on = match value.trim().to_ascii_lowercase().as_str() {
                "true" | "t" | "1" => true,
                "false" | "f" | "0" => false,
                _ => {
                    self.report
                        .wrong(&gate, format!("{value:?} is neither true nor false"));
                    continue;
                }
            };
            let line = gate.node.line;
            match FEATURE_GATES.iter().find(|(known, _)| *known == name) {
                Some(_) if !on => {
                    let off = "the gate is off";
                    self.report
                        .item(&gate.path, line, ItemStatus::NoEffect, off);
                }
                Some((known, fate)) => {
                    self.flow_control |= *known == FLOW_CONTROL_GATE;
                    self.fate(&gate.path, line, *fate);
                }
                None => {
                    let known = FEATURE_GATES.iter().map(|(known, _)| *known);
                    self.report
                        .wrong(&gate, unknown("feature gate", name, known));
                }
            }
        }
    }

    fn fate(&mut self, path: &str, line: u64, fate: ItemSupport) {
        let (status, reason, substitute) = match fate {
            ItemSupport::FlowControl(_) if !self.flow_control => {
                (ItemStatus::NoEffect, flow_control::GATE_IS_OFF, None)
            }
            ItemSupport::Implemented(reason) | ItemSupport::FlowControl(reason) => {
                (ItemStatus::Implemented, reason, None)
            }
            ItemSupport::NoEffect(reason) => (ItemStatus::NoEffect, reason, None),
            ItemSupport::Refused(reason, instead) => (ItemStatus::Refused, reason, Some(instead)),
        };
        self.report.items.push(ConfigItem {
            path: path.to_owned(),
            line,
            status,
            reason: reason.to_owned(),
            substitute: substitute.map(str::to_owned),
        });
    }

    /// Reports what Switchpoint does with a node.
    fn answer(&mut self, at: &LocatedNode<'_>, status: ItemStatus, reason: impl Into<String>) {
        self.report.item(&at.path, at.node.line, status, reason);
    }

    fn text(&mut self, at: &LocatedNode<'_>) -> Option<String> {
        let text = self.report.text(at)?;
        if text.len() <= TEXT_BYTES_MAX {
            return Some(text);
        }
        let message = format!("{} bytes; at most {TEXT_BYTES_MAX} are allowed", text.len());
        self.report.wrong(at, message);
        None
    }

    /// Reads a reference to a declared plugin. `allowed` are the roles that the plugin may have.
    fn reference(&mut self, at: &LocatedNode<'_>, allowed: &[PluginRole]) -> Option<String> {
        let name = self.text(at)?;
        let Some(declared) = self.plugins.iter().find(|p| p.name == name) else {
            if allowed.iter().any(|role| role.made_on_demand(&name)) {
                return Some(name);
            }
            let message = self.undeclared(&name, allowed);
            self.report.wrong(at, message);
            return None;
        };
        self.referred.insert(name.clone());
        match declared.role() {
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
                self.report.wrong(at, message);
                None
            }
            _ => Some(name),
        }
    }

    /// Returns the message for a reference to a name that no plugin has.
    fn undeclared(&self, name: &str, allowed: &[PluginRole]) -> String {
        let fits = |role: Option<PluginRole>| role.is_some_and(|role| allowed.contains(&role));
        let names: Vec<&str> = self
            .plugins
            .iter()
            .filter(|declared| fits(declared.role()))
            .map(|declared| declared.name.as_str())
            .collect();
        if closest(name, names.iter().copied()).is_some() {
            return unknown("plugin name", name, names);
        }
        // The message also names the nearest plugin types, because the plugin may be undeclared, or
        // its name misspelt.
        let types =
            plugin_types().filter(|plugin_type| fits(PluginRole::from_plugin_type(plugin_type)));
        match closest(name, types) {
            Some(near) if near == name => format!(
                "{name:?} is a plugin type, but no plugin of that name is declared under plugins"
            ),
            Some(near) => format!("unknown plugin name {name:?}; did you mean the type {near:?}?"),
            None => unknown("plugin name", name, names),
        }
    }
}

/// Returns the path and line of a configuration inside another file: a text, as in chart values and
/// ConfigMaps, or a map, as in an LLMInferenceService.
fn embedded(at: &LocatedNode<'_>) -> Option<(String, u64)> {
    let here = || Some((at.path.clone(), at.node.line));
    let is_kind = |kind: LocatedNode<'_>| kind.node.text() == Some(KIND);
    match &at.node.value {
        YamlValue::Text(text) if text.contains(&format!("kind: {KIND}")) => here(),
        YamlValue::Map(_) if !at.path.is_empty() && at.get("kind").is_some_and(is_kind) => here(),
        YamlValue::List(_) => at.items().find_map(|item| embedded(&item)),
        YamlValue::Map(_) => at.entries().find_map(|(key, entry)| {
            let (path, line) = embedded(&entry)?;
            let line = if path == entry.path { key.line } else { line };
            Some((path, line))
        }),
        _ => None,
    }
}
