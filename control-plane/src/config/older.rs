//! Parameters under the names that they had in older versions of llm-d, which its picker still
//! reads. The reader moves them to their new places before any other code reads the file.

use super::yaml::{YamlKey, YamlNode, YamlValue};

/// The moved parameters: the plugin type, the older name, and the path of the newer name. If a file
/// has two older names of one parameter, the first in this table is used.
const MOVED: &[(&str, &str, &[&str])] = &[
    (
        "disagg-profile-handler",
        "decodeProfile",
        &["profiles", "decode"],
    ),
    (
        "disagg-profile-handler",
        "prefillProfile",
        &["profiles", "prefill"],
    ),
    (
        "disagg-profile-handler",
        "encodeProfile",
        &["profiles", "encode"],
    ),
    (
        "disagg-profile-handler",
        "prefillDeciderPluginName",
        &["deciders", "prefill"],
    ),
    (
        "disagg-profile-handler",
        "deciderPluginName",
        &["deciders", "prefill"],
    ),
    (
        "disagg-profile-handler",
        "encodeDeciderPluginName",
        &["deciders", "encode"],
    ),
    (
        "approx-prefix-cache-producer",
        "blockSize",
        &["blockSizeTokens"],
    ),
    (
        "session-affinity-scorer",
        "headerName",
        &["encodedEndpointHeaderConfig", "header"],
    ),
    (
        "session-affinity-filter",
        "headerName",
        &["encodedEndpointHeaderConfig", "header"],
    ),
    (
        "predicted-latency-producer",
        "predictInPrepareData",
        &["predictInProduce"],
    ),
];

/// A parameter that was moved, or that has no effect because the file also has the newer parameter.
#[derive(Debug, PartialEq, Eq)]
pub struct MovedParameter {
    /// The path of the parameter in the file.
    pub path: String,
    /// The line number of the parameter. The first line of the file is 1.
    pub line: u64,
    /// The path of the newer name among the parameters.
    pub now: String,
    pub counts: bool,
}

/// Returns every older name: plugin type, name, and the path of the newer name.
pub fn moved_names() -> impl Iterator<Item = (&'static str, &'static str, String)> {
    MOVED
        .iter()
        .map(|(plugin_type, older, way)| (*plugin_type, *older, way.join(".")))
}

/// Returns whether a parameter of this type has this older name.
#[must_use]
pub fn is_older_name(plugin_type: &str, name: &str) -> bool {
    MOVED
        .iter()
        .any(|(of, older, _)| *of == plugin_type && *older == name)
}

/// Moves every parameter with an older name, and returns what was moved.
pub fn move_parameters(root: &mut YamlNode) -> Vec<MovedParameter> {
    let mut moved = Vec::new();
    let Some(YamlValue::List(plugins)) = root.value_mut("plugins") else {
        return moved;
    };
    for (at, plugin) in plugins.iter_mut().enumerate() {
        let Some(plugin_type) = plugin.get("type").and_then(YamlNode::text) else {
            continue;
        };
        let plugin_type = plugin_type.to_owned();
        let Some(parameters @ YamlValue::Map(_)) = plugin.value_mut("parameters") else {
            continue;
        };
        for (_, older, way) in MOVED.iter().filter(|(of, ..)| *of == plugin_type) {
            let Some((key, node)) = parameters.take(&[older]) else {
                continue;
            };
            let counts = node.value != YamlValue::Null && put(parameters, way, &key, node);
            moved.push(MovedParameter {
                path: format!("plugins[{at}].parameters.{older}"),
                line: key.line,
                now: way.join("."),
                counts,
            });
        }
    }
    moved
}

/// Puts a node at the end of the path, unless a value exists at this path already or the path is
/// blocked.
fn put(into: &mut YamlValue, way: &[&str], older: &YamlKey, node: YamlNode) -> bool {
    let (YamlValue::Map(entries), Some((name, rest))) = (into, way.split_first()) else {
        return false;
    };
    let at = entries
        .iter()
        .position(|(key, _)| key.name == *name)
        .unwrap_or_else(|| {
            let value = if rest.is_empty() {
                YamlValue::Null
            } else {
                YamlValue::Map(Vec::new())
            };
            entries.push((
                YamlKey {
                    line: older.line,
                    name: (*name).to_owned(),
                },
                YamlNode {
                    line: node.line,
                    value,
                },
            ));
            entries.len() - 1
        });
    let Some((_, there)) = entries.get_mut(at) else {
        return false;
    };
    if !rest.is_empty() {
        return put(&mut there.value, rest, older, node);
    }
    let free = there.value == YamlValue::Null;
    if free {
        *there = node;
    }
    free
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::yaml::parse;

    #[test]
    fn an_older_name_moves_unless_the_newer_one_is_there() {
        let file = |parameters: &str| {
            format!("plugins:\n- type: disagg-profile-handler\n  parameters: {{{parameters}}}\n")
        };
        for (older, newer, lost) in [
            ("decodeProfile: d", "profiles: {decode: d}", 0),
            (
                "decodeProfile: d, encodeProfile: e",
                "profiles: {decode: d, encode: e}",
                0,
            ),
            (
                "profiles: {decode: x}, decodeProfile: d",
                "profiles: {decode: x}",
                1,
            ),
            (
                "profiles: {decode: }, decodeProfile: d",
                "profiles: {decode: d}",
                0,
            ),
            (
                "deciderPluginName: b, prefillDeciderPluginName: a",
                "deciders: {prefill: a}",
                1,
            ),
            ("deciders: 7, deciderPluginName: a", "deciders: 7", 1),
            ("other: 1", "other: 1", 0),
        ] {
            let mut root = parse(&file(older)).unwrap();
            let moved = move_parameters(&mut root);
            assert_eq!(
                root.value.to_json(),
                parse(&file(newer)).unwrap().value.to_json(),
                "{older}"
            );
            assert_eq!(
                moved.iter().filter(|moved| !moved.counts).count(),
                lost,
                "{older}: {moved:?}"
            );
        }
    }

    #[test]
    fn what_is_no_plugin_with_parameters_is_left_alone() {
        for text in [
            "plugins: 1\n",
            "plugins: [1, {type: [a]}, {type: disagg-profile-handler, parameters: [decodeProfile]}]\n",
            "[]\n",
            "",
        ] {
            let mut root = parse(text).unwrap();
            let before = root.clone();
            assert_eq!(
                (move_parameters(&mut root), root),
                (Vec::new(), before),
                "{text}"
            );
        }
    }
}
