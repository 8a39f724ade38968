//! Reads the sections of a configuration file other than plugins and profiles. A [`SchemaShape`]
//! says which values a field of such a section may have.

use super::ConfigReader;
use crate::config::schema::{API_VERSIONS, ConfigDialect, SchemaField, SchemaShape};
use crate::config::yaml::YamlValue;
use crate::config::{ItemStatus, LocatedNode, unknown};

impl ConfigReader {
    /// Reports a node of the file that is not of the type `shape`, and what the table of its
    /// section says about the fields below it.
    pub(super) fn shaped(&mut self, at: &LocatedNode<'_>, shape: &SchemaShape) {
        match (shape, &at.node.value) {
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
                drop(self.reference(at, &[*role]));
            }
            (SchemaShape::List(of), YamlValue::List(_)) => {
                at.items().for_each(|item| self.shaped(&item, of));
            }
            (SchemaShape::Map(fields), YamlValue::Map(_)) => self.fields(at, fields),
            (_, value) => {
                let message = format!("must be {}, not {}", expected(shape), described(value));
                self.report.wrong(at, message);
            }
        }
    }

    fn fields(&mut self, at: &LocatedNode<'_>, fields: &'static [SchemaField]) {
        for (key, entry) in at.entries() {
            let message = match fields.iter().find(|field| field.name == key.name) {
                None => {
                    let ours = fields.iter().filter(|field| {
                        field
                            .only
                            .is_none_or(|(dialect, _)| dialect == self.dialect)
                    });
                    unknown("field", &key.name, ours.map(|field| field.name))
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
                    format!(
                        "is a field of {}, not of {}{instead}",
                        version(*dialect),
                        version(self.dialect)
                    )
                }
                Some(field) => {
                    self.shaped(&entry, &field.shape);
                    if let Some(fate) = field.fate {
                        self.fate(&entry.path, key.line, fate);
                    }
                    continue;
                }
            };
            self.report.problem(&entry.path, key.line, message);
        }
        for field in fields.iter().filter(|field| field.required) {
            self.report.required(at, field.name);
        }
    }

    /// Returns the name of the saturation detector. An empty name means the default. If both places
    /// in the file have a detector, the newer place is used, as in llm-d.
    pub(super) fn saturation_detector(&mut self, root: &LocatedNode<'_>) -> String {
        let older = self.older(root, "saturationDetector");
        let mut places = root
            .at(&["flowControl", "saturationDetector"])
            .into_iter()
            .chain(older);
        let Some(section) = places.next() else {
            return String::new();
        };
        let decides = if self.flow_control {
            "decides when requests wait"
        } else {
            "decides when requests of negative priority are refused"
        };
        self.answer(&section, ItemStatus::Implemented, decides);
        for other in places {
            let reason = format!("{} is used instead", section.path);
            self.answer(&other, ItemStatus::NoEffect, reason);
        }
        let is_used =
            |name: &String| self.flow_control || self.plugins.iter().any(|p| p.name == *name);
        plugin_ref(&section).filter(is_used).unwrap_or_default()
    }

    /// Returns the names of the parsers that are used. An empty list means all parsers. If both
    /// places in the file name parsers, the newer place is used, as in llm-d.
    pub(super) fn parsers(&mut self, root: &LocatedNode<'_>) -> Vec<String> {
        let section = root.at(&["requestHandler", "parsers"]);
        let mut parsers = self.report.list(section.as_ref());
        let older = self.older(root, "parser");
        let place = match (section.filter(|_| !parsers.is_empty()), older) {
            (None, None) => return Vec::new(),
            (None, Some(older)) => {
                parsers = vec![older.clone()];
                older.path
            }
            (Some(section), older) => {
                if let Some(older) = older {
                    let reason = format!("{} is used instead", section.path);
                    self.answer(&older, ItemStatus::NoEffect, reason);
                }
                section.path
            }
        };
        self.report.item(
            &place,
            parsers.first().map_or(0, |parser| parser.node.line),
            ItemStatus::Implemented,
            "requests of these APIs are parsed; others pass through unread",
        );
        parsers.iter().filter_map(plugin_ref).collect()
    }

    /// Returns a section that exists only in the older dialect.
    fn older<'n>(&self, root: &LocatedNode<'n>, name: &str) -> Option<LocatedNode<'n>> {
        root.get(name)
            .filter(|_| self.dialect == ConfigDialect::V1Alpha1)
    }
}

fn plugin_ref(at: &LocatedNode<'_>) -> Option<String> {
    Some(at.get("pluginRef")?.node.text()?.to_owned())
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

fn described(value: &YamlValue) -> String {
    match value {
        YamlValue::Text(text) => format!("{text:?}"),
        YamlValue::Number(number) => number.to_string(),
        other => other.kind().to_owned(),
    }
}
