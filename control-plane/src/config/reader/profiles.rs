//! Reads profiles, and builds the pipeline from them and the declared plugins. The reader adds
//! llm-d's implicit parts: a handler, a picker, weights of 1, and one profile of all declared
//! plugins if the file has no profiles.

use scheduler::registry::{self, PluginKind};
use scheduler::{Pipeline, PipelineSpec, PluginSpec, ProfilePlugin, ProfileSpec};

use super::ConfigReader;
use super::plugins::DeclaredPlugin;
use crate::config::reference_items::PluginRole;
use crate::config::{ItemStatus, LocatedNode};

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

/// The saturation detectors that apply if they are declared, although nothing refers to them. With
/// flow control, the second is the default.
const DETECTORS_DEFAULT: [&str; 2] = ["utilization-detector", "backlog-detector"];

// === impl ConfigReader ===

impl ConfigReader {
    /// Builds the pipeline and checks it.
    pub(super) fn pipeline(&mut self, root: &LocatedNode<'_>) -> Option<PipelineSpec> {
        let given = root.get("schedulingProfiles");
        let nodes = self.report.list(given.as_ref());
        let profiles = if nodes.is_empty() {
            self.implied_profile().into_iter().collect()
        } else {
            self.profiles(&nodes)
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
            self.profile_handler(profiles.len(), given.map_or(0, |given| given.node.line));
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

    /// Returns the declared detector that applies although no item refers to it.
    fn implied_detector(&self) -> Option<String> {
        let names = DETECTORS_DEFAULT
            .iter()
            .take(if self.flow_control { 2 } else { 1 });
        names
            .filter_map(|name| {
                self.declared_of(PluginKind::Detector)
                    .find(|p| p.name == *name)
            })
            .map(|declared| declared.name.clone())
            .next()
    }

    fn spec(&self, declared: &DeclaredPlugin) -> PluginSpec {
        PluginSpec {
            plugin_type: declared.plugin_type.clone(),
            name: declared.name.clone(),
            parameters: declared.given(&self.plugins),
        }
    }

    fn declared_of(&self, kind: PluginKind) -> impl Iterator<Item = &DeclaredPlugin> {
        self.plugins.iter().filter(move |p| p.is(kind))
    }

    fn profiles(&mut self, nodes: &[LocatedNode<'_>]) -> Vec<ProfileSpec> {
        let mut profiles: Vec<ProfileSpec> = Vec::new();
        for node in nodes {
            if self.report.map(node, &["name", "plugins"]).is_none() {
                continue;
            }
            let name = self.report.required(node, "name");
            let name = name.and_then(|name| self.text(&name)).unwrap_or_default();
            if profiles
                .iter()
                .any(|other| other.name == name && !name.is_empty())
            {
                let message = format!("the name {name:?} is taken by another profile");
                self.report
                    .problem(&format!("{}.name", node.path), node.node.line, message);
            }
            self.answer(node, ItemStatus::Implemented, "a profile");
            let plugins = self.profile_plugins(node);
            profiles.push(ProfileSpec { name, plugins });
        }
        profiles
    }

    fn profile_plugins(&mut self, profile: &LocatedNode<'_>) -> Vec<ProfilePlugin> {
        let mut plugins = Vec::new();
        let mut picker: Option<String> = None;
        for reference in self.report.list(profile.get("plugins").as_ref()) {
            let Some((kind, plugin)) = self.profile_plugin(&reference) else {
                continue;
            };
            if kind == PluginKind::Picker {
                if let Some(first) = &picker {
                    let message = format!(
                        "{:?} is a second picker; a profile has one, and this one already has {first:?}",
                        plugin.name
                    );
                    self.report.wrong(&reference, message);
                    continue;
                }
                picker = Some(plugin.name.clone());
            }
            plugins.push(plugin);
        }
        if picker.is_none() {
            plugins.extend(self.declared_picker());
        }
        plugins
    }

    /// Returns the picker of a profile that names no picker: the first declared picker, as in
    /// llm-d. `None` leaves the choice to the scheduler's default.
    fn declared_picker(&mut self) -> Option<ProfilePlugin> {
        let name = self.declared_of(PluginKind::Picker).next()?.name.clone();
        self.referred.insert(name.clone());
        Some(ProfilePlugin {
            name,
            weight: WEIGHT_DEFAULT,
        })
    }

    fn profile_plugin(&mut self, at: &LocatedNode<'_>) -> Option<(PluginKind, ProfilePlugin)> {
        self.report.map(at, &["pluginRef", "weight"])?;
        let reference = self.report.required(at, "pluginRef")?;
        if let Some(why) = self.not_in_profiles(&reference) {
            self.answer(at, ItemStatus::NoEffect, why);
            return None;
        }
        let name = self.reference(&reference, &IN_PROFILES);
        let given = at.get("weight");
        let weight = match &given {
            None => WEIGHT_DEFAULT,
            Some(given) => self.weight(given)?,
        };
        let name = name?;
        let declared = self.plugins.iter().find(|p| p.name == name)?;
        let kind = registry::lookup(&declared.plugin_type)?.kind; // refused and unknown types are reported already
        if let Some(given) = given.filter(|_| kind != PluginKind::Scorer) {
            let role = PluginRole::Scheduling(kind);
            let reason = format!("{name:?} is {role}; only scorers are weighted");
            self.answer(&given, ItemStatus::NoEffect, reason);
        }
        if kind != PluginKind::Scorer {
            self.answer(at, ItemStatus::Implemented, "takes part in the profile");
        } else if weight == 0.0 {
            let reason = "a weight of 0 adds nothing to a total";
            self.answer(at, ItemStatus::NoEffect, reason);
        } else {
            self.answer(at, ItemStatus::Implemented, format!("weight {weight}"));
        }
        Some((kind, ProfilePlugin { name, weight }))
    }

    fn weight(&mut self, given: &LocatedNode<'_>) -> Option<f64> {
        let weight = self.report.number(given)?;
        if (0.0..=f64::from(scheduler::WEIGHT_MAX)).contains(&weight) {
            return Some(weight);
        }
        let message = format!("a weight is a number from 0 to {}", scheduler::WEIGHT_MAX);
        self.report.wrong(given, message);
        None
    }

    /// Returns the reason why a plugin named by a profile changes nothing in the profile. llm-d
    /// accepts any plugin in a profile, and some files name producers, parsers and handlers.
    fn not_in_profiles(&self, reference: &LocatedNode<'_>) -> Option<String> {
        let name = reference.node.text()?;
        let declared = self
            .plugins
            .iter()
            .find(|p| p.name == name && !p.is_refused())?;
        let role = declared.role().filter(|role| !IN_PROFILES.contains(role))?;
        Some(match role {
            PluginRole::Scheduling(PluginKind::Producer) => {
                format!("{name:?} is {role}: it applies in every profile")
            }
            _ => format!("{name:?} is {role}: it takes no part in a profile, here as in llm-d"),
        })
    }

    /// Builds the only profile of a file without profiles: all declared plugins that a profile may
    /// contain, each with weight 1. Returns `None` if the file has no such plugins.
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
            self.report.item(
                "schedulingProfiles",
                0,
                ItemStatus::NoEffect,
                "no plugin that could be in a profile is declared: the default profile applies",
            );
            return None;
        }
        self.only(PluginKind::Picker, |name, first| {
            format!(
                "{name:?} is a second picker: all declared plugins form one profile, which has {first:?}"
            )
        });
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

    /// Returns the declared profile handler. No item refers to a handler, so a second handler is
    /// reported.
    fn profile_handler(&mut self, profiles: usize, line: u64) -> String {
        let handler = self.only(PluginKind::ProfileHandler, |name, first| {
            format!(
                "{name:?} is a second profile handler; there is one, and {first:?} is declared too"
            )
        });
        if handler.is_none() && profiles > 1 {
            let message = format!(
                "{profiles} profiles, and no profile handler is declared that chooses among them"
            );
            self.report.problem("schedulingProfiles", line, message);
        }
        handler.unwrap_or_default()
    }

    /// Returns the name of the first declared plugin of a kind, and reports further plugins of this
    /// kind.
    fn only(&mut self, kind: PluginKind, message: impl Fn(&str, &str) -> String) -> Option<String> {
        let mut declared = self.plugins.iter().filter(|p| p.is(kind));
        let first = &declared.next()?.name;
        for other in declared {
            self.report
                .problem(&other.path, other.line, message(&other.name, first));
        }
        Some(first.clone())
    }

    /// Checks the pipeline as a whole. The parts of the pipeline were checked when they were read.
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
            self.report.problem(&path, line, error.to_string());
        }
    }
}
