//! Changes a YAML tree by paths, and changes references to plugins by the name of the plugin.

use std::fmt::Write;

use control_plane::config::yaml::{YamlKey, YamlNode, YamlValue};

/// A step of a path such as `plugins[2].type`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PathStep {
    /// A position in a list.
    Index(usize),
    /// A key of a map.
    Key(String),
}

/// Returns the steps of a path as the configuration reader writes it.
#[must_use]
pub fn steps(path: &str) -> Vec<PathStep> {
    let parts = path.split(['.', '[']).filter(|part| !part.is_empty());
    let step = |part: &str| match part
        .strip_suffix(']')
        .and_then(|number| number.parse().ok())
    {
        Some(index) => PathStep::Index(index),
        None => PathStep::Key(part.to_owned()),
    };
    parts.map(step).collect()
}

/// Returns the path of these steps.
#[must_use]
pub fn path(steps: &[PathStep]) -> String {
    let mut path = String::new(); // writing to a String cannot fail
    for step in steps {
        let _ = match step {
            PathStep::Index(index) => write!(path, "[{index}]"),
            PathStep::Key(key) if path.is_empty() => write!(path, "{key}"),
            PathStep::Key(key) => write!(path, ".{key}"),
        };
    }
    path
}

/// Returns the node at the end of a path.
#[must_use]
pub fn at<'n>(root: &'n YamlNode, steps: &[PathStep]) -> Option<&'n YamlNode> {
    steps
        .iter()
        .try_fold(root, |node, step| match (step, &node.value) {
            (PathStep::Index(index), YamlValue::List(list)) => list.get(*index),
            (PathStep::Key(name), YamlValue::Map(entries)) => entries
                .iter()
                .find(|(key, _)| key.name == *name)
                .map(|(_, node)| node),
            _ => None,
        })
}

/// Returns the node at the end of a path, to change it.
#[must_use]
pub fn at_mut<'n>(root: &'n mut YamlNode, steps: &[PathStep]) -> Option<&'n mut YamlNode> {
    steps
        .iter()
        .try_fold(root, |node, step| match (step, &mut node.value) {
            (PathStep::Index(index), YamlValue::List(list)) => list.get_mut(*index),
            (PathStep::Key(name), YamlValue::Map(entries)) => entries
                .iter_mut()
                .find(|(key, _)| key.name == *name)
                .map(|(_, node)| node),
            _ => None,
        })
}

#[must_use]
pub fn exists(root: &YamlNode, steps: &[PathStep]) -> bool {
    at(root, steps).is_some()
}

/// Removes the node at the end of a path.
pub fn remove(root: &mut YamlNode, steps: &[PathStep]) {
    let Some((last, before)) = steps.split_last() else {
        return;
    };
    match (last, at_mut(root, before).map(|node| &mut node.value)) {
        (PathStep::Index(index), Some(YamlValue::List(list))) if *index < list.len() => {
            drop(list.remove(*index));
        }
        (PathStep::Key(name), Some(YamlValue::Map(entries))) => {
            entries.retain(|(key, _)| key.name != *name);
        }
        _ => {}
    }
}

/// Sets a key of a map.
pub fn set(node: &mut YamlNode, name: &str, value: YamlValue) {
    let YamlValue::Map(entries) = &mut node.value else {
        return;
    };
    let value = YamlNode { line: 0, value };
    match entries.iter_mut().find(|(key, _)| key.name == name) {
        Some((_, old)) => *old = value,
        None => entries.push((
            YamlKey {
                line: 0,
                name: name.to_owned(),
            },
            value,
        )),
    }
}

#[must_use]
pub fn map(fields: Vec<(&str, YamlValue)>) -> YamlValue {
    YamlValue::Map(entries(fields))
}

/// Returns the entries of a map.
#[must_use]
pub fn entries(fields: Vec<(&str, YamlValue)>) -> Vec<(YamlKey, YamlNode)> {
    fields
        .into_iter()
        .map(|(name, value)| {
            (
                YamlKey {
                    line: 0,
                    name: name.to_owned(),
                },
                YamlNode { line: 0, value },
            )
        })
        .collect()
}

#[must_use]
pub fn list(values: Vec<YamlValue>) -> YamlValue {
    YamlValue::List(
        values
            .into_iter()
            .map(|value| YamlNode { line: 0, value })
            .collect(),
    )
}

/// Removes every reference to a plugin: list items whose `pluginRef` is the plugin, and fields that
/// name the plugin.
pub fn remove_references(node: &mut YamlNode, plugin: &str) {
    match &mut node.value {
        YamlValue::List(list) => {
            list.retain(|item| !refers(item, plugin));
            list.iter_mut()
                .for_each(|item| remove_references(item, plugin));
        }
        YamlValue::Map(entries) => {
            entries.retain(|(key, node)| {
                !(refers(node, plugin) || (key.name.ends_with("Ref") && is_text(node, plugin)))
            });
            entries
                .iter_mut()
                .for_each(|(_, node)| remove_references(node, plugin));
        }
        _ => {}
    }
}

/// Renames every reference to a plugin, also in parameters.
pub fn rename_references(node: &mut YamlNode, plugin: &str, new: &str) {
    match &mut node.value {
        YamlValue::List(list) => list
            .iter_mut()
            .for_each(|item| rename_references(item, plugin, new)),
        YamlValue::Map(entries) => {
            for (key, node) in entries.iter_mut().filter(|(key, _)| key.name != "type") {
                match &mut node.value {
                    YamlValue::Text(text) if text == plugin && key.name != "name" => {
                        new.clone_into(text);
                    }
                    _ => rename_references(node, plugin, new),
                }
            }
        }
        _ => {}
    }
}

fn refers(node: &YamlNode, plugin: &str) -> bool {
    node.get("pluginRef")
        .is_some_and(|reference| is_text(reference, plugin))
}

fn is_text(node: &YamlNode, wanted: &str) -> bool {
    matches!(&node.value, YamlValue::Text(text) if text == wanted)
}
