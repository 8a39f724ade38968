//! What stands beside plugins and profiles, by the table of the file's shape.

use super::{Reader, below, unknown};
use crate::config::Status;
use crate::config::schema::{API_VERSIONS, Dialect, Field, Shape};
use crate::config::yaml::{Key, Node, Value};

impl Reader {
    /// Checks a node against its shape, and answers for every field that the table has an answer for.
    pub(super) fn shaped(&mut self, node: &Node, path: &str, shape: &Shape) {
        match (shape, &node.value) {
            (Shape::Own, _) | (_, Value::Null) | (Shape::Flag, Value::Flag(_)) => {}
            (Shape::Integer, Value::Number(number)) if number.fract() == 0.0 => {}
            (Shape::Quantity, Value::Number(number)) if *number >= 0.0 => {}
            (Shape::Quantity, Value::Text(text)) if Shape::is_quantity(text) => {}
            (Shape::Duration, Value::Text(text)) if Shape::is_duration(text) => {}
            (Shape::Reference(role), Value::Text(_)) => drop(self.reference(node, path, &[*role])),
            (Shape::List(of), Value::List(nodes)) => {
                nodes.iter().enumerate().for_each(|(i, node)| self.shaped(node, &format!("{path}[{i}]"), of));
            }
            (Shape::Map(fields), Value::Map(entries)) => self.fields(node.line, entries, path, fields),
            (_, value) => self.problem(path, node.line, format!("must be {}, not {}", expected(shape), told(value))),
        }
    }

    fn fields(&mut self, line: u64, entries: &[(Key, Node)], path: &str, fields: &'static [Field]) {
        for (key, node) in entries {
            let path = below(path, &key.name);
            match fields.iter().find(|field| field.name == key.name) {
                None => {
                    let ours = fields.iter().filter(|field| field.only.is_none_or(|(dialect, _)| dialect == self.dialect));
                    self.problem(&path, key.line, unknown("field", &key.name, ours.map(|field| field.name)));
                }
                Some(Field { only: Some((dialect, elsewhere)), .. }) if *dialect != self.dialect => {
                    let instead = if elsewhere.is_empty() { String::new() } else { format!("; instead: {elsewhere}") };
                    let message = format!("is a field of {}, not of {}{instead}", version(*dialect), version(self.dialect));
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
        let given = |field: &&Field| entries.iter().any(|(key, node)| key.name == field.name && node.value != Value::Null);
        for missing in fields.iter().filter(|field| field.required && !given(field)) {
            self.problem(path, line, format!("has no {}", missing.name));
        }
    }

    /// The plugin that says whether the pool is saturated; empty for the default. The newer of the two places counts, as at the reference.
    pub(super) fn saturation_detector(&mut self, root: &Node) -> String {
        let places =
            [Some(&["flowControl", "saturationDetector"][..]), (self.dialect == Dialect::V1Alpha1).then_some(&["saturationDetector"])];
        let mut chosen: Option<(String, String)> = None;
        for place in places.into_iter().flatten() {
            let Some(section) = root.at(place) else { continue };
            let name = match section.get("pluginRef").map(|node| &node.value) {
                Some(Value::Text(name)) => name.clone(),
                _ => String::new(),
            };
            let path = place.join(".");
            match &chosen {
                Some((first, _)) => {
                    let reason = format!("{first} counts");
                    self.item(&path, section.line, Status::NoEffect, reason);
                }
                None => {
                    self.item(&path, section.line, Status::Implemented, "says when requests of negative priority are refused");
                    chosen = Some((path, name));
                }
            }
        }
        chosen.map(|(_, name)| name).filter(|name| self.plugins.iter().any(|p| p.name == *name)).unwrap_or_default()
    }
}

impl Reader {
    /// Names of the parsers whose requests are read; none for all. The newer of the two places counts, as at the reference.
    pub(super) fn parsers(&mut self, root: &Node) -> Vec<String> {
        const PLACES: [&str; 2] = ["requestHandler.parsers", "parser"];
        let listed = root.at(&["requestHandler", "parsers"]).map(|node| (node.line, self.list(node, PLACES[0])));
        let single = root.get("parser").filter(|_| self.dialect == Dialect::V1Alpha1);
        let (path, nodes) = match (listed, single) {
            (Some((_, nodes)), older) if !nodes.is_empty() => {
                if let Some(older) = older {
                    self.item(PLACES[1], older.line, Status::NoEffect, format!("{} counts", PLACES[0]));
                }
                (PLACES[0], nodes)
            }
            (_, Some(node)) => (PLACES[1], std::slice::from_ref(node)),
            (_, None) => return Vec::new(),
        };
        let line = nodes.first().map_or(0, |node| node.line);
        self.item(path, line, Status::Implemented, "requests of these APIs are read; others go as they are");
        let name = |node: &Node| match node.get("pluginRef").map(|name| &name.value) {
            Some(Value::Text(name)) => Some(name.clone()),
            _ => None,
        };
        nodes.iter().filter_map(name).collect()
    }
}

fn version(dialect: Dialect) -> &'static str {
    API_VERSIONS.iter().find(|(_, other)| *other == dialect).map_or("", |(version, _)| version)
}

fn expected(shape: &Shape) -> &'static str {
    match shape {
        Shape::Own => "anything",
        Shape::Flag => "true or false",
        Shape::Integer => "a whole number",
        Shape::Quantity => "a quantity such as 5000, 1k or 10Gi",
        Shape::Duration => "a time such as \"60s\" or \"1m30s\"",
        Shape::Reference(_) => "the name of a plugin",
        Shape::List(_) => "a list",
        Shape::Map(_) => "a map",
    }
}

fn told(value: &Value) -> String {
    match value {
        Value::Text(text) => format!("{text:?}"),
        Value::Number(number) => number.to_string(),
        other => other.kind().to_owned(),
    }
}
