//! Reads the values of llm-d's charts: merges files as Helm does, and splits them into items.

use super::items::{GivenItem, GivenItems};
use super::printer::short;
use super::table::{has_rows_below, row_of};
use control_plane::config::yaml::{self, YamlNode, YamlValue};

/// The paths at which charts have the picker's flags.
const FLAGS: [&str; 2] = ["router.epp.flags", "inferenceExtension.flags"];
/// The paths at which charts have the picker's environment variables.
const ENVIRONMENT: [&str; 2] = ["router.epp.env", "inferenceExtension.env"];

/// Reads files of values. A later file overrides an earlier file.
///
/// # Errors
/// Returns the file and the line that cannot be read, or the reason why a file has no values.
pub fn read<'t>(files: impl IntoIterator<Item = (&'t str, &'t str)>) -> Result<GivenItems, String> {
    let mut all = YamlNode {
        line: 0,
        value: YamlValue::Map(Vec::new()),
    };
    for (name, text) in files {
        let node = yaml::parse(text).map_err(|(line, why)| format!("{name}:{line}: {why}"))?;
        match node.value {
            YamlValue::Null => {}
            YamlValue::Map(_) if node.get("kind").is_some() && node.get("apiVersion").is_some() => {
                return Err(format!(
                    "{name} has Kubernetes objects, not values: give it without -f"
                ));
            }
            YamlValue::Map(_) => merge(&mut all, node),
            other => {
                return Err(format!(
                    "{name}:{}: values are a map, not {}",
                    node.line,
                    other.kind()
                ));
            }
        }
    }
    let mut items = GivenItems::default();
    take(&mut items, "", &all);
    Ok(items)
}

/// Merges maps key by key. Replaces any other value, as Helm does.
fn merge(into: &mut YamlNode, over: YamlNode) {
    match (&mut into.value, over.value) {
        (YamlValue::Map(entries), YamlValue::Map(newer)) => {
            for (key, node) in newer {
                match entries.iter_mut().find(|(known, _)| known.name == key.name) {
                    Some((_, known)) => merge(known, node),
                    None => entries.push((key, node)),
                }
            }
        }
        (value, newer) => *value = newer,
    }
}

/// Splits a value into the items that have rows in the migration table.
fn take(items: &mut GivenItems, path: &str, node: &YamlNode) {
    if FLAGS.contains(&path) {
        return flags(items, path, node);
    }
    if ENVIRONMENT.contains(&path) {
        return environment(items, path, node);
    }
    // The row of a path in the table is for the whole value, unless parts of the value have rows of
    // their own.
    if let YamlValue::Map(entries) = &node.value
        && (path.is_empty() || has_rows_below(path) || holds_special(path))
    {
        for (key, node) in entries {
            let path = if path.is_empty() {
                key.name.clone()
            } else {
                format!("{path}.{}", key.name)
            };
            take(items, &path, node);
        }
        return;
    }
    if node.value != YamlValue::Null {
        let newest = row_of(path).map_or_else(|| path.to_owned(), |(_, newest)| newest);
        items.push(GivenItem {
            path: newest,
            shown: path.to_owned(),
            value: node.value.clone(),
        });
    }
}

/// Whether flags or environment variables lie below this path.
fn holds_special(path: &str) -> bool {
    FLAGS.iter().chain(&ENVIRONMENT).any(|special| {
        special
            .strip_prefix(path)
            .is_some_and(|rest| rest.starts_with('.'))
    })
}

/// Reads flags, which are a map, or in older charts a list of names and values. A key may contain
/// the value (`ha-enable-leader-election=false: ""`).
fn flags(items: &mut GivenItems, path: &str, node: &YamlNode) {
    match &node.value {
        YamlValue::Null => {}
        YamlValue::Map(entries) => {
            for (key, node) in entries {
                flag(items, path, &key.name, node.value.clone());
            }
        }
        YamlValue::List(list) => {
            for (i, entry) in list.iter().enumerate() {
                match entry.get("name").map(|name| &name.value) {
                    Some(YamlValue::Text(name)) => {
                        let value = entry
                            .get("value")
                            .map_or(YamlValue::Text(String::new()), |node| node.value.clone());
                        flag(items, path, name, value);
                    }
                    _ => items.unknown(&format!("{path}[{i}]"), entry.value.clone()),
                }
            }
        }
        other => items.unknown(path, other.clone()),
    }
}

fn flag(items: &mut GivenItems, path: &str, name: &str, value: YamlValue) {
    let (name, value) = match name.split_once('=') {
        Some((name, value)) => (name, YamlValue::Text(value.to_owned())),
        None => (name, value),
    };
    items.push(GivenItem {
        path: format!("--{name}"),
        shown: format!("{path}.{name}"),
        value,
    });
}

/// Reads environment variables, which are a list as in a pod, or a map.
fn environment(items: &mut GivenItems, path: &str, node: &YamlNode) {
    let entries: Vec<(Option<&str>, &YamlNode, YamlValue)> = match &node.value {
        YamlValue::Null => return,
        YamlValue::Map(entries) => entries
            .iter()
            .map(|(key, node)| (Some(key.name.as_str()), node, node.value.clone()))
            .collect(),
        YamlValue::List(list) => list.iter().map(variable).collect(),
        other => return items.unknown(path, other.clone()),
    };
    for (i, (name, node, value)) in entries.into_iter().enumerate() {
        match name {
            Some(name) => items.push(GivenItem {
                path: format!("${name}"),
                shown: format!("{path}.{name}"),
                value,
            }),
            None => items.unknown(&format!("{path}[{i}]"), node.value.clone()),
        }
    }
}

/// Returns the name and value of an environment variable of a pod.
pub(super) fn variable(node: &YamlNode) -> (Option<&str>, &YamlNode, YamlValue) {
    let name = match node.get("name").map(|name| &name.value) {
        Some(YamlValue::Text(name)) => Some(name.as_str()),
        _ => None,
    };
    let value = match (node.get("value"), node.get("valueFrom")) {
        (Some(value), _) => value.value.clone(),
        (None, Some(from)) => YamlValue::Text(format!("from {}", short(&from.value))),
        (None, None) => YamlValue::Text(String::new()),
    };
    (name, node, value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(items: &GivenItems) -> Vec<String> {
        items
            .all()
            .iter()
            .map(|item| format!("{} = {}", item.shown, short(&item.value)))
            .collect()
    }

    #[test]
    fn later_files_override_maps_key_by_key_and_replace_lists() {
        let first = "router:\n  epp: {replicas: 1, tolerations: [{key: a}], image: {tag: a}}\n  monitoring: {interval: 10s}\n";
        let second = "router:\n  epp: {replicas: 3, tolerations: [{key: b}]}\n  monitoring: {interval: null}\n";
        let items = read([("a", first), ("b", ""), ("c", second)]).unwrap();
        assert_eq!(
            shown(&items),
            [
                "router.epp.replicas = 3",
                "router.epp.tolerations = [{key: b}]",
                "router.epp.image = {tag: a}"
            ],
            "null takes the value away"
        );
    }

    #[test]
    fn flags_and_variables_are_read_in_every_form() {
        let newer = "router: {epp: {flags: {v: 2, 'ha-enable-leader-election=false': ''}, env: [{name: A, value: b}, {name: C, valueFrom: {x: y}}, {}]}}";
        let older = "inferenceExtension: {flags: [{name: v, value: 1}, 7], env: {A: b}}";
        let items = read([("a", newer)]).unwrap();
        let paths: Vec<&str> = items.all().iter().map(|item| item.path.as_str()).collect();
        assert_eq!(
            paths,
            [
                "--v",
                "--ha-enable-leader-election",
                "$A",
                "$C",
                "router.epp.env[2]"
            ]
        );
        assert_eq!(
            shown(&items)[1],
            "router.epp.flags.ha-enable-leader-election = \"false\""
        );
        let items = read([("a", older)]).unwrap();
        let paths: Vec<&str> = items.all().iter().map(|item| item.path.as_str()).collect();
        assert_eq!(paths, ["--v", "inferenceExtension.flags[1]", "$A"]);
    }

    #[test]
    fn other_files_are_refused_with_the_reason() {
        for (text, why) in [
            ("- 1\n", "f:1: values are a map, not a list"),
            (
                "apiVersion: v1\nkind: List\n",
                "f has Kubernetes objects, not values",
            ),
            ("a: [\n", "f:"),
            ("a: 1\n---\nb: 1\n", "f:"),
        ] {
            let said = read([("f", text)]).unwrap_err();
            assert!(said.starts_with(why), "{said}");
        }
    }
}
