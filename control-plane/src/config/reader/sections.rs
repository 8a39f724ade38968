//! The sections of the file except plugins and profiles, read by the table of the file's shape.

use super::{ConfigReader, below, unknown};
use crate::config::ItemStatus;
use crate::config::schema::{API_VERSIONS, ConfigDialect, SchemaField, SchemaShape};
use crate::config::yaml::{YamlKey, YamlNode, YamlValue};

impl ConfigReader {
    /// Checks a node against its shape, and reports the answer of every field that has one in the
    /// table.
    pub(super) fn shaped(&mut self, node: &YamlNode, path: &str, shape: &SchemaShape) {
        match (shape, &node.value) {
            (SchemaShape::Own, _)
            | (_, YamlValue::Null)
            | (SchemaShape::Flag, YamlValue::Flag(_))
            | (SchemaShape::Number, YamlValue::Number(_)) => {}
            (SchemaShape::Integer, YamlValue::Number(number)) if number.fract() == 0.0 => {}
            (SchemaShape::Quantity, YamlValue::Number(number)) if *number >= 0.0 => {}
            (SchemaShape::Quantity, YamlValue::Text(text))
                if SchemaShape::quantity(text).is_some() => {}
            (SchemaShape::Duration, YamlValue::Text(text))
                if SchemaShape::duration_ms(text).is_some() => {}
            (SchemaShape::Reference(role), YamlValue::Text(_)) => {
                drop(self.reference(node, path, &[*role]));
            }
            (SchemaShape::List(of), YamlValue::List(nodes)) => {
                nodes
                    .iter()
                    .enumerate()
                    .for_each(|(i, node)| self.shaped(node, &format!("{path}[{i}]"), of));
            }
            (SchemaShape::Map(fields), YamlValue::Map(entries)) => {
                self.fields(node.line, entries, path, fields);
            }
            (_, value) => self.problem(
                path,
                node.line,
                format!("must be {}, not {}", expected(shape), shown(value)),
            ),
        }
    }

    fn fields(
        &mut self,
        line: u64,
        entries: &[(YamlKey, YamlNode)],
        path: &str,
        fields: &'static [SchemaField],
    ) {
        for (key, node) in entries {
            let path = below(path, &key.name);
            match fields.iter().find(|field| field.name == key.name) {
                None => {
                    let ours = fields.iter().filter(|field| {
                        field
                            .only
                            .is_none_or(|(dialect, _)| dialect == self.dialect)
                    });
                    self.problem(
                        &path,
                        key.line,
                        unknown("field", &key.name, ours.map(|field| field.name)),
                    );
                }
                Some(SchemaField {
                    only: Some((dialect, elsewhere)),
                    ..
                }) if *dialect != self.dialect => {
                    let instead = if elsewhere.is_empty() {
                        String::new()
                    } else {
                        format!("; instead: {elsewhere}")
                    };
                    let message = format!(
                        "is a field of {}, not of {}{instead}",
                        version(*dialect),
                        version(self.dialect)
                    );
                    self.problem(&path, key.line, message);
                }
                Some(field) => {
                    self.shaped(node, &path, &field.shape);
                    if let Some(fate) = field.fate {
                        self.fate(&path, key.line, fate);
                    }
                }
            }
        }
        let given = |field: &&SchemaField| {
            entries
                .iter()
                .any(|(key, node)| key.name == field.name && node.value != YamlValue::Null)
        };
        for missing in fields
            .iter()
            .filter(|field| field.required && !given(field))
        {
            self.problem(path, line, format!("has no {}", missing.name));
        }
    }

    /// Returns the name of the saturation detector; empty for the default. The newer of the two
    /// places wins, as in llm-d.
    pub(super) fn saturation_detector(&mut self, root: &YamlNode) -> String {
        let places = [
            Some(&["flowControl", "saturationDetector"][..]),
            (self.dialect == ConfigDialect::V1Alpha1).then_some(&["saturationDetector"]),
        ];
        let mut chosen: Option<(String, String)> = None;
        for place in places.into_iter().flatten() {
            let Some(section) = root.at(place) else {
                continue;
            };
            let name = match section.get("pluginRef").map(|node| &node.value) {
                Some(YamlValue::Text(name)) => name.clone(),
                _ => String::new(),
            };
            let path = place.join(".");
            match &chosen {
                Some((first, _)) => {
                    let reason = format!("{first} counts");
                    self.item(&path, section.line, ItemStatus::NoEffect, reason);
                }
                None => {
                    let decides = if self.flow_control {
                        "decides when requests wait"
                    } else {
                        "decides when requests of negative priority are refused"
                    };
                    self.item(&path, section.line, ItemStatus::Implemented, decides);
                    chosen = Some((path, name));
                }
            }
        }
        let is_used =
            |name: &String| self.flow_control || self.plugins.iter().any(|p| p.name == *name);
        chosen
            .map(|(_, name)| name)
            .filter(is_used)
            .unwrap_or_default()
    }
}

impl ConfigReader {
    /// Returns the names of the parsers that apply; empty for all. The newer of the two places
    /// wins, as in llm-d.
    pub(super) fn parsers(&mut self, root: &YamlNode) -> Vec<String> {
        const PLACES: [&str; 2] = ["requestHandler.parsers", "parser"];
        let listed = root
            .at(&["requestHandler", "parsers"])
            .map(|node| (node.line, self.list(node, PLACES[0])));
        let single = root
            .get("parser")
            .filter(|_| self.dialect == ConfigDialect::V1Alpha1);
        let (path, nodes) = match (listed, single) {
            (Some((_, nodes)), older) if !nodes.is_empty() => {
                if let Some(older) = older {
                    self.item(
                        PLACES[1],
                        older.line,
                        ItemStatus::NoEffect,
                        format!("{} counts", PLACES[0]),
                    );
                }
                (PLACES[0], nodes)
            }
            (_, Some(node)) => (PLACES[1], std::slice::from_ref(node)),
            (_, None) => return Vec::new(),
        };
        let line = nodes.first().map_or(0, |node| node.line);
        self.item(
            path,
            line,
            ItemStatus::Implemented,
            "requests of these APIs are parsed; others pass through unread",
        );
        let name = |node: &YamlNode| match node.get("pluginRef").map(|name| &name.value) {
            Some(YamlValue::Text(name)) => Some(name.clone()),
            _ => None,
        };
        nodes.iter().filter_map(name).collect()
    }
}

fn version(dialect: ConfigDialect) -> &'static str {
    API_VERSIONS
        .iter()
        .find(|(_, other)| *other == dialect)
        .map_or("", |(version, _)| version)
}

fn expected(shape: &SchemaShape) -> &'static str {
    match shape {
        SchemaShape::Own => "anything",
        SchemaShape::Flag => "true or false",
        SchemaShape::Integer => "a whole number",
        SchemaShape::Number => "a number",
        SchemaShape::Quantity => "a quantity such as 5000, 1k or 10Gi",
        SchemaShape::Duration => "a time such as \"60s\" or \"1m30s\"",
        SchemaShape::Reference(_) => "the name of a plugin",
        SchemaShape::List(_) => "a list",
        SchemaShape::Map(_) => "a map",
    }
}

fn shown(value: &YamlValue) -> String {
    match value {
        YamlValue::Text(text) => format!("{text:?}"),
        YamlValue::Number(number) => number.to_string(),
        other => other.kind().to_owned(),
    }
}
