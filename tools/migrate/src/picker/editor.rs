//! Changes llm-d's configuration so that Switchpoint accepts it, and reports each change.

use std::collections::BTreeSet;

use control_plane::config::yaml::{YamlKey, YamlNode, YamlValue};
use control_plane::config::{ConfigItem, ConfigProblem, ItemStatus, older};
use scheduler::registry;

use super::{FIELDS_NEEDED, PluginParameters, entry};
use crate::report::ReportEntry;
use crate::table::MigrationVerdict;
use crate::tree::{self, PathStep};

/// The replacements of refused plugin types, with the parameters that both types have. Other
/// parameters are left out.
pub(super) const REPLACEMENTS: &[(&str, &str)] = &[
    ("tokenizer", "token-producer"),
    ("pd-profile-handler", "disagg-profile-handler"),
    ("precise-prefix-cache-scorer", "prefix-cache-scorer"),
    (
        "precise-prefix-cache-producer",
        "approx-prefix-cache-producer",
    ),
    (
        "burst-prefix-cache-producer",
        "approx-prefix-cache-producer",
    ),
    ("mm-embeddings-cache-scorer", "prefix-cache-scorer"),
    (
        "mm-embeddings-cache-producer",
        "approx-prefix-cache-producer",
    ),
    ("kv-cache-scorer", "kv-cache-utilization-scorer"),
    ("model-server-protocol-metrics", "core-metrics-extractor"),
];

/// The configuration that is being changed, and the report so far.
pub(super) struct ConfigEditor {
    pub(super) tree: YamlNode,
    pub(super) entries: Vec<ReportEntry>,
}

// === impl ConfigEditor ===

impl ConfigEditor {
    /// Reports the items that stay: a plugin stays with its parameters, a profile with its plugins.
    pub(super) fn keep(&mut self, items: &[ConfigItem]) {
        let replaced: Vec<String> = self
            .entries
            .iter()
            .map(|entry| entry.ours.clone())
            .filter(|ours| !ours.is_empty())
            .collect();
        for item in items {
            let whole = !item.path.contains('.');
            let title = self.title(&item.path);
            let reason = &item.reason;
            if whole
                && replaced
                    .iter()
                    .any(|ours| *ours == title || ours.starts_with(&format!("{title} ")))
            {
                continue; // this item is reported as replaced
            }
            let reason = match item.status {
                ItemStatus::NoEffect => format!("no effect here: {reason}"),
                _ if item.path.starts_with("plugins[") && whole => {
                    "the same plugin, with its parameters".to_owned()
                }
                _ if item.path.starts_with("schedulingProfiles[") && whole => {
                    "the same profile, with the plugins and weights that are kept".to_owned()
                }
                _ if item.path.starts_with("plugins[")
                    || item.path.starts_with("schedulingProfiles[") =>
                {
                    continue;
                }
                _ => reason.clone(),
            };
            self.entries
                .push(entry(MigrationVerdict::Kept, title, "", reason));
        }
    }

    /// Replaces or removes the items that are refused or wrong.
    pub(super) fn change(
        &mut self,
        items: &[ConfigItem],
        errors: &[ConfigProblem],
    ) -> Result<(), String> {
        let mut out: BTreeSet<Vec<PathStep>> = BTreeSet::new();
        let refused: Vec<&ConfigItem> = items
            .iter()
            .filter(|item| item.status == ItemStatus::Refused)
            .collect();
        for item in &refused {
            let steps = tree::steps(&item.path);
            match steps.as_slice() {
                [PathStep::Key(plugins), PathStep::Index(at)] if plugins == "plugins" => {
                    if self.replace(*at, item) {
                        continue;
                    }
                }
                _ => self.lost(item),
            }
            out.insert(steps);
        }
        // Refused items are removed first, because an error may be about a reference to a refused
        // item.
        for error in errors.iter().filter(|_| refused.is_empty()) {
            let steps = Self::removable(tree::steps(&error.path));
            if !tree::exists(&self.tree, &steps)
                || (steps.len() < 2
                    && FIELDS_NEEDED
                        .iter()
                        .any(|needed| error.path.starts_with(needed)))
            {
                let path = if error.path.is_empty() {
                    String::new()
                } else {
                    format!("{}: ", error.path)
                };
                return Err(format!("{path}{}", error.message));
            }
            let title = self.title(&error.path);
            self.entries.push(entry(
                MigrationVerdict::Unknown,
                title,
                "",
                format!("left out: {}", error.message),
            ));
            out.insert(steps);
        }
        if out.is_empty() && refused.is_empty() {
            return Err("it is invalid".to_owned());
        }
        let plugin = |steps: &Vec<PathStep>| match steps.as_slice() {
            [PathStep::Key(section), PathStep::Index(at)] if section == "plugins" => {
                self.plugin(*at).map(|(name, _)| name)
            }
            _ => None,
        };
        let removed: Vec<String> = out.iter().filter_map(plugin).collect();
        // Removes from the end, so that the positions of earlier items stay.
        out.iter()
            .rev()
            .for_each(|steps| tree::remove(&mut self.tree, steps));
        removed
            .iter()
            .for_each(|name| tree::remove_references(&mut self.tree, name));
        self.tidy();
        Ok(())
    }

    /// Removes `featureGates` and `parameters` that are empty now.
    fn tidy(&mut self) {
        let empty = |node: &YamlNode| {
            matches!(&node.value, YamlValue::Map(entries) if entries.is_empty())
                || matches!(&node.value, YamlValue::List(list) if list.is_empty())
        };
        if self.tree.get("featureGates").is_some_and(empty) {
            tree::remove(&mut self.tree, &[PathStep::Key("featureGates".to_owned())]);
        }
        for at in 0..self.names().len() {
            let way = [
                PathStep::Key("plugins".to_owned()),
                PathStep::Index(at),
                PathStep::Key("parameters".to_owned()),
            ];
            if tree::at(&self.tree, &way).is_some_and(empty) {
                tree::remove(&mut self.tree, &way);
            }
        }
    }

    /// Returns the item to remove for an error at this path. Without its type or reference, an item
    /// has no meaning.
    fn removable(mut steps: Vec<PathStep>) -> Vec<PathStep> {
        if steps.len() > 1
            && matches!(steps.last(), Some(PathStep::Key(key)) if ["type", "name", "pluginRef"].contains(&key.as_str()))
        {
            steps.pop();
        }
        steps
    }

    /// Reports an item that is left out.
    fn lost(&mut self, item: &ConfigItem) {
        let title = self.title(&item.path);
        let instead = item
            .substitute
            .as_deref()
            .map(|instead| format!("; instead: {instead}"))
            .unwrap_or_default();
        let parameter = item.path.starts_with("plugins[");
        let verdict = if parameter {
            MigrationVerdict::Changed
        } else {
            MigrationVerdict::NoEquivalent
        };
        self.entries.push(entry(
            verdict,
            title,
            "",
            format!("left out: {}{instead}", item.reason),
        ));
    }

    /// Replaces a plugin. Returns whether the plugin stays in the file.
    fn replace(&mut self, at: usize, item: &ConfigItem) -> bool {
        let Some((name, plugin_type)) = self.plugin(at) else {
            return false;
        };
        let Some(&(_, new)) = REPLACEMENTS
            .iter()
            .find(|(refused, _)| *refused == plugin_type)
        else {
            self.lost_plugin(&name, item);
            return false;
        };
        let parameters = self.parameters(at, new);
        // The plugin is renamed only if its name was the name of its type, because other items then
        // refer to the type.
        let taken = self.names().iter().any(|other| other == new);
        let new_name = if name == plugin_type && !taken {
            new.to_owned()
        } else {
            name.clone()
        };
        let mut fields = vec![("type", YamlValue::Text(new.to_owned()))];
        if new_name != new {
            fields.insert(0, ("name", YamlValue::Text(new_name.clone())));
        }
        if !parameters.is_empty() {
            fields.push(("parameters", YamlValue::Map(parameters)));
        }
        if let Some(node) = tree::at_mut(
            &mut self.tree,
            &[PathStep::Key("plugins".to_owned()), PathStep::Index(at)],
        ) {
            node.value = tree::map(fields);
        }
        let ours = if new_name == new {
            format!("plugin {new}")
        } else {
            format!("plugin {new_name} ({new})")
        };
        if new_name != name {
            tree::rename_references(&mut self.tree, &name, &new_name);
        }
        // The new type does not read the values that the old type read from the data layer.
        if let Some(data_layer) =
            tree::at_mut(&mut self.tree, &[PathStep::Key("dataLayer".to_owned())])
        {
            tree::remove_references(data_layer, &new_name);
        }
        self.entries.push(entry(
            MigrationVerdict::Changed,
            format!("plugin {name}"),
            &ours,
            format!("replaced: {}", item.reason),
        ));
        true
    }

    fn lost_plugin(&mut self, name: &str, item: &ConfigItem) {
        let instead = item
            .substitute
            .as_deref()
            .map(|instead| format!("; instead: {instead}"))
            .unwrap_or_default();
        self.entries.push(entry(
            MigrationVerdict::NoEquivalent,
            format!("plugin {name}"),
            "",
            format!("left out: {}{instead}", item.reason),
        ));
    }

    /// Returns the parameters of a replaced plugin.
    fn parameters(&self, at: usize, new: &str) -> Vec<(YamlKey, YamlNode)> {
        let old = tree::at(
            &self.tree,
            &[
                PathStep::Key("plugins".to_owned()),
                PathStep::Index(at),
                PathStep::Key("parameters".to_owned()),
            ],
        );
        let known = registry::lookup(new)
            .map(|row| row.parameters)
            .unwrap_or_default();
        let given = old.map(YamlNode::entries).unwrap_or_default().iter();
        let stays = |name: &str| {
            older::is_older_name(new, name) || known.iter().any(|parameter| parameter.name == name)
        };
        given.filter(|(key, _)| stays(&key.name)).cloned().collect()
    }

    /// Adds parameters that llm-d takes from flags. A value in the file has precedence.
    pub(super) fn add_parameters(&mut self, extra: &PluginParameters) {
        for (plugin_type, parameters) in [
            ("metrics-data-source", &extra.data_source),
            ("core-metrics-extractor", &extra.extractor),
        ] {
            if parameters.is_empty() {
                continue;
            }
            let declared = self
                .types()
                .iter()
                .position(|declared| declared == plugin_type);
            let Some(at) = declared.or_else(|| self.declare(plugin_type)) else {
                continue;
            };
            let Some(plugin) = tree::at_mut(
                &mut self.tree,
                &[PathStep::Key("plugins".to_owned()), PathStep::Index(at)],
            ) else {
                continue;
            };
            let mut all = plugin
                .get("parameters")
                .map(YamlNode::entries)
                .unwrap_or_default()
                .to_vec();
            for (name, value) in parameters {
                if all.iter().all(|(key, _)| key.name != *name) {
                    all.extend(tree::entries(vec![(name.as_str(), value.clone())]));
                }
            }
            tree::set(plugin, "parameters", YamlValue::Map(all));
        }
    }

    fn declare(&mut self, plugin_type: &str) -> Option<usize> {
        if self.tree.get("plugins").is_none() {
            tree::set(&mut self.tree, "plugins", YamlValue::List(Vec::new()));
        }
        let plugins = tree::at_mut(&mut self.tree, &[PathStep::Key("plugins".to_owned())])?;
        let YamlValue::List(list) = &mut plugins.value else {
            return None;
        };
        list.push(YamlNode {
            line: 0,
            value: tree::map(vec![("type", YamlValue::Text(plugin_type.to_owned()))]),
        });
        Some(list.len() - 1)
    }

    /// Returns the name and type of a plugin.
    fn plugin(&self, at: usize) -> Option<(String, String)> {
        let node = tree::at(
            &self.tree,
            &[PathStep::Key("plugins".to_owned()), PathStep::Index(at)],
        )?;
        let plugin_type = node.get("type").and_then(YamlNode::text)?;
        let name = node
            .get("name")
            .and_then(YamlNode::text)
            .filter(|name| !name.is_empty())
            .unwrap_or(plugin_type);
        Some((name.to_owned(), plugin_type.to_owned()))
    }

    fn plugins(&self) -> impl Iterator<Item = (String, String)> {
        let count = match self.tree.get("plugins").map(|node| &node.value) {
            Some(YamlValue::List(list)) => list.len(),
            _ => 0,
        };
        (0..count).map(|at| self.plugin(at).unwrap_or_default())
    }

    fn names(&self) -> Vec<String> {
        self.plugins().map(|(name, _)| name).collect()
    }

    fn types(&self) -> Vec<String> {
        self.plugins().map(|(_, plugin_type)| plugin_type).collect()
    }

    /// Returns an item's path with names for numbers: `plugin queue-scorer, parameters.weight`.
    fn title(&self, path: &str) -> String {
        let steps = tree::steps(path);
        let (title, rest) = match steps.as_slice() {
            [PathStep::Key(section), PathStep::Index(at), rest @ ..] if section == "plugins" => {
                match self.plugin(*at) {
                    Some((name, _)) => (format!("plugin {name}"), rest),
                    None => return path.to_owned(),
                }
            }
            [PathStep::Key(section), PathStep::Index(_)] if section == "featureGates" => {
                let gate = tree::at(&self.tree, &steps)
                    .and_then(YamlNode::text)
                    .unwrap_or(path);
                return format!("feature gate {gate}");
            }
            [PathStep::Key(section), PathStep::Index(at), rest @ ..]
                if section == "schedulingProfiles" =>
            {
                let profile = tree::at(
                    &self.tree,
                    &[
                        PathStep::Key(section.clone()),
                        PathStep::Index(*at),
                        PathStep::Key("name".to_owned()),
                    ],
                );
                let title = format!(
                    "profile {}",
                    profile.and_then(YamlNode::text).unwrap_or("without a name")
                );
                match rest {
                    [PathStep::Key(_), PathStep::Index(plugin), rest @ ..] => {
                        let way = [
                            PathStep::Key(section.clone()),
                            PathStep::Index(*at),
                            PathStep::Key("plugins".to_owned()),
                            PathStep::Index(*plugin),
                        ];
                        let reference = tree::at(&self.tree, &way)
                            .and_then(|node| node.get("pluginRef"))
                            .and_then(YamlNode::text);
                        (
                            format!(
                                "{title}, {}",
                                reference.unwrap_or("a plugin without a name")
                            ),
                            rest,
                        )
                    }
                    rest => (title, rest),
                }
            }
            _ => return path.to_owned(),
        };
        let rest = tree::path(rest);
        if rest.is_empty() {
            title
        } else {
            format!("{title}, {rest}")
        }
    }
}
