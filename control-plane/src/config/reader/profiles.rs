//! Profiles, and the pipeline built from them and the declared plugins. This module adds llm-d's
//! implicit parts: a handler, a picker, weights of 1, and one profile of all declared plugins if
//! the file has no profiles.

use scheduler::registry::{self, PluginKind};
use scheduler::{Pipeline, PipelineSpec, PluginSpec, ProfilePlugin, ProfileSpec};

use super::plugins::DeclaredPlugin;
use super::{ConfigReader, below};
use crate::config::ItemStatus;
use crate::config::reference_items::PluginRole;
use crate::config::yaml::{YamlNode, YamlValue};

/// The roles of plugins that a profile may contain.
const IN_PROFILES: [PluginRole; 4] = [
    PluginRole::Scheduling(PluginKind::Filter),
    PluginRole::Scheduling(PluginKind::Scorer),
    PluginRole::Scheduling(PluginKind::Picker),
    PluginRole::Scheduling(PluginKind::Detector), // a detector also filters
];

/// The weight of a scorer without a weight.
const WEIGHT_DEFAULT: f64 = 1.0;

/// The name of the implicit profile, as in llm-d.
const PROFILE_DEFAULT: &str = "default";

/// The detectors that apply although nothing refers to them, if they are declared. With flow
/// control, the second is the default.
const DETECTORS_DEFAULT: [&str; 2] = ["utilization-detector", "backlog-detector"];

// === impl ConfigReader ===

impl ConfigReader {
    /// Builds the pipeline and checks it.
    pub(super) fn pipeline(&mut self, root: &YamlNode) -> Option<PipelineSpec> {
        let given = root
            .get("schedulingProfiles")
            .map(|node| (node.line, self.list(node, "schedulingProfiles")));
        let profiles = match given {
            Some((_, nodes)) if !nodes.is_empty() => self.profiles(nodes),
            _ => self.implied_profile().into_iter().collect(),
        };
        let mut names: Vec<&str> = profiles
            .iter()
            .map(|profile| profile.name.as_str())
            .filter(|name| !name.is_empty())
            .collect();
        names.dedup();
        self.parameter_references(&names);
        let saturation_detector = match self.saturation_detector(root) {
            named if !named.is_empty() => named,
            _ => self.implied_detector().unwrap_or_default(),
        };
        self.referred.insert(saturation_detector.clone());
        let profile_handler =
            self.profile_handler(profiles.len(), given.map_or(0, |(line, _)| line));
        let parsers = self.parsers(root);
        let in_force =
            |p: &&DeclaredPlugin| match registry::lookup(&p.plugin_type).map(|row| row.kind) {
                None => false,
                Some(PluginKind::Parser) => parsers.contains(&p.name), // a parser applies only if the parser list names it
                Some(_) => true,
            };
        let mut plugins: Vec<PluginSpec> = self
            .plugins
            .iter()
            .filter(in_force)
            .map(|declared| self.spec(declared))
            .collect();
        let undeclared = parsers
            .iter()
            .filter(|name| self.plugins.iter().all(|p| p.name != **name));
        plugins.extend(
            undeclared
                .filter(|name| registry::lookup(name).is_some())
                .map(|name| PluginSpec::of_type(name)),
        );
        if let Some(section) = self.flow_control(root) {
            if !saturation_detector.is_empty()
                && plugins
                    .iter()
                    .all(|plugin| plugin.name() != saturation_detector)
            {
                plugins.push(PluginSpec::of_type(&saturation_detector));
            }
            plugins.push(section);
        }
        let mut pipeline = PipelineSpec {
            plugins,
            profiles,
            profile_handler,
            saturation_detector,
            ..PipelineSpec::default()
        };
        if pipeline.profiles.is_empty() {
            let default = PipelineSpec::default();
            pipeline.plugins.extend(default.plugins);
            pipeline.profiles = default.profiles;
        }
        self.check(&pipeline);
        Some(pipeline)
    }

    /// Returns the declared detector that applies without being referred to.
    fn implied_detector(&self) -> Option<String> {
        let names = DETECTORS_DEFAULT
            .iter()
            .take(if self.flow_control { 2 } else { 1 });
        let found = names
            .filter_map(|name| {
                self.declared_of(PluginKind::Detector)
                    .find(|p| p.name == *name)
            })
            .next();
        found.map(|declared| declared.name.clone())
    }

    fn spec(&self, declared: &DeclaredPlugin) -> PluginSpec {
        PluginSpec {
            plugin_type: declared.plugin_type.clone(),
            name: declared.name.clone(),
            parameters: declared.given(&self.plugins),
        }
    }

    fn declared_of(&self, kind: PluginKind) -> impl Iterator<Item = &DeclaredPlugin> {
        self.plugins
            .iter()
            .filter(move |p| PluginRole::of(&p.plugin_type) == Some(PluginRole::Scheduling(kind)))
    }

    fn profiles(&mut self, nodes: &[YamlNode]) -> Vec<ProfileSpec> {
        let mut profiles: Vec<ProfileSpec> = Vec::new();
        for (i, node) in nodes.iter().enumerate() {
            let path = format!("schedulingProfiles[{i}]");
            if self.map(node, &path, &["name", "plugins"]).is_none() {
                continue;
            }
            let name = match node.get("name") {
                Some(name) => self.text(name, &below(&path, "name")).unwrap_or_default(),
                None => {
                    self.problem(&path, node.line, "has no name");
                    String::new()
                }
            };
            if profiles
                .iter()
                .any(|other| other.name == name && !name.is_empty())
            {
                self.problem(
                    &below(&path, "name"),
                    node.line,
                    format!("the name {name:?} is taken by another profile"),
                );
            }
            self.item(&path, node.line, ItemStatus::Implemented, "a profile");
            let plugins = self.profile_plugins(node, &path);
            profiles.push(ProfileSpec { name, plugins });
        }
        profiles
    }

    fn profile_plugins(&mut self, profile: &YamlNode, path: &str) -> Vec<ProfilePlugin> {
        let mut plugins = Vec::new();
        let mut picker: Option<String> = None;
        let references = profile
            .get("plugins")
            .map(|node| self.list(node, &below(path, "plugins")))
            .unwrap_or_default();
        for (i, reference) in references.iter().enumerate() {
            let path = format!("{path}.plugins[{i}]");
            let Some((kind, plugin)) = self.profile_plugin(reference, &path) else {
                continue;
            };
            if kind == PluginKind::Picker {
                match &picker {
                    Some(first) => {
                        let message = format!(
                            "{:?} is a second picker; a profile has one, and this one already has {first:?}",
                            plugin.name
                        );
                        self.problem(&path, reference.line, message);
                        continue;
                    }
                    None => picker = Some(plugin.name.clone()),
                }
            }
            plugins.push(plugin);
        }
        if picker.is_none() {
            plugins.extend(self.declared_picker());
        }
        plugins
    }

    /// Returns the picker of a profile that names none: the first declared one, as in llm-d. `None`
    /// leaves the choice to the scheduler's default.
    fn declared_picker(&mut self) -> Option<ProfilePlugin> {
        let name = self.declared_of(PluginKind::Picker).next()?.name.clone();
        self.referred.insert(name.clone());
        Some(ProfilePlugin {
            name,
            weight: WEIGHT_DEFAULT,
        })
    }

    fn profile_plugin(
        &mut self,
        node: &YamlNode,
        path: &str,
    ) -> Option<(PluginKind, ProfilePlugin)> {
        self.map(node, path, &["pluginRef", "weight"])?;
        let Some(reference) = node.get("pluginRef") else {
            self.problem(path, node.line, "has no pluginRef");
            return None;
        };
        if let Some(why) = self.not_in_profiles(reference) {
            self.item(path, node.line, ItemStatus::NoEffect, why);
            return None;
        }
        let name = self.reference(reference, &below(path, "pluginRef"), &IN_PROFILES);
        let weight = match node.get("weight") {
            None => WEIGHT_DEFAULT,
            Some(YamlNode {
                value: YamlValue::Number(weight),
                ..
            }) => *weight,
            Some(other) => {
                self.problem(
                    &below(path, "weight"),
                    other.line,
                    format!("must be a number, not {}", other.value.kind()),
                );
                return None;
            }
        };
        let weight_line = node.get("weight").map(|node| node.line);
        if weight_line.is_some() && !(0.0..=f64::from(scheduler::WEIGHT_MAX)).contains(&weight) {
            let message = format!("a weight is a number from 0 to {}", scheduler::WEIGHT_MAX);
            self.problem(
                &below(path, "weight"),
                weight_line.unwrap_or(node.line),
                message,
            );
        }
        if !(0.0..=f64::from(scheduler::WEIGHT_MAX)).contains(&weight) {
            return None;
        }
        let name = name?;
        let declared = self.plugins.iter().find(|p| p.name == name)?;
        let row = registry::lookup(&declared.plugin_type)?; // refused and unknown types are reported already
        match (weight_line, row.kind) {
            (Some(line), kind) if kind != PluginKind::Scorer => {
                self.item(
                    &below(path, "weight"),
                    line,
                    ItemStatus::NoEffect,
                    format!(
                        "{name:?} is {}; only scorers are weighted",
                        PluginRole::Scheduling(kind)
                    ),
                );
                self.item(
                    path,
                    node.line,
                    ItemStatus::Implemented,
                    "takes part in the profile",
                );
            }
            (_, PluginKind::Scorer) if weight == 0.0 => {
                self.item(
                    path,
                    node.line,
                    ItemStatus::NoEffect,
                    "a weight of 0 adds nothing to a total",
                );
            }
            (_, PluginKind::Scorer) => self.item(
                path,
                node.line,
                ItemStatus::Implemented,
                format!("weight {weight}"),
            ),
            _ => self.item(
                path,
                node.line,
                ItemStatus::Implemented,
                "takes part in the profile",
            ),
        }
        Some((row.kind, ProfilePlugin { name, weight }))
    }

    /// Why the plugin that a profile names changes nothing in it. llm-d takes any plugin there, and
    /// files name producers, parsers and handlers.
    fn not_in_profiles(&self, reference: &YamlNode) -> Option<String> {
        let YamlValue::Text(name) = &reference.value else {
            return None;
        };
        let declared = self
            .plugins
            .iter()
            .find(|p| p.name == *name && !p.is_refused())?;
        let role =
            PluginRole::of(&declared.plugin_type).filter(|role| !IN_PROFILES.contains(role))?;
        Some(match role {
            PluginRole::Scheduling(PluginKind::Producer) => {
                format!("{name:?} is {role}: it applies in every profile")
            }
            _ => format!("{name:?} is {role}: it takes no part in a profile, here as in llm-d"),
        })
    }

    /// Builds the profile of a file without profiles: all declared plugins that may be in a
    /// profile, each with weight 1. `None` if there are none.
    fn implied_profile(&mut self) -> Option<ProfileSpec> {
        let fits = |p: &&DeclaredPlugin| {
            registry::lookup(&p.plugin_type)
                .is_some_and(|row| IN_PROFILES.contains(&PluginRole::Scheduling(row.kind)))
        };
        let names: Vec<String> = self
            .plugins
            .iter()
            .filter(fits)
            .map(|p| p.name.clone())
            .collect();
        if names.is_empty() {
            self.item(
                "schedulingProfiles",
                0,
                ItemStatus::NoEffect,
                "no plugin that could be in a profile is declared: the default profile applies",
            );
            return None;
        }
        let pickers: Vec<(String, String, u64)> = self
            .declared_of(PluginKind::Picker)
            .map(|p| (p.name.clone(), p.path.clone(), p.line))
            .collect();
        for (name, path, line) in pickers.iter().skip(1) {
            let first = &pickers[0].0;
            let message = format!(
                "{name:?} is a second picker: all declared plugins form one profile, which has {first:?}"
            );
            self.problem(path, *line, message);
        }
        self.referred.extend(names.iter().cloned());
        let plugins = names
            .into_iter()
            .map(|name| ProfilePlugin {
                name,
                weight: WEIGHT_DEFAULT,
            })
            .collect();
        Some(ProfileSpec {
            name: PROFILE_DEFAULT.to_owned(),
            plugins,
        })
    }

    /// Returns the declared profile handler; no other item refers to it. Reports a second one.
    fn profile_handler(&mut self, profiles: usize, line: u64) -> String {
        let handlers: Vec<(String, String, u64)> = self
            .declared_of(PluginKind::ProfileHandler)
            .map(|p| (p.name.clone(), p.path.clone(), p.line))
            .collect();
        for (name, path, line) in handlers.iter().skip(1) {
            self.problem(
                path,
                *line,
                format!(
                    "{name:?} is a second profile handler; there is one, and {:?} is declared too",
                    handlers[0].0
                ),
            );
        }
        if handlers.is_empty() && profiles > 1 {
            let message = format!(
                "{profiles} profiles, and no profile handler is declared that chooses among them"
            );
            self.problem("schedulingProfiles", line, message);
        }
        handlers
            .into_iter()
            .next()
            .map(|(name, ..)| name)
            .unwrap_or_default()
    }

    /// Checks the pipeline as a whole; its parts are checked where they are read.
    fn check(&mut self, pipeline: &PipelineSpec) {
        if !self.report.errors.is_empty() || self.report.refuses() {
            return;
        }
        if let Err(error) = Pipeline::build(pipeline) {
            let handler = self.declared_of(PluginKind::ProfileHandler).next();
            let (path, line) = handler.map_or_else(
                || ("schedulingProfiles".to_owned(), 0),
                |p| (p.path.clone(), p.line),
            );
            self.problem(&path, line, error.to_string());
        }
    }
}
