//! Reads a configuration into a tree, with the JSON reader for request bodies. `serde_json` would
//! make the module 10 KB larger, which the module's size limit does not allow.

use exchange::json::{JsonError, JsonKind, JsonReader};

/// The maximum depth of nested lists and objects. The configuration has a depth of three.
const DEPTH_MAX: u32 = 8;

#[derive(Clone, Debug, PartialEq)]
pub enum ConfigValue {
    /// A whole number that is 0 or more.
    Number(u64),
    Text(String),
    Flag(bool),
    List(Vec<ConfigValue>),
    Object(ConfigFields),
    /// A value of another kind: null, another number, or a value that is nested too deep.
    Other,
}

/// The members of an object, by name. If a name occurs twice, the last member is used.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ConfigFields(Vec<(String, ConfigValue)>);

/// Reads `json`, which must be exactly one value.
///
/// # Errors
/// Returns [`JsonError`] if the text is not JSON, or if other text follows.
pub fn parse(json: &[u8]) -> Result<ConfigValue, JsonError> {
    let mut reader = JsonReader::new(json);
    let value = read(&mut reader, json, 0)?;
    reader.end()?;
    Ok(value)
}

fn read(reader: &mut JsonReader<'_>, json: &[u8], depth: u32) -> Result<ConfigValue, JsonError> {
    match reader.peek()? {
        JsonKind::String => Ok(reader.string()?.map_or(ConfigValue::Other, |text| {
            ConfigValue::Text(text.text().into_owned())
        })),
        JsonKind::Boolean => Ok(reader
            .boolean()?
            .map_or(ConfigValue::Other, ConfigValue::Flag)),
        JsonKind::Array if depth < DEPTH_MAX => {
            let mut items = Vec::new();
            reader.elements(|reader| {
                read(reader, json, depth.saturating_add(1)).map(|item| items.push(item))
            })?;
            Ok(ConfigValue::List(items))
        }
        JsonKind::Object if depth < DEPTH_MAX => {
            let mut fields = ConfigFields::default();
            reader.members(|reader, name| {
                read(reader, json, depth.saturating_add(1))
                    .map(|value| fields.put(name.text().into_owned(), value))
            })?;
            Ok(ConfigValue::Object(fields))
        }
        _ => {
            let text = json
                .get(reader.skip()?)
                .and_then(|bytes| std::str::from_utf8(bytes).ok());
            Ok(text
                .and_then(|text| text.parse().ok())
                .map_or(ConfigValue::Other, ConfigValue::Number))
        }
    }
}

// === impl ConfigFields ===

impl ConfigFields {
    pub fn remove(&mut self, name: &str) -> Option<ConfigValue> {
        let position = self.0.iter().position(|(known, _)| known == name)?;
        Some(self.0.swap_remove(position).1)
    }

    /// Returns the name of one member that was not removed.
    #[must_use]
    pub fn left(&self) -> Option<&str> {
        self.0.iter().map(|(name, _)| name.as_str()).min()
    }

    fn put(&mut self, name: String, value: ConfigValue) {
        let _ = self.remove(&name);
        self.0.push((name, value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_a_configuration_has() {
        let Ok(ConfigValue::Object(mut fields)) = parse(
            br#" {"n": 7, "t": "a\u0062", "f": true, "l": [1, -1, 1.5, null], "n": 8, "o": {}} "#,
        ) else {
            panic!()
        };
        assert_eq!(fields.left(), Some("f"));
        assert_eq!(
            fields.remove("n"),
            Some(ConfigValue::Number(8)),
            "the last of two counts"
        );
        assert_eq!(fields.remove("t"), Some(ConfigValue::Text("ab".into())));
        assert_eq!(fields.remove("f"), Some(ConfigValue::Flag(true)));
        assert_eq!(
            fields.remove("l"),
            Some(ConfigValue::List(vec![
                ConfigValue::Number(1),
                ConfigValue::Other,
                ConfigValue::Other,
                ConfigValue::Other
            ]))
        );
        assert_eq!(
            fields.remove("o"),
            Some(ConfigValue::Object(ConfigFields::default()))
        );
        assert_eq!((fields.remove("x"), fields.left()), (None, None));
    }

    #[test]
    fn refuses_what_is_no_json_and_stops_at_its_depth() {
        for bad in ["", "{", "{} x", "[1,]", "'a'"] {
            assert!(parse(bad.as_bytes()).is_err(), "{bad}");
        }
        let deep =
            |depth: usize| parse(format!("{}{}", "[".repeat(depth), "]".repeat(depth)).as_bytes());
        assert!(matches!(deep(100), Ok(ConfigValue::List(_))));
        assert!(deep(100_000).is_err());
    }
}
