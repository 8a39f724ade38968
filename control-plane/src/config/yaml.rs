//! YAML as a tree with the line of every node, so that messages can name the line.

use std::fmt::{self, Write as _};

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_saphyr::options::NonFiniteFloatPolicy;
use serde_saphyr::{Spanned, UserMessageFormatter};

use super::pasted;

/// A node of the tree.
#[derive(Clone, Debug, PartialEq)]
pub struct YamlNode {
    /// The line number of the node. The first line of the file is 1.
    pub line: u64,
    pub value: YamlValue,
}

/// A value in a file.
#[derive(Clone, Debug, PartialEq)]
pub enum YamlValue {
    /// An empty value.
    Null,
    Flag(bool),
    Number(f64),
    Text(String),
    List(Vec<YamlNode>),
    /// Keys with their lines, and values, in the order of the file. No key occurs twice.
    Map(Vec<(YamlKey, YamlNode)>),
}

#[derive(Clone, Debug, PartialEq)]
pub struct YamlKey {
    /// The line number of the key. The first line of the file is 1.
    pub line: u64,
    pub name: String,
}

/// Reads a file with one document. Further documents must be empty, as after the `---` at the end
/// of templates.
///
/// # Errors
/// Returns the line where the text stops being valid YAML, and the reason. For a second document,
/// returns the line where it starts.
pub fn parse(text: &str) -> Result<YamlNode, (u64, String)> {
    let mut documents = parse_all(text)?.into_iter();
    match (documents.next(), documents.next()) {
        (_, Some(second)) => Err((
            second.line,
            "a second document begins; the file holds one".to_owned(),
        )),
        (Some(only), None) => Ok(only),
        (None, None) => Ok(YamlNode {
            line: 0,
            value: YamlValue::Null,
        }),
    }
}

/// Reads any number of documents and drops empty ones.
///
/// # Errors
/// Fails as [`parse`] does.
pub fn parse_all(text: &str) -> Result<Vec<YamlNode>, (u64, String)> {
    let spanned: Vec<Spanned<YamlValue>> =
        serde_saphyr::from_multiple_with_options(text, options()).map_err(|e| problem(&e, text))?;
    Ok(spanned
        .into_iter()
        .map(node)
        .filter(|node| node.value != YamlValue::Null)
        .collect())
}

/// The maximum number of nodes that aliases may repeat. Real files repeat some hundred nodes. A
/// hostile file of 445 bytes repeats a million nodes, which takes 0.3 s.
const REPEATED_NODES_MAX: usize = 10_000;

/// Returns options that allow numbers that are not finite. The reader of each value refuses such
/// numbers; a refusal by the parser would hide all other errors.
fn options() -> serde_saphyr::Options {
    serde_saphyr::options! {
        non_finite_float_policy: NonFiniteFloatPolicy::PassThrough,
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: REPEATED_NODES_MAX },
    }
}

fn problem(error: &serde_saphyr::Error, text: &str) -> (u64, String) {
    let mut message = error
        .without_snippet()
        .render_with_formatter(&UserMessageFormatter);
    if let Some(hint) = pasted::hint(text) {
        let _ = write!(message, "; {hint}"); // writing to a String cannot fail
    }
    (error.location().map_or(0, |l| l.line()), message)
}

fn node(spanned: Spanned<YamlValue>) -> YamlNode {
    YamlNode {
        line: spanned.referenced.line(),
        value: spanned.value,
    }
}

// === impl YamlNode ===

impl YamlNode {
    /// Returns the entries of a map; empty for other values.
    #[must_use]
    pub fn entries(&self) -> &[(YamlKey, YamlNode)] {
        if let YamlValue::Map(entries) = &self.value {
            entries
        } else {
            &[]
        }
    }

    #[must_use]
    pub fn text(&self) -> Option<&str> {
        match &self.value {
            YamlValue::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the value of a key; `None` if the value is empty, as usual for configuration files.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Self> {
        let found = self
            .entries()
            .iter()
            .find(|(key, _)| key.name == name)
            .map(|(_, node)| node);
        found.filter(|node| node.value != YamlValue::Null)
    }

    /// Returns the value of a key, to change it.
    pub fn value_mut(&mut self, name: &str) -> Option<&mut YamlValue> {
        let YamlValue::Map(entries) = &mut self.value else {
            return None;
        };
        entries
            .iter_mut()
            .find(|(key, _)| key.name == name)
            .map(|(_, node)| &mut node.value)
    }

    /// Returns the node at the end of this path of keys.
    #[must_use]
    pub fn at(&self, way: &[&str]) -> Option<&Self> {
        way.iter().try_fold(self, |node, name| node.get(name))
    }

    /// Returns the line of the key or list item at the end of a path such as
    /// `conditions[1].metric`. If the path does not exist, returns the line of its deepest existing
    /// step.
    #[must_use]
    pub fn line_of(&self, way: &str) -> Option<u64> {
        let mut node = self;
        let mut line = None;
        for step in way.split(['.', '[']).map(|step| step.trim_end_matches(']')) {
            let next = match &node.value {
                YamlValue::Map(entries) => entries
                    .iter()
                    .find(|(key, _)| key.name == step)
                    .map(|(key, node)| (key.line, node)),
                YamlValue::List(items) => step
                    .parse()
                    .ok()
                    .and_then(|at: usize| items.get(at))
                    .map(|node| (node.line, node)),
                _ => None,
            };
            let Some((at, found)) = next else { break };
            node = found;
            line = Some(at);
        }
        line
    }
}

// === impl YamlValue ===

impl YamlValue {
    /// Returns the name of the value's type, for messages.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Null => "nothing",
            Self::Flag(_) => "true or false",
            Self::Number(_) => "a number",
            Self::Text(_) => "text",
            Self::List(_) => "a list",
            Self::Map(_) => "a map",
        }
    }

    /// Removes and returns the entry at the end of this path of keys.
    pub fn take(&mut self, way: &[&str]) -> Option<(YamlKey, YamlNode)> {
        let (Self::Map(entries), Some((name, rest))) = (self, way.split_first()) else {
            return None;
        };
        let at = entries.iter().position(|(key, _)| key.name == *name)?;
        if rest.is_empty() {
            Some(entries.remove(at))
        } else {
            entries.get_mut(at)?.1.value.take(rest)
        }
    }

    /// Returns the value as JSON, without the line numbers of its parts.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        match self {
            Self::Null => serde_json::Value::Null,
            Self::Flag(flag) => (*flag).into(),
            Self::Number(number) => (*number).into(),
            Self::Text(text) => text.as_str().into(),
            Self::List(list) => list.iter().map(|n| n.value.to_json()).collect(),
            Self::Map(map) => serde_json::Value::Object(
                map.iter()
                    .map(|(k, n)| (k.name.clone(), n.value.to_json()))
                    .collect(),
            ),
        }
    }
}

impl<'de> Deserialize<'de> for YamlValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(YamlVisitor)
    }
}

struct YamlVisitor;

impl<'de> Visitor<'de> for YamlVisitor {
    type Value = YamlValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any YAML value")
    }

    fn visit_unit<E: Error>(self) -> Result<YamlValue, E> {
        Ok(YamlValue::Null)
    }

    fn visit_none<E: Error>(self) -> Result<YamlValue, E> {
        Ok(YamlValue::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<YamlValue, D::Error> {
        deserializer.deserialize_any(self)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<YamlValue, E> {
        Ok(YamlValue::Flag(value))
    }

    #[expect(
        clippy::cast_precision_loss,
        reason = "no setting is a whole number beyond 2^53"
    )]
    fn visit_i64<E: Error>(self, value: i64) -> Result<YamlValue, E> {
        Ok(YamlValue::Number(value as f64))
    }

    #[expect(
        clippy::cast_precision_loss,
        reason = "no setting is a whole number beyond 2^53"
    )]
    fn visit_u64<E: Error>(self, value: u64) -> Result<YamlValue, E> {
        Ok(YamlValue::Number(value as f64))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<YamlValue, E> {
        Ok(YamlValue::Number(value))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<YamlValue, E> {
        Ok(YamlValue::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<YamlValue, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = seq.next_element::<Spanned<YamlValue>>()? {
            list.push(node(item));
        }
        Ok(YamlValue::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<YamlValue, A::Error> {
        let mut entries = Vec::new();
        while let Some(key) = map.next_key::<Spanned<String>>()? {
            let key = YamlKey {
                line: key.referenced.line(),
                name: key.value,
            };
            entries.push((key, node(map.next_value::<Spanned<YamlValue>>()?)));
        }
        Ok(YamlValue::Map(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_those_of_the_keys_and_the_deepest_that_is_there_counts() {
        let root = parse("a:\n  b:\n  - c: 1\n    d: .nan\n  - {c: 2}\n").unwrap();
        let b = root.at(&["a", "b"]).unwrap();
        assert_eq!(b.line, 3);
        for (way, line) in [
            ("a", Some(1)),
            ("a.b", Some(2)),
            ("a.b[0].d", Some(4)),
            ("a.b[1]", Some(5)),
            ("a.b[7].x", Some(2)),
            ("x", None),
        ] {
            assert_eq!(root.line_of(way), line, "{way}");
        }
        assert!(root.at(&["a", "x"]).is_none() && root.get("b").is_none());
    }

    #[test]
    fn hostile_files_are_refused_and_stop_nothing() {
        let deep = "[".repeat(100_000);
        let nested = format!("{}1{}", "[".repeat(1_000), "]".repeat(1_000));
        let laughs = "a: &a [x,x,x,x,x,x,x,x]\n".to_owned()
            + &(b'b'..=b'j')
                .map(|c| {
                    let before = (c - 1) as char;
                    let c = c as char;
                    format!("{c}: &{c} [{}]\n", vec![format!("*{before}"); 8].join(","))
                })
                .collect::<String>();
        for text in [
            deep.as_str(),
            &nested,
            &laughs,
            "a: 1\na: 2\n",
            "\u{0}",
            "--- 1\n--- 2\n",
            "*x",
            "? [a]\n: b\n",
        ] {
            assert!(parse(text).is_err(), "{:?}", &text[..text.len().min(20)]);
        }
    }
}
